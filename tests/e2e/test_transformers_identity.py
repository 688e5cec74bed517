"""Whose KV is whose: what computes other KV has a namespace of its own, and a model that has changed no part in it."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from causal_models import GREEDY, PATIENCE_S, make_model, open_store, prompt_of, replace_a_forward, shared_model, steer
from kvstore_client import KVStoreConfigError
from serving import running_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from serving import RunningServer

PROMPT = prompt_of(300)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("data")) as running:
        yield running


class Adapted(nn.Module):
    """A layer with something beside it, as adapters are, and how much of it as a number, a tensor or whatever else."""

    def __init__(self, inner: nn.Linear, scale: Any, delta: float = 0.1) -> None:
        super().__init__()
        self.inner = inner
        self.delta = nn.Parameter(torch.full((inner.in_features, inner.out_features), delta))
        self._scale = scale

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = self._scale
        return self.inner(hidden) + hidden @ self.delta * (scale["default"][0] if isinstance(scale, dict) else scale)


def adapt(model: Any, scale: Any = 1.0, delta: float = 0.1) -> Any:
    attention = model.model.layers[0].self_attn
    attention.k_proj = Adapted(attention.k_proj, scale, delta)
    return model.eval()


def adapted(scale: Any = 1.0, delta: float = 0.1) -> Any:
    return adapt(make_model(), scale, delta)


class Packed(nn.Linear):
    """A layer that keeps a part of its weights in something of its own, as quantized ones do."""

    def get_extra_state(self) -> Any:
        return {"scales": (torch.full((2,), self.pack().scale), 8)}

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * self.pack().scale


def packed(scale: float) -> Any:
    model = make_model()
    layer = model.model.layers[0].mlp.up_proj
    layer.__class__ = Packed
    layer.pack = lambda: SimpleNamespace(scale=scale)
    return model


def with_one_number_changed(name: str) -> Any:
    model = make_model()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] += 1e-3
    return model


def with_attribute(module: str, name: str, value: object) -> Any:
    model = make_model()
    setattr(model.get_submodule(module), name, value)
    return model


ROPE = {"rope_type": "default", "rope_theta": 500_000.0}
OTHERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "other weights": (lambda: make_model(seed=1), {}),
    "one other number": (lambda: with_one_number_changed("model.layers.0.mlp.up_proj.weight"), {}),
    "one other number in the head": (lambda: with_one_number_changed("lm_head.weight"), {}),
    "other position embeddings": (lambda: make_model(rope_parameters=ROPE), {}),
    "other epsilon": (lambda: make_model(rms_norm_eps=1e-3), {}),
    "other dtype": (lambda: make_model(dtype=torch.bfloat16), {}),
    "other attention kernel": (lambda: make_model(attn_implementation="eager"), {}),
    "other kind of model": (lambda: make_model("qwen2"), {}),
    "adapter": (adapted, {}),
    "other adapter": (lambda: adapted(delta=0.2), {}),
    "adapter that changes nothing": (lambda: adapted(delta=0.0), {}),
    "other scale of an adapter": (lambda: adapted(2.0), {}),
    "scale that is a tensor": (lambda: adapted(torch.ones(1)), {}),
    "other tensor": (lambda: adapted(torch.full((1,), 2.0)), {}),
    "scale in a mapping": (lambda: adapted({"default": [1.0]}), {}),
    "other scale in a mapping": (lambda: adapted({"default": [2.0]}), {}),
    "other number of a module": (lambda: with_attribute("model.layers.0.self_attn", "scaling", 0.5), {}),
    "packed weights": (lambda: packed(1.0), {}),
    "other packed weights": (lambda: packed(2.0), {}),
    "given revision": (make_model, {"revision": "r1"}),
    "other given revision": (make_model, {"revision": "r2"}),
    "given name": (make_model, {"model": "mine"}),
    "other tenant": (make_model, {"tenant": "somebody"}),
}


def hit_tokens(model: Any, target: str, /, **settings: Any) -> int:
    prompt = prompt_of(150)
    with open_store(model, target, **settings) as store:
        store.generate(prompt, max_new_tokens=1, **GREEDY)
        assert store.flush(PATIENCE_S)
        assert store.last.offered_tokens == 128 - store.last.hit_tokens
        return store.last.hit_tokens


def test_what_computes_other_kv_has_a_namespace_of_its_own(server: RunningServer):
    assert hit_tokens(make_model(), server.target) == 0
    assert hit_tokens(make_model(), server.target) == 128
    firsts = {name: hit_tokens(make(), server.target, **settings) for name, (make, settings) in OTHERS.items()}
    assert firsts == dict.fromkeys(OTHERS, 0)
    seconds = {name: hit_tokens(make(), server.target, **settings) for name, (make, settings) in OTHERS.items()}
    assert seconds == dict.fromkeys(OTHERS, 128)


LAYER = """
from torch import nn

