"""`PrefixStore.generate` against `model.generate`: the same tokens, with less of the prompt computed."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from causal_models import (
    GREEDY,
    KINDS,
    PATIENCE_S,
    VOCABULARY,
    alone,
    make_model,
    make_seeing_model,
    open_store,
    prompt_of,
    shared_model,
    with_image,
)
from fault_proxy import Fault, fault_proxy
from kvstore_client import ClientConfig, KVStoreClient
from kvstore_engine.plug_settings import PlugSettings
from kvstore_engine.transformers.identity import namespace_spec
from kvstore_engine.transformers.kv_cache import cache_argument
from kvstore_engine.transformers.probe import probe
from serving import running_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore_engine.transformers import PrefixStore
    from serving import RunningServer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("data")) as running:
        yield running


def generate(store: PrefixStore, input_ids: torch.Tensor, **given: Any) -> Any:
    """The same with a store, in which all of it is afterwards."""
    output = store.generate(input_ids, **GREEDY, **given)
    assert store.flush(PATIENCE_S)
    return output


@contextmanager
def stopped(server: RunningServer) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def everything(model: Any, generated: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Tokens, their logits, and what the cache holds at the end."""
    cache = next(value for name in ("cache", "past_key_values") if (value := generated.get(name)) is not None)
    return (
        generated.sequences,
        torch.cat(generated.logits),
        [t for layer in cache.layers for t in (layer.keys, layer.values)],
    )


NEW_TOKENS = 50
DTYPES = [(kind, torch.float32) for kind in KINDS] + [("llama", torch.bfloat16), ("gemma3", torch.float16)]


