"""The store on local disk: the only door to log, index, leases and TTLs. Synchronous and thread-safe; knows no grpc."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from kvstore import eviction
from kvstore.census import Census, Rules, expired_mask, live_mask
from kvstore.clock import GuardedClock
from kvstore.clock_file import CLOCK_FILE, ClockFile, short_boot_id
from kvstore.config import OTHER_TENANTS
from kvstore.counters import StoreCounters
from kvstore.data_dir import DataDir
from kvstore.dropped import tag_of
from kvstore.errors import (
    InvalidArgumentError,
    KvStoreError,
    NamespaceAmbiguousError,
    NamespaceNotFoundError,
    OverloadedError,
    StorageError,
    StoreFullError,
    UnknownTrafficClassError,
)
from kvstore.expiry import TtlTable, class_uses
from kvstore.finding import find_blocks, find_slots, find_state_slots
from kvstore.index import BlockIndex, anchor_of, block_keys, state_key
from kvstore.invariants import InvariantCheck
from kvstore.leases import LeaseMint
from kvstore.log import format as fmt
from kvstore.log.check import Alive, whole_rows
from kvstore.log.device import Device, FileDevice
from kvstore.log.reader import BlockReader, ReadRequest
from kvstore.log.segments import SegmentSet
from kvstore.log.streams import crowded
from kvstore.log.writer import TICK_S, LogWriter, NewEntry, Outcome, PutJob, storage_error
from kvstore.match_counters import MatchCounters
from kvstore.quotas import Quota, QuotaBook, Quotas
from kvstore.reclaim import Reclaimer
from kvstore.recover import recover
from kvstore.scrub import Scrubber, parse_cursor
from kvstore.states import ChainStates, state_hash
from kvstore.traffic import MAX_TTL_S, RefreshRule
from kvstore.types import (
    BlockAddr,
    BlockInfo,
    ClassId,
    EvictSelection,
    InvariantReport,
    Match,
    Namespace,
    PutBlock,
    QuotaUsage,
    SegmentId,
    StateObject,
    StoreStatus,
    TokenCounts,
    Usage,
)
from kvstore.worth import Valuation
from kvstore_api.checksum import block_checksum
from kvstore_api.limits import HASH_BYTES, MAX_STATE_BYTES
from kvstore_api.namespace import NamespaceDigest, NamespaceSpecError
from kvstore_api.results import PutResult, PutStatus
from kvstore_api.resume import resume_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvstore.catalog import Catalog, ClassRecord
    from kvstore.clock import Clock
    from kvstore.config import StoreConfig, TenantConfig, TrafficClassConfig
    from kvstore.eviction import Choice
    from kvstore.log.segment import Segment
    from kvstore.scrub import ScrubStep
    from kvstore.traffic import TrafficClass
    from kvstore.types import NamespaceId, ReadFrame
    from kvstore_api.chain import Chain
    from kvstore_api.namespace import NamespaceSpec

    # A segment, positions among the addresses that were asked for, and the slots these name.
    _Place = tuple[Segment, slice | NDArray[np.intp], slice | NDArray[np.intp]]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_SEGMENTS_PER_CAPACITY = 16  # reclaim works by segments, so there have to be some
_HEX_PREFIX_MIN = 8
_LEASE_RETRIES = 3
# A reclaim flags blocks that it has moved, then commits where they are now; a look-up in between waits for that.
_MOVE_RETRIES = 50
_MOVE_WAIT_S = 0.002
# Who has reached a limit and still puts loses its coldest blocks down to this share of it, but none used so lately.
_TRIM_TO_SHARE = 15 / 16
_TRIM_SPARES_S = 60
_RUNS_MAX = 64  # of neighbouring slots, beyond which they are not looked at one by one


class LocalStore:
    """Blocks on this machine's disk. See FORMAT.md for the bytes."""

    def __init__(
        self,
        data_dir: DataDir,
        catalog: Catalog,
        config: StoreConfig,
        traffic_classes: Mapping[str, TrafficClassConfig],
        tenants: Mapping[str, TenantConfig],
        clock: Clock,
        device: Device,
        progress: Callable[[int, int], None],
        *,
        tick_s: float | None,
    ) -> None:
        self.store_id = catalog.store_id
        self.counters = StoreCounters()
        self._match_counters = MatchCounters()
        self._data_dir, self._device, self._config = data_dir, device, config
        self._default_class = next(iter(traffic_classes))
        self._clock_file = ClockFile(data_dir.path / CLOCK_FILE, device)
        self._clock = GuardedClock(clock, short_boot_id(device.boot_id()), self._clock_file.load())
        self._clock_file.keep(self._clock)
        self._catalog_lock = threading.Lock()  # guards changes of _catalog; reading the attribute needs none
        self._catalog = catalog
        self._catalog_saved = True  # guarded by _catalog_lock
        self._rules = _rules(catalog)
        self._next_segment_id, self._segment_ids_end = 0, 0  # writer thread only, once it runs
        self._invariants: InvariantReport | None = None  # of the last check; replaced as a whole
        try:
            self._reserve_segment_ids()  # now, so that no put waits for it
        except OSError as error:
            _log.warning("the catalog cannot be written, puts will be rejected until it can: %s", error)
        self._segments = SegmentSet(
            data_dir.segments,
            device,
            bytes.fromhex(catalog.store_id),
            segment_size_bytes(config),
            durable=config.durability == "sync",
            lease_max_s=config.lease_max_s,
        )
        self._index = BlockIndex(data_dir.index, catalog.store_id, config.capacity, device)
        try:
            # An index that cannot be trusted means that the machine may have stopped, and with it unsynced parts of segments.
            self._segments.open_all(trust_seals=self._index.found.usable)
            recover(self._segments, self._index, progress)
        except BaseException:
            self._index.abandon()
            self._segments.release()
            raise
        self._skip_segment_ids()
        self._mint = LeaseMint(catalog.secret)
        self._reader = BlockReader(self._segments, self.counters, self._correct_index)
        self._valuation = Valuation(lambda: self._rules.ttls)
        self._census = Census(lambda: self._rules, self._clock)
        self._adopt_classes(traffic_classes)
        self._all_quotas = _quotas(self._catalog, traffic_classes, tenants)
        self._quotas = QuotaBook(
            self._all_quotas,
            config.capacity,
            self._census,
            self._segments.all,
            lambda: self._rules,
        )
        self._reclaimer = Reclaimer(
            self._segments,
            self._index,
            self._clock,
            self.counters,
            self._census,
            self._quotas,
            config=config,
            small_files_bytes=data_dir.small_files_bytes,
            rules=lambda: self._rules,
            valuation=self._valuation,
        )
        self._writer = LogWriter(
            self._segments,
            self._index,
            self._clock,
            self.counters,
            live=self._is_live,
            admission=self._quotas,
            valuation=self._valuation,
            crowded=lambda: crowded(len(self._segments.all()), config.capacity, self._segments.segment_size_bytes),
            new_segment=self._new_segment,
            make_room=lambda need_bytes, entries: self._reclaimer.make_room(need_bytes, self._writer, entries),
            housekeeping=self._tick,
            durable=config.durability == "sync",
            queue_max_bytes=config.put_queue,
            tick_s=tick_s,
        )
        self._writer.start()
        self._shrink()

    @classmethod
    def open(
        cls,
        data_dir: Path,
        config: StoreConfig,
        traffic_classes: Mapping[str, TrafficClassConfig],
        clock: Clock,
        *,
        tenants: Mapping[str, TenantConfig] | None = None,
        device: Device | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        tick_s: float | None = TICK_S,
    ) -> Self:
        """Open a data directory, or make one. The first traffic class is the default.

        Args:
            progress: called with (segments done, segments in all) while the index is brought up to date.
            tick_s: seconds between two times of housekeeping; None: only when `tick` is called, for who sets the clock by hand.
        Raises: DataDirLockedError, FormatVersionError, CorruptDataDirError, ForeignSegmentError, ConfigError. Nothing is lost.
        """
        device = device or FileDevice()
        directory = DataDir.open(data_dir, device)
        try:
            catalog = directory.load_catalog(device)
            catalog.with_classes(traffic_classes)  # what is wrong with them is told before anything is changed
            return cls(
                directory, catalog, config, traffic_classes, tenants or {}, clock, device, progress, tick_s=tick_s
            )
        except OSError as error:
            directory.close()
            raise storage_error(error) from error
        except BaseException:
            directory.close()
            raise

    def _adopt_classes(self, traffic_classes: Mapping[str, TrafficClassConfig]) -> None:
        """Take over what the configuration says of traffic classes. A longer TTL revives nothing that has expired."""
        catalog = self._catalog.with_classes(traffic_classes)
        known = self._catalog.classes
        if any(r.traffic_class.ttl_s > known[n].traffic_class.ttl_s for n, r in catalog.classes.items() if n in known):
            try:
                self._end_expired()
            except OSError as error:
                _log.warning("a power loss may revive what the old TTLs had ended: %s", error)
        if catalog != self._catalog:
            # In force also on a full disk: puts wait for the catalog to be written, which every tick tries.
            self._catalog_saved = False
            self._use_catalog(catalog)
            try:
                self._save(catalog)
            except OSError as error:
                _log.warning("the catalog cannot be written, and its traffic classes are those of this run: %s", error)

    def _save(self, catalog: Catalog) -> None:
        """Raises: OSError."""
        catalog.save(self._data_dir.path, self._device)
        self._catalog_saved = True

    def _save_late(self) -> None:
        """Write what could not be written when it changed. Raises: OSError: it cannot be yet."""
        with self._catalog_lock:
            if not self._catalog_saved:
                self._save(self._catalog)

    def _use_catalog(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._rules = _rules(catalog, self._rules)

    def _shrink(self) -> None:
        """Get below a cap that is smaller than at the last start."""
        try:
            self._on_writer(lambda: self._reclaimer.make_room(0, self._writer))
        except StoreFullError as error:
            if self._reclaimer.used_bytes() > self._config.capacity:
                _log.warning("the data directory is over its cap: %s", error)

    def close(self) -> None:
        """Finish queued puts, seal, sync the index, give the directory back. Idempotent."""
        self._writer.close()
        self._index.close()
        self._segments.release()
        with contextlib.suppress(OSError):  # told at the start
            self._save_late()
        self._clock_file.save(self._clock.note())
        self._clock_file.close()
        self._data_dir.close()

    # Namespaces and classes

    def register_namespace(self, spec: NamespaceSpec) -> Namespace:
        """The namespace of a spec, new or known. Raises: InvalidArgumentError, StorageError."""
        try:
            spec.validate()
        except NamespaceSpecError as error:
            raise InvalidArgumentError(f"namespace spec: {error}") from None
        self._check_fits(spec.block_bytes)
        digest = spec.digest()
        known = self._catalog.namespaces.get(digest)
        if known is not None:
            return known
        self._change_catalog(
            lambda catalog: (
                catalog if digest in catalog.namespaces else catalog.with_namespace(spec, self._clock.now_s())
            )
        )
        return self._catalog.namespaces[digest]

    def _check_fits(self, size_bytes: int) -> None:
        room = self._segments.segment_size_bytes - fmt.Layout(_row_capacity(self._config)).payload_offset
        if fmt.align(size_bytes) > room:
            raise InvalidArgumentError(
                f"block_bytes is {size_bytes}, a segment takes {room}; raise store.segment_size "
                f"(and store.capacity, of which a segment is at most 1/{_SEGMENTS_PER_CAPACITY})"
            )

    def namespace(self, digest: bytes) -> Namespace:
        """A registered namespace. Raises: InvalidArgumentError, NamespaceNotFoundError."""
        if len(digest) != HASH_BYTES:
            raise InvalidArgumentError(f"namespace has {len(digest)} bytes, a digest has {HASH_BYTES}")
        found = self._catalog.namespaces.get(NamespaceDigest(digest))
        if found is None:
            raise NamespaceNotFoundError(f"namespace {digest.hex()[:16]}… is not registered here; register it first")
        return found

    def find_namespace(self, hex_prefix: str) -> Namespace:
        """The namespace whose digest begins so. Raises: InvalidArgumentError, NamespaceNotFoundError, NamespaceAmbiguousError."""
        _hex_prefix(hex_prefix, "namespace")
        found = [n for digest, n in self._catalog.namespaces.items() if digest.hex().startswith(hex_prefix.lower())]
        if not found:
            raise NamespaceNotFoundError(f"no namespace begins with {hex_prefix}; `namespace list` shows them")
        if len(found) > 1:
            raise NamespaceAmbiguousError(f"{len(found)} namespaces begin with {hex_prefix}; give more digits")
        return found[0]

    def namespaces(self) -> list[tuple[Namespace, Usage]]:
        """All namespaces with what they hold, oldest first."""
        usage = self._census.by_namespace(self._segments.all())
        return [(n, usage.get(n.namespace_id, Usage())) for n in self._catalog.namespaces.values()]

    def drop_namespace(self, namespace: Namespace, *, dry_run: bool) -> Usage:
        """Forget a namespace: its blocks are misses at once, their space comes back by and by. Returns what it held."""
        usage = dict((n.namespace_id, usage) for n, usage in self.namespaces()).get(namespace.namespace_id, Usage())
        if dry_run:
            return usage
        dropped: list[Namespace] = []  # by us, and not by another call at the same time

        def drop(catalog: Catalog) -> Catalog:
            dropped.extend(n for n in catalog.namespaces.values() if n.namespace_id == namespace.namespace_id)
            return catalog.without_namespace(namespace)

        self._change_catalog(drop)
        self._match_counters.forget_dropped(self._namespace_ids)
        self.counters.add(blocks_deleted=usage.blocks if dropped else 0)
        self._give_back()
        return usage

    def _namespace_ids(self) -> list[NamespaceId]:
        return [namespace.namespace_id for namespace in self._catalog.namespaces.values()]

    def tokens_of(self, namespace: Namespace) -> TokenCounts:
        """What this namespace's matches asked for and hit since the start."""
        return self._match_counters.of_namespace(namespace.namespace_id)

    def tokens_by_label(self) -> dict[tuple[str, str], TokenCounts]:
        """What matches asked for and hit since the start, by (namespace label, traffic class); see `MatchCounters`."""
        return self._match_counters.by_label(self._namespace_ids)

    def traffic_classes(self) -> list[TrafficClass]:
        """The classes in force."""
        return [record.traffic_class for record in self._catalog.classes.values()]

    def set_ttl(self, traffic_class: str, ttl_s: int) -> tuple[TrafficClass, TrafficClass]:
        """Change a class's TTL, at once and for good; returns the class before and after.

        A shorter one lets blocks expire now. A longer one keeps what is alive for longer; what has expired stays so.

        Raises: UnknownTrafficClassError, InvalidArgumentError.
        """
        if not traffic_class:
            raise UnknownTrafficClassError("the class to change is not named")
        before = self._class(traffic_class).traffic_class
        if not 1 <= ttl_s <= MAX_TTL_S:
            raise InvalidArgumentError(f"ttl is {ttl_s} s, allowed are 1 to {MAX_TTL_S} s")
        before = self._on_writer(lambda: self._set_ttl(before.name, ttl_s))
        for segment in self._segments.all():
            self._census.of(segment)  # here, so that no put has to wait for it
        return before, self._class(before.name).traffic_class

    def _set_ttl(self, name: str, ttl_s: int) -> TrafficClass:
        """On the writer thread, or a block could expire and be moved in between; returns the class before."""
        before = self._class(name).traffic_class
        longer = ttl_s > before.ttl_s
        if longer:
            try:
                self._end_expired()
            except OSError as error:
                raise storage_error(error) from error
        # And what expires while the catalog is being written.
        self._change_catalog(lambda catalog: catalog.with_ttl(name, ttl_s), self._end_expired if longer else None)
        return before

    def _end_expired(self) -> None:
        """Flag whatever has expired, so that no TTL can revive it. Raises: OSError: it is flagged, but not durably."""
        now_s = self._clock.now_s()
        for segment in self._segments.all():
            live = sum(share.blocks for share in self._census.of(segment).shares.values())
            if live < segment.slot_count and segment.state != fmt.STATE_RETIRED:
                self._flag([(segment, np.flatnonzero(expired_mask(segment, self._rules, now_s)))], "blocks_expired")

    def _class(self, name: str) -> ClassRecord:
        record = self._catalog.classes.get(name or self._default_class)
        if record is None:
            known = ", ".join(sorted(self._catalog.classes))
            raise UnknownTrafficClassError(f"traffic class {name!r} is unknown; known are {known}")
        return record

    def _change_catalog(
        self, change: Callable[[Catalog], Catalog], before_use: Callable[[], None] | None = None
    ) -> None:
        """Save the changed catalog, then use it. Raises: StoreFullError, StorageError: nothing has changed.

        Args: before_use: called in between; the change is made whatever becomes of it.
        """
        with self._catalog_lock:
            catalog = change(self._catalog)
            try:
                self._save(catalog)
            except OSError as error:
                raise storage_error(error) from error
            try:
                if before_use is not None:
                    before_use()
            except OSError as error:
                _log.warning("a power loss may undo what went with the catalog's change: %s", error)
            self._use_catalog(catalog)

    # Data

    def match(
        self,
        namespace: Namespace,
        chain: Chain,
        traffic_class: str = "",
        *,
        lease_s: float | None = None,
        peek: bool = False,
    ) -> Match:
        """The longest stored leading part of the chain that a resume plan can use, leased.

        A use of it by the class, unless `peek`. Raises: UnknownTrafficClassError, InvalidArgumentError.
        """
        record = self._class(traffic_class)
        wanted_s = self._config.lease_s if lease_s is None else lease_s
        if not (math.isfinite(wanted_s) and (wanted_s > 0 or lease_s is None)):
            raise InvalidArgumentError(f"lease is {wanted_s} s, it must be positive")
        now_s = self._clock.now_s()
        deadline_s = now_s + min(wanted_s, self._config.lease_max_s)
        for _ in range(_LEASE_RETRIES):
            addrs = self._live_run(namespace, chain.data, now_s)
            has_state = ChainStates(namespace.namespace_id, chain, lambda keys: self._states_alive(keys, now_s))
            plan = resume_plan(namespace.spec, len(addrs), has_state)
            hit = plan.hit_tokens // namespace.spec.block_tokens
            addrs = addrs[:hit]
            places = self._places(addrs)
            if sum(_count(where) for _, where, _ in places) == hit and self._lease(places, deadline_s):
                break
            # A segment was reclaimed meanwhile; what was worth keeping has a new place now.
        else:
            addrs, places, hit, plan = addrs[:0], [], 0, resume_plan(namespace.spec, 0, lambda blocks, name: False)
        if not peek:
            self._count_match(namespace, record.traffic_class.name, len(chain), hit)
            if record.traffic_class.refresh is RefreshRule.ON_ACCESS:
                self._touch_alive(addrs, places, record.class_id, int(now_s))
        lease = self._mint.make(namespace.namespace_id, chain.data, addrs, deadline_s) if hit else b""
        return Match(hit, lease, deadline_s - self._clock.ahead_s(), plan)

    def _count_match(self, namespace: Namespace, traffic_class: str, asked: int, hit: int) -> None:
        tokens = namespace.spec.block_tokens
        self._match_counters.add(namespace, traffic_class, asked * tokens, hit * tokens)
        self.counters.add(
            matches=1, asked_blocks=asked, hit_blocks=hit, asked_tokens=asked * tokens, hit_tokens=hit * tokens
        )

    def _live_run(self, namespace: Namespace, chain: bytes, now_s: float) -> NDArray[np.void]:
        """Addresses of the chain's leading blocks that are indexed, neither flagged nor expired."""
        for _ in range(_MOVE_RETRIES):
            addrs = self._leading_run(namespace, chain)
            live = self._live_addrs(addrs, now_s)
            if live.all():
                return addrs
            cut = int(np.argmin(live))
            key = block_keys(namespace.namespace_id, chain, cut, 1)[0]
            here = BlockAddr(SegmentId(int(addrs[cut]["segment_id"])), int(addrs[cut]["slot"]))
            segment = self._segments.get(here.segment_id)
            if segment is not None and segment.moving:
                time.sleep(_MOVE_WAIT_S)
                continue
            there = self._find([key]).get(key)
            if there in (None, here):
                if there is not None and segment is None:
                    # The process that reclaimed the segment died before its entries were dropped.
                    self._correct_index(namespace.namespace_id, chain, cut, here)
                break
            # The block was moved between the look-up and the look at its flags.
        return addrs[:cut]

    def _leading_run(self, namespace: Namespace, chain: bytes) -> NDArray[np.void]:
        """As the index has it; an index that cannot be read is a miss."""
        try:
            return self._index.leading_run(namespace.namespace_id, chain)
        except StorageError as error:
            _log.debug("match: %s", error)  # the index itself tells when it is damaged
            return _as_array([])

    def _find(self, keys: Sequence[bytes]) -> dict[bytes, BlockAddr]:
        try:
            return self._index.lookup(keys)
        except StorageError as error:
            _log.debug("look-up: %s", error)
            return {}

    def _live_addrs(self, addrs: NDArray[np.void], now_s: float, *, suspected_too: bool = False) -> NDArray[np.bool_]:
        uses = np.zeros((len(addrs), fmt.USE_COLUMNS), dtype=np.uint32)  # a row of zeros is not alive
        for segment, where, slots in self._places(addrs):
            last = slots.stop - 1 if isinstance(slots, slice) else int(slots.max())
            if segment.state != fmt.STATE_RETIRED and last < segment.header.row_capacity:
                uses[where] = segment.uses[slots]
                if segment.suspects and not suspected_too:
                    uses[np.arange(len(addrs))[where][segment.suspected(slots)]] = 0
        return self._rules.ttls.live(uses, now_s)

    def _places(self, addrs: NDArray[np.void]) -> list[_Place]:
        """Where the addresses lead: a segment, positions among the addresses, and the slots of the segment that those name.

        As runs of neighbouring slots, which are read as fast as memory goes, several times as fast as slots named one by one;
        only where there are many short ones, a segment's slots together.
        """
        ids, slots = addrs["segment_id"], addrs["slot"].astype(np.intp)
        breaks = (np.flatnonzero((ids[1:] != ids[:-1]) | (slots[1:] != slots[:-1] + 1)) + 1).tolist()
        if not len(ids):
            return []
        found: list[_Place] = []
        if len(breaks) < _RUNS_MAX:
            for start, end in zip([0, *breaks], [*breaks, len(ids)], strict=True):
                segment = self._segments.get(int(ids[start]))
                if segment is not None:
                    first = int(slots[start])
                    found.append((segment, slice(start, end), slice(first, first + end - start)))
            return found
        for segment_id in np.unique(ids).tolist():
            segment = self._segments.get(segment_id)
            if segment is not None:
                where = np.flatnonzero(ids == segment_id)
                found.append((segment, where, slots[where]))
        return found

    def _lease(self, places: Sequence[_Place], deadline_s: float) -> bool:
        """Note the lease in the segments; False if one is retired, in which case the note may have come too late."""
        segments = {segment.segment_id: segment for segment, _, _ in places}.values()
        for segment in segments if deadline_s > self._clock.now_s() else ():
            segment.extend_lease(math.ceil(deadline_s))
        return all(segment.state != fmt.STATE_RETIRED for segment in segments)

    def _touch_alive(self, addrs: NDArray[np.void], places: Sequence[_Place], class_id: ClassId, now_s: int) -> None:
        """Note a use of blocks that were found alive at `now_s`; not of those that have expired since."""
        later_s = int(self._clock.now_s())
        if later_s != now_s:  # lives end on whole seconds
            places = self._places(addrs[self._live_addrs(addrs, later_s)])
        self._touch(places, class_id, later_s)

    def _touch(self, places: Sequence[_Place], class_id: ClassId, now_s: int) -> None:
        before = [segment.touch(slots, class_id, now_s) for segment, _, slots in places]
        if before:
            self._valuation.note_use(np.concatenate(before), now_s)

    def read(
        self,
        namespace: Namespace,
        chain: Chain,
        first_block: int,
        block_count: int,
        lease: bytes = b"",
        *,
        part_offset_bytes: int = 0,
        part_bytes: int = 0,
        in_messages: bool = False,
    ) -> Iterator[ReadFrame]:
        """Blocks of the chain in frames; what is not there, or not right, is a miss. Each step of the iterator does I/O.

        With a part, the answer is as if blocks consisted of it alone, but each is read whole and checked as it was stored: what
        is damaged anywhere yields no part. With `in_messages`, frames are read straight into messages where they can be; see
        `ReadFrame.message`.

        Args:
            part_offset_bytes: where in each block the wanted part begins.
            part_bytes: its size; 0 is the rest of the block.
        Raises: InvalidArgumentError: at once, not when iterated.
        """
        _check_range(chain, first_block, block_count)
        part = _part(namespace.spec.block_bytes, part_offset_bytes, part_bytes)
        now_s = self._clock.now_s()
        places = self._leased(namespace, chain, lease, first_block, block_count, now_s)
        addrs, present = places or self._look_up(namespace, chain, first_block, block_count, now_s)
        return self._reader.frames(
            ReadRequest(
                namespace_id=namespace.namespace_id,
                block_bytes=namespace.spec.block_bytes,
                chain=chain.data,
                first_block=first_block,
                segment_ids=addrs["segment_id"].tolist(),
                slots=addrs["slot"].tolist(),
                present=present.tolist(),
                leased=places is not None,
                part=part,
            ),
            in_messages=in_messages,
        )

    def _leased(
        self, namespace: Namespace, chain: Chain, lease: bytes, first_block: int, block_count: int, now_s: float
    ) -> tuple[NDArray[np.void], NDArray[np.bool_]] | None:
        """The places a valid lease promises, even if their blocks have expired or been evicted since; None if it covers too few.

        For a file that is gone or a block that was deleted the look-up decides: the block may have been stored again elsewhere.
        """
        leased = self._mint.check(lease, namespace.namespace_id, chain.data, now_s) if lease else None
        if leased is None or len(leased) < first_block + block_count:
            return None
        addrs = leased[first_block : first_block + block_count]
        there = np.zeros(block_count, dtype=bool)
        for segment, where, slots in self._places(addrs):
            there[where] = (segment.uses[slots, fmt.USE_FLAGS] & fmt.FLAG_DELETED) == 0
        if there.all():
            return addrs, there
        elsewhere, live = self._look_up(namespace, chain, first_block, block_count, now_s)
        return np.where(there, addrs, elsewhere), there | live

    def _look_up(
        self,
        namespace: Namespace,
        chain: Chain,
        first_block: int,
        block_count: int,
        now_s: float,
        *,
        suspected_too: bool = False,
    ) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        keys = block_keys(namespace.namespace_id, chain.data, first_block, block_count)
        return self._look_up_keys(keys, now_s, suspected_too=suspected_too)

    def _look_up_keys(
        self, keys: Sequence[bytes], now_s: float, *, suspected_too: bool = False
    ) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        """Where the index has these keys, and whether what lies there is alive; anywhere, and not alive, where it has none."""
        nowhere = BlockAddr(SegmentId(0), 0)
        found = self._find(keys)
        for _ in range(_MOVE_RETRIES):
            addrs = _as_array([found.get(key, nowhere) for key in keys])
            live = self._live_addrs(addrs, now_s, suspected_too=suspected_too)
            dead = [found[key] for key, alive in zip(keys, live, strict=True) if not alive and key in found]
            if not dead:
                break
            if self._any_moving(dead):
                time.sleep(_MOVE_WAIT_S)
            again = self._find(keys)
            if again == found and not self._any_moving(dead):
                break
            found = again  # a block was moved between the look-up and the look at its flags
        return addrs, live

    def _any_moving(self, places: Iterable[BlockAddr]) -> bool:
        segments = [self._segments.get(segment_id) for segment_id in {place.segment_id for place in places}]
        return any(segment is not None and segment.moving for segment in segments)

    def submit_put(
        self, namespace: Namespace, chain: Chain, blocks: Sequence[PutBlock], traffic_class: str = ""
    ) -> Future[list[PutResult]]:
        """Store blocks of the chain; the future tells what became of each, in the order given.

        A block of the wrong size or with a wrong checksum is rejected alone.
        Raises: InvalidArgumentError, UnknownTrafficClassError: the request is wrong as a whole.
        """
        record = self._class(traffic_class)
        self._check_fits(namespace.spec.block_bytes)  # the segments may be smaller now than when it was registered
        for block in blocks:
            if not 0 <= block.block < len(chain):
                raise InvalidArgumentError(f"block {block.block} is not in the chain of {len(chain)}")
        rejected: dict[int, PutResult] = {}
        entries: list[NewEntry] = []
        positions: list[int] = []
        first = min((block.block for block in blocks), default=0)
        last = max((block.block for block in blocks), default=-1)
        keys = block_keys(namespace.namespace_id, chain.data, first, last + 1 - first)
        for position, block in enumerate(blocks):
            problem = _check_block(namespace, chain, block)
            if problem is not None:
                rejected[position] = problem
                continue
            entries.append(self._new_entry(namespace, record, chain, block, keys[block.block - first]))
            positions.append(position)
        if entries:
            self._touch_ancestors(namespace, chain, first, record)
        self.counters.add(blocks_rejected=len(rejected))
        return self._submit(record, entries, lambda outcomes: _put_results(blocks, rejected, positions, outcomes))

    def _touch_ancestors(self, namespace: Namespace, chain: Chain, first_block: int, record: ClassRecord) -> None:
        """Ancestors are touched no earlier than their descendants, so that a chain never has a hole that recency explains."""
        if first_block == 0 or record.traffic_class.refresh is not RefreshRule.ON_ACCESS:
            return
        now_s = int(self._clock.now_s())
        parent, live = self._look_up(namespace, chain, first_block - 1, 1, now_s)
        segment = self._segments.get(int(parent[0]["segment_id"]))
        if not live[0] or segment is None or segment.uses[int(parent[0]["slot"]), record.class_id] >= now_s:
            return  # just touched, as it is when a put comes in several parts
        self._touch(
            self._places(self._live_run(namespace, chain.first(first_block).data, now_s)), record.class_id, now_s
        )

    def _new_entry(
        self, namespace: Namespace, record: ClassRecord, chain: Chain, block: PutBlock, key: bytes
    ) -> NewEntry:
        entry = fmt.Entry(
            namespace_id=namespace.namespace_id,
            kind=fmt.KIND_BLOCK,
            class_id=record.class_id,
            position=block.block,
            anchor=anchor_of(chain.data, block.block),
            prefix_hash=chain[block.block],
            length_bytes=namespace.spec.block_bytes,
            create_time_s=int(self._clock.now_s()),
            checksum=block.checksum,
        )
        return NewEntry(key, entry, block.data, _parent_tag(chain, block.block))

    def _submit(
        self, record: ClassRecord, entries: Sequence[NewEntry], results: Callable[[list[Outcome]], list[PutResult]]
    ) -> Future[list[PutResult]]:
        # In whole pages: while they wait and are written, millions of tiny blocks take some GB of memory for their few bytes.
        job = PutJob(record, entries, sum(fmt.align(new.entry.length_bytes) for new in entries))
        answer: Future[list[PutResult]] = Future()

        def settle(done: Future[list[Outcome]]) -> None:
            outcomes = done.result()
            self._count_puts(entries, outcomes)
            answer.set_result(results(outcomes))

        job.future.add_done_callback(settle)
        if not entries:
            job.future.set_result([])
        elif not self._writer.submit(job):
            full = OverloadedError(
                f"store.put_queue ({self._config.put_queue} bytes) is full; the disk does not keep up"
            )
            job.future.set_result([Outcome(PutStatus.REJECTED, full)] * len(entries))
        return answer

    def _count_puts(self, entries: Sequence[NewEntry], outcomes: list[Outcome]) -> None:
        stored = [new for new, outcome in zip(entries, outcomes, strict=True) if outcome.status is PutStatus.STORED]
        exist = sum(outcome.status is PutStatus.EXISTS for outcome in outcomes)
        self.counters.add(
            blocks_stored=len(stored),
            bytes_stored=sum(new.entry.length_bytes for new in stored),
            blocks_exist=exist,
            blocks_rejected=len(outcomes) - len(stored) - exist,
        )

    def delete(self, namespace: Namespace, chain: Chain, first_block: int, block_count: int) -> int:
        """Delete blocks, and every state object beside them: misses at once, under leases too, and after a restart.

        Returns how many blocks were there; state objects are not counted.
        """
        _check_range(chain, first_block, block_count)
        return self._on_writer(lambda: self._delete(namespace, chain, first_block, block_count))

    def _delete(self, namespace: Namespace, chain: Chain, first_block: int, block_count: int) -> int:
        """On the writer thread: a block that is just being moved would take no flag along."""
        now_s, deleted = self._clock.now_s(), 0
        try:
            for segment, slots, blocks in self._to_delete(namespace, chain, first_block, block_count, now_s):
                segment.flag(slots, fmt.FLAG_DELETED)
                self._valuation.withdraw(segment.tags[slots, 0], now_s)
                deleted += blocks
        finally:
            if self._config.durability == "sync":
                self._segments.sync_flags()
            self.counters.add(blocks_deleted=deleted)
        return deleted

    def _to_delete(
        self, namespace: Namespace, chain: Chain, first_block: int, block_count: int, now_s: float
    ) -> Iterator[tuple[Segment, NDArray[np.intp], int]]:
        """Where blocks and their state objects are alive, and how many of these slots are blocks.

        Also where the index cannot tell or they are not offered just now: they would come back.

        Raises: StorageError: at the end, when there may be more of them.
        """
        hashes = chain.data[first_block * HASH_BYTES : (first_block + block_count) * HASH_BYTES]
        block = block_keys(namespace.namespace_id, chain.data, first_block, block_count)
        for keys, counted in self._indexed(namespace.namespace_id, block, hashes):
            addrs, live = self._look_up_keys(keys, now_s, suspected_too=True)
            for segment, _, where in self._places(addrs[live]):
                slots = _numbers(where)
                yield segment, slots, len(slots) if counted else 0
        if not self._index.distrusted:
            return
        # Slow, but rare: the next start rebuilds the index, and with it what was not found here.
        failed: OSError | None = None
        for segment in self._segments.all():
            try:
                found = [find(segment, namespace.namespace_id, hashes) for find in (find_slots, find_state_slots)]
            except OSError as error:
                failed = error
            else:
                blocks, states = (slots[self._rules.ttls.live(segment.uses[slots], now_s)] for slots in found)
                yield segment, np.concatenate([blocks, states]), len(blocks)
        if failed is not None:
            raise storage_error(failed) from failed

    def _indexed(self, namespace_id: int, block: Sequence[bytes], hashes: bytes) -> list[tuple[Sequence[bytes], bool]]:
        """Keys to delete, and whether they are of blocks; none if the index is not whole as far as asking it shows.

        Raises: StorageError: it cannot answer now.
        """
        if not self._index.distrusted:
            try:
                self._index.lookup(block)
                # Among them may be those of another prefix hash that agrees in its first 56 bits: they become misses, no harm.
                states = self._index.states_beside(namespace_id, hashes)
            except StorageError:
                if not self._index.distrusted:
                    raise
            else:
                return [(block, True), (states, False)]
        return []

    # State objects

    def read_state(
        self, namespace: Namespace, prefix_hash: bytes, name: str, traffic_class: str = ""
    ) -> StateObject | None:
        """A state object, if it is alive and right. Raises: InvalidArgumentError, UnknownTrafficClassError."""
        state = self._read_state(namespace, prefix_hash, name, self._class(traffic_class))
        if state is None:
            self.counters.add(blocks_missed=1)
        else:
            self.counters.add(blocks_read=1, bytes_read=len(state.data))
        return state

    def _read_state(
        self, namespace: Namespace, prefix_hash: bytes, name: str, record: ClassRecord
    ) -> StateObject | None:
        name_hash = state_hash(prefix_hash, name)
        key = state_key(namespace.namespace_id, prefix_hash, name_hash)
        addrs, live = self._look_up_keys([key], self._clock.now_s())
        segment, slot = self._segments.get(int(addrs[0]["segment_id"])), int(addrs[0]["slot"])
        if not live[0] or segment is None:
            return None
        state = self._read_state_at(namespace, prefix_hash, name_hash, segment, slot)
        if state is not None and record.traffic_class.refresh is RefreshRule.ON_ACCESS:
            now_s = int(self._clock.now_s())
            self._valuation.note_use(segment.touch(np.array([slot]), record.class_id, now_s), now_s)
        return state

    def _read_state_at(
        self, namespace: Namespace, prefix_hash: bytes, name_hash: bytes, segment: Segment, slot: int
    ) -> StateObject | None:
        try:
            rows = segment.read_rows(slot, 1)
            # Before its length is believed: a damaged one may ask for gigabytes.
            if not whole_rows(segment, rows, slot)[0]:
                self._end_damaged_state(segment, slot)
                return None
            row = rows[0]
            if (
                row["prefix_hash"].tobytes() != name_hash
                or row["namespace_id"] != namespace.namespace_id
                or row["kind"] != fmt.KIND_STATE
            ):
                key = state_key(namespace.namespace_id, prefix_hash, name_hash)
                self._drop_entry(key, BlockAddr(segment.segment_id, slot))
                return None
            data = bytearray(int(row["length_bytes"]))
            size = segment.read_payloads([memoryview(data)], int(row["offset_bytes"]))
        except OSError:
            segment.suspect(slot)
            self.counters.add(blocks_unreadable=1)
            return None
        if size != len(data) or block_checksum(data, prefix_hash) != int(row["checksum"]):
            self._end_damaged_state(segment, slot)
            return None
        return StateObject(bytes(data), int(row["checksum"]))

    def _end_damaged_state(self, segment: Segment, slot: int) -> None:
        """Take a state object out of the offer, so that it can be stored again."""
        segment.flag(np.array([slot]), fmt.FLAG_DELETED)
        self.counters.add(blocks_corrupt=1)

    def _states_alive(self, keys: Sequence[bytes], now_s: float) -> list[bool]:
        """Whether the state objects under these index keys are alive. Fast where few are there, as is usual."""
        found = self._find(keys)
        there = [key for key in keys if key in found]
        if not there:
            return [False] * len(keys)
        alive = dict(zip(there, self._look_up_keys(there, now_s)[1].tolist(), strict=True))
        return [alive.get(key, False) for key in keys]

    def submit_put_state(
        self,
        namespace: Namespace,
        prefix_hash: bytes,
        name: str,
        data: Buffer,
        checksum: int,
        traffic_class: str = "",
    ) -> Future[PutResult]:
        """Store a state object. It never changes: a second put under the same name answers EXISTS.

        Raises: InvalidArgumentError, UnknownTrafficClassError.
        """
        record = self._class(traffic_class)
        name_hash = state_hash(prefix_hash, name)
        size = memoryview(data).nbytes
        room = self._segments.segment_size_bytes - fmt.Layout(_row_capacity(self._config)).payload_offset
        if not 1 <= size <= min(MAX_STATE_BYTES, room):
            raise InvalidArgumentError(f"state object has {size} bytes, allowed are 1 to {min(MAX_STATE_BYTES, room)}")
        rejected: dict[int, PutResult] = {}
        entries: list[NewEntry] = []
        if block_checksum(data, prefix_hash) != checksum:
            rejected[0] = PutResult(0, PutStatus.REJECTED, "BAD_CHECKSUM", f"want {checksum:#018x}")
        else:
            entry = fmt.Entry(
                namespace_id=namespace.namespace_id,
                kind=fmt.KIND_STATE,
                class_id=record.class_id,
                position=0,
                anchor=prefix_hash[: fmt.ANCHOR_BYTES],
                prefix_hash=name_hash,
                length_bytes=size,
                create_time_s=int(self._clock.now_s()),
                checksum=checksum,
                seed_byte=prefix_hash[fmt.ANCHOR_BYTES],
            )
            key = state_key(namespace.namespace_id, prefix_hash, name_hash)
            entries.append(NewEntry(key, entry, data, tag_of(prefix_hash)))
        self.counters.add(blocks_rejected=len(rejected))
        only = [PutBlock(0, data, checksum)]
        results = self._submit(
            record, entries, lambda outcomes: _put_results(only, rejected, [0][: len(entries)], outcomes)
        )
        answer: Future[PutResult] = Future()
        results.add_done_callback(lambda done: answer.set_result(done.result()[0]))
        return answer

    # Operators

    def status(self) -> StoreStatus:
        """What the store is and holds."""
        segments = self._segments.all()
        usage = self._census.by_class(segments)
        records = self._catalog.classes.values()
        return StoreStatus(
            store_id=self.store_id,
            data_dir=str(self._data_dir.path),
            capacity_bytes=self._config.capacity,
            used_bytes=self._reclaimer.used_bytes(),
            retiring_bytes=self._segments.retiring_bytes(),
            live=Usage(sum(u.blocks for u in usage.values()), sum(u.bytes for u in usage.values())),
            segment_count=len(segments),
            classes=[(record.traffic_class, usage.get(record.class_id, Usage())) for record in records],
            class_tokens=self._match_counters.by_class(),
            namespace_count=len(self._catalog.namespaces),
            durability=self._config.durability,
            clock_ahead_s=self._clock.ahead_s(),
            invariants=self._invariants,
        )

    def scrub(self, cursor: str = "", max_bytes: int = 0) -> Iterator[ScrubStep]:
        """Read every block that is still offered, from `cursor` on, and take what is wrong out of the offer; see `scrub.py`.

        Each step of the iterator does I/O for about 1 MiB or one block; whoever iterates sets the pace, and may leave at any step.
        Args: max_bytes: stop after so many payload bytes; 0 for no limit.
        Raises: InvalidArgumentError: `cursor` was given by no step; at once, not when iterated.
        """
        begin = parse_cursor(cursor)
        # What lies before the next id may have been reclaimed since; what lies behind it nobody has come to.
        end = max([self._next_segment_id, *(segment.segment_id + 1 for segment in self._segments.all())])
        if begin > (end, 0):
            raise InvalidArgumentError(f"cursor is {begin}, which no scrub has given: there was never a segment {end}")
        digests: dict[int, bytes] = {n.namespace_id: digest for digest, n in self._catalog.namespaces.items()}
        scrubber = Scrubber(
            self._segments,
            Alive(
                unexpired=lambda uses: self._rules.ttls.live(uses, self._clock.now_s()),
                known=lambda namespace_ids: np.isin(namespace_ids, self._rules.live_ids),
            ),
            live_bytes=lambda segment: self._census.total([segment]).bytes,
            condemn=lambda segment, slots: self._on_writer(lambda: self._condemn(segment, slots)),
            suspect=self._suspect,
            digest=lambda namespace_id: digests.get(namespace_id, b""),
        )
        return scrubber.steps(begin, max_bytes)

    def _condemn(self, segment: Segment, slots: Sequence[int]) -> set[int]:
        """Flag damaged blocks; on the writer thread, as in `_delete`. Returns those that were still offered."""
        offered = _unflagged(segment, slots)
        segment.flag(np.array(offered, dtype=np.int64), fmt.FLAG_DELETED)
        self.counters.add(blocks_corrupt=len(offered))
        return set(offered)

    def _suspect(self, segment: Segment, slots: Sequence[int]) -> set[int]:
        """Do not offer blocks for a while that the disk does not give, as a get does. Returns those that no flag had ended."""
        offered = _unflagged(segment, slots)
        for slot in offered:
            segment.suspect(slot)
        self.counters.add(blocks_unreadable=len(offered))
        return set(offered)

    def invariants(self) -> InvariantReport:
        """Check the store against itself, and remember the result for `status`; see `invariants.py`.

        Takes many short turns on the writer thread: puts go on in between. Raises: StorageError: the store is closed.
        """
        for _ in self.invariant_steps():
            pass
        assert self._invariants is not None, "a check left no report"
        return self._invariants

    def invariant_steps(self) -> Iterator[float]:
        """The same in steps for a caller that may have to leave; yields the share that is done, and remembers the result last."""
        check = InvariantCheck(
            self._data_dir.path,
            self._segments,
            self._index,
            self._census,
            self._clock,
            live=self._live_mask,
            used_bytes=self._reclaimer.used_bytes,
            segment_ids_end=lambda: self._segment_ids_end,
            on_writer=self._on_writer,
        )
        yield from check.steps()
        self._invariants = check.report()
        for sentence in self._invariants.violations:
            _log.error("invariant violated: %s", sentence)

    @property
    def last_invariants(self) -> InvariantReport | None:
        """What the last check since the start has found."""
        return self._invariants

    @property
    def capacity_bytes(self) -> int:
        """The cap for the data directory."""
        return self._config.capacity

    def quotas(self) -> list[QuotaUsage]:
        """Every traffic class, then every tenant that has a namespace or a quota, with what it may hold and holds."""
        segments = self._segments.all()
        by_class = self._census.by_class(segments)
        by_tenant: dict[str, Usage] = dict.fromkeys(self._all_quotas.tenants, Usage())
        by_namespace = self._census.by_namespace(segments)
        for namespace_id, tenant in self._rules.tenants.items():
            by_tenant[tenant] = by_tenant.get(tenant, Usage()) + by_namespace.get(namespace_id, Usage())
        of_class = {name: self._all_quotas.of_class(r.class_id) for name, r in self._catalog.classes.items()}
        return [
            QuotaUsage(name, "", quota.share, quota.limit, by_class.get(self._catalog.classes[name].class_id, Usage()))
            for name, quota in of_class.items()
        ] + [
            QuotaUsage("", tenant, quota.share, quota.limit, usage)
            for tenant, usage in sorted(by_tenant.items())
            for quota in [self._all_quotas.of_tenant(tenant)]
        ]

    def evict(self, selection: EvictSelection, *, dry_run: bool) -> Usage:
        """Evict the blocks selected, or only count them. They are misses at once and after a restart.

        Raises: InvalidArgumentError: no condition given, or one out of range; UnknownTrafficClassError.
        """
        if dry_run:
            return self._evict(selection, dry_run=True)
        usage = self._on_writer(lambda: self._evict(selection, dry_run=False))
        self._give_back()
        return usage

    def _evict(self, selection: EvictSelection, *, dry_run: bool) -> Usage:
        """Select and flag; flagging on the writer thread, as in `_delete`."""
        chosen = self._select(selection)
        usage = Usage(*eviction.count(chosen))
        if not dry_run:
            self._flag(chosen, "blocks_evicted")
        return usage

    def _flag(self, chosen: Choice, counter: str) -> None:
        """End the lives of blocks, for good, and count them under their cause; writer thread only, or before it runs."""
        for segment, slots in chosen:
            if len(slots):
                segment.flag(slots, fmt.FLAG_EVICTED)
                self._valuation.withdraw(segment.tags[slots, 0], self._clock.now_s())
                self.counters.add(**{counter: len(slots)})
        if self._config.durability == "sync":
            self._segments.sync_flags()

    def _select(self, selection: EvictSelection) -> Choice:
        """Slots to evict by segment."""
        if selection == EvictSelection():
            raise InvalidArgumentError("evict: give a namespace, a class, older-than or down-to-share")
        share, age_s = selection.down_to_share, selection.older_than_s
        if share is not None and not 0 <= share <= 1:
            raise InvalidArgumentError(f"evict: down_to_share is {share}, it must be from 0 to 1")
        if age_s is not None and not (math.isfinite(age_s) and age_s >= 0):
            raise InvalidArgumentError(f"evict: older_than is {age_s} s, it must not be negative")
        class_id = self._class(selection.traffic_class).class_id if selection.traffic_class else None
        chosen = eviction.choose(
            self._segments.all(),
            self._live_mask,
            class_id=class_id,
            namespace_ids=[selection.namespace.namespace_id] if selection.namespace is not None else None,
            unused_since_s=self._clock.now_s() - age_s if age_s is not None else None,
        )
        if share is None:
            return chosen
        excess = self._census.total(self._segments.all()).bytes - share * self._config.capacity
        return eviction.coldest(chosen, excess)

    def find_blocks(self, hash_prefix_hex: str, limit: int = 100) -> list[BlockInfo]:
        """Blocks and state objects whose hash begins so, at most `limit`. Raises: InvalidArgumentError."""
        digits = _hex_prefix(hash_prefix_hex, "prefix hash")
        whole = bytes.fromhex(digits[: len(digits) // 2 * 2])
        half = int(digits[-1], 16) if len(digits) % 2 else None
        catalog = self._catalog
        digests: dict[int, NamespaceDigest] = {n.namespace_id: digest for digest, n in catalog.namespaces.items()}
        found = find_blocks(
            self._segments.all(), whole, half, digests, catalog.classes.values(), self._rules.ttls, self._clock.now_s()
        )
        return sorted(found, key=lambda block: (block.prefix_hash, block.addr.segment_id))[:limit]

    def tick(self) -> None:
        """Do now what is else done once a second, and wait for it."""
        self._on_writer(self._tick)

    def sweep(self) -> None:
        """Give back dead space now instead of within seconds, and wait for it. Raises: KvStoreError, OSError."""
        self._on_writer(self._tick)
        self._on_writer(lambda: self._reclaimer.sweep(self._writer))

    def _tick(self) -> None:
        """Once a second on the writer thread."""
        self._believe_clock()
        self._clock_file.keep(self._clock)
        with contextlib.suppress(OSError):  # told at the start
            self._save_late()
        self._reclaimer.tick(self._writer)
        self._trim()

    def _believe_clock(self) -> None:
        """A clock that jumped ahead is believed now: what was used since it did was used in the time that it shows."""
        doubted_s = self._clock.confirm()
        if doubted_s is not None:
            now_s = math.floor(self._clock.now_s())
            for segment in self._segments.all():
                columns = class_uses(segment.uses[: segment.slot_count])
                columns[columns >= math.floor(doubted_s)] = now_s
                segment.changes += 1

    def _trim(self) -> None:
        """Make room for those who have reached a limit and want to store more: their coldest blocks go."""
        for holder in self._quotas.refused:
            ids = [ns for ns, tenant in self._rules.tenants.items() if holder.tenant in (None, tenant)]
            chosen = eviction.choose(
                self._segments.all(),
                self._live_mask,
                class_id=holder.class_id,
                namespace_ids=ids,
                unused_since_s=self._clock.now_s() - _TRIM_SPARES_S,
            )
            excess = self._quotas.held_bytes(holder) - _TRIM_TO_SHARE * self._quotas.limit_bytes(holder)
            self._flag(eviction.coldest(chosen, excess, padded=True), "blocks_evicted")
        self._quotas.refused.clear()

    def _give_back(self) -> None:
        """A sweep after something was evicted. It is done whether its space comes back now or later."""
        try:
            self.sweep()
        except (KvStoreError, OSError) as error:
            _log.warning("space could not be given back yet: %s", error)

    def _on_writer(self, call: Callable[[], T]) -> T:
        """Run something on the writer thread, after the puts that wait there."""
        return self._writer.call(call).result()

    # For the parts below

    def _live_mask(self, segment: Segment) -> NDArray[np.bool_]:
        return live_mask(segment, self._rules, self._clock.now_s())

    def _correct_index(self, namespace_id: int, chain: bytes, block: int, addr: BlockAddr) -> None:
        self._drop_entry(block_keys(namespace_id, chain, block, 1)[0], addr)

    def _drop_entry(self, key: bytes, addr: BlockAddr) -> None:
        """An index entry was found to name another block's slot, or none: it goes, so that no match meets it again."""
        with contextlib.suppress(StorageError):  # the store is being closed
            self._writer.call(lambda: self._index.commit({}, [(key, addr)]))

    def _is_live(self, addr: BlockAddr) -> bool:
        return bool(self._live_addrs(_as_array([addr]), self._clock.now_s())[0])

    def _new_segment(self, class_id: int) -> Segment:
        """Make a segment under an id never used before; writer thread only. Raises: OSError."""
        self._save_late()  # its class may be one that the catalog on disk does not have yet
        if self._next_segment_id >= self._segment_ids_end:
            self._reserve_segment_ids()
        segment_id = SegmentId(self._next_segment_id)
        self._next_segment_id += 1
        return self._segments.create(segment_id, ClassId(class_id), self._clock.now_s())

    def _skip_segment_ids(self) -> None:
        """Never under an id that is there already, as when the catalog was restored from an older copy."""
        highest = max((segment.segment_id for segment in self._segments.all()), default=0)
        if highest >= self._next_segment_id:
            self._catalog = replace(self._catalog, next_segment_id=max(self._catalog.next_segment_id, highest + 1))
            self._next_segment_id = self._segment_ids_end  # the next one reserves anew

    def _reserve_segment_ids(self) -> None:
        with self._catalog_lock:
            catalog, first = self._catalog.with_segment_run()
            self._save(catalog)
            self._catalog = catalog
        self._next_segment_id, self._segment_ids_end = first, catalog.next_segment_id


def _parent_tag(chain: Chain, block: int) -> int:
    return tag_of(chain[block - 1]) if block else 0


def _numbers(slots: slice | NDArray[np.intp]) -> NDArray[np.intp]:
    return np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots


def segment_size_bytes(config: StoreConfig) -> int:
    """The size of a segment: as configured, but never more than a share of the capacity."""
    size = min(config.segment_size, config.capacity // _SEGMENTS_PER_CAPACITY)
    return size // fmt.ALIGNMENT_BYTES * fmt.ALIGNMENT_BYTES


def _row_capacity(config: StoreConfig) -> int:
    return segment_size_bytes(config) // fmt.ALIGNMENT_BYTES


def _rules(catalog: Catalog, before: Rules | None = None) -> Rules:
    """What the catalog says of lives. TTLs that have not changed stay the same object, and so all that was counted by them."""
    ttls = TtlTable(catalog.classes.values())
    tenants = {int(n.namespace_id): n.spec.tenant for n in catalog.namespaces.values()}
    live_ids = np.array(sorted(tenants), dtype=np.uint32)
    return Rules(before.ttls if before is not None and before.ttls == ttls else ttls, tenants, live_ids)


def _quotas(
    catalog: Catalog, traffic_classes: Mapping[str, TrafficClassConfig], tenants: Mapping[str, TenantConfig]
) -> Quotas:
    by_tenant = {name: Quota(config.share, config.limit) for name, config in tenants.items()}
    return Quotas(
        classes={
            catalog.classes[name].class_id: Quota(config.share, config.limit)
            for name, config in traffic_classes.items()
        },
        class_names={record.class_id: name for name, record in catalog.classes.items()},
        tenants=by_tenant,
        other_tenants=by_tenant.get(OTHER_TENANTS, Quota()),
    )


def _count(where: slice | NDArray[np.intp]) -> int:
    return where.stop - where.start if isinstance(where, slice) else len(where)


def _unflagged(segment: Segment, slots: Sequence[int]) -> list[int]:
    if segment.state == fmt.STATE_RETIRED:
        return []
    return [slot for slot in slots if not segment.uses[slot, fmt.USE_FLAGS]]


def _as_array(addrs: Sequence[BlockAddr]) -> NDArray[np.void]:
    array = np.zeros(len(addrs), dtype=[("segment_id", "<u8"), ("slot", "<u4")])
    array["segment_id"] = [addr.segment_id for addr in addrs]
    array["slot"] = [addr.slot for addr in addrs]
    return array


def _check_range(chain: Chain, first_block: int, block_count: int) -> None:
    if block_count < 1 or first_block < 0 or first_block + block_count > len(chain):
        raise InvalidArgumentError(
            f"blocks [{first_block}, {first_block + block_count}) are no part of a chain of {len(chain)} blocks"
        )


def _part(block_bytes: int, offset_bytes: int, size_bytes: int) -> range:
    """The bytes of a block that are wanted."""
    end = offset_bytes + size_bytes if size_bytes else block_bytes
    if not 0 <= offset_bytes < end <= block_bytes:
        size = f"{size_bytes} bytes" if size_bytes else "the rest"
        raise InvalidArgumentError(
            f"of each block {size} from byte {offset_bytes} on is asked for, but blocks have {block_bytes} bytes "
            "(part_offset_bytes, part_bytes)"
        )
    return range(offset_bytes, end)


def _check_block(namespace: Namespace, chain: Chain, block: PutBlock) -> PutResult | None:
    """Why a block cannot be stored, or None."""
    size = memoryview(block.data).nbytes
    if size != namespace.spec.block_bytes:
        detail = f"block {block.block} has {size} bytes, the namespace's blocks have {namespace.spec.block_bytes}"
        return PutResult(block.block, PutStatus.REJECTED, "WRONG_SIZE", detail)
    found = block_checksum(block.data, chain[block.block])
    if found != block.checksum:
        detail = f"block {block.block} has checksum {found:#018x}, want {block.checksum:#018x}"
        return PutResult(block.block, PutStatus.REJECTED, "BAD_CHECKSUM", detail)
    return None


def _put_results(
    blocks: Sequence[PutBlock], rejected: Mapping[int, PutResult], positions: Sequence[int], outcomes: Sequence[Outcome]
) -> list[PutResult]:
    results = dict(rejected)
    for position, outcome in zip(positions, outcomes, strict=True):
        block = blocks[position].block
        error = outcome.error
        if error is None:
            results[position] = PutResult(block, outcome.status)
        else:
            results[position] = PutResult(block, outcome.status, error.reason, str(error))
    return [results[position] for position in range(len(blocks))]


def _hex_prefix(digits: str, what: str) -> str:
    if not _HEX_PREFIX_MIN <= len(digits) <= 2 * HASH_BYTES or any(c not in "0123456789abcdef" for c in digits.lower()):
        raise InvalidArgumentError(
            f"{what} {digits!r}: give {_HEX_PREFIX_MIN} to {2 * HASH_BYTES} hexadecimal digits of its beginning"
        )
    return digits.lower()
