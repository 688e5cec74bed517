"""kvstore-admin against a real server: every command in both outputs, every exit code, and what survives a restart."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from administering import (
    BLOCK_BYTES,
    BUDGET_S,
    PATIENCE_S,
    Filled,
    as_process,
    block_bytes,
    connected,
    eventually,
    fill,
    flip_a_byte_of,
    ok_json,
    run,
    spec,
)
from kvstore.clock import ManualClock
from kvstore_client import NamespaceSpec
from serving import RunningServer, running_server
from stores import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STATUS_KEYS = {
    *("version", "store_id", "start_time", "data_dir", "durability"),
    *("capacity_bytes", "used_bytes", "retiring_bytes", "live", "segment_count", "namespace_count"),
    *("hit_rate", "classes", "counters", "invariants", "write_amplification", "clock_ahead_s"),
}


@dataclass(frozen=True)
class Store:
    """A server that holds 5 agent blocks of model "first" and 3 chatbot blocks of model "second"."""

    server: RunningServer
    first: Filled
    second: Filled

    def state(self) -> Any:
        """Everything that a command may change."""
        status = ok_json(self.server, "status")
        return {
            "live": status["live"],
            "classes": status["classes"],
            "namespaces": ok_json(self.server, "namespace", "list"),
            "hits": (self.first.hits(), self.second.hits()),
        }


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Shared by the tests that change nothing."""
    with running_server(tmp_path_factory.mktemp("store") / "data") as server, connected(server) as client:
        yield Store(server, fill(client, "first", 5, "agent"), fill(client, "second", 3, "chatbot"))


class TestWhatCommandsSay:
    def test_status(self, store: Store):
        status = ok_json(store.server, "status")
        assert status["live"] == {"blocks": 8, "bytes": 8 * BLOCK_BYTES}
        assert status["counters"]["blocks_stored"] == 8
        assert status["namespace_count"] == 2
        assert 0 < status["used_bytes"] <= status["capacity_bytes"]
        assert {usage["name"]: usage["blocks"] for usage in status["classes"]} == {
            "agent": 5,
            "chatbot": 3,
            "handoff": 0,
        }
        assert set(status) == STATUS_KEYS
        table = run(store.server, "status")
        assert (table.code, table.err) == (0, "")
        # Each block is a page; a row of each table comes with it.
        assert status["write_amplification"] == status["counters"]["bytes_written"] / (8 * BLOCK_BYTES)
        assert 1 < status["write_amplification"] < 1.1
        assert "bytes written per byte put\n" in table.out, "nothing was reclaimed"
        assert abs(status["clock_ahead_s"]) < 1
        assert "\nclock" not in table.out, "it is right"
        for words in ("8 blocks", status["store_id"], status["data_dir"], "chatbot", "blocks_stored"):
            assert words in table.out

    def test_status_check_is_content_with_a_healthy_store(self, store: Store):
        assert run(store.server, "status", "--check").code == 0

    def test_namespace_list(self, store: Store):
        namespaces = ok_json(store.server, "namespace", "list")["namespaces"]
        assert [(n["spec"]["model"], n["blocks"], n["bytes"]) for n in namespaces] == [
            ("first", 5, 5 * BLOCK_BYTES),
            ("second", 3, 3 * BLOCK_BYTES),
        ]
        assert [n["namespace"] for n in namespaces] == [store.first.digest, store.second.digest]
        table = run(store.server, "namespace", "list").out
        assert store.first.digest in table
        assert "second" in table

    def test_namespace_show_takes_the_beginning_of_a_digest(self, store: Store):
        shown = ok_json(store.server, "namespace", "show", store.first.digest[:8].upper())
        assert shown["namespace"] == store.first.digest
        assert (shown["blocks"], shown["bytes"]) == (5, 5 * BLOCK_BYTES)
        assert shown["spec"]["block_bytes"] == BLOCK_BYTES
        assert shown["spec"]["labels"] == {}
        table = run(store.server, "namespace", "show", store.first.digest).out
        assert store.first.digest in table
        assert "r1" in table

    def test_ttl_list(self, store: Store):
        classes = ok_json(store.server, "ttl", "list")["classes"]
        assert {c["name"]: (c["ttl_s"], c["refresh"], c["blocks"]) for c in classes} == {
            "agent": (259_200, "on_access", 5),
            "chatbot": (604_800, "on_access", 3),
            "handoff": (600, "on_access", 0),
        }
        assert "7d" in run(store.server, "ttl", "list").out

    def test_quota_list_without_quotas(self, store: Store):
        listed = ok_json(store.server, "quota", "list")
        held = {(q["kind"], q["name"]): q["taken_bytes"] for q in listed["quotas"]}
        assert held == {
            ("traffic_class", "agent"): 5 * BLOCK_BYTES,
            ("traffic_class", "chatbot"): 3 * BLOCK_BYTES,
            ("traffic_class", "handoff"): 0,
            ("tenant", "default"): 8 * BLOCK_BYTES,
        }
        assert {(q["share"], q["limit"]) for q in listed["quotas"]} == {(0, 1)}
        assert listed["capacity_bytes"] == ok_json(store.server, "status")["capacity_bytes"]

    def test_block_show(self, store: Store):
        prefix_hash = store.second.chain[2].hex()
        (block,) = ok_json(store.server, "block", "show", prefix_hash)["blocks"]
        assert block["prefix_hash"] == prefix_hash
        assert block["namespace"] == store.second.digest
        assert (block["block"], block["size_bytes"], block["state"]) == (2, BLOCK_BYTES, "live")
        assert block["state_object"] is False
        assert [use["traffic_class"] for use in block["uses"]] == ["chatbot"]
        assert block["create_time"].endswith("Z")
        table = run(store.server, "block", "show", prefix_hash[:9])
        assert prefix_hash in table.out
        assert "chatbot" in table.out

    def test_global_options_work_after_the_command_too(self, store: Store):
        assert run(store.server, "ttl", "list", "--output", "json", "--timeout", "9s").json["classes"]

    def test_version_and_help_need_no_server(self, store: Store):
        assert run(store.server, "--version").out.startswith("kvstore-admin ")
        assert "Exit codes" in run(store.server, "--help").out


