"""Recordings in containers, as phones and browsers make them."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest


def encoded(stream: Any, samples: npt.NDArray[np.float32], rate: int) -> Iterator[Any]:
    """Packets of a stream that is being written: samples, ``[channels, num_samples]``."""
    av = pytest.importorskip("av")
    context = stream.codec_context
    layout = context.layout.name
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
    frame.sample_rate, frame.pts = rate, 0
    resampler = av.AudioResampler(
        context.format, layout, context.sample_rate, frame_size=context.frame_size or None
    )
    for part in (*resampler.resample(frame), *resampler.resample(None), None):
        yield from stream.encode(part)


def contained(
    samples: npt.NDArray[np.float32],
    rate: int,
    kind: str,
    codec: str,
    out: Any = None,
    options: dict[str, str] | None = None,
) -> bytes:
    """A file of samples, ``[channels, num_samples]``; skips where PyAV is missing."""
    av = pytest.importorskip("av")
    out = io.BytesIO() if out is None else out
    layout = "stereo" if len(samples) == 2 else "mono"
    with av.open(out, "w", format=kind, options=options or {}) as file:
        own_rate = 48_000 if codec == "libopus" else rate
        stream = file.add_stream(codec, rate=own_rate, layout=layout)
        for packet in encoded(stream, samples, rate):
            file.mux(packet)
    data: bytes = out.getvalue()
    return data