class Scaled(nn.Linear):
    def forward(self, hidden):
        return {factor} * super().forward(hidden)
"""


def test_edited_code_of_a_layer_of_ones_own_has_a_namespace_of_its_own(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hits = []
    for run, factor in enumerate([1.0, 2.0, 1.0]):
        path = tmp_path / f"{run}.py"
        path.write_text(LAYER.format(factor=factor))
        spec = importlib.util.spec_from_file_location("layers_of_ones_own", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        model = make_model()
        model.model.layers[0].mlp.up_proj.__class__ = module.Scaled
        hits.append(hit_tokens(model, server.target))
    assert hits == [0, 0, 128]


UNREADABLE: dict[str, Callable[[], torch.Tensor]] = {
    "elsewhere": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "opaque": lambda: torch.eye(3).to_mkldnn(),
    "quantized": lambda: torch._empty_affine_quantized([3], scale=0.1, zero_point=0, dtype=torch.qint8),
}


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
@pytest.mark.parametrize("case", UNREADABLE)
def test_weights_that_cannot_be_read_need_a_revision(server: RunningServer, case: str):
    model = make_model()
    model.model.register_buffer(case, UNREADABLE[case]())
    with pytest.raises(KVStoreConfigError, match=rf"{case}.*revision") as caught:
        open_store(model, server.target)
    assert caught.value.reason == "IDENTITY_UNKNOWN"
    assert hit_tokens(model, server.target, revision=f"with a part {case}") == 0


# Models that change under way


def train_a_little(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=prompt_of(10), labels=prompt_of(10)).loss.backward()
    optimizer.step()
    model.zero_grad()


def merge_behind_torchs_back(model: Any) -> None:
    weight = model.model.layers[1].self_attn.k_proj.weight
    weight.data += 0.1 * torch.ones_like(weight)


def edit_one_number(model: Any) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[PROMPT[0, 0], 0] += 1.0


def replace_a_tensor(model: Any) -> None:
    weight = model.get_input_embeddings().weight.detach().clone()
    weight[PROMPT[0, 0], 0] += 1.0
    model.get_input_embeddings().weight = nn.Parameter(weight)


def spy(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = Mock(side_effect=mlp.forward)


def steer_before(model: Any) -> None:
    model.model.layers[1].register_forward_pre_hook(lambda _module, given: (given[0] * 1.5, *given[1:]))


CHANGES: list[Callable[[Any], Any]] = [
    train_a_little,
    merge_behind_torchs_back,
    edit_one_number,
    replace_a_tensor,
    adapt,
    replace_a_forward,
    spy,
    steer,
    steer_before,
    lambda model: model.load_state_dict(make_model(seed=1).state_dict()),
    lambda model: model.to(torch.bfloat16),
    lambda model: model.set_attn_implementation("eager"),
    lambda model: model.train(),
    lambda model: model.model.layers[1].self_attn.train(),
    lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.5),
    lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    lambda model: setattr(model.model.layers[2].self_attn, "scale", nn.Buffer(torch.ones(1))),
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_model_neither_takes_nor_gives_kv(server: RunningServer, change: Callable[[Any], Any]):
    model, prompt = make_model(), prompt_of(300)
    with open_store(model, server.target) as store:
        store.generate(prompt, max_new_tokens=20, **GREEDY)
        assert not store.last.bypassed
        before = store.stats()
        change(model)
        expected = model.generate(prompt, max_new_tokens=20, **GREEDY)
        assert torch.equal(store.generate(prompt, max_new_tokens=20, **GREEDY), expected)
        assert store.last.bypassed
        assert store.stats().requests == before.requests


@contextmanager
def class_of_layers_patched() -> Iterator[None]:
    own = LlamaMLP.forward
    LlamaMLP.forward = lambda self, hidden: own(self, hidden) * 1.5
    yield
    LlamaMLP.forward = own


@contextmanager
def coarse_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


AROUND: list[Callable[[], AbstractContextManager[None]]] = [
    lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    class_of_layers_patched,
    coarse_products,
]


@pytest.mark.parametrize("around", AROUND)
def test_what_is_computed_otherwise_for_a_while_neither_takes_nor_gives_kv(
    server: RunningServer, around: Callable[[], AbstractContextManager[None]]
):
    model, prompt, salt = shared_model(), prompt_of(300), repr(around).encode()
    with open_store(model, server.target) as store:
        for hit_tokens, is_served in ((0, False), (0, True), (0, False), (256, True)):
            with nullcontext() if is_served else around():
                expected = model.generate(prompt, max_new_tokens=5, **GREEDY)
                assert torch.equal(store.generate(prompt, max_new_tokens=5, salt=salt, **GREEDY), expected)
            assert store.flush(PATIENCE_S)
            assert bool(store.last.bypassed) is not is_served
            assert store.last.hit_tokens == hit_tokens
