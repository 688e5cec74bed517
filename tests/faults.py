"""A disk that fails on demand, and one that forgets what was not synced; behind the interface that production uses."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore.log import format as fmt
from kvstore.log.device import FileDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer


class FaultyDevice(FileDevice):
    """The file system, until told otherwise. Counts down writes, so that each kind of write can be the one that fails."""

    def __init__(self) -> None:
        self.fail_write_after: int | None = None  # writes that still succeed; then `write_errno`
        self.partial_write = False  # the failing write puts half of its bytes on disk first
        self.write_errno = errno.ENOSPC
        self.fail_create = False
        self.fail_resize = False
        self.fail_read = False
        self.fail_unlink: Callable[[Path], bool] = lambda path: False
        # The errno with which a read of a file's bytes from the one to before the other fails; 0: it does not.
        self.fail_read_of: Callable[[Path, int, int], int] = lambda path, begin, end: 0
        self.short_read_bytes = 0  # every read comes back so much too short
        self.stall_write_after: int | None = None  # the write after so many puts half of its bytes on disk and waits
        self.stalled, self.go_on = threading.Event(), threading.Event()
        self.sync_count = 0
        self.fail_sync = False

    def heal(self) -> None:
        FaultyDevice.__init__(self)

    def create(self, path: Path, mode: int = 0o640) -> int:
        if self.fail_create:
            raise OSError(errno.ENOSPC, "injected: no space for a file")
        return super().create(path, mode)

    def resize(self, descriptor: int, size_bytes: int) -> None:
        if self.fail_resize:
            raise OSError(errno.ENOSPC, "injected: no space to grow a file")
        super().resize(descriptor, size_bytes)

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset_bytes: int) -> None:
        if self.stall_write_after is not None:
            self.stall_write_after -= 1
            if self.stall_write_after < 0:
                self.stall_write_after = None
                self._write_half(descriptor, buffers, offset_bytes)
                self.stalled.set()
                self.go_on.wait(60)
        if self.fail_write_after is not None:
            if self.fail_write_after == 0:
                if self.partial_write:
                    self._write_half(descriptor, buffers, offset_bytes)
                raise OSError(self.write_errno, "injected: write failed")
            self.fail_write_after -= 1
        super().write(descriptor, buffers, offset_bytes)

    def _write_half(self, descriptor: int, buffers: Sequence[Buffer], offset_bytes: int) -> None:
        data = b"".join(bytes(memoryview(buffer).cast("B")) for buffer in buffers)
        super().write(descriptor, [data[: len(data) // 2]], offset_bytes)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset_bytes: int) -> int:
        if self.fail_read:
            raise OSError(errno.EIO, "injected: read failed")
        total = sum(len(buffer) for buffer in buffers)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if error := self.fail_read_of(path, offset_bytes, offset_bytes + total):
            raise OSError(error, f"injected: {os.strerror(error)}")
        wanted = max(0, total - self.short_read_bytes)
        cut = []
        for buffer in buffers:
            cut.append(buffer[:wanted])
            wanted -= len(cut[-1])
        return super().read(descriptor, cut, offset_bytes)

    def sync(self, descriptor: int) -> None:
        self.sync_count += 1
        if self.fail_sync:
            raise OSError(errno.EIO, "injected: sync failed")
        super().sync(descriptor)

    def unlink(self, path: Path) -> None:
        if self.fail_unlink(path):
            raise OSError(errno.EPERM, "injected: not permitted")
        super().unlink(path)


SECTOR_BYTES = 16
_PAGE_BYTES = 4096
_INDEX = "index/data.mdb"
_OLD_INDEXES_KEPT = 3
_UNTRACKED = ("LOCK", _INDEX, "index/lock.mdb")


class _File:
    """What the device knows of an inode: its content through a descriptor of its own, and the content of the last sync."""

    def __init__(self, descriptor: int, synced: bytes) -> None:
        self._descriptor = os.dup(descriptor)
        self.synced = synced

    def content(self) -> bytes:
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)

    def forget(self) -> None:
        os.close(self._descriptor)


@dataclass(frozen=True)
class _Inode:
    """A file in an image: what a process would read, and what a power loss would at least leave."""

    content: bytes
    synced: bytes


@dataclass(frozen=True)
class Image:
    """A data directory at the moment a process or the machine stopped, by path below the directory."""

    now: dict[str, _Inode]
    durable: dict[str, _Inode]  # as the synced directories have it; an unlinked file may still be here
    index: bytes | None
    old_indexes: list[bytes]


class PowerLossDevice(FaultyDevice):
    """Real files below `root`, of which a power loss takes what was not synced.

    Fault model:

    - The process sees the files as they are. For each file the content at its last `sync` is remembered, and for each
      directory its names at the last `sync_directory`.
    - When the machine stops, every 16-byte sector that differs from the synced content is lost or kept, each by itself; so
      unsynced writes are lost, torn and reordered, those made through the memory map too. How likely a loss is differs from
      crash to crash, from none to all. The file's size is the synced one, the latest, or one in between.
    - A name that its directory does not have durably may vanish, one that was unlinked or replaced may come back, each by itself.
    - `replace` is not special: it is as atomic as its steps make it.
    - LMDB's file does not come through here. It turns into an arbitrary one of: itself, an older copy, garbage, nothing.
    - The boot id changes.
    - When only the process dies, everything written is there, also what was not synced, and is still not synced afterwards.

    `crash_after` lets the machine or the process stop in the middle of an operation: before the step (create, write, resize, sync,
    sync_directory, unlink, rename) after so many, or half-way through it if it is a write. What the store does after that moment
    goes to files that nobody will see again; the directory's `image` is kept and put in place by `reboot` or `restart`, once the
    store has let go of its files. Every choice comes from the seed, which `__repr__` shows.
    """

    def __init__(self, root: Path, seed: int) -> None:
        super().__init__()
        self.root = root
        self.crash_after: int | None = None
        self.image: Image | None = None
        self._seed = seed
        self._rng = random.Random(seed)
        self._boots = 0
        self._names: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._open: dict[int, _File] = {}
        self._old_indexes: list[bytes] = []

    def __repr__(self) -> str:
        return f"PowerLossDevice(seed={self._seed})"

    # Device

    def create(self, path: Path, mode: int = 0o640) -> int:
        self._step()
        descriptor = super().create(path, mode)
        self._open[descriptor] = self._names[self._name(path)] = _File(descriptor, b"")
        return descriptor

    def open(self, path: Path) -> int:
        descriptor = super().open(path)
        name = self._name(path)
        if name not in self._names:  # from before the device, and durable
            file = _File(descriptor, os.pread(descriptor, os.fstat(descriptor).st_size, 0))
            self._names[name] = self._durable_names[name] = file
        self._open[descriptor] = self._names[name]
        return descriptor

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        self._open.pop(descriptor, None)

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset_bytes: int) -> None:
        if self._is_due() and self._rng.random() < 0.5:
            self._write_half(descriptor, buffers, offset_bytes)
        self._step()
        super().write(descriptor, buffers, offset_bytes)

    def resize(self, descriptor: int, size_bytes: int) -> None:
        self._step()
        super().resize(descriptor, size_bytes)

    def sync(self, descriptor: int) -> None:
        self._step()
        super().sync(descriptor)
        self._open[descriptor].synced = self._open[descriptor].content()

    def sync_directory(self, path: Path) -> None:
        self._step()
        super().sync_directory(path)
        if path in self.root.parents:
            return  # the root itself is always there after a loss
        directory = self._name(path)
        for name in {*self._names, *self._durable_names}:
            if os.path.dirname(name) == directory:
                self._set_durable(name, self._names.get(name))

    def unlink(self, path: Path) -> None:
        name = self._name(path)
        if path.exists():
            self._step()
            self._know(path)
        super().unlink(path)
        self._names.pop(name, None)

    def rename(self, path: Path, target: Path) -> None:
        self._step()
        self._know(path)
        if target.exists():
            self._know(target)
        super().rename(path, target)
        self._names[self._name(target)] = self._names.pop(self._name(path))

    def boot_id(self) -> bytes:
        return b"boot %d of seed %d" % (self._boots, self._seed)

    # Crashes

    def remember_index(self) -> None:
        """Keep a copy of LMDB's file, so that a power loss can bring it back."""
        index = self.root / _INDEX
        if index.exists():
            self._old_indexes = [*self._old_indexes, index.read_bytes()][-_OLD_INDEXES_KEPT:]

    def stop(self) -> None:
        """The process or the machine stops now, unless it has already."""
        if self.image is None:
            self.image = self._take_image()

    def restart(self) -> None:
        """Put the image in place as a process finds it whose predecessor died. The store must have let go of its files."""
        image = self._put_back(
            lambda image: {name: inode.content for name, inode in image.now.items()}, keep_index=True
        )
        names = {id(inode): name for name, inode in image.now.items()}
        for name, inode in image.now.items():
            self._names[name] = self._reopened(self.root / name, inode)
        for name, inode in image.durable.items():
            there = names.get(id(inode))
            self._durable_names[name] = self._names[there] if there is not None else self._nameless(inode)

    def reboot(self) -> None:
        """Put the image in place as the machine finds it after a power loss. The store must have let go of its files."""
        self._boots += 1
        loss = self._rng.choice([0.0, 0.03, 0.5, 0.5, 0.97, 1.0])
        self._put_back(lambda image: self._after_power_loss(image, loss), keep_index=False)

    def _name(self, path: Path) -> str:
        return "" if path == self.root else path.relative_to(self.root).as_posix()

    def _know(self, path: Path) -> None:
        """Make the device know a file that it has not opened, one from before its time."""
        if self._name(path) not in self._names:
            self.close(self.open(path))

    def _set_durable(self, name: str, file: _File | None) -> None:
        if file is None:
            self._durable_names.pop(name, None)
        else:
            self._durable_names[name] = file

    def _is_due(self) -> bool:
        return self.crash_after == 0 and self.image is None

    def _step(self) -> None:
        if self._is_due():
            self.stop()
        elif self.crash_after is not None:
            self.crash_after -= 1

    def _take_image(self) -> Image:
        for path in self.root.rglob("*"):
            if path.is_file() and self._name(path) not in _UNTRACKED:
                self._know(path)
        inodes = {id(file): _Inode(file.content(), file.synced) for file in self._files()}
        index = self.root / _INDEX
        return Image(
            {name: inodes[id(file)] for name, file in self._names.items()},
            {name: inodes[id(file)] for name, file in self._durable_names.items()},
            index.read_bytes() if index.exists() else None,
            self._old_indexes,
        )

    def _files(self) -> list[_File]:
        return list({id(file): file for file in (*self._names.values(), *self._durable_names.values())}.values())

    def _put_back(self, content: Callable[[Image], dict[str, bytes]], *, keep_index: bool) -> Image:
        image = self.image
        assert image is not None, "nothing has stopped"
        for file in self._files():
            file.forget()
        self._names, self._durable_names, self._open = {}, {}, {}
        # New files for old names, so that whatever is still mapped of the old ones disturbs nobody.
        for entry in self.root.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for directory in ("segments", "index"):
            (self.root / directory).mkdir()
        for name, data in content(image).items():
            _write_sparsely(self.root / name, data)
        index = image.index if keep_index else self._some_index(image)
        if index is not None:
            (self.root / _INDEX).write_bytes(index)
        self.crash_after, self.image = None, None
        return image

    def _reopened(self, path: Path, inode: _Inode) -> _File:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _File(descriptor, inode.synced)
        finally:
            os.close(descriptor)

    def _nameless(self, inode: _Inode) -> _File:
        """A file that was unlinked, not durably."""
        descriptor = os.memfd_create("unlinked")
        try:
            os.write(descriptor, inode.content)
            return _File(descriptor, inode.synced)
        finally:
            os.close(descriptor)

    def _after_power_loss(self, image: Image, loss: float) -> dict[str, bytes]:
        left: dict[int, bytes] = {}
        files = {}
        for name in sorted({*image.now, *image.durable}):
            inode = image.now.get(name)
            if inode is not image.durable.get(name) and self._rng.random() < max(loss, 0.1):
                inode = image.durable.get(name)
            if inode is not None:
                if id(inode) not in left:
                    left[id(inode)] = self._lose(inode, loss)
                files[name] = left[id(inode)]
        return files

    def _lose(self, inode: _Inode, loss: float) -> bytes:
        """The file's content when each unsynced sector is lost with that probability, or not."""
        size = max(len(inode.content), len(inode.synced))
        shape = (-(-size // SECTOR_BYTES), SECTOR_BYTES)
        now, synced = (
            np.frombuffer(data.ljust(shape[0] * SECTOR_BYTES, b"\0"), dtype=np.uint8).reshape(shape)
            for data in (inode.content, inode.synced)
        )
        lost = np.random.default_rng(self._rng.getrandbits(64)).random(shape[0]) < loss
        mixed = np.where(lost[:, np.newaxis], synced, now).tobytes()
        between = self._rng.randint(*sorted((len(inode.content), len(inode.synced))))
        length = self._rng.choice([len(inode.content), len(inode.synced), between])
        if self._rng.random() >= loss:
            length = len(inode.content)
        return mixed[:length]

    def _some_index(self, image: Image) -> bytes | None:
        choices: list[bytes | None] = [
            None,
            None,
            image.index,
            self._rng.randbytes(5 * _PAGE_BYTES),
            *image.old_indexes,
        ]
        return self._rng.choice(choices)


def _write_sparsely(path: Path, data: bytes) -> None:
    """A page of zeros stays a hole, as it was: a stop fills none, and space is counted."""
    with path.open("wb") as file:
        for start in range(0, len(data), fmt.ALIGNMENT_BYTES):
            page = data[start : start + fmt.ALIGNMENT_BYTES]
            if page.count(0) < len(page):
                file.seek(start)
                file.write(page)
        file.truncate(len(data))


def flip_bit(path: Path, offset_bytes: int, bit: int) -> None:
    """What a dying disk does."""
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)[0]
        file.seek(offset_bytes)
        file.write(bytes([byte ^ (1 << bit)]))
