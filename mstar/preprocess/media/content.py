"""Content parts of messages that are media: which kind each is, and how it is decoded later."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mstar.engine.resources.kv.keys import fingerprint
from mstar.errors import RequestError
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.media.sources import decode_base64, read_data_url
from mstar.preprocess.media.types import AudioMedia, ImageMedia, Media

KIND_OF_PART = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "video": "video",
}
"""Types of parts that are media, and the kind each holds."""
_FPS = (0.001, 1000.0)
"""Frames a second, at least and at most."""
_DETAILS = (None, "auto", "low", "high")

Decode = Callable[[int, MediaLimits], Media]
"""Given the samples a second that the model wants, and the limits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """One medium as a request has it: named by its bytes, not decoded yet."""

    kind: str
    where: str
    """The part, for errors."""
    name: bytes
    """Of what it is made from and how; the same name is the same medium."""
    decode: Decode


def source_of(part: Mapping[str, Any], where: str) -> Source:
    """Return the medium that a content part holds.

    Images and films are ``{"type": "image_url", "image_url": {"url": …, "detail": …}}`` and the
    like, with the bare URL in place of the object where somebody writes it so; audio is
    ``{"type": "input_audio", "input_audio": {"data": …, "format": …}}``. From Python the value may
    also be bytes, an array or an image of PIL; an array of audio needs ``rate`` beside it.

    Args:
        part: One whose type is in ``KIND_OF_PART``.
        where: The part, for errors.

    Raises:
        RequestError: If the value is missing, of another form, or a URL that would be fetched.
    """
    kind = KIND_OF_PART[part["type"]]
    names = (part["type"], f"{kind}_url", f"input_{kind}", kind)
    name = next((name for name in names if part.get(name) is not None), None)
    if name is None:
        raise RequestError(f"{where} has no {part['type']}", param=where)
    value, where = part[name], f"{where}.{name}"
    beside = part
    if isinstance(value, Mapping):
        beside = value
        name = "data" if "data" in value else "url"
        value, where = value.get(name), f"{where}.{name}"
    if kind == "image":
        return _image(value, beside.get("detail", part.get("detail")), where)
    if kind == "audio":
        return _audio(value, beside.get("rate", part.get("rate")), where)
    return _video(value, beside.get("fps", part.get("fps")), where)


def sound_source(content: "bytes | np.ndarray[Any, Any]", rate: int | None, where: str) -> Source:
    """Return a recording that came as a file, or as samples of a rate.

    Raises:
        RequestError: If samples have no rate.
    """
    return _audio(content, rate, where)


def _image(value: object, detail: object, where: str) -> Source:
    if detail not in _DETAILS:
        raise RequestError(
            f"{where}: detail is {detail!r:.40}; it must be auto, low or high", param=where
        )
    content: bytes | np.ndarray[Any, Any]
    if isinstance(value, (np.ndarray, bytes)):
        content = value
    elif hasattr(value, "convert") and hasattr(value, "getexif"):
        content = _from_pil(value, where)
    else:
        content = _one_content(value, where)

    def decode(_: int, limits: MediaLimits) -> Media:
        from mstar.preprocess.media.images import decode_image  # noqa: PLC0415 - text needs none

        if isinstance(content, bytes):
            return ImageMedia(decode_image(content, limits), detail)
        return ImageMedia(_checked_pixels(content, where), detail)

    return _source("image", where, [content], detail, decode)


def _audio(value: object, rate: object, where: str) -> Source:
    if isinstance(value, np.ndarray):
        return _audio_samples(value, rate, where)
    content = value if isinstance(value, bytes) else None
    if isinstance(value, str) and not value[:5].lower().startswith("data:") and "://" not in value:
        content = decode_base64(value, where)
    encoded = _one_content(value, where) if content is None else content

    def decode(wanted: int, limits: MediaLimits) -> Media:
        from mstar.preprocess.media.audio import decode_audio  # noqa: PLC0415 - text needs none

        return AudioMedia(decode_audio(encoded, wanted, limits), wanted)

    return _source("audio", where, [encoded], None, decode)


