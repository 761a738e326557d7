"""Gemma 3 with pictures computes what transformers computes on the same weights and pictures."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mstar.errors import UnsupportedError, WeightsError
from mstar.models.fused import RMSNorm
from mstar.models.gemma3_vision import Projector
from mstar.models.linear import Linear
from mstar.preprocess.items import PromptItem
from mstar.preprocess.media.types import ImageMedia
from mstar.preprocess.processors.gemma3 import CropRules, build
from tests.models import vision_families as vision
from tests.models.vision_families import (
    EDGE,
    LENGTH,
    Family,
    assert_greedy,
    assert_layout,
    assert_logits,
    picture,
)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return vision.load("gemma3", tmp_path_factory.mktemp("gemma3"))


def cases(family: Family) -> list[tuple[str, list[Image.Image]]]:
    mark = family.mark
    return [
        (mark, [picture(1, 30, 80)]),
        (f"What is that?\n{mark}Say it.", [picture(2)]),
        (f"one {mark} two three four {mark}\n{mark}\n\nand so on", [picture(n) for n in (3, 4, 5)]),
        ("no picture at all", []),
    ]


@pytest.mark.parametrize("backend", ["eager", "sdpa", "paged"])
def test_logits_of_every_position_are_the_references(family: Family, backend: str) -> None:
    assert_logits(family, cases(family), attention_backend=backend)


def test_chunks_leave_the_logits_as_they_are(family: Family) -> None:
    assert_logits(family, cases(family), max_num_batched_tokens=LENGTH + 2)


def test_pictures_are_longer_than_the_window_and_the_window_cuts_them(family: Family) -> None:
    """What a slot of a picture sees of the picture itself ends at the window, behind it only."""
    case = cases(family)[1]
    expected = family.their_logits(family.inputs(*case))
    config: Any = family.theirs.config
    window = config.text_config.sliding_window
    assert window < LENGTH
    try:
        config.text_config.sliding_window = 4 * LENGTH
        wide = family.their_logits(family.inputs(*case))
    finally:
        config.text_config.sliding_window = window
    inside = slice(len("What is that?\n"), len("What is that?\n") + LENGTH)
    assert (wide - expected)[inside].abs().max() > 0.05
    assert_logits(family, [case])


def test_greedy_tokens_are_the_references_over_64(family: Family) -> None:
    assert_greedy(family, cases(family))


def test_ids_and_pixels_are_those_of_the_references_processor(family: Family) -> None:
    for text, pictures in cases(family):
        assert_layout(family, text, pictures, "<image_soft_token>")
    odd = [picture(6, height, width) for height, width in ((1, 1), (3, 200), (97, 41), (EDGE, 43))]
    assert_layout(family, family.mark * len(odd), odd, "<image_soft_token>")


def test_newlines_around_a_picture_join_those_of_the_text(family: Family) -> None:
    made = family.layout(f"a\n{family.mark}\nb", [picture(1)])
    joined = family.tokenizer.encode("\n\n\n", add_special_tokens=False)
    assert len(joined) == 1
    assert made.token_ids.count(joined[0]) == 2


@pytest.mark.parametrize(("height", "width"), [(90, 40), (40, 90), (40, 47), (50, 400), (30, 500)])
def test_crops_are_those_of_the_references_processor(
    family: Family, height: int, width: int
) -> None:
    rules = CropRules(is_on=False, min_size=20, max_num=4, min_ratio=1.2)
    family.processor._crops = rules  # type: ignore[attr-defined]
    options = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 20,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    pictures = [picture(7, height, width)]
    text = f"So\n{family.mark}?"
    assert_layout(family, text, pictures, "<image_soft_token>", detail="high", options=options)
    assert_layout(family, text, pictures, "<image_soft_token>", detail="low")


def test_slots_of_a_picture_see_each_other(family: Family) -> None:
    (text, item, behind) = family.processor.expand(ImageMedia(np.asarray(picture(1))))
    assert isinstance(item, PromptItem)
    assert item.span.is_whole
    assert item.span.advance is None
    assert (text, behind) == ("\n\n<start_of_image>", "<end_of_image>\n\n")


def test_pictures_that_the_encoder_does_not_take_are_refused_at_load(family: Family) -> None:
    config = {"vision_config": {"image_size": 56}}
    with pytest.raises(WeightsError, match="resized to 42 pixels; the encoder takes 56"):
        build(family.folder, config, family.tokenizer)


@pytest.mark.parametrize("token", [10**9, -1, "x", [], True])
def test_mark_that_the_tokenizer_does_not_know_is_refused_at_load(
    family: Family, token: object
) -> None:
    config = json.loads((family.folder / "config.json").read_bytes())
    with pytest.raises(WeightsError, match="it must be an id that the tokenizer knows"):
        build(family.folder, config | {"boi_token_index": token}, family.tokenizer)


def test_slots_that_are_no_grid_over_the_patches_are_refused() -> None:
    norm, weight = RMSNorm(torch.ones(4), 1e-6), Linear(torch.ones(4, 4))
    with pytest.raises(UnsupportedError, match="mm_tokens_per_image is 8"):
        Projector(4, 8, norm, weight)
    with pytest.raises(UnsupportedError, match="the 4 patches in a picture's row"):
        Projector(4, 9, norm, weight)
