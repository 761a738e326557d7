"""Sound and films out of MP4, WebM, Matroska and AAC, by PyAV, where the extra ``av`` is installed.

What a file is goes by its first bytes, and nothing but that format's reader and a few decoders are
tried: no playlists, no references to other files.
"""

import importlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from mstar.errors import RequestError
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.media.types import Pixels, Samples, VideoMedia

_READERS = {"MP4": "mp4", "WebM": "matroska", "AAC": "aac"}
"""What FFmpeg calls the readers; WebM is a Matroska."""
_SOUND = frozenset({"aac", "alac", "flac", "mp3", "mp3float", "opus", "vorbis"})
_FILMS = frozenset({"av1", "libdav1d", "h264", "hevc", "mpeg4", "vp8", "vp9"})
_SECONDS_OFF = 0.5
"""How much a file's length may be off: encoders count what they add at both ends, or do not."""


class Sound(NamedTuple):
    """A recording that is being read."""

    rate: int
    """Samples a second."""
    num_channels: int
    seconds: float | None
    """Its length as the file has it; ``None``: it has none."""
    blocks: Iterator[Samples]
    """float32 ``[num_samples, num_channels]`` each."""


def container_of(data: bytes) -> str | None:
    """Return which container a file is, by its first bytes; ``None``: none of these.

    >>> container_of(b"....ftypM4A "), container_of(b"RIFF....WAVE")
    ('MP4', None)
    """
    if data[4:8] == b"ftyp":
        return "MP4"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "WebM"
    # Twelve ones, and a layer that MPEG audio has not.
    is_adts = len(data) > 1 and data[0] == 0xFF and data[1] & 0xF6 == 0xF0
    return "AAC" if is_adts else None


@contextmanager
def open_sound(data: bytes, container: str) -> Iterator[Sound]:
    """Open the first recording of a file; a film's sound is one.

    Args:
        data: A whole file.
        container: As ``container_of`` tells.

    Raises:
        RequestError: If it cannot be read here, has no sound, or is cut off; by ``blocks``, too.
    """
    with _opened(data, container, "audio") as file:
        stream = _stream(file.streams.audio, container, "audio", _SOUND)
        frames = file.decode(stream)
        first = next(frames, None)
        if first is None:
            raise RequestError("the audio has no samples", code="invalid_audio")
        # AAC's bit rate is all that its length could be guessed from.
        seconds = None if container == "AAC" else _seconds(file, stream)
        channels = first.layout.nb_channels
        blocks = _blocks(first, frames, seconds)
        yield Sound(first.sample_rate, channels, seconds, blocks)


def _blocks(first: Any, frames: Iterator[Any], seconds: float | None) -> Iterator[Samples]:
    resampler = importlib.import_module("av").AudioResampler(format="fltp")
    num_read, rate = 0, first.sample_rate
    frame: Any = first
    while frame is not None:
        for part in resampler.resample(frame):
            block = np.ascontiguousarray(part.to_ndarray().T)
            num_read += len(block)
            yield block
        frame = next(frames, None)
    if seconds is not None and num_read / rate < seconds - _SECONDS_OFF:
        raise RequestError(
            f"the audio is cut off: its header says {seconds:.1f} s, {num_read / rate:.1f} are "
            "there",
            code="invalid_audio",
        )


def decode_film(data: bytes, container: str, fps: float, limits: MediaLimits) -> VideoMedia:
    """Return frames of a file's first film: those on show at times ``1 / fps`` apart.

    Args:
        data: A whole file.
        container: As ``container_of`` tells.
        fps: Frames to take a second.
        limits: Bounds of frames and pixels, by the header and while it is read.

    Raises:
        RequestError: If it cannot be read here, has no film, or too much of it.
    """
    with _opened(data, container, "video") as file:
        stream = _stream(file.streams.video, container, "video", _FILMS)
        stream.codec_context.options = {"max_pixels": str(limits.image_pixels)}
        size = stream.codec_context.width, stream.codec_context.height
        seconds = _seconds(file, stream)
        _check_film(size, 0 if seconds is None else int(seconds * fps), fps, limits)
        chosen: list[Pixels] = []
        for frame, count in _shown(file.decode(stream), fps):
            own = frame.width, frame.height
            if own != size:
                raise RequestError(
                    f"the film's frames are {size[0]} x {size[1]} at first and {own[0]} x {own[1]} "
                    "later; all must have one size",
                    code="invalid_video",
                )
            _check_film(size, len(chosen) + count, fps, limits)
            pixels = frame.to_ndarray(format="rgb24")
            # Phones hold their pictures upright by a note beside them.
            pixels = np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))
            chosen += [pixels] * count
    if not chosen:
        raise RequestError("the film has no frames", code="invalid_video")
    return VideoMedia(tuple(chosen), fps)


