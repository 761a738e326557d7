"""Program that reads sound or a film out of a container by FFmpeg, memory and time bounded.

``python -P ffmpeg.py JOB`` has the file on its standard input. On its standard output stands a line
of JSON, then raw values: float32 samples, channels interleaved, or frames of RGB, before each the
number of times that it is taken (32 bits, little endian). It ends with 0, or with ``REFUSED`` and
the reason on standard error. It imports nothing of the engine, so that it is there at once.
"""

import json
import math
import resource
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

REFUSED = 3
"""How it ends where the file is at fault."""
_SECONDS_OFF = 0.5
"""How much a file's length may be off: encoders count what they add at both ends, or do not."""
_GAP = 0.1
"""Seconds without samples that are silence, not how coarsely a file counts time."""
_SILENCE = 1 << 16
"""Values written at once where nothing is heard."""


def _refuse(reason: str) -> NoReturn:
    sys.stderr.write(reason)
    sys.stderr.flush()
    sys.stdout.buffer.flush()
    sys.exit(REFUSED)


def _say(**head: Any) -> None:
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")


def _stream(streams: Any, what: str, decoders: list[str]) -> Any:
    if not len(streams):
        _refuse(f"it has no {what}")
    context = streams[0].codec_context
    name = "of a kind that nobody here knows" if context is None else context.name
    if name not in decoders and not name.startswith("pcm_"):
        _refuse(f"its {what} is {name}, which is not decoded; known are {', '.join(decoders)}")
    # One request is one processor's.
    context.thread_count = 1
    return streams[0]


class _Reader:
    """Decodes one stream of a file, and knows whether all of the file was there.

    Args:
        file: Opened for reading.
        stream: Which one.
        reader: FFmpeg's name of what opened it.
    """

    def __init__(self, file: Any, stream: Any, reader: str) -> None:
        self._file = file
        self._stream = stream
        self.start = (file.start_time or 0) / 1e6
        """When the first of all streams begins, in seconds."""
        self.total = _total(file, reader)
        """Seconds of all of the file; ``None``: its header does not say."""
        # Matroska's length is that of all time since 0.
        self._counted_from = 0.0 if reader == "matroska" else self.start

    def frames(self) -> Iterator[Any]:
        """Yield the stream's frames.

        Packets of other streams are passed by, so that the end of the file is known.
        """
        end = 0.0
        for packet in self._file.demux():
            if packet.pts is not None and packet.time_base is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream is self._stream:
                yield from packet.decode()
        end -= self._counted_from
        if self.total is not None and end < self.total - _SECONDS_OFF:
            _refuse(f"it is cut off: its header says {self.total:.1f} s, {end:.1f} are there")


def _total(file: Any, reader: str) -> float | None:
    """Return how long a file is by its header; FFmpeg makes guesses up, from bit rates."""
    if file.duration is None or reader == "aac":
        return None
    # Matroska counts the whole file, and streams of it have a length only where it is guessed.
    is_guess = reader == "matroska" and any(own.duration is not None for own in file.streams)
    return None if is_guess else file.duration / 1e6


def _play(reader: _Reader) -> None:
    """Write samples, silence where the file has none, each at its time."""
    import av  # noqa: PLC0415 - behind the limits

    out = sys.stdout.buffer
    resampler = av.AudioResampler(format="flt")
    rate, channels, num_written = 0, 0, 0
    for frame in reader.frames():
        own = frame.sample_rate, frame.layout.nb_channels
        if not rate:
            rate, channels = own
            _say(rate=rate, channels=channels, seconds=reader.total)
        elif own != (rate, channels):
            _refuse(
                f"its sound has {rate} samples a second and {channels} channels at first, {own[0]} "
                f"and {own[1]} later; all must be alike"
            )
        if frame.time is not None:
            missing = round((frame.time - reader.start) * rate) - num_written
            if missing > _GAP * rate:
                num_written += missing
                _be_silent(missing * channels)
        frame.pts = None
        for part in resampler.resample(frame):
            num_written += part.samples
            out.write(memoryview(part.planes[0])[: part.samples * channels * 4])
    if not rate:
        _refuse("it has no samples")


def _be_silent(num_values: int) -> None:
    while num_values > 0:
        count = min(num_values, _SILENCE)
        sys.stdout.buffer.write(bytes(4 * count))
        num_values -= count


def _show(reader: _Reader, fps: float) -> None:
    """Write the frames that are on show at times ``1 / fps`` apart."""
    size: tuple[int, int] | None = None
    num_taken = 0
    last: Any = None
    for frame in reader.frames():
        own = frame.width, frame.height
        if size is None:
            size = own
            turns = round(frame.rotation / 90) % 4
            _say(width=own[0], height=own[1], turns=turns, seconds=reader.total)
        elif own != size:
            _refuse(
                f"its frames are {size[0]} x {size[1]} at first and {own[0]} x {own[1]} later; all "
                "must have one size"
            )
        if last is not None:
            count = _due((frame.time or 0.0) - reader.start, fps) - num_taken
            num_taken += max(count, 0)
            _write_frame(last, count)
        last = frame
    if last is None:
        _refuse("it has no frames")
    stop = (last.time or 0.0) - reader.start + float((last.duration or 0) * last.time_base)
    _write_frame(last, max(_due(stop, fps) - num_taken, int(num_taken == 0)))


def _due(seconds: float, fps: float) -> int:
    """Return how many frames are taken before a time, the first one at 0."""
    return max(math.ceil(seconds * fps - 1e-6), 0)


def _write_frame(frame: Any, count: int) -> None:
    if count <= 0:
        return
    out = sys.stdout.buffer
    out.write(min(count, 2**32 - 1).to_bytes(4, "little"))
    plane = frame.reformat(format="rgb24").planes[0]
    pixels, row = memoryview(plane), 3 * frame.width
    for start in range(0, frame.height * plane.line_size, plane.line_size):
        out.write(pixels[start : start + row])


def main() -> None:
    """Read the file as the job says: ``reader``, ``what``, ``decoders``, ``fps``, and bounds."""
    job = json.loads(sys.argv[1])
    for kind, limit in (
        (resource.RLIMIT_AS, job["bytes"]),
        (resource.RLIMIT_CPU, job["seconds"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 1 << 16),
    ):
        resource.setrlimit(kind, (limit, limit))
    import av  # noqa: PLC0415 - behind the limits

    try:
        with av.open(sys.stdin.buffer, format=job["reader"], metadata_errors="replace") as file:
            streams = file.streams.audio if job["what"] == "audio" else file.streams.video
            stream = _stream(streams, job["what"], job["decoders"])
            reader = _Reader(file, stream, job["reader"])
            if job["what"] == "audio":
                _play(reader)
            else:
                _show(reader, job["fps"])
            sys.stdout.buffer.flush()
    except MemoryError:
        _refuse(f"it takes more than {job['bytes'] >> 20} MiB of memory")
    except (av.FFmpegError, ValueError, RuntimeError, OSError, ArithmeticError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        _refuse(f"it cannot be decoded ({reason:.120})")


if __name__ == "__main__":
    main()
