"""Logs are lines of JSON that hold no secret and no hash in full."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest

from kvstore.logs import redact

SECRET = hashlib.sha256(b"somebody's prompt").digest()

PROGRAM = """
import logging, structlog
from kvstore.config import LogSection
from kvstore.logs import configure_logs
configure_logs(LogSection(format="{format}", level="info"))
log = structlog.get_logger("kvstore.test")
log.debug("too low")
log.info("stored", prefix_hash=bytes.fromhex("{secret}"), salt="pepper", blocks=3)
logging.getLogger("grpc").warning("from a library %d", 7)
try:
    1 // 0
except ZeroDivisionError:
    log.exception("went wrong")
"""


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_cut_and_secrets_dropped(kind):
    event = redact(None, "info", {"prefix_hash": kind(SECRET), "salt": "pepper", "lease": kind(SECRET), "blocks": 3})
    assert event == {
        "prefix_hash": SECRET[:8].hex() + "…",
        "salt": "[redacted]",
        "lease": "[redacted]",
        "blocks": 3,
    }


def written(log_format: str) -> list[str]:
    program = PROGRAM.format(format=log_format, secret=SECRET.hex())
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == ""
    assert SECRET.hex() not in ended.stderr
    assert "pepper" not in ended.stderr
    return ended.stderr.splitlines()


def test_json_logs_are_one_object_a_line_libraries_included():
    stored, library, wrong = map(json.loads, written("json"))
    assert (stored["event"], stored["blocks"], stored["level"]) == ("stored", 3, "info")
    assert (library["event"], library["logger"], library["level"]) == ("from a library 7", "grpc", "warning")
    assert (wrong["event"], wrong["level"]) == ("went wrong", "error")
    assert "ZeroDivisionError" in wrong["exception"]
    assert all("timestamp" in record for record in (stored, library, wrong))


def test_console_logs_are_text_without_colours_when_nobody_looks():
    text = "\n".join(written("console"))
    assert "stored" in text
    assert "blocks=3" in text
    assert "\x1b" not in text


def test_importing_the_logs_configures_nothing():
    program = "import logging, kvstore.logs; print(logging.getLogger().handlers)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
