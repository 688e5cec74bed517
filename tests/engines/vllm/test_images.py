"""A model that sees, under a real vLLM: KV comes back for the same images in the same places, and for no others."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from engine import engine, transfer_config
from models import IMAGE_TOKEN, IMAGE_TOKENS
from PIL import Image

from serving import running_server

SHOWS_IMAGES = {"skip_tokenizer_init": False, "max_num_batched_tokens": 384, "limit_mm_per_prompt": {"image": 2}}
TILED = {"mm_processor_kwargs": {"do_image_splitting": True}}
DARKER = {"mm_processor_kwargs": {"rescale_factor": 0.001}}
MODES = {"prefix-caching": True, "no-prefix-caching": False}


def picture(name: str) -> Image.Image:
    """One for each name."""
    draw = np.random.default_rng(sum(name.encode()))
    return Image.fromarray(draw.integers(0, 256, (64, 64, 3), dtype=np.uint8))


def words(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, IMAGE_TOKEN) for _ in range(count)]


def named(name: str) -> dict[str, Any]:
    """A user's own name for the image."""
    return {"multi_modal_uuids": {"image": [name]}}


@dataclass
class Kind:
    """What one process saves and another asks for. A number is so many words, other ones if negative; a letter is an image.

    The first `hit` tokens of what is asked for are in the store; `..._with`: more for vLLM than tokens and images.
    """

    saved: list[int | str]
    asked: list[int | str]
    hit: int
    saved_with: dict[str, Any] = field(default_factory=dict)
    asked_with: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "the same image in the middle of a block": Kind([20, "A", 300], [20, "A", 300], 384),
    "the same image across a border": Kind([100, "A", 300], [100, "A", 300], 384),
    "an image larger than a block": Kind([100, "A", 100], [100, "A", 100], 512, TILED, TILED),
    "an image at the very end": Kind([384 - IMAGE_TOKENS, "A"], [384 - IMAGE_TOKENS, "A"], 256),
    "a hit that ends in an image": Kind([100, "A", 300], [100, "A", -100], 128),
    "a hit that ends in a large image": Kind([100, "A", 100], [100, "A", -60], 384, TILED, TILED),
    "another image from the first block on": Kind([20, "A", 300], [20, "B", 300], 0),
    "another image across a border": Kind([200, "A", 300], [200, "B", 300], 128),
    "another image after the same one": Kind([100, "A", 100, "B", 150], [100, "A", 100, "C", 150], 256),
    "the same image at another place": Kind([200, "A", 300], [150, "A", 300], 128),
    "two images swapped": Kind([140, "A", 10, "B", 200], [140, "B", 10, "A", 200], 128),
    "the same image processed otherwise": Kind([200, "A", 300], [200, "A", 300], 128, {}, DARKER),
    # Users are believed, as by vLLM itself.
    "the same name of the user's": Kind([20, "A", 300], [20, "B", 300], 384, named("mine"), named("mine")),
    "another name of the user's": Kind([20, "A", 300], [20, "A", 300], 0, named("one"), named("another")),
}
# Those whose prompts differ in nothing but images.
TOLD_APART = [kind for kind in KINDS if kind.startswith(("another image", "two images", "the same image processed"))]
each_kind = pytest.mark.parametrize("kind", KINDS)


def prompt(seed: str, parts: list[int | str], more: dict[str, Any]) -> dict[str, Any]:
    """As vLLM takes it. The n-th words are the same ones for one seed."""
    images = [picture(part) for part in parts if isinstance(part, str)]
    ids: list[int] = []
    for number, part in enumerate(parts):
        ids += [IMAGE_TOKEN] if isinstance(part, str) else words(f"{seed} {number} {part < 0}", abs(part))
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}, **more}


def saved(kind: str) -> dict[str, Any]:
    return prompt(kind, KINDS[kind].saved, KINDS[kind].saved_with)


