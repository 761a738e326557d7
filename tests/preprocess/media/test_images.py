import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from mstar.errors import RequestError
from mstar.preprocess.media.images import decode_frames, decode_image, image_size, rgb_of
from mstar.preprocess.media.limits import MediaLimits

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (11, 17, 3), np.uint8)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def picture() -> Image.Image:
    return Image.fromarray(PIXELS)


FILES = {
    "png": encode(picture(), "PNG"),
    "interlaced png": encode(picture(), "PNG", interlace=1),
    "jpeg": encode(picture(), "JPEG"),
    "progressive jpeg": encode(picture(), "JPEG", progressive=True),
    "webp": encode(picture(), "WEBP", lossless=True),
    "gif": encode(picture(), "GIF"),
    "bmp": encode(picture(), "BMP"),
    "tiff": encode(picture(), "TIFF"),
    "packed tiff": encode(picture(), "TIFF", compression="tiff_lzw"),
}


def attempt(data: bytes) -> npt.NDArray[np.uint8] | RequestError:
    """The picture, or why there is none."""
    try:
        return decode_image(data)
    except RequestError as error:
        return error


LOSSLESS = ("png", "interlaced png", "webp", "bmp", "tiff", "packed tiff")


@pytest.mark.parametrize("name", LOSSLESS)
def test_pixels_come_out_as_they_went_in(name: str) -> None:
    decoded = decode_image(FILES[name])
    assert decoded.dtype == np.uint8
    assert decoded.flags.c_contiguous
    np.testing.assert_array_equal(decoded, PIXELS)
    assert image_size(FILES[name]) == (17, 11)


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_anywhere_is_refused_or_was_whole_already(name: str) -> None:
    data = FILES[name]
    whole = decode_image(data)
    for cut in range(len(data)):
        found = attempt(data[:cut])
        if isinstance(found, RequestError):
            assert found.code == "invalid_image"
        else:
            np.testing.assert_array_equal(found, whole)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(FILES)),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_broken_bytes_give_a_picture_or_a_refusal(
    name: str, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(FILES[name])
    for place, value in changes:
        data[place % len(data)] = value
    found = attempt(bytes(data))
    if isinstance(found, RequestError):
        assert found.code in ("invalid_image", "media_too_large")
        assert len(found.message) < 300
    else:
        assert found.dtype == np.uint8
        assert found.ndim == 3
        assert found.shape[2] == 3


@given(st.binary(max_size=64))
def test_any_bytes_are_refused_clearly(data: bytes) -> None:
    with pytest.raises(RequestError, match="image"):
        decode_image(data)


def test_nothing_is_no_image() -> None:
    with pytest.raises(RequestError, match="empty, 0 bytes"):
        decode_image(b"")


def _png(width: int, height: int, rows: bytes) -> bytes:
    """A PNG of one-bit grey, written by hand."""

    def chunk(name: bytes, body: bytes) -> bytes:
        crc = zlib.crc32(name + body)
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", crc)

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_an_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(RequestError):
        decode_image(_png(*size, zlib.compress(b"")))


def test_a_bomb_is_refused_by_its_header_and_takes_no_memory() -> None:
    """A file of a few kilobytes, 400 million pixels."""
    rows = zlib.compressobj(9)
    row = bytes(1 + 20_000 // 8)
    data = b"".join([rows.compress(row) for _ in range(20_000)]) + rows.flush()
    bomb = _png(20_000, 20_000, data)
    assert len(bomb) < 100_000
    before = psutil.Process().memory_info().rss
    with pytest.raises(RequestError, match="67108864 pixels") as caught:
        decode_image(bomb)
    assert caught.value.code == "media_too_large"
    assert psutil.Process().memory_info().rss - before < 16 * 2**20


def test_the_limit_is_the_deployments_and_the_message_says_both_sizes() -> None:
    limits = MediaLimits(image_pixels=17 * 11 - 1)
    with pytest.raises(RequestError, match=r"17 x 11, 187 pixels; at most 186 are taken"):
        decode_image(FILES["png"], limits)
    assert decode_image(FILES["png"], MediaLimits(image_pixels=187)).shape == (11, 17, 3)


@pytest.mark.parametrize("size", [(1, 2**26), (2**26, 1)])
def test_a_side_too_long_is_refused_by_its_header(size: tuple[int, int]) -> None:
    """Decoders keep eight bytes for each row, however short it is."""
    with pytest.raises(RequestError, match="a side may have at most 65536"):
        decode_image(_png(*size, zlib.compress(b"")))


def test_transparency_of_a_large_image_lies_on_white_without_seams() -> None:
    """More pixels than are laid on white together, in rows of no even share of them."""
    every = RNG.integers(0, 256, (1200, 1001, 4), np.uint8)
    image = Image.fromarray(every)
    whole = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    np.testing.assert_array_equal(rgb_of(image), np.asarray(whole))


@pytest.mark.parametrize("kind", ["GIF", "TIFF"])
def test_later_frames_of_another_size_are_refused_before_they_are_decoded(kind: str) -> None:
    small, large = Image.new("L", (1, 1)), Image.new("L", (7000, 7000))
    if kind == "TIFF":
        data = encode(small, "TIFF", save_all=True, append_images=[large], compression="tiff_lzw")
    else:
        # The screen is as small as the first frame; the second has a place of its own.
        head, body = encode(small, "GIF")[:-1], encode(large, "GIF")
        palette = 13 + 3 * 2 ** ((body[10] & 7) + 1)
        data = head + body[palette:]
    before = psutil.Process().memory_info().rss
    with pytest.raises(RequestError, match="frame 1 is 7000 x 7000, the first 1 x 1") as caught:
        decode_frames(data)
    assert caught.value.code == "invalid_video"
    assert psutil.Process().memory_info().rss - before < 16 * 2**20


def test_transparency_lies_on_white() -> None:
    clear = np.zeros((2, 2, 4), np.uint8)
    clear[0, 0] = (10, 20, 30, 255)
    clear[0, 1] = (0, 0, 0, 128)
    decoded = decode_image(encode(Image.fromarray(clear), "PNG"))
    assert decoded[0, 0].tolist() == [10, 20, 30]
    assert decoded[0, 1].tolist() == [127, 127, 127]
    assert decoded[1].tolist() == [[255] * 3, [255] * 3]


def test_a_palette_with_a_transparent_colour_lies_on_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([9, 8, 7, 200, 100, 50])
    image.putdata([0, 1])
    decoded = decode_image(encode(image, "PNG", transparency=0))
    assert decoded.tolist() == [[[255, 255, 255], [200, 100, 50]]]
    assert decode_image(encode(image, "PNG")).tolist() == [[[9, 8, 7], [200, 100, 50]]]


def test_sixteen_bits_become_eight() -> None:
    grey = np.array([[0, 255, 256, 65535, 32768]], np.uint16)
    decoded = decode_image(encode(Image.fromarray(grey), "PNG"))
    assert decoded.tolist() == [[[v] * 3 for v in (0, 0, 1, 255, 128)]]
    tiff = decode_image(encode(Image.fromarray(grey), "TIFF"))
    np.testing.assert_array_equal(tiff, decoded)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_without_a_known_range_are_refused(dtype: npt.DTypeLike) -> None:
    image = Image.fromarray(np.ones((2, 2), dtype))
    with pytest.raises(RequestError, match="32 bits, whose range is not known"):
        decode_image(encode(image, "TIFF"))


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_becomes_rgb(kind: str) -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    decoded = decode_image(encode(image, kind))
    assert decoded.shape == (16, 16, 3)
    red, green, blue = decoded[8, 8].tolist()
    assert red > 240
    assert green < 15
    assert blue < 15


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "YCbCr"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = Image.new("RGB", (3, 2), (255, 255, 255)).convert(mode)
    kind = "JPEG" if mode == "YCbCr" else "PNG"
    decoded = decode_image(encode(image, kind))
    assert decoded.shape == (2, 3, 3)
    assert decoded.min() >= 254


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_tags_are_obeyed(orientation: int) -> None:
    upright = PIXELS
    turned = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright.transpose(1, 0, 2)[::-1],
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: upright.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(turned))
    data = encode(image, "PNG", exif=exif)
    np.testing.assert_array_equal(decode_image(data), upright)


def test_broken_metadata_does_not_spoil_whole_pixels() -> None:
    data = encode(picture(), "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff nonsense")
    np.testing.assert_array_equal(decode_image(data), PIXELS)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame_and_its_frames_are_there_too(kind: str) -> None:
    frames = [Image.new("RGB", (8, 6), (shade, 0, 0)) for shade in (255, 128, 0)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(
        frames[0], kind, save_all=True, append_images=frames[1:], duration=200, loop=0, **options
    )
    np.testing.assert_array_equal(decode_image(data), np.asarray(frames[0]))
    decoded, fps = decode_frames(data)
    assert fps == pytest.approx(5.0)
    assert [int(frame[0, 0, 0]) for frame in decoded] == [255, 128, 0]
    with pytest.raises(RequestError, match="3 frames; at most 2 are taken"):
        decode_frames(data, MediaLimits(video_frames=2))
    with pytest.raises(RequestError, match="144 pixels in all; at most 100"):
        decode_frames(data, MediaLimits(request_pixels=100))


def test_a_still_picture_is_a_film_of_one_frame() -> None:
    frames, _ = decode_frames(FILES["png"])
    assert len(frames) == 1
    np.testing.assert_array_equal(frames[0], PIXELS)


def test_images_of_pil_are_taken_as_their_files_are() -> None:
    np.testing.assert_array_equal(rgb_of(picture()), PIXELS)
    with pytest.raises(RequestError, match="at most 3 are taken"):
        rgb_of(picture(), MediaLimits(image_pixels=3))
