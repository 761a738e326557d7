"""Decoded media, as processors are given them."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
"""RGB, ``[height, width, 3]``."""
Samples = npt.NDArray[np.float32]
"""Mono, ``[num_samples]``, between -1 and 1."""


@dataclass(frozen=True, eq=False, slots=True)
class ImageMedia:
    """One picture."""

    kind: ClassVar[str] = "image"
    pixels: Pixels
    detail: str | None = None
    """How closely the user wants it looked at: ``low``, ``high`` or ``auto``; ``None``: unsaid."""


@dataclass(frozen=True, eq=False, slots=True)
class AudioMedia:
    """One recording."""

    kind: ClassVar[str] = "audio"
    samples: Samples
    rate: int
    """Samples a second."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return len(self.samples) / self.rate


@dataclass(frozen=True, eq=False, slots=True)
class VideoMedia:
    """Frames of one film, all of one size, in their order."""

    kind: ClassVar[str] = "video"
    frames: tuple[Pixels, ...]
    fps: float
    """Frames a second, as they are here."""


Media = ImageMedia | AudioMedia | VideoMedia
