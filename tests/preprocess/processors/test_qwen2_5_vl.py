"""Sizes, pixels, times and names of Qwen2.5-VL's items, against transformers' own processor."""

import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from mstar.engine.array import to_numpy
from mstar.engine.resources.spans import Grid
from mstar.errors import RequestError, UnsupportedError, WeightsError
from mstar.preprocess.items import PromptItem
from mstar.preprocess.media.types import AudioMedia, ImageMedia, Media, VideoMedia
from mstar.preprocess.processors import PROCESSORS
from mstar.preprocess.processors.qwen2_5_vl import FrameSettings, QwenProcessor, build
from mstar.preprocess.tokenizer import TextTokenizer

NO_TOKENIZER = cast("TextTokenizer", None)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_size": 64,
    "vision_config": {"hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
}


def made(folder: Path, **changes: Any) -> QwenProcessor:
    return build(folder, CONFIG | changes, NO_TOKENIZER)


def pixels(height: int, width: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def item(processor: QwenProcessor, media: Media) -> PromptItem:
    (found,) = processor.expand(media)
    return found


def film(num_frames: int, fps: float) -> VideoMedia:
    return VideoMedia(tuple(pixels(60, 90, seed) for seed in range(num_frames)), fps)


def test_it_is_found_by_the_checkpoints_architecture() -> None:
    assert PROCESSORS[CONFIG["architectures"][0]] == QwenProcessor.__module__


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 90), st.integers(0, 2000))
@settings(max_examples=300, deadline=None)
def test_sizes_are_those_of_transformers(height: int, width: int, least: int, more: int) -> None:
    own = FrameSettings(
        min_pixels=least * 784,
        max_pixels=(least + more) * 784,
        resample=3,
        scale=1.0,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
    )
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(RequestError, match="at most 200 times the other"):
            own.size(height, width, 28)
    else:
        expected = smart_resize(height, width, 28, own.min_pixels, own.max_pixels)
        assert own.size(height, width, 28) == expected


@pytest.mark.parametrize(
    ("height", "width"), [(28, 28), (60, 90), (333, 201), (14, 700), (1200, 900), (1, 150)]
)
def test_pixels_are_bit_by_bit_those_of_transformers(
    tmp_path: Path, height: int, width: int
) -> None:
    reference = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 250_000})
    reference.save_pretrained(tmp_path)
    found = item(made(tmp_path), ImageMedia(pixels(height, width)))
    values = reference(
        pixels(height, width), return_tensors="pt", input_data_format="channels_last"
    )
    _, rows, columns = values["image_grid_thw"][0].tolist()
    assert found.span.grid == Grid((0,), rows // 2, columns // 2)
    assert found.span.length == rows * columns // 4
    frames, levels = (to_numpy(found.inputs[name]) for name in ("frames", "levels"))
    assert frames.dtype == np.uint8
    assert frames.shape == (1, rows * 14, columns * 14, 3)
    expected = values["pixel_values"].view(rows // 2, columns // 2, 2, 2, 3, 2, 14, 14)
    # Back to rows and columns of pixels; both frames of a patch are the picture.
    for frame in range(2):
        picture = expected[:, :, :, :, :, frame].permute(0, 2, 5, 1, 3, 6, 4)
        picture = picture.reshape(rows * 14, columns * 14, 3)
        own = levels[frames[0], np.arange(3)]
        assert torch.equal(torch.from_numpy(own), picture)


@pytest.mark.parametrize(
    ("fps", "expected"),
    [
        # Four positions a second, two frames a patch.
        (2.0, (0, 4, 8, 12)),
        (8.0, (0, 1, 2, 3)),
        (16.0, (0, 0, 1, 1)),
        (3.0, (0, 2, 5, 8)),
        (30.0, (0, 0, 0, 0)),
        (0.5, (0, 16, 32, 48)),
    ],
)
def test_times_are_rounded_down_behind_the_product(
    tmp_path: Path, fps: float, expected: tuple[int, ...]
) -> None:
    found = item(made(tmp_path), film(8, fps))
    assert found.span.grid is not None
    assert found.span.grid.times == expected
    assert found.span.kind == "video"


@given(st.floats(0.1, 120.0), st.floats(0.5, 50.0))
@settings(max_examples=300, deadline=None)
def test_times_are_those_of_transformers_at_any_rate(fps: float, per_second: float) -> None:
    vision = CONFIG["vision_config"] | {"tokens_per_second": per_second}
    processor = made(Path("nowhere"), vision_config=vision)
    # As the reference multiplies: a float32 tensor of the seconds, and then a range.
    interval = per_second * torch.tensor([2 / fps])[0]
    expected = (torch.arange(40) * interval).long().tolist()
    assert list(processor._times(40, fps)) == expected


def test_last_frame_of_an_odd_number_stands_twice(tmp_path: Path) -> None:
    processor = made(tmp_path)
    odd, even = film(3, 2.0), film(4, 2.0)
    frames = to_numpy(item(processor, odd).inputs["frames"])
    assert len(frames) == 4
    assert np.array_equal(frames[2], frames[3])
    assert not np.array_equal(frames[1], frames[2])
    assert item(processor, odd).span.digest != item(processor, even).span.digest


def test_names_differ_by_content_kind_rate_and_settings(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5, 0.5, 0.5]}))
    first, second = made(tmp_path), made(other)
    assert first.fingerprint != second.fingerprint
    one = film(1, 1.0)
    found = [
        item(first, ImageMedia(pixels(60, 90))),
        item(first, ImageMedia(pixels(60, 90, 1))),
        item(first, ImageMedia(pixels(90, 60))),
        item(first, one),
        item(first, film(2, 1.0)),
        item(first, film(2, 1.001)),
        item(second, ImageMedia(pixels(60, 90))),
    ]
    assert len({one.span.digest for one in found}) == len(found)
    assert item(first, ImageMedia(pixels(60, 90))) == found[0]


