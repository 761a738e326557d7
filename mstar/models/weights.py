"""Stored tensors of a checkpoint, and the safetensors files of a Hugging Face folder."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mstar.errors import WeightsError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8} | {
    f"{kind}{bits}": bits for kind in ("I", "U", "F") for bits in (16, 32, 64)
}
_BITS["BF16"] = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint, not read yet."""

    name: str
    """As Hugging Face names it."""
    shape: tuple[int, ...]
    nbytes: int
    """Bytes it takes in its file."""
    file: Path
    load: Callable[[], Tensor]
    """Reads it, on the CPU."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        WeightsError: If the file is missing, or holds anything else.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise WeightsError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a Hugging Face folder by name, headers read and checked, data not.

    Raises:
        WeightsError: If a file is missing, truncated or inconsistent; names file, tensor, the
            expected and the found value.
    """
    index = folder / _INDEX
    if not index.exists():
        return _file_tensors(_single_file(folder))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: has no weight_map")
    shards: dict[str, dict[str, StoredTensor]] = {}
    for shard in sorted({str(shard) for shard in weight_map.values()}):
        if Path(shard).name != shard:
            raise WeightsError(f"{index}: the shard {shard!r} is not a plain file name")
        path = folder / shard
        if not path.exists():
            missing = sum(1 for value in weight_map.values() if value == shard)
            raise WeightsError(
                f"{folder}: shard {shard} is missing, with {missing} of {len(weight_map)} tensors"
            )
        shards[shard] = _file_tensors(path)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise WeightsError(f"{folder / shard}: tensor {name!r} is missing; {_INDEX} lists it")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _single_file(folder: Path) -> Path:
    single = folder / _SINGLE
    if single.exists():
        return single
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise WeightsError(
            f"{folder} has {len(found)} safetensors files and no {_INDEX} that says how they go "
            "together"
        )
    others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    hint = f"; {others[0]} is not read, convert it to safetensors" if others else ""
    raise WeightsError(f"{folder} has no weights: neither {_SINGLE} nor {_INDEX}{hint}")


def _file_tensors(path: Path) -> dict[str, StoredTensor]:
    header, data_nbytes = _read_header(path)
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, nbytes = _check_entry(path, name, entry, data_nbytes)
        tensors[name] = StoredTensor(
            name=name, shape=shape, nbytes=nbytes, file=path, load=_loader(path, name)
        )
    return tensors


def _read_header(path: Path) -> tuple[Mapping[str, Any], int]:
    """Return the header of a safetensors file and how many bytes of data follow it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            raise WeightsError(
                f"{path}: truncated, or not a safetensors file: the header should end at byte "
                f"{8 + length}, the file has {size}"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise WeightsError(f"{path}: the safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: the safetensors header is not a JSON object")
    return header, size - 8 - length


def _check_entry(
    path: Path, name: str, entry: Mapping[str, Any], data_nbytes: int
) -> tuple[tuple[int, ...], int]:
    """Return the shape and size in bytes of one entry of a header."""
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{path}: the header's entry of tensor {name!r} is broken") from error
    if end > data_nbytes:
        raise WeightsError(
            f"{path}: truncated: tensor {name!r} ends at byte {end} of the data, the file holds "
            f"{data_nbytes}"
        )
    expected = prod(shape) * _BITS[dtype] // 8 if dtype in _BITS else end - begin
    if begin < 0 or end - begin != expected:
        raise WeightsError(
            f"{path}: tensor {name!r} of {dtype} {list(shape)} takes {expected} bytes, the header "
            f"gives it {end - begin}"
        )
    return shape, end - begin


def _loader(path: Path, name: str) -> Callable[[], Tensor]:
    def load() -> Tensor:
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise WeightsError(f"{path}: tensor {name!r} cannot be read: {error}") from error
        return tensor

    return load
