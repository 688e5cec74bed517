"""Every metric the server publishes; `docs/metrics.md` describes them."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvstore.errors import KvStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from kvstore.listen import ListenAddress
    from kvstore.pool import StorePool
    from kvstore.store import LocalStore
    from kvstore.types import InvariantReport, StoreStatus, TokenCounts
    from kvstore_api.results import PutResult

# Budgets begin at 50 ms; a match takes well under 1 ms, a long stream seconds.
_LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

# The store's counters: name in `StoreCounters` and, with kvstore_ and _total around it, in the metrics -> help.
STORE_COUNTERS = {
    "matches": "Prefix matches that counted as a use (peeks do not).",
    "asked_blocks": "Full blocks asked for by those matches.",
    "hit_blocks": "Blocks of those that were hit.",
    "asked_tokens": "Tokens in the full blocks asked for; the denominator of the hit rate.",
    "hit_tokens": "Tokens in the blocks that were hit; the numerator of the hit rate.",
    "blocks_stored": "Blocks and state objects stored.",
    "blocks_exist": "Blocks and state objects put that were there already.",
    "blocks_rejected": "Blocks and state objects that the store refused.",
    "bytes_stored": "Payload bytes stored.",
    "blocks_read": "Blocks and state objects read.",
    "bytes_read": "Payload bytes read.",
    "blocks_missed": "Blocks asked for by a get that were not there.",
    "blocks_corrupt": "Blocks whose bytes failed their checksum, served as misses.",
    "blocks_unreadable": "Blocks that the disk did not give; served as misses, and not offered for a minute.",
    "blocks_expired": "Blocks dropped because their time to live had passed.",
    "blocks_evicted": "Blocks dropped to make room, or on an operator's order.",
    "blocks_deleted": "Blocks dropped because a caller deleted them or their namespace.",
    "blocks_moved": "Blocks written again because their segment was reclaimed.",
    "segments_reclaimed": "Segment files whose space was given back.",
    "segments_dropped_whole": "Of those, segments from which nothing was moved.",
    "bytes_reclaimed": "Bytes of those files.",
    "bytes_written": "Bytes written to segment files, moves and tables included; over bytes_stored: write amplification.",
}


class Metrics:
    """The server's own registry: what the RPC edge counts, and what the store says when it is asked.

    Touched on the loop's thread, read on the metrics port's.
    """

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second time series per counter that nobody reads
        self.registry = CollectorRegistry()
        self._latency = Histogram(
            "kvstore_rpc_duration_seconds",
            "Time from a call's first message to its end, by method; streams include their transfer.",
            ["method"],
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._errors = Counter(
            "kvstore_rpc_errors",
            "Calls that ended with an error, by method and reason; CANCELLED: the caller left.",
            ["method", "reason"],
            registry=self.registry,
        )
        self._running = Gauge(
            "kvstore_rpcs_running", "Calls running now, by method.", ["method"], registry=self.registry
        )
        self._put_rejected = Counter(
            "kvstore_put_rejected",
            "Blocks and state objects that a put's answer called rejected, by reason; MISSING: announced, not brought.",
            ["reason"],
            registry=self.registry,
        )

    @contextmanager
    def call(self, method: str) -> Iterator[None]:
        """Count and time one call; errors by their reason."""
        started_s = time.perf_counter()
        self._running.labels(method).inc()
        try:
            yield
        except KvStoreError as error:
            self._errors.labels(method, error.reason).inc()
            raise
        except asyncio.CancelledError:
            self._errors.labels(method, "CANCELLED").inc()
            raise
        except Exception:
            self._errors.labels(method, "INTERNAL").inc()
            raise
        finally:
            self._running.labels(method).dec()
            self._latency.labels(method).observe(time.perf_counter() - started_s)

    def count_rejected(self, results: Sequence[PutResult]) -> None:
        """Count the rejected among a put's results."""
        for result in results:
            if result.reason:
                self._put_rejected.labels(result.reason).inc()

    def watch(self, store: Callable[[], LocalStore | None], pools: Sequence[StorePool]) -> None:
        """Publish the store's counters and status, once it is open, and the pools' load."""
        self.registry.register(_StoreCollector(store))
        self.registry.register(_PoolCollector(pools))

    def serve(self, address: ListenAddress) -> tuple[str, Callable[[], None]]:
        """Answer HTTP on `address` from threads of its own.

        Returns: the bound address, and what ends it (blocks shortly).
        Raises: OSError: the address cannot be had.
        """
        httpd, thread = start_http_server(address.port, address.host, self.registry)

        def stop() -> None:
            httpd.shutdown()
            httpd.server_close()
            thread.join()

        return address.with_port(httpd.server_port), stop


