"""What a plug for another engine is told in that engine's own configuration: strict, with the key to mend named."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvstore_client import ClientConfig, KVStoreConfigError
from kvstore_engine.benefit import MeasuredBenefit, MinimumHit
from kvstore_engine.prefix_cache import MAX_PENDING_SAVE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore_engine.benefit import BenefitRule


@dataclass(frozen=True, slots=True)
class PlugSettings:
    """The keys that every plug knows, beside those of `ClientConfig`, which are given by its names.

    Attributes:
        client: how to reach the store, and how long to wait for it.
        model: the model's name in the store; what the engine calls it if empty.
        revision: what tells these weights from all others; found out from the model's files if empty.
        tenant: whose KV this is.
        traffic_class: what requests are kept for that do not say so themselves; the server's default if empty.
        min_hit_tokens: the least hit that is loaded; 0: when loading is expected to be faster than computing, as measured.
        max_pending_save_bytes: saves that may wait for the store; what does not fit is dropped and counted.
    """

    client: ClientConfig
    model: str = ""
    revision: str = ""
    tenant: str = "default"
    traffic_class: str = ""
    min_hit_tokens: int = 0
    max_pending_save_bytes: int = MAX_PENDING_SAVE_BYTES

    def __post_init__(self) -> None:
        for name in ("model", "revision", "tenant", "traffic_class"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise KVStoreConfigError("INVALID_CONFIG", f"{name} is {value!r}, wanted is text")
        if not self.tenant:
            raise KVStoreConfigError("INVALID_CONFIG", "tenant is empty, wanted is a name")
        for name, least in (("min_hit_tokens", 0), ("max_pending_save_bytes", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                wanted = f"a whole number of {least} or more"
                raise KVStoreConfigError("INVALID_CONFIG", f"{name} is {value!r}, wanted is {wanted}")

    @classmethod
    def read(cls, given: Mapping[str, Any], *, foreign: frozenset[str] = frozenset()) -> PlugSettings:
        """Read them from the flat mapping in which an engine keeps the configuration of its plugs.

        Args: foreign: keys that are the engine's own, or a plug's, and are left alone.
        Raises: KVStoreConfigError: INVALID_CONFIG; a key is unknown, or its value is impossible. Names it.
        """
        own = {field.name for field in fields(cls)} - {"client"}
        of_client = {field.name for field in fields(ClientConfig)}
        for key in given:
            if key not in own | of_client | foreign:
                close = difflib.get_close_matches(str(key), sorted(own | of_client | foreign), n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                known = ", ".join(sorted(own | of_client | foreign))
                raise KVStoreConfigError("INVALID_CONFIG", f"no setting is called {key!r}; {hint}known are: {known}")
        client = ClientConfig(**{key: value for key, value in given.items() if key in of_client})
        return cls(client, **{key: value for key, value in given.items() if key in own})

    def benefit(self) -> BenefitRule:
        """When a hit is used."""
        return MinimumHit(self.min_hit_tokens) if self.min_hit_tokens else MeasuredBenefit()
