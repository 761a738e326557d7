"""Recordings and films out of containers that FFmpeg wrote, whole and broken."""

import io
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from mstar.errors import RequestError
from mstar.preprocess.media import containers
from mstar.preprocess.media.audio import decode_audio
from mstar.preprocess.media.frames import decode_video
from mstar.preprocess.media.headers import _MAX_BOXES, _MAX_ELEMENTS, container_of, size_of
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.media.types import Pixels
from tests.preprocess.media.contained import contained, encoded
from tests.preprocess.media.test_audio import pitch_of, tone

av = pytest.importorskip("av")
LIMITS = MediaLimits()
ResultT = TypeVar("ResultT")
SOUND = [
    ("mp4", "aac"),
    ("mp4", "alac"),
    ("mov", "pcm_s16le"),
    ("webm", "libopus"),
    ("matroska", "flac"),
    ("adts", "aac"),
]
FILMS = [("mp4", "libx264"), ("mp4", "mpeg4"), ("webm", "libvpx-vp9"), ("matroska", "libvpx")]


class Pipe:
    """A file that is written from beginning to end, as by one who streams."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, data: bytes) -> int:
        self.content += data
        return len(data)

    def getvalue(self) -> bytes:
        return self.content


def sound(
    kind: str,
    codec: str,
    rate: int = 48_000,
    seconds: float = 1.0,
    channels: int = 1,
    out: Any = None,
    options: dict[str, str] | None = None,
) -> bytes:
    samples = np.stack([tone(rate, seconds)] * channels)
    return contained(samples, rate, kind, codec, out, options)


def film_of(
    kind: str,
    codec: str,
    frames: Sequence[npt.NDArray[np.uint8]],
    rate: int = 10,
    sound_seconds: float = 0.0,
    sound_start: float = 0.0,
    aspect: Fraction | None = None,
    last: float | None = None,
) -> bytes:
    """A film of frames that follow each other at a rate, the last one on show for seconds."""
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as file:
        stream = file.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        if codec == "libx264":
            stream.options = {"bf": "0"}
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        if sound_seconds:
            heard = file.add_stream(
                "aac" if kind == "mp4" else "libopus", rate=48_000, layout="mono"
            )
        packets = []
        for pixels in frames:
            packets += stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24"))
        packets += stream.encode(None)
        if last is not None:
            packets[-1].duration = int(last / packets[-1].time_base)
        file.mux(packets)
        if sound_seconds:
            for packet in encoded(heard, tone(48_000, sound_seconds)[None], 48_000):
                packet.pts += round(sound_start / packet.time_base)
                packet.dts = packet.pts
                file.mux(packet)
    return out.getvalue()


def film(
    kind: str,
    codec: str,
    levels: list[int],
    rate: int = 10,
    size: tuple[int, int] = (64, 48),
    sound_seconds: float = 0.0,
    sound_start: float = 0.0,
    last: float | None = None,
) -> bytes:
    """Frames each of one grey level."""
    frames = [np.full((size[1], size[0], 3), level, np.uint8) for level in levels]
    return film_of(kind, codec, frames, rate, sound_seconds, sound_start, last=last)


def levels_of(frames: tuple[npt.NDArray[np.uint8], ...]) -> list[int]:
    return [round(float(frame.mean())) for frame in frames]


@pytest.mark.parametrize(("kind", "codec"), SOUND)
@pytest.mark.parametrize("channels", [1, 2])
def test_a_tone_stays_the_same_tone_at_the_models_rate(
    kind: str, codec: str, channels: int
) -> None:
    data = sound(kind, codec, channels=channels)
    assert container_of(data) is not None
    decoded = decode_audio(data, 16_000)
    assert decoded.dtype == np.float32
    assert len(decoded) == pytest.approx(16_000, abs=1_100)
    assert pitch_of(decoded, 16_000) == pytest.approx(440, abs=3)
    inner = decoded[2_000:-2_000]
    assert np.sqrt(np.mean(inner**2)) == pytest.approx(0.5 / np.sqrt(2), abs=0.03)


def test_what_loses_nothing_is_what_it_was() -> None:
    samples = tone(16_000, 0.7)
    decoded = decode_audio(sound("matroska", "flac", 16_000, 0.7), 16_000)
    np.testing.assert_allclose(decoded, samples, atol=1 / 32_768)


@pytest.mark.parametrize(
    ("kind", "codec", "options"),
    [
        ("webm", "libopus", {"live": "1"}),
        ("matroska", "aac", {}),
        ("mp4", "aac", {"movflags": "frag_keyframe+empty_moov", "frag_duration": "200000"}),
    ],
)
def test_what_a_browser_records_says_no_length_and_is_taken(
    kind: str, codec: str, options: dict[str, str]
) -> None:
    data = sound(kind, codec, seconds=3.0, out=Pipe(), options=options)
    decoded = decode_audio(data, 16_000)
    assert len(decoded) == pytest.approx(48_000, abs=1_100)
    half = attempt(lambda: decode_audio(data[: len(data) // 2], 16_000))
    if kind == "mp4":
        # A fragment says how long it is, where it is not cut between two.
        assert isinstance(half, RequestError)
    else:
        assert not isinstance(half, RequestError)
        assert 16_000 < len(half) < 32_000


def test_a_films_sound_is_a_recording() -> None:
    data = film("mp4", "libx264", [100] * 10, sound_seconds=1.0)
    decoded = decode_audio(data, 16_000)
    assert pitch_of(decoded, 16_000) == pytest.approx(440, abs=3)


@pytest.mark.parametrize(("kind", "codec"), FILMS)
def test_frames_are_those_on_show_at_the_rate_that_is_asked_for(kind: str, codec: str) -> None:
    levels = [*range(20, 220, 10)]
    data = film(kind, codec, levels, rate=10)
    taken = decode_video([data], None, LIMITS)
    assert taken.fps == 2.0
    assert [frame.shape for frame in taken.frames] == [(48, 64, 3)] * 4
    for found, wanted in zip(levels_of(taken.frames), levels[::5], strict=True):
        assert abs(found - wanted) < 6
    every = levels_of(decode_video([data], 10.0, LIMITS).frames)
    assert len(every) == len(levels)
    # More a second than there are: each stands as long as it is shown.
    twice = levels_of(decode_video([data], 20.0, LIMITS).frames)
    assert twice == [level for level in every for _ in range(2)]
    assert len(decode_video([data], 0.01, LIMITS).frames) == 1


ONE = 1 << 16
LAID: dict[str, tuple[tuple[int, ...], Callable[[Pixels], Pixels]]] = {
    "as it is": ((ONE, 0, 0, ONE), lambda pixels: pixels),
    "a quarter": ((0, ONE, -ONE, 0), lambda pixels: np.rot90(pixels, -1)),
    "a half": ((-ONE, 0, 0, -ONE), lambda pixels: np.rot90(pixels, 2)),
    "back": ((0, -ONE, ONE, 0), np.rot90),
    "mirrored": ((-ONE, 0, 0, ONE), lambda pixels: pixels[:, ::-1]),
    "upside down": ((ONE, 0, 0, -ONE), lambda pixels: pixels[::-1]),
    "mirrored, a quarter": ((0, -ONE, -ONE, 0), lambda pixels: np.rot90(pixels[:, ::-1], -1)),
    "askew": ((ONE * 9 // 10, ONE // 3, -ONE // 3, ONE * 9 // 10), lambda pixels: pixels),
    "nothing": ((0, 0, 0, 0), lambda pixels: pixels),
}
"""A note of how to lay a film, 16.16 fixed point, and what it does to a picture."""


@pytest.mark.parametrize("how", LAID)
def test_a_film_is_laid_upright(how: str) -> None:
    corner = np.full((32, 64, 3), 20, np.uint8)
    corner[:16, :16] = 200
    data = film_of("mp4", "mpeg4", [corner, corner], rate=2)
    known = decode_video([data], 2.0, LIMITS).frames[0]
    assert known[8, 8].min() > 150 > 60 > known[24, 56].max()
    (a, b, c, d), turned = LAID[how]
    # The matrix in the track's header.
    plain, noted = (
        b"".join(
            n.to_bytes(4, "big", signed=True) for n in (*own[:2], 0, *own[2:], 0, 0, 0, 1 << 30)
        )
        for own in ((ONE, 0, 0, ONE), (a, b, c, d))
    )
    at = data.index(plain, data.index(b"tkhd"))
    found = decode_video([data[:at] + noted + data[at + 36 :]], 2.0, LIMITS).frames
    assert len(found) == 2
    assert np.array_equal(found[0], turned(known))


def test_pixels_that_are_not_square_are_made_so() -> None:
    half = np.zeros((48, 64, 3), np.uint8)
    half[:, 32:] = 200
    for aspect, shape in ((Fraction(2), (48, 128, 3)), (Fraction(2, 3), (72, 64, 3))):
        frames = decode_video(
            [film_of("mp4", "libx264", [half], aspect=aspect)], 1.0, LIMITS
        ).frames
        assert [frame.shape for frame in frames] == [shape]
        width = shape[1] // 2
        assert abs(float(frames[0][:, : width - 4].mean())) < 12
        assert abs(float(frames[0][:, width + 4 :].mean()) - 200) < 12


@pytest.mark.parametrize(
    ("data", "what", "message"),
    [
        (sound("mp4", "aac"), "video", "bytes of MP4: it has no video"),
        (film("webm", "libvpx-vp9", [1, 2]), "audio", "bytes of WebM: it has no audio"),
        (b"\x1aE\xdf\xa3" + bytes(500), "audio", "504 bytes of WebM: it cannot be decoded"),
        (b"\0\0\0\x20ftypM4A " + bytes(500), "audio", "512 bytes of MP4: it cannot be decoded"),
        (b"\0\0\0\x20ftypheic" + bytes(500), "video", "the film is no MP4, WebM or animation"),
        (b"\xff\xf1" + bytes(500), "audio", "502 bytes of AAC: it has no samples"),
        (sound("matroska", "pcm_s16le"), "audio", None),
        (
            sound("matroska", "ac3"),
            "audio",
            r"its audio is ac3, which is not decoded; send AAC, ALAC, .* or PCM$",
        ),
        (
            film("matroska", "ffv1", [3]),
            "video",
            r"is ffv1, which is not decoded; send AV1, .* or VP9$",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(data: bytes, what: str, message: str | None) -> None:
    def read() -> Any:
        return decode_audio(data, 16_000) if what == "audio" else decode_video([data], 1.0, LIMITS)

    if message is None:
        assert len(read())
        return
    with pytest.raises(RequestError, match=message) as caught:
        read()
    assert caught.value.code == f"invalid_{what}"


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "aac"), ("matroska", "flac")])
def test_a_recording_that_is_cut_off_is_refused(kind: str, codec: str) -> None:
    data = sound(kind, codec, seconds=4.0)
    for cut in range(0, len(data) * 4 // 5, len(data) // 50):
        with pytest.raises(RequestError) as caught:
            decode_audio(data[:cut], 16_000)
        assert caught.value.code == "invalid_audio"


def test_too_much_is_refused_with_what_may_be_asked_for() -> None:
    with pytest.raises(RequestError, match=r"the audio is 2\.\d s long; at most 1 s") as caught:
        decode_audio(sound("mp4", "aac", seconds=2.0), 16_000, MediaLimits(audio_seconds=1.0))
    assert caught.value.code == "media_too_large"
    data = film("mp4", "libx264", [9] * 40, rate=10)
    for limits, fps, message in (
        (MediaLimits(video_frames=7), 2.0, r"8 frames of 64 x 48 would be taken .* 2 a second"),
        (MediaLimits(request_pixels=64 * 48 * 7), 2.0, "at most 768 frames and 21504 pixels"),
        (MediaLimits(image_pixels=64 * 48 - 1), 2.0, "the film is 64 x 48; at most 3071 pixels"),
        (MediaLimits(image_side=63), 2.0, "63 a side"),
        (LIMITS, 1000.0, "4000 frames of 64 x 48"),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            decode_video([data], fps, limits)
        assert caught.value.code == "media_too_large"
    assert len(decode_video([data], 2.0, MediaLimits(video_frames=8)).frames) == 8


def attempt(read: Callable[[], ResultT]) -> ResultT | RequestError:
    """What is read, or why nothing is."""
    try:
        return read()
    except RequestError as error:
        return error


FILES = [sound("mp4", "aac"), sound("webm", "libopus"), film("mp4", "libx264", [5, 90, 200])]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    number=st.integers(0, len(FILES) - 1),
    places=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=30),
    keep=st.floats(0.1, 1),
)
def test_broken_files_are_read_or_refused(
    number: int, places: list[tuple[float, int]], keep: float
) -> None:
    data = bytearray(FILES[number][: int(len(FILES[number]) * keep)])
    for place, value in places:
        data[int(place * (len(data) - 1))] = value
    heard = attempt(lambda: decode_audio(bytes(data), 16_000))
    if isinstance(heard, RequestError):
        assert heard.code in {"invalid_audio", "media_too_large"}
    else:
        assert len(heard)
    seen = attempt(lambda: decode_video([bytes(data)], 5.0, MediaLimits(image_pixels=2**16)))
    if isinstance(seen, RequestError):
        assert seen.code in {"invalid_video", "invalid_image", "media_too_large"}
    else:
        assert all(one.shape == other.shape for one, other in pairwise(seen.frames))


def test_without_the_extra_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RequestError, match=r"is MP4, .* pip install 'mstar-engine\[av\]'; or send"):
        decode_audio(FILES[0], 16_000)
    with pytest.raises(RequestError, match=r"the video is MP4.*or frames: data:video/jpeg"):
        decode_video([FILES[2]], None, LIMITS)


def pieces(
    kind: str, codec: str, starts: list[float], rate: int = 48_000, out: Any = None
) -> bytes:
    """Seconds of a tone that begin at these times."""
    out = io.BytesIO() if out is None else out
    with av.open(out, "w", format=kind) as file:
        stream = file.add_stream(codec, rate=rate, layout="mono")
        context = stream.codec_context
        size = context.frame_size or 1024
        for start in starts:
            samples = tone(rate, 1.0)
            for at in range(0, len(samples) // size * size, size):
                part = np.ascontiguousarray(samples[None, at : at + size])
                frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
                frame.sample_rate = rate
                (frame,) = av.AudioResampler(context.format, "mono", rate).resample(frame)
                frame.pts, frame.time_base = int(start * rate) + at, Fraction(1, rate)
                file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    data: bytes = out.getvalue()
    return data


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "aac"), ("webm", "libopus"), ("matroska", "flac")]
)
@pytest.mark.parametrize("starts", [[0.0, 3.0], [0.0, 1.0, 5.0], [2.0], [1000.0, 1003.5]])
@pytest.mark.parametrize("is_piped", [False, True])
def test_pauses_in_a_recording_are_silent_and_take_their_time(
    kind: str, codec: str, starts: list[float], is_piped: bool
) -> None:
    if is_piped and kind == "mp4":
        kind = "matroska"
    decoded = decode_audio(pieces(kind, codec, starts, out=Pipe() if is_piped else None), 16_000)
    tenths = [
        float(np.abs(part).mean()) > 0.1
        for part in np.split(decoded, range(1600, len(decoded), 1600))
    ]
    expected = {round(10 * (start - starts[0])) + n for start in starts for n in range(9)}
    # Where a piece begins and ends a codec may be off by so much.
    for tenth in range(len(tenths) - 1):
        if tenth in expected and tenth - 1 in expected and tenth + 1 in expected:
            assert tenths[tenth], tenth
        if not expected & {tenth - 2, tenth - 1, tenth, tenth + 1}:
            assert not tenths[tenth], tenth
    assert len(decoded) / 16_000 == pytest.approx(starts[-1] - starts[0] + 1, abs=0.1)


@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_a_pause_of_hours_is_refused_before_it_is_made(kind: str) -> None:
    data = pieces(kind, {"mp4": "aac", "webm": "libopus"}[kind], [0.0, 4e4])
    with pytest.raises(RequestError, match=r"the audio is 4000\d\.\d s long") as caught:
        decode_audio(data, 16_000)
    assert caught.value.code == "media_too_large"
    live = pieces("matroska", "flac", [0.0, 4e4], out=Pipe())
    with pytest.raises(RequestError, match=r"the audio is \d+\.\d s long; at most 100 s"):
        decode_audio(live, 16_000, MediaLimits(audio_seconds=100))


@pytest.mark.parametrize("layout", ["3.0", "5.1", "7.1", "hexadecagonal"])
@pytest.mark.parametrize("codec", ["pcm_s16le", "flac"])
def test_any_number_of_channels_is_mixed(layout: str, codec: str) -> None:
    channels = av.AudioLayout(layout).nb_channels
    if codec == "flac" and channels > 8:
        codec = "pcm_f32le"
    samples = tone(16_000, 0.5)
    kind = {"pcm_f32le": "flt"}.get(codec, "s16")
    values = np.repeat(samples, channels)[None]
    if kind == "s16":
        values = np.round(values * 32_767).astype(np.int16)
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file:
        stream = file.add_stream(codec, rate=16_000, layout=layout)
        size = stream.codec_context.frame_size or 1024
        for at in range(0, len(samples), size):
            part = np.ascontiguousarray(values[:, at * channels : (at + size) * channels])
            frame = av.AudioFrame.from_ndarray(part, format=kind, layout=layout)
            frame.sample_rate, frame.pts, frame.time_base = 16_000, at, Fraction(1, 16_000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    np.testing.assert_allclose(decode_audio(out.getvalue(), 16_000), samples, atol=1e-4)


def test_sound_that_changes_within_a_file_is_refused() -> None:
    first, other, wide = (
        sound("adts", "aac", rate, channels=channels)
        for rate, channels in ((16_000, 1), (44_100, 1), (16_000, 2))
    )
    assert len(decode_audio(first + first, 16_000)) > 32_000
    with pytest.raises(RequestError, match=r"16000 samples a second .* at first, 44100"):
        decode_audio(first + other, 16_000)
    with pytest.raises(RequestError, match="and 1 channels at first, 16000 and 2 later"):
        decode_audio(first + wide, 16_000)


@pytest.mark.parametrize(
    "tag", [b"ID3\x04\0\0\0\0\1\0" + bytes(128), b"ID3\x04\0\x10\0\0\1\0" + bytes(138)]
)
def test_a_tag_before_a_recording_is_passed_by(tag: bytes) -> None:
    data = sound("adts", "aac", 16_000)
    assert container_of(tag + data) == "AAC"
    assert np.array_equal(decode_audio(tag + data, 16_000), decode_audio(data, 16_000))
    assert container_of(tag + b"\xff\xfb") is container_of(tag) is container_of(tag[:9]) is None


@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_a_film_that_is_cut_off_is_refused(kind: str) -> None:
    data = film(kind, {"mp4": "libx264", "webm": "libvpx-vp9"}[kind], [*range(100)], rate=25)
    assert len(decode_video([data], 2.0, LIMITS).frames) == 8
    for share in (0.3, 0.5, 0.8):
        with pytest.raises(RequestError, match=r"cut off|cannot be decoded") as caught:
            decode_video([data[: int(share * len(data))]], 2.0, LIMITS)
        assert caught.value.code == "invalid_video"


@pytest.mark.parametrize("count", [10**7, 2**25, 2**29])
def test_a_header_that_asks_for_gigabytes_gets_none(count: int, tmp_path: Path) -> None:
    """Counts of samples that are not there."""
    data = bytearray(sound("mp4", "aac", seconds=0.1))
    for name, offset, numbers in (
        (b"stsz", 8, (1, count)),
        (b"stts", 12, (count,)),
        (b"stsc", 16, (count,)),
    ):
        at = data.index(name) + offset
        data[at : at + 4 * len(numbers)] = b"".join(n.to_bytes(4, "big") for n in numbers)
    path = tmp_path / "lies.m4a"
    path.write_bytes(data)
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from mstar.errors import RequestError\n"
        "from mstar.preprocess.media.audio import decode_audio\n"
        "try: decode_audio(Path(sys.argv[1]).read_bytes(), 16_000)\n"
        "except RequestError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert len(said) == 2
    assert re.search("no samples|cannot be decoded|MiB of memory", said[0])
    assert int(said[1]) < containers._MEMORY_BYTES["audio"] >> 10


def test_what_takes_too_long_to_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    # Hours of silence in a few megabytes.
    data = contained(np.zeros((1, 48_000), np.float32), 48_000, "adts", "aac") * 20_000
    monkeypatch.setattr(containers, "_PROCESSOR_SECONDS", {"audio": (1, 0)})
    with pytest.raises(
        RequestError, match=r"FFmpeg died of it \(signal \d+\); it may take 1 s"
    ) as caught:
        decode_audio(data, 16_000, MediaLimits(audio_seconds=1e6))
    assert caught.value.code == "invalid_audio"


def test_a_reader_that_dies_is_told_from_the_end_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "dies.py"
    monkeypatch.setattr(containers, "_PROGRAM", program)
    head = b'{"rate": 16000, "channels": 1, "seconds": 9.0}\n'
    for said in (b"", head[:9], head, head + bytes(4 * 3), head + bytes(2**21 + 3)):
        (tmp_path / "said").write_bytes(said)
        program.write_text(
            "import os, sys\n"
            f"sys.stdout.buffer.write(open({str(tmp_path / 'said')!r}, 'rb').read())\n"
            "sys.stdout.buffer.flush()\n"
            "os.kill(os.getpid(), 11)\n"
        )
        with pytest.raises(RequestError, match=r"died of it \(signal 11\)"):
            decode_audio(FILES[0], 16_000)


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "libx264"), ("webm", "libvpx"), ("matroska", "libx264")]
)
def test_the_last_frame_stands_as_long_as_the_file_says(kind: str, codec: str) -> None:
    data = film(kind, codec, [20, 80, 140, 200], rate=1, last=5.0)
    levels = levels_of(decode_video([data], 1.0, LIMITS).frames)
    assert len(levels) == 8
    assert levels[3:] == [levels[3]] * 5
    assert abs(levels[3] - 200) < 6


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "libx264"), ("webm", "libvpx")])
def test_sound_and_film_of_a_file_each_have_their_own_length(kind: str, codec: str) -> None:
    data = film(kind, codec, [50] * 20, sound_seconds=40.0)
    assert len(decode_video([data], 2.0, MediaLimits(video_frames=4)).frames) == 4
    data = film(kind, codec, [50] * 20, rate=1, sound_seconds=1.0)
    decoded = decode_audio(data, 16_000, MediaLimits(audio_seconds=1.2))
    assert len(decoded) == pytest.approx(16_000, abs=1_100)


@pytest.mark.parametrize("kind", ["mp4", "matroska"])
def test_every_cut_of_a_film_with_sound_is_told(kind: str) -> None:
    data = film(kind, "libx264", [*range(0, 200, 10)], sound_seconds=2.0)
    for cut in range(64, len(data), len(data) // 40):
        for read in (
            lambda part: decode_audio(part, 16_000),
            lambda part: decode_video([part], 2.0, LIMITS),
        ):
            with pytest.raises(
                RequestError, match=rf"is cut off: .* {cut} are there; send the whole"
            ):
                read(data[:cut])


def test_what_stands_behind_a_file_does_not_matter() -> None:
    mp4, webm = FILES[0], FILES[1]
    tag = b"TAGA title of a song".ljust(128, b"\0")
    for data in (mp4, webm):
        known = decode_audio(data, 16_000)
        for behind in (
            bytes(3),
            bytes(40),
            b"\xff" * 40,
            tag,
            b"APETAGEX" + bytes(32),
            b"\r\n--x--",
        ):
            assert np.array_equal(decode_audio(data + behind, 16_000), known)


def test_sizes_are_read_in_all_their_forms() -> None:
    mp4, webm = FILES[0], FILES[1]
    at = mp4.index(b"\0\0\0\x08free") + 4
    (size,) = struct.unpack_from(">I", mp4, at + 4)
    wide = mp4[: at - 4] + struct.pack(">I4sQ", 1, b"mdat", size + 8) + mp4[at + 12 :]
    nameless = mp4.replace(b"ftyp", b"skip", 1)
    segment = webm.index(b"\x18\x53\x80\x67")
    padded = webm[:segment] + b"\xec\x84" + bytes(4) + b"\xbf\x84" + bytes(4) + webm[segment:]
    for data, plain in ((wide, mp4), (nameless, mp4), (padded, webm)):
        kind = container_of(data)
        assert kind is not None
        assert size_of(data, kind) == size_of(data[:-1], kind) == len(data)
        assert np.array_equal(decode_audio(data, 16_000), decode_audio(plain, 16_000))
    twice = webm + webm
    assert size_of(twice, "WebM") == size_of(twice[:-1], "WebM") == len(twice)
    for odd in (struct.pack(">I4sQ", 1, b"mdat", 15), struct.pack(">I4s", 7, b"mdat"), bytes(8)):
        assert size_of(mp4 + odd, "MP4") == len(mp4)
    assert size_of(b"\x1aE\xdf\xa3", "WebM") == 0


def test_headers_of_nothing_are_not_read_to_their_end() -> None:
    boxes, voids = b"\0\0\0\x08free" * (_MAX_BOXES + 9), b"\xec\x80" * (_MAX_ELEMENTS - 1)
    assert size_of(boxes, "MP4") == 8 * _MAX_BOXES
    segment = b"\x18\x53\x80\x67\x84" + bytes(4)
    assert size_of(voids + segment, "WebM") == len(voids + segment)
    assert size_of(b"\xec\x80" + voids + segment, "WebM") == 0


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "libx264"), ("matroska", "libx264"), ("webm", "libvpx")]
)
@pytest.mark.parametrize("start", [0.5, 2.0, 4.5])
def test_sound_that_begins_behind_a_film_is_heard_when_it_is(
    kind: str, codec: str, start: float
) -> None:
    data = film(kind, codec, [50] * 60, sound_seconds=1.0, sound_start=start)
    decoded = decode_audio(data, 16_000)
    heard = np.flatnonzero(np.abs(decoded) > 0.1)[0] / 16_000
    assert heard == pytest.approx(start, abs=0.05)
    assert len(decoded) / 16_000 == pytest.approx(start + 1, abs=0.1)


@pytest.mark.parametrize("kind", ["mp4", "matroska"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_film_of_a_few_frames_has_them_all(kind: str, count: int) -> None:
    levels = [40 * (n + 1) for n in range(count)]
    for data in (
        film(kind, "libx264", levels, rate=1),
        film(kind, "libx264", levels, rate=1, sound_seconds=0.5, sound_start=0.5),
    ):
        found = levels_of(decode_video([data], 1.0, LIMITS).frames)
        assert len(found) == count
        assert np.abs(np.subtract(found, levels)).max() < 6


def test_a_cover_is_no_film() -> None:
    picture = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 0, 0)).save(picture, "JPEG")
    out = io.BytesIO()
    with av.open(io.BytesIO(FILES[0])) as source, av.open(out, "w", format="mp4") as file:
        heard = file.add_stream_from_template(source.streams[0])
        cover = file.add_stream("mjpeg", rate=1)
        cover.width = cover.height = 32
        cover.pix_fmt = "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        file.start_encoding()
        packet = av.Packet(picture.getvalue())
        packet.stream, packet.pts, packet.dts = cover, 0, 0
        packet.time_base, packet.is_keyframe = Fraction(1, 90_000), True
        file.mux(packet)
        for own in source.demux():
            if own.dts is not None:
                own.stream = heard
                file.mux(own)
    assert len(decode_audio(out.getvalue(), 16_000)) == len(decode_audio(FILES[0], 16_000))
    with pytest.raises(RequestError, match=r"bytes of MP4: it has no video$"):
        decode_video([out.getvalue()], 1.0, LIMITS)


def test_the_first_stream_that_can_be_decoded_is_taken() -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file:
        streams = [file.add_stream(codec, rate=48_000, layout="mono") for codec in ("ac3", "aac")]
        for stream, seconds in zip(streams, (3.0, 1.0), strict=True):
            for packet in encoded(stream, tone(48_000, seconds)[None], 48_000):
                file.mux(packet)
    assert len(decode_audio(out.getvalue(), 16_000)) == pytest.approx(16_000, abs=1_100)


def test_frames_that_change_their_size_are_scaled_to_the_first() -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="webm") as file:
        parts = [
            film("webm", "libvpx", [level] * 2, rate=1, size=size)
            for level, size in ((60, (64, 48)), (180, (32, 24)))
        ]
        with av.open(io.BytesIO(parts[0])) as source:
            stream = file.add_stream_from_template(source.streams[0])
        for number, part in enumerate(parts):
            with av.open(io.BytesIO(part)) as source:
                for packet in source.demux():
                    if packet.size:
                        moved = av.Packet(bytes(packet))
                        moved.stream, moved.time_base = stream, Fraction(1, 1000)
                        moved.pts = moved.dts = packet.pts + 2000 * number
                        moved.is_keyframe, moved.duration = packet.is_keyframe, 1000
                        file.mux(moved)
    frames = decode_video([out.getvalue()], 1.0, LIMITS).frames
    assert {frame.shape for frame in frames} == {(48, 64, 3)}
    assert np.abs(np.subtract(levels_of(frames), [60, 60, 180, 180])).max() < 8


def test_no_other_file_is_read(tmp_path: Path) -> None:
    """A track may say that its samples are elsewhere."""
    elsewhere = tmp_path / "secret.raw"
    elsewhere.write_bytes(np.full(32_000, 16_000, "<i2").tobytes())
    data = bytearray(sound("mov", "pcm_s16le", 16_000))
    at = data.index(b"url ", data.index(b"dref"))
    path = f"file://{elsewhere}\0".encode()
    data[at - 4 : at + 8] = (12 + len(path)).to_bytes(4, "big") + b"url " + bytes(4) + path
    for name in (b"dref", b"dinf", b"minf", b"mdia", b"trak", b"moov"):
        place = data.index(name) - 4
        size = int.from_bytes(data[place : place + 4], "big") + len(path)
        data[place : place + 4] = size.to_bytes(4, "big")
    np.testing.assert_allclose(decode_audio(bytes(data), 16_000), tone(16_000, 1.0), atol=1e-4)


def test_a_reader_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "long.aac").write_bytes(sound("adts", "aac", 16_000) * 3000)
    code = (
        "import sys, time; from pathlib import Path\n"
        "from mstar.preprocess.media.containers import open_sound\n"
        "with open_sound(Path(sys.argv[1]).read_bytes(), 'AAC') as sound:\n"
        "    print(next(sound.blocks).shape, flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "long.aac")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith(b"(")
        (child,) = psutil.Process(parent.pid).children()
        # As one that computes does, it sees nothing of a pipe that is closed.
        child.suspend()
        parent.kill()
        parent.wait()
        child.wait(timeout=10)


def test_no_process_is_left_when_a_recording_is_refused() -> None:
    with pytest.raises(RequestError, match="at most 1 s"):
        decode_audio(
            pieces("matroska", "flac", [0.0, 900.0], out=Pipe()),
            16_000,
            MediaLimits(audio_seconds=1),
        )
    own = psutil.Process().children()
    assert not [one for one in own if "ffmpeg.py" in " ".join(one.cmdline())]


@pytest.mark.parametrize(
    "settings", ["PYTHONVERBOSE", "PYTHONMALLOCSTATS", "PYTHONPROFILEIMPORTTIME"]
)
def test_settings_of_the_interpreter_stay_out_of_it(
    settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings, "1")
    (tmp_path / "json.py").write_text("raise ImportError")
    (tmp_path / "av.py").write_text("raise ImportError")
    monkeypatch.chdir(tmp_path)
    assert len(decode_audio(FILES[0], 16_000))
    with pytest.raises(RequestError, match=r"bytes of MP4: it has no video$"):
        decode_video([FILES[0]], 1.0, LIMITS)


def test_a_reader_that_is_broken_is_not_the_files_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "broken.py"
    program.write_text("raise KeyError('mine')")
    monkeypatch.setattr(containers, "_PROGRAM", program)
    with pytest.raises(RuntimeError, match=r"(?s)of MP4 ended with 1: .*KeyError: 'mine'"):
        decode_audio(FILES[0], 16_000)


def test_other_films_are_refused_as_films() -> None:
    avi = b"RIFF\x40\0\0\0AVI LIST" + bytes(60)
    with pytest.raises(RequestError, match="no MP4, WebM or animation that can be read") as caught:
        decode_video([avi], None, LIMITS)
    assert caught.value.code == "invalid_video"
