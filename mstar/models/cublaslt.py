"""cuBLASLt's products by a kernel of one's choice; torch takes the first that the library names.

Bound by ctypes to the library that torch has loaded. Source of functions and numbers: cublasLt.h
and NVIDIA's cuBLAS manual.
"""

import ctypes
import weakref
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_size_t, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {torch.bfloat16: 14, torch.float16: 2}
"""What is multiplied, as ``cudaDataType`` numbers it."""

_COMPUTE_32F, _R_32F = 68, 0
_TRANSPOSE, _SM_COUNT = 3, 15
"""Attributes of a product."""
_COLUMNS = 3
"""Attribute of a matrix."""
_WORKSPACE, _REDUCTIONS = 1, 3
"""Attributes of a preference."""
_TILE, _CUSTOM, _CLUSTER = 1, 5, 8
"""Attributes of an algorithm."""
_EXACT_REDUCTION = 2
"""Parts of a sum are added up in float32; 1 and 4 would do it in the dtype of the output."""
_WORKSPACE_NBYTES = 32 << 20
_MAX_OFFERS = 64
_ALIGNMENT = 256
"""Of addresses, in bytes, that the library counts on where nothing else is said."""


class _Preference(NamedTuple):
    """What the library is asked to consider; each finds other algorithms."""

    reductions: int = _EXACT_REDUCTION
    workspace: int = _WORKSPACE_NBYTES
    sm_count: int = 0
    """Processors to plan for; 0: the device's."""


_PLAIN = _Preference(reductions=0)
"""Nothing is split and added up afterwards."""
_PREFERENCES = (
    _Preference(),
    _PLAIN,
    _Preference(workspace=0),
    *(_Preference(sm_count=count) for count in (128, 112, 64)),
)
# Tiles of 224, 168 and 176 by 128: often the fastest of many rows, and not always offered.
_MORE = (
    {_TILE: 221, _CLUSTER: 5, _CUSTOM: 4},
    {_TILE: 197, _CLUSTER: 5, _CUSTOM: 2},
    {_TILE: 201, _CLUSTER: 5, _CUSTOM: 2},
)


