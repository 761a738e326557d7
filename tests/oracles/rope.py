"""Rotary embedding by complex numbers in float64; slow, and independent of the package."""

import cmath
import math
from collections.abc import Sequence


def frequencies(dim: int, theta: float, scale: float = 1.0) -> list[float]:
    return [theta ** (-2 * i / dim) / scale for i in range(dim // 2)]


def llama31_frequencies(
    dim: int, theta: float, scale: float, low: float, high: float, length: int
) -> list[float]:
    """The published three branches; equal factors are a step."""
    out = []
    for freq in frequencies(dim, theta):
        wavelength = 2 * math.pi / freq
        if wavelength < length / high:
            out.append(freq)
        elif low == high or wavelength > length / low:
            out.append(freq / scale)
        else:
            smooth = (length / wavelength - low) / (high - low)
            out.append((1 - smooth) * freq / scale + smooth * freq)
    return out


def rotate(
    head: Sequence[float],
    position: int,
    freqs: Sequence[float],
    *,
    interleave: bool,
    scaling: float = 1.0,
) -> list[float]:
    """One head rotated; elements behind the last pair stay."""
    out = list(head)
    half = len(freqs)
    for i, freq in enumerate(freqs):
        first, second = (2 * i, 2 * i + 1) if interleave else (i, i + half)
        angle = math.fmod(position * freq, 2 * math.pi)
        turned = complex(head[first], head[second]) * cmath.exp(1j * angle) * scaling
        out[first], out[second] = turned.real, turned.imag
    return out
