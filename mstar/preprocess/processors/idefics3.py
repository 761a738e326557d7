"""Idefics 3's and SmolVLM's pictures: a grid of tiles and the whole, each marked by texts."""

from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mstar.engine.resources.kv.keys import fingerprint
from mstar.errors import WeightsError
from mstar.preprocess.items import PromptItem
from mstar.preprocess.media.types import ImageMedia, Media, Pixels
from mstar.preprocess.processors.pixels import (
    KIND,
    PixelRules,
    extent,
    read_object,
    read_settings,
)
from mstar.preprocess.tokenizer import TextTokenizer

_AROUND, _WHOLE, _IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
_MAX_EDGE = 4096
"""Longest edge of a picture that is cut into tiles, in pixels."""
_DEFAULT_TILE, _DEFAULT_EDGE = 364, 1456


def scaled_size(height: int, width: int, edge: int) -> tuple[int, int]:
    """Return a picture's height and width when its longer one is ``edge``, all in pixels.

    The shorter is rounded down, to even numbers up; no edge is beyond what is cut into tiles.
    """
    ratio = width / height
    if width >= height:
        width, height = edge, int(edge / ratio)
        height += height % 2
    else:
        height, width = edge, int(edge * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _MAX_EDGE:
        width, height = _MAX_EDGE, int(_MAX_EDGE / ratio)
    elif height > width and height > _MAX_EDGE:
        height, width = _MAX_EDGE, int(_MAX_EDGE * ratio)
    return max(height, 1), max(width, 1)


def tiled_size(height: int, width: int, tile: int) -> tuple[int, int]:
    """Return the height and width of the tiles that a picture is stretched to, in pixels."""
    ratio = width / height
    if width >= height:
        width = ceil(width / tile) * tile
        return ceil(int(width / ratio) / tile) * tile, width
    height = ceil(height / tile) * tile
    return height, ceil(int(height * ratio) / tile) * tile


class Idefics3Processor:
    """Turns a picture into tiles, each an item of its own, and the picture as a whole.

    Args:
        rules: How pixels become the encoder's input.
        tile: Height and width of a tile, in pixels.
        edge: Longer edge that a picture is scaled to before it is cut, in pixels.
        length: Slots of a tile, in tokens.
        is_split: Whether pictures are cut into tiles where the request does not want it ``low``.
    """

    kinds = frozenset({KIND})
    max_items = None

    def __init__(
        self, rules: PixelRules, tile: int, edge: int, length: int, *, is_split: bool
    ) -> None:
        self._rules = rules
        self._tile = tile
        self._edge = edge
        self._length = length
        self._is_split = is_split
        self.placeholder = {KIND: _IMAGE}
        self.fingerprint = fingerprint(
            "mstar-idefics3-processor-v1", rules.fingerprint, tile, edge, length, is_split
        )

    def expand(self, media: Media) -> list[str | list[int] | PromptItem]:
        """Return the tiles, row by row, and behind them the whole picture in one tile's size."""
        assert isinstance(media, ImageMedia), media.kind
        resized = self._rules.resized
        height, width = media.pixels.shape[:2]
        height, width = scaled_size(height, width, self._edge)
        pixels = resized(media.pixels, height, width)
        parts: list[str | list[int] | PromptItem] = []
        if self._is_split and media.detail != "low":
            pixels = resized(pixels, *tiled_size(height, width, self._tile))
            parts = self._tiles(pixels)
        whole = resized(pixels, self._tile, self._tile)
        return [*parts, _AROUND + _WHOLE, self._item(whole), _AROUND]

    def _tiles(self, pixels: Pixels) -> list[str | list[int] | PromptItem]:
        """Return the tiles of a picture; one that is a single tile has none beside the whole."""
        rows, columns = (n // self._tile for n in pixels.shape[:2])
        if rows * columns == 1:
            return []
        parts: list[str | list[int] | PromptItem] = []
        for row in range(rows):
            for column in range(columns):
                top, left = row * self._tile, column * self._tile
                tile = pixels[top : top + self._tile, left : left + self._tile]
                mark = f"{_AROUND}<row_{row + 1}_col_{column + 1}>"
                parts += [mark, self._item(np.ascontiguousarray(tile))]
            parts.append("\n")
        return [*parts, "\n"]

    def _item(self, pixels: Pixels) -> PromptItem:
        return self._rules.item(pixels, self._length, self.fingerprint)


def build(folder: Path, config: dict[str, Any], tokenizer: TextTokenizer) -> Idefics3Processor:
    """Return the processor of a checkpoint.

    Raises:
        WeightsError: If a setting is wrong, or tiles would not be as many slots as it says.
        UnsupportedError: If a setting asks for something that is not built.
    """
    settings = read_settings(folder)
    tile = extent(settings, "max_image_size", _DEFAULT_TILE, folder)
    vision = config.get("vision_config") or {}
    patch = vision.get("patch_size") or 32
    factor = config.get("scale_factor") or 2
    length = (tile // patch // factor) ** 2
    stated = read_object(folder / "processor_config.json").get("image_seq_len", length)
    if tile % (patch * factor) or stated != length:
        raise WeightsError(
            f"{folder}: a tile of {tile} pixels, patches of {patch} and squares of {factor} give "
            f"{(tile / patch / factor) ** 2:g} slots a tile; image_seq_len is {stated}"
        )
    encoded = vision.get("image_size")
    if type(encoded) is int and tile > encoded:
        raise WeightsError(
            f"{folder}: tiles are {tile} pixels a side; the encoder takes at most {encoded}"
        )
    return Idefics3Processor(
        PixelRules.of(settings, Image.Resampling.LANCZOS, folder),
        tile,
        extent(settings, "size", _DEFAULT_EDGE, folder),
        length,
        is_split=bool(settings.get("do_image_splitting", True)),
    )