def test_the_hit_rate_is_told_by_class_and_by_namespace(tmp_path: Path):
    with running_server(tmp_path / "data") as server, connected(server) as client:
        first, second = fill(client, "first", 5, "agent"), fill(client, "second", 3, "chatbot")
        for filled, traffic_class in ((first, "agent"), (first, "chatbot"), (second, "chatbot")):
            handle = filled.handle
            for chain in (filled.chain, handle.chain(range(1000, 1256))):  # one that is there, two blocks that are not
                assert handle.match(chain, traffic_class=traffic_class, budget_s=BUDGET_S).failure is None
        tokens = {(n["asked_tokens"], n["hit_tokens"]) for n in ok_json(server, "namespace", "list")["namespaces"]}
        assert tokens == {(14 * 128, 10 * 128), (5 * 128, 3 * 128)}
        for command in (("status",), ("ttl", "list")):
            classes = {c["name"]: (c["asked_tokens"], c["hit_tokens"]) for c in ok_json(server, *command)["classes"]}
            assert classes == {"agent": (7 * 128, 5 * 128), "chatbot": (12 * 128, 8 * 128), "handoff": (0, 0)}
            assert "66.67%" in run(server, *command).out
        assert "71.43% of 1,792 tokens asked for" in run(server, "namespace", "show", first.digest).out
        assert run(server, "namespace", "drop", first.digest, "--yes").code == 0
        classes = {c["name"]: c["asked_tokens"] for c in ok_json(server, "status")["classes"]}
        assert classes == {"agent": 7 * 128, "chatbot": 12 * 128, "handoff": 0}


def test_namespace_list_follows_the_pages(tmp_path: Path):
    labels = {f"label {number}": "v" * 4096 for number in range(15)}
    with running_server(tmp_path / "data") as server, connected(server) as client:
        for number in range(40):
            handle = client.namespace(replace(spec(f"model {number}"), labels=labels))
            handle.match(handle.chain(range(128)), budget_s=BUDGET_S)
        listed = ok_json(server, "namespace", "list")
        assert [item["spec"]["model"] for item in listed["namespaces"]] == [f"model {n}" for n in range(40)]


QUOTAS = """
[traffic_classes.chatbot]
share = 0.25
limit = 0.5

[tenants.acme]
share = 0.03125
limit = 0.0625

[tenants.other]
limit = 0.03125
"""