def test_each_kind_has_its_own_settings_wherever_they_are_stored(tmp_path: Path) -> None:
    """In one file, in a file each, or the pictures' file for both."""
    large = pixels(280, 280)
    stored: dict[str, dict[str, Any]] = {
        "nothing": {},
        "one file": {
            "processor_config.json": {
                "image_processor": {"size": {"shortest_edge": 784, "longest_edge": 28 * 280}},
                "video_processor": {"size": {"shortest_edge": 784, "longest_edge": 784}},
            }
        },
        "pictures' file": {"preprocessor_config.json": {"min_pixels": 784, "max_pixels": 28 * 280}},
        "two files": {
            "preprocessor_config.json": {"min_pixels": 784, "max_pixels": 28 * 280},
            "video_preprocessor_config.json": {"min_pixels": 784, "max_pixels": 784},
        },
    }
    sizes = {}
    for name, files in stored.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, fields in files.items():
            (folder / file).write_text(json.dumps(fields))
        processor = made(folder)
        items = (item(processor, ImageMedia(large)), item(processor, VideoMedia((large,), 1.0)))
        sizes[name] = tuple(found.span.length for found in items)
    assert sizes == {
        "nothing": (100, 144),
        "one file": (9, 1),
        "pictures' file": (9, 9),
        "two files": (9, 1),
    }


@pytest.mark.parametrize(
    ("media", "message"),
    [
        (AudioMedia(np.zeros(5, np.float32), 16_000), "takes image and video, no audio"),
        (VideoMedia((), 1.0), "0 frames at 1.0"),
        (film(2, 0.0), "2 frames at 0.0"),
        (film(2, math.nan), "2 frames at nan"),
        (film(2, math.inf), "2 frames at inf"),
        (ImageMedia(pixels(3, 700)), "700 by 3 pixels is too long"),
    ],
)
def test_media_that_the_model_cannot_take_are_refused(
    tmp_path: Path, media: Media, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        made(tmp_path).expand(media)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"patch_size": 16}, WeightsError, "patch_size of .* is 16, the model's 14"),
        ({"merge_size": 4}, WeightsError, "merge_size of .* is 4, the model's 2"),
        ({"do_resize": False}, UnsupportedError, "do_resize"),
        ({"do_sample_frames": True}, UnsupportedError, "choosing frames"),
        ({"image_std": [1.0, 1.0]}, WeightsError, "image_std"),
        ({"max_pixels": "many"}, WeightsError, "max_pixels"),
    ],
)
def test_settings_that_are_not_built_or_do_not_fit_are_refused(
    tmp_path: Path, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(error, match=message):
        made(tmp_path)
