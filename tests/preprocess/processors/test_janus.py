"""Janus' prompts and pixel values are those of its processor in transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import RequestError, WeightsError
from mstar.library import Engine
from mstar.models.janus.config import GUIDANCE, IMAGE, OUTPUT, PIXELS, UNGUIDED, image_settings
from mstar.preprocess.expansion import weave
from mstar.preprocess.items import PromptItem
from mstar.preprocess.media.types import AudioMedia, ImageMedia
from mstar.preprocess.processors import load_processor
from mstar.preprocess.processors.base import Framer, ImageTask, Painter, Processor
from mstar.preprocess.processors.janus import JanusProcessor, pixel_values
from mstar.preprocess.tokenizer import TextTokenizer
from tests.models import janus_folder as janus
from tests.models.janus_folder import BEGIN, BOS, HOLE, MADE, PAD, SLOTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("janus")
    janus.save(path, use_default_system_prompt=True)
    return path


@pytest.fixture(scope="module")
def processor(folder: Path) -> JanusProcessor:
    made = load_processor(folder, TextTokenizer.load(folder))
    assert isinstance(made, JanusProcessor)
    assert isinstance(made, Processor)
    assert isinstance(made, Painter)
    assert isinstance(made, Framer)
    return made


def picture(height: int, width: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (3, 5, 3), np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BILINEAR))


@pytest.mark.parametrize(
    "size", [(32, 32), (33, 20), (20, 33), (480, 640), (1, 1), (1, 90), (77, 1), (31, 32)]
)
def test_pixel_values_are_the_references(folder: Path, size: tuple[int, int]) -> None:
    pixels = picture(*size)
    theirs = janus.their_processor().image_processor(Image.fromarray(pixels), return_tensors="np")
    ours = pixel_values(pixels, image_settings(folder))
    np.testing.assert_allclose(ours, theirs["pixel_values"][0], rtol=0, atol=1e-6)


def test_chat_becomes_the_references_ids(folder: Path, processor: JanusProcessor) -> None:
    tokenizer = TextTokenizer.load(folder)
    image = picture(40, 30)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
        {"role": "user", "content": [{"type": "text", "text": "or"}, {"type": "image"}]},
    ]
    theirs: Any = janus.their_processor(use_default_system_prompt=True)
    text = theirs.apply_chat_template(messages, add_generation_prompt=True)
    expected = theirs(text=text, images=[Image.fromarray(image)] * 2)["input_ids"][0].tolist()
    parts = weave(
        processor.frame(tokenizer.render_chat(messages)),
        processor.placeholder,
        ["image", "image"],
        [processor.expand(ImageMedia(image))] * 2,
        lambda piece: tokenizer.encode(piece, add_special_tokens=False),
    )
    ids = [
        token
        for part in parts
        for token in ([HOLE] * SLOTS if isinstance(part, PromptItem) else part)
    ]
    assert ids == expected
    assert ids.count(HOLE) == 2 * SLOTS


@pytest.mark.parametrize("prompt", ["a dog in the rain", "", "ü <bos> {{x}}"])
def test_prompt_of_an_image_is_the_references(processor: JanusProcessor, prompt: str) -> None:
    theirs = janus.their_processor(use_default_system_prompt=True)
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    text = theirs.apply_chat_template(messages, add_generation_prompt=True)
    expected = theirs(text=text, generation_mode="image")["input_ids"][0].tolist()
    draft = processor.picture(prompt, ImageTask())
    assert draft.parts == [expected]
    free = [token if token in (BOS, BEGIN) else PAD for token in expected]
    assert draft.companions == {UNGUIDED: free}
    assert draft.options == {OUTPUT: IMAGE, GUIDANCE: 3.0}
    assert draft.max_tokens == SLOTS


def test_item_is_named_by_its_pixels_and_what_is_made_of_them(
    processor: JanusProcessor, tmp_path: Path
) -> None:
    def item(own: JanusProcessor, seed: int) -> PromptItem:
        _, made, _ = own.expand(ImageMedia(picture(9, 12, seed)))
        assert isinstance(made, PromptItem)
        return made

    first, again, other = item(processor, 1), item(processor, 1), item(processor, 2)
    assert first.span == again.span != other.span
    assert (first.span.length, first.span.is_whole, first.span.kind) == (SLOTS, False, "image")
    assert first.inputs[PIXELS].shape == (3, janus.SIZE, janus.SIZE)
    janus.save(tmp_path)
    file = tmp_path / "processor_config.json"
    config = json.loads(file.read_text())
    config["image_processor"]["image_std"] = [0.5, 0.3, 0.41]
    file.write_text(json.dumps(config))
    changed = load_processor(tmp_path, TextTokenizer.load(tmp_path))
    assert isinstance(changed, JanusProcessor)
    assert item(changed, 1).span != first.span


def test_what_the_model_cannot_do_is_refused(processor: JanusProcessor) -> None:
    with pytest.raises(
        RequestError, match="size is 16x8; this model makes images of 8x8 pixels"
    ) as caught:
        processor.picture("a dog", ImageTask(size=(16, 8)))
    assert caught.value.param == "size"
    assert processor.picture("a dog", ImageTask(size=(MADE, MADE)))
    for guidance in (0.9, 101.0, float("nan")):
        with pytest.raises(RequestError, match="between 1 and 100"):
            processor.picture("a dog", ImageTask(guidance=guidance))
    with pytest.raises(RequestError, match="takes images, not audio"):
        processor.expand(AudioMedia(np.zeros(4, np.float32), 16000))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("processor_config.json", {"image_processor": {"size": {"height": 8, "width": 8}}}, "32"),
        ("processor_config.json", {"image_processor": {"image_mean": [1]}}, "three numbers"),
        ("generation_config.json", {"pad_token_id": "x"}, "wrong type"),
        ("tokenizer_config.json", {"boi_token": "<nowhere>"}, "<nowhere>"),
    ],
)
def test_broken_checkpoint_is_refused_by_name(
    folder: Path, tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    for source in folder.glob("*.json"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    changed = json.loads((tmp_path / file).read_text()) | change
    (tmp_path / file).write_text(json.dumps(changed))
    with pytest.raises(WeightsError, match=message):
        load_processor(tmp_path, TextTokenizer.load(tmp_path))


def test_library_looks_and_paints(folder: Path) -> None:
    engine = Engine(str(folder))
    greedy = SamplingParams(temperature=0)
    made = engine.draw("a dog", greedy)
    assert made.shape == (MADE, MADE, 3)
    assert made.dtype == np.uint8
    assert not np.array_equal(made, engine.draw("a cat", greedy))
    question = [{"type": "image", "image": made}, {"type": "text", "text": "what is it?"}]
    messages = [{"role": "user", "content": question}]
    short = replace(greedy, max_tokens=3, ignore_eos=True)
    first = engine.chat(messages, short)
    assert first.num_item_tokens == {"image": SLOTS}
    again = engine.chat(messages, short)
    assert again.token_ids == first.token_ids
    assert again.num_cached_tokens > SLOTS