def test_quotas_of_a_config_file_are_kept_told_and_listed(tmp_path: Path):
    config = tmp_path / "kvstore.toml"
    config.write_text(QUOTAS)
    block_bytes, taken_bytes, capacity = 5000, 8192, 4 << 20
    with (
        running_server(tmp_path / "data", "--config", str(config), "--capacity", str(capacity)) as server,
        connected(server) as client,
    ):
        for tenant, limit_blocks, key in [("acme", 32, "tenants.acme.limit"), ("zeta", 16, "tenants.other.limit")]:
            handle = client.namespace(replace(spec("m"), tenant=tenant, block_bytes=block_bytes))
            chain = handle.chain(range(128 * 40))
            report = handle.put(chain, bytes(40 * block_bytes), traffic_class="chatbot", budget_s=BUDGET_S)
            assert (report.stored, report.rejected) == (limit_blocks, 40 - limit_blocks)
            assert {result.reason for result in report.results[limit_blocks:]} == {"QUOTA_EXCEEDED"}
            detail = report.results[-1].detail
            for words in (
                f"tenant {tenant} holds {limit_blocks * taken_bytes} bytes",
                key,
                str(limit_blocks * taken_bytes),
            ):
                assert words in detail
            assert handle.match(chain, budget_s=BUDGET_S).hit_length_blocks == limit_blocks
        listed = ok_json(server, "quota", "list")
        assert listed["capacity_bytes"] == capacity
        rows = [tuple(quota.values()) for quota in listed["quotas"]]
        assert rows == [
            ("traffic_class", "agent", 0.0, 1.0, 0, 0, 0),
            ("traffic_class", "chatbot", 0.25, 0.5, 48, 48 * block_bytes, 48 * taken_bytes),
            ("traffic_class", "handoff", 0.0, 1.0, 0, 0, 0),
            ("tenant", "acme", 0.03125, 0.0625, 32, 32 * block_bytes, 32 * taken_bytes),
            ("tenant", "other", 0.0, 0.03125, 0, 0, 0),
            ("tenant", "zeta", 0.0, 0.03125, 16, 16 * block_bytes, 16 * taken_bytes),
        ]
        table = [" ".join(line.split()) for line in run(server, "quota", "list").out.splitlines()]
        assert table[0] == "kind name share limit held"
        assert "tenant acme 3.125% 6.25% 256.0 KiB (6.2%)" in table
        assert "traffic class chatbot 25% 50% 384.0 KiB (9.4%)" in table


def test_quota_list_follows_the_pages(tmp_path: Path):
    names = [f"{number:03} {'n' * 4000}" for number in range(300)]
    config = tmp_path / "kvstore.toml"
    config.write_text("".join(f'[tenants."{name}"]\nshare = 0.001\n' for name in names))
    with running_server(tmp_path / "data", "--config", str(config)) as server:
        listed = ok_json(server, "quota", "list")["quotas"]
        assert [quota["name"] for quota in listed] == ["agent", "chatbot", "handoff", *names]


class TestDryRuns:
    def test_evict_says_what_it_would_do_and_changes_nothing(self, store: Store):
        before = store.state()
        for words, blocks in [
            (("--class", "agent"), 5),
            (("--namespace", store.second.digest[:10]), 3),
            (("--down-to", "0%"), 8),
            (("--down-to", "0", "--class", "chatbot"), 3),
        ]:
            result = ok_json(store.server, "evict", *words)
            assert (result["done"], result["blocks"], result["bytes"]) == (False, blocks, blocks * BLOCK_BYTES)
            table = run(store.server, "evict", *words)
            assert table.code == 0
            assert f"would evict {blocks} blocks" in table.out
            assert "--yes" in table.out
        assert store.state() == before

    def test_drop_says_what_it_would_do_and_changes_nothing(self, store: Store):
        before = store.state()
        result = ok_json(store.server, "namespace", "drop", store.first.digest)
        assert (result["done"], result["blocks"], result["bytes"]) == (False, 5, 5 * BLOCK_BYTES)
        assert result["namespace"] == store.first.digest
        assert "would drop namespace" in run(store.server, "namespace", "drop", store.first.digest[:8]).out
        assert store.state() == before


NO_DIGEST = "deadbeef" * 8


