import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mstar.errors import WeightsError
from mstar.models.weights import folder_tensors, read_json

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.weight": torch.arange(6).to(torch.bfloat16).view(2, 3),
    "c": torch.tensor([True, False]),
}


def _write(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _shards(folder: Path) -> None:
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "m-1.safetensors")
    save_file({k: TENSORS[k] for k in ("b.weight", "c")}, folder / "m-2.safetensors")
    weight_map = {k: f"m-{1 if k == 'a.weight' else 2}.safetensors" for k in TENSORS}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors", None])
def test_tensors_come_back_as_written(tmp_path: Path, name: str | None) -> None:
    if name is None:
        _shards(tmp_path)
    else:
        save_file(TENSORS, tmp_path / name)
    found = folder_tensors(tmp_path)
    assert set(found) == set(TENSORS)
    for key, expected in TENSORS.items():
        value = found[key].load()
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)
        assert found[key].shape == tuple(expected.shape)
        assert found[key].nbytes == expected.nbytes


@pytest.mark.parametrize("size", [0, 4, 20, -1])
def test_truncated_file_is_refused_before_anything_is_loaded(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    with pytest.raises(WeightsError, match=r"model\.safetensors: truncated"):
        folder_tensors(tmp_path)


def test_truncated_data_names_the_tensor_and_both_sizes(tmp_path: Path) -> None:
    header = {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    _write(tmp_path / "model.safetensors", header, bytes(15))
    with pytest.raises(WeightsError, match=r"truncated: tensor 'x' ends at byte 16.* 15"):
        folder_tensors(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02}q\x00" * 9, "not a safetensors file"),
        (struct.pack("<Q", 4) + b"{{{{", "header is not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 3) + b'"\xff"', "header is not JSON"),
    ],
)
def test_garbage_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(WeightsError, match=message):
        folder_tensors(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 16]},
        {"dtype": "BF16", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [0], "data_offsets": [8, 4]},
    ],
)
def test_size_that_does_not_fit_dtype_and_shape_is_refused(
    tmp_path: Path, entry: dict[str, Any]
) -> None:
    _write(tmp_path / "model.safetensors", {"x": entry}, bytes(16))
    with pytest.raises(WeightsError, match=r"tensor 'x' of .* takes \d+ bytes"):
        folder_tensors(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        7,
    ],
)
def test_broken_entry_names_the_tensor(tmp_path: Path, entry: object) -> None:
    _write(tmp_path / "model.safetensors", {"x": entry}, bytes(16))
    with pytest.raises(WeightsError, match="entry of tensor 'x' is broken"):
        folder_tensors(tmp_path)


def test_gaps_in_the_data_are_refused_when_the_tensor_is_read(tmp_path: Path) -> None:
    header = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}
    _write(tmp_path / "model.safetensors", header, bytes(16))
    stored = folder_tensors(tmp_path)["x"]
    with pytest.raises(WeightsError, match="tensor 'x' cannot be read"):
        stored.load()


def test_missing_shard_is_named_with_what_it_held(tmp_path: Path) -> None:
    _shards(tmp_path)
    (tmp_path / "m-2.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"shard m-2\.safetensors is missing, with 2 of 3"):
        folder_tensors(tmp_path)


def test_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    _shards(tmp_path)
    save_file({"c": TENSORS["c"]}, tmp_path / "m-2.safetensors")
    with pytest.raises(WeightsError, match=r"m-2\.safetensors: tensor 'b\.weight' is missing"):
        folder_tensors(tmp_path)


@pytest.mark.parametrize("shard", ["../m.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_shard_outside_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    index = {"weight_map": {"a": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="not a plain file name"):
        folder_tensors(tmp_path)


def test_folder_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        folder_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is not read, convert it"):
        folder_tensors(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        save_file(TENSORS, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightsError, match="2 safetensors files and no"):
        folder_tensors(tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "not readable"), ("[]", "found list")])
def test_broken_json_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(WeightsError, match=r"has no config\.json"):
        read_json(path)
    path.write_text(text)
    with pytest.raises(WeightsError, match=message):
        read_json(path)
