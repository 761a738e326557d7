"""How large media may be; every number that bounds what decoding costs."""

from dataclasses import dataclass

from mstar.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """What one medium, and all of one request, may cost.

    Raises:
        ConfigError: If a number is not positive.
    """

    image_pixels: int = 2**26
    """Pixels of one image; more than a camera of 50 megapixels makes."""
    image_side: int = 2**16
    """Pixels of the longer side of one image; decoders keep books of every row."""
    request_pixels: int = 2**28
    """Pixels of all images and frames of one request."""
    audio_seconds: float = 3600.0
    """Length of one recording."""
    request_audio_seconds: float = 3600.0
    """Length of all recordings of one request."""
    video_frames: int = 768
    """Frames of one film."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