@pytest.mark.parametrize(
    ("args", "code", "reason", "named"),
    [
        (["namespace", "show", "a"], 2, "INVALID_ARGUMENT", "'a'"),
        (["namespace", "show", NO_DIGEST], 4, "NAMESPACE_NOT_FOUND", NO_DIGEST),
        (["namespace", "drop", NO_DIGEST, "--yes"], 4, "NAMESPACE_NOT_FOUND", NO_DIGEST),
        (["block", "show", NO_DIGEST], 4, "BLOCK_NOT_FOUND", NO_DIGEST),
        (["block", "show", "no hash"], 2, "INVALID_ARGUMENT", "'no hash'"),
        (["ttl", "set", "agnet", "3d"], 4, "UNKNOWN_TRAFFIC_CLASS", "'agnet'"),
        (["ttl", "set", "", "3d"], 2, "INVALID_ARGUMENT", "''"),
        (["ttl", "set", "agent", "3"], 2, "INVALID_ARGUMENT", "'3'"),
        (["ttl", "set", "agent", "0s"], 2, "INVALID_ARGUMENT", "'0s'"),
        (["ttl", "set", "agent", "5000d"], 2, "INVALID_ARGUMENT", "432000000"),
        (["evict"], 2, "INVALID_ARGUMENT", "--older-than"),
        (["evict", "--yes"], 2, "INVALID_ARGUMENT", "--older-than"),
        (["evict", "--class", "", "--yes"], 2, "INVALID_ARGUMENT", "''"),
        (["evict", "--namespace", "", "--yes"], 2, "INVALID_ARGUMENT", "''"),
        (["evict", "--class", "agnet", "--yes"], 4, "UNKNOWN_TRAFFIC_CLASS", "'agnet'"),
        (["evict", "--namespace", NO_DIGEST, "--yes"], 4, "NAMESPACE_NOT_FOUND", NO_DIGEST),
        (["evict", "--older-than", "soon", "--yes"], 2, "INVALID_ARGUMENT", "'soon'"),
        (["evict", "--older-than", "9d", "--yes"], 4, "NOTHING_MATCHED", "9d"),
        (["evict", "--class", "handoff", "--yes"], 4, "NOTHING_MATCHED", "'handoff'"),
        (["evict", "--down-to", "120%", "--yes"], 2, "INVALID_ARGUMENT", "'120%'"),
        (["status", "--timeout", "1"], 2, "INVALID_ARGUMENT", "'1'"),
        (["status", "--server", "nowhere"], 2, "INVALID_ARGUMENT", "'nowhere'"),
    ],
)
def test_wrong_input_names_the_value_and_the_fix_and_changes_nothing(
    store: Store, args: list[str], code: int, reason: str, named: str
):
    before = store.state()
    ran = run(store.server, *args)
    assert ran.code == code
    error, fix = ran.err.splitlines()
    assert error.startswith("error: ")
    assert error.endswith(f"[{reason}]")
    assert fix.startswith("fix: ")
    assert named in ran.err
    assert store.state() == before


@pytest.mark.parametrize(
    "args", [["-o", "yaml", "status"], ["namespaces"], ["evict", "--klass", "agent"], ["ttl", "set"]]
)
def test_unknown_words_are_wrong_usage(store: Store, args: list[str]):
    ran = run(store.server, *args)
    assert (ran.code, ran.out) == (2, "")
    assert "Error: " in ran.err


def test_an_eviction_that_matches_nothing_still_prints_its_result(store: Store):
    ran = run(store.server, "evict", "--class", "handoff", "--yes", "-o", "json")
    assert ran.code == 4
    assert (ran.json["done"], ran.json["blocks"], ran.json["bytes"]) == (True, 0, 0)


def test_a_share_that_is_kept_already_is_no_error(store: Store):
    result = ok_json(store.server, "evict", "--down-to", "100%", "--yes")
    assert (result["done"], result["blocks"]) == (True, 0)


def test_a_spec_of_every_kind_is_shown(store: Store):
    from kvstore_client import KvGroup, KvGroupKind, ParallelDimension, ReplayMode

    hostile = "Ünïcode \x1b[31m [bold]"
    rich_spec = NamespaceSpec(
        model=hostile,
        revision="r1",
        engine="test",
        layout="opaque/1",
        kv_dtype="uint8",
        block_bytes=BLOCK_BYTES,
        parallel=(ParallelDimension("tp", 1, 4),),
        groups=(
            KvGroup("full", KvGroupKind.FULL, (0, 2)),
            KvGroup("swa", KvGroupKind.SLIDING_WINDOW, (1,), 128, ReplayMode.BOUNDED),
        ),
        labels={"site": "a"},
    )
    with connected(store.server) as client:
        handle = client.namespace(rich_spec)
        assert handle.match(handle.chain(range(128)), peek=True, budget_s=BUDGET_S).failure is None
    digest = handle.digest.hex()
    shown = ok_json(store.server, "namespace", "show", digest)["spec"]
    assert shown["model"] == hostile
    assert shown["parallel"] == [{"name": "tp", "rank": 1, "size": 4}]
    assert shown["groups"][1]["kind"] == "sliding_window"
    assert shown["groups"][1]["replay_rule"] == "bounded"
    assert shown["labels"] == {"site": "a"}
    table = run(store.server, "namespace", "show", digest).out
    assert "\x1b" not in table
    assert "tp 1 of 4" in table
    assert "window 128 tokens" in table
    assert run(store.server, "namespace", "drop", digest, "--yes").code == 0