def _audio_samples(samples: np.ndarray[Any, Any], rate: object, where: str) -> Source:
    if isinstance(rate, bool) or not isinstance(rate, int):
        raise RequestError(
            f"{where} is an array and rate is {rate!r:.40}; give its samples a second as rate "
            "beside it",
            param=where,
        )
    if not np.issubdtype(samples.dtype, np.floating):
        raise RequestError(
            f"{where} is an array of {samples.dtype}; samples are floating point numbers between "
            "-1 and 1: divide integers by their full scale",
            param=where,
        )
    plain = np.ascontiguousarray(samples, np.float32)

    def decode(wanted: int, limits: MediaLimits) -> Media:
        from mstar.preprocess.media.audio import check_samples, resample  # noqa: PLC0415

        check_samples(plain, rate, limits)
        return AudioMedia(resample(np.clip(plain, -1, 1), rate, wanted), wanted)

    return _source("audio", where, [plain], rate, decode)


def _video(value: object, fps: object, where: str) -> Source:
    rate = _checked_fps(fps, where)
    contents: list[bytes]
    if isinstance(value, bytes):
        contents = [value]
    elif isinstance(value, (list, tuple)):
        contents = [
            frame if isinstance(frame, bytes) else _one_content(_url(frame), f"{where}[{at}]")
            for at, frame in enumerate(value)
        ]
    else:
        contents = read_data_url(value, where)[1]
    if not contents:
        raise RequestError(f"{where} has no frames", param=where)

    def decode(_: int, limits: MediaLimits) -> Media:
        from mstar.preprocess.media.frames import decode_video  # noqa: PLC0415 - text needs none

        return decode_video(contents, rate, limits)

    return _source("video", where, contents, fps, decode)


def _checked_fps(fps: object, where: str) -> float | None:
    if fps is None:
        return None
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not _FPS[0] <= fps <= _FPS[1]:
        raise RequestError(
            f"{where}: fps is {fps!r:.40}; it must be above 0, from {_FPS[0]} to {_FPS[1]:.0f}",
            param=where,
        )
    return float(fps)


def _url(frame: object) -> object:
    """Return the URL of a frame, which may stand in an object."""
    return frame.get("url") if isinstance(frame, Mapping) else frame


def _one_content(value: object, where: str) -> bytes:
    contents = read_data_url(value, where)[1]
    if len(contents) != 1:
        raise RequestError(
            f"{where} has {len(contents)} contents, separated by commas; one is taken", param=where
        )
    return contents[0]


def _source(
    kind: str,
    where: str,
    contents: "list[bytes] | list[np.ndarray[Any, Any]] | list[bytes | np.ndarray[Any, Any]]",
    option: object,
    decode: Decode,
) -> Source:
    names = [
        hashlib.sha256(content).digest()
        if isinstance(content, bytes)
        else fingerprint(content.dtype.str, str(content.shape), content.tobytes())
        for content in contents
    ]
    name = fingerprint("mstar-source-v1", kind, repr(option), *names)
    return Source(kind=kind, where=where, name=name, decode=decode)


def _from_pil(image: Any, where: str) -> np.ndarray[Any, Any]:
    from mstar.preprocess.media.images import rgb_of  # noqa: PLC0415 - text needs none

    try:
        pixels: np.ndarray[Any, Any] = rgb_of(image)
    except RequestError as error:
        raise RequestError(f"{where}: {error.message}", param=where, code=error.code) from error
    return pixels


def _checked_pixels(pixels: np.ndarray[Any, Any], where: str) -> np.ndarray[Any, Any]:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise RequestError(
            f"{where} is an array of {pixels.dtype} {list(pixels.shape)}; an image is uint8 "
            "[height, width, 3]",
            param=where,
        )
    return np.ascontiguousarray(pixels)
