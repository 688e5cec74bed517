"""Tokens by class and namespace: they move by exactly what was asked for, and are never lost or counted twice."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import pytest
from prometheus_client import generate_latest

from kvstore.clock import ManualClock
from kvstore.match_counters import OTHER, MatchCounters, namespace_label
from kvstore.metrics import Metrics
from kvstore.types import Namespace, NamespaceId, TokenCounts
from kvstore_api.namespace import NamespaceDigest
from stores import chain_of, open_store, put, spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.store import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    store = open_store(tmp_path, ManualClock())
    yield store
    store.close()


def namespace_of(number: int) -> Namespace:
    return Namespace(NamespaceId(number), NamespaceDigest(number.to_bytes(32, "little")), spec(), 0.0)


def samples(store: LocalStore) -> dict[tuple[str, str, str], float]:
    """kind, class, namespace -> value, as a scrape has them."""
    metrics = Metrics()
    metrics.watch(lambda: store, [])
    return {
        (sample.name.split("_")[2], sample.labels["traffic_class"], sample.labels["namespace"]): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name.endswith("_tokens_total") and sample.labels
    }


def test_a_match_moves_the_tokens_of_its_class_and_namespace_and_no_other(store):
    first, second = (store.register_namespace(spec(model=model)) for model in ("one", "two"))
    chain = chain_of(first, 1, 10)
    put(store, first, chain, range(6))
    assert samples(store) == {}
    store.match(first, chain)  # the default class
    store.match(first, chain.first(3), "chatbot")
    store.match(first, chain, "chatbot", peek=True)
    store.match(second, chain_of(second, 1, 2), "chatbot")
    wanted = {
        ("asked", "agent", namespace_label(first)): 1280,
        ("hit", "agent", namespace_label(first)): 768,
        ("missed", "agent", namespace_label(first)): 512,
        ("asked", "chatbot", namespace_label(first)): 384,
        ("hit", "chatbot", namespace_label(first)): 384,
        ("missed", "chatbot", namespace_label(first)): 0,
        ("asked", "chatbot", namespace_label(second)): 256,
        ("hit", "chatbot", namespace_label(second)): 0,
        ("missed", "chatbot", namespace_label(second)): 256,
    }
    assert samples(store) == wanted
    store.sweep()
    put(store, second, chain_of(second, 1, 2))
    assert samples(store) == wanted, "moved without a match"
    assert store.status().class_tokens == {"agent": TokenCounts(1280, 768), "chatbot": TokenCounts(640, 384)}
    assert store.tokens_of(first) == TokenCounts(1664, 1152)
    total = store.counters.snapshot()
    assert (total["asked_tokens"], total["hit_tokens"]) == (1920, 1152)


def test_a_dropped_namespace_leaves_the_page_but_not_the_sums_of_classes(store):
    kept, dropped = (store.register_namespace(spec(model=model)) for model in ("one", "two"))
    for namespace in (kept, dropped):
        store.match(namespace, chain_of(namespace, 1, 2))
    store.drop_namespace(dropped, dry_run=False)
    store.match(dropped, chain_of(dropped, 1, 1))  # was on its way when the drop came
    assert {label for _, _, label in samples(store)} == {namespace_label(kept)}
    assert store.status().class_tokens == {"agent": TokenCounts(640, 0)}
    again = store.register_namespace(dropped.spec)
    store.match(again, chain_of(again, 1, 1))
    assert samples(store)["asked", "agent", namespace_label(again)] == 128, "the new one begins at 0"
    store.drop_namespace(again, dry_run=False)
    assert store.status().class_tokens == {"agent": TokenCounts(768, 0)}


@pytest.mark.parametrize("hostile", ["x" * 4000, 'a"} 1\nfake_metric 7\n#', "\x1b[31m\N{SNOWMAN}", "../../etc"])
def test_nothing_that_a_tenant_writes_is_on_the_page(store, hostile):
    namespace = store.register_namespace(
        spec(tenant=hostile, model=hostile, revision=hostile, labels={hostile: hostile})
    )
    store.match(namespace, chain_of(namespace, 1, 1))
    metrics = Metrics()
    metrics.watch(lambda: store, [])
    page = generate_latest(metrics.registry).decode()
    assert f'namespace="{namespace.digest.hex()[:16]}"' in page
    assert hostile not in page
    assert hostile.encode("unicode_escape").decode() not in page
    assert "fake_metric" not in page


def test_namespaces_without_end_share_one_series_that_never_falls():
    counters = MatchCounters(max_labels=2)
    alive = [NamespaceId(number) for number in range(1, 6)]
    for number in alive:
        counters.add(namespace_of(number), "agent", 128 * number, 128)
    own = {(namespace_label(namespace_of(number)), "agent"): TokenCounts(128 * number, 128) for number in (1, 2)}
    other = TokenCounts(128 * (3 + 4 + 5), 3 * 128)
    assert counters.by_label(lambda: alive) == {**own, (OTHER, "agent"): other}

    alive.remove(NamespaceId(1))  # its place is free for the next newcomer; who has shared goes on sharing
    alive.remove(NamespaceId(4))
    counters.forget_dropped(lambda: alive)
    own.pop((namespace_label(namespace_of(1)), "agent"))
    alive += [NamespaceId(6), NamespaceId(7)]
    for number in (3, 6, 7):
        counters.add(namespace_of(number), "agent", 128, 0)
    own[namespace_label(namespace_of(6)), "agent"] = TokenCounts(128, 0)
    assert counters.by_label(lambda: alive) == {**own, (OTHER, "agent"): other + TokenCounts(256, 0)}
    assert counters.by_class() == {"agent": TokenCounts(128 * (1 + 2 + 3 + 4 + 5 + 3), 5 * 128)}
    assert counters.of_namespace(NamespaceId(3)) == TokenCounts(128 * 4, 128)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Python changes between threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_no_count_is_lost_between_threads():
    counters, namespace = MatchCounters(), namespace_of(1)

    def count() -> None:
        for _ in range(2000):
            counters.add(namespace, "agent", 256, 128)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.by_class() == {"agent": TokenCounts(8000 * 256, 8000 * 128)}