class TestChanges:
    def test_ttl_set_acts_at_once_and_survives_a_restart(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server:
            with connected(server) as client:
                filled = fill(client, "m", 3, "agent")
                longer = run(server, "ttl", "set", "agent", "30d")
                assert (longer.code, longer.out) == (0, "traffic class 'agent': TTL was 3d, is now 30d\n")
                assert filled.hits() == 3
                change = ok_json(server, "ttl", "set", "agent", "1s")
                assert (change["before"]["ttl_s"], change["after"]["ttl_s"]) == (30 * 86_400, 1)
                eventually(lambda: filled.hits() == 0)
                assert ok_json(server, "status")["live"]["blocks"] == 0
            server.stop()
        with running_server(tmp_path / "data") as server:
            classes = ok_json(server, "ttl", "list")["classes"]
            assert {c["name"]: c["ttl_s"] for c in classes} == {"agent": 1, "chatbot": 604_800, "handoff": 600}

    def test_evict_does_what_it_said_and_survives_a_restart(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server:
            with connected(server) as client:
                gone, kept = fill(client, "gone", 4, "agent"), fill(client, "kept", 2, "chatbot")
                words = ("evict", "--namespace", gone.digest, "--class", "agent")
                promised, done = ok_json(server, *words), ok_json(server, *words, "--yes")
                assert done == {**promised, "done": True}
                assert (done["blocks"], done["bytes"]) == (4, 4 * BLOCK_BYTES)
                assert (gone.hits(), kept.hits()) == (0, 2)
                assert run(server, *words, "--yes").code == 4
            server.kill()
        with running_server(tmp_path / "data") as server, connected(server) as client:
            for filled, hits in ((gone, 0), (kept, 2)):
                handle = client.namespace(filled.handle.spec)
                assert Filled(handle, filled.chain).hits() == hits

    def test_evict_older_than_goes_by_last_use(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server, connected(server) as client:
            filled = fill(client, "m", 2)
            assert run(server, "evict", "--older-than", "1h").code == 4
            eventually(lambda: run(server, "evict", "--older-than", "1s").code == 0)
            assert "evicted 2 blocks" in run(server, "evict", "--older-than", "1s", "--yes").out
            assert filled.hits() == 0

    def test_evict_down_to_a_share_of_the_capacity(self, tmp_path: Path):
        with running_server(tmp_path / "data", "--capacity", "16MiB") as server, connected(server) as client:
            filled = fill(client, "m", 1024)
            done = ok_json(server, "evict", "--down-to", "12.5%", "--yes")
            assert done["blocks"] == 512
            assert ok_json(server, "status")["live"]["bytes"] == (16 << 20) // 8
            assert filled.hits() == 512  # the cold tail went, not the beginning of the chain
            assert ok_json(server, "evict", "--down-to", "0.125", "--yes")["blocks"] == 0

    def test_status_tells_what_reclaims_cost(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server, connected(server) as client:
            assert ok_json(server, "status")["write_amplification"] == 0
            assert "nothing stored yet" in run(server, "status").out
            fill(client, "whole", 4, "agent")
            mixed = [fill(client, "gone", 40, "chatbot"), fill(client, "kept", 10, "chatbot")]
            before = ok_json(server, "status")["counters"]
            assert run(server, "evict", "--class", "agent", "--yes").code == 0
            assert "1 of 1 reclaimed segment without moving a block" in run(server, "status").out
            assert run(server, "evict", "--namespace", mixed[0].digest, "--yes").code == 0
            status = ok_json(server, "status")
            counters = status["counters"]
            assert counters["blocks_moved"] == mixed[1].hits() == 10
            per_block = before["bytes_written"] // 54
            assert counters["bytes_written"] == before["bytes_written"] + 10 * per_block
            assert status["write_amplification"] == 64 * per_block / (54 * BLOCK_BYTES)
            table = run(server, "status").out
            assert f"{status['write_amplification']:.2f} bytes written per byte put, " in table
            assert "1 of 2 reclaimed segments without moving a block" in table

    @pytest.mark.parametrize(
        ("hours", "words"),
        [
            (24, r"clock  +86,\d{3} s behind the store's time, which never turns back\n"),
            (-24, r"clock  +86,\d{3} s ahead of the store's time; that is believed once it has lasted for a while\n"),
        ],
    )
    def test_status_tells_that_the_clock_is_off(self, tmp_path: Path, hours: int, words: str):
        uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        clock = ManualClock()
        clock.advance(uptime_s - clock.steady_s())
        clock.jump(time.time() + hours * 3600 - clock.now_s())
        open_store(tmp_path / "data", clock).close()  # as if the wall clock had stood there until now
        with running_server(tmp_path / "data") as server:
            status = ok_json(server, "status")
            assert status["clock_ahead_s"] == pytest.approx(hours * 3600, abs=60)
            assert re.search(words, run(server, "status").out)

    def test_drop_does_what_it_said_and_survives_a_restart(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server:
            with connected(server) as client:
                fill(client, "kept", 40)  # or the segment of the others would go with them
                gone = fill(client, "gone", 4)
            done = ok_json(server, "namespace", "drop", gone.digest, "--yes")
            assert (done["done"], done["blocks"], done["bytes"]) == (True, 4, 4 * BLOCK_BYTES)
            assert run(server, "namespace", "show", gone.digest).code == 4
            (block,) = ok_json(server, "block", "show", gone.chain[0].hex())["blocks"]
            assert (block["state"], block["namespace"]) == ("dropped", None)
            assert run(server, "block", "show", gone.chain[0].hex()).code == 0
            server.stop()
        with running_server(tmp_path / "data") as server:
            assert run(server, "namespace", "drop", gone.digest, "--yes").code == 4
            assert [n["spec"]["model"] for n in ok_json(server, "namespace", "list")["namespaces"]] == ["kept"]

    def test_status_check_exits_9_after_a_damaged_block_was_met(self, tmp_path: Path):
        with running_server(tmp_path / "data") as server:
            with connected(server) as client:
                filled = fill(client, "m", 3)
            server.stop()
        flip_a_byte_of(block_bytes(filled.chain, 1), tmp_path / "data")
        with running_server(tmp_path / "data") as server, connected(server) as client:
            assert run(server, "status", "--check").code == 0
            handle = client.namespace(filled.handle.spec)
            got = handle.get(filled.chain, bytearray(3 * BLOCK_BYTES), budget_s=BUDGET_S)
            assert list(got.statuses) == ["OK", "CORRUPT", "OK"]
            ran = run(server, "status", "--check", "-o", "json")
            assert ran.code == 9
            assert ran.json["counters"]["blocks_corrupt"] == 1
            assert "1 damaged block" in ran.err
            assert "[CORRUPTION_FOUND]" in ran.err
            assert run(server, "status").code == 0


def test_no_server_is_unavailable():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        process = as_process(target, "status")
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (5, "")
    assert f"no server answers at {target}" in err
    assert "[UNAVAILABLE]" in err
    assert "fix: check that kvstore-server runs there" in err


def test_a_stuck_server_is_unavailable_after_the_timeout(tmp_path: Path):
    with running_server(tmp_path / "data") as server:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            ran = run(server, "status", "--timeout", "1s")
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert ran.code == 5
    assert "within 1s" in ran.err
    assert "[DEADLINE_EXCEEDED]" in ran.err


def test_a_grpc_server_of_another_kind_is_an_error():
    with ThreadPoolExecutor(1) as threads:
        other = grpc.server(threads)
        port = other.add_insecure_port("127.0.0.1:0")
        other.start()
        try:
            process = as_process(f"127.0.0.1:{port}", "status")
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            other.stop(None).wait()
    assert (process.returncode, out) == (1, "")
    assert "[UNIMPLEMENTED]" in err


def test_an_interrupt_ends_without_a_traceback():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE_S)
        process = as_process(f"127.0.0.1:{silent.getsockname()[1]}", "status", "--timeout", "10m")
        connection, _ = silent.accept()  # it is waiting for the answer now
        with connection:
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.parametrize("output", ["json", "table"])
def test_a_reader_that_went_away_ends_it_without_a_traceback(store: Store, output: str):
    reader, writer = os.pipe()
    os.close(reader)
    process = as_process(store.server.target, "-o", output, "status", stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (141, "")
