"""Program that reads sound or a film out of a container by FFmpeg, memory and time bounded.

``python -I ffmpeg.py JOB`` has the file on its standard input. On its standard output stands a line
of JSON, then raw values: float32 samples, channels interleaved, or frames of RGB, before each the
number of times that it is taken (32 bits, little endian). It ends with 0, or with ``REFUSED`` and
the reason on standard error. It imports nothing of the engine, so that it is there at once.
"""

import ctypes
import json
import math
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NoReturn

REFUSED = 3
"""How it ends where the file is at fault."""
_GAP = 0.1
"""Seconds without samples that are silence, not how coarsely a file counts time."""
_SILENCE = 1 << 16
"""Values written at once where nothing is heard."""
_SET_PARENT_DEATH_SIGNAL = 1
"""Of Linux's ``prctl``."""


def main() -> None:
    """Read the file as the job says, which ``containers`` writes."""
    job = json.loads(sys.argv[1])
    _end_with(job["parent"])
    _bound(job["bytes"], job["seconds"])
    sys.path[:] = job["path"]
    import av  # noqa: PLC0415 - behind the limits

    what, decoders = job["what"], job["decoders"]
    decoders["audio"] += sorted(name for name in av.codecs_available if name.startswith("pcm_"))
    # Streams that are not asked for, too: FFmpeg tells by all of them when a file begins.
    options = {"codec_whitelist": ",".join(decoders["audio"] + decoders["video"])}
    try:
        with av.open(
            sys.stdin.buffer, format=job["reader"], options=options, metadata_errors="replace"
        ) as file:
            stream = _stream(file, what, decoders[what], job["codecs"])
            if what == "audio":
                _play(file, stream)
            else:
                _show(file, stream, job["fps"])
            sys.stdout.buffer.flush()
    except MemoryError:
        _refuse(f"it takes more than {job['bytes'] >> 20} MiB of memory; send it smaller")
    except (av.FFmpegError, ValueError, RuntimeError, OSError, ArithmeticError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        _refuse(f"it cannot be decoded ({reason:.120}); send the whole file")


def _end_with(parent: int) -> None:
    """Have this process end with the one that started it, which may be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _bound(num_bytes: int, seconds: int) -> None:
    for kind, wanted in (
        (resource.RLIMIT_AS, num_bytes),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 1 << 16),
    ):
        _, most = resource.getrlimit(kind)
        limit = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(kind, (limit, limit))


def _refuse(reason: str) -> NoReturn:
    sys.stderr.write(reason)
    sys.stdout.buffer.flush()
    sys.exit(REFUSED)


def _say(**head: Any) -> None:
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")


def _stream(file: Any, what: str, decoders: list[str], codecs: str) -> Any:
    """Return the first stream that can be decoded; a cover is no film."""
    import av  # noqa: PLC0415 - behind the limits

    cover = av.stream.Disposition.attached_pic
    own = [one for one in file.streams if one.type == what and not one.disposition & cover]
    names = ["unknown" if one.codec_context is None else one.codec_context.name for one in own]
    for stream, name in zip(own, names, strict=True):
        if name in decoders:
            # One request is one processor's.
            stream.codec_context.thread_count = 1
            return stream
    if not own:
        _refuse(f"it has no {what}")
    _refuse(f"its {what} is {names[0]}, which is not decoded; send {codecs}")


def _start(file: Any, first: Any) -> float:
    """Return when the first of all streams begins; ``first`` is a frame of one of them."""
    own = first.time or 0.0
    # Of a few frames FFmpeg does not tell when they begin.
    start: float = own if file.start_time is None else min(file.start_time / 1e6, own)
    return start


def _seconds(file: Any, stream: Any, start: float) -> float | None:
    """Return when a stream ends by the file's header; ``None``: it does not say."""
    if file.format.name == "aac":
        # What FFmpeg tells is a guess by the bit rate.
        return None
    if "matroska" not in file.format.name:
        if stream.duration is None or stream.start_time is None:
            return None
        return float((stream.start_time + stream.duration) * stream.time_base) - start
    # The length of a whole Matroska since time 0; where a stream has one, both are guesses.
    if len(file.streams) > 1 or file.duration is None or stream.duration is not None:
        return None
    length: float = file.duration / 1e6 - max(start, 0.0)
    return max(length, 0.0)


def _play(file: Any, stream: Any) -> None:
    """Write samples, silence where the file has none, each at its time."""
    out = sys.stdout.buffer
    start, rate, channels, num_written = 0.0, 0, 0, 0
    interleave: Any = None
    for frame in file.decode(stream):
        own = frame.sample_rate, frame.layout.nb_channels
        if interleave is None:
            rate, channels = own
            start = _start(file, frame)
            interleave = _Interleaving(frame)
            _say(rate=rate, channels=channels, seconds=_seconds(file, stream, start))
        elif own != (rate, channels):
            _refuse(
                f"its sound has {rate} samples a second and {channels} channels at first, {own[0]} "
                f"and {own[1]} later; all must be alike"
            )
        if frame.time is not None:
            missing = round((frame.time - start) * rate) - num_written
            if missing > _GAP * rate:
                num_written += missing
                _be_silent(missing * channels)
        for part in interleave(frame):
            num_written += part.samples
            out.write(memoryview(part.planes[0])[: part.samples * channels * 4])
    if interleave is None:
        _refuse("it has no samples")


class _Interleaving:
    """Makes float32 of frames, their channels interleaved, in this thread.

    Args:
        first: A frame as all others are.
    """

    def __init__(self, first: Any) -> None:
        import av  # noqa: PLC0415 - behind the limits

        self._graph = graph = av.filter.Graph()
        graph.threads = 1
        source = graph.add(
            "abuffer",
            sample_rate=str(first.sample_rate),
            sample_fmt=first.format.name,
            channel_layout=first.layout.name,
            time_base=f"1/{first.sample_rate}",
        )
        to = graph.add("aformat", sample_fmts="flt")
        sink = graph.add("abuffersink")
        graph.link_nodes(source, to, sink).configure()

    def __call__(self, frame: Any) -> Iterator[Any]:
        frame.pts = None
        self._graph.push(frame)
        try:
            while True:
                yield self._graph.pull()
        except (BlockingIOError, EOFError):
            return


def _be_silent(num_values: int) -> None:
    while num_values > 0:
        count = min(num_values, _SILENCE)
        sys.stdout.buffer.write(bytes(4 * count))
        num_values -= count


def _show(file: Any, stream: Any, fps: float) -> None:
    """Write the frames that are on show at times ``1 / fps`` apart."""
    start, num_taken = 0.0, 0
    seconds: float | None = None
    writer: Any = None
    last: Any = None
    for frame in file.decode(stream):
        if writer is None:
            start = _start(file, frame)
            seconds = _seconds(file, stream, start)
            writer = _FrameWriter(frame, stream.sample_aspect_ratio)
            _say(size=writer.size, matrix=_matrix(frame), seconds=seconds)
        else:
            count = _due((frame.time or 0.0) - start, fps) - num_taken
            num_taken += max(count, 0)
            writer.write(last, count)
        last = frame
    if writer is None:
        _refuse("it has no frames")
    stop = (last.time or 0.0) - start + float((last.duration or 0) * last.time_base)
    # Of the last frame some files say only by their length how long it stands.
    count = _due(max(stop, seconds or 0.0), fps) - num_taken
    writer.write(last, max(count, int(num_taken == 0)))


def _due(seconds: float, fps: float) -> int:
    """Return how many frames are taken before a time, the first one at 0."""
    return max(math.ceil(seconds * fps - 1e-6), 0)


def _matrix(frame: Any) -> list[int]:
    """Return a note of how a picture is laid upright, which cameras write.

    Its ``a``, ``b``, ``c`` and ``d`` move what stands at ``x, y`` to ``a x + c y, b x + d y``.
    """
    note = frame.side_data.get("DISPLAYMATRIX")
    if note is None:
        return [1, 0, 0, 1]
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(note))
    return [a, b, c, d]


class _FrameWriter:
    """Writes frames of one size, in RGB and with square pixels.

    Args:
        first: Has the size; later ones are scaled to it, as players do.
        aspect: How wide a pixel is by its height; ``None`` or 0: it is square.
    """

    def __init__(self, first: Any, aspect: Fraction | None) -> None:
        import av  # noqa: PLC0415 - behind the limits

        width, height = first.width, first.height
        if aspect and aspect > 1:
            width = round(width * aspect)
        elif aspect and aspect > 0:
            height = round(height / aspect)
        self.size = width, height
        self._reformatter = av.video.reformatter.VideoReformatter()

    def write(self, frame: Any, count: int) -> None:
        """Write a frame that is taken so many times."""
        if count <= 0:
            return
        out = sys.stdout.buffer
        out.write(min(count, 2**32 - 1).to_bytes(4, "little"))
        width, height = self.size
        made = self._reformatter.reformat(frame, width, height, format="rgb24", threads=1)
        plane = made.planes[0]
        pixels, row = memoryview(plane), 3 * width
        for at in range(0, height * plane.line_size, plane.line_size):
            out.write(pixels[at : at + row])


if __name__ == "__main__":
    main()