@pytest.mark.parametrize(("kind", "dtype"), DTYPES)
def test_hit_gives_what_a_cold_run_gives(server: RunningServer, kind: str, dtype: torch.dtype):
    model, prompt = make_model(kind, dtype=dtype), prompt_of(350)
    given = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, "output_logits": True}
    tokens, logits, kv = everything(model, alone(model, prompt, **given))
    with open_store(model, server.target) as store:
        cold = everything(model, generate(store, prompt, **given))
        assert (store.last.hit_tokens, store.last.offered_tokens) == (0, 384)
    with open_store(make_model(kind, dtype=dtype), server.target) as store:
        hit = everything(model, generate(store, prompt, **given))
        assert (store.last.hit_tokens, store.last.offered_tokens) == (256, 128)
        assert (store.stats().hit_tokens, store.stats().exists_blocks) == (256, 1)
    assert torch.equal(cold[0], tokens)
    assert torch.equal(cold[1], logits)
    assert len(set(tokens[0, 350:].tolist())) > 5  # a model that repeats itself would tell nothing
    # A run that computes less at a time rounds elsewhere, which in few bits decides between tokens.
    same = NEW_TOKENS if dtype is torch.float32 else 1
    assert torch.equal(hit[0][:, : 350 + same], tokens[:, : 350 + same])
    rounding = {"atol": 1e-3, "rtol": 1e-3} if dtype is torch.float32 else {"atol": 1.0, "rtol": 0.1}
    torch.testing.assert_close(hit[1][:same], logits[:same], **rounding)
    assert [states.shape for states in hit[2]] == [states.shape for states in kv]
    if not model.config.to_dict().get("sliding_window"):
        # Of layers that forget nothing, the model's own cache can be cut where the hit ended: then all is rounded alike.
        own = DynamicCache(config=model.config)
        for layer, (keys, values) in enumerate(zip(kv[::2], kv[1::2], strict=True)):
            own.update(keys[:, :, :256].clone(), values[:, :, :256].clone(), layer)
        continued = everything(model, alone(model, prompt, **{cache_argument(model): own}, **given))
        assert torch.equal(hit[0], continued[0])
        torch.testing.assert_close(hit[1], continued[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("new_tokens", [1, 6])
@pytest.mark.parametrize("computed", [127, 128, 129, 255, 256, 257])
def test_only_blocks_whose_tokens_are_all_computed_are_stored(server: RunningServer, computed: int, new_tokens: int):
    # The last of the new tokens is chosen, and nothing is computed of it.
    model, prompt = shared_model(), prompt_of(computed + 1 - new_tokens)
    with open_store(model, server.target) as store:
        salt = f"{computed} {new_tokens}".encode()
        output = generate(store, prompt, max_new_tokens=new_tokens, salt=salt)
        assert output.shape[1] == computed + 1
        assert store.stats().stored_blocks == computed // 128
        assert store.last.offered_tokens == computed // 128 * 128
        again = generate(store, output, max_new_tokens=1, salt=salt)
        assert store.last.hit_tokens == computed // 128 * 128
        assert torch.equal(again, alone(model, output, max_new_tokens=1))


@pytest.mark.parametrize(("prompt_tokens", "hit_tokens"), [(128, 0), (129, 128), (256, 128), (257, 256), (385, 256)])
def test_at_least_one_token_of_a_prompt_is_computed(server: RunningServer, prompt_tokens: int, hit_tokens: int):
    model, prompt = shared_model("gemma3"), prompt_of(385, seed=1)
    with open_store(model, server.target) as store:
        generate(store, prompt[:, :256], max_new_tokens=2)
        output = generate(store, prompt[:, :prompt_tokens], max_new_tokens=5)
        assert store.last.hit_tokens == hit_tokens
        assert torch.equal(output, alone(model, prompt[:, :prompt_tokens], max_new_tokens=5))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_conversation_goes_on_from_the_answers_blocks(server: RunningServer, kind: str):
    model = shared_model(kind)
    text, hits = prompt_of(150, seed=2), []
    with open_store(model, server.target) as store:
        for turn in range(3):
            expected = alone(model, text, max_new_tokens=130)
            output = generate(store, text, max_new_tokens=130)
            hits.append(store.last.hit_tokens)
            assert torch.equal(output, expected)
            text = torch.cat([output, prompt_of(20, seed=turn)], dim=1)
    assert hits == [0, 256, 384]


def images(store: PrefixStore, prompt: torch.Tensor) -> None:
    store.generate(**with_image(prompt), max_new_tokens=2)


def two_prompts(store: PrefixStore, prompt: torch.Tensor) -> None:
    store.generate(torch.cat([prompt, prompt.flip(1)]), max_new_tokens=2)


@pytest.mark.parametrize("before", [images, two_prompts])
def test_what_a_model_notes_of_a_call_does_not_shift_the_next_prompt(
    server: RunningServer, before: Callable[..., None]
):
    model, prompt = make_seeing_model(), prompt_of(400)
    salt = before.__name__.encode()
    before(model, prompt)  # the store is made after it, too
    with open_store(model, server.target) as store:
        generate(store, prompt[:, :200], max_new_tokens=1, salt=salt)
        for hit_tokens in (128, 384):
            expected = alone(model, prompt, max_new_tokens=8)
            before(store, prompt)
            assert store.last.bypassed
            assert torch.equal(generate(store, prompt, max_new_tokens=8, salt=salt), expected)
            assert store.last.hit_tokens == hit_tokens


def test_returned_cache_can_be_gone_on_with_and_keeps_nothing_beside(server: RunningServer):
    model, prompt, given = shared_model("gemma3"), prompt_of(300, seed=10), {"return_dict_in_generate": True}
    argument = cache_argument(model)
    ends = []
    with open_store(model, server.target) as store:
        for call in (model.generate, store.generate):
            first = call(input_ids=prompt, max_new_tokens=5, **GREEDY, **given)
            text = torch.cat([first.sequences, prompt], dim=1)
            second = model.generate(text, max_new_tokens=5, **GREEDY, **given, **{argument: first[argument]})
            ends.append(second.sequences)
        assert second[argument].computed_tokens() == 0  # of which it could tell the KV behind the window
    assert torch.equal(ends[0], ends[1])


def test_without_memory_for_blocks_the_model_computes(server: RunningServer, monkeypatch: pytest.MonkeyPatch):
    model, prompt = shared_model(), prompt_of(300, seed=11)
    expected, empty = alone(model, prompt, max_new_tokens=3), torch.empty

    def full(*size: Any, **given: Any) -> torch.Tensor:
        if given.get("dtype") is torch.uint8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(*size, **given)

    with open_store(model, server.target) as store:
        generate(store, prompt, max_new_tokens=3)
        for salt, hit_tokens in ((b"", 256), (b"new", 0)):
            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty", full)
                assert torch.equal(generate(store, prompt, max_new_tokens=3, salt=salt), expected)
                assert (store.last.hit_tokens, store.last.offered_tokens) == (0, 0)
            generate(store, prompt, max_new_tokens=3, salt=salt)
            assert store.last.hit_tokens == hit_tokens


def test_sampling_streaming_and_stopping_are_as_without_a_store(server: RunningServer):
    class Heard(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.reshape(-1).tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    model, prompt = shared_model(), prompt_of(300, seed=3)
    config = {"do_sample": True, "temperature": 1.3, "top_k": 50, "max_new_tokens": 80, "eos_token_id": list(range(20))}
    outputs, heard = [], []
    with open_store(model, server.target) as store:
        for call in (model.generate, store.generate, store.generate):
            streamer = Heard()
            torch.manual_seed(7)
            outputs.append(call(input_ids=prompt, attention_mask=torch.ones_like(prompt), streamer=streamer, **config))
            heard.append(streamer.tokens)
            assert store.flush(PATIENCE_S)
        assert store.last.hit_tokens == 256
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert heard[0] == heard[1] == heard[2]
    assert outputs[0].shape[1] < 380
    assert outputs[0][0, -1] < 20


def test_what_is_in_the_store_is_what_the_model_reads(server: RunningServer):
    model, prompt, settings = shared_model("gemma3"), prompt_of(300, seed=4), PlugSettings(ClientConfig(server.target))
    spec = namespace_spec(model, probe(model), settings)
    with KVStoreClient(ClientConfig(server.target, base_budget_s=PATIENCE_S)) as client:
        handle = client.namespace(spec)
        noise = torch.randn((2, spec.block_bytes // 4), generator=torch.Generator().manual_seed(0))
        blocks = [memoryview(block.numpy()).cast("B") for block in noise]
        assert handle.put(handle.chain(prompt[0, :256].tolist()), blocks).stored == 2
    with open_store(model, server.target) as store:
        noisy = generate(store, prompt, max_new_tokens=1, return_dict_in_generate=True, output_logits=True)
        assert store.last.hit_tokens == 256
    sound = alone(model, prompt, max_new_tokens=1, return_dict_in_generate=True, output_logits=True)
    assert not torch.allclose(noisy.logits[0], sound.logits[0], atol=0.1)


def test_calls_with_other_salts_share_nothing(server: RunningServer):
    model, prompt = shared_model(), prompt_of(300, seed=5)
    salts = [b"", b"a", b"b", b"a\0", b"a" * 4096]
    with open_store(model, server.target) as store:
        for salt in salts:
            generate(store, prompt, max_new_tokens=1, salt=salt)
            assert store.last.hit_tokens == 0
        for salt in salts:
            generate(store, prompt, max_new_tokens=1, salt=salt)
            assert store.last.hit_tokens == 256
        with pytest.raises(TypeError, match="salt"):
            store.generate(prompt, salt="a")


def test_server_that_stops_costs_no_more_than_the_calls_budgets(tmp_path: Path):
    model, prompt = shared_model(), prompt_of(300, seed=6)
    expected = alone(model, prompt, max_new_tokens=5)
    with running_server(tmp_path) as server, open_store(model, server.target) as store:
        generate(store, prompt, max_new_tokens=5)
        with open_store(model, server.target, base_budget_s=0.2, register_timeout_s=0.2) as hasty, stopped(server):
            for _ in range(8):
                assert torch.equal(hasty.generate(prompt, **GREEDY, max_new_tokens=5), expected)
                assert hasty.last.hit_tokens == 0
            assert hasty.flush(PATIENCE_S)
            stats = hasty.stats()
        # After some that waited, the others did not.
        assert stats.misses["BREAKER_OPEN"] >= 3
        assert stats.wait_s < PATIENCE_S
        assert sum(stats.unsaved_blocks.values()) == 8 * 2
        assert torch.equal(generate(store, prompt, max_new_tokens=5), expected)
        assert store.last.hit_tokens == 256
        server.kill()
        for _ in range(5):
            assert torch.equal(generate(store, prompt, max_new_tokens=5), expected)
            assert store.last.hit_tokens == 0


@pytest.mark.parametrize("fault", [Fault(flip_after_bytes=20_000), Fault(cut_after_bytes=20_000)])
def test_damaged_or_broken_off_load_is_computed(server: RunningServer, fault: Fault):
    model, prompt = shared_model(), prompt_of(1000, seed=7)
    salt = repr(fault).encode()
    with fault_proxy(server.target) as proxy, open_store(model, proxy.target) as store:
        expected = generate(store, prompt, max_new_tokens=20, salt=salt)
        assert store.stats().stored_blocks == 7
        proxy.set(fault)
        assert torch.equal(generate(store, prompt, max_new_tokens=20, salt=salt), expected)
        assert proxy.faults_done >= 1
        assert store.last.hit_tokens < 896


def test_a_store_slower_than_the_model_is_not_asked_again(server: RunningServer):
    model, prompt = shared_model(), prompt_of(300, seed=8)
    expected = alone(model, prompt, max_new_tokens=2)
    with fault_proxy(server.target) as proxy, open_store(model, proxy.target, min_hit_tokens=0) as store:
        generate(store, prompt, max_new_tokens=2)
        proxy.set(Fault(delay_s=0.3))  # such a prompt takes it milliseconds
        for _ in range(2):
            assert torch.equal(store.generate(prompt, **GREEDY, max_new_tokens=2), expected)
        assert store.last.hit_tokens == 0
        assert store.stats().misses["NOT_WORTH_IT"] >= 1


def test_the_documented_program_hits_in_its_second_process(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = (ROOT / "docs/engines/transformers.md").read_text()
    program = re.search(r"```python\n(.*?)```", page, re.S)[1]
    assert "target=target)" in program
    (tmp_path / "ask.py").write_text(program.replace("target=target", f"target=target, base_budget_s={PATIENCE_S}"))
    words = [f"w{number}" for number in range(VOCABULARY)]
    vocabulary = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w1")
    tokenizer = Tokenizer(vocabulary)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="w0", model_input_names=["input_ids", "attention_mask"]
    ).save_pretrained(tmp_path / "model")
    make_model().save_pretrained(tmp_path / "model")
    prompt = " ".join(words[token] for token in prompt_of(300, seed=9)[0].tolist())
    # Far from the store, so that the first process would end before its saves if it did not wait for them.
    with fault_proxy(server.target) as proxy:
        proxy.set(Fault(delay_s=0.2))
        done = subprocess.run(
            [sys.executable, "ask.py", "model", proxy.target, prompt],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "hit_tokens=0," in done.stderr
    assert done.stdout.startswith(prompt[:100])
    # The second process is this one: importing all of it once more takes seconds.
    monkeypatch.setattr(sys, "argv", ["ask.py", str(tmp_path / "model"), server.target, prompt])
    runpy.run_path(str(tmp_path / "ask.py"))["store"].close()
    heard = capsys.readouterr()
    assert "hit_tokens=256," in heard.err
    assert heard.out == done.stdout
