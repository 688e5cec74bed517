"""The metrics page and the metrics agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client import generate_latest

from kvstore.clock import ManualClock
from kvstore.config import DEFAULT_TRAFFIC_CLASSES, ServerSection, StoreConfig
from kvstore.counters import COUNTERS
from kvstore.errors import OverloadedError
from kvstore.metrics import STORE_COUNTERS, Metrics
from kvstore.service import Pools
from kvstore.store import LocalStore
from kvstore_api.results import PutResult, PutStatus
from stores import chain_of, spec

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


@pytest.fixture
def pools() -> Iterator[Pools]:
    pools = Pools.of(ServerSection())
    yield pools
    pools.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore.open(tmp_path, StoreConfig(), DEFAULT_TRAFFIC_CLASSES, ManualClock())
    yield store
    store.close()


def test_every_counter_of_the_store_is_published():
    assert tuple(STORE_COUNTERS) == COUNTERS


def test_the_page_describes_exactly_the_metrics_there_are(store, pools):
    metrics = Metrics()
    metrics.watch(lambda: store, pools.all())
    with pytest.raises(OverloadedError), metrics.call("MatchPrefix"):  # labels show in samples only
        raise OverloadedError
    metrics.count_rejected([PutResult(0, PutStatus.REJECTED, "WRONG_SIZE")])
    namespace = store.register_namespace(spec())
    store.match(namespace, chain_of(namespace, 1, 3))
    families = {}
    for family in metrics.registry.collect():
        assert family.documentation, family.name
        assert family.documentation[0].isupper(), family.name
        assert family.documentation.endswith("."), family.name
        families[family.name + ("_total" if family.type == "counter" else "")] = family
    page = dict(re.findall(r"^\| `(kvstore_\w+)(?:\{([\w,]+)\})?` \|", PAGE.read_text(), re.M))
    assert set(page) == set(families)
    for name, family in families.items():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert set(filter(None, page[name].split(","))) == labels, name


def test_calls_are_counted_timed_and_their_errors_named():
    metrics = Metrics()
    with metrics.call("MatchPrefix"):
        assert metrics.registry.get_sample_value("kvstore_rpcs_running", {"method": "MatchPrefix"}) == 1
    with pytest.raises(OverloadedError), metrics.call("MatchPrefix"):
        raise OverloadedError
    value = metrics.registry.get_sample_value
    assert value("kvstore_rpcs_running", {"method": "MatchPrefix"}) == 0
    assert value("kvstore_rpc_duration_seconds_count", {"method": "MatchPrefix"}) == 2
    assert value("kvstore_rpc_errors_total", {"method": "MatchPrefix", "reason": "OVERLOADED"}) == 1


def test_rejections_are_counted_by_reason():
    metrics = Metrics()
    rejected = PutStatus.REJECTED
    metrics.count_rejected(
        [PutResult(0, PutStatus.STORED), PutResult(1, rejected, "WRONG_SIZE"), PutResult(2, rejected, "WRONG_SIZE")]
    )
    assert metrics.registry.get_sample_value("kvstore_put_rejected_total", {"reason": "WRONG_SIZE"}) == 2


def test_without_a_store_the_metrics_say_so(pools):
    metrics = Metrics()
    metrics.watch(lambda: None, pools.all())
    text = generate_latest(metrics.registry).decode()
    assert "kvstore_serving 0.0" in text
    assert "kvstore_capacity_bytes" not in text
    assert "_created" not in text
