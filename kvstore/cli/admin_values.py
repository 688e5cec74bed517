"""The words of the command line: durations, shares, digests, addresses; and numbers for people's eyes."""

from __future__ import annotations

import re

from kvstore.cli.admin_errors import usage_error

_SECONDS_PER_UNIT = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:(\d{1,12})d)?(?:(\d{1,12})h)?(?:(\d{1,12})m)?(?:(\d{1,12})s)?", re.ASCII)
_DURATION_FIX = "write a whole number and a unit, s, m, h or d, e.g. 90s, 10m, 36h, 7d or 1d12h"
# What google.protobuf.Duration can carry; the server's own limits are much tighter and it names them.
_MAX_DURATION_S = 315_576_000_000

_BYTES_PER_UNIT = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"(\d{1,15})\s?([KMGT]iB|B|)", re.ASCII | re.IGNORECASE)
_SIZE_FIX = "write a whole number and a unit, B, KiB, MiB, GiB or TiB, e.g. 100MiB; 0 for no limit"
_MAX_SIZE_BYTES = 1 << 62

_SHARE = re.compile(r"(\d+(?:\.\d+)?)(%?)", re.ASCII)
_SHARE_FIX = "write a number from 0 to 1 or a percentage from 0% to 100%, e.g. 0.5 or 50%"

_HEX_PREFIX = re.compile(r"[0-9a-f]{8,64}", re.ASCII)
_UNIX_SOCKET = re.compile(r"unix:/.+", re.DOTALL)
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(\d{1,5})", re.ASCII)


def parse_duration(text: str, name: str) -> int:
    """Seconds of a duration such as 90s, 10m, 36h, 7d or 1d12h.

    Raises: CommandError: `text` is no duration, is zero, or is longer than a request can carry; says `name`.
    """
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise usage_error(f"{name} {text!r} is no duration", _DURATION_FIX)
    numbers = (int(number or 0) for number in match.groups())
    seconds = sum(number * unit for number, unit in zip(numbers, _SECONDS_PER_UNIT.values(), strict=True))
    if seconds == 0:
        raise usage_error(f"{name} {text!r} is zero", "give at least 1s")
    if seconds > _MAX_DURATION_S:
        raise usage_error(f"{name} {text!r} is longer than 10,000 years", "give a shorter duration")
    return seconds


def format_duration(seconds: int) -> str:
    """The shortest way to write a duration that `parse_duration` reads back, e.g. 3d or 1d12h."""
    parts = []
    rest = seconds
    for unit, unit_seconds in _SECONDS_PER_UNIT.items():
        count, rest = divmod(rest, unit_seconds)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def parse_size(text: str, name: str) -> int:
    """Bytes of a size such as 100MiB, or 0.

    Raises: CommandError: `text` is no size, or is longer than a request can carry; says `name`.
    """
    match = _SIZE.fullmatch(text)
    size = int(match[1]) * _BYTES_PER_UNIT[match[2].upper()] if match else -1
    if not 0 <= size <= _MAX_SIZE_BYTES:
        raise usage_error(f"{name} {text!r} is no size", _SIZE_FIX)
    return size


def parse_share(text: str, name: str) -> float:
    """A share of the capacity, 0 to 1, written as 0.5 or 50%.

    Raises: CommandError: `text` is neither, or out of range; says `name`.
    """
    match = _SHARE.fullmatch(text)
    if match is None:
        raise usage_error(f"{name} {text!r} is no share", _SHARE_FIX)
    share = float(match[1]) / (100 if match[2] else 1)
    if share > 1:
        raise usage_error(f"{name} {text!r} is more than the whole capacity", _SHARE_FIX)
    return share


def parse_hex_prefix(text: str, name: str) -> str:
    """A 32-byte digest in hex, or at least 8 digits of its beginning, in lower case.

    Raises: CommandError: `text` is no such thing; says `name`.
    """
    digits = text.lower()
    if _HEX_PREFIX.fullmatch(digits) is None:
        raise usage_error(f"{name} {text!r} is no digest", "give 8 to 64 hexadecimal digits of it, from its beginning")
    return digits


def check_class_name(text: str, name: str) -> str:
    """`text` if it can be a traffic class; whether there is one is the server's to say.

    On the wire an empty name means the default class, or any: not what somebody with an unset variable wanted.
    Raises: CommandError: it is empty; says `name`.
    """
    if not text:
        raise usage_error(f"{name} '' is no traffic class", "`kvstore-admin ttl list` shows the classes there are")
    return text


def check_address(text: str) -> str:
    """`text` if it is HOST:PORT, with an IPv6 host in brackets, or unix:/PATH.

    Raises: CommandError: it is not, or the port is out of range.
    """
    if _UNIX_SOCKET.fullmatch(text):
        return text
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match[2]) <= 65_535:
        raise usage_error(
            f"--server {text!r} is no address", "write HOST:PORT, e.g. 127.0.0.1:7420 or [::1]:7420, or unix:/PATH"
        )
    return text


def format_bytes(size_bytes: int) -> str:
    """A size for people, e.g. 4.2 GiB; JSON has the exact number."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PiB"


def format_share(part: int, whole: int) -> str:
    """A part of a whole for tables; nothing is no share."""
    return f"{part / whole:.2%}" if whole else "-"


def format_hit_rate(hit_tokens: int, asked_tokens: int) -> str:
    """A hit rate with what it is a share of."""
    if not asked_tokens:
        return "nothing asked yet"
    return f"{format_share(hit_tokens, asked_tokens)} of {asked_tokens:,} tokens asked for"


def format_amount(blocks: int, size_bytes: int) -> str:
    """Blocks and their bytes for people, with the exact numbers: what an evict or a drop is about."""
    noun = "block" if blocks == 1 else "blocks"
    exact = f" ({size_bytes:,} bytes)" if size_bytes >= 1024 else ""
    return f"{blocks:,} {noun}, {format_bytes(size_bytes)}{exact}"
