"""The client's settings: one frozen object, impossible values refused with the field named."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore_client import target as targets
from kvstore_client.errors import KVStoreConfigError

BREAKER_FAILURES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How to reach a store, and how long to wait for it.

    Attributes:
        target: a gRPC target: "host:port", "[ipv6]:port", "unix:/path", "unix-abstract:name", "dns:///host:port",
            "ipv4:address:port", "ipv6:[address]:port". The port, 1 to 65535, must be given.
        base_budget_s: every call's time, whatever its size. A larger value saves hits on a slow network and lets a sick
            store hold a request for longer.
        budget_bandwidth_bytes_per_s: each call gets its bytes divided by this on top.
        register_timeout_s: how long the registration of a namespace may go on in the background. A call waits for it
            only within its own budget.
        connect_timeout_s: when an attempt to connect is given up and tried anew.
        reconnect_backoff_max_s: longest pause between attempts to connect; how late a restarted server may be noticed.
        breaker_failures: after so many calls in a row that were not answered, further ones are refused at once, BREAKER_OPEN,
            until the store answers again. Match, get and put are judged apart. 0: none is ever refused.
        breaker_probe_s: first pause before a store that was cut off is asked whether it answers; later ones are up to
            2 s, or this if it is more.

    Raises: KVStoreConfigError: INVALID_CONFIG; names the field, its value and what is allowed.
    """

    target: str = "127.0.0.1:7420"
    base_budget_s: float = 0.050
    budget_bandwidth_bytes_per_s: float = 200e6
    register_timeout_s: float = 10.0
    connect_timeout_s: float = 1.0
    reconnect_backoff_max_s: float = 1.0
    breaker_failures: int = 3
    breaker_probe_s: float = 0.5

    def __post_init__(self) -> None:
        text = isinstance(self.target, str) and not any(c.isspace() for c in self.target)
        if not text or not targets.is_possible(self.target):
            raise KVStoreConfigError("INVALID_CONFIG", f"target is {self.target!r}; wanted is {targets.WANTED}")
        self._check("base_budget_s", 0.0, 3600.0)
        self._check("budget_bandwidth_bytes_per_s", 1e3, 1e15)
        self._check("register_timeout_s", 0.0, 3600.0)
        self._check("connect_timeout_s", 0.1, 60.0)  # gRPC goes no lower than 0.1 s
        self._check("reconnect_backoff_max_s", 0.1, 120.0)
        self._check("breaker_probe_s", 0.01, 3600.0)
        count = self.breaker_failures
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= BREAKER_FAILURES_MAX:
            wanted = f"a whole number of 0 to {BREAKER_FAILURES_MAX:,}"
            raise KVStoreConfigError("INVALID_CONFIG", f"breaker_failures is {count!r}; wanted is {wanted}")

    def budget_s(self, size_bytes: int) -> float:
        """A call's time in seconds when it moves `size_bytes`."""
        return self.base_budget_s + size_bytes / self.budget_bandwidth_bytes_per_s

    def _check(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not low <= value <= high or value == 0:
            above = "more than 0" if low == 0 else f"{low:g}"
            raise KVStoreConfigError(
                "INVALID_CONFIG", f"{name} is {value!r}; wanted is a number of {above} to {high:g}"
            )
