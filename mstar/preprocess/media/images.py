"""Images from bytes: RGB as it is to be seen, or a clear refusal before anything is decoded.

An animation is its first frame; :func:`decode_frames` gives them all. Orientation tags are obeyed,
transparency is laid on white, sixteen bits a channel become eight, and colours of other spaces RGB.
Embedded colour profiles are not applied.
"""

import io
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from mstar.errors import RequestError
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.media.types import Pixels

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are decoded; each tells its size before its pixels."""
_LIMITS = MediaLimits()
_STRIP = 2**20
"""Pixels that are laid on white together, so that a large image is there twice at most."""
_DEFAULT_SECONDS = 0.1
"""How long a frame is shown that does not say so."""
# What decoders raise over broken files, which are not all of one kind.
_BROKEN = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    LookupError,
    ArithmeticError,
    TypeError,
    AttributeError,
    RuntimeError,
    MemoryError,
    struct.error,
    zlib.error,
)

ResultT = TypeVar("ResultT")


def decode_image(data: bytes, limits: MediaLimits = _LIMITS) -> Pixels:
    """Return the picture that ``data`` holds.

    Args:
        data: A whole file of one of ``FORMATS``.
        limits: Sizes beyond which it is refused, by its header.

    Returns:
        uint8 ``[height, width, 3]``, contiguous.

    Raises:
        RequestError: If it is no image, of size zero, cut off, too large, or of colours without a
            known range.
    """
    with _opened(data, limits) as image:
        return _guarded(lambda: _rgb(image))


def rgb_of(image: Image.Image, limits: MediaLimits = _LIMITS) -> Pixels:
    """Return the pixels of an image that PIL holds already; errors as for decoding."""
    _check_size(image.size, limits)
    return _guarded(lambda: _rgb(image))


def image_size(data: bytes, limits: MediaLimits = _LIMITS) -> tuple[int, int]:
    """Return a picture's width and height by its header, in pixels; errors as for decoding."""
    with _opened(data, limits) as image:
        return image.size


def decode_frames(data: bytes, limits: MediaLimits = _LIMITS) -> tuple[tuple[Pixels, ...], float]:
    """Return all frames of an animation, and how many a second; a still picture is one frame.

    Raises:
        RequestError: As for :func:`decode_image`, or if there are too many frames or pixels, or
            the frames differ in size.
    """
    with _opened(data, limits) as image:
        num_frames = _guarded(lambda: int(getattr(image, "n_frames", 1)))
        if num_frames > limits.video_frames:
            raise RequestError(
                f"the animation has {num_frames} frames; at most {limits.video_frames} are taken: "
                "leave some out",
                code="media_too_large",
            )
        num_pixels = num_frames * image.width * image.height
        if num_pixels > limits.request_pixels:
            raise RequestError(
                f"the animation has {num_frames} frames of {image.width} x {image.height}, "
                f"{num_pixels} pixels in all; at most {limits.request_pixels} are taken: scale it "
                "down or leave frames out",
                code="media_too_large",
            )
        size = image.size
        frames, seconds = [], 0.0
        for number in range(num_frames):
            _guarded(lambda number=number: image.seek(number))  # type: ignore[misc]
            _check_frame(image.size, size, number)
            frames.append(_guarded(lambda: _rgb(image.copy())))
            seconds += _shown_seconds(image)
    return tuple(frames), num_frames / seconds


@contextmanager
def _opened(data: bytes, limits: MediaLimits) -> Iterator[Image.Image]:
    """Open a file by its header, check its size, and silence what the decoder says of it."""
    if not data:
        raise RequestError("the image is empty, 0 bytes", code="invalid_image")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise RequestError(
                f"the image has more than {limits.image_pixels} pixels, the most that are taken: "
                "scale it down",
                code="media_too_large",
            ) from error
        except UnidentifiedImageError as error:
            raise RequestError(
                f"the image's {len(data)} bytes are none of {', '.join(FORMATS)}, or its header is "
                "broken",
                code="invalid_image",
            ) from error
        except _BROKEN as error:
            raise _undecodable(error) from error
        with image:
            _check_size(image.size, limits)
            yield image


def _check_size(size: tuple[int, int], limits: MediaLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise RequestError(
            f"the image is {width} x {height} pixels; each side must have at least 1",
            code="invalid_image",
        )
    if max(width, height) > limits.image_side:
        raise RequestError(
            f"the image is {width} x {height} pixels; a side may have at most "
            f"{limits.image_side}: scale it down or cut it",
            code="media_too_large",
        )
    if width * height > limits.image_pixels:
        raise RequestError(
            f"the image is {width} x {height}, {width * height} pixels; at most "
            f"{limits.image_pixels} are taken: scale it down",
            code="media_too_large",
        )


def _check_frame(size: tuple[int, int], first: tuple[int, int], number: int) -> None:
    """Refuse a frame of another size than the first, whose size is all that was checked."""
    if size != first:
        shown = [f"{width} x {height}" for width, height in (size, first)]
        raise RequestError(
            f"the animation's frame {number} is {shown[0]}, the first {shown[1]}; all must have "
            "one size",
            code="invalid_video",
        )


def _guarded(work: Callable[[], ResultT]) -> ResultT:
    """Run a decoder, whose every complaint is about the user's file."""
    try:
        return work()
    except RequestError:
        raise
    except _BROKEN as error:
        raise _undecodable(error) from error


def _undecodable(error: BaseException) -> RequestError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return RequestError(
        f"the image cannot be decoded, it is broken or cut off ({reason:.120})",
        code="invalid_image",
    )


def _rgb(image: Image.Image) -> Pixels:
    image.load()
    image = _upright(image)
    if image.mode.startswith("I;16"):
        return _from_sixteen_bits(image)
    if image.mode in ("I", "F"):
        kind = "integers" if image.mode == "I" else "floating point numbers"
        raise RequestError(
            f"the image's pixels are {kind} of 32 bits, whose range is not known; send 8 or 16 "
            "bits a channel",
            code="invalid_image",
        )
    if image.has_transparency_data:
        return _on_white(image)
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    return np.array(rgb, np.uint8, order="C")


def _on_white(image: Image.Image) -> Pixels:
    """Lay an image with transparency on white, some rows at a time."""
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    num_rows = max(1, _STRIP // width)
    for top in range(0, height, num_rows):
        bottom = min(height, top + num_rows)
        strip = image.crop((0, top, width, bottom)).convert("RGBA")
        ground = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        pixels[top:bottom] = np.asarray(Image.alpha_composite(ground, strip).convert("RGB"))
    return pixels


def _upright(image: Image.Image) -> Image.Image:
    try:
        if image.getexif().get(ExifTags.Base.Orientation, 1) == 1:
            # Without a turn it would be copied all the same.
            return image
        return ImageOps.exif_transpose(image)
    except _BROKEN:
        # Broken metadata is no reason to refuse pixels that are whole.
        return image


def _from_sixteen_bits(image: Image.Image) -> Pixels:
    # The upper byte, as decoders keep it of sixteen-bit colours; converting would clip instead.
    values = np.asarray(image).astype(np.uint32) >> 8
    grey = values.astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)


def _shown_seconds(image: Image.Image) -> float:
    duration: object = image.info.get("duration")
    if isinstance(duration, (int, float)) and duration > 0:
        return duration / 1000
    return _DEFAULT_SECONDS
