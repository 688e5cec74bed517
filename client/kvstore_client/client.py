"""The client: synchronous, for engines that call from their worker threads.

Every call has a budget, connecting and registering included, and ends by it. Trouble with the store is part of the result;
exceptions are for mistakes: a wrong buffer (ValueError, TypeError; before anything is sent), a configuration that cannot work
(KVStoreConfigError), a closed client (ClientClosedError).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore_client.blocking import run
from kvstore_client.calls import NamespaceCalls
from kvstore_client.channel import Connections
from kvstore_client.config import ClientConfig
from kvstore_client.hashing import prefix_hashes, prefix_seed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from kvstore_api.chain import Chain, PrefixHash
    from kvstore_api.namespace import NamespaceDigest, NamespaceSpec
    from kvstore_client.breaker import Lane
    from kvstore_client.results import DeleteResult, Failure, GetResult, MatchResult, PutReport, StateResult
    from kvstore_client.stats import ClientStats


class KVStoreClient:
    """A store's client. Threads may share it; a forked or spawned process gets its own connection by itself.

    Making one connects to nothing: the first call does.
    """

    def __init__(self, config: ClientConfig | None = None) -> None:
        self.config = config if config is not None else ClientConfig()
        self._connections = Connections(self.config)

    def __enter__(self) -> KVStoreClient:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection of this process. Calls under way in other threads end with a failure. Idempotent."""
        self._connections.close()

    def namespace(self, spec: NamespaceSpec) -> NamespaceHandle:
        """A namespace to work in. Sends nothing; the server gets to know the spec before the first call that needs it.

        Raises: NamespaceSpecError: the spec is incomplete or contradicts itself; names the field.
        """
        spec.validate()
        return NamespaceHandle(self._connections, self.config, spec)

    def cut_off(self, lane: Lane) -> Failure | None:
        """Why calls of this kind would be refused now, without asking the store: BREAKER_OPEN. See `NamespaceHandle.cut_off`."""
        return self._connections.current().breaker.cut_off(lane)

    def stats(self) -> ClientStats:
        """Counts of this process so far. Raises: ClientClosedError."""
        return self._connections.current().stats.snapshot()


