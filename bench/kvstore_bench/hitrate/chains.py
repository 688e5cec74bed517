"""Requests whose blocks have names of any kind, made a `Workload` with dense ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore_bench.hitrate.workload import NO_SESSION, Workload, WorkloadError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from numpy.typing import NDArray

_NOTHING = -1
_SPAN_MAX_S = 20 * 365.25 * 86_400


class BrokenNamesError(Exception):
    """A block's name stood behind another block before, so that it does not name its prefix."""


class ChainCollector:
    """Takes requests in any order. A block's name stands for the block and its prefix."""

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = tuple(classes)
        self._ids: dict[Hashable, int] = {}
        self._parents: list[int] = []  # by id
        self._time_s: list[float] = []
        self._class_id: list[int] = []
        self._session: list[int] = []
        self._input_tokens: list[int] = []
        self._chains: list[NDArray[np.int32]] = []

    def __len__(self) -> int:
        return len(self._time_s)

    def add(
        self,
        time_s: float,
        input_tokens: int,
        names: Sequence[Hashable],
        *,
        behind: NDArray[np.int32] | None = None,
        class_id: int = 0,
        session: int = NO_SESSION,
    ) -> NDArray[np.int32]:
        """A request; returns the ids of its blocks.

        Args:
            names: of its blocks from block 0 on, or of those behind the ones in `behind`.
            behind: ids of its first blocks, as an earlier call has returned them.
        Raises: BrokenNamesError.
        """
        head = np.zeros(0, dtype=np.int32) if behind is None else behind
        last = int(head[-1]) if len(head) else _NOTHING
        chain = np.concatenate([head, np.array(self._number(names, last), dtype=np.int32)])
        self._time_s.append(time_s)
        self._class_id.append(class_id)
        self._session.append(session)
        self._input_tokens.append(input_tokens)
        self._chains.append(chain)
        return chain

    def _number(self, names: Sequence[Hashable], parent: int) -> list[int]:
        numbers = []
        for name in names:
            number = self._ids.setdefault(name, len(self._parents))
            if number == len(self._parents):
                self._parents.append(parent)
            elif self._parents[number] != parent:
                raise BrokenNamesError(
                    f"block {name!r} stood behind another block before; a name must name the prefix too"
                )
            numbers.append(number)
            parent = number
        return numbers

    def workload(self, name: str, block_tokens: int, origin: Mapping[str, object]) -> Workload:
        """All of them in the order of their times, those of one moment as they came.

        Raises: WorkloadError: there are none, no block, or more than a store's whole life lies between them.
        """
        times = np.array(self._time_s)
        if not len(times):
            raise WorkloadError(f"{name}: there is no request in it")
        if not self._parents:
            raise WorkloadError(f"{name}: no prompt fills a block of {block_tokens} tokens")
        if times.max() - times.min() > _SPAN_MAX_S:
            days = (times.max() - times.min()) / 86_400
            raise WorkloadError(
                f"{name}: its timestamps span {days:,.0f} days; they are to be in seconds, not milliseconds"
            )
        order = np.argsort(times, kind="stable")
        chains = [self._chains[i] for i in order]
        lengths = np.array([len(chain) for chain in chains], dtype=np.int32)
        return Workload(
            name=name,
            block_tokens=block_tokens,
            classes=self._classes,
            time_s=times[order],
            class_id=np.array(self._class_id, dtype=np.uint8)[order],
            session=np.array(self._session, dtype=np.int32)[order],
            input_tokens=np.array(self._input_tokens, dtype=np.int64)[order],
            starts=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
            blocks=np.concatenate(chains),
            asked_blocks=lengths,  # a log or trace says nothing of an answer's blocks
            unique_blocks=len(self._parents),
            origin=origin,
        )
