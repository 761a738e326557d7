"""WAV: sound as bytes, whole or piece by piece.

A WAV says at its beginning how long it is. Where that is not known yet, the lengths are as large as
can be, which readers take to mean "up to the end"::

    yield wav_header(22050)
    for samples in pieces:
        yield pcm16(samples)
"""

import struct

import numpy as np
import numpy.typing as npt

from mstar.errors import RequestError

_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
_PCM = 1
_WIDTH = 2
"""Bytes of a sample."""
_UNKNOWN = 2**32 - 1
_MAX_BYTES = _UNKNOWN - _HEADER.size
_SCALE = 32768.0
"""Readers divide by it."""


def wav_header(rate: int, num_samples: int | None = None) -> bytes:
    """Return the first 44 bytes of a WAV of one channel in 16 bits.

    Args:
        rate: Samples a second.
        num_samples: Samples that follow; ``None``: not known yet.

    Raises:
        RequestError: If it would be longer than a WAV can be, 4 GiB.
    """
    assert 1 <= rate < 2**31, f"{rate} samples a second"
    riff = data = _UNKNOWN
    if num_samples is not None:
        data = num_samples * _WIDTH
        riff = data + _HEADER.size - 8
        if data > _MAX_BYTES:
            raise RequestError(
                f"a WAV of {num_samples} samples would be longer than 4 GiB; ask for less, or for "
                "another format",
                param="response_format",
            )
    return _HEADER.pack(
        b"RIFF",
        riff,
        b"WAVE",
        b"fmt ",
        16,
        _PCM,
        1,
        rate,
        rate * _WIDTH,
        _WIDTH,
        8 * _WIDTH,
        b"data",
        data,
    )


def pcm16(samples: npt.NDArray[np.floating]) -> bytes:
    """Return sound as 16-bit samples, little-endian.

    Args:
        samples: Floats ``[n]``; what is beyond -1 and 1 is clipped, what is no number is silence.
    """
    assert samples.ndim == 1, f"one channel is [n], not {samples.shape}"
    scaled = np.nan_to_num(samples.astype(np.float32) * _SCALE, nan=0.0, posinf=_SCALE)
    steps: npt.NDArray[np.int16] = np.clip(np.rint(scaled), -_SCALE, _SCALE - 1).astype("<i2")
    return steps.tobytes()


def wav(samples: npt.NDArray[np.floating], rate: int) -> bytes:
    """Return sound as a whole WAV.

    Args:
        samples: Floats ``[n]``, see :func:`pcm16`.
        rate: Samples a second.
    """
    return wav_header(rate, len(samples)) + pcm16(samples)
