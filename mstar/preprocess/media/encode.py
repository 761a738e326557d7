"""Sound and pictures as the bytes of files."""

import io
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from PIL import Image

from mstar.preprocess.media.types import Pixels
from mstar.preprocess.media.wav import pcm16, wav

BARE_KINDS = ("pcm", "pcm16")
BARE_RATE = 24_000
"""Samples a second of sound without a head, which cannot say it: what OpenAI's clients expect."""
_OPUS_RATE = 48_000
"""Opus knows few rates; players expect this one."""


def encode_sound(pieces: Sequence[npt.NDArray[np.float32]], rate: int, kind: str) -> bytes:
    """Return sound as a file of one channel.

    Args:
        pieces: At least one, ``[num_samples]`` each, between -1 and 1.
        rate: Samples a second.
        kind: ``wav``, ``pcm`` or ``pcm16`` (see ``bare``), ``flac``, ``mp3`` or ``opus``.
    """
    if kind in BARE_KINDS:
        return b"".join(bare(piece, rate) for piece in pieces)
    return _ENCODERS[kind](np.concatenate(pieces), rate)


def bare(samples: npt.NDArray[np.float32], rate: int) -> bytes:
    """Return a piece of sound as 16-bit samples without a head, at ``BARE_RATE``."""
    return pcm16(samples if rate == BARE_RATE else soxr.resample(samples, rate, BARE_RATE))


def encode_png(pixels: Pixels) -> bytes:
    """Return a picture as a PNG.

    Args:
        pixels: uint8 ``[height, width, 3]``.
    """
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def _file(kind: str, subtype: str) -> Callable[[npt.NDArray[np.float32], int], bytes]:
    def encode(samples: npt.NDArray[np.float32], rate: int) -> bytes:
        out = io.BytesIO()
        soundfile.write(out, np.clip(samples, -1, 1), rate, format=kind, subtype=subtype)
        return out.getvalue()

    return encode


def _opus(samples: npt.NDArray[np.float32], rate: int) -> bytes:
    converted = soxr.resample(samples, rate, _OPUS_RATE)
    return _file("OGG", "OPUS")(converted, _OPUS_RATE)


_ENCODERS: dict[str, Callable[[npt.NDArray[np.float32], int], bytes]] = {
    "wav": wav,
    "flac": _file("FLAC", "PCM_16"),
    "mp3": _file("MP3", "MPEG_LAYER_III"),
    "opus": _opus,
}
