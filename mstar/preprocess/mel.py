"""Log-mel features of speech, as Whisper hears them; numpy only."""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

RATE = 16_000
"""Samples a second."""
HOP = 160
"""Samples from one frame to the next."""
WINDOW = 400
"""Samples that one frame looks at."""
_TOP = 8000.0
_FLOOR = 1e-10
_RANGE = 8.0
_BLOCK = 4096
"""Frames that are transformed together, so that an hour takes no more memory than a minute."""

Floats = npt.NDArray[np.float32]


def log_mel(samples: Floats, num_mel_bins: int) -> Floats:
    """Return ``[num_mel_bins, num_samples // 160]``, float32.

    The loudest value of the whole recording decides what counts as silence.

    Args:
        samples: ``[num_samples]`` at ``RATE``, at least one.
        num_mel_bins: Bands of the mel scale.

    Source:
        Radford et al. 2022, arXiv:2212.04356, section 2.2.
    """
    num_frames = len(samples) // HOP
    padded = _reflect(np.asarray(samples, np.float32), WINDOW // 2)
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:num_frames]
    hann, filters = _hann(), mel_filters(num_mel_bins)
    mel = np.empty((num_mel_bins, num_frames), np.float32)
    for begin in range(0, num_frames, _BLOCK):
        spectrum = np.fft.rfft(frames[begin : begin + _BLOCK] * hann)
        power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
        mel[:, begin : begin + _BLOCK] = filters @ power.T
    np.log10(np.maximum(mel, _FLOOR, out=mel), out=mel)
    np.maximum(mel, mel.max(initial=-np.inf) - np.float32(_RANGE), out=mel)
    mel += 4.0
    mel /= 4.0
    return mel


@cache
def _hann() -> Floats:
    """Return the periodic window of a frame."""
    angle = 2 * np.pi * np.arange(WINDOW) / WINDOW
    return (0.5 - 0.5 * np.cos(angle)).astype(np.float32)


@cache
def mel_filters(num_mel_bins: int) -> Floats:
    """Return triangles over the frequencies of a frame, ``[num_mel_bins, 201]``, of equal area.

    Source: the mel scale of Slaney, Auditory Toolbox, 1998: linear up to 1 kHz, then logarithmic.
    """
    frequencies = np.linspace(0.0, RATE / 2, WINDOW // 2 + 1)
    edges = _hertz(np.linspace(_mel(0.0), _mel(_TOP), num_mel_bins + 2))
    width = np.diff(edges)
    slopes = edges[:, None] - frequencies
    rising, falling = -slopes[:-2] / width[:-1, None], slopes[2:] / width[1:, None]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    areas = 2.0 / (edges[2:] - edges[:-2])
    filters: Floats = (triangles * areas[:, None]).astype(np.float32)
    return filters


_BREAK_HERTZ, _BREAK_MEL = 1000.0, 15.0
_STEP = np.log(6.4) / 27.0


def _mel(hertz: float) -> float:
    if hertz < _BREAK_HERTZ:
        return 3.0 * hertz / 200.0
    return float(_BREAK_MEL + np.log(hertz / _BREAK_HERTZ) / _STEP)


def _hertz(mel: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    above: npt.NDArray[Any] = _BREAK_HERTZ * np.exp(_STEP * (mel - _BREAK_MEL))
    return np.where(mel < _BREAK_MEL, 200.0 * mel / 3.0, above)


def _reflect(samples: Floats, count: int) -> Floats:
    """Return the samples with ``count`` more at each side, mirrored at the ends."""
    return np.pad(samples, count, mode="reflect" if len(samples) > 1 else "edge")
