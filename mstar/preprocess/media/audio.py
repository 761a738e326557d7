"""Audio from bytes: one channel at the rate that is asked for, read piece by piece and bounded."""

import io
import struct
from collections.abc import Iterator

import numpy as np
import soundfile
import soxr

from mstar.errors import RequestError
from mstar.preprocess.media.containers import Sound, open_sound
from mstar.preprocess.media.headers import container_of
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.media.types import Samples

_LIMITS = MediaLimits()
_FORMATS = frozenset({"WAV", "WAVEX", "FLAC", "MP3", "OGG"})
_FORMAT_NAMES = "WAV, FLAC, MP3, OGG (Vorbis or Opus), MP4 (M4A), WebM and AAC"
_RATES = (1_000, 768_000)
_MAX_CHANNELS = 64
_BLOCK = 2**18
"""Values of one piece, over all channels."""
_OPEN_SIZES = 0x7FFFF000
"""WAV sizes from here on say that the writer did not know them: it was streaming."""
_BROKEN = (soundfile.LibsndfileError, RuntimeError, OSError, ValueError, TypeError, MemoryError)


def decode_audio(data: bytes, rate: int, limits: MediaLimits = _LIMITS) -> Samples:
    """Return the recording that ``data`` holds, all channels mixed.

    Values beyond full scale are cut to it, as loudspeakers do. A file whose format says nothing of
    its length (a stream, some OGG) is what is there of it.

    Args:
        data: A whole file.
        rate: Samples a second of the result; other rates are converted.
        limits: Lengths beyond which it is refused, by its header and while it is read.

    Returns:
        float32 ``[num_samples]``, at least one, between -1 and 1.

    Raises:
        RequestError: If it is no recording, empty, cut off, too long, or has values that are no
            numbers.
    """
    if not data:
        raise RequestError("the audio is empty, 0 bytes", code="invalid_audio")
    container = container_of(data)
    if container is not None:
        with open_sound(data, container) as sound:
            return _convert(sound, rate, limits)
    _check_wav_is_whole(data)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format not in _FORMATS:
                raise RequestError(
                    f"the audio is {file.format}, which is not taken; send {_FORMAT_NAMES}",
                    code="invalid_audio",
                )
            seconds = file.frames / file.samplerate
            sound = Sound(file.samplerate, file.channels, seconds, _blocks(file))
            return _convert(sound, rate, limits)
    except RequestError:
        raise
    except _BROKEN as error:
        reason = " ".join(str(error).rpartition(": ")[2].split()) or type(error).__name__
        raise RequestError(
            f"the audio's {len(data)} bytes cannot be decoded ({reason:.120}); {_FORMAT_NAMES} "
            "are taken, as whole files",
            code="invalid_audio",
        ) from error


def resample(samples: Samples, given: int, wanted: int) -> Samples:
    """Return samples at another rate; at least one is left.

    Args:
        samples: float32 ``[num_samples]``.
        given: Their rate, in samples a second.
        wanted: The result's.
    """
    if given == wanted:
        return samples
    converted: Samples = soxr.resample(samples, given, wanted)
    return _bounded(converted)


def check_samples(samples: Samples, rate: int, limits: MediaLimits = _LIMITS) -> None:
    """Verify a recording that came as numbers.

    Raises:
        RequestError: If it is empty, too long, of an odd rate, or has values that are no numbers.
    """
    if samples.ndim != 1 or not len(samples):
        raise RequestError(
            f"the audio's samples have the shape {samples.shape}; they must be [num_samples], at "
            "least 1",
            code="invalid_audio",
        )
    _check_head(rate, 1)
    _check_length(len(samples) / rate, limits)
    _check_finite(samples[:, None], 0, rate)


def _blocks(file: soundfile.SoundFile) -> Iterator[Samples]:
    num_read = 0
    size = _BLOCK // file.channels
    while len(block := file.read(size, dtype="float32", always_2d=True)):
        num_read += len(block)
        yield block
    if num_read < file.frames:
        raise RequestError(
            f"the audio is cut off: its header says {file.frames} samples, {num_read} are there",
            code="invalid_audio",
        )


def _convert(sound: Sound, rate: int, limits: MediaLimits) -> Samples:
    given, channels = sound.rate, sound.num_channels
    _check_head(given, channels)
    _check_length(sound.seconds or 0.0, limits)
    stream = None if given == rate else soxr.ResampleStream(given, rate, 1, dtype="float32")
    pieces: list[Samples] = []
    num_read = 0
    for block in sound.blocks:
        _check_finite(block, num_read, given)
        num_read += len(block)
        _check_length(num_read / given, limits)
        mono = block[:, 0] if channels == 1 else block.mean(axis=1, dtype=np.float32)
        np.clip(mono, -1, 1, out=mono)
        pieces.append(mono if stream is None else stream.resample_chunk(mono))
    if not num_read:
        raise RequestError("the audio has no samples", code="invalid_audio")
    if stream is not None:
        pieces.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
    return _bounded(np.concatenate(pieces))


def _bounded(samples: Samples) -> Samples:
    """Return samples within full scale, which conversion may leave; one, where none is left."""
    if not len(samples):
        return np.zeros(1, np.float32)
    return np.clip(samples, -1, 1)


def _check_head(rate: int, channels: int) -> None:
    low, high = _RATES
    if not low <= rate <= high:
        raise RequestError(
            f"the audio has {rate} samples a second; {low} to {high} are taken",
            code="invalid_audio",
        )
    if channels > _MAX_CHANNELS:
        raise RequestError(
            f"the audio has {channels} channels; at most {_MAX_CHANNELS} are taken: mix them down",
            code="invalid_audio",
        )


def _check_length(seconds: float, limits: MediaLimits) -> None:
    if seconds > limits.audio_seconds:
        raise RequestError(
            f"the audio is {seconds:.1f} s long; at most {limits.audio_seconds:.0f} s are taken: "
            "cut it into parts",
            code="media_too_large",
        )


def _check_finite(block: Samples, start: int, rate: int) -> None:
    is_finite = np.isfinite(block)
    if not is_finite.all():
        row, channel = np.argwhere(~is_finite)[0].tolist()
        raise RequestError(
            f"the audio's sample {start + row} ({(start + row) / rate:.3f} s) is "
            f"{float(block[row, channel])}, which is no number",
            code="invalid_audio",
        )


def _check_wav_is_whole(data: bytes) -> None:
    """Refuse a WAV that ends before its samples do, which decoders take for a shorter one."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return
    at = 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        if name == b"data":
            num_bytes = len(data) - at - 8
            if num_bytes < size < _OPEN_SIZES:
                raise RequestError(
                    f"the audio is cut off: its header says {size} bytes of samples, {num_bytes} "
                    "are there",
                    code="invalid_audio",
                )
            return
        at += 8 + size + size % 2