def asked(kind: str) -> dict[str, Any]:
    return prompt(kind, KINDS[kind].asked, KINDS[kind].asked_with)


def answers(running, prompts: list[dict[str, Any]]) -> list[list[int]]:
    return [output["tokens"] for output in running.generate(*prompts)]


@pytest.fixture(scope="module")
def expected(seeing, tmp_path_factory):
    """What vLLM answers without a connector and with nothing cached: to what is saved, and to what is asked for."""
    log = tmp_path_factory.mktemp("log") / "plain.log"
    with engine(seeing, log, enable_prefix_caching=False, **SHOWS_IMAGES) as plain:
        found = answers(plain, [*map(saved, KINDS), *map(asked, KINDS)])
    halves = found[: len(KINDS)], found[len(KINDS) :]
    return [dict(zip(KINDS, half, strict=True)) for half in halves]


@pytest.fixture(scope="module")
def filled(seeing, expected, tmp_path_factory):
    """A store that has what another process has saved."""
    path = tmp_path_factory.mktemp("filled")
    with running_server(path / "store", "--capacity", "4GiB") as store:
        with engine(seeing, path / "saves.log", transfer_config(store.target), **SHOWS_IMAGES) as first:
            outputs = first.generate(*map(saved, KINDS))
            assert [output["cached"] for output in outputs] == [0] * len(KINDS)
            assert [output["tokens"] for output in outputs] == list(expected[0].values())
            first.flush()
        yield store


@pytest.fixture(scope="module", params=MODES)
def other(request, seeing, filled, tmp_path_factory):
    """A process that has computed nothing yet; its mode says whether vLLM itself remembers."""
    log = tmp_path_factory.mktemp("log") / f"{request.param}.log"
    transfer = {**transfer_config(filled.target), "kv_role": "kv_consumer"}
    with engine(seeing, log, transfer, enable_prefix_caching=MODES[request.param], **SHOWS_IMAGES) as running:
        yield running


@each_kind
def test_kv_comes_back_for_the_same_images_in_the_same_places_only(other, expected, kind):
    output = other.generate(asked(kind))[0]
    assert output["cached"] == KINDS[kind].hit
    assert output["tokens"] == expected[1][kind]


@pytest.mark.parametrize("kind", TOLD_APART)
def test_answers_tell_such_images_apart(expected, kind):
    """So that equal answers say something."""
    assert saved(kind)["prompt_token_ids"] == asked(kind)["prompt_token_ids"]
    assert expected[0][kind] != expected[1][kind]


def test_server_that_processes_images_otherwise_shares_nothing(seeing, filled, expected, tmp_path):
    """vLLM's hash of an image says what its request wants of the processor, not what the server was told at its start."""
    kind = "the same image across a border"
    with engine(seeing, tmp_path / "darker.log", transfer_config(filled.target), **DARKER, **SHOWS_IMAGES) as darker:
        output = darker.generate(asked(kind))[0]
        assert output["tokens"] != expected[1][kind]
        assert output["cached"] == 0


def test_images_that_vllm_only_numbers_do_without_the_store(seeing, filled, expected, tmp_path):
    kinds = [kind for kind in KINDS if "multi_modal_uuids" not in KINDS[kind].asked_with]
    numbers = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
    with engine(seeing, tmp_path / "numbers.log", transfer_config(filled.target), **numbers, **SHOWS_IMAGES) as running:
        outputs = running.generate(*map(asked, kinds))
        assert [output["cached"] for output in outputs] == [0] * len(kinds)
        assert [output["tokens"] for output in outputs] == [expected[1][kind] for kind in kinds]
        running.flush()
        counts = running.metrics()
        assert (counts.get("kvstore_asked_tokens", 0), counts.get("kvstore_stored_blocks", 0)) == (0, 0)
        running.generate(words("text", 300))
        running.flush()
        assert running.metrics()["kvstore_stored_blocks"] == 2
