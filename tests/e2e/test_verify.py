"""`kvstore-admin verify` and `kvstore-server fsck` against real servers and what they leave behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
import time
import urllib.request
from typing import TYPE_CHECKING, Any

from administering import (
    BLOCK_BYTES,
    BUDGET_S,
    PATIENCE_S,
    Filled,
    Ran,
    as_process,
    block_bytes,
    connected,
    eventually,
    fill,
    flip_a_byte_of,
    ok_json,
    run,
)
from serving import RunningServer, run_server, running_server, server_command

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS = 600  # of a page each: several steps


def verify(server: RunningServer, *args: str) -> Ran:
    return run(server, "verify", *args, "-o", "json")


def metric(server: RunningServer, name: str) -> float:
    text = urllib.request.urlopen(server.metrics_url, timeout=PATIENCE_S).read().decode()
    values = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(values[0]) if values else 0.0


def scrubs_running(server: RunningServer) -> float:
    return metric(server, 'kvstore_rpcs_running{method="Verify"}')


class TestVerify:
    def test_a_whole_store(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server, connected(server) as client:
            filled = fill(client, "m", BLOCKS)
            assert ok_json(server, "status")["invariants"] is None
            assert "never" in run(server, "status").out
            assert metric(server, "kvstore_invariant_check_timestamp_seconds") == 0
            ran = verify(server)
            assert ran.code == 0
            result = ran.json
            assert (result["finished"], result["resume"], result["stopped"]) == (True, None, None)
            assert (result["blocks_checked"], result["bytes_done"]) == (BLOCKS, BLOCKS * BLOCK_BYTES)
            assert result["bytes_total"] == result["bytes_done"]
            assert result["segments_done"] == result["segments_total"] == 1
            assert (result["damaged"], result["unreadable_blocks"], result["unreadable"]) == ([], [], [])
            assert result["invariants"]["violation_count"] == 0
            assert result["invariants"]["live_blocks"] == result["invariants"]["index_entries"] == BLOCKS
            assert re.fullmatch(r"verify: 100%, 1 of 1 segments, .* 600 blocks, 0 damaged\n", ran.err)
            status = ok_json(server, "status")
            assert status["invariants"] == result["invariants"]
            assert "ok, checked at 20" in run(server, "status").out
            assert time.time() - metric(server, "kvstore_invariant_check_timestamp_seconds") < 60
            assert metric(server, "kvstore_invariant_violations") == 0
            table = run(server, "verify")
            assert table.code == 0
            assert "600 blocks" in table.out
            assert filled.hits() == BLOCKS

    def test_damage_is_told_counted_and_not_offered_again(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server, connected(server) as client:
            filled = fill(client, "m", 20)
            flip_a_byte_of(block_bytes(filled.chain, 7), tmp_path / "data")
            assert filled.hits() == 20
            ran = verify(server)
            assert ran.code == 9
            assert ran.json["finished"]
            assert ran.json["damaged"] == [
                {
                    "namespace": filled.digest,
                    "prefix_hash": filled.chain[7].hex(),
                    "segment_id": 1,
                    "slot": 7,
                    "reason": "BAD_CHECKSUM",
                }
            ]
            assert f"damaged: block {filled.chain[7].hex()}, segment 1 slot 7: BAD_CHECKSUM" in ran.err
            assert "error: found 1 damaged block [CORRUPTION_FOUND]" in ran.err
            assert filled.hits() == 7
            assert ok_json(server, "status")["counters"]["blocks_corrupt"] == 1
            again = verify(server)
            assert (again.code, again.json["damaged"], again.json["blocks_checked"]) == (0, [], 19)
            flip_a_byte_of(block_bytes(filled.chain, 8), tmp_path / "data")
            table = run(server, "verify")
            assert table.code == 9
            assert filled.chain[8].hex() in table.out
            server.kill()
        with running_server(tmp_path / "data") as server, connected(server) as client:
            handle = client.namespace(filled.handle.spec)
            assert Filled(handle, filled.chain).hits() == 7

    def test_a_store_that_does_not_agree_with_itself_is_damage(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server, connected(server) as client:
            fill(client, "m", 5)
            (tmp_path / "data" / "segments" / "00000000000000ff.seg").write_bytes(b"x")
            ran = verify(server)
            assert ran.code == 9
            (violation,) = ran.json["invariants"]["violations"]
            assert "nothing knows it" in violation
            assert "1 violated invariant" in ran.err
            assert "1 violation, checked at" in run(server, "status").out
            checked = run(server, "status", "--check")
            assert checked.code == 9
            assert "the store does not agree with itself: 1 violation" in checked.err
            assert metric(server, "kvstore_invariant_violations") == 1
            assert "invariant violated" in server.log()
            assert violation in run(server, "verify").out

    def test_a_limit_stops_it_and_the_cursor_continues(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server, connected(server) as client:
            fill(client, "m", BLOCKS)
            checked, cursor, rounds = 0, "", 0
            while True:
                ran = verify(server, "--max-bytes", "1MiB", *(["--from", cursor] if cursor else []))
                assert ran.code == 0
                checked, rounds = checked + ran.json["blocks_checked"], rounds + 1
                if ran.json["finished"]:
                    break
                assert ran.json["invariants"] is None
                cursor = ran.json["resume"]
            assert (checked, rounds) == (BLOCKS, 3)
            table = run(server, "verify", "--max-bytes", "1MiB")
            assert table.code == 0
            assert f"kvstore-admin verify --from {re.search(r'--from (1:256)', table.out)[1]}" in table.out

    def test_a_cursor_with_nothing_behind_it_says_so(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server, connected(server) as client:
            fill(client, "m", 20)
            ran = run(server, "verify", "--from", "99:99")
            assert (ran.code, ran.out) == (2, "")
            assert "99:99" in ran.err
            assert "never a segment 2" in ran.err
            ran = run(server, "verify", "--from", "2:0")
            assert ran.code == 0
            assert "0 blocks checked: there are none from there on that are still offered" in ran.out
            assert verify(server, "--from", "2:0").json["blocks_checked"] == 0

    def test_the_rate_is_kept_and_the_time_limit_ends_it(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server, connected(server) as client:
            fill(client, "m", BLOCKS)  # 2.34 MiB
            started_s = time.monotonic()
            assert verify(server, "--rate", "1MiB").json["finished"]
            assert time.monotonic() - started_s > 2
            ran = verify(server, "--rate", "64KiB", "--max-time", "1s")
            assert ran.code == 0
            assert not ran.json["finished"]
            assert ran.json["resume"] == "1:256"
            assert 1 <= ran.json["elapsed_s"] < 10
            eventually(lambda: scrubs_running(server) == 0)  # it does not go on for nobody
            assert verify(server, "--rate", "0").json["finished"]

    def test_an_interrupt_prints_the_cursor(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server, connected(server) as client:
            filled = fill(client, "m", BLOCKS)
            flip_a_byte_of(block_bytes(filled.chain, 300), tmp_path / "data")  # beyond the first step
            process = as_process(server.target, "verify", "--rate", "64KiB", "-o", "json")
            eventually(lambda: scrubs_running(server) == 1)
            time.sleep(1)  # the first answer is under way
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 130, err
            assert json.loads(out)["stopped"]["reason"] == "INTERRUPTED"
            assert "error: interrupted [INTERRUPTED]" in err
            cursor = json.loads(out)["resume"]
            assert f"fix: continue with: kvstore-admin verify --from {cursor}" in err
            eventually(lambda: scrubs_running(server) == 0)
            rest = verify(server, "--from", cursor)
            assert (rest.code, len(rest.json["damaged"])) == (9, 1)

    def test_a_lost_server_prints_the_cursor(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server, connected(server) as client:
            fill(client, "m", BLOCKS)
            process = as_process(server.target, "verify", "--rate", "64KiB")
            eventually(lambda: scrubs_running(server) == 1)
            time.sleep(1)
            server.kill()
            out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 5, err
        assert "not finished; continue with: kvstore-admin verify --from 1:256" in out
        assert "fix: continue with: kvstore-admin verify --from 1:256" in err

    def test_a_server_that_stops_does_not_wait_for_it(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server, connected(server) as client:
            fill(client, "m", BLOCKS)
            process = as_process(server.target, "verify", "--rate", "1KiB")
            eventually(lambda: scrubs_running(server) == 1)
            time.sleep(1)
            started_s = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - started_s < 8  # server.drain_s is 10
            _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 5
        assert "[NOT_SERVING]" in err

    def test_one_at_a_time(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server, connected(server) as client:
            filled = fill(client, "m", BLOCKS)
            process = as_process(server.target, "verify", "--rate", "1KiB")
            try:
                eventually(lambda: scrubs_running(server) == 1)
                ran = run(server, "verify")
                assert ran.code == 5
                assert "[OVERLOADED]" in ran.err
                assert filled.hits() == BLOCKS  # and others are served
                assert run(server, "status").code == 0
            finally:
                process.kill()
                process.communicate()
            eventually(lambda: scrubs_running(server) == 0)
            assert run(server, "verify").code == 0

    def test_wrong_words_are_refused_by_name(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server:
            for args, named in [
                (["--from", "nowhere"], "'nowhere'"),
                (["--rate", "fast"], "'fast'"),
                (["--rate", "-1"], "-1"),
                (["--max-bytes", "1.5GiB"], "'1.5GiB'"),
                (["--max-time", "0s"], "'0s'"),
            ]:
                ran = run(server, "verify", *args)
                assert (ran.code, ran.out) == (2, "")
                assert named in ran.err

    def test_a_terminal_gets_a_bar(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server, connected(server) as client:
            fill(client, "m", BLOCKS)
            controller, terminal = pty.openpty()
            process = subprocess.Popen(
                [*as_command(server), "verify", "--rate", "2MiB", "-o", "json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=terminal,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
            )
            os.close(terminal)
            shown = bytearray()

            def read_terminal() -> None:
                try:
                    while data := os.read(controller, 4096):
                        shown.extend(data)
                except OSError:
                    pass  # the other side is closed

            reader = threading.Thread(target=read_terminal)
            reader.start()
            out, _ = process.communicate(timeout=PATIENCE_S)
            reader.join(PATIENCE_S)
            os.close(controller)
        assert process.returncode == 0
        assert json.loads(out)["finished"]
        text = shown.decode()
        assert "━" in text
        assert "of 1 segments" in text
        assert "\x1b[" in text


def as_command(server: RunningServer) -> list[str]:
    return [*server_command()[:1], "-m", "kvstore.cli.admin", "--server", server.target]


def fsck(path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return run_server("fsck", "--data-dir", str(path), *args)


def fsck_json(path: Path) -> tuple[int, Any]:
    ran = fsck(path, "-o", "json")
    return ran.returncode, json.loads(ran.stdout)


class TestFsck:
    def test_a_store_is_clean_after_an_orderly_stop_and_after_a_kill(self, tmp_path: Path):
        path = tmp_path / "data"
        for end in ("stop", "kill"):
            with running_server(path) as server, connected(server) as client:
                fill(client, f"model {end}", BLOCKS)
                getattr(server, end)()
            before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
            code, report = fsck_json(path)
            assert (code, report["clean"], report["findings"]) == (0, True, [])
            assert report["blocks_checked"] == BLOCKS * (1 if end == "stop" else 2)
            assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
        table = fsck(path)
        assert table.returncode == 0
        assert "clean" in table.stdout
        assert "fsck: 100%, 2 of 2 segments" in table.stderr

    def test_damage_is_told_with_what_the_next_start_does(self, tmp_path: Path):
        path = tmp_path / "data"
        with running_server(path) as server, connected(server) as client:
            filled = fill(client, "m", 20)
            server.stop()
        flip_a_byte_of(block_bytes(filled.chain, 7), path)
        code, report = fsck_json(path)
        assert (code, report["clean"], report["finding_count"]) == (9, False, 1)
        (finding,) = report["findings"]
        assert (finding["kind"], finding["segment_id"], finding["slot"]) == ("BAD_CHECKSUM", 1, 7)
        assert (finding["namespace"], finding["prefix_hash"]) == (filled.digest, filled.chain[7].hex())
        assert finding["next_start"] == "a miss"
        table = fsck(path)
        assert table.returncode == 9
        assert "BAD_CHECKSUM" in table.stdout
        assert "[CORRUPTION_FOUND]" in table.stderr
        with running_server(path) as server, connected(server) as client:
            handle = client.namespace(filled.handle.spec)
            got = handle.get(filled.chain, bytearray(20 * BLOCK_BYTES), budget_s=BUDGET_S)
            assert [block for block, status in enumerate(got.statuses) if status != "OK"] == [7]

    def test_a_directory_in_use_is_refused_and_the_server_goes_on(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server:
            ran = fsck(tmp_path / "data")
            assert ran.returncode == 5
            assert ran.stdout == ""
            assert f"held by process {server.pid}" in ran.stderr
            assert "[DATA_DIR_LOCKED]" in ran.stderr
            assert run(server, "status").code == 0

    def test_something_else_is_not_found(self, tmp_path: Path):
        for path in (tmp_path, tmp_path / "nothing"):
            ran = fsck(path)
            assert (ran.returncode, ran.stdout) == (4, "")
            assert "[NOT_A_DATA_DIR]" in ran.stderr

    def test_another_format_has_a_code_of_its_own(self, tmp_path: Path):
        path = tmp_path / "data"
        with running_server(path) as server:
            server.stop()
        document = json.loads((path / "catalog.json").read_text())
        (path / "catalog.json").write_text(json.dumps({**document, "format_version": 999}))
        ran = fsck(path)
        assert ran.returncode == 6
        assert "[FORMAT_VERSION]" in ran.stderr

    def test_the_directory_may_come_from_the_servers_own_settings(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server:
            server.stop()
        assert run_server("--data-dir", str(tmp_path / "data"), "fsck").returncode == 0
        assert run_server("fsck", env={"KVSTORE_SERVER__DATA_DIR": str(tmp_path / "data")}).returncode == 0

    def test_unknown_words_are_wrong_usage(self, tmp_path: Path):
        assert fsck(tmp_path, "--repair").returncode == 2
