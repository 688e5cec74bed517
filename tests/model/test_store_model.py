"""The store against a dict, on a disk that forgets: put, match, get, lease, delete, evict, expire, drop, restart, crash.

Tiny, so that rare things are common: about 11 segments of 5 blocks, sectors of 16 bytes. See `PowerLossDevice` for what may
happen when the machine stops.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from faults import PowerLossDevice, flip_bit
from kvstore.clock import ManualClock
from kvstore.config import TrafficClassConfig
from kvstore.errors import KvStoreError, NamespaceNotFoundError
from kvstore.log import format as fmt
from kvstore.types import EvictSelection
from kvstore_api.results import PutStatus
from stores import chain_of, get, open_store, payload, put, spec, tree_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

CAPACITY = 512 << 10
SEGMENT_BYTES = 32 << 10
BLOCK_BYTES = 4000
CHAIN_BLOCKS = 6
SHARED_BLOCKS = 2
CONVERSATIONS = 12
TENANTS = ("a", "b")
CLASSES = {"short": TrafficClassConfig(ttl_s=50), "long": TrafficClassConfig(ttl_s=500)}
NAMES = sorted(CLASSES)
LEASES_HELD = 6
ROOT = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None  # syncs cost nothing there

Key = tuple[str, bytes]  # tenant, prefix hash


@dataclass
class Held:
    """What is known of a block that may be there: uses by class, in whole seconds."""

    may: dict[str, int] = field(default_factory=dict)  # the latest that can have been noted
    sure: dict[str, int] = field(default_factory=dict)  # those that were; a block alive by them must be there
    durable: dict[str, int] = field(default_factory=dict)  # those of them that a power loss leaves


@dataclass
class Lease:
    """A match whose token is kept for later."""

    tenant: str
    conversation: int
    blocks: int
    token: bytes
    deadline_s: float


class StoreModel(RuleBasedStateMachine):
    """What may be there, what must be there, and until when.

    A cache may lose blocks to capacity, and the store counts those: `evictions` and `damages` are how many losses are explained
    so far, and each block that is missed although it must be there uses one up. It may never invent, mix up or revive blocks.
    """

    durability = "memory"

    @initialize(seed=st.integers(0, 2**32 - 1))
    def begin(self, seed: int) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="kvstore-model-", dir=ROOT))
        self.clock = ManualClock()
        self.device = PowerLossDevice(self.path, seed)
        self.ttl_s = {name: config.ttl_s for name, config in CLASSES.items()}
        self.held: dict[Key, Held] = {}  # absent: must be a miss
        self.rejected: dict[Key, dict[str, int]] = {}  # may be there after a power loss, which also loses their flags
        self.ever: dict[Key, dict[str, int]] = {}  # all uses since the namespace was registered
        self.leases: list[Lease] = []
        self.evictions, self.damages = 0, 0
        self.flipped = False
        self.over_cap = False  # a power loss may bring files back
        self.store = self.open()
        self.namespaces = {tenant: self.register(tenant) for tenant in TENANTS}
        self.chains = {
            tenant: [chain_of(namespace, number, CHAIN_BLOCKS, SHARED_BLOCKS) for number in range(CONVERSATIONS)]
            for tenant, namespace in self.namespaces.items()
        }

    def open(self):
        self.seen_evictions = 0
        return open_store(
            self.path,
            self.clock,
            capacity=CAPACITY,
            segment_size=SEGMENT_BYTES,
            durability=self.durability,
            device=self.device,
            traffic_classes=CLASSES,
            tick_s=None,  # the rules do what the tick does, so that a run can be repeated
        )

    def register(self, tenant: str):
        return self.store.register_namespace(spec(BLOCK_BYTES, tenant=tenant))

    def chain(self, tenant: str, conversation: int):
        return self.chains[tenant][conversation]

    # What may and must be there

    def alive(self, uses: dict[str, int]) -> bool:
        return any(used + self.ttl_s[name] > self.clock.now_s() for name, used in uses.items())

    def may_be_there(self, key: Key) -> bool:
        return key in self.held and self.alive(self.held[key].may)

    def must_be_there(self, key: Key) -> bool:
        return key in self.held and self.alive(self.held[key].sure)

    def note_try(self, key: Key, name: str) -> None:
        """The use may have been noted, and the block may be there."""
        now = int(self.clock.now_s())
        self.held.setdefault(key, Held()).may[name] = now
        self.ever.setdefault(key, {})[name] = now

    def note_use(self, key: Key, name: str) -> None:
        self.note_try(key, name)
        self.held[key].sure[name] = int(self.clock.now_s())

    def note_stored(self, key: Key, name: str) -> None:
        self.held[key] = Held()
        self.note_use(key, name)
        self.held[key].durable = dict(self.held[key].sure)

    def doubt(self, key: Key) -> None:
        """It may be there or not."""
        if key in self.held:
            self.held[key].sure, self.held[key].durable = {}, {}

    def gone(self, key: Key) -> None:
        for known in (self.held, self.rejected):
            known.pop(key, None)

    def missed(self, key: Key) -> None:
        """The block was asked for and not there."""
        if not self.must_be_there(key):
            self.doubt(key)
            return
        self.count_evictions()
        if self.evictions:
            self.evictions -= 1
        else:
            assert self.damages, f"a block is lost and nothing explains it; {self.device}"
            self.damages -= 1
        self.doubt(key)

    def count_evictions(self, asked: int = 0) -> None:
        evicted = self.store.counters.snapshot()["blocks_evicted"]
        self.evictions += evicted - self.seen_evictions - asked
        self.seen_evictions = evicted

    def settle_expired(self) -> None:
        """Expired stays expired."""
        for key, held in list(self.held.items()):
            if not self.alive(held.sure):
                held.sure = {}
            if not self.alive(held.durable):
                held.durable = {}
            if not self.alive(held.may):
                del self.held[key]

    # One rule and not one for each thing that happens: hypothesis leaves out some rules in each run, and a store that nobody puts
    # anything into has nothing to lose.
    @rule(seed=st.integers(0, 2**32 - 1), count=st.integers(5, 40))
    def live(self, seed: int, count: int) -> None:
        """Something goes wrong, or an operator does something; then an ordinary while."""
        rng = random.Random(seed)
        events: dict[Callable[[], object], float] = {
            lambda: self.stop_soon(rng.randrange(25), power=False): 3,
            lambda: self.stop_soon(rng.randrange(25), power=True): 3,
            lambda: self.stop(power=rng.random() < 0.8): 1,
            lambda: self.clean_up_and_stop(rng, power=rng.random() < 0.8): 4,
            lambda: self.fall_sick(rng): 2,
            lambda: self.flip_bit(rng): 1,
            lambda: self.restart(lose_index=rng.random() < 0.5): 1,
            lambda: self.pass_time(rng.choice([45, 49, 51, 200])): 1,
            lambda: self.set_ttl(rng.choice(NAMES), rng.choice([20, 50, 500])): 1,
            lambda: self.drop_namespace(rng.choice(TENANTS)): 0.3,
        }
        usual: dict[Callable[[], object], float] = {
            lambda: self.put_prefix(*self.someone(rng), rng.choice(NAMES), rng.randint(1, CHAIN_BLOCKS)): 12,
            lambda: self.match(*self.someone(rng), rng.choice(NAMES), rng.random() < 0.2, rng.choice([5, 30, 60])): 6,
            lambda: self.read_under_one_of_the_leases(rng.randrange(LEASES_HELD)): 4,
            lambda: self.get_without_lease(*self.someone(rng)): 1,
            lambda: self.delete(*self.someone(rng), rng.randrange(CHAIN_BLOCKS)): 2,
            lambda: self.pass_time(rng.choice([1, 1, 1, 2, 6, 11])): 4,
            lambda: self.evict_older(rng.choice([5, 12, 60])): 0.7,
            self.sweep: 2,
        }
        for do in (*rng.choices([*events], [*events.values()]), *rng.choices([*usual], [*usual.values()], k=count)):
            do()
            self.recover_soon()
            self.losses_are_explained()
            self.the_cap_holds()
        self.the_books_agree()

    def the_books_agree(self) -> None:
        """Index, tables and accounts, where nothing was damaged that they would rightly complain of."""
        if not (self.flipped or self.disk_is_sick or self.store._index._damaged):
            report = self.store.invariants()
            assert report.violations == (), f"{report.violations}; {self.device}"

    def someone(self, rng: random.Random) -> tuple[str, int]:
        return rng.choice(TENANTS), rng.randrange(CONVERSATIONS)

    # What callers do

    def put_prefix(self, tenant: str, conversation: int, name: str, last: int) -> None:
        chain = self.chain(tenant, conversation)
        results = put(self.store, self.namespaces[tenant], chain, [*range(last), 0], name)
        keys = [(tenant, chain[block]) for block in range(last)]
        if self.device.image is not None:
            for key in keys:
                self.note_try(key, name)
            self.come_back()
            return
        for key, result in zip(keys, results, strict=False):
            if result.status is PutStatus.REJECTED:
                assert result.reason in (("STORE_FULL", "STORAGE_ERROR") if self.disk_is_sick else ("STORE_FULL",))
                self.missed(key)
                self.ever.setdefault(key, {})[name] = int(self.clock.now_s())
                self.rejected.setdefault(key, {})[name] = int(self.clock.now_s())
                if not self.must_be_there(key):
                    self.held.pop(key, None)
            elif result.status is PutStatus.EXISTS:
                assert self.may_be_there(key), "an expired, deleted or unknown block is said to exist"
                self.note_use(key, name)
            else:
                self.missed(key)
                self.note_stored(key, name)

    def match(self, tenant: str, conversation: int, name: str, peek: bool, lease_s: int) -> None:
        chain = self.chain(tenant, conversation)
        match = self.store.match(self.namespaces[tenant], chain, name, peek=peek, lease_s=lease_s)
        hit = match.hit_length_blocks
        for block in range(hit):
            key = (tenant, chain[block])
            assert self.may_be_there(key), "an expired, deleted or unknown block is a hit"
            if not peek:
                self.note_use(key, name)
        if hit < len(chain):
            self.missed((tenant, chain[hit]))
        if hit:
            lease = Lease(tenant, conversation, hit, match.lease, match.lease_expiry_s)
            if self.read_under(lease):
                self.leases = [*self.leases, lease][-LEASES_HELD:]

    def read_under_one_of_the_leases(self, which: int) -> None:
        self.leases = [lease for lease in self.leases if lease.deadline_s >= self.clock.now_s()]
        if which < len(self.leases):
            self.read_under(self.leases[which])

    def read_under(self, lease: Lease) -> bool:
        """Everything the lease names is there, unless it was damaged."""
        hit = self.chain(lease.tenant, lease.conversation).first(lease.blocks)
        found, misses = get(self.store, self.namespaces[lease.tenant], hit, lease=lease.token)
        for block, data in found.items():
            assert data == payload(hit[block], BLOCK_BYTES), f"wrong bytes; {self.device}"
        if misses:
            assert len(misses) <= self.damages, f"{misses} under a live lease; {self.device}"
            self.damages -= len(misses)
            for block in misses:
                self.doubt((lease.tenant, hit[block]))
            self.forget_leases(lease.tenant, {hit[block] for block in misses})
        return not misses

    def get_without_lease(self, tenant: str, conversation: int) -> None:
        chain = self.chain(tenant, conversation)
        found, misses = get(self.store, self.namespaces[tenant], chain)
        for block, data in found.items():
            assert data == payload(chain[block], BLOCK_BYTES), f"wrong bytes; {self.device}"
            assert self.may_be_there((tenant, chain[block])), f"an expired or deleted block is back; {self.device}"
        for block in misses:
            self.missed((tenant, chain[block]))
        self.forget_leases(tenant, {chain[block] for block, reason in misses.items() if reason == "CORRUPT"})

    def forget_leases(self, tenant: str, hashes: set[bytes]) -> None:
        """Of blocks that were deleted or found damaged: they are not readable even under a lease."""
        self.leases = [lease for lease in self.leases if not self.names(lease, tenant, hashes)]

    # What operators do

    def delete(self, tenant: str, conversation: int, first: int) -> None:
        chain = self.chain(tenant, conversation)
        keys = [(tenant, chain[block]) for block in range(first, len(chain))]
        done = self.attempt(lambda: self.store.delete(self.namespaces[tenant], chain, first, len(chain) - first))
        self.forget_leases(tenant, {chain[block] for block in range(first, len(chain))})
        for key in keys:
            if done is None or self.device.image is not None:
                self.doubt(key)
            else:
                self.gone(key)
        self.come_back_if_stopped()

    def names(self, lease: Lease, tenant: str, hashes: set[bytes]) -> bool:
        chain = self.chain(lease.tenant, lease.conversation)
        return lease.tenant == tenant and any(chain[block] in hashes for block in range(lease.blocks))

    def evict_older(self, age: int) -> None:
        self.settle_expired()
        usage = self.store.evict(EvictSelection(older_than_s=age), dry_run=True)
        done = self.attempt(lambda: self.store.evict(EvictSelection(older_than_s=age), dry_run=False))
        assert done in (None, usage)
        self.count_evictions(asked=done.blocks if done is not None else 0)
        limit = self.clock.now_s() - age
        unsure = done is None or self.device.image is not None
        for key, held in list(self.held.items()):
            if max(held.may.values()) <= limit and not unsure:
                del self.held[key]
            elif max(held.sure.values(), default=0) <= limit or unsure:
                self.doubt(key)
        self.come_back_if_stopped()

    def set_ttl(self, name: str, ttl_s: int) -> None:
        self.settle_expired()
        done = self.attempt(lambda: self.store.set_ttl(name, ttl_s))
        assert self.store.traffic_classes()[sorted(CLASSES, reverse=True).index(name)].ttl_s == (
            ttl_s if done is not None else self.ttl_s[name]
        )
        self.come_back_if_stopped()
        self.take_over_ttls()

    def take_over_ttls(self) -> None:
        self.ttl_s = {traffic_class.name: traffic_class.ttl_s for traffic_class in self.store.traffic_classes()}
        self.settle_expired()

    def drop_namespace(self, tenant: str) -> None:
        before = self.namespaces[tenant].namespace_id
        done = self.attempt(lambda: self.store.drop_namespace(self.namespaces[tenant], dry_run=False))
        if done is None:
            return
        self.leases = [lease for lease in self.leases if lease.tenant != tenant]
        if self.device.image is not None:
            for key in self.held:
                if key[0] == tenant:
                    self.doubt(key)
            self.come_back()
        else:
            self.device.heal()
            self.namespaces[tenant] = self.register(tenant)
        if self.namespaces[tenant].namespace_id != before:
            for known in (self.held, self.rejected, self.ever):
                for key in [key for key in known if key[0] == tenant]:
                    del known[key]
        self.come_back_if_stopped()

    # What happens by itself

    def pass_time(self, seconds: int) -> None:
        self.clock.advance(seconds)
        self.settle_expired()

    def sweep(self) -> None:
        self.attempt(self.store.sweep)
        self.come_back_if_stopped()
        for which in range(LEASES_HELD):
            self.read_under_one_of_the_leases(which)

    def restart(self, *, lose_index: bool) -> None:
        self.count_evictions()
        self.store.close()
        if self.device.image is not None:
            self.come_back(closed=True)
            return
        if lose_index:
            shutil.rmtree(self.path / "index")
        self.device.heal()
        self.store = self.open()
        self.come_back_if_stopped()

    # Faults

    def attempt(self, call: Callable[[], T]) -> T | None:
        """The call's result; None if it failed, which only a sick disk excuses."""
        try:
            return call()
        except (KvStoreError, OSError):
            assert self.disk_is_sick
            return None

    def come_back_if_stopped(self) -> None:
        if self.device.image is not None:
            self.come_back()

    @property
    def disk_is_sick(self) -> bool:
        device = self.device
        return device.fail_write_after is not None or device.fail_create or device.fail_resize or device.fail_sync

    def fall_sick(self, rng: random.Random) -> None:
        self.device.heal()
        kind = rng.choice(["write", "write", "create", "resize", "sync"])
        if kind == "write":
            self.device.fail_write_after, self.device.partial_write = rng.randrange(12), rng.random() < 0.5
        else:
            setattr(self.device, f"fail_{kind}", True)

    def recover_soon(self) -> None:
        """A disk that is sick stays so for the next operation, not longer."""
        self.sick_steps = self.sick_steps + 1 if self.disk_is_sick else 0
        if self.sick_steps > 1:
            self.device.heal()

    sick_steps = 0

    def flip_bit(self, rng: random.Random) -> None:
        """In payloads or rows; the use table and the header's second half are not checksummed, and hints only."""
        paths = sorted((self.path / "segments").glob("*.seg"))
        layout = fmt.Layout(SEGMENT_BYTES // fmt.ALIGNMENT_BYTES)
        if not paths:
            return
        path = rng.choice(paths)
        rows = (layout.mapped_bytes, layout.mapped_bytes + layout.row_capacity * fmt.ROW_BYTES)
        start, end = rng.choice([rows, (layout.payload_offset, path.stat().st_size)])
        if start < end:
            flip_bit(path, rng.randrange(start, end), rng.randrange(8))
            self.damages += 1
            self.flipped = True

    def stop_soon(self, steps: int, *, power: bool) -> None:
        """The process or the machine stops within one of the next operations that write."""
        self.device.crash_after, self.power = steps, power

    def stop(self, *, power: bool) -> None:
        """The process or the machine stops now."""
        self.power = power
        self.device.stop()
        self.come_back()

    def clean_up_and_stop(self, rng: random.Random, *, power: bool) -> None:
        """What was just moved is deleted in its new place, and then everything stops."""
        for _ in range(4):
            self.delete(*self.someone(rng), rng.randrange(2, CHAIN_BLOCKS))
        self.sweep()
        for _ in range(4):
            self.delete(*self.someone(rng), rng.randrange(CHAIN_BLOCKS))
        self.stop(power=power)

    def come_back(self, *, closed: bool = False) -> None:
        """After the process or the machine stopped: what has to be there still is."""
        if not closed:
            self.count_evictions()
            self.device.remember_index()
            let_go(self.store)
        self.device.heal()
        if self.power:
            self.device.reboot()
            self.lose_what_was_not_synced()
        else:
            self.device.restart()
        self.store = self.open()
        if any((self.path / "segments").glob("*.damaged")):
            # An operator looks at them, as the log says, and takes them away.
            assert self.power, "a dead process leaves no damaged segment"
            self.store.close()
            for path in (self.path / "segments").glob("*.damaged"):
                self.device.unlink(path)
            self.device.sync_directory(self.path / "segments")
            self.store = self.open()
        self.take_over_ttls()
        for tenant in TENANTS:
            try:
                self.namespaces[tenant] = self.store.namespace(self.namespaces[tenant].digest)
            except NamespaceNotFoundError:
                self.namespaces[tenant] = self.register(tenant)
        self.look_at_everything()
        for tenant in TENANTS:
            for conversation in range(CONVERSATIONS):
                self.match(tenant, conversation, "long", peek=True, lease_s=1)

    def lose_what_was_not_synced(self) -> None:
        self.leases = []  # their notes may be lost
        self.over_cap = True
        maybe = self.ever if self.durability == "memory" else self.rejected
        for held in self.held.values():
            held.sure = dict(held.durable) if self.durability == "sync" else {}
        for key, uses in maybe.items():
            held = self.held.setdefault(key, Held())
            held.may = {name: max(used, held.may.get(name, 0)) for name, used in uses.items()} | {
                name: used for name, used in held.may.items() if name not in uses
            }
        self.rejected = {}
        self.settle_expired()

    def losses_are_explained(self) -> None:
        """Evictions explain what is missed now, not what goes missing later."""
        self.count_evictions()
        if self.evictions:
            self.look_at_everything()

    def look_at_everything(self) -> None:
        for tenant in TENANTS:
            for conversation in range(CONVERSATIONS):
                self.get_without_lease(tenant, conversation)
        self.evictions = 0

    def the_cap_holds(self) -> None:
        used = tree_bytes(self.path)
        counted = self.store.status().used_bytes
        # tmpfs, unlike ext4, gives a page to whoever reads a hole through a map: the tables of a segment without blocks.
        empty = sum(segment.slot_count == 0 for segment in self.store._segments.all())
        assert counted <= used <= counted + 2 * empty * fmt.ALIGNMENT_BYTES, (
            f"counted {counted} bytes, du says {used}; {self.device}"
        )
        self.over_cap &= used > CAPACITY
        assert used <= CAPACITY or self.over_cap

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.path)


def let_go(store) -> None:
    """Give up the files without closing anything in order."""
    store._writer.close()
    store._index._env.close()
    store._segments.release()
    store._data_dir.close()


class DurableStoreModel(StoreModel):
    durability = "sync"


# A failing run prints its steps with the seeds that everything comes from. Not shrunk: that would take minutes.
_SETTINGS = settings(
    max_examples=8,
    stateful_step_count=20,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
StoreModel.TestCase.settings = _SETTINGS
DurableStoreModel.TestCase.settings = _SETTINGS
TestStoreModel = StoreModel.TestCase
TestDurableStoreModel = DurableStoreModel.TestCase
