"""Qwen2.5-VL against transformers on the same weights, and the laws of reuse on it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.resources.step import NodeStep
from mstar.errors import ConfigError, UnsupportedError, WeightsError
from mstar.models import describe_model, load_model
from mstar.models.decoder import DecoderModel
from mstar.models.decoder_config import decoder_config
from mstar.models.items import ItemDecoderNode
from mstar.models.qwen2_5_vl import VisionEncoder
from mstar.models.qwen2_5_vl_config import qwen_config
from mstar.preprocess.items import PromptItem
from mstar.preprocess.media.types import ImageMedia, Media, VideoMedia
from mstar.preprocess.processors.qwen2_5_vl import QwenProcessor, build
from mstar.preprocess.tokenizer import TextTokenizer
from tests.laws.harness import Answer, Bench, Picture, Prompt, ask, assert_same, prompt
from tests.models import qwen_folder
from tests.models.qwen_folder import END, IMAGE, PATCH, START, VIDEO, VOCAB, images


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen")
    qwen_folder.save(path)
    return path


@pytest.fixture(scope="module")
def reference() -> Qwen2_5_VLForConditionalGeneration:
    return qwen_folder.reference()


@pytest.fixture(scope="module")
def model(folder: Path) -> DecoderModel:
    loaded, dtype = load_model(str(folder))
    assert dtype == "float32"
    assert isinstance(loaded, DecoderModel)
    return loaded


@pytest.fixture(scope="module", autouse=True)
def processor(folder: Path) -> QwenProcessor:
    config = json.loads((folder / "config.json").read_bytes())
    made = build(folder, config, cast("TextTokenizer", None))
    Photo.processor = made
    return made


@dataclass(frozen=True)
class Photo(Picture):
    """A picture, or with several frames a video, of drawn pixels."""

    size: tuple[int, int] = (16, 24)
    num_frames: int = 0
    fps: float = 2.0

    processor = cast("QwenProcessor", None)

    @cached_property
    def frames(self) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], ...]:
        rng = np.random.default_rng(self.seed)
        shape = (max(1, self.num_frames), *self.size, 3)
        return tuple(rng.integers(0, 256, shape, np.uint8))

    @property
    def media(self) -> Media:
        if self.num_frames:
            return VideoMedia(self.frames, self.fps)
        return ImageMedia(self.frames[0])

    @cached_property
    def made(self) -> PromptItem:
        (item,) = Photo.processor.expand(self.media)
        return item

    def item(self) -> PromptItem:
        return self.made


def photo(seed: int, height: int = 16, width: int = 24) -> Photo:
    return Photo(seed, 0, size=(height, width))


def video(seed: int, num_frames: int, fps: float, height: int = 16, width: int = 24) -> Photo:
    return Photo(seed, 0, size=(height, width), num_frames=num_frames, fps=fps)


def around(*parts: int | Photo) -> list[int | Picture]:
    """Return a prompt with the edges around its pictures."""
    return list(
        chain.from_iterable(
            (START, part, END) if isinstance(part, Photo) else (part,) for part in parts
        )
    )


PROMPTS = {
    "text": around(*prompt(1, 23)),
    "a picture": around(*prompt(2, 5), photo(1), *prompt(3, 7)),
    "a picture first": around(photo(2, 40, 56), *prompt(4, 3)),
    "text, picture, text, two pictures": around(
        *prompt(5, 9), photo(3, 24, 40), *prompt(6, 11), photo(4, 56, 16), photo(5, 16, 16), 7
    ),
    "a video": around(*prompt(7, 6), video(6, 4, 4.0), *prompt(8, 5)),
    "a video of odd length, and a picture": around(
        *prompt(9, 3), video(7, 5, 3.0, 40, 48), *prompt(10, 4), photo(8, 32, 24), *prompt(11, 6)
    ),
}


def reference_inputs(parts: Prompt) -> dict[str, Tensor]:
    """Return what the reference is called with."""
    ids: list[int] = []
    types: list[int] = []
    found: dict[str, list[Any]] = {}
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            types.append(0)
            continue
        assert isinstance(part, Photo)
        kind, values, grid = _reference_values(part)
        found.setdefault(f"pixel_values{kind}", []).append(values)
        found.setdefault(f"{kind.strip('_')[:5] or 'image'}_grid_thw", []).append(grid)
        if part.num_frames:
            found.setdefault("second_per_grid_ts", []).append(2 / part.fps)
        count = int(np.prod(grid)) // 4
        ids += [VIDEO if part.num_frames else IMAGE] * count
        types += [2 if part.num_frames else 1] * count
    return {
        "input_ids": torch.tensor([ids]),
        "mm_token_type_ids": torch.tensor([types]),
        **{
            name: torch.cat(list_) if name.startswith("pixel") else torch.tensor(list_)
            for name, list_ in found.items()
        },
    }


def _reference_values(part: Photo) -> tuple[str, Tensor, list[int]]:
    """Return patches and grid; a video's are put together from those of its frames."""
    frames = [images()(frame, return_tensors="pt") for frame in part.frames]
    (_, height, width) = frames[0]["image_grid_thw"][0].tolist()
    if not part.num_frames:
        return "", frames[0]["pixel_values"], [1, height, width]
    single = [frame["pixel_values"].view(-1, 3, 2, PATCH, PATCH)[:, :, 0] for frame in frames]
    single += single[-1:] * (len(single) % 2)
    pairs = [torch.stack(single[at : at + 2], 2) for at in range(0, len(single), 2)]
    values = torch.cat(pairs).flatten(1)
    return "_videos", values, [len(pairs), height, width]


