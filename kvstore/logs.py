"""Structured logs to stderr: one JSON object a line, or text for people."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from kvstore.config import LogSection

_BYTES_SHOWN = 8
_SECRET = frozenset({"salt", "token", "lease"})


def configure_logs(config: LogSection) -> None:
    """Send this process's logs, those of libraries included, to stderr."""
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    render: list[Any] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if config.format == "json":
        render += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    else:
        render += [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=render))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(config.level.upper())


def redact(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Keep secrets out and hashes short: a log must not let anyone ask for another tenant's blocks."""
    for key, value in event.items():
        if key in _SECRET:
            event[key] = "[redacted]"
        elif isinstance(value, bytes | bytearray | memoryview):
            event[key] = bytes(value[:_BYTES_SHOWN]).hex() + "…"
    return event
