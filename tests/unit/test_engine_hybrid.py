"""The thin engine with window layers and a real store: what is replayed, and that a resumed answer is a cold run's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import nodes
from kvstore_client import ClientConfig, GetResult, KvGroupKind, KVStoreClient, ReplayMode, StateResult
from kvstore_engine.benefit import MinimumHit
from kvstore_engine.engine import Engine, Generation
from kvstore_engine.identity import namespace_spec
from kvstore_engine.kv_pool import BLOCK_TOKENS, KVPool
from kvstore_engine.model import Llama, random_weights
from kvstore_engine.prefix_cache import PrefixCache
from kvstore_engine.sampling import SamplingParams
from serving import running_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore_client import NamespaceHandle

WINDOW = 128
CONFIG = replace(nodes.CONFIG, layers=4)
WEIGHTS = random_weights(CONFIG, seed=5, tied=False)
ALTERNATE, SECOND_HALF = (1, 3), (2, 3)
BOUNDED, EXACT, SNAPSHOT = ReplayMode.BOUNDED, ReplayMode.EXACT, ReplayMode.SNAPSHOT
PATIENCE_S = 60
FEW = SamplingParams(max_new_tokens=5)
PROMPT = nodes.prompt_of(1100)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVStoreClient]:
    with (
        running_server(tmp_path_factory.mktemp("hybrid")) as running,
        KVStoreClient(ClientConfig(target=running.target, base_budget_s=PATIENCE_S)) as patient,
    ):
        yield patient


class Node:
    """A prefill node that has nothing in its memory; reading KV that nobody computed or loaded spoils its answers."""

    def __init__(
        self,
        handle: NamespaceHandle | Spoiled | None,
        layers: tuple[int, ...],
        *,
        window: int = WINDOW,
        chunk: int = BLOCK_TOKENS,
        save_states: bool = True,
        sized: bool = True,
    ) -> None:
        config = replace(CONFIG, window_tokens=window, window_layers=layers)
        self.pool = nodes.make_pool(config, num_blocks=12)
        self.cache = None
        if handle is not None:
            self.cache = PrefixCache(
                handle,  # type: ignore[arg-type]
                block_tokens=BLOCK_TOKENS,
                block_bytes=handle.block_bytes,
                benefit=MinimumHit(1),
                state_size=(lambda _group, tokens: self.pool.window_state_bytes(tokens)) if sized else None,
            )
        snapshots = handle is not None and handle.spec.groups[1].replay_rule is SNAPSHOT
        self.engine = Engine(
            Llama(config, WEIGHTS),
            self.pool,
            prefix_cache=self.cache,
            chunk_tokens=chunk,
            save_states=save_states and snapshots,
        )

    def generate(self, prompt: list[int], params: SamplingParams = FEW, **options: Any) -> Generation:
        generation = self.engine.generate(prompt, params, **options)
        assert self.cache is None or self.cache.flush(PATIENCE_S)
        return generation

    def window_rows(self) -> torch.Tensor:
        """(tokens, values) of the first request's window KV: its blocks are the pool's from 0 on."""
        return self.pool.window_kv.permute(0, 4, 1, 2, 3, 5).reshape(12 * BLOCK_TOKENS, -1)


@pytest.fixture
def namespace(client: KVStoreClient, request: pytest.FixtureRequest) -> Callable[..., NamespaceHandle]:
    def make(
        mode: ReplayMode, layers: tuple[int, ...], window: int = WINDOW, replay_tokens: int = 0
    ) -> NamespaceHandle:
        pool = Node(None, layers, window=window).pool
        name = f"{request.node.name} {window}"
        return client.namespace(namespace_spec(name, "weights-1", pool, replay=mode, replay_tokens=replay_tokens))

    return make


class Spoiled:
    """A namespace handle of which some calls are replaced."""

    def __init__(self, real: NamespaceHandle, **replaced: Callable[..., Any]) -> None:
        self._real, self._replaced = real, replaced
        self.spec, self.block_bytes = real.spec, real.block_bytes

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self._real, name)


def span_of(mode: ReplayMode, window: int = WINDOW) -> int:
    return {BOUNDED: window, EXACT: -(-2 * window // 128) * 128, SNAPSHOT: 0}[mode]


def assert_equal_answer(warm: Generation, cold: Generation) -> None:
    assert warm.tokens == cold.tokens
    torch.testing.assert_close(warm.first_logits, cold.first_logits, atol=2e-5, rtol=0)


@pytest.mark.parametrize("mode", [BOUNDED, EXACT, SNAPSHOT])
@pytest.mark.parametrize(
    ("window", "layers"), [(128, ALTERNATE), (128, SECOND_HALF), (100, ALTERNATE), (200, SECOND_HALF)]
)
def test_hit_at_every_edge_of_blocks_and_windows(namespace, mode: ReplayMode, layers: tuple[int, ...], window: int):
    handle, span = namespace(mode, layers, window), span_of(mode, window)
    for length in (127, 129, 255, 256, 257, 384, 639, 640, 641):
        prompt, salt = PROMPT[:length], str(length).encode()
        cold = Node(handle, layers, window=window).generate(prompt, salt=salt)
        node = Node(handle, layers, window=window)
        warm = node.generate(prompt, salt=salt)
        end = length // 128 * 128
        hit = end if end > span else 0
        assert (cold.hit_tokens, warm.hit_tokens) == (0, hit)
        # Whoever hits all of a prompt still computes its last token.
        start = min(hit - span, length - 1) if hit else 0
        assert (warm.replayed_tokens, warm.prefill_tokens) == (hit - start, length - start)
        assert warm.first_logits.isfinite().all()
        window_kept = max(0, hit - window) if mode is SNAPSHOT else start
        assert node.window_rows()[:window_kept].isnan().all(), "window KV from before the replay"
        assert node.window_rows()[window_kept:length].isfinite().all()
        if mode is not BOUNDED:
            assert_equal_answer(warm, cold)


def test_bounded_replay_is_not_a_cold_run(namespace):
    # The control of all tests that compare with one: forgetting what is before the replay does show.
    handle = namespace(BOUNDED, ALTERNATE)
    cold = Node(handle, ALTERNATE).generate(PROMPT[:700])
    warm = Node(handle, ALTERNATE).generate(PROMPT[:700])
    assert warm.hit_tokens == 640
    assert not torch.allclose(warm.first_logits, cold.first_logits, atol=1e-3)


@pytest.mark.parametrize("mode", [EXACT, SNAPSHOT])
@pytest.mark.parametrize(("layers", "window", "chunk"), [(ALTERNATE, 128, 100), (SECOND_HALF, 100, 256)])
def test_decode_behind_a_hit_sees_a_full_window(
    namespace, mode: ReplayMode, window: int, layers: tuple[int, ...], chunk: int
):
    handle, many = namespace(mode, layers, window), SamplingParams(max_new_tokens=150)
    cold = Node(handle, layers, window=window, chunk=chunk).generate(PROMPT[:645], many)
    warm = Node(handle, layers, window=window, chunk=chunk).generate(PROMPT[:645], many)
    assert warm.hit_tokens == 640
    assert_equal_answer(warm, cold)
    # A conversation goes on from the answer's blocks and, with snapshots, from the one at their end.
    history = PROMPT[:645] + warm.tokens + PROMPT[1000:1010]
    continued = Node(handle, layers, window=window, chunk=chunk).generate(history)
    assert continued.hit_tokens == 768
    assert continued.replayed_tokens == span_of(mode, window)
    assert_equal_answer(continued, Node(None, layers, window=window, chunk=chunk).generate(history))


@pytest.mark.parametrize("mode", [BOUNDED, EXACT, SNAPSHOT])
def test_replay_leaves_cached_blocks_as_they_are_and_stores_only_what_is_new(namespace, mode: ReplayMode):
    handle = namespace(mode, ALTERNATE)
    Node(handle, ALTERNATE).generate(PROMPT[:640])
    stored = bytearray(5 * handle.block_bytes)
    assert handle.get(handle.chain(PROMPT[:640]), stored).leading_blocks == 5
    node = Node(handle, ALTERNATE)
    assert node.generate(PROMPT[:900]).hit_tokens == 640
    assert b"".join(node.pool.block_view(block) for block in range(5)) == stored
    stats = node.cache.stats()
    assert (stats.stored_blocks, stats.exists_blocks, stats.unsaved_blocks) == (2, 0, {})
    again = Node(handle, ALTERNATE)
    assert again.generate(PROMPT[:900]).hit_tokens == 896
    assert again.cache.stats().saved_blocks == 0
    kept = bytearray(5 * handle.block_bytes)
    assert handle.get(handle.chain(PROMPT[:640]), kept).leading_blocks == 5
    assert kept == stored


@pytest.mark.parametrize("mode", [BOUNDED, SNAPSHOT])
@pytest.mark.parametrize("output", [1, 100])
@pytest.mark.parametrize(("total", "complete_blocks"), [(127, 0), (128, 0), (129, 1), (255, 1), (256, 1), (257, 2)])
def test_only_blocks_and_states_whose_every_token_was_computed_are_stored(
    namespace, mode: ReplayMode, output: int, total: int, complete_blocks: int
):
    handle, prompt = namespace(mode, ALTERNATE), PROMPT[: total - output]
    node = Node(handle, ALTERNATE)
    tokens = prompt + node.generate(prompt, SamplingParams(max_new_tokens=output)).tokens + PROMPT[-384:]
    chain = handle.chain(tokens)
    assert handle.match(chain).plan.hit_tokens // 128 <= complete_blocks
    assert node.cache.stats().stored_blocks == complete_blocks
    kept = [handle.get_state(chain[n], "window", max_bytes=1 << 20).data is not None for n in range(3)]
    ends = {len(prompt) // 128, complete_blocks} if mode is SNAPSHOT else set()
    assert kept == [n + 1 in ends for n in range(3)]


@pytest.mark.parametrize("arrived", [0, 2, 3, 6])
@pytest.mark.parametrize(("mode", "layers"), [(EXACT, ALTERNATE), (EXACT, SECOND_HALF), (SNAPSHOT, ALTERNATE)])
def test_hit_that_breaks_off_is_planned_anew(namespace, mode: ReplayMode, layers: tuple[int, ...], arrived: int):
    handle = namespace(mode, layers)
    cold = Node(handle, layers).generate(PROMPT[:900])

    def get(chain: Any, out: Any, **options: Any) -> GetResult:
        result = handle.get(chain, out, **options)
        for view in out[arrived:]:
            view[:] = b"\xff" * len(view)  # NaN
        bad = ["CORRUPT"] * (len(result.statuses) - arrived)
        return GetResult([*result.statuses[:arrived], *bad])

    warm = Node(Spoiled(handle, get=get), layers).generate(PROMPT[:900])
    # Without a state in the middle, both go back to an exact replay, or to the start: never into an empty window.
    assert warm.hit_tokens == (arrived * 128 if arrived * 128 > span_of(EXACT) else 0)
    assert_equal_answer(warm, cold)


def spoil_nothing(handle: NamespaceHandle) -> NamespaceHandle:
    return handle


def lose_states(handle: NamespaceHandle) -> Spoiled:
    return Spoiled(handle, get_state=lambda *_, **__: StateResult(None, "NOT_FOUND"))


@pytest.mark.parametrize(("stored", "spoil"), [(False, spoil_nothing), (True, lose_states)])
@pytest.mark.parametrize("length", [300, 640])
def test_missing_snapshot_costs_an_exact_replay_or_the_hit_and_is_stored_again(
    namespace, length: int, stored: bool, spoil: Callable[[NamespaceHandle], Any]
):
    handle, end = namespace(SNAPSHOT, ALTERNATE), length // 128 * 128
    cold = Node(handle, ALTERNATE, save_states=stored).generate(PROMPT[:length])
    warm = Node(spoil(handle), ALTERNATE).generate(PROMPT[:length])
    assert warm.hit_tokens == (end if end > 256 else 0)
    assert warm.replayed_tokens == (256 if end > 256 else 0)
    assert_equal_answer(warm, cold)
    again = Node(handle, ALTERNATE).generate(PROMPT[:length])
    assert (again.hit_tokens, again.replayed_tokens) == (end, int(end == length))
    assert_equal_answer(again, cold)


@pytest.mark.parametrize(("sized", "hit", "replayed"), [(True, 640, 256), (False, 0, 0)])
def test_snapshot_of_another_size_is_missing_or_a_miss(namespace, sized: bool, hit: int, replayed: int):
    """Somebody else's state under this engine's name: put first, it stays. A cache that knows the size replays instead."""
    handle = namespace(SNAPSHOT, ALTERNATE)
    assert handle.put_state(handle.chain(PROMPT[:640])[4], "window", b"garbage!").stored == 1
    cold = Node(handle, ALTERNATE, save_states=False).generate(PROMPT[:700])
    warm = Node(handle, ALTERNATE, sized=sized).generate(PROMPT[:700])
    assert (warm.hit_tokens, warm.replayed_tokens) == (hit, replayed)
    assert_equal_answer(warm, cold)


@pytest.mark.parametrize("mode", [BOUNDED, EXACT, SNAPSHOT])
def test_what_was_never_stored_is_no_bad_plan(namespace, mode: ReplayMode):
    node = Node(namespace(mode, ALTERNATE), ALTERNATE)
    node.generate(PROMPT[:300])
    assert node.cache is not None
    assert node.cache.stats().misses == {"NOT_STORED": 1}


def test_longer_replay_span_of_the_namespace_is_honoured(namespace):
    handle = namespace(BOUNDED, ALTERNATE, replay_tokens=131)
    Node(handle, ALTERNATE).generate(PROMPT[:700])
    warm = Node(handle, ALTERNATE).generate(PROMPT[:700])
    assert (warm.hit_tokens, warm.replayed_tokens) == (640, 131)


def test_namespaces_differ_by_windows_and_replay_but_not_for_models_without():
    pool = Node(None, ALTERNATE).pool
    specs = [namespace_spec("m", "f", pool, replay=mode) for mode in (BOUNDED, EXACT, SNAPSHOT)]
    specs.append(namespace_spec("m", "f", pool, replay_tokens=256))
    specs += [
        namespace_spec("m", "f", Node(None, layers, window=w).pool)
        for layers, w in ((ALTERNATE, 100), (SECOND_HALF, 128))
    ]
    assert len({spec.digest() for spec in specs}) == len(specs)
    full, window = specs[2].groups
    assert (full.name, full.kind, full.layers) == ("full", KvGroupKind.FULL, (0, 2))
    assert (window.name, window.kind, window.layers) == ("window", KvGroupKind.SLIDING_WINDOW, ALTERNATE)
    assert (window.window_tokens, window.replay_rule, window.replay_tokens) == (128, SNAPSHOT, 0)
    plain = KVPool(num_blocks=1, layers=2, kv_heads=2, head_dim=8)
    assert namespace_spec("m", "f", plain).groups == ()
    assert namespace_spec("m", "f", plain).digest() == namespace_spec("m", "f", plain, replay=EXACT).digest()


def test_pool_made_for_other_windows_than_the_models_is_refused():
    model = Llama(replace(CONFIG, window_tokens=WINDOW, window_layers=ALTERNATE), WEIGHTS)
    for layers, window in ((SECOND_HALF, 128), (ALTERNATE, 100)):
        with pytest.raises(ValueError, match="the pool is made for"):
            Engine(model, Node(None, layers, window=window).pool)
