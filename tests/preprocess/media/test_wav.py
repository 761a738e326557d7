import io
import struct
import wave

import numpy as np
import pytest
import soundfile
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from mstar.errors import RequestError
from mstar.preprocess.media.wav import pcm16, wav, wav_header

RATE = 22_050
TONE = np.sin(np.arange(5_000) / 9).astype(np.float32) * 0.8


def _read_by_soundfile(data: bytes) -> tuple[np.ndarray, int]:
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    return samples, rate


def _read_by_wave(data: bytes) -> tuple[bytes, tuple[int, int, int]]:
    with wave.open(io.BytesIO(data)) as file:
        form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
        return file.readframes(file.getnframes()), form


def test_a_whole_wav_reads_back_as_it_was_within_half_a_step() -> None:
    data = wav(TONE, RATE)
    samples, rate = _read_by_soundfile(data)
    assert rate == RATE
    assert samples.shape == TONE.shape
    assert np.abs(samples - TONE).max() <= 0.5 / 32768
    frames, form = _read_by_wave(data)
    assert form == (1, 2, RATE)
    assert frames == pcm16(TONE) == data[44:]


@pytest.mark.parametrize("sizes", [(1,), (1_000, 1, 0, 3_999), (5_000,)])
def test_the_pieces_of_a_stream_joined_are_one_wav(sizes: tuple[int, ...]) -> None:
    pieces = np.split(TONE[: sum(sizes)], np.cumsum(sizes)[:-1])
    data = wav_header(RATE) + b"".join(map(pcm16, pieces))
    samples, rate = _read_by_soundfile(data)
    assert rate == RATE
    assert np.array_equal(samples, _read_by_soundfile(wav(TONE[: sum(sizes)], RATE))[0])
    frames, form = _read_by_wave(data)
    assert form == (1, 2, RATE)
    assert frames == data[44:]


def test_a_wav_without_samples_is_a_wav() -> None:
    nothing = np.zeros(0, np.float32)
    for data in (wav(nothing, RATE), wav_header(RATE)):
        assert len(_read_by_soundfile(data)[0]) == 0
        assert _read_by_wave(data)[0] == b""


def test_lengths_in_the_header_are_those_of_the_bytes() -> None:
    data = wav(TONE, RATE)
    assert struct.unpack_from("<I", data, 4)[0] == len(data) - 8
    assert struct.unpack_from("<I", data, 40)[0] == len(data) - 44


def test_what_is_too_loud_is_clipped_and_no_number_is_silence() -> None:
    samples = np.array([1.0, 2.0, np.inf, -1.0, -2.0, -np.inf, np.nan, 0.0], np.float32)
    found = np.frombuffer(pcm16(samples), "<i2")
    assert found.tolist() == [32767, 32767, 32767, -32768, -32768, -32768, 0, 0]


@given(arrays(np.int16, st.integers(0, 50)))
def test_samples_of_16_bits_survive_the_way_through_floats(samples: np.ndarray) -> None:
    assert pcm16(samples.astype(np.float32) / 32768) == samples.astype("<i2").tobytes()


def test_a_wav_beyond_4_gib_is_refused() -> None:
    assert len(wav_header(RATE, (2**32 - 45) // 2)) == 44
    with pytest.raises(RequestError, match="longer than 4 GiB"):
        wav_header(RATE, 2**31)
