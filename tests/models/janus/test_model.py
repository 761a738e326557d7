"""Janus looks and paints as transformers does on the same weights, alone and among others."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import JanusForConditionalGeneration

from mstar.engine.resources.spans import Span
from mstar.errors import RequestError, UnsupportedError, WeightsError
from mstar.models import describe_model, load_model
from mstar.models.janus.config import PIXELS
from mstar.models.janus.model import JanusModel, JanusPixels
from mstar.preprocess.items import PromptItem, array_of, item_digest, lay_out
from tests.models import janus_folder as janus
from tests.models.janus_folder import BEGIN, BOS, END, HOLE, MADE, SIZE, SLOTS, Answer, Studio
from tests.models.vision_families import computed

LOGITS = 1e-3
NEAR = 2e-4
"""Between batches, the order of float32 sums differs."""


@dataclass(frozen=True)
class Pair:
    """The same weights here and there."""

    folder: Path
    theirs: JanusForConditionalGeneration
    ours: JanusModel


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("janus")
    theirs = janus.save(folder)
    ours, dtype = load_model(str(folder))
    assert dtype == "float32"
    assert isinstance(ours, JanusModel)
    return Pair(folder, theirs, ours)


def ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(6, 250) for _ in range(count)]


def values(seed: int) -> Tensor:
    return torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def look(seed: int) -> list[Any]:
    """Return an image in its place in a prompt."""
    pixels = values(seed).numpy()
    digest = item_digest(pixels, kind="image", processor=b"tiny", parameters={}, length=SLOTS)
    span = Span(SLOTS, digest, kind="image")
    return [[BEGIN], PromptItem(span, {PIXELS: array_of(pixels)}), [END]]


MIXED: dict[str, tuple[list[Any], list[int]]] = {
    "text": ([[BOS, *ids(1, 21)]], []),
    "image first": ([*look(1), ids(2, 5)], [1]),
    "text, image, text, two images": (
        [[BOS, *ids(3, 7)], *look(2), ids(4, 6), *look(3), *look(4), ids(5, 3)],
        [2, 3, 4],
    ),
    "the same image twice": ([[BOS], *look(5), ids(6, 1), *look(5), ids(7, 2)], [5, 5]),
}


def their_inputs(name: str) -> dict[str, Any]:
    parts, seeds = MIXED[name]
    tokens = [
        token
        for part in parts
        for token in ([HOLE] * SLOTS if isinstance(part, PromptItem) else part)
    ]
    inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if seeds:
        inputs["pixel_values"] = torch.stack([values(seed) for seed in seeds])
    return inputs


def their_codes(pair: Pair, prompt: list[int], guidance: float) -> list[int]:
    generate: Any = pair.theirs.generate
    with torch.inference_mode():
        codes = generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_mode="image",
            guidance_scale=guidance,
            do_sample=False,
            max_length=len(prompt) + SLOTS,
        )
    found: list[int] = codes[0].tolist()
    return found


def their_levels(pair: Pair, codes: list[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        pixels = pair.theirs.decode_image_tokens(torch.tensor([codes]))
    made = janus.their_processor().postprocess(
        [pixels[0].permute(2, 0, 1).numpy()], return_tensors="np"
    )
    levels: np.ndarray[Any, Any] = made["pixel_values"][0].transpose(1, 2, 0)
    return levels


def painting(seed: int, count: int) -> list[int]:
    return [BOS, *ids(seed, count), BEGIN]


def alone(pair: Pair, prompt: list[int], guidance: float = 3.0, **params: Any) -> Answer:
    studio = Studio(pair.ours, enable_prefix_caching=False)
    studio.paint("alone", prompt, guidance, **params)
    return studio.drain()["alone"]


def assert_same(got: Answer, expected: Answer) -> None:
    assert got.error is None, got.error
    assert got.tokens == expected.tokens
    torch.testing.assert_close(got.logits, expected.logits, atol=NEAR, rtol=0)
    for image, wanted in zip(got.images, expected.images, strict=True):
        assert np.abs(image.astype(int) - wanted).max() <= 1


# Images that are looked at.


@pytest.mark.parametrize("backend", ["eager", "sdpa", "paged"])
def test_logits_of_every_position_are_the_references(pair: Pair, backend: str) -> None:
    layouts = [lay_out(parts) for parts, _ in MIXED.values()]
    found = computed(pair.ours, layouts, attention_backend=backend)
    for name, (_, logits) in zip(MIXED, found, strict=True):
        with torch.inference_mode():
            expected = pair.theirs(**their_inputs(name)).logits[0]
        torch.testing.assert_close(logits, expected, atol=LOGITS, rtol=0)


def test_greedy_continuations_are_the_references_over_64_tokens(pair: Pair) -> None:
    found = computed(pair.ours, [lay_out(parts) for parts, _ in MIXED.values()], 64)
    for name, (tokens, _) in zip(MIXED, found, strict=True):
        inputs = their_inputs(name)
        with torch.inference_mode():
            # An end token that never comes: they would ban the real one, we go on past it.
            out = pair.theirs.generate(
                **inputs, max_new_tokens=64, eos_token_id=9999, do_sample=False
            )
        assert tokens == out[0, inputs["input_ids"].shape[1] :].tolist(), name


# Images that are made.


@pytest.mark.parametrize("backend", ["eager", "sdpa", "paged"])
def test_codes_are_the_references_at_every_scale_of_guidance(pair: Pair, backend: str) -> None:
    studio = Studio(pair.ours, attention_backend=backend)
    cases = [(seed, count, scale) for seed, count in ((1, 9), (2, 1), (3, 30)) for scale in (2, 5)]
    for seed, count, scale in cases:
        studio.paint(f"{seed} {scale}", painting(seed, count), scale)
    for (seed, count, scale), answer in zip(cases, studio.drain().values(), strict=True):
        first = pair.ours.vocab_size - janus.CODES
        codes = [token - first for token in answer.tokens]
        assert codes == their_codes(pair, painting(seed, count), float(scale)), (seed, scale)
        assert len(codes) == SLOTS


def test_pixels_are_the_references(pair: Pair) -> None:
    node = pair.ours.nodes["pixels"]
    assert isinstance(node, JanusPixels)
    codes = torch.randint(0, janus.CODES, (3, SLOTS), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = pair.theirs.model.vqmodel.decode(codes)
        torch.testing.assert_close(node.decoder.decode(codes), expected, atol=LOGITS, rtol=0)


def test_image_is_what_the_reference_makes_of_its_codes(pair: Pair) -> None:
    answer = alone(pair, painting(4, 12))
    (image,) = answer.images
    first = pair.ours.vocab_size - janus.CODES
    expected = their_levels(pair, [token - first for token in answer.tokens])
    assert image.shape == (MADE, MADE, 3)
    assert len(np.unique(image)) > 20, "an image of few levels shows little"
    assert np.abs(image.astype(int) - expected).max() <= 1
    assert answer.told == []
    assert answer.finish_reason == "length"


def test_guidance_changes_the_image_and_seeds_repeat_it(pair: Pair) -> None:
    prompt = painting(5, 10)
    made = [alone(pair, prompt, scale).tokens for scale in (1.0, 4.0, 20.0)]
    assert len({tuple(tokens) for tokens in made}) == 3
    drawn = [alone(pair, prompt, temperature=1.0, top_k=20, seed=seed).tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


# Laws.


def test_both_streams_reuse_what_they_share_with_earlier_ones(pair: Pair) -> None:
    studio = Studio(pair.ours)
    prompt = painting(8, 18)
    for name, wanted, scale, expected in (
        ("first", prompt, 3.0, 0),
        ("the same", prompt, 3.0, 16),
        ("other guidance", prompt, 5.0, 16),
        ("longer", [*prompt[:13], *ids(9, 9), BEGIN], 3.0, 12),
    ):
        studio.paint(name, wanted, scale)
        answer = studio.drain()[name]
        assert answer.num_cached_tokens == expected, name
        assert_same(answer, alone(pair, wanted, scale))


def test_identical_images_at_once_are_computed_by_one_and_shared(pair: Pair) -> None:
    """Streams of one request that begin alike do not wait for themselves, nor in a circle."""
    studio = Studio(pair.ours, page_size=1)
    prompts = [[BOS, BEGIN], painting(1, 8), [BOS, *[janus.PAD] * 8, BEGIN], painting(1, 8)]
    for index, prompt in enumerate([*prompts, *prompts]):
        studio.paint(str(index), prompt)
    answers = studio.drain()
    for index, prompt in enumerate([*prompts, *prompts]):
        assert_same(answers[str(index)], alone(pair, prompt))
    assert sum(answer.num_cached_tokens for answer in answers.values()) > 20


# What the model says of itself, and what it refuses.


def test_description_says_what_the_loaded_model_says(pair: Pair) -> None:
    described, _ = describe_model(str(pair.folder))
    ours = pair.ours
    assert described.root_constants == ours.root_constants
    assert tuple(described.specs) == tuple(ours.specs)
    assert described.vocab_size == ours.vocab_size == 262 + janus.CODES
    assert described.max_model_len == ours.max_model_len
    assert described.graph == ours.graph


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": SLOTS - 1}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"guidance": 0.5}, "guidance_scale"),
        ({"guidance": float("nan")}, "guidance_scale"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"logprobs": 2}, "logprobs"),
        ({"stop_token_ids": (7,)}, "stop_token_ids"),
    ],
)
def test_image_requests_that_make_no_sense_are_refused(
    pair: Pair, changes: dict[str, Any], param: str
) -> None:
    studio = Studio(pair.ours)
    with pytest.raises(RequestError) as caught:
        studio.paint("bad", painting(1, 3), **changes)
    assert caught.value.param == param
    assert not studio.engine.has_work


def test_code_is_no_id_that_a_prompt_may_have(pair: Pair) -> None:
    studio = Studio(pair.ours)
    with pytest.raises(RequestError, match="token id 262 is outside the vocabulary of 262"):
        studio.paint("bad", [BOS, 262, BEGIN])


@pytest.fixture
def copy(pair: Pair, tmp_path: Path) -> Path:
    """A checkpoint of the same content, to be changed."""
    for file in pair.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("part", "change", "error", "message"),
    [
        ("vision_config", {"use_qk_norm": True}, UnsupportedError, "use_qk_norm"),
        ("vision_config", {"num_image_tokens": 9}, WeightsError, "num_image_tokens is 9"),
        ("vision_config", {"patch_size": 5}, WeightsError, "both must divide"),
        ("vision_config", {"hidden_act": "mish"}, UnsupportedError, "'mish'"),
        ("vq_config", {"out_channels": 1}, UnsupportedError, "1 channels"),
        ("vq_config", {"channel_multiplier": []}, WeightsError, "channel_multiplier"),
        ("vq_config", {"num_embeddings": 47}, WeightsError, "should have shape"),
        ("text_config", {"hidden_size": None}, WeightsError, "hidden_size"),
    ],
)
def test_config_that_is_wrong_or_not_built_is_refused_by_name(
    copy: Path, part: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = json.loads((copy / "config.json").read_text())
    config[part] |= change
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        load_model(str(copy))


@pytest.mark.parametrize(
    "name",
    [
        "model.vqmodel.decoder.more.weight",
        "model.model.more",
        "model.lm_head.weight",
        "model.language_model.more.weight",
        "more.weight",
    ],
)
def test_tensor_without_a_place_is_refused(copy: Path, name: str) -> None:
    file = copy / "model.safetensors"
    save_file({**load_file(file), name: torch.zeros(2)}, file)
    with pytest.raises(WeightsError, match=rf"1 tensors .* '{name}'"):
        load_model(str(copy))


def test_head_of_text_may_be_the_embedding(tmp_path: Path) -> None:
    theirs = janus.save(tmp_path, is_tied=True)
    ours, _ = load_model(str(tmp_path))
    ((_, logits),) = computed(ours, [lay_out(MIXED["image first"][0])])
    with torch.inference_mode():
        expected = theirs(**their_inputs("image first")).logits[0]
    torch.testing.assert_close(logits, expected, atol=LOGITS, rtol=0)


def test_bfloat16_looks_and_paints(pair: Pair) -> None:
    ours, dtype = load_model(str(pair.folder), dtype="bfloat16")
    studio = Studio(ours, dtype=dtype)
    studio.paint("image", painting(1, 5))
    studio.write("text", MIXED["image first"][0])
    answers = studio.drain()
    assert answers["image"].images[0].shape == (MADE, MADE, 3)
    assert len(answers["text"].told) == 12


def test_weights_may_be_drawn_from_the_config_alone(pair: Pair) -> None:
    ours, dtype = load_model(str(pair.folder), load_format="dummy", dtype="float32")
    studio = Studio(ours, dtype=dtype)
    studio.paint("image", painting(1, 5))
    assert studio.drain()["image"].images[0].shape == (MADE, MADE, 3)