class _Algo(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Offer(ctypes.Structure):
    _fields_ = (
        ("algo", _Algo),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Library:
    """The library, with memory that all of its kernels share.

    Args:
        device: The CUDA device; what runs there runs in the order of one stream.

    Raises:
        OSError: If it is not there, or does not work.
    """

    def __init__(self, device: torch.device) -> None:
        major = (torch.version.cuda or "").partition(".")[0]
        self.functions = ctypes.CDLL(f"libcublasLt.so.{major}")
        self.functions.cublasLtGetVersion.restype = c_size_t
        self.functions.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
        self.version = int(self.functions.cublasLtGetVersion())
        self.device = device
        self.workspace = torch.empty(_WORKSPACE_NBYTES, dtype=torch.uint8, device=device)
        with torch.cuda.device(device):
            self.handle = self.make(self, "cublasLt")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            OSError: If it fails.
        """
        status = getattr(self.functions, name)(*arguments)
        if status:
            raise OSError(f"{name} of libcublasLt {self.version} gave status {status}")

    def make(self, owner: object, kind: str, *arguments: Any) -> c_void_p:
        """Return a new object of the library, which lives as long as ``owner``."""
        made = c_void_p()
        self.call(f"{kind}Create", byref(made), *arguments)
        weakref.finalize(owner, getattr(self.functions, f"{kind}Destroy"), made).atexit = False
        return made


class Product:
    """Products ``x @ weight.T`` of one shape of weight, with any number of rows.

    Args:
        library: The library.
        out_features: Rows of the weight.
        in_features: Its columns.
        dtype: One of ``DTYPES``.
    """

    def __init__(
        self, library: Library, out_features: int, in_features: int, dtype: torch.dtype
    ) -> None:
        self.library = library
        self.out_features = out_features
        # The library counts along columns first, so that all is transposed: out.T = weight @ x.T
        self._made = library.make(self, "cublasLtMatmulDesc", _COMPUTE_32F, _R_32F)
        self._set("cublasLtMatmulDesc", self._made, _TRANSPOSE, c_int(1))

        def matrix(rows: int, columns: int) -> c_void_p:
            sizes = (c_uint64(rows), c_uint64(columns), c_uint64(rows))
            return library.make(self, "cublasLtMatrixLayout", DTYPES[dtype], *sizes)

        self._weight = matrix(in_features, out_features)
        self._x, self._out = matrix(in_features, 1), matrix(out_features, 1)
        self._num_rows = 1
        self._one, self._zero = c_float(1.0), c_float(0.0)

    def offers(self, num_rows: int) -> list[bytes]:
        """Return algorithms for so many rows, as 64 bytes that only this version understands."""
        self._size(num_rows)
        found: dict[bytes | None, None] = {
            algo: None for wanted in _PREFERENCES for algo in self._offers_of(wanted)
        }
        for plain in self._offers_of(_PLAIN)[:1]:
            found |= dict.fromkeys(self._changed(plain, changes) for changes in _MORE)
        return [algo for algo in found if algo is not None and self.accepts(algo, num_rows)]

    def _offers_of(self, preference: _Preference) -> list[bytes]:
        library = self.library
        kind = "cublasLtMatmulPreference"
        wanted = c_void_p()
        library.call(f"{kind}Create", byref(wanted))
        try:
            self._set(kind, wanted, _WORKSPACE, c_uint64(preference.workspace))
            self._set(kind, wanted, _REDUCTIONS, c_int(preference.reductions))
            self._set("cublasLtMatmulDesc", self._made, _SM_COUNT, c_int(preference.sm_count))
            found, count = (_Offer * _MAX_OFFERS)(), c_int()
            status = library.functions.cublasLtMatmulAlgoGetHeuristic(
                library.handle,
                *self._shapes(),
                wanted,
                _MAX_OFFERS,
                found,
                byref(count),
            )
        finally:
            self._set("cublasLtMatmulDesc", self._made, _SM_COUNT, c_int(0))
            library.call(f"{kind}Destroy", wanted)
        offers = [] if status else found[: count.value]
        return [bytes(o.algo) for o in offers if not o.state and o.workspace <= _WORKSPACE_NBYTES]

    def _changed(self, algo: bytes, changes: dict[int, int]) -> bytes | None:
        """Return an algorithm with other attributes; ``None``: there is no such."""
        changed = _Algo.from_buffer_copy(algo)
        for attribute, value in changes.items():
            number = ctypes.c_uint16(value) if attribute == _CLUSTER else ctypes.c_uint32(value)
            if self.library.functions.cublasLtMatmulAlgoConfigSetAttribute(
                byref(changed), attribute, byref(number), c_size_t(ctypes.sizeof(number))
            ):
                return None
        return bytes(changed)

    def accepts(self, algo: bytes, num_rows: int) -> bool:
        """Tell whether an algorithm is one for so many rows."""
        self._size(num_rows)
        own, offer, library = _Algo.from_buffer_copy(algo), _Offer(), self.library
        status = library.functions.cublasLtMatmulAlgoCheck(
            library.handle, *self._shapes(), byref(own), byref(offer)
        )
        return not status and not offer.state and offer.workspace <= _WORKSPACE_NBYTES

    def kernel(self, algo: bytes) -> Callable[[Tensor, Tensor, Tensor], bool]:
        """Return what writes a product by an algorithm.

        It takes ``x``, ``[num_rows, in_features]``, ``weight``, and where to write, all contiguous
        and of the dtype; it returns whether it did, which it does not where memory begins at odd
        addresses.
        """
        own = _Algo.from_buffer_copy(algo)
        library = self.library
        multiply = library.functions.cublasLtMatmul
        workspace = library.workspace.data_ptr()
        one, zero = byref(self._one), byref(self._zero)

        def run(x: Tensor, weight: Tensor, out: Tensor) -> bool:
            self._size(x.shape[0])
            made, a, b, c, _ = self._shapes()
            left, right, at = weight.data_ptr(), x.data_ptr(), out.data_ptr()
            if (left | right | at) % _ALIGNMENT:
                return False
            stream = torch.cuda.current_stream(x.device).cuda_stream
            # The library takes the device that is current, whatever the stream's.
            with torch.cuda.device(x.device):
                status: int = multiply(
                    library.handle,
                    made,
                    one,
                    left,
                    a,
                    right,
                    b,
                    zero,
                    at,
                    c,
                    at,
                    c,
                    byref(own),
                    workspace,
                    _WORKSPACE_NBYTES,
                    stream,
                )
            return not status

        return run

    def _shapes(self) -> tuple[c_void_p, ...]:
        return self._made, self._weight, self._x, self._out, self._out

    def _size(self, num_rows: int) -> None:
        if num_rows != self._num_rows:
            for matrix in (self._x, self._out):
                self._set("cublasLtMatrixLayout", matrix, _COLUMNS, c_uint64(num_rows))
            self._num_rows = num_rows

    def _set(self, kind: str, made: c_void_p, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self.library.call(f"{kind}SetAttribute", made, attribute, byref(value), size)
