"""Which of LMCache's objects stand in one chain of the store.

LMCache names an object by a hash of all tokens so far, and does not say which object comes before it. A look-up does: it asks
for a request's objects in order. What is put after such a look-up continues the chain of the object before it; what nobody
has asked for yet, such as generated tokens, begins a chain of its own. So a request is a few chains one behind the other, its
segments, and a match per segment finds them all, in any process, without anything that must be remembered.

What is remembered here only decides where the next put goes and where a get looks. If it is forgotten or wrong, objects begin
a chain of their own or are missed; the name of an object says all that it contains, so it is never another's bytes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_NAMES: Final = 1 << 17  # 30 MB, and 33 M tokens in objects of 256


@dataclass(slots=True)
class Run:
    """Objects that stand one behind the other in one chain: `names[first:]`; what comes before is their segment's."""

    names: list[bytes]
    first: int

    @property
    def count(self) -> int:
        """How many objects are meant."""
        return len(self.names) - self.first


class SegmentBook:
    """The objects of one kind, by name. Any thread may call anything."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._lock = threading.Lock()
        # Name -> the object before it, as far as known, and the first object of the segment in which the store has it, if it has.
        self._entries: OrderedDict[bytes, tuple[bytes | None, bytes | None]] = OrderedDict()

    def asked(self, names: Sequence[bytes], segments: Sequence[tuple[int, int]], *, whole: bool = True) -> None:
        """A look-up named a request's objects, from the first one on.

        Args:
            segments: [first, end) of each chain in which the store has them.
            whole: it has no more of them; else nobody knows.
        """
        roots: list[bytes | None] = [None] * len(names)
        for first, end in segments:
            roots[first:end] = [names[first]] * (end - first)
        with self._lock:
            for place, name in enumerate(names):
                known = self._entries.get(name, (None, None))[1]
                self._set(name, names[place - 1] if place else None, roots[place] or (None if whole else known))

    def stored(self, names: Sequence[bytes], first: int) -> None:
        """The store has `names[first:]` in the chain that is `names`."""
        with self._lock:
            for place in range(first, len(names)):
                known, _ = self._entries.get(names[place], (None, None))
                self._set(names[place], names[place - 1] if place else known, names[0])

    def runs(self, names: Sequence[bytes]) -> list[Run]:
        """Where these objects are in the store, or should be put: all of them, in order."""
        runs: list[Run] = []
        with self._lock:
            for name in names:
                if runs and self._continues(runs[-1], name):
                    runs[-1].names.append(name)
                else:
                    runs.append(self._new_run(name))
        return runs

    def _continues(self, run: Run, name: bytes) -> bool:
        parent, root = self._entries.get(name, (None, None))
        return parent == run.names[-1] and root in (None, run.names[0])

    def _new_run(self, name: bytes) -> Run:
        parent, root = self._entries.get(name, (None, None))
        if root is not None:
            path = self._path(name)
            if path:
                return Run(path, len(path) - 1)
        path = self._path(parent) if parent is not None else []
        return Run([*path, name], len(path))

    def _path(self, name: bytes) -> list[bytes]:
        """The segment up to `name`, or nothing if that is not known."""
        path = [name]
        current, root = self._entries.get(name, (None, None))
        if root is None:
            return []
        while path[-1] != root:
            if current is None or len(path) > self._max_names:
                return []
            path.append(current)
            current, _ = self._entries.get(current, (None, None))
        return path[::-1]

    def _set(self, name: bytes, parent: bytes | None, root: bytes | None) -> None:
        self._entries[name] = (parent, root)
        self._entries.move_to_end(name)
        if len(self._entries) > self._max_names:
            self._entries.popitem(last=False)
