"""The store against a dict: put, match, get, expire, evict, delete, reclaim, restart, lost index, crash."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.clock import ManualClock
from kvstore.config import TrafficClassConfig
from kvstore.log import format as fmt
from kvstore.types import EvictSelection, PutStatus
from stores import chain_of, du_bytes, get, open_store, payload, put, spec

CAPACITY = 1 << 20  # 16 segments of 64 KiB: 14 blocks of a page each
CHAIN_BLOCKS = 6
CONVERSATIONS = 12
CLASSES = {"short": TrafficClassConfig(ttl_s=50), "long": TrafficClassConfig(ttl_s=500)}
TTL_S = {name: config.ttl_s for name, config in CLASSES.items()}

conversations = st.integers(0, CONVERSATIONS - 1)
classes = st.sampled_from(sorted(CLASSES))


class StoreModel(RuleBasedStateMachine):
    """What may be there, and until when. A cache may lose blocks to capacity; it may never invent, mix up or revive them."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="kvstore-model-"))
        self.clock = ManualClock()
        self.store = self.open()
        self.namespace = self.store.register_namespace(spec(4000))
        self.chains = [chain_of(self.namespace, c, CHAIN_BLOCKS, shared_blocks=2) for c in range(CONVERSATIONS)]
        self.expiry: dict[bytes, dict[str, float]] = {}  # prefix hash -> class -> last use; absent: must be a miss
        self.asked_evictions = 0  # since the store was opened
        self.pressed = False  # the store had to evict by itself: any block may be gone

    def open(self):
        return open_store(self.path, self.clock, capacity=CAPACITY, traffic_classes=CLASSES)

    def may_be_there(self, prefix_hash: bytes) -> bool:
        now = self.clock.now_s()
        return any(int(used) + TTL_S[name] > now for name, used in self.expiry.get(prefix_hash, {}).items())

    def use(self, prefix_hash: bytes, name: str) -> None:
        self.expiry.setdefault(prefix_hash, {})[name] = self.clock.now_s()

    @rule(conversation=conversations, traffic_class=classes, last=st.integers(1, CHAIN_BLOCKS))
    def put_prefix(self, conversation: int, traffic_class: str, last: int) -> None:
        chain = self.chains[conversation]
        results = put(self.store, self.namespace, chain, range(last), traffic_class)
        for block, result in enumerate(results):
            if result.status is PutStatus.EXISTS:
                assert self.may_be_there(chain[block]), "an expired, deleted or unknown block is said to exist"
            if result.status is PutStatus.STORED and not self.may_be_there(chain[block]):
                self.expiry[chain[block]] = {}
            if result.status is PutStatus.REJECTED:
                assert result.reason == "STORE_FULL"
                self.pressed = True
            else:
                self.use(chain[block], traffic_class)

    @rule(conversation=conversations, traffic_class=classes, peek=st.booleans())
    def match_and_get(self, conversation: int, traffic_class: str, peek: bool) -> None:
        chain = self.chains[conversation]
        match = self.store.match(self.namespace, chain, traffic_class, peek=peek, lease_s=5)
        expected = 0
        while expected < len(chain) and self.may_be_there(chain[expected]):
            expected += 1
        assert match.hit_length_blocks <= expected
        if not self.pressed:
            assert match.hit_length_blocks == expected
        if not peek:
            for block in range(match.hit_length_blocks):
                self.use(chain[block], traffic_class)
        if match.hit_length_blocks:
            hit = chain.first(match.hit_length_blocks)
            found, misses = get(self.store, self.namespace, hit, lease=match.lease)
            assert misses == {}, "a miss under a live lease"
            assert found == {block: payload(chain[block], 4000) for block in range(len(hit))}

    @rule(conversation=conversations)
    def get_without_lease(self, conversation: int) -> None:
        chain = self.chains[conversation]
        found, _ = get(self.store, self.namespace, chain)
        for block, data in found.items():
            assert data == payload(chain[block], 4000)
            assert self.may_be_there(chain[block])

    @rule(conversation=conversations, first=st.integers(0, CHAIN_BLOCKS - 1))
    def delete(self, conversation: int, first: int) -> None:
        chain = self.chains[conversation]
        self.store.delete(self.namespace, chain, first, len(chain) - first)
        for block in range(first, len(chain)):
            self.expiry.pop(chain[block], None)

    @rule(age=st.sampled_from([0, 5, 60]))
    def evict_older(self, age: int) -> None:
        usage = self.store.evict(EvictSelection(older_than_s=age), dry_run=True)
        done = self.store.evict(EvictSelection(older_than_s=age), dry_run=False)
        assert usage == done
        self.asked_evictions += done.blocks
        now = self.clock.now_s()
        for prefix_hash, uses in list(self.expiry.items()):
            if uses and max(int(used) for used in uses.values()) <= now - age:
                del self.expiry[prefix_hash]

    @rule(seconds=st.sampled_from([1, 7, 45, 49, 51, 200]))
    def pass_time(self, seconds: int) -> None:
        self.clock.advance(seconds)
        for prefix_hash in list(self.expiry):
            if not self.may_be_there(prefix_hash):
                del self.expiry[prefix_hash]  # expired stays expired

    @rule()
    def tick(self) -> None:
        self.store.sweep()

    @rule(lose_index=st.booleans())
    def restart(self, lose_index: bool) -> None:
        self.the_cap_holds()
        self.store.close()
        self.asked_evictions = 0
        if lose_index:
            shutil.rmtree(self.path / "index")
        self.store = self.open()

    @rule()
    def crash(self) -> None:
        store = self.store
        self.the_cap_holds()
        self.asked_evictions = 0
        open_ids = {s.segment_id for s in store._segments.all() if s.state == fmt.STATE_OPEN}
        segments = store._segments.all()
        store._writer.close()
        for segment in segments:
            if segment.segment_id in open_ids:
                segment.state = fmt.STATE_OPEN
        store._index._env.close()
        store._segments.release()
        store._data_dir.close()
        self.store = self.open()

    @invariant()
    def the_cap_holds(self) -> None:
        self.pressed |= self.store.counters.snapshot()["blocks_evicted"] > self.asked_evictions
        used = du_bytes(self.path)
        assert used <= CAPACITY
        assert self.store.status().used_bytes == used

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.path)


StoreModel.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestStoreModel = StoreModel.TestCase
