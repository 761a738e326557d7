"""Array: a tensor as it crosses processes."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt


class Array(msgspec.Struct, frozen=True):
    """A tensor as it crosses processes."""

    dtype: str
    """Name of a numpy dtype; its byte order is the machine's."""
    shape: tuple[int, ...]
    data: bytes
    """Elements in C order."""

    def __repr__(self) -> str:
        return f"<Array {self.dtype}{list(self.shape)}>"


def to_numpy(array: Array) -> npt.NDArray[Any]:
    """Return its elements, read-only."""
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


def from_numpy(content: npt.NDArray[Any]) -> Array:
    """Return a numpy array as it crosses processes."""
    # The name of a dtype says nothing of its byte order: that of this machine.
    plain = np.ascontiguousarray(content, content.dtype.newbyteorder("="))
    return Array(plain.dtype.name, content.shape, plain.tobytes())
