import io
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import soundfile
from hypothesis import given, settings, strategies as st

from mstar.errors import RequestError
from mstar.preprocess.media.audio import check_samples, decode_audio, resample
from mstar.preprocess.media.limits import MediaLimits

Samples = npt.NDArray[np.float32]


def encode(samples: npt.NDArray[Any], rate: int, kind: str, subtype: str | None = None) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, format=kind, subtype=subtype)
    return out.getvalue()


def tone(rate: int, seconds: float = 0.25, pitch: float = 440.0) -> Samples:
    time = np.arange(int(rate * seconds)) / rate
    return (0.5 * np.sin(2 * np.pi * pitch * time)).astype(np.float32)


def pitch_of(samples: Samples, rate: int) -> float:
    """The loudest frequency, in Hz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples)), 2**16))
    return float(spectrum.argmax() * rate / 2**16)


def attempt(data: bytes) -> Samples | RequestError:
    """The recording, or why there is none."""
    try:
        return decode_audio(data, 16_000)
    except RequestError as error:
        return error


FORMATS = [
    ("WAV", "PCM_16"),
    ("WAV", "PCM_U8"),
    ("WAV", "PCM_24"),
    ("WAV", "FLOAT"),
    ("WAV", "ULAW"),
    ("WAVEX", "PCM_16"),
    ("FLAC", "PCM_16"),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("MP3", None),
]


@pytest.mark.parametrize(("kind", "subtype"), FORMATS)
@pytest.mark.parametrize("rate", [8_000, 48_000])
def test_a_tone_stays_the_same_tone_at_the_models_rate(
    kind: str, subtype: str | None, rate: int
) -> None:
    decoded = decode_audio(encode(tone(rate), rate, kind, subtype), 16_000)
    assert decoded.dtype == np.float32
    assert len(decoded) == pytest.approx(4_000, abs=2 if kind != "MP3" else 400)
    assert pitch_of(decoded, 16_000) == pytest.approx(440, abs=3)
    assert np.abs(decoded).max() == pytest.approx(0.5, abs=0.06)


def test_at_the_models_rate_samples_are_what_they_were() -> None:
    samples = tone(16_000)
    np.testing.assert_array_equal(
        decode_audio(encode(samples, 16_000, "WAV", "FLOAT"), 16_000), samples
    )


def test_channels_are_mixed_evenly() -> None:
    left, right = tone(16_000), tone(16_000, pitch=1000)
    data = encode(np.stack([left, right], 1), 16_000, "WAV", "FLOAT")
    np.testing.assert_allclose(decode_audio(data, 16_000), (left + right) / 2, atol=1e-7)


def test_a_long_file_read_in_pieces_is_the_same_as_converted_at_once() -> None:
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, 600_000).astype(np.float32)
    decoded = decode_audio(encode(samples, 44_100, "WAV", "FLOAT"), 16_000)
    whole = resample(samples, 44_100, 16_000)
    assert len(decoded) == len(whole)
    np.testing.assert_allclose(decoded, whole, atol=1e-5)


def test_silence_stays_silence() -> None:
    decoded = decode_audio(encode(np.zeros(8_000, np.float32), 8_000, "WAV"), 16_000)
    assert decoded.shape == (16_000,)
    assert not decoded.any()


@pytest.mark.parametrize("rate", [8_000, 16_000, 48_000, 384_000])
@pytest.mark.parametrize("num_samples", [1, 2, 3])
def test_a_sample_or_two_are_a_recording(rate: int, num_samples: int) -> None:
    data = encode(np.full(num_samples, 0.5, np.float32), rate, "WAV", "FLOAT")
    decoded = decode_audio(data, 16_000)
    assert len(decoded) >= 1
    assert np.isfinite(decoded).all()


def test_values_beyond_full_scale_are_cut_to_it() -> None:
    data = encode(np.array([0.5, 3.0, -1e30], np.float32), 16_000, "WAV", "FLOAT")
    assert decode_audio(data, 16_000).tolist() == [0.5, 1.0, -1.0]


@pytest.mark.parametrize(("value", "name"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_values_that_are_no_numbers_are_named(value: float, name: str) -> None:
    samples = np.zeros((4_000, 2), np.float32)
    samples[2_000, 1] = value
    data = encode(samples, 8_000, "WAV", "FLOAT")
    with pytest.raises(RequestError, match=rf"sample 2000 \(0.250 s\) is {name}, which is no"):
        decode_audio(data, 16_000)


@pytest.mark.parametrize(("kind", "subtype"), [f for f in FORMATS if f[1] != "OPUS"])
def test_a_file_that_is_cut_off_is_refused(kind: str, subtype: str | None) -> None:
    """Opus is a stream: what is there of it counts as all."""
    data = encode(tone(16_000), 16_000, kind, subtype)
    for cut in range(0, len(data), 97):
        with pytest.raises(RequestError) as caught:
            decode_audio(data[:cut], 16_000)
        assert caught.value.code == "invalid_audio"


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF])
def test_a_wav_that_was_streamed_says_no_length_and_is_taken(size: int) -> None:
    samples = (tone(16_000) * 32767).astype("<i2")
    head = struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", size, b"WAVE", b"fmt ", 16, 1, 1, 16_000, 32_000, 2, 16, b"data", size),
    )
    decoded = decode_audio(head + samples.tobytes(), 16_000)
    np.testing.assert_array_equal(decoded, samples.astype(np.float32) / 32768)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty, 0 bytes"),
        (b"RIFF", "4 bytes cannot be decoded"),
        (b"OggS" + bytes(500), "WAV, FLAC, MP3, OGG"),
    ],
)
def test_other_things_are_refused_with_what_is_taken(data: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        decode_audio(data, 16_000)


def test_other_containers_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="the audio is AIFF, which is not taken"):
        decode_audio(encode(tone(16_000), 16_000, "AIFF"), 16_000)


def test_a_file_without_samples_is_refused() -> None:
    with pytest.raises(RequestError, match="no samples"):
        decode_audio(encode(np.zeros(0, np.float32), 16_000, "WAV"), 16_000)


def test_two_hours_are_refused_by_the_header_and_take_no_memory() -> None:
    data = encode(np.zeros(8_000 * 7_200, np.int16), 8_000, "FLAC")
    assert len(data) < 2**20
    before = psutil.Process().memory_info().rss
    with pytest.raises(RequestError, match=r"7200.0 s long; at most 3600 s are taken") as caught:
        decode_audio(data, 16_000)
    assert caught.value.code == "media_too_large"
    assert psutil.Process().memory_info().rss - before < 16 * 2**20


def test_the_length_limit_holds_where_the_header_tells_nothing() -> None:
    data = encode(tone(48_000, 1.0), 48_000, "OGG", "OPUS")
    with pytest.raises(RequestError, match="at most 0 s are taken"):
        decode_audio(data, 16_000, MediaLimits(audio_seconds=0.4))


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(
        [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", "PCM_16"), ("OGG", "VORBIS")]
    ),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6),
)
def test_broken_bytes_give_samples_or_a_refusal(
    kind: tuple[str, str], changes: list[tuple[int, int]]
) -> None:
    data = bytearray(encode(tone(8_000, 0.05), 8_000, *kind))
    for place, value in changes:
        data[place % len(data)] = value
    found = attempt(bytes(data))
    if isinstance(found, RequestError):
        assert found.code in ("invalid_audio", "media_too_large")
        assert len(found.message) < 300
    else:
        assert np.isfinite(found).all()
        assert len(found) >= 1


@settings(deadline=None)
@given(
    samples=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=50),
    rate=st.sampled_from([1_000, 8_000, 11_025, 16_000, 44_100, 192_000]),
)
def test_any_rate_gives_the_length_it_should(samples: list[float], rate: int) -> None:
    data = encode(np.array(samples, np.float32), rate, "WAV", "FLOAT")
    decoded = decode_audio(data, 16_000)
    assert abs(len(decoded) - len(samples) * 16_000 / rate) <= max(1, 16_000 / rate)
    assert np.abs(decoded).max() <= 1


@pytest.mark.parametrize(
    ("samples", "rate", "message"),
    [
        (np.zeros(0, np.float32), 16_000, "at least 1"),
        (np.zeros((2, 2), np.float32), 16_000, r"shape \(2, 2\)"),
        (np.zeros(5, np.float32), 10, "10 samples a second"),
        (np.array([0, np.nan], np.float32), 16_000, "is nan"),
        (np.zeros(4_000_000, np.float32), 1_000, "4000.0 s long"),
    ],
)
def test_samples_that_come_as_numbers_are_checked(
    samples: Samples, rate: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        check_samples(samples, rate)
