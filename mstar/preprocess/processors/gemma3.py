"""Gemma 3's pictures: one square of pixels each, and crops of pictures far from square."""

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from PIL import Image

from mstar.engine.resources.kv.keys import fingerprint
from mstar.errors import WeightsError
from mstar.preprocess.items import PromptItem
from mstar.preprocess.media.types import ImageMedia, Media, Pixels
from mstar.preprocess.processors.pixels import KIND, PixelRules, extent, read_settings
from mstar.preprocess.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CropRules:
    """When and how a picture is looked at in crops as well ("pan and scan")."""

    is_on: bool
    """Where the request does not say; it does by ``detail``: high or low."""
    min_size: int
    """Least height and width of a crop, in pixels."""
    max_num: int
    """Crops of one picture, at most."""
    min_ratio: float
    """Of the longer edge to the shorter, below which there are none."""

    def crops(self, pixels: Pixels) -> list[Pixels]:
        """Return the crops of a picture, from left to right or from top to bottom."""
        height, width = pixels.shape[:2]
        longer, shorter = max(height, width), min(height, width)
        if longer / shorter < self.min_ratio:
            return []
        fitting = min(longer // self.min_size, int(longer / shorter + 0.5))
        count = min(self.max_num, max(2, fitting))
        size = ceil(longer / count)
        if min(size, shorter) < self.min_size:
            return []
        starts = range(0, size * count, size)
        if width >= height:
            return [pixels[:, start : start + size] for start in starts]
        return [pixels[start : start + size] for start in starts]


class Gemma3Processor:
    """Turns a picture into slots that see each other, between texts that mark it.

    Args:
        rules: How pixels become the encoder's input.
        edge: Height and width that the encoder takes, in pixels.
        length: Slots of a picture, in tokens.
        marks: Texts of the tokens before and behind a picture.
        crops: When and how there are crops.
    """

    kinds = frozenset({KIND})
    max_items = None

    def __init__(
        self,
        rules: PixelRules,
        edge: int,
        length: int,
        marks: tuple[str, str],
        crops: CropRules,
    ) -> None:
        self._rules = rules
        self._edge = edge
        self._length = length
        self._before, self._behind = f"\n\n{marks[0]}", f"{marks[1]}\n\n"
        self._crops = crops
        self.placeholder = {KIND: marks[0]}
        self.fingerprint = fingerprint(
            "mstar-gemma3-processor-v1", rules.fingerprint, edge, length, *marks, repr(crops)
        )

    def expand(self, media: Media) -> list[str | list[int] | PromptItem]:
        """Return the picture between its marks, and its crops behind it where there are any."""
        assert isinstance(media, ImageMedia), media.kind
        is_cropped = self._crops.is_on if media.detail in (None, "auto") else media.detail == "high"
        crops = self._crops.crops(media.pixels) if is_cropped else []
        if not crops:
            return self._marked(media.pixels)
        parts = ["Here is the original image ", *self._marked(media.pixels)]
        parts.append(" and here are some crops to help you see better ")
        for index, crop in enumerate(crops):
            parts += [" "] * (index > 0) + self._marked(crop)
        return parts

    def _marked(self, pixels: Pixels) -> list[str | list[int] | PromptItem]:
        square = self._rules.resized(pixels, self._edge, self._edge)
        item = self._rules.item(square, self._length, self.fingerprint, is_whole=True)
        return [self._before, item, self._behind]


def build(folder: Path, config: dict[str, Any], tokenizer: TextTokenizer) -> Gemma3Processor:
    """Return the processor of a checkpoint.

    Raises:
        WeightsError: If a setting is wrong, or pictures would have another size than the encoder's.
        UnsupportedError: If a setting asks for something that is not built.
    """
    settings = read_settings(folder)
    encoded: int = (config.get("vision_config") or {}).get("image_size") or 224
    edge = extent(settings, "size", encoded, folder)
    if edge != encoded:
        raise WeightsError(
            f"{folder}: pictures are resized to {edge} pixels; the encoder takes {encoded}"
        )
    before = _mark(config, "boi_token_index", 255_999, tokenizer)
    behind = _mark(config, "eoi_token_index", 256_000, tokenizer)
    return Gemma3Processor(
        PixelRules.of(settings, Image.Resampling.BILINEAR, folder),
        edge,
        config.get("mm_tokens_per_image") or 256,
        (before, behind),
        CropRules(
            is_on=bool(settings.get("do_pan_and_scan", False)),
            min_size=settings.get("pan_and_scan_min_crop_size", 256),
            max_num=settings.get("pan_and_scan_max_num_crops", 4),
            min_ratio=settings.get("pan_and_scan_min_ratio_to_activate", 1.2),
        ),
    )


def _mark(config: dict[str, Any], name: str, default: int, tokenizer: TextTokenizer) -> str:
    """Return the text of a token that stands around pictures."""
    token = config.get(name)
    token = default if token is None else token
    text = tokenizer.token_text(token) if type(token) is int and token >= 0 else ""
    if not text:
        raise WeightsError(f"{name} is {token!r:.40}; it must be an id that the tokenizer knows")
    return text
