"""Sound and films out of MP4, WebM, Matroska and AAC, by FFmpeg, with the extra ``av``.

What a file is goes by its first bytes, and nothing but that format's reader and a few decoders are
tried: no playlists, no references to other files. FFmpeg runs in a process of its own, whose memory
and time are bounded: what a file makes it do harms nobody else.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from mstar.errors import RequestError
from mstar.preprocess.media.ffmpeg import REFUSED
from mstar.preprocess.media.headers import size_of
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.media.types import Pixels, Samples, VideoMedia

_READERS = {"MP4": "mp4", "WebM": "matroska", "AAC": "aac"}
"""What FFmpeg calls the readers; WebM is a Matroska."""
_DECODERS = {
    "audio": ("aac", "alac", "flac", "mp3", "mp3float", "opus", "vorbis"),
    "video": ("av1", "libdav1d", "h264", "hevc", "mpeg4", "vp8", "vp9"),
}
"""What FFmpeg calls them; PCM of all kinds is among those of sound."""
_CODECS = {
    "audio": "AAC, ALAC, FLAC, MP3, Opus, Vorbis or PCM",
    "video": "AV1, H.264, HEVC, MPEG-4, VP8 or VP9",
}
_MEMORY_BYTES = {"audio": 1 << 29, "video": 2 << 30}
"""What reading one file may take, FFmpeg itself among it."""
_PROCESSOR_SECONDS = {"audio": (5, 1), "video": (20, 5)}
"""What reading one file may take of a processor, and how much more for each MiB of it."""
_MAX_PROCESSOR_SECONDS = 60
_BLOCK = 2**18
"""Values of a piece of sound, over all channels."""
_PROGRAM = Path(__file__).with_name("ffmpeg.py")
_OTHERS = {
    "audio": "WAV, FLAC, MP3 or OGG",
    "video": "an animated WebP or GIF, or frames: data:video/jpeg;base64,<frame>,<frame>,…",
}


class Sound(NamedTuple):
    """A recording that is being read."""

    rate: int
    """Samples a second."""
    num_channels: int
    seconds: float | None
    """Its length as the file has it; ``None``: it has none."""
    blocks: Iterator[Samples]
    """float32 ``[num_samples, num_channels]`` each."""


def _check_is_whole(data: bytes, container: str, what: str) -> None:
    """Refuse a file that ends before its boxes or its segment do."""
    size = size_of(data, container)
    if size > len(data):
        raise RequestError(
            f"the {what} is cut off: the {container} is {size} bytes, {len(data)} are there; send "
            "the whole file",
            code=f"invalid_{what}",
        )


@contextmanager
def open_sound(data: bytes, container: str) -> Iterator[Sound]:
    """Open the first recording of a file; a film's sound is one.

    Args:
        data: A whole file.
        container: As ``container_of`` tells.

    Raises:
        RequestError: If it cannot be read here, has no sound, or is cut off; by ``blocks``, too.
        OSError: If this machine has no room for a file or a process.
    """
    with _reading(data, container, "audio") as reading:
        head = reading.head()
        channels = head["channels"]
        yield Sound(head["rate"], channels, head["seconds"], _blocks(reading, channels))


def _blocks(reading: "_Reading", channels: int) -> Iterator[Samples]:
    size = 4 * channels * max(_BLOCK // channels, 1)
    while content := reading.read(size):
        yield np.frombuffer(content, np.float32).reshape(-1, channels).copy()


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
    chosen: list[Pixels] = []
    with _reading(data, container, "video", fps=fps) as reading:
        head = reading.head()
        width, height = head["size"]
        _check_film((width, height), int((head["seconds"] or 0) * fps), fps, limits)
        while count := int.from_bytes(reading.read(4), "little"):
            _check_film((width, height), len(chosen) + count, fps, limits)
            content = reading.read(3 * width * height)
            pixels = np.frombuffer(content, np.uint8).reshape(height, width, 3)
            chosen += [np.ascontiguousarray(_upright(pixels, head["matrix"]))] * count
    return VideoMedia(tuple(chosen), fps)


def _upright(pixels: Pixels, matrix: Sequence[int]) -> Pixels:
    """Return a picture turned by quarters and mirrored, as is nearest to a note beside it.

    What stands at ``x, y`` is moved to ``a x + c y, b x + d y``.
    """
    a, b, c, d = matrix
    if abs(b) + abs(c) > abs(a) + abs(d):
        pixels, a, d = pixels.swapaxes(0, 1), c, b
    return pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


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


class _Reading:
    """A process that reads a file.

    Args:
        process: It, its output a pipe.
        complaints: What it writes to standard error.
        subject: What is read, for errors.
        what: ``audio`` or ``video``.
        seconds: What it may take of a processor.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        complaints: IO[bytes],
        subject: str,
        what: str,
        seconds: int,
    ) -> None:
        assert process.stdout is not None, "its output is a pipe"
        self._out = process.stdout
        self._process = process
        self._complaints = complaints
        self._subject = subject
        self._what = what
        self._seconds = seconds

    def head(self) -> dict[str, Any]:
        """Return what it says first."""
        line = self._out.readline()
        if not line.endswith(b"\n"):
            self._end(is_whole=False)
        found: dict[str, Any] = json.loads(line)
        return found

    def read(self, size: int) -> bytes:
        """Return the next bytes: fewer, and none at last, at the end of a whole file."""
        content = self._out.read(size)
        if len(content) < size:
            self._end(is_whole=True)
        return content

    def _end(self, *, is_whole: bool) -> None:
        """Wait for its end, and say what was wrong, if anything was."""
        status = self._process.wait()
        if status == 0 and is_whole:
            return
        self._complaints.seek(0)
        reason = self._complaints.read().decode(errors="replace")
        if status >= 0 and status != REFUSED:
            raise RuntimeError(f"reading {self._subject} ended with {status}: {reason}")
        if status < 0:
            reason = (
                f"FFmpeg died of it (signal {-status}); it may take {self._seconds} s of a "
                f"processor and {_MEMORY_BYTES[self._what] >> 20} MiB of memory: send it smaller "
                "or shorter"
            )
        raise RequestError(f"{self._subject}: {reason}", code=f"invalid_{self._what}")


