import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from mstar.errors import UnsupportedError, WeightsError
from mstar.models.gguf import GGUFFile, StringArray

WriteGGUF = Callable[..., Path]


def test_header_agrees_with_the_format_owners_reader(write_gguf: WriteGGUF) -> None:
    path = write_gguf(packed=GGMLQuantizationType.Q8_0)
    ours, theirs = GGUFFile(path), GGUFReader(path)
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        value = ours.metadata[key]
        if isinstance(value, StringArray):
            assert ours.strings(key) == field.contents()
        elif isinstance(value, np.ndarray):
            assert value.tolist() == field.contents()
        else:
            assert value == field.contents()
    assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.offset == tensor.data_offset
        assert found.nbytes == tensor.n_bytes
        assert found.shape == tuple(tensor.shape.tolist())[::-1]
        assert (ours.raw(tensor.name) == tensor.data.view(np.uint8).reshape(-1)).all()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_values_agree_with_the_format_owners_dequantisation(
    write_gguf: WriteGGUF, kind: str
) -> None:
    type_ = GGMLQuantizationType[kind]
    path = write_gguf(packed=type_)
    ours = GGUFFile(path)
    for tensor in GGUFReader(path).tensors:
        expected = dequantize(tensor.data, tensor.tensor_type)
        found = ours.floats(tensor.name)
        assert found.dtype == np.float32
        assert (found == expected.reshape(found.shape)).all()


def test_dequantised_values_do_not_touch_the_file(write_gguf: WriteGGUF) -> None:
    path = write_gguf()
    before = path.read_bytes()
    file = GGUFFile(path)
    file.raw("token_embd.weight")[:] = 7
    assert path.read_bytes() == before


def test_file_cut_anywhere_is_refused_with_numbers(write_gguf: WriteGGUF, tmp_path: Path) -> None:
    data = write_gguf().read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(4, 2000, 37), len(data) // 2, len(data) - 40]:
        cut.write_bytes(data[:size])
        with pytest.raises(WeightsError, match=rf"cut\.gguf: truncated GGUF: .*{size}"):
            GGUFFile(cut)


def test_truncated_data_names_the_tensor(write_gguf: WriteGGUF) -> None:
    path = write_gguf()
    last = max(GGUFFile(path).tensors.values(), key=lambda t: t.offset)
    path.write_bytes(path.read_bytes()[: last.offset + last.nbytes - 1])
    with pytest.raises(WeightsError, match=f"tensor '{last.name}'.*{last.offset + last.nbytes}"):
        GGUFFile(path)


@pytest.mark.parametrize("data", [b"", b"GG", b"\x80\x02ckpt", b"PK\x03\x04" * 9])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="not a GGUF file"):
        GGUFFile(path)


@pytest.mark.parametrize(("version", "hint"), [(1, "version 1"), (3 << 24, "big-endian")])
def test_other_versions_are_refused(tmp_path: Path, version: int, hint: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(UnsupportedError, match=hint):
        GGUFFile(path)


def _file(*entries: bytes, num_keys: int = 0) -> bytes:
    num_tensors = len(entries) - num_keys
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + b"".join(entries)


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _tensor(name: bytes, dims: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    packed = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return _string(name) + packed + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (_file(_tensor(b"a", (1,) * 5, 0)), WeightsError, "5 dimensions"),
        (_file(_tensor(b"a", (4,), 99)), UnsupportedError, "'a' has the unknown type 99"),
        (_file(_tensor(b"a", (33,), 8)), WeightsError, "33 elements, no multiple of Q8_0's"),
        (_file(_tensor(b"a", (1 << 60,), 0)), WeightsError, "truncated GGUF: tensor 'a'"),
        (
            _file(_tensor(b"a", (0,), 0), _tensor(b"a", (0,), 0)) + bytes(32),
            WeightsError,
            "listed twice",
        ),
        (
            _file(_string(b"k") + struct.pack("<I", 77), num_keys=1),
            WeightsError,
            "'k' has the unknown value type 77",
        ),
        (
            _file(_string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 60), num_keys=1),
            WeightsError,
            "truncated GGUF: metadata 'k'",
        ),
        (
            _file(_string(b"k") + struct.pack("<IIQ", 9, 4, 1 << 60), num_keys=1),
            WeightsError,
            "truncated GGUF: metadata 'k'",
        ),
        (_file(_string(b"\xff") + bytes(8), num_keys=1), WeightsError, "not UTF-8"),
    ],
)
def test_garbage_headers_are_refused(
    tmp_path: Path, data: bytes, error: type[Exception], message: str
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(error, match=message):
        GGUFFile(path)


def test_values_of_the_wrong_kind_are_refused(write_gguf: WriteGGUF) -> None:
    file = GGUFFile(write_gguf())
    with pytest.raises(WeightsError, match="not a number"):
        file.number("tokenizer.ggml.model")
    with pytest.raises(WeightsError, match="not a string"):
        file.text("llama.block_count")
    with pytest.raises(WeightsError, match="not an array of strings"):
        file.strings("llama.block_count")
    assert file.number("none") is None
    assert file.text("none") is None
    assert file.strings("none") == []