class AllLogits(Node):
    """A decoder that keeps the logits behind every token that it computes."""

    def __init__(self, inner: ItemDecoderNode) -> None:
        self._inner = inner
        self.rows: list[Tensor] = []

    def declare(self, batch: Batch) -> NodeStep:
        return self._inner.declare(batch)

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        x = self._inner.embed(torch.from_numpy(batch.token_ids()), batch, plans)
        hidden = self._inner.hidden(x, plans["kv"], plans["position"], plans["attention"])
        logits = self._inner.logits(hidden)
        self.rows.append(logits)
        last = logits[torch.from_numpy(batch.last_rows())]
        sampled = plans["sampler"].sample(last) if batch.yielding else None
        return NodeOutput(token_ids=[] if sampled is None else sampled.token_ids.tolist())


def every_logit(model: DecoderModel, parts: Prompt, **numbers: Any) -> Tensor:
    """Return the logits behind every slot of a prompt, computed by an engine."""
    name = next(iter(model.nodes))
    node = model.nodes[name]
    inner = getattr(node, "_inner", node)
    assert isinstance(inner, ItemDecoderNode)
    recorder = AllLogits(inner)
    nodes = model.nodes
    bench = Bench(model, **({"enable_prefix_caching": False} | numbers))
    bench.recorder._inner = recorder
    bench.add("alone", parts, max_tokens=1)
    bench.drain()
    model.nodes = nodes
    return torch.cat(recorder.rows)


