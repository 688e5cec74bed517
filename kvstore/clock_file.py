"""The file `clock` of a data directory: what the store's time was when it was last noted."""

from __future__ import annotations

import logging
import struct
import weakref
import zlib
from typing import TYPE_CHECKING

from kvstore.clock import ClockNote

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.clock import GuardedClock
    from kvstore.log.device import Device

_log = logging.getLogger(__name__)

CLOCK_FILE = "clock"
_MAGIC = 0x3143564B  # "KVC1" on disk
_HEAD = struct.Struct("<II")  # magic, crc32 of the rest
_BODY = struct.Struct("<dd16s")  # the store's time, the boot's steady time, the boot id's first 16 bytes
_BOOT_ID_BYTES = 16
_INTERVAL_S = 10.0


class ClockFile:
    """Notes the time now and then. Losing the file, or writing none, costs no more than the guard across restarts."""

    def __init__(self, path: Path, device: Device) -> None:
        self._device = device
        self._next_s = 0.0  # by the steady clock
        self._descriptor: int | None = None
        try:
            self._descriptor = device.open(path) if path.exists() else device.create(path)
            self._closer = weakref.finalize(self, device.close, self._descriptor)
        except OSError as error:
            _log.warning("%s cannot be used, jumps of the clock during a restart will not be noticed: %s", path, error)

    def load(self) -> ClockNote | None:
        """The last note, or None if there is none, or none that is whole."""
        if self._descriptor is None:
            return None
        data = bytearray(_HEAD.size + _BODY.size)
        try:
            size = self._device.read(self._descriptor, [memoryview(data)], 0)
        except OSError:
            return None
        magic, crc = _HEAD.unpack_from(data)
        body = bytes(data[_HEAD.size :])
        if size < len(data) or magic != _MAGIC or crc != zlib.crc32(body):
            return None
        store_s, steady_s, boot_id = _BODY.unpack(body)
        return ClockNote(store_s, steady_s, boot_id.rstrip(b"\0"))

    def keep(self, clock: GuardedClock) -> None:
        """Note the time, unless that was done a moment ago."""
        if clock.steady_s() >= self._next_s:
            self.save(clock.note())
            self._next_s = clock.steady_s() + _INTERVAL_S

    def save(self, note: ClockNote) -> None:
        """Note the time."""
        if self._descriptor is None:
            return
        body = _BODY.pack(note.store_s, note.steady_s, note.boot_id)
        try:
            # One small write: the death of the process leaves the old note or the new one.
            self._device.write(self._descriptor, [_HEAD.pack(_MAGIC, zlib.crc32(body)) + body], 0)
        except OSError as error:
            _log.debug("the time could not be noted: %s", error)

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor is not None:
            self._closer()
            self._descriptor = None


def short_boot_id(boot_id: bytes) -> bytes:
    """As it stands in notes."""
    return boot_id[:_BOOT_ID_BYTES]
