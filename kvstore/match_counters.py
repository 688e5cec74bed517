"""What matches asked for and hit, by namespace and traffic class: who causes the tokens that engines have to prefill."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvstore.types import TokenCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from kvstore.types import Namespace, NamespaceId

# A label tells namespaces apart and says nothing of what tenants wrote into them; `namespace show` takes it.
LABEL_DIGITS = 16
# Whoever may register namespaces could make time series without end; from here on namespaces share one.
MAX_LABELS = 256
OTHER = "other"

_NOTHING = TokenCounts()


class MatchCounters:
    """Thread-safe sums since the start. Those of a dropped namespace live on in the sums of classes and of `other`."""

    def __init__(self, max_labels: int = MAX_LABELS) -> None:
        self._max_labels = max_labels
        self._lock = threading.Lock()  # guards all below
        self._own_labels = 0
        self._by_namespace: dict[NamespaceId, dict[str, TokenCounts]] = {}
        self._labels: dict[NamespaceId, str] = {}  # given at the first match, and kept: a series never moves
        self._dropped: dict[tuple[str, str], TokenCounts] = {}  # by (OTHER, or empty for an own label) and class

    def add(self, namespace: Namespace, traffic_class: str, asked_tokens: int, hit_tokens: int) -> None:
        """Count a match."""
        with self._lock:
            counts = self._by_namespace.get(namespace.namespace_id)
            if counts is None:
                counts = self._by_namespace[namespace.namespace_id] = {}
                self._labels[namespace.namespace_id] = self._new_label(namespace)
            counts[traffic_class] = counts.get(traffic_class, _NOTHING) + TokenCounts(asked_tokens, hit_tokens)

    def _new_label(self, namespace: Namespace) -> str:
        if self._own_labels >= self._max_labels:
            return OTHER
        self._own_labels += 1
        return namespace_label(namespace)

    def forget_dropped(self, alive: Callable[[], Collection[NamespaceId]]) -> None:
        """Let go of namespaces that are not alive. A match that ends behind the drop makes an entry that the next drop takes."""
        with self._lock:
            kept = frozenset(alive())  # asked under the lock: whoever has counted before was registered before
            for gone in self._by_namespace.keys() - kept:
                label = self._labels.pop(gone)
                self._own_labels -= label != OTHER
                _add_to(self._dropped, OTHER if label == OTHER else "", self._by_namespace.pop(gone))

    def by_class(self) -> dict[str, TokenCounts]:
        """By traffic class; only those that were asked for."""
        sums: dict[str, TokenCounts] = {}
        with self._lock:
            pairs = [pair for counts in self._by_namespace.values() for pair in counts.items()]
            pairs += [(traffic_class, counts) for (_, traffic_class), counts in self._dropped.items()]
        for traffic_class, more in pairs:
            sums[traffic_class] = sums.get(traffic_class, _NOTHING) + more
        return sums

    def of_namespace(self, namespace_id: NamespaceId) -> TokenCounts:
        """Of one namespace, all classes together."""
        with self._lock:
            return sum(self._by_namespace.get(namespace_id, {}).values(), _NOTHING)

    def by_label(self, alive: Callable[[], Collection[NamespaceId]]) -> dict[tuple[str, str], TokenCounts]:
        """By (namespace label, traffic class): at most `max_labels` labels, and `OTHER`, where alone dropped ones still count."""
        with self._lock:
            kept = frozenset(alive())
            sums = {key: counts for key, counts in self._dropped.items() if key[0] == OTHER}
            for namespace_id, counts in self._by_namespace.items():
                label = self._labels[namespace_id]
                if namespace_id in kept or label == OTHER:
                    _add_to(sums, label, counts)
        return sums


def _add_to(sums: dict[tuple[str, str], TokenCounts], label: str, counts: Mapping[str, TokenCounts]) -> None:
    for traffic_class, more in counts.items():
        sums[label, traffic_class] = sums.get((label, traffic_class), _NOTHING) + more


def namespace_label(namespace: Namespace) -> str:
    """The beginning of its digest, in hex."""
    return namespace.digest.hex()[:LABEL_DIGITS]