def _shown(frames: Iterator[Any], fps: float) -> Iterator[tuple[Any, int]]:
    """Yield each frame that is on show when one is taken, and how many times it is."""
    last: Any = None
    start, num_taken = 0.0, 0
    for frame in frames:
        if last is None:
            start = frame.time or 0.0
        elif (count := _due((frame.time or 0.0) - start, fps) - num_taken) > 0:
            num_taken += count
            yield last, count
        last = frame
    if last is not None:
        stop = (last.time or 0.0) - start + float((last.duration or 0) * last.time_base)
        yield last, max(_due(stop, fps) - num_taken, int(num_taken == 0))


def _due(seconds: float, fps: float) -> int:
    """Return how many frames are taken before a time, the first one at 0."""
    return max(int(np.ceil(seconds * fps - 1e-6)), 0)


def _check_film(size: tuple[int, int], num_frames: int, fps: float, limits: MediaLimits) -> None:
    num_pixels = size[0] * size[1]
    if max(size) > limits.image_side or num_pixels > limits.image_pixels:
        raise RequestError(
            f"the film is {size[0]} x {size[1]}; at most {limits.image_pixels} pixels and "
            f"{limits.image_side} a side are taken: scale it down",
            code="media_too_large",
        )
    if num_frames > limits.video_frames or num_frames * num_pixels > limits.request_pixels:
        raise RequestError(
            f"{num_frames} frames of {size[0]} x {size[1]} would be taken of the film, {fps:g} a "
            f"second; at most {limits.video_frames} frames and {limits.request_pixels} pixels are: "
            "take fewer a second (fps), scale it down or cut it",
            code="media_too_large",
        )


def _seconds(file: Any, stream: Any) -> float | None:
    """Return how long a stream is by its header, or the file, where only that says so."""
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    return None if file.duration is None else file.duration / 1e6


@contextmanager
def _opened(data: bytes, container: str, what: str) -> Iterator[Any]:
    """Open a file, and tell what is wrong with it in words of ours."""
    try:
        av = importlib.import_module("av")
    except ImportError as error:
        raise RequestError(
            f"the {what} is {container}, which takes the extra av here: pip install "
            f"'mstar-engine[av]'; or send {_OTHERS[what]}",
            code=f"invalid_{what}",
        ) from error
    try:
        with av.open(
            io.BytesIO(data), format=_READERS[container], metadata_errors="replace"
        ) as file:
            yield file
    except RequestError:
        raise
    except (av.FFmpegError, ValueError, RuntimeError, OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise RequestError(
            f"the {what}'s {len(data)} bytes of {container} cannot be decoded ({reason:.120}); "
            "send the whole file",
            code=f"invalid_{what}",
        ) from error


_OTHERS = {
    "audio": "WAV, FLAC, MP3 or OGG",
    "video": "an animated WebP or GIF, or frames: data:video/jpeg;base64,<frame>,<frame>,…",
}


def _stream(streams: Any, container: str, what: str, decoders: frozenset[str]) -> Any:
    if not len(streams):
        raise RequestError(f"the {container} file has no {what}", code=f"invalid_{what}")
    stream = streams[0]
    context = stream.codec_context
    name = "of a kind that nobody here knows" if context is None else context.name
    if name not in decoders and not name.startswith("pcm_"):
        raise RequestError(
            f"the {what} in the {container} file is {name}, which is not decoded; known are "
            f"{', '.join(sorted(decoders))}",
            code=f"invalid_{what}",
        )
    # One request is one processor's.
    context.thread_count = 1
    return stream
