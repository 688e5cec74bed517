"""LMCache's objects in a store: look up, load and store batches of them. No call raises for trouble with the store."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import lmcache

from kvstore_api.chain import Chain
from kvstore_api.namespace import NamespaceSpecError
from kvstore_client import KVStoreClient, KVStoreConfigError, PutStatus
from kvstore_client.buffers import byte_view
from kvstore_client.results import BLOCK_OK
from kvstore_engine.lmcache.identity import Kind, Layout, chain_links, object_name
from kvstore_engine.lmcache.segments import SegmentBook
from kvstore_engine.store_steps import StoreSteps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvstore_client import PutResult
    from kvstore_engine.lmcache.segments import Run
    from kvstore_engine.lmcache.settings import LMCacheSettings

# Chains that one look-up follows behind each other. Every answer about generated tokens of a conversation can be one.
MAX_SEGMENTS: Final = 256
# A look-up or a load of many chains makes many calls, and a request waits for all of them: together they get the time of so
# many calls, beside that for their bytes.
_PATIENCE_CALLS: Final = 4
BATCH_DEADLINE: Final = "BATCH_DEADLINE"  # that time is up
_SHORT_HASH: Final = "LMCache's hashes are too short to tell contents apart; start it with --hash-algorithm blake3"
_OTHER_WEIGHTS: Final = (
    "the model's files have changed since the start, and nobody knows which weights made this KV; "
    "restart `lmcache server`, whose own memory has the old ones' too"
)
_LOGGER = logging.getLogger("kvstore_engine.lmcache")


class Batch(NamedTuple):
    """What became of a batch: for each key whether it is there, and the bytes that were moved."""

    done: list[bool]
    moved_bytes: int = 0
    failure: str = ""  # why the rest was not tried; empty if it was


@dataclass(slots=True)
class _Shelf:
    """The objects of one kind: their namespace, and what is known of their chains."""

    steps: StoreSteps
    size_bytes: int
    book: SegmentBook = field(default_factory=SegmentBook)


@dataclass(slots=True)
class _Row:
    """Keys of a batch that stand one behind the other in it and are of one kind and salt."""

    shelf: _Shelf
    places: list[int]  # in the batch
    names: list[bytes]


class ObjectStore:
    """LMCache's objects in the namespaces of one store. Any thread may call anything."""

    def __init__(self, settings: LMCacheSettings) -> None:
        """Sends nothing. Raises: KVStoreConfigError: the settings make no namespace, whatever the objects are."""
        self.settings = settings
        _check_namespace(settings)
        self.client = KVStoreClient(settings.plug.client)
        self._lock = threading.Lock()
        self._shelves: dict[Kind, _Shelf | str] = {}  # or why there is none
        self.refusals: dict[str, int] = {}  # why keys were not kept, and how many

    def look_up(self, keys: Sequence[Any], layouts: Mapping[int, Layout]) -> Batch:
        """Which objects are there. `layouts`: of each object group. Keys of one kind and salt are a request's, in order."""
        done, end_s = [False] * len(keys), self._end_s(0)
        for row in self._rows(keys, [layouts.get(key.object_group_id) for key in keys]):
            segments, failure = self._segments(row, end_s)
            row.shelf.book.asked(row.names, segments, whole=not failure)
            self._mark(done, row, segments)
            if failure:
                return Batch(done, failure=failure)
        return Batch(done)

    def load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Batch:
        """Bring objects into LMCache's memory; those that are not `done` have undefined contents."""
        done, failure = [False] * len(keys), ""
        end_s = self._end_s(sum(memory_object.get_size() for memory_object in objects))
        for row, run, places in self._runs(keys, objects):
            budget_s = self._budget_s(len(places) * row.shelf.size_bytes, end_s)
            if not budget_s:
                failure = BATCH_DEADLINE
                break
            views = [piece for place in places for piece in self._pieces(objects[place], row.shelf)]
            result = row.shelf.steps.fetch_blocks(
                self._chain(run.names), views, first_block=run.first * self._per_object, budget_s=budget_s
            )
            for place, statuses in zip(places, _split(result.statuses, self._per_object), strict=False):
                done[place] = len(statuses) == self._per_object and all(status == BLOCK_OK for status in statuses)
            if result.failure is not None:
                failure = result.failure.reason
                break
        moved = sum(objects[place].get_size() for place in range(len(keys)) if done[place])
        return Batch(done, moved, failure)

    def store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Batch:
        """Put objects; `done` are those that the store confirms to have."""
        done, moved, failure = [False] * len(keys), 0, ""
        for row, run, places in self._runs(keys, objects):
            views = [piece for place in places for piece in self._pieces(objects[place], row.shelf)]
            results = row.shelf.steps.put_blocks(
                self._chain(run.names), run.first * self._per_object, views, self.settings.plug.traffic_class
            )
            there = _leading(results) // self._per_object
            row.shelf.book.stored(run.names[: run.first + there], run.first)
            for place in places[:there]:
                done[place] = True
            moved += sum(len(views[0]) for result in results if result.status is PutStatus.STORED)
            if there < len(places):
                failure = _first_reason(results)
                break
        return Batch(done, moved, failure)

    @property
    def _per_object(self) -> int:
        return self.settings.pieces

    def _runs(self, keys: Sequence[Any], objects: Sequence[Any]) -> Iterator[tuple[_Row, Run, list[int]]]:
        for row in self._rows(keys, [Layout.of_object(item) for item in objects]):
            place = 0
            for run in row.shelf.book.runs(row.names):
                yield row, run, row.places[place : place + run.count]
                place += run.count

    def _rows(self, keys: Sequence[Any], layouts: Sequence[Layout | None]) -> list[_Row]:
        kinds = [None if layout is None else Kind.of(key, layout) for key, layout in zip(keys, layouts, strict=True)]
        rows = []
        order = sorted(range(len(keys)), key=lambda place: (keys[place].kv_rank, keys[place].object_group_id))
        for (kind, _), group in groupby(order, key=lambda place: (kinds[place], keys[place].cache_salt)):
            row = self._row(kind, list(group), keys)
            if row is not None:
                rows.append(row)
        return rows

    def _row(self, kind: Kind | None, places: list[int], keys: Sequence[Any]) -> _Row | None:
        shelf = "LMCache gives no layout for the object group" if kind is None else self._shelf(kind)
        names = [object_name(keys[place]) for place in places]
        if isinstance(shelf, str) or None in names:
            self._refuse(shelf if isinstance(shelf, str) else _SHORT_HASH, len(places))
            return None
        return _Row(shelf, places, [name for name in names if name is not None])

    def _shelf(self, kind: Kind) -> _Shelf | str:
        if self.settings.weights is not None and self.settings.weights.changed():
            return _OTHER_WEIGHTS
        with self._lock:
            shelf = self._shelves.get(kind)
            if shelf is None:
                shelf = self._shelves[kind] = self._new_shelf(kind)
            return shelf

    def _new_shelf(self, kind: Kind) -> _Shelf | str:
        refusal = kind.refusal(self.settings)
        if refusal:
            return refusal
        spec = kind.spec(self.settings, lmcache.__version__)
        return _Shelf(StoreSteps(self.client.namespace(spec)), kind.layout.size_bytes)

    def _refuse(self, reason: str, keys: int) -> None:
        with self._lock:
            known = self.refusals.get(reason, 0)
            self.refusals[reason] = known + keys
        if not known:
            _LOGGER.warning("objects are not kept: %s; this is not logged again", reason)

    def _end_s(self, size_bytes: int) -> float:
        config = self.client.config
        return time.monotonic() + (_PATIENCE_CALLS - 1) * config.base_budget_s + config.budget_s(size_bytes)

    def _budget_s(self, size_bytes: int, end_s: float) -> float:
        """A call's usual time, or what is left of its batch's: 0 if nothing is."""
        return max(0.0, min(self.client.config.budget_s(size_bytes), end_s - time.monotonic()))

    def _segments(self, row: _Row, end_s: float) -> tuple[list[tuple[int, int]], str]:
        """[first, end) of each chain in which the row's objects are, one behind the other; and why there are no more."""
        segments: list[tuple[int, int]] = []
        first = 0
        while first < len(row.names) and len(segments) < MAX_SEGMENTS:
            chain = self._chain(row.names[first:])
            budget_s = self._budget_s(len(chain.data), end_s)
            if not budget_s:
                return segments, BATCH_DEADLINE
            match = row.shelf.steps.look_up(chain, self.settings.plug.traffic_class, budget_s=budget_s)
            if match.failure is not None:
                return segments, match.failure.reason
            objects = match.hit_length_blocks // self._per_object
            if not objects:
                break
            segments.append((first, first + objects))
            first += objects
        return segments, ""

    def _mark(self, done: list[bool], row: _Row, segments: list[tuple[int, int]]) -> None:
        end = segments[-1][1] if segments else 0
        if end * self.settings.chunk_size < self.settings.plug.min_hit_tokens:
            return
        for place in row.places[:end]:
            done[place] = True

    def _chain(self, names: Sequence[bytes]) -> Chain:
        return Chain(chain_links(names, self._per_object))

    def _pieces(self, memory_object: Any, shelf: _Shelf) -> list[memoryview]:  # noqa: ANN401 - LMCache's MemoryObj
        view = byte_view(memory_object.byte_array, "object")
        if len(view) != shelf.size_bytes:
            raise ValueError(f"an object of {shelf.size_bytes} bytes has {len(view)}")
        size = len(view) // self._per_object
        return [view[piece * size : (piece + 1) * size] for piece in range(self._per_object)]


def _check_namespace(settings: LMCacheSettings) -> None:
    any_kind = Kind(settings.lmcache_model, 0, 0, Layout(((settings.chunk_size,),), ("uint8",), settings.chunk_size))
    try:
        any_kind.spec(settings, lmcache.__version__).validate()
    except NamespaceSpecError as error:
        raise KVStoreConfigError("INVALID_CONFIG", str(error)) from None


def _split(statuses: Sequence[str], count: int) -> Iterator[Sequence[str]]:
    return (statuses[first : first + count] for first in range(0, len(statuses), count))


def _leading(results: Sequence[PutResult]) -> int:
    for place, result in enumerate(results):
        if result.status is PutStatus.REJECTED:
            return place
    return len(results)


def _first_reason(results: Sequence[PutResult]) -> str:
    return next((result.reason for result in results if result.status is PutStatus.REJECTED), "NO_RESULT")
