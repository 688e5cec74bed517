"""Who may hold how much: shares and limits of traffic classes and tenants.

A share is soft: while a class or tenant holds no more than that, its blocks are worth more than anybody's who holds more, so
under pressure they go last. A limit is hard: a put beyond it is rejected; one of 1 is none, because reclaims make room. What is
counted are live blocks with their padding; a block counts for the class that stored it and for its namespace's tenant.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import KvStoreError, QuotaExceededError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvstore.census import Census, Rules
    from kvstore.log.segment import Segment


@dataclass(frozen=True, slots=True)
class Quota:
    """Shares of the capacity, each from 0 to 1."""

    share: float = 0.0
    limit: float = 1.0


@dataclass(frozen=True, slots=True)
class Quotas:
    """Every quota there is; a tenant that is not named has the quota of `other_tenants`."""

    classes: Mapping[int, Quota]  # by class id
    class_names: Mapping[int, str]
    tenants: Mapping[str, Quota]
    other_tenants: Quota = Quota()

    def of_class(self, class_id: int) -> Quota:
        """A class's quota; classes that are no longer configured have none."""
        return self.classes.get(class_id, Quota())

    def of_tenant(self, tenant: str) -> Quota:
        """A tenant's quota."""
        return self.tenants.get(tenant, self.other_tenants)

    def all(self) -> list[Quota]:
        """All of them."""
        return [*self.classes.values(), *self.tenants.values(), self.other_tenants]


@dataclass(frozen=True, slots=True)
class Holder:
    """A traffic class (by id) or a tenant (by name)."""

    class_id: int | None
    tenant: str | None


class QuotaBook:
    """What classes and tenants hold, for puts and reclaims; writer thread only."""

    def __init__(
        self,
        quotas: Quotas,
        capacity_bytes: int,
        census: Census,
        segments: Callable[[], Sequence[Segment]],
        rules: Callable[[], Rules],
    ) -> None:
        self._quotas, self._capacity_bytes = quotas, capacity_bytes
        self._census, self._segments, self._rules = census, segments, rules
        self._limited = any(quota.limit < 1 for quota in quotas.all())
        self._shared = any(quota.share > 0 for quota in quotas.all())
        self._held: dict[Holder, int] = {}  # bytes at the last count, and what was admitted since
        self._admitted: dict[Holder, int] = {}  # bytes of the group that is being written, which no count sees yet
        self.refused: set[Holder] = set()  # whose puts were rejected, until it is cleared
        self.refresh()

    def refresh(self) -> None:
        """Count again what everybody holds."""
        if not (self._limited or self._shared):
            return
        held: dict[Holder, int] = defaultdict(int, self._admitted)
        tenants = self._rules().tenants
        for segment in self._segments():
            for namespace_id, share in self._census.live_shares(segment).items():
                held[Holder(segment.header.class_id, None)] += share.taken_bytes
                held[Holder(None, tenants.get(namespace_id, ""))] += share.taken_bytes
        self._held = held

    def begin(self) -> None:
        """A group of puts begins; those of the last one are stored, or have failed."""
        self._admitted = {}

    def admit(self, class_id: int, namespace_id: int, taken_bytes: int) -> KvStoreError | None:
        """Count a block that is about to be stored, or say why it must not be."""
        if not self._limited:
            return None
        holders = self._holders(class_id, namespace_id)
        if self._over(holders, taken_bytes):
            self.refresh()  # something may have ended since the last count
        over = self._over(holders, taken_bytes)
        if over is not None:
            self.refused.add(over)
            return self._refusal(over, taken_bytes)
        for holder in holders:
            self._held[holder] = self._held.get(holder, 0) + taken_bytes
            self._admitted[holder] = self._admitted.get(holder, 0) + taken_bytes
        return None

    def _holders(self, class_id: int, namespace_id: int) -> tuple[Holder, Holder]:
        return Holder(class_id, None), Holder(None, self._rules().tenants.get(namespace_id, ""))

    def _over(self, holders: Iterable[Holder], taken_bytes: int) -> Holder | None:
        for holder in holders:
            if self._quota(holder).limit < 1 and self._held.get(holder, 0) + taken_bytes > self.limit_bytes(holder):
                return holder
        return None

    def _refusal(self, holder: Holder, taken_bytes: int) -> QuotaExceededError:
        name, key = self._name(holder)
        limit = self._quota(holder).limit
        return QuotaExceededError(
            f"{name} holds {self._held.get(holder, 0)} bytes, with {taken_bytes} more it would hold more than {key} "
            f"({limit:g} of store.capacity, {self.limit_bytes(holder)} bytes)"
        )

    def _name(self, holder: Holder) -> tuple[str, str]:
        if holder.class_id is not None:
            name = self._quotas.class_names.get(holder.class_id, "?")
            return f"traffic class {name}", f"traffic_classes.{name}.limit"
        named = holder.tenant if holder.tenant in self._quotas.tenants else "other"
        return f"tenant {holder.tenant}", f"tenants.{named}.limit"

    def _quota(self, holder: Holder) -> Quota:
        if holder.class_id is not None:
            return self._quotas.of_class(holder.class_id)
        return self._quotas.of_tenant(holder.tenant or "")

    def limit_bytes(self, holder: Holder) -> int:
        """What the holder may hold at most."""
        return int(self._quota(holder).limit * self._capacity_bytes)

    def held_bytes(self, holder: Holder) -> int:
        """What it holds, as far as is known."""
        return self._held.get(holder, 0)

    def protected_namespaces(self, segment: Segment, namespace_ids: Iterable[int]) -> list[int]:
        """Those of the namespaces whose blocks in this segment are within a share."""
        if not self._shared:
            return []
        if self._within_share(Holder(segment.header.class_id, None)):
            return list(namespace_ids)
        tenants = self._rules().tenants
        return [ns for ns in namespace_ids if self._within_share(Holder(None, tenants.get(ns, "")))]

    def _within_share(self, holder: Holder) -> bool:
        share = self._quota(holder).share
        return share > 0 and self._held.get(holder, 0) <= share * self._capacity_bytes
