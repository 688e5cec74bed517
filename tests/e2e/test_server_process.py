"""The server as a process: its numbers, its limits under load, its start and its end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.server import version
from kvstore_api.limits import MAX_CHAIN_BLOCKS, MAX_FRAME_DATA_BYTES
from kvstore_api.v1 import admin_pb2, types_pb2
from kvstore_api.v1 import block_store_pb2 as pb
from serving import RunningServer, run_server, running_server, start_server
from third_party import (
    REFERENCE_BLOCK_BYTES,
    REJECTED,
    STORED,
    UNKNOWN,
    WAIT_S,
    Client,
    block_of,
    connected,
    frame_of,
    get_request,
    header,
    make_chain,
    make_spec,
    put_messages,
    refused,
    scrape,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Client]:
    with connected(server) as client:
        yield client


# Numbers


def test_the_hit_rate_is_counted_at_match_in_tokens(tmp_path):
    with running_server(tmp_path / "data") as server, connected(server) as client:
        namespace = client.register(make_spec(1000))
        chain = make_chain("hit rate", 100)
        assert client.admin.GetStatus(admin_pb2.GetStatusRequest()).hit_rate == 0
        client.put_blocks(namespace, chain[:25], 1000)
        assert client.match(namespace, chain).hit_length_blocks == 25
        client.match(namespace, chain[:10], peek=True)
        status = client.admin.GetStatus(admin_pb2.GetStatusRequest())
        assert status.hit_rate == 0.25
        counters = {counter.name: counter.value for counter in status.counters}
        assert (counters["asked_tokens"], counters["hit_tokens"], counters["matches"]) == (12_800, 3_200, 1)
        samples = scrape(server)
        assert samples["kvstore_asked_tokens_total"] == 12_800
        assert samples["kvstore_hit_tokens_total"] == 3_200


def test_metrics_move_by_exact_amounts_and_not_while_idle(tmp_path):
    with running_server(tmp_path / "data") as server, connected(server) as client:
        namespace = client.register(make_spec(1000))
        chain = make_chain("metrics", 8)
        before = scrape(server)
        assert before["kvstore_serving"] == 1
        assert before["kvstore_capacity_bytes"] == 10 << 30
        moved = moves(before, scrape(server))
        assert moved == {}, "metrics moved while nothing happened"

        client.put(header(namespace, chain), frame_of(chain, range(6), 1000))
        client.put(header(namespace, chain[:6]), frame_of(chain, range(6), 1000, checksums=[1, 2, 3, 4, 5, 6]))
        client.put(header(namespace, chain[:2]), frame_of(chain, range(2), 1000))
        client.match(namespace, chain)
        client.get(namespace, chain)
        with contextlib.suppress(grpc.RpcError):
            client.match(UNKNOWN, chain)
        client.blocks.DeleteBlocks(
            pb.DeleteBlocksRequest(namespace=namespace, chain=b"".join(chain), first_block=5, block_count=1)
        )
        moved = moves(before, scrape(server))
        labels = f'{{namespace="{namespace.hex()[:16]}",traffic_class="agent"}}'
        expected = {
            "kvstore_blocks_stored_total": 6,
            "kvstore_bytes_stored_total": 6000,
            "kvstore_blocks_exist_total": 2,
            "kvstore_blocks_rejected_total": 6,
            'kvstore_put_rejected_total{reason="MISSING"}': 2,
            'kvstore_put_rejected_total{reason="BAD_CHECKSUM"}': 6,
            "kvstore_matches_total": 1,
            "kvstore_asked_blocks_total": 8,
            "kvstore_hit_blocks_total": 6,
            "kvstore_asked_tokens_total": 1024,
            "kvstore_hit_tokens_total": 768,
            f"kvstore_class_asked_tokens_total{labels}": 1024,
            f"kvstore_class_hit_tokens_total{labels}": 768,
            f"kvstore_class_missed_tokens_total{labels}": 256,
            "kvstore_blocks_read_total": 6,
            "kvstore_bytes_read_total": 6000,
            "kvstore_blocks_missed_total": 2,
            "kvstore_blocks_deleted_total": 1,
            'kvstore_rpc_errors_total{method="MatchPrefix",reason="NAMESPACE_NOT_FOUND"}': 1,
            'kvstore_rpc_duration_seconds_count{method="PutBlocks"}': 3,
            'kvstore_rpc_duration_seconds_count{method="MatchPrefix"}': 2,
            'kvstore_rpc_duration_seconds_count{method="GetBlocks"}': 1,
            'kvstore_rpc_duration_seconds_count{method="DeleteBlocks"}': 1,
            "kvstore_live_blocks": 5,
            "kvstore_live_bytes": 5000,
            'kvstore_class_live_blocks{traffic_class="agent"}': 5,
            'kvstore_class_live_bytes{traffic_class="agent"}': 5000,
        }
        assert moved.pop("kvstore_bytes_written_total") >= 6000
        unmeasured = r"kvstore_(rpc_duration_seconds_(bucket|sum)|used_bytes|segments\b)"
        assert {name: by for name, by in moved.items() if not re.match(unmeasured, name)} == expected


def moves(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    changes = {name: value - before.get(name, 0) for name, value in after.items()}
    return {name: change for name, change in changes.items() if change}


# Cancelled calls, full pools


def test_a_put_cancelled_midway_leaves_nothing_half_written(client):
    size = 3 * MAX_FRAME_DATA_BYTES
    namespace = client.register(make_spec(size, "cancelled"))
    chain = make_chain("cancelled", 2)
    messages = list(put_messages(namespace, chain, size))
    more: queue.Queue[pb.PutBlocksRequest | None] = queue.Queue()
    for message_ in messages[:3]:  # the header and two thirds of block 0
        more.put(message_)
    call = client.blocks.PutBlocks.future(iter(more.get, None))
    until(more.empty)
    call.cancel()
    more.put(None)
    assert client.match(namespace, chain).hit_length_blocks == 0
    assert {result.status for result in client.put_blocks(namespace, chain, size)} == {STORED}
    assert client.get(namespace, chain)[0] == {block: block_of(chain[block], size) for block in range(2)}


def test_cancelled_gets_and_puts_leave_no_places_threads_or_files_behind(tmp_path):
    with running_server(tmp_path / "data") as server, connected(server) as client:
        namespace = client.register(make_spec(REFERENCE_BLOCK_BYTES))
        chain = make_chain("leaks", 200)
        client.put_blocks(namespace, chain, REFERENCE_BLOCK_BYTES)

        def cancel_some(count: int) -> None:
            for number in range(count):
                stream = client.blocks.GetBlocks(get_request(namespace, chain))
                if number % 2:
                    next(stream)
                stream.cancel()
                put = client.blocks.PutBlocks.future(iter(list(put_messages(namespace, chain[:9], 1000))))
                put.cancel()
            until(lambda: all(value == 0 for name, value in scrape(server).items() if "pool_pending{" in name))
            until(lambda: all(value == 0 for name, value in scrape(server).items() if "rpcs_running" in name))

        cancel_some(20)
        files, threads = len(os.listdir(f"/proc/{server.pid}/fd")), len(os.listdir(f"/proc/{server.pid}/task"))
        cancel_some(100)
        until(lambda: len(os.listdir(f"/proc/{server.pid}/fd")) <= files + 2)
        until(lambda: len(os.listdir(f"/proc/{server.pid}/task")) <= threads + 4)
        assert len(client.get(namespace, chain)[0]) == 200
        assert "call failed" not in server.log()


@pytest.mark.parametrize("leave", ["cancel", "disconnect"])
def test_who_leaves_in_the_middle_of_anything_leaves_nothing_behind(tmp_path, leave):
    """After a match, in the middle of a get, in the middle of a put, 1,000 times in all; and nobody asks for anything later."""
    config = tmp_path / "kvstore.toml"
    one_thread_each = (
        "[server]\nread_threads = 1\nwrite_threads = 1\nmatch_threads = 1\n"  # they are made when first needed
    )
    config.write_text(one_thread_each + "[store]\nlease_s = 2.0\nlease_max_s = 2.0\n")
    with running_server(tmp_path / "data", "--config", str(config)) as server:
        with connected(server) as client:
            namespace = client.register(make_spec(REFERENCE_BLOCK_BYTES))
            large = client.register(make_spec(3 * MAX_FRAME_DATA_BYTES))
            chain, half_put = make_chain("leavers", 40), make_chain("half a put", 1)
            client.put_blocks(namespace, chain, REFERENCE_BLOCK_BYTES)
        two_thirds = list(put_messages(large, half_put, 3 * MAX_FRAME_DATA_BYTES))[:3]

        def leave_often(times: int) -> None:
            for number in range(times):
                with connected(server) as client:
                    never = threading.Event()
                    calls = []
                    if number % 3 == 0:
                        assert client.match(namespace, chain).lease
                    elif number % 3 == 1:
                        calls.append(client.blocks.GetBlocks(get_request(namespace, chain)))
                        next(calls[0])
                    else:
                        sent = threading.Event()
                        calls.append(client.blocks.PutBlocks.future(stalled(two_thirds, sent, never)))
                        assert sent.wait(WAIT_S)
                    for call in calls if leave == "cancel" else ():
                        call.cancel()
                never.set()

        def at_rest() -> bool:
            names = ("pool_pending{", "rpcs_running{")
            return not any(value for name, value in scrape(server).items() if any(part in name for part in names))

        leave_often(60)
        until(at_rest)
        files, threads, held_bytes = open_files(server), thread_count(server), resident_bytes(server.pid)
        leave_often(500)
        until(at_rest)
        until(lambda: open_files(server) <= files)
        until(lambda: thread_count(server) <= threads)
        assert resident_bytes(server.pid) < held_bytes + (48 << 20)
        with connected(server) as client:
            assert client.match(large, half_put).hit_length_blocks == 0
            assert client.admin.Evict(admin_pb2.EvictRequest(traffic_class="agent")).blocks == 40
        # From here on nobody asks for anything.
        until(lambda: not list(tmp_path.rglob("*.seg")))
        until(lambda: open_files(server) < files)
        assert "call failed" not in server.log()


def stalled(
    messages: Iterable[pb.PutBlocksRequest], sent: threading.Event, never: threading.Event
) -> Iterator[pb.PutBlocksRequest]:
    yield from messages
    sent.set()
    never.wait(WAIT_S)


def open_files(server: RunningServer) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def thread_count(server: RunningServer) -> int:
    """The server's own threads; gRPC's come and go as it likes."""
    names = [path.read_text() for path in Path(f"/proc/{server.pid}/task").glob("*/comm")]
    return sum(not name.startswith(("event_engine", "grpc", "lifeguard")) for name in names)


def resident_bytes(pid: int) -> int:
    (line,) = re.findall(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(line) * 1024


def test_sizes_that_are_only_announced_take_no_memory(tmp_path):
    with running_server(tmp_path / "data") as server, connected(server) as client:
        chain = make_chain("announced", 1)
        large, small = client.register(make_spec(64 << 20)), client.register(make_spec(1000))
        state = pb.PutStateHeader(namespace=small, prefix_hash=chain[0], name="swa", size_bytes=64 << 20)
        part = pb.PutBlocksRequest(blocks=[0], checksums=[1], sizes=[64 << 20], data=b"x")
        before_bytes = resident_bytes(server.pid)
        hold = threading.Event()

        def kept_open(*messages: object) -> Iterator[object]:
            yield from messages
            hold.wait(WAIT_S)

        calls = [
            call
            for _ in range(8)
            for call in (
                client.blocks.PutBlocks.future(kept_open(header(large, chain), part)),
                client.blocks.PutBlocks.future(kept_open(header(small, chain), part)),
                client.blocks.PutState.future(
                    kept_open(pb.PutStateRequest(header=state), pb.PutStateRequest(data=b"x"))
                ),
            )
        ]
        until(lambda: scrape(server)['kvstore_pool_pending{pool="write"}'] == len(calls))
        # The first part of each is in once the server has answered calls that came after it.
        assert client.put_blocks(small, chain, 1000)[0].status == STORED
        grown_bytes = resident_bytes(server.pid) - before_bytes
        hold.set()
        for call in calls:
            assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert grown_bytes < 256 << 20


def test_a_small_block_in_a_large_message_does_not_keep_the_message(tmp_path):
    with running_server(tmp_path / "data") as server, connected(server) as client:
        namespace = client.register(make_spec(1))
        chain = make_chain("small in large", 600)
        before_bytes = resident_bytes(server.pid)

        def messages() -> Iterator[pb.PutBlocksRequest]:
            yield header(namespace, chain)
            for block in range(0, 600, 2):
                good = frame_of(chain, [block], 1)
                yield pb.PutBlocksRequest(
                    blocks=[block, block + 1],
                    checksums=[good.checksums[0], 1],
                    sizes=[1, MAX_FRAME_DATA_BYTES - 1],
                    data=good.data + bytes(MAX_FRAME_DATA_BYTES - 1),
                )

        results = client.put(*messages())
        assert [result.status for result in results] == [STORED, REJECTED] * 300
        assert {result.reason for result in results[1::2]} == {"WRONG_SIZE"}
        assert scrape(server)["kvstore_blocks_rejected_total"] == 300
        assert resident_bytes(server.pid) - before_bytes < 128 << 20


def test_excess_gets_are_refused_and_match_and_health_go_on(tmp_path):
    env = {"KVSTORE_SERVER__READ_THREADS": "1", "KVSTORE_SERVER__READ_PENDING_MAX": "2"}
    with running_server(tmp_path / "data", env=env) as server, connected(server) as client:
        namespace = client.register(make_spec(REFERENCE_BLOCK_BYTES))
        chain = make_chain("busy", 400)
        client.put_blocks(namespace, chain, REFERENCE_BLOCK_BYTES)
        # Far more than fits in the connection's window: the calls wait for a reader who does not read.
        busy = [client.blocks.GetBlocks(get_request(namespace, chain)) for _ in range(2)]
        first_frames = [next(stream) for stream in busy]
        with refused(grpc.StatusCode.UNAVAILABLE, "OVERLOADED", "2 read calls", "the limit is 2"):
            client.get(namespace, chain)
        with connected(server) as other:
            assert other.match(namespace, chain).hit_length_blocks == 400
            health_pb2_grpc.HealthStub(other.channel).Check(health_pb2.HealthCheckRequest())
        assert scrape(server)['kvstore_pool_refused_total{pool="read"}'] == 1
        busy[0].cancel()
        until(lambda: scrape(server)['kvstore_pool_pending{pool="read"}'] == 1)
        assert len(client.get(namespace, chain[:3])[0]) == 3
        assert sum(len(frame.blocks) for frame in [first_frames[1], *busy[1]]) == 400


def test_a_call_whose_deadline_passes_gives_its_place_back(tmp_path):
    with running_server(tmp_path / "data") as server, connected(server) as client:
        namespace = client.register(make_spec(REFERENCE_BLOCK_BYTES))
        chain = make_chain("deadline", 400)
        client.put_blocks(namespace, chain, REFERENCE_BLOCK_BYTES)
        stream = client.blocks.GetBlocks(get_request(namespace, chain), timeout=3)
        next(stream)  # and then do not read
        until(lambda: scrape(server)['kvstore_pool_pending{pool="read"}'] == 0)
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# Start and stop


def test_acknowledged_blocks_survive_an_orderly_stop_and_a_kill(tmp_path):
    chain = make_chain("restart", 50)
    spec = make_spec(REFERENCE_BLOCK_BYTES)
    ends: list[Callable[[RunningServer], int]] = [RunningServer.stop, RunningServer.kill, RunningServer.stop]
    for number, end in enumerate(ends):
        with running_server(tmp_path / "data") as server, connected(server) as client:
            namespace = client.register(spec)
            known = 10 * number
            assert client.match(namespace, chain).hit_length_blocks == known
            found, _ = client.get(namespace, chain)
            assert found == {block: block_of(chain[block], REFERENCE_BLOCK_BYTES) for block in range(known)}
            results = client.put_blocks(namespace, chain[: known + 10], REFERENCE_BLOCK_BYTES, first=known)
            assert {result.status for result in results} == {STORED}
            assert end(server) == (-signal.SIGKILL if end is RunningServer.kill else 0)


def test_sigterm_lets_running_calls_finish_and_takes_no_more(tmp_path):
    with running_server(tmp_path / "data") as server, connected(server) as client:
        namespace = client.register(make_spec(REFERENCE_BLOCK_BYTES))
        chain = make_chain("drain", 400)
        client.put_blocks(namespace, chain, REFERENCE_BLOCK_BYTES)
        stream = client.blocks.GetBlocks(get_request(namespace, chain))
        blocks = len(next(stream).blocks)
        watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        os.kill(server.pid, signal.SIGTERM)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        until(lambda: not accepts(server))
        blocks += sum(len(frame.blocks) for frame in stream)
        assert blocks == 400
        assert server.stop() == 0
        assert events(server)[-2:] == ["stopping", "stopped"]


def accepts(server: RunningServer) -> bool:
    host, port = server.target.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=WAIT_S).close()
    except ConnectionRefusedError:
        return False
    return True


def events(server: RunningServer) -> list[str]:
    return [json.loads(line)["event"] for line in server.log().splitlines()]


@pytest.mark.parametrize("hurry", ["drain_s passes", "a second signal"])
def test_a_call_that_does_not_end_is_cancelled(tmp_path, hurry):
    drain_s = "0.2" if hurry == "drain_s passes" else "3000"
    env = {"KVSTORE_SERVER__DRAIN_S": drain_s}
    with running_server(tmp_path / "data", env=env) as server, connected(server) as client:
        namespace = client.register(make_spec(1000))
        chain = make_chain("endless", 3)
        endless = threading.Event()

        def messages() -> Iterator[pb.PutBlocksRequest]:
            yield header(namespace, chain)
            endless.wait()

        call = client.blocks.PutBlocks.future(messages())
        until(lambda: scrape(server)['kvstore_pool_pending{pool="write"}'] == 1)
        os.kill(server.pid, signal.SIGTERM)
        if hurry == "a second signal":
            until(lambda: "stopping" in events(server))
        assert server.stop() == 0
        endless.set()
        assert call.exception().code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    with running_server(tmp_path / "data") as server, connected(server) as client:
        assert client.match(client.register(make_spec(1000)), chain).hit_length_blocks == 0


def test_sigint_ends_it_in_order_too(tmp_path):
    with running_server(tmp_path / "data") as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(WAIT_S) == 0
        assert events(server)[-1] == "stopped"


def test_the_port_file_tells_where_and_who_and_goes_with_the_server(tmp_path):
    server = start_server(tmp_path / "data", tmp_path)
    try:
        port_file = tmp_path / "ports.json"
        assert json.loads(port_file.read_text()) == {
            "listen": server.target,
            "metrics": server.metrics_url.removeprefix("http://").removesuffix("/metrics"),
            "pid": server.pid,
        }
        assert [path.name for path in tmp_path.iterdir() if "ports" in path.name] == ["ports.json"]
        assert server.stop() == 0
        assert not port_file.exists()
    finally:
        server.kill()


def refusal(*flags: str, env: dict[str, str] | None = None) -> str:
    """The last line on stderr of a server that must not start; there is one error line, and no traceback."""
    ended = run_server(*flags, env=env)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    *log, error = ended.stderr.splitlines()
    assert error.startswith("error: ")
    assert all(json.loads(line)["level"] == "info" for line in log)
    return error


def test_a_second_server_on_the_port_exits_with_an_error(tmp_path, server):
    error = refusal("--data-dir", str(tmp_path), "--listen", server.target, "--metrics-listen", "")
    assert server.target in error
    assert "Address already in use" in error
    assert error.endswith("[ADDRESS_IN_USE]")


def test_a_second_server_on_the_metrics_port_exits_with_an_error(tmp_path, server):
    taken = server.metrics_url.removeprefix("http://").removesuffix("/metrics")
    error = refusal("--data-dir", str(tmp_path), "--listen", "127.0.0.1:0", "--metrics-listen", taken)
    assert f"{taken} (server.metrics_listen)" in error
    assert error.endswith("[ADDRESS_IN_USE]")


def test_the_port_is_not_shared_even_by_servers_that_skip_the_check(server):
    host, port = server.target.rsplit(":", 1)
    with socket.socket() as rival:
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with pytest.raises(OSError, match="in use"):
            rival.bind((host, int(port)))


def test_a_second_server_on_the_data_directory_exits_naming_the_holder(client, server):
    data_dir = client.admin.GetStatus(admin_pb2.GetStatusRequest()).data_dir
    error = refusal("--data-dir", data_dir, "--listen", "127.0.0.1:0", "--metrics-listen", "")
    assert data_dir in error
    assert str(server.pid) in error
    assert error.endswith("[DATA_DIR_LOCKED]")
    health = health_pb2_grpc.HealthStub(client.channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_a_unix_socket_serves_and_is_not_taken_over(tmp_path):
    address = f"unix:{tmp_path}/socket"
    with running_server(tmp_path / "data", listen=address) as server, connected(server) as client:
        assert server.target == address
        client.register(make_spec(1000))
        error = refusal("--data-dir", str(tmp_path / "other"), "--listen", address, "--metrics-listen", "")
        assert error.endswith("[ADDRESS_IN_USE]")
        client.register(make_spec(1001))
        server.kill()
    with running_server(tmp_path / "data", listen=address) as server, connected(server) as client:
        assert client.register(make_spec(1000))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "0.0.0.0:0"], ["server.listen is 0.0.0.0:0", "--allow-remote", "authentication"]),
        (["--metrics-listen", "0.0.0.0:0"], ["server.metrics_listen is 0.0.0.0:0", "--allow-remote"]),
        (["--listen", "7420"], ["'7420'", "host:port", "flag --listen"]),
        (["--listen", "unix:/absent/socket"], ["/absent", "ADDRESS_UNAVAILABLE"]),
        (["--listen", "203.0.113.1:7420", "--allow-remote"], ["203.0.113.1:7420", "ADDRESS_UNAVAILABLE"]),
        (["--listen", "no.such.host.invalid:1", "--allow-remote"], ["no.such.host.invalid", "ADDRESS_UNAVAILABLE"]),
        (["--capacity", "lots"], ["store.capacity is 'lots'", "flag --capacity", "CONFIG"]),
        (["--config", "/absent/kvstore.toml"], ["/absent/kvstore.toml", "No such file", "CONFIG"]),
        (["--data-dir", "/dev/null/kvstore"], ["/dev/null/kvstore", "CONFIG"]),
    ],
)
def test_a_foreseeable_failure_is_one_line_and_exit_code_1(tmp_path, flags, words):
    defaults = ["--data-dir", str(tmp_path), "--listen", "127.0.0.1:0", "--metrics-listen", ""]
    error = refusal(*defaults, *flags)
    for word in words:
        assert word in error


def test_a_port_file_that_cannot_be_written_stops_the_start(tmp_path):
    error = refusal(
        *("--data-dir", str(tmp_path), "--listen", "127.0.0.1:0", "--metrics-listen", ""),
        *("--port-file", str(tmp_path / "absent" / "ports")),
    )
    assert error.endswith("[PORT_FILE]")


@pytest.mark.parametrize("name", ["", "a" * 300])
def test_a_port_file_that_cannot_be_a_file_stops_the_start(tmp_path, name):
    flags = ("--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--metrics-listen", "")
    message = refusal(*flags, "--port-file", f"{tmp_path}/{name}")
    assert "server.port_file" in message
    assert "PORT_FILE" in message


def test_the_server_may_open_as_many_files_as_the_system_allows(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = len(os.listdir("/proc/self/fd")) + 256  # enough for this process, whatever ran in it before
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))  # a child begins with it
    try:
        with running_server(tmp_path / "data", env={"KVSTORE_LOG__LEVEL": "debug"}) as server:
            assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (hard, hard)
            (line,) = [line for line in map(json.loads, server.log().splitlines()) if "files" in line]
            assert (line["level"], line["files"], line["before"]) == ("debug", hard, low)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_config_typos_stop_the_start_and_name_the_right_key(tmp_path):
    path = tmp_path / "kvstore.toml"
    path.write_text("[store]\ncapcity = 1\n")
    error = refusal("--config", str(path))
    assert error == f"error: unknown key store.capcity (file {path}), did you mean store.capacity? [CONFIG]"
    error = refusal(env={"KVSTORE_STORE__CAPCITY": "1GiB"})
    assert "did you mean KVSTORE_STORE__CAPACITY? [CONFIG]" in error
    assert list(tmp_path.iterdir()) == [path]


def test_an_unknown_flag_is_a_usage_error():
    ended = run_server("--capcity", "1GiB")
    assert ended.returncode == 2
    assert "--capcity" in ended.stderr
    assert "--capacity" in ended.stderr


def test_config_show_prints_each_value_and_where_it_came_from(tmp_path):
    path = tmp_path / "kvstore.toml"
    path.write_text("[store]\nlease_s = 5\n[traffic_classes.batch]\nttl_s = 60\n")
    shown = run_server(
        *("--capacity", "1GiB", "config", "show", "--config", str(path), "-o", "json"),
        env={"KVSTORE_LOG__LEVEL": "debug"},
    )
    assert shown.returncode == 0, shown.stderr
    rows = {row["key"]: (row["value"], row["origin"]) for row in json.loads(shown.stdout)}
    assert rows["store.capacity"] == (1 << 30, "flag --capacity")
    assert rows["store.lease_s"] == (5.0, f"file {path}")
    assert rows["log.level"] == ("debug", "environment KVSTORE_LOG__LEVEL")
    assert rows["traffic_classes.batch.ttl_s"] == (60, f"file {path}")
    assert rows["server.allow_remote"] == (False, "default")
    assert rows["server.read_threads"] == (8, "default")
    assert rows["server.data_dir"] == ("/var/lib/kvstore", "default")
    assert rows["server.listen"] == ("127.0.0.1:7420", "default")
    table = run_server("config", "show").stdout.splitlines()
    assert re.search(r"^store\.capacity +10GiB +default$", "\n".join(table), re.M)


@pytest.mark.parametrize("words", ["--version", "config show", "config show -o json"])
def test_a_full_disk_behind_stdout_is_an_error_in_one_line(words):
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "kvstore.cli.server", *words.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
    assert ended.stderr == (
        "error: cannot write to stdout: No space left on device [OUTPUT_FAILED]\n"
        "fix: make room, or send the output elsewhere\n"
    )
    assert ended.returncode == 1


def test_a_reader_that_went_away_ends_config_show_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "kvstore.cli.server", "config", "show"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_an_unknown_traffic_class_is_told_in_the_same_words_by_every_call(client):
    namespace = client.register(make_spec(1000, "words"))
    chain = make_chain("words", 1)
    calls = [
        lambda: client.match(namespace, chain, traffic_class="agnet"),
        lambda: client.put(header(namespace, chain, traffic_class="agnet")),
    ]
    for call in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.details() == "traffic class 'agnet' is unknown; known are agent, chatbot, handoff"


def test_the_version_is_printed():
    assert run_server("--version").stdout == f"kvstore-server {version()}\n"


def test_allow_remote_serves_and_warns_loudly(tmp_path):
    with running_server(tmp_path / "data", "--allow-remote", listen="0.0.0.0:0") as server:
        records = [json.loads(line) for line in server.log().splitlines()]
        warnings = [record for record in records if record["level"] == "warning"]
        assert len(warnings) == 1
        assert "without authentication" in warnings[0]["event"]
        assert warnings[0]["address"] == "0.0.0.0:0"


def test_a_server_on_the_loopback_does_not_warn(server):
    assert {json.loads(line)["level"] for line in server.log().splitlines()} == {"info"}


def test_operators_classes_are_served(tmp_path):
    path = tmp_path / "kvstore.toml"
    path.write_text('[traffic_classes.batch]\nttl_s = 60\nrefresh = "on_write"\n')
    with running_server(tmp_path / "data", "--config", str(path)) as server, connected(server) as client:
        reply = client.blocks.RegisterNamespace(pb.RegisterNamespaceRequest(spec=make_spec(1000).to_proto()))
        classes = {c.name: (c.ttl.seconds, c.refresh) for c in reply.traffic_classes}
        assert classes["batch"] == (60, types_pb2.REFRESH_RULE_ON_WRITE)
        assert classes["agent"] == (259_200, types_pb2.REFRESH_RULE_ON_ACCESS)
        assert reply.max_chain_blocks == MAX_CHAIN_BLOCKS
        chain = make_chain("classes", 1)
        client.put(header(reply.namespace, chain, traffic_class="batch"), frame_of(chain, [0], 1000))
        assert client.match(reply.namespace, chain, traffic_class="batch").hit_length_blocks == 1


def test_lines_on_the_log_are_json_and_name_no_hash_in_full(client, server):
    namespace = client.register(make_spec(1000))
    chain = make_chain("secret", 3)
    client.put_blocks(namespace, chain, 1000)
    client.match(namespace, chain)
    text = server.log()
    assert all(isinstance(json.loads(line), dict) for line in text.splitlines())
    for name in (*chain, namespace):
        assert name.hex() not in text