def _seconds_for(num_bytes: int, what: str) -> int:
    least, each = _PROCESSOR_SECONDS[what]
    return min(least + each * (num_bytes >> 20), _MAX_PROCESSOR_SECONDS)


@contextmanager
def _reading(data: bytes, container: str, what: str, **settings: Any) -> Iterator[_Reading]:
    """Have a process read a file, which is ended with the block."""
    if importlib.util.find_spec("av") is None:
        raise RequestError(
            f"the {what} is {container}, which takes the extra av here: pip install "
            f"'mstar-engine[av]'; or send {_OTHERS[what]}",
            code=f"invalid_{what}",
        )
    _check_is_whole(data, container, what)
    seconds = _seconds_for(len(data), what)
    job = {
        "path": sys.path,
        "parent": os.getpid(),
        "reader": _READERS[container],
        "what": what,
        "decoders": _DECODERS,
        "codecs": _CODECS[what],
        "bytes": _MEMORY_BYTES[what],
        "seconds": seconds,
        **settings,
    }
    command = [sys.executable, "-I", str(_PROGRAM), json.dumps(job)]
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as complaints:
        file.write(data)
        file.seek(0)
        with subprocess.Popen(
            command,
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=complaints,
            # A terminal's Ctrl-C is the parent's.
            start_new_session=True,
        ) as process:
            subject = f"the {what}'s {len(data)} bytes of {container}"
            try:
                yield _Reading(process, complaints, subject, what, seconds)
            finally:
                process.kill()