class _StoreCollector:
    """Asks the store at each scrape."""

    def __init__(self, store: Callable[[], LocalStore | None]) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        store = self._store()
        counters = store.counters.snapshot() if store else {}
        for name, text in STORE_COUNTERS.items():
            yield CounterMetricFamily(f"kvstore_{name}", text, value=counters.get(name, 0))
        text = "Whether the store is open: 1, or 0 while it is being opened."
        yield GaugeMetricFamily("kvstore_serving", text, value=bool(store))
        if store:
            yield from _token_metrics(store.tokens_by_label())
            yield from _status_metrics(store.status())

    def describe(self) -> Iterator[Metric]:
        return iter(())  # registering must not ask a store that is not open


def _token_metrics(tokens: Mapping[tuple[str, str], TokenCounts]) -> Iterator[Metric]:
    labels = ["traffic_class", "namespace"]
    text = "by traffic class and namespace."
    asked = CounterMetricFamily("kvstore_class_asked_tokens", f"Tokens in full blocks asked for, {text}", labels=labels)
    hit = CounterMetricFamily("kvstore_class_hit_tokens", f"Tokens in blocks that were hit, {text}", labels=labels)
    missed = CounterMetricFamily(
        "kvstore_class_missed_tokens", f"Tokens asked for and not hit, which engines prefill, {text}", labels=labels
    )
    for (namespace, traffic_class), counts in tokens.items():
        asked.add_metric([traffic_class, namespace], counts.asked_tokens)
        hit.add_metric([traffic_class, namespace], counts.hit_tokens)
        missed.add_metric([traffic_class, namespace], counts.missed_tokens)
    yield from (asked, hit, missed)


def _status_metrics(status: StoreStatus) -> Iterator[Metric]:
    yield GaugeMetricFamily("kvstore_capacity_bytes", "Cap for the data directory.", value=status.capacity_bytes)
    yield GaugeMetricFamily(
        "kvstore_used_bytes", "Allocated bytes in the data directory, as du counts.", value=status.used_bytes
    )
    yield GaugeMetricFamily(
        "kvstore_retiring_bytes",
        "Of those, bytes of files that only wait for leases to pass.",
        value=status.retiring_bytes,
    )
    yield GaugeMetricFamily(
        "kvstore_clock_ahead_seconds",
        "How far the store's time is ahead of the wall clock; negative while a jump of the clock is not believed yet.",
        value=status.clock_ahead_s,
    )
    yield GaugeMetricFamily("kvstore_live_blocks", "Live blocks and state objects.", value=status.live.blocks)
    yield GaugeMetricFamily("kvstore_live_bytes", "Payload bytes of those.", value=status.live.bytes)
    yield GaugeMetricFamily("kvstore_segments", "Segment files, open ones included.", value=status.segment_count)
    yield GaugeMetricFamily("kvstore_namespaces", "Namespaces that are alive.", value=status.namespace_count)
    yield from _invariant_metrics(status.invariants)
    blocks = GaugeMetricFamily("kvstore_class_live_blocks", "Live blocks, by traffic class.", labels=["traffic_class"])
    size = GaugeMetricFamily("kvstore_class_live_bytes", "Payload bytes of those.", labels=["traffic_class"])
    ttl = GaugeMetricFamily("kvstore_class_ttl_seconds", "Time to live, by traffic class.", labels=["traffic_class"])
    for traffic_class, usage in status.classes:
        blocks.add_metric([traffic_class.name], usage.blocks)
        size.add_metric([traffic_class.name], usage.bytes)
        ttl.add_metric([traffic_class.name], traffic_class.ttl_s)
    yield from (blocks, size, ttl)


def _invariant_metrics(report: InvariantReport | None) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "kvstore_invariant_violations",
        "Things that did not agree at the last check of the store against itself; 0 before the first.",
        value=report.violation_count if report else 0,
    )
    yield GaugeMetricFamily(
        "kvstore_invariant_check_timestamp_seconds",
        "When that check ended, seconds since the epoch; 0 before the first.",
        value=report.time_s if report else 0,
    )


class _PoolCollector:
    """Asks the pools at each scrape."""

    def __init__(self, pools: Sequence[StorePool]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        pending = GaugeMetricFamily("kvstore_pool_pending", "Calls that hold a place, by pool.", labels=["pool"])
        limit = GaugeMetricFamily("kvstore_pool_pending_max", "Places, by pool.", labels=["pool"])
        refused = CounterMetricFamily("kvstore_pool_refused", "Calls refused as OVERLOADED, by pool.", labels=["pool"])
        for pool in self._pools:
            pending.add_metric([pool.name], pool.pending)
            limit.add_metric([pool.name], pool.pending_max)
            refused.add_metric([pool.name], pool.refused)
        yield from (pending, limit, refused)
