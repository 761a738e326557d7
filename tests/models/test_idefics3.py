"""Idefics 3 and SmolVLM compute what transformers computes on the same weights and pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from transformers import Idefics3VisionConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

from mstar.errors import WeightsError
from mstar.models.idefics3 import bucket_ids
from mstar.preprocess.items import PromptItem
from mstar.preprocess.media.types import ImageMedia
from mstar.preprocess.processors.idefics3 import build, scaled_size, tiled_size
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


@pytest.fixture(scope="module", params=["idefics3", "smolvlm"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return vision.load(request.param, tmp_path_factory.mktemp(request.param))


def cases() -> list[tuple[str, list[Image.Image]]]:
    return [
        ("<image>", [picture(1, EDGE, EDGE)]),
        ("What is that?\n<image>Say it.", [picture(2, 60, 120)]),
        ("one <image> two three <image>\n<image> and", [picture(n, 70, 20 * n) for n in (3, 4, 5)]),
        ("no picture at all", []),
    ]


@pytest.mark.parametrize("backend", ["sdpa", "paged"])
def test_logits_of_every_position_are_the_references(family: Family, backend: str) -> None:
    assert_logits(family, cases(), attention_backend=backend)


def test_chunks_leave_the_logits_as_they_are(family: Family) -> None:
    assert_logits(family, cases(), max_num_batched_tokens=31)


def test_greedy_tokens_are_the_references_over_64(family: Family) -> None:
    assert_greedy(family, cases())


def test_ids_and_pixels_are_those_of_the_references_processor(family: Family) -> None:
    for text, pictures in cases():
        assert_layout(family, text, pictures, "<image>")
    for height, width in ((1, 1), (1, 300), (300, 2), (41, 43), (128, 127), (500, 333)):
        assert_layout(family, "see\n<image>\n", [picture(9, height, width)], "<image>")


def test_low_detail_is_one_tile(family: Family) -> None:
    pictures = [picture(3, 80, 130)]
    options = {"do_image_splitting": False}
    assert_layout(family, "a<image>b", pictures, "<image>", detail="low", options=options)
    assert_layout(family, "a<image>b", pictures, "<image>", detail="high")


def test_tiles_are_items_of_their_own_that_equal_tiles_share(family: Family) -> None:
    plain = np.zeros((3 * EDGE, 3 * EDGE, 3), np.uint8)
    items = [p for p in family.processor.expand(ImageMedia(plain)) if isinstance(p, PromptItem)]
    assert [item.span.length for item in items] == [LENGTH] * 10
    assert not any(item.span.is_whole for item in items)
    assert len({item.span.digest for item in items}) == 1
    plain[0, 0] = 255
    others = [p for p in family.processor.expand(ImageMedia(plain)) if isinstance(p, PromptItem)]
    changed = [a.span != b.span for a, b in zip(items, others, strict=True)]
    assert changed == [True, *[False] * 8, True]


@given(
    height=st.integers(1, 6000),
    width=st.integers(1, 6000),
    tile=st.sampled_from([42, 364, 512]),
    factor=st.integers(1, 9),
)
def test_sizes_are_those_of_the_references_processor(
    height: int, width: int, tile: int, factor: int
) -> None:
    """The reference is given stretched views of one pixel, which cost no memory."""
    processor: Any = Idefics3ImageProcessorPil()
    processor.resize = lambda image, size, **_: (size.height, size.width)
    pixel = np.zeros((3, 1, 1), np.uint8)
    scaled = get_resize_output_image_size(
        np.broadcast_to(pixel, (3, height, width)), resolution_max_side=factor * tile
    )
    assert scaled_size(height, width, factor * tile) == scaled
    tiled = processor.resize_for_vision_encoder(np.broadcast_to(pixel, (3, *scaled)), tile)
    assert tiled_size(*scaled, tile) == tiled


@pytest.mark.parametrize("side", [4, 6, 26, 27, 32, 70])
def test_positions_of_a_tiles_patches_are_the_references(side: int) -> None:
    config = Idefics3VisionConfig(
        hidden_size=8, num_attention_heads=1, image_size=2 * side, patch_size=2
    )
    module = Idefics3VisionEmbeddings(config)
    seen: list[torch.Tensor] = []
    module.position_embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for rows, columns in ((side, side), (side, side // 2), (1, side), (3, 2)):
        pixels = torch.zeros(1, 3, 2 * rows, 2 * columns)
        module(pixels, torch.ones(1, rows, columns, dtype=torch.bool))
        assert bucket_ids(rows, columns, side).tolist() == seen[-1][0].tolist()


def test_tiles_of_another_number_of_slots_are_refused_at_load(
    family: Family, tmp_path: Path
) -> None:
    settings = {"image_seq_len": 169, "image_processor": {"max_image_size": {"longest_edge": EDGE}}}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    config = json.loads((family.folder / "config.json").read_bytes())
    with pytest.raises(WeightsError, match="give 9 slots a tile; image_seq_len is 169"):
        build(tmp_path, config, family.tokenizer)


def test_tiles_larger_than_the_encoder_takes_are_refused_at_load(
    family: Family, tmp_path: Path
) -> None:
    """A folder without settings of pictures has tiles of 364 pixels."""
    config = json.loads((family.folder / "config.json").read_bytes())
    with pytest.raises(WeightsError, match="tiles are 364 pixels a side; the encoder takes at"):
        build(tmp_path, config, family.tokenizer)