class NamespaceHandle:
    """One namespace of a store. Threads may share it.

    Attributes:
        spec: what was asked for; not to be changed.
        digest: the namespace's 32-byte name.
        block_bytes: bytes of a block.
        block_tokens: tokens of a block.

    All calls take `budget_s`, the time in seconds after which they give up; by default it is computed from the client's
    configuration and the bytes to move. 0 or less is a budget that is used up.
    All calls but `chain` raise ClientClosedError after `close`, and KVStoreConfigError for a reply that only another
    configuration can cure.
    """

    def __init__(self, connections: Connections, config: ClientConfig, spec: NamespaceSpec) -> None:
        self.spec = spec
        self.digest: NamespaceDigest = spec.digest()
        self.block_bytes = spec.block_bytes
        self.block_tokens = spec.block_tokens
        self._connections = connections
        self._calls = NamespaceCalls(spec, config, connections.current)

    def chain(
        self,
        token_ids: Sequence[int] | NDArray[np.integer],
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        extra_keys: Mapping[int, Sequence[bytes]] | None = None,
    ) -> Chain:
        """The prefix hashes of all full blocks of `token_ids` in this namespace; see `prefix_seed` and `prefix_hashes`.

        Raises:
            TokenIdError: `token_ids` is no flat list of integers in [0, 2**32).
            TypeError: `salt` or `adapter` is not bytes.
            ValueError: there are more than 65,536 blocks.
        """
        seed = prefix_seed(self.digest, salt=salt, adapter=adapter)
        return prefix_hashes(seed, token_ids, self.block_tokens, extra_keys)

    def budget_s(self, size_bytes: int) -> float:
        """The time in seconds that a call gets which moves so many bytes and is given no budget of its own."""
        return self._calls.budget_s(size_bytes)

    def register(self, *, budget_s: float | None = None) -> Failure | None:
        """Make the namespace known now instead of before the first call, to find wrong configuration at an engine's start.

        Returns: None when the server knows the namespace.
        """
        return run(self._calls.register(budget_s), self._connections)

    def cut_off(self, lane: Lane) -> Failure | None:
        """Why calls of this kind would be refused now, without asking the store: BREAKER_OPEN. None when they would be sent.

        Takes microseconds: an engine can spare itself the hashing, and a match when gets are cut off.

        Args:
            lane: "lookup" (register, match, delete), "read" (get, get_state) or "write" (put, put_state).
        """
        return self._calls.cut_off(lane)

    def match(
        self,
        chain: Chain,
        traffic_class: str = "",
        *,
        lease_s: float | None = None,
        peek: bool = False,
        budget_s: float | None = None,
    ) -> MatchResult:
        """Find the longest stored leading part of `chain`.

        Args:
            traffic_class: whose use this is; empty for the server's default.
            lease_s: how long the blocks found must stay readable in any case; the server's default when None.
            peek: look without counting a use.
        """
        return run(self._calls.match(chain, traffic_class, lease_s, peek, budget_s), self._connections)

    def get(
        self,
        chain: Chain,
        out: object,
        *,
        first_block: int = 0,
        block_count: int | None = None,
        lease: bytes = b"",
        part: tuple[int, int] | None = None,
        budget_s: float | None = None,
    ) -> GetResult:
        """Bring blocks [first_block, first_block + block_count) of `chain` into `out`.

        Args:
            out: writable memory: one buffer of block_count * block_bytes, or a list of block_count buffers of block_bytes
                each. A buffer is a contiguous numpy array, torch tensor on the CPU, or anything with the buffer protocol.
                Nothing writes to it after the return.
            block_count: the rest of the chain when None.
            lease: of a match; spares the server the look-up.
            part: (offset_bytes, size_bytes), to bring only that part of each block, such as one layer's. `out` then holds
                size_bytes for each block instead of block_bytes. Parts of one block from several calls belong together only if
                their `block_checksums` in the results are equal.
        Returns: a status per block. "OK" means that the bytes now in `out` have been verified; the contents of `out` are
            undefined for all other blocks. When the budget ends in the middle, the blocks that came before are OK.
        Raises: ValueError, TypeError: the range is not in the chain, the part not in the block, or `out` does not fit.
        """
        steps = self._calls.get(chain, out, first_block, block_count, lease, part, budget_s)
        return run(steps, self._connections)

    def put(
        self,
        chain: Chain,
        blocks: object,
        *,
        first_block: int = 0,
        traffic_class: str = "",
        budget_s: float | None = None,
    ) -> PutReport:
        """Store blocks of `chain`, beginning with `first_block`.

        Args:
            blocks: one buffer of n * block_bytes, or a list of n buffers of block_bytes each; buffers as in `get`. They must
                not change during the call, and nothing reads them after the return.
            traffic_class: what they are kept for; empty for the server's default.
        Returns: a result per block. Blocks without confirmation count as rejected, whether they were stored or not.
        Raises: ValueError, TypeError: the blocks do not fit the chain or the namespace. One block of the wrong size in a list
            is the caller's mistake: it is raised for the whole call, before anything is sent, and no other block is stored.
        """
        return run(self._calls.put(chain, blocks, first_block, traffic_class, budget_s), self._connections)

    def delete(
        self,
        chain: Chain,
        *,
        first_block: int = 0,
        block_count: int | None = None,
        budget_s: float | None = None,
    ) -> DeleteResult:
        """Delete blocks [first_block, first_block + block_count) of `chain`; the rest of the chain when None."""
        return run(self._calls.delete(chain, first_block, block_count, budget_s), self._connections)

    def get_state(
        self,
        prefix_hash: PrefixHash,
        name: str,
        *,
        max_bytes: int,
        traffic_class: str = "",
        budget_s: float | None = None,
    ) -> StateResult:
        """Bring the state object `name` that stands beside `prefix_hash`.

        Args:
            max_bytes: the largest object that is wanted, at most 64 MiB. The default budget is made for this size, so give
                the real one. A larger object is a miss, TOO_LARGE.
        """
        steps = self._calls.get_state(prefix_hash, name, max_bytes, traffic_class, budget_s)
        return run(steps, self._connections)

    def put_state(
        self,
        prefix_hash: PrefixHash,
        name: str,
        data: object,
        *,
        traffic_class: str = "",
        budget_s: float | None = None,
    ) -> PutReport:
        """Store `data`, one buffer of 1 byte to 64 MiB, beside `prefix_hash`. What is there already is kept: EXISTS."""
        return run(self._calls.put_state(prefix_hash, name, data, traffic_class, budget_s), self._connections)
