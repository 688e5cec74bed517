"""The words of kvstore-admin's command line, and how its results are rendered. No server is needed here."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from kvstore.cli.admin import globals_first
from kvstore.cli.admin_client import command_error
from kvstore.cli.admin_errors import CommandError, ExitCode
from kvstore.cli.admin_evict import Eviction, Selection
from kvstore.cli.admin_ttl import ClassUsage, TtlList
from kvstore.cli.admin_values import (
    check_address,
    format_amount,
    format_bytes,
    format_duration,
    parse_duration,
    parse_hex_prefix,
    parse_share,
)
from kvstore.cli.admin_verify import _Scrub
from kvstore.cli.output import Digest, Facts, Listing, OutputFormat, Result, Section, Sentence, emit, printable, to_json
from kvstore.cli.progress import progress_show
from kvstore_api.namespace import KvGroupKind
from kvstore_api.v1 import admin_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

DIGEST = "0123456789abcdef" * 4
DIGEST_ON_A_TERMINAL = "0123456789abcdef"


@dataclass(frozen=True, slots=True)
class Sections(Result):
    """Any sections as a result."""

    items: Sequence[Section]

    def sections(self) -> Iterable[Section]:
        return self.items


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1),
        ("90s", 90),
        ("10m", 600),
        ("36h", 129_600),
        ("7d", 604_800),
        ("1d12h", 129_600),
        ("1d2h3m4s", 93_784),
        ("007d", 604_800),
    ],
)
def test_a_duration_is_numbers_with_units(text: str, seconds: int):
    assert parse_duration(text, "DURATION") == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "90",
        "d",
        "7 d",
        " 7d",
        "7d ",
        "-7d",
        "+7d",
        "1.5h",
        "7D",
        "7w",
        "500ms",
        "12h1d",
        "1d1d",
        "٣d",
        "7d\n",
        "0s",
        "0d0h",
        "315576000001s",
        "9" * 5000 + "d",
    ],
)
def test_a_wrong_duration_is_refused_by_name_and_value(text: str):
    with pytest.raises(CommandError) as caught:
        parse_duration(text, "--older-than")
    assert caught.value.exit_code is ExitCode.USAGE
    assert "--older-than" in caught.value.message
    assert repr(text) in caught.value.message
    assert caught.value.fix


@given(st.integers(min_value=1, max_value=315_576_000_000))
def test_a_duration_that_was_written_is_read_back(seconds: int):
    assert parse_duration(format_duration(seconds), "DURATION") == seconds


def test_durations_are_written_short():
    assert [format_duration(s) for s in (0, 1, 600, 3 * 86_400, 129_600)] == ["0s", "1s", "10m", "3d", "1d12h"]


@pytest.mark.parametrize(
    ("text", "share"),
    [("0", 0), ("0.5", 0.5), ("1", 1), ("50%", 0.5), ("0%", 0), ("100%", 1), ("12.5%", 0.125), ("1%", 0.01)],
)
def test_a_share_is_a_number_or_a_percentage(text: str, share: float):
    assert parse_share(text, "--down-to") == pytest.approx(share)


@pytest.mark.parametrize(
    "text", ["", "50", "1.01", "101%", "-0.1", "half", "50 %", "%", ".5", "5.", "nan", "inf", "1e-1", "0,5"]
)
def test_a_wrong_share_is_refused_by_name_and_value(text: str):
    with pytest.raises(CommandError) as caught:
        parse_share(text, "--down-to")
    assert caught.value.exit_code is ExitCode.USAGE
    assert "--down-to" in caught.value.message
    assert repr(text) in caught.value.message


def test_a_digest_may_be_cut_to_eight_digits_and_written_in_capitals():
    assert parse_hex_prefix("ABCDEF01", "namespace") == "abcdef01"
    assert parse_hex_prefix(DIGEST, "namespace") == DIGEST


@pytest.mark.parametrize(
    "text", ["", "a", "abcdef0", "abcdefg0", DIGEST + "0", "0xabcdef01", "abcdef01 ", "abcdef01\n", "٠١٢٣٤٥٦٧"]
)
def test_a_wrong_digest_is_refused_by_name_and_value(text: str):
    with pytest.raises(CommandError) as caught:
        parse_hex_prefix(text, "namespace")
    assert caught.value.exit_code is ExitCode.USAGE
    assert repr(text) in caught.value.message


@pytest.mark.parametrize(
    "text", ["127.0.0.1:7420", "localhost:1", "[::1]:65535", "store.example.com:7420", "unix:/run/kv.sock"]
)
def test_an_address_is_host_and_port_or_a_socket(text: str):
    assert check_address(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        "localhost:",
        ":7420",
        "::1:7420",
        "a:0",
        "a:65536",
        "a:b",
        "http://a:1",
        "a b:1",
        "a:1\n",
        "unix:",
    ],
)
def test_a_wrong_address_is_refused_by_value(text: str):
    with pytest.raises(CommandError) as caught:
        check_address(text)
    assert caught.value.exit_code is ExitCode.USAGE
    assert repr(text) in caught.value.message


@pytest.mark.parametrize(
    ("given_args", "hoisted"),
    [
        (["status", "-o", "json"], ["-o", "json", "status"]),
        (["ttl", "list", "--output=json"], ["--output=json", "ttl", "list"]),
        (["evict", "--yes", "--server", "a:1", "--class", "b"], ["--server", "a:1", "evict", "--yes", "--class", "b"]),
        (["-o", "json", "status"], ["-o", "json", "status"]),
        (["status", "--timeout"], ["status", "--timeout"]),
        (["block", "show", "--", "-o", "json"], ["block", "show", "--", "-o", "json"]),
    ],
)
def test_global_options_may_stand_after_the_command(given_args: list[str], hoisted: list[str]):
    assert globals_first(given_args) == hoisted


def test_sizes_are_written_for_people_and_exactly():
    assert [format_bytes(n) for n in (0, 1023, 1024, 114_688, 10 << 30, 1 << 60)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "112.0 KiB",
        "10.0 GiB",
        "1024.0 PiB",
    ]
    assert format_amount(1, 64) == "1 block, 64 B"
    assert format_amount(2048, 234_881_024) == "2,048 blocks, 224.0 MiB (234,881,024 bytes)"


def test_json_has_exact_numbers_hex_digests_and_utc_times():
    moment = datetime(2026, 11, 3, 14, 5, 6, 789_000, tzinfo=timezone(timedelta(hours=2)))
    value = {"a": (1, 2.5, None, True), "digest": b"\x00\xff", "time": moment, "kind": KvGroupKind.SLIDING_WINDOW}
    assert to_json(value) == {
        "a": [1, 2.5, None, True],
        "digest": "00ff",
        "time": "2026-11-03T12:05:06.789Z",
        "kind": "sliding_window",
    }
    assert to_json(ClassUsage("agent", 60, "on_access", 3, 1 << 60)) == {
        "name": "agent",
        "ttl_s": 60,
        "refresh": "on_access",
        "blocks": 3,
        "bytes": 1 << 60,
        "asked_tokens": 0,
        "hit_tokens": 0,
    }


def test_a_field_without_a_json_form_is_a_bug_not_a_string():
    with pytest.raises(TypeError, match="object"):
        to_json({"a": object()})


def test_json_is_the_whole_of_stdout(capsys: pytest.CaptureFixture[str]):
    emit(TtlList([ClassUsage("agent", 60, "on_access", 3, 192)]), OutputFormat.JSON)
    printed = capsys.readouterr()
    assert [usage["name"] for usage in json.loads(printed.out)["classes"]] == ["agent"]
    assert printed.err == ""


def test_a_table_in_a_pipe_keeps_digests_whole_and_has_no_colour(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    emit(Sections([Listing(("namespace", "model"), [(Digest(DIGEST), "m" * 200)])]), OutputFormat.TABLE)
    printed = capsys.readouterr().out
    assert DIGEST in printed
    assert "m" * 200 in printed
    assert "\x1b" not in printed


def test_a_terminal_gets_short_digests_in_lists_and_whole_ones_where_one_thing_is_shown():
    on_terminal = _on_terminal("Listing(('digest',), [(Digest('0123456789abcdef' * 4),)])")
    assert DIGEST_ON_A_TERMINAL in on_terminal
    assert DIGEST not in on_terminal
    assert DIGEST in _on_terminal("Facts([('digest', '0123456789abcdef' * 4)])")


def _on_terminal(section: str) -> str:
    """What a process prints of a section on a terminal of its own, 120 columns wide."""
    code = "from kvstore.cli.output import _print_tables, Digest, Facts, Listing"
    master, slave = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-c", f"{code}; _print_tables([{section}])"],
            stdout=slave,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "COLUMNS": "120", "TERM": "xterm"},
            check=True,
            timeout=60,
        )
        return os.read(master, 65_536).decode()
    finally:
        os.close(master)
        os.close(slave)


def test_names_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]):
    hostile = "\x1b[31mred\x07[bold]x[/bold]:smile:\u202e\n"
    emit(Sections([Facts([("model", hostile)]), Sentence(hostile)]), OutputFormat.TABLE)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\u202e" not in printed
    assert printed.count("\\x1b[31mred\\x07[bold]x[/bold]:smile:\\u202e\\n") == 2
    assert printable("größe 模型") == "größe 模型"


def test_an_eviction_that_matched_nothing_is_not_found_unless_a_share_was_asked_for():
    by_class = Selection(None, "agent", None, None)
    assert Eviction(done=True, selection=by_class, blocks=1, bytes=64).complaint() is None
    complaint = Eviction(done=True, selection=by_class, blocks=0, bytes=0).complaint()
    assert complaint is not None
    assert (complaint.exit_code, complaint.reason) == (ExitCode.NOT_FOUND, "NOTHING_MATCHED")
    to_share = Selection(None, "agent", None, 0.5)
    assert Eviction(done=True, selection=to_share, blocks=0, bytes=0).complaint() is None


class FailedCall(grpc.RpcError):
    """What grpc raises, as data."""

    def __init__(self, code: grpc.StatusCode, details: str, reason: str = "", domain: str = "kvstore") -> None:
        super().__init__()
        self._code, self._details = code, details
        info = any_pb2.Any()
        info.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain))
        status = status_pb2.Status(code=code.value[0], message=details, details=[info])
        self._metadata = (("grpc-status-details-bin", status.SerializeToString()),) if reason else ()

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Sequence[tuple[str, bytes]]:
        return self._metadata


@pytest.mark.parametrize(
    ("code", "reason", "exit_code"),
    [
        (grpc.StatusCode.NOT_FOUND, "NAMESPACE_NOT_FOUND", ExitCode.NOT_FOUND),
        (grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_TRAFFIC_CLASS", ExitCode.NOT_FOUND),
        (grpc.StatusCode.INVALID_ARGUMENT, "NAMESPACE_AMBIGUOUS", ExitCode.USAGE),
        (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", ExitCode.USAGE),
        (grpc.StatusCode.UNAVAILABLE, "OVERLOADED", ExitCode.UNAVAILABLE),
        (grpc.StatusCode.UNAVAILABLE, "NOT_SERVING", ExitCode.UNAVAILABLE),
        (grpc.StatusCode.DATA_LOSS, "DATA_DIR_CORRUPT", ExitCode.CORRUPTION),
        (grpc.StatusCode.INTERNAL, "STORAGE_ERROR", ExitCode.ERROR),
        (grpc.StatusCode.INTERNAL, "A_REASON_OF_A_LATER_VERSION", ExitCode.ERROR),
    ],
)
def test_the_servers_reason_decides_the_exit_code(code: grpc.StatusCode, reason: str, exit_code: ExitCode):
    error = command_error(FailedCall(code, "words", reason), "127.0.0.1:7420", 10)
    assert (error.reason, error.exit_code, error.message) == (reason, exit_code, "words")
    assert error.fix


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (grpc.StatusCode.UNAVAILABLE, ExitCode.UNAVAILABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ExitCode.UNAVAILABLE),
        (grpc.StatusCode.DATA_LOSS, ExitCode.CORRUPTION),
        (grpc.StatusCode.UNIMPLEMENTED, ExitCode.ERROR),
        (grpc.StatusCode.PERMISSION_DENIED, ExitCode.ERROR),
    ],
)
@pytest.mark.parametrize("make", [FailedCall, lambda *words: FailedCall(*words, "REASON", domain="a.proxy.between")])
def test_without_a_reason_of_ours_the_status_decides(
    make: Callable[..., FailedCall], code: grpc.StatusCode, exit_code: ExitCode
):
    error = command_error(make(code, "words"), "127.0.0.1:7420", 10)
    assert (error.reason, error.exit_code) == (code.name, exit_code)


def test_the_admin_command_loads_neither_the_store_nor_a_server():
    code = (
        "import sys, kvstore.cli.admin\n"
        "print([m for m in sys.modules if m == 'lmdb' or m == 'pydantic_settings' or m.startswith('kvstore_client')"
        " or (m.startswith('kvstore.') and not m.startswith('kvstore.cli'))])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "[]"


def test_times_in_json_are_utc_even_without_milliseconds():
    assert to_json(datetime(2026, 1, 2, tzinfo=UTC)) == "2026-01-02T00:00:00.000Z"


def verification(*reasons: str):
    scrub = _Scrub("")
    blocks = [admin_pb2.DamagedBlock(segment_id=1, slot=slot, reason=reason) for slot, reason in enumerate(reasons)]
    answer = admin_pb2.VerifyResponse(cursor="2:0", blocks_checked=20, damaged=blocks, finished=True)
    answer.invariants.SetInParent()
    with progress_show("verify") as show:
        scrub.add(answer, show)
    return scrub.result(None)


class TestVerification:
    def test_a_block_that_cannot_be_read_is_told_apart_from_a_damaged_one(self, capsys):
        result = verification("BAD_CHECKSUM", "IO_ERROR", "IO_ERROR")
        err = capsys.readouterr().err
        assert "damaged: a block whose row is damaged, too, segment 1 slot 0: BAD_CHECKSUM" in err
        assert "unreadable: a block" in err
        assert [(block.slot, block.reason) for block in result.damaged] == [(0, "BAD_CHECKSUM")]
        assert [block.slot for block in result.unreadable_blocks] == [1, 2]
        complaint = result.complaint()
        assert complaint.exit_code == ExitCode.CORRUPTION
        assert complaint.message == "found 1 damaged block, 2 unreadable blocks"

    def test_unreadable_blocks_alone_are_a_complaint(self):
        complaint = verification("IO_ERROR").complaint()
        assert (complaint.exit_code, complaint.message) == (ExitCode.CORRUPTION, "found 1 unreadable block")
        assert "offered again after a minute" in complaint.fix
        assert verification().complaint() is None
