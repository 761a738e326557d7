"""Settings of pictures: where they stand, what they may say, and what bytes are worth by them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from mstar.errors import UnsupportedError, WeightsError
from mstar.preprocess.processors.pixels import PixelRules, extent, read_settings

HERE = Path("here")
BILINEAR = Image.Resampling.BILINEAR


def test_settings_are_read_from_either_file_and_nulls_count_as_missing(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == {}
    newer = {"image_processor": {"resample": 1, "size": None}, "image_seq_len": 9}
    (tmp_path / "processor_config.json").write_text(json.dumps(newer))
    assert read_settings(tmp_path) == {"resample": 1}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"resample": 3, "size": 0}))
    assert read_settings(tmp_path) == {"resample": 3, "size": 0}


@pytest.mark.parametrize(("text", "message"), [("{", "not readable as JSON"), ("[]", "found list")])
def test_files_that_are_no_settings_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(WeightsError, match=message):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"image_mean": [0.48, 0.457, 0.408], "image_std": [0.268, 0.261, 0.276]},
        {"image_mean": 0.1, "image_std": 0.3, "rescale_factor": 0.01},
        {"do_normalize": False},
        {"do_rescale": False, "image_mean": [100.0, 110.0, 120.0], "image_std": 60.0},
    ],
    ids=str,
)
def test_bytes_are_worth_what_the_reference_makes_of_them(settings: dict[str, Any]) -> None:
    every = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16)[..., None], 3, axis=2)
    own = PixelRules.of(settings, BILINEAR, HERE).values
    size = {"longest_edge": 16}
    theirs = Idefics3ImageProcessorPil(size=size, max_image_size=size, **settings)
    (values,) = theirs(Image.fromarray(every), return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(own.reshape(3, 16, 16), values)


@pytest.mark.parametrize(
    "settings",
    [
        {"resample": 77},
        {"image_mean": [1.0, 2.0]},
        {"image_std": "x"},
        {"image_std": [0.5, 0.0, 0.5]},
        {"image_mean": float("nan")},
        {"rescale_factor": []},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(WeightsError, match="here: wrong settings of pictures"):
        PixelRules.of(settings, BILINEAR, HERE)


def test_pictures_that_are_not_to_be_resized_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="do_resize is false"):
        PixelRules.of({"do_resize": False}, BILINEAR, HERE)


def test_other_rules_have_another_name() -> None:
    names = {
        PixelRules.of(settings, resample, HERE).fingerprint
        for settings in ({}, {"image_std": 0.25}, {"do_normalize": False})
        for resample in (BILINEAR, Image.Resampling.LANCZOS)
    }
    assert len(names) == 6


def test_sizes_are_edges_of_squares() -> None:
    assert extent({}, "size", 7, HERE) == 7
    assert extent({"size": {"longest_edge": 5}}, "size", 7, HERE) == 5
    assert extent({"size": {"height": 6, "width": 6}}, "size", 7, HERE) == 6
    wrong_sizes: list[object] = [{"height": 6, "width": 5}, {"shortest_edge": 4}, {}, 3]
    wrong_sizes += [{"longest_edge": 0}, {"longest_edge": []}, {"height": {}, "width": {}}]
    for wrong in wrong_sizes:
        with pytest.raises(WeightsError, match="it must be the edge of a square"):
            extent({"size": wrong}, "size", 7, HERE)


def test_item_holds_bytes_and_what_they_are_worth() -> None:
    rules = PixelRules.of({}, BILINEAR, HERE)
    pixels = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    item = rules.item(pixels, 2, b"family", is_whole=True)
    assert (item.span.length, item.span.is_whole, item.span.kind) == (2, True, "image")
    assert item.inputs["pixels"].shape == (3, 4, 5)
    assert item.inputs["values"].shape == (3, 256)
    others = [
        rules.item(pixels, 2, b"other", is_whole=True),
        rules.item(pixels, 3, b"family", is_whole=True),
        rules.item(pixels, 2, b"family"),
        rules.item(pixels.reshape(5, 4, 3), 2, b"family", is_whole=True),
    ]
    assert len({item.span.digest, *(other.span.digest for other in others)}) == 5
