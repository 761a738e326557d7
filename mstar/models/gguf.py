"""Reading of GGUF files: header, metadata and where each tensor lies; knows no model and no torch.

::

    "GGUF" version num_tensors num_keys | key type value … | name dims type offset … | pad | data

All numbers are little-endian; a string is a 64-bit length and UTF-8 bytes.

Source:
    The GGUF specification of ggml (docs/gguf.md), versions 2 and 3.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from mstar.errors import UnsupportedError, WeightsError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_STRING = 8
_ARRAY = 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL = 7


@dataclass(frozen=True, slots=True)
class StringArray:
    """Where an array of strings lies in the file; long vocabularies are decoded on demand."""

    offset: int
    """First byte of the first string's length, from the start of the file."""
    count: int


Value = bool | int | float | str | npt.NDArray[np.generic] | StringArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """Where one tensor lies in the file and how it is stored."""

    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as torch has it."""
    type: GGMLQuantizationType
    offset: int
    """First byte, from the start of the file."""
    nbytes: int


class _Cursor:
    """A position in the header that never leaves the file."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.position = 0
        self.where = "header"

    def take(self, nbytes: int) -> bytes:
        end = self.position + nbytes
        if end > len(self.buffer):
            raise WeightsError(
                f"{self.path}: truncated GGUF: {self.where} needs bytes {self.position} to {end}, "
                f"the file has {len(self.buffer)}"
            )
        data = self.buffer[self.position : end]
        self.position = end
        return data

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        data = self.take(self.u64())
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self.path}: {self.where} is not UTF-8: {data[:40]!r}") from error

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        item = self.scalars(kind, 1)[0]
        return bool(item) if kind == _BOOL else item.item()

    def scalars(self, kind: int, count: int) -> npt.NDArray[np.generic]:
        if kind not in _SCALARS:
            raise WeightsError(f"{self.path}: {self.where} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(dtype.itemsize * count), dtype)

    def array(self) -> Value:
        kind, count = self.u32(), self.u64()
        if kind != _STRING:
            return self.scalars(kind, count)
        found = StringArray(self.position, count)
        buffer, position, unpack = self.buffer, self.position, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                position += 8 + unpack(buffer, position)[0]
        except (struct.error, ValueError, OverflowError):
            position = len(buffer) + 1
        self.take(position - self.position)
        return found


class GGUFFile:
    """An open GGUF file.

    Args:
        path: The file.

    Raises:
        WeightsError: If it is no GGUF file, or is truncated or inconsistent.
        UnsupportedError: If its version or a tensor's type is not known here.
        OSError: If it cannot be read.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
            if start != _MAGIC:
                raise WeightsError(
                    f"{path}: not a GGUF file: it begins with {start!r}, not {_MAGIC!r}"
                )
            # Copy on write makes the mapping writable for torch without ever touching the file.
            self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        cursor = _Cursor(path, self._buffer)
        cursor.take(len(_MAGIC))
        version = cursor.u32()
        if version not in _VERSIONS:
            hint = ", or the file is big-endian" if version & 0xFFFF == 0 else ""
            raise UnsupportedError(f"{path}: GGUF version {version}; 2 and 3 are read{hint}")
        num_tensors, num_keys = cursor.u64(), cursor.u64()
        metadata: dict[str, Value] = {}
        for index in range(num_keys):
            cursor.where = f"metadata entry {index} of {num_keys}"
            key = cursor.string()
            cursor.where = f"metadata {key!r:.80}"
            metadata[key] = cursor.value(cursor.u32())
        self.metadata = metadata
        self.tensors = self._read_tensors(cursor, num_tensors)

    def _read_tensors(self, cursor: _Cursor, num_tensors: int) -> dict[str, GGUFTensor]:
        entries = []
        for index in range(num_tensors):
            cursor.where = f"tensor entry {index} of {num_tensors}"
            name = cursor.string()
            cursor.where = f"entry of tensor {name!r:.80}"
            num_dims = cursor.u32()
            if num_dims > _MAX_DIMS:
                raise WeightsError(
                    f"{self.path}: tensor {name!r:.80} has {num_dims} dimensions; GGUF allows "
                    f"{_MAX_DIMS}"
                )
            shape = tuple(cursor.u64() for _ in range(num_dims))[::-1]
            entries.append((name, shape, cursor.u32(), cursor.u64()))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise WeightsError(f"{self.path}: general.alignment is {alignment!r:.40}")
        data_start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise WeightsError(f"{self.path}: tensor {name!r} is listed twice")
            tensors[name] = self._place(name, shape, kind, data_start + offset)
        return tensors

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        try:
            type_ = GGMLQuantizationType(kind)
        except ValueError:
            raise UnsupportedError(
                f"{self.path}: tensor {name!r} has the unknown type {kind}"
            ) from None
        block, block_nbytes = GGML_QUANT_SIZES[type_]
        if shape and shape[-1] % block:
            raise WeightsError(
                f"{self.path}: rows of tensor {name!r} have {shape[-1]} elements, no multiple of "
                f"{type_.name}'s block of {block}"
            )
        nbytes = prod(shape) // block * block_nbytes
        if offset + nbytes > len(self._buffer):
            raise WeightsError(
                f"{self.path}: truncated GGUF: tensor {name!r} {list(shape)} {type_.name} ends at "
                f"byte {offset + nbytes}, the file has {len(self._buffer)}"
            )
        return GGUFTensor(name=name, shape=shape, type=type_, offset=offset, nbytes=nbytes)

    def strings(self, key: str) -> list[str]:
        """Return an array of strings from the metadata; empty where the key is absent.

        Raises:
            WeightsError: If the value is something else, or is not UTF-8.
        """
        where = self.metadata.get(key)
        if where is None:
            return []
        if not isinstance(where, StringArray):
            raise WeightsError(f"{self.path}: metadata {key!r} is not an array of strings")
        buffer, position, unpack = self._buffer, where.offset, struct.Struct("<Q").unpack_from
        found = []
        try:
            for _ in range(where.count):
                start = position + 8
                position = start + unpack(buffer, position)[0]
                found.append(buffer[start:position].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise WeightsError(
                f"{self.path}: entry {len(found)} of {key!r} is not UTF-8"
            ) from error
        return found

    def text(self, key: str) -> str | None:
        """Return a string from the metadata; ``None`` where the key is absent.

        Raises:
            WeightsError: If the value is not a string.
        """
        value = self.metadata.get(key)
        if value is None or isinstance(value, str):
            return value
        raise WeightsError(f"{self.path}: metadata {key!r} is {value!r:.40}, not a string")

    def number(self, key: str) -> int | float | None:
        """Return a number from the metadata; ``None`` where the key is absent.

        Raises:
            WeightsError: If the value is not a number.
        """
        value = self.metadata.get(key)
        if value is None or isinstance(value, (int, float)):
            return value
        raise WeightsError(f"{self.path}: metadata {key!r} is not a number")

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a tensor's stored bytes, uint8 ``[nbytes]``, mapped and not read yet."""
        tensor = self.tensors[name]
        return np.frombuffer(self._buffer, np.uint8, tensor.nbytes, tensor.offset)

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor's values in float32, in its own shape, dequantised where it is packed.

        Raises:
            UnsupportedError: If the tensor's type cannot be dequantised.
        """
        tensor = self.tensors[name]
        raw = self.raw(name)
        if tensor.type is GGMLQuantizationType.Q8_0:
            return _dequantize_q8_0(raw).reshape(tensor.shape)
        block, block_nbytes = GGML_QUANT_SIZES[tensor.type]
        rows = raw.reshape(-1, tensor.shape[-1] // block * block_nbytes)
        try:
            values = dequantize(rows, tensor.type)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{self.path}: tensor {name!r} is stored as {tensor.type.name}", [str(error)]
            ) from error
        return np.asarray(values, np.float32).reshape(tensor.shape)


def _dequantize_q8_0(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the values of Q8_0 blocks: a float16 scale and 32 signed bytes each.

    The embedding table is stored so, and is most of a small model; in pieces that stay in the
    processor's cache this is several times faster than the package's general way.
    """
    blocks = raw.reshape(-1, 34)
    values = np.empty((len(blocks), 32), np.float32)
    piece = 4096
    for start in range(0, len(blocks), piece):
        part = blocks[start : start + piece]
        scale = np.ascontiguousarray(part[:, :2]).view("<f2").astype(np.float32)
        np.multiply(part[:, 2:].view(np.int8), scale, out=values[start : start + piece])
    return values.reshape(-1)
