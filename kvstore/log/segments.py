"""All segment files of a data directory: making, finding, retiring and counting them."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import threading
from typing import TYPE_CHECKING

from kvstore.errors import CorruptDataDirError, StorageError
from kvstore.log import format as fmt
from kvstore.log.device import SCRATCH_SUFFIX
from kvstore.log.segment import Segment, row_capacity, segment_name
from kvstore.types import SegmentId

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kvstore.log.device import Device
    from kvstore.types import ClassId

_log = logging.getLogger(__name__)
DAMAGED_SUFFIX = ".damaged"
# What a disk or a file system says of a file whose bytes it cannot give; other errors say something about this process.
UNREADABLE_ERRNOS = frozenset({errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN})
_PROBE_FILE = "unlink" + SCRATCH_SUFFIX
_CANNOT_BE_ASKED_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE}
)  # no room for one more file
# So many segments in a row that cannot be given back are no accident: one more is tried after a while, and not all of them now.
_REFUSALS_MAX = 8
_REFUSED_S = 60.0


class SegmentSet:
    """Segments by id. `get` is for any thread; making and retiring are for the writer thread."""

    def __init__(
        self,
        directory: Path,
        device: Device,
        store_id: bytes,
        segment_size_bytes: int,
        *,
        durable: bool,
        lease_max_s: float,
    ) -> None:
        self.segment_size_bytes = segment_size_bytes
        self.durable = durable  # whether what is acknowledged has to survive power loss
        self._directory = directory
        self._device = device
        self._store_id = store_id
        self._lease_max_s = lease_max_s
        self._lock = threading.Lock()  # guards the two dicts, never held across I/O
        self._segments: dict[SegmentId, Segment] = {}
        self._allocated: dict[SegmentId, int] = {}
        self._retiring: list[Segment] = []  # writer thread only
        self._refused_in_row = 0  # segments that could not be unlinked since the last that could; writer thread only
        self._refused_until_s = 0.0  # by the steady clock; writer thread only
        self._used_bytes = 0  # of all in _allocated
        # Files set aside; replaced as a whole.
        self._aside = sorted(path for path in directory.iterdir() if path.suffix == DAMAGED_SUFFIX)
        self._removable = self._aside  # those of them whose removal was not tried; writer thread only, once it runs

    def open_all(self, *, trust_seals: bool) -> None:
        """Open every file there is. One that is damaged, or that the disk does not give, is set aside under another name, loudly.

        It stays aside, also when the disk gives it again: what was deleted or expired meanwhile would come back with it.

        Args: trust_seals: see `Segment.open`.
        Raises: FormatVersionError, ForeignSegmentError: a file this server must not touch; OSError: the system refuses one, for
            lack of descriptors or rights say, which says nothing about what is in it; StorageError: the disk does not give most
            of them, which is for somebody to look at.
        """
        paths = sorted(path for path in self._directory.iterdir() if path.suffix == ".seg" and not path.is_dir())
        unreadable: dict[Path, OSError] = {}
        for path in paths:
            try:
                self._add(Segment.open(path, self._device, self._store_id, trust_seal=trust_seals))
            except CorruptDataDirError as error:
                if is_blank(path):
                    # Made shortly before a power loss and never synced: it says nothing, and nobody could make it say more.
                    self._device.unlink(path)
                    _log.warning("segment %s was never written before the machine stopped and is removed", path.name)
                    continue
                self._set_aside(path, error)
            except OSError as error:
                if error.errno not in UNREADABLE_ERRNOS:
                    raise
                unreadable[path] = error
        if len(unreadable) > max(1, len(paths) // 2):
            first = next(iter(unreadable))
            raise StorageError(
                f"the disk does not give {len(unreadable)} of {len(paths)} segment files ({first.name}: "
                f"{unreadable[first].strerror}); look at the disk, or move the files away to start without them"
            )
        for path in unreadable:
            self._set_aside(path, unreadable[path])

    def give_up(self, segment: Segment, error: OSError) -> None:
        """Set a file aside that was opened, but does not give its rows; at start, before anybody uses it. Raises: OSError."""
        with self._lock:
            del self._segments[segment.segment_id]
            self._used_bytes -= self._allocated.pop(segment.segment_id)
        self._set_aside(segment.path, error)

    def _set_aside(self, path: Path, error: Exception) -> None:
        aside = path.with_suffix(path.suffix + DAMAGED_SUFFIX)
        self._device.rename(path, aside)
        if self.durable:
            self.sync_names()
        _log.error("segment %s was set aside as %s: %s", path.name, aside.name, error)
        self._aside = [*self._aside, aside]
        self._removable = self._aside

    def drop_damaged(self) -> bool:
        """Remove the files that were set aside, which nobody may need as much as room; False if there was none to remove."""
        kept, dropped = [], False
        for path in self._removable:
            try:
                self._device.unlink(path)
                dropped = True
                _log.warning("segment file %s, set aside as damaged, was removed to make room", path.name)
            except OSError as error:
                kept.append(path)
                _log.warning("segment file %s cannot be removed and keeps its space: %s", path.name, error)
        self._removable = []  # not tried again before the next start, but counted
        if dropped:
            self._aside = kept
        return dropped

    def create(self, segment_id: SegmentId, class_id: ClassId, now_s: float) -> Segment:
        """Make a new segment. Raises: OSError."""
        header = fmt.SegmentHeader(
            segment_id, self._store_id, class_id, row_capacity(self.segment_size_bytes), int(now_s)
        )
        segment = Segment.create(self._directory / segment_name(segment_id), self._device, header)
        if self.durable:
            self._device.sync_directory(self._directory)
        self._add(segment)
        return segment

    def _add(self, segment: Segment) -> None:
        allocated = segment.allocated_bytes()
        with self._lock:
            self._segments[segment.segment_id] = segment
            self._allocated[segment.segment_id] = allocated
            self._used_bytes += allocated

    def get(self, segment_id: int) -> Segment | None:
        """The segment, unless it is reclaimed."""
        return self._segments.get(SegmentId(segment_id))

    def all(self) -> list[Segment]:
        """Every segment whose file is there, oldest first."""
        with self._lock:
            return [self._segments[segment_id] for segment_id in sorted(self._segments)]

    def note_growth(self, segment: Segment) -> None:
        """Count a segment's new size."""
        allocated = segment.allocated_bytes()
        with self._lock:
            self._used_bytes += allocated - self._allocated[segment.segment_id]
            self._allocated[segment.segment_id] = allocated

    def retire(self, segment: Segment) -> None:
        """Take a segment out of use; its file goes when the last lease that could name it has passed."""
        segment.state = fmt.STATE_RETIRED
        self._retiring.append(segment)

    def reap(self, now_s: float, steady_s: float) -> int:
        """Unlink retired files whose leases have passed; returns bytes given back.

        A file that cannot be unlinked stays on the list and keeps counting; the others go on.
        Args: now_s, steady_s: the store's time, and the steady clock's.
        """
        freed, kept = 0, []
        for segment in self._retiring:
            # What says later is damage, or was noted by a clock that was ahead: no lease given before the file was retired ends
            # later. One of a start with a larger store.lease_max_s loses its file too; its get looks the chain up.
            segment.limit_lease(math.ceil(now_s + self._lease_max_s))
            if segment.lease_until_s >= now_s or not self._unlink(segment, steady_s):
                kept.append(segment)
                continue
            with self._lock:
                del self._segments[segment.segment_id]
                allocated = self._allocated.pop(segment.segment_id)
                self._used_bytes -= allocated
            freed += allocated
        self._retiring = kept
        return freed

    def sync_names(self) -> None:
        """Return when the files that there are survive power loss; told if that cannot be had."""
        try:
            self._device.sync_directory(self._directory)
        except OSError as error:
            _log.warning("%s cannot be synced: a power loss may take new segments: %s", self._directory, error)

    def sync_flags(self) -> None:
        """Return when no flag can be lost any more; writer thread only. Raises: OSError.

        All segments: an older copy of a deleted block, say one that was moved, must not come back either.
        """
        for segment in self.all():
            if segment.flags_unsynced:
                segment.sync()

    def _unlink(self, segment: Segment, steady_s: float) -> bool:
        try:
            if self.durable and segment.flags_unsynced:
                # The file may come back after a power loss: then it must still say that its blocks have moved.
                segment.sync()
            self._device.unlink(segment.path)
        except FileNotFoundError:
            _log.warning("segment %s was removed by somebody else", segment.path.name)
        except OSError as error:
            if not segment.unlink_failed:
                _log.warning("segment %s cannot be removed and keeps its space: %s", segment.path.name, error)
                self._refused_in_row += 1
                self._refused_until_s = steady_s + _REFUSED_S
            segment.unlink_failed = True
            return False
        self._refused_in_row = 0
        return True

    def nothing_can_be_unlinked(self, steady_s: float) -> bool:
        """Whether a file that cannot be is the directory's fault, or the disk's: then reclaiming more would free nothing.

        An empty file is asked, because where some segments refuse the next one may go; but not when many have, one after the other.
        """
        if not any(segment.unlink_failed for segment in self._retiring):
            return False
        refused = self._refused_in_row >= _REFUSALS_MAX and steady_s < self._refused_until_s
        return refused or not self._lets_a_file_go()

    def _lets_a_file_go(self) -> bool:
        """Do with an empty file what giving back a segment takes."""
        path = self._directory / _PROBE_FILE
        try:
            # One that is there could not be removed the last time.
            descriptor = self._device.open(path) if path.exists() else self._device.create(path)
        except OSError as error:
            return error.errno in _CANNOT_BE_ASKED_ERRNOS
        try:
            try:
                if self.durable:
                    self._device.sync(descriptor)
            finally:
                self._device.close(descriptor)
                self._device.unlink(path)
        except OSError:
            return False
        return True

    def used_bytes(self) -> int:
        """Allocated bytes of all segment files, retired and damaged ones included."""
        return self._used_bytes + _allocated_bytes(self._aside)

    def accounted(self) -> dict[SegmentId, int]:
        """What is counted for each segment file."""
        with self._lock:
            return dict(self._allocated)

    def retiring_bytes(self) -> int:
        """Of those, files that only wait for leases to pass."""
        retiring = [segment for segment in self._retiring if not segment.unlink_failed]
        with self._lock:
            return sum(self._allocated.get(segment.segment_id, 0) for segment in retiring)

    def release(self) -> None:
        """Let go of all files."""
        with self._lock:
            self._segments.clear()
            self._allocated.clear()
            self._used_bytes = 0
        self._retiring.clear()


def _allocated_bytes(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):  # removed by hand, or the disk does not even say
            total += path.stat().st_blocks * 512
    return total


def is_blank(path: Path) -> bool:
    """Whether a segment file's header page is missing or all zeros."""
    with path.open("rb") as file:
        return not any(file.read(fmt.HEADER_BYTES))
