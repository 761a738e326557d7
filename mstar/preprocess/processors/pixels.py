"""Pictures as SigLIP's encoders take them: resized bytes, and what each byte is worth."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from PIL import Image

from mstar.engine.resources.kv.keys import fingerprint
from mstar.engine.resources.spans import Span
from mstar.errors import UnsupportedError, WeightsError
from mstar.preprocess.items import PromptItem, array_of, item_digest
from mstar.preprocess.media.types import Pixels

KIND = "image"
_FILES = (("preprocessor_config.json", None), ("processor_config.json", "image_processor"))
"""Where the settings of pictures are, and under which name; the newer place is the second."""


def read_settings(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's settings of pictures; nulls are left out.

    Raises:
        WeightsError: If a file is not readable as JSON.
    """
    for name, key in _FILES:
        settings = read_object(folder / name)
        found = settings if key is None else settings.get(key)
        if isinstance(found, dict) and found:
            return {field: value for field, value in found.items() if value is not None}
    return {}


def read_object(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds, an empty one where there is no file.

    Raises:
        WeightsError: If it is not readable as JSON, or something else.
    """
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


@dataclass(frozen=True, eq=False, slots=True)
class PixelRules:
    """How a family resizes pictures and what it makes of their bytes."""

    resample: Image.Resampling
    values: npt.NDArray[np.float32]
    """``[3, 256]``: what each byte of a channel is worth; computed once instead of per pixel."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], resample: Image.Resampling, where: Path) -> Self:
        """Return the rules that settings state.

        Args:
            settings: As ``read_settings`` returns them.
            resample: How pictures are resized where that is not said.
            where: What messages call the settings.

        Raises:
            WeightsError: If a value is wrong.
            UnsupportedError: If pictures are not to be resized.
        """
        if settings.get("do_resize") is False:
            raise UnsupportedError(f"{where}: do_resize is false; pictures are always resized")
        try:
            values = np.tile(np.arange(256, dtype=np.float64), (3, 1))
            if settings.get("do_rescale", True):
                values = values * float(settings.get("rescale_factor", 1 / 255))
            table = values.astype(np.float32)
            if settings.get("do_normalize", True):
                mean, std = (
                    np.broadcast_to(np.float32(settings.get(name, 0.5)), 3)[:, None]
                    for name in ("image_mean", "image_std")
                )
                with np.errstate(divide="ignore", invalid="ignore"):
                    table = (table - mean) / std
            if not np.isfinite(table).all():
                raise ValueError("image_std has a zero, or a value is no number")
            return cls(Image.Resampling(settings.get("resample", resample)), table)
        except (TypeError, ValueError) as error:
            raise WeightsError(f"{where}: wrong settings of pictures: {error}") from error

    @property
    def fingerprint(self) -> bytes:
        """Content name of the rules."""
        return fingerprint("mstar-pixel-rules-v1", int(self.resample), self.values.tobytes())

    def resized(self, pixels: Pixels, height: int, width: int) -> Pixels:
        """Return a picture of another size, ``[height, width, 3]``."""
        if pixels.shape[:2] == (height, width):
            return pixels
        return np.asarray(Image.fromarray(pixels).resize((width, height), self.resample))

    def item(
        self, pixels: Pixels, length: int, processor: bytes, *, is_whole: bool = False
    ) -> PromptItem:
        """Return the item of a picture that has its final size.

        Args:
            pixels: ``[height, width, 3]``.
            length: Slots it takes, in tokens.
            processor: Fingerprint of the family's processor.
            is_whole: Attention inside it goes in both directions.
        """
        digest = item_digest(
            pixels,
            kind=KIND,
            processor=processor,
            parameters={},
            length=length,
            is_whole=is_whole,
        )
        inputs = {"pixels": array_of(pixels.transpose(2, 0, 1)), "values": array_of(self.values)}
        return PromptItem(Span(length, digest, None, is_whole, KIND), inputs)


def extent(settings: Mapping[str, Any], name: str, default: int, where: Path) -> int:
    """Return the edge that a size in the settings states, in pixels.

    Args:
        settings: As ``read_settings`` returns them.
        name: The size's; an object with ``longest_edge``, or equal ``height`` and ``width``.
        default: The edge where there is no such size.
        where: What messages call the settings.

    Raises:
        WeightsError: If the size is something else.
    """
    size = settings.get(name, {"longest_edge": default})
    edges = list(size.values()) if isinstance(size, dict) else []
    keys = set(size) if isinstance(size, dict) else set()
    is_square = bool(keys & {"longest_edge", "height"}) and edges.count(edges[0]) == len(edges)
    edge = edges[0] if is_square else None
    if type(edge) is not int or edge < 1:
        raise WeightsError(f"{where}: {name} is {size!r:.60}; it must be the edge of a square")
    return edge