@pytest.mark.parametrize("parts", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("budget", [96, 512])
def test_logits_at_every_position_are_those_of_transformers(
    model: DecoderModel,
    reference: Qwen2_5_VLForConditionalGeneration,
    parts: Prompt,
    budget: int,
) -> None:
    with torch.no_grad():
        expected = reference(**reference_inputs(parts)).logits[0]
    got = every_logit(model, parts, max_num_batched_tokens=budget)
    assert expected.std() > 0.5, "logits so close together show nothing"
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("parts", PROMPTS.values(), ids=PROMPTS)
def test_greedy_tokens_are_those_of_transformers_over_64(
    model: DecoderModel, reference: Qwen2_5_VLForConditionalGeneration, parts: Prompt
) -> None:
    inputs = reference_inputs(parts)
    with torch.no_grad():
        expected = reference.generate(**inputs, max_new_tokens=64, do_sample=False)[0]
    got = ask(model, parts, max_tokens=64)
    assert got.token_ids == expected[inputs["input_ids"].shape[1] :].tolist()


def test_text_behind_a_long_video_stands_where_the_family_was_trained_to_have_it(
    model: DecoderModel, reference: Qwen2_5_VLForConditionalGeneration
) -> None:
    """Behind its last time, which transformers is told here: its own rule forgets the times."""
    film = video(30, 6, 0.5)
    parts = around(*prompt(12, 4), film, *prompt(13, 6))
    inputs = reference_inputs(parts)
    ids, _ = reference.model.get_rope_index(
        inputs["input_ids"],
        inputs["mm_token_type_ids"],
        video_grid_thw=inputs["video_grid_thw"],
        second_per_grid_ts=inputs["second_per_grid_ts"],
    )
    # From position 5 on; four seconds are eight positions, and two steps of them sixteen.
    ids[:, 0, -7:] = torch.arange(7) + 5 + 16 + 1
    with torch.no_grad():
        expected = reference(**inputs, position_ids=ids).logits[0]
    torch.testing.assert_close(every_logit(model, parts), expected, rtol=0, atol=1e-3)


@pytest.fixture
def encoded(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of items of each forward of the encoder, from now on."""
    encoder = model.nodes["encoder"]
    assert isinstance(encoder, VisionEncoder)
    counts: list[int] = []
    encode = encoder.encode

    def count(films: Sequence[Tensor]) -> list[Tensor]:
        counts.append(len(films))
        return encode(films)

    monkeypatch.setattr(encoder, "encode", count)
    return counts


def turn(bench: Bench, parts: Prompt, **options: Any) -> Answer:
    bench.add("turn", parts, **options)
    return bench.drain()["turn"]


def test_encoder_takes_films_of_any_sizes_at_once_and_gives_what_transformers_does(
    model: DecoderModel, reference: Qwen2_5_VLForConditionalGeneration
) -> None:
    """Sizes whose windows are cut at both edges, one slot alone, and several frames."""
    films = [photo(1, 8, 8), video(2, 6, 2.0, 24, 40), photo(3, 56, 24), photo(4, 32, 32)]
    encoder = model.nodes["encoder"]
    assert isinstance(encoder, VisionEncoder)
    levels = torch.from_numpy(Photo.processor._settings["image"].levels())
    values = [
        torch.stack(
            [levels[torch.from_numpy(frame).int(), torch.arange(3)] for frame in film.frames]
        )
        for film in films
    ]
    outputs = encoder.encode(values)
    for film, value, output in zip(films, values, outputs, strict=True):
        _, patches, grid = _reference_values(film)
        with torch.no_grad():
            expected = reference.model.visual(patches, grid_thw=torch.tensor([grid]))
        torch.testing.assert_close(output, expected.pooler_output, rtol=0, atol=1e-4)
        torch.testing.assert_close(encoder.encode([value])[0], output, rtol=0, atol=1e-4)


@pytest.mark.parametrize("before", range(16))
def test_second_question_about_a_picture_runs_no_encoder_wherever_on_a_page_it_ends(
    model: DecoderModel, encoded: list[int], before: int
) -> None:
    picture = photo(9, 40, 56)
    length = picture.made.span.length
    assert length == 35
    bench = Bench(model, page_size=16)
    first, second = (
        around(*prompt(1, before), picture, *prompt(seed, size)) for seed, size in ((2, 5), (3, 6))
    )
    turn(bench, first)
    assert encoded == [1]
    answer = turn(bench, second)
    assert encoded == [1], "a covered picture was encoded again"
    # What stands behind the picture is the same in both, and shared where it fills a page.
    is_filled = (before + length + 2) % 16 == 0
    assert answer.num_cached_tokens == before + 1 + length + is_filled
    assert_same(answer, ask(model, second))


def test_same_frames_at_another_rate_share_nothing_of_the_video(model: DecoderModel) -> None:
    """Their pixels are the same and their positions are not."""
    slow, fast = (video(18, 4, fps) for fps in (0.5, 4.0))
    assert slow.made.inputs == fast.made.inputs
    assert slow.made.span.digest != fast.made.span.digest
    bench = Bench(model)
    turn(bench, around(*prompt(1, 7), slow, *prompt(2, 4)))
    parts = around(*prompt(1, 7), fast, *prompt(2, 4))
    answer = turn(bench, parts)
    assert answer.num_cached_tokens == 8
    assert_same(answer, ask(model, parts))
    assert answer.token_ids != ask(model, around(*prompt(1, 7), slow, *prompt(2, 4))).token_ids


# The checkpoint.


def test_description_needs_no_weights_and_says_what_the_loaded_model_does(
    folder: Path, model: DecoderModel
) -> None:
    described, dtype = describe_model(str(folder))
    assert dtype == "float32"
    assert described.specs == model.specs
    assert described.graph == model.graph
    assert described.root_constants == model.root_constants
    assert (described.vocab_size, described.max_model_len) == (VOCAB, 1024)
    assert set(model.encoders) == {"image", "video"}


def test_older_flat_config_means_the_same(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**config, **text, "rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    found, nested = (
        qwen_config(one) for one in (flat, json.loads((folder / "config.json").read_bytes()))
    )
    assert (found.vision, found.sections) == (nested.vision, nested.sections)
    assert decoder_config(found.text, "Qwen2ForCausalLM") == decoder_config(
        nested.text, "Qwen2ForCausalLM"
    )


@pytest.mark.parametrize(
    ("part", "fields", "error", "message"),
    [
        ("vision_config", {"hidden_act": "relu"}, UnsupportedError, "hidden_act 'relu'"),
        ("vision_config", {"in_channels": 4}, UnsupportedError, "4 channels"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, UnsupportedError, "yarn"),
        ("vision_config", {"num_heads": 16}, WeightsError, "hidden_size 32 for 16 heads"),
        ("vision_config", {"window_size": 7}, WeightsError, "window of 0 slots"),
        ("vision_config", {"out_hidden_size": 32}, WeightsError, "out_hidden_size"),
        ("vision_config", {"fullatt_block_indexes": ["1"]}, WeightsError, "fullatt_block_indexes"),
        ("text_config", {"rope_parameters": {"mrope_section": [8, 8]}}, WeightsError, "three"),
        (
            "text_config",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            UnsupportedError,
            "rope scaling 'yarn'",
        ),
        ("text_config", {"rope_parameters": {"mrope_section": [2, 3, 4]}}, ConfigError, "9 pairs"),
    ],
)
def test_config_that_is_not_built_is_refused_with_the_field(
    folder: Path,
    tmp_path: Path,
    part: str,
    fields: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    config[part] |= fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(error, match=message):
        describe_model(str(tmp_path))


def test_tensor_without_a_place_is_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "visual.extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    with pytest.raises(WeightsError, match=r"1 tensors have no place .* 'visual.extra'"):
        load_model(str(tmp_path))


def test_names_under_model_are_read_as_well(
    folder: Path, tmp_path: Path, model: DecoderModel
) -> None:
    """As the parts are called in memory, and stored by some tools."""

    def nested(name: str) -> str:
        if name.startswith("visual."):
            return f"model.{name}"
        return name.replace("model.", "model.language_model.", 1)

    tensors = load_file(folder / "model.safetensors")
    save_file({nested(name): one for name, one in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    parts = around(*prompt(1, 3), photo(1), 5)
    assert_same(ask(load_model(str(tmp_path))[0], parts), ask(model, parts))
