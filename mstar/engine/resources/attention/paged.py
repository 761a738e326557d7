"""A compiled CPU kernel that reads the pages in place."""

import importlib
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.engine.resources.attention.base import (
    AttentionBackend,
    AttentionPlan,
    BackendPlan,
)
from mstar.engine.resources.attention.config import AttentionConfig
from mstar.engine.resources.kv.layout import KVLayout, KVPlan

PIECE_LEN = 64
"""New tokens of a segment that the kernel takes at once; more are cut into pieces."""

CALL_BYTES = 8 << 20
"""Partial results of one call, in bytes; a step with more is spread over several calls."""

_VECTOR = 16

_Int32 = npt.NDArray[np.int32]


LONG_PIECE_LEN = 16
"""New tokens from which a bfloat16 piece goes to the kernel of matrix products, if there is one."""


def _load_kernel(name: str = "_paged") -> ModuleType | None:
    """Return a compiled module, or ``None`` where it was not built.

    It is loaded after torch, so that the dynamic linker gives it torch's OpenMP runtime, and with
    it torch's threads.
    """
    try:
        return importlib.import_module(f"mstar.engine.resources.attention.{name}")
    except ImportError:
        return None


class Workspace:
    """Memory for the kernel's partial results, kept from step to step."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32)

    def reserve(self, num_floats: int) -> Tensor:
        """Return at least ``num_floats`` of float32; plans share it, since they run in turn."""
        if self._memory.numel() < num_floats:
            self._memory = torch.empty(num_floats, dtype=torch.float32)
        return self._memory


class _Short:
    """The pieces of segments that all are short, as far as they do not change from step to step.

    Args:
        kv_plan: A step of these segments.
        is_causal: One a segment.
    """

    __slots__ = ("_rest", "is_causal", "qo_lens")

    def __init__(self, kv_plan: KVPlan, is_causal: Sequence[bool]) -> None:
        self.qo_lens = kv_plan.qo_lens
        self.is_causal = is_causal
        self._rest = (
            kv_plan.qo_indptr[:-1],
            np.arange(len(kv_plan.qo_lens), dtype=np.int32),
            -np.asarray(is_causal, np.int32),
        )

    def pieces(self, kv_lens: _Int32) -> "_Pieces":
        """Return the pieces for streams of these lengths."""
        starts, every, ahead = self._rest
        return self.qo_lens, starts, kv_lens, every, ahead


class PagedPlan(BackendPlan):
    """A step as the kernel's arguments, made once for each distinct window and soft cap.

    Args:
        backend: Has the compiled module, the rules, and memory that its plans share.
        kv_plan: The step.
        pieces: Its segments, cut.
        flash: The compiled module for long pieces; ``None``: the other takes them, too.
    """

    _backend: "Backend"

    def __init__(
        self,
        backend: "Backend",
        kv_plan: KVPlan,
        pieces: "_Pieces",
        flash: ModuleType | None,
    ) -> None:
        super().__init__(backend, kv_plan)
        _check(kv_plan)
        self._kernel = backend.kernel
        config = self._config = backend.config
        self._shape = (int(kv_plan.qo_indptr[-1]), config.num_qo_heads, config.head_dim)
        self._pieces = pieces
        self._flash = flash
        self._long: _Pieces | None = None
        if flash is not None:
            is_long = pieces[0] >= LONG_PIECE_LEN
            self._long = _select(pieces, is_long)
            self._pieces = _select(pieces, ~is_long)
        # The kernel sees addresses only: what they point at lives as long as the plan.
        self._alive: list[object] = []
        self._calls: dict[tuple[int | None, float | None], list[tuple[int | float, ...]]] = {}

    def run(self, layer: int, query: Tensor) -> Tensor:
        """Attend in place, in one call unless the step is large."""
        plan, rules = self._kv_plan, self._config.layers[layer]
        assert query.shape == self._shape, f"query is {query.shape}, the step {self._shape}"
        assert query.dtype == plan.layout.dtype, f"{query.dtype} over {plan.layout.dtype}"
        query = query.contiguous()
        out = torch.empty_like(query)
        key = (rules.window, rules.soft_cap)
        calls = self._calls.get(key)
        if calls is None:
            calls = self._calls[key] = self._prepare(*key)
        tensors = (
            query.data_ptr(),
            plan.keys[layer].data_ptr(),
            plan.values[layer].data_ptr(),
            out.data_ptr(),
        )
        for arguments in calls:
            self._kernel.attend(*arguments, *tensors)
        if self._long is not None and len(self._long[0]):
            self._attend_long(self._long, tensors, rules.window or 0, rules.soft_cap or 0.0)
        return out

    def _attend_long(
        self,
        pieces: "_Pieces",
        tensors: tuple[int, int, int, int],
        window: int,
        soft_cap: float,
    ) -> None:
        plan, config = self._kv_plan, self._config
        assert self._flash is not None
        self._flash.attend(
            torch.get_num_threads(),
            len(pieces[0]),
            int(pieces[0].max()),
            *(array.ctypes.data for array in pieces),
            plan.page_table.ctypes.data,
            plan.page_table.shape[1],
            plan.layout.page_size,
            config.num_qo_heads,
            config.num_kv_heads,
            config.head_dim,
            window,
            *tensors,
            config.scale,
            soft_cap,
        )

    def _prepare(self, window: int | None, soft_cap: float | None) -> list[tuple[int | float, ...]]:
        """Return the calls of one rule, a tuple of leading arguments each."""
        qo_lens, _, kv_lens, _, ahead = self._pieces
        chunk: int = self._kernel.CHUNK
        first = np.zeros_like(kv_lens)
        if window is not None:
            first = np.maximum(kv_lens - qo_lens + 1 - window, 0)
        first_chunk = (first // chunk).astype(np.int32)
        last = kv_lens + np.maximum(ahead, 0)
        num_chunks = (-(-last // chunk) - first_chunk).astype(np.int64)
        num_rows = num_chunks * qo_lens * self._config.num_qo_heads
        budget = CALL_BYTES // (4 * (self._config.head_dim + self._kernel.PAD))
        calls, begin, total = [], 0, 0
        for end, rows in enumerate(num_rows.tolist()):
            if total and total + rows > budget:
                calls.append(slice(begin, end))
                begin, total = end, 0
            total += rows
        if total:
            calls.append(slice(begin, len(num_rows)))
        return [
            self._arguments(
                first_chunk[some], num_chunks[some], some, (window or 0, soft_cap or 0.0)
            )
            for some in calls
        ]

    def _arguments(
        self,
        first_chunk: _Int32,
        num_chunks: npt.NDArray[np.int64],
        some: slice,
        rule: tuple[int, float],
    ) -> tuple[int | float, ...]:
        """Return what one call is told besides the layer's tensors, in the kernel's order."""
        plan, config = self._kv_plan, self._config
        stride = config.head_dim + self._kernel.PAD
        pieces = [array[some] for array in self._pieces]
        num_rows = num_chunks * pieces[0] * config.num_qo_heads
        partial = self._backend.workspace.reserve(int(num_rows.sum()) * stride)
        row_indptr = num_rows.cumsum() - num_rows
        chunk_indptr = np.zeros(len(num_chunks) + 1, np.int64)
        num_chunks.cumsum(out=chunk_indptr[1:])
        arrays = (chunk_indptr, row_indptr, first_chunk, *pieces, plan.page_table)
        self._alive += [partial, *arrays]
        return (
            self._backend.level,
            torch.get_num_threads(),
            partial.data_ptr(),
            *(array.ctypes.data for array in arrays),
            len(num_rows),
            plan.page_table.shape[1],
            plan.layout.page_size,
            config.num_qo_heads,
            config.num_kv_heads,
            config.head_dim,
            rule[0],
            int(plan.layout.dtype == torch.bfloat16),
            config.scale,
            rule[1],
        )


_Pieces = tuple[_Int32, _Int32, _Int32, _Int32, _Int32]
"""Each array has one number a piece: new tokens, the first of them among all of the step, slots up
to the last of them, segment, slots behind those that all of it sees (-1: it is causal)."""


def _select(pieces: _Pieces, which: npt.NDArray[np.bool_]) -> _Pieces:
    a, b, c, d, e = (np.ascontiguousarray(array[which]) for array in pieces)
    return a, b, c, d, e


def _cut(plan: KVPlan, is_causal: _Int32) -> _Pieces:
    """Return the pieces of all segments."""
    num_pieces = -(-plan.qo_lens // PIECE_LEN)
    segments = np.repeat(np.arange(len(num_pieces), dtype=np.int32), num_pieces)
    ordinal = (
        np.arange(len(segments), dtype=np.int32) - (num_pieces.cumsum() - num_pieces)[segments]
    )
    begin = ordinal * PIECE_LEN
    qo_lens = np.minimum(plan.qo_lens[segments] - begin, PIECE_LEN)
    behind = plan.qo_lens[segments] - begin - qo_lens
    arrays = (
        qo_lens,
        plan.qo_indptr[segments] + begin,
        plan.kv_lens[segments] - behind,
        segments,
        np.where(is_causal[segments], -1, behind),
    )
    a, b, c, d, e = (np.ascontiguousarray(array, np.int32) for array in arrays)
    return a, b, c, d, e


def _check(plan: KVPlan) -> None:
    """Assert what the kernel trusts: types, contiguity, and that no index leaves the cache."""
    for array in (plan.qo_lens, plan.qo_indptr, plan.kv_lens, plan.page_table):
        assert array.dtype == np.int32, f"an index array is {array.dtype}"
        assert array.flags.c_contiguous, f"an index array has strides {array.strides}"
    room = plan.page_table.shape[1] * plan.layout.page_size
    assert (plan.qo_lens <= plan.kv_lens).all(), f"{plan.qo_lens} new of {plan.kv_lens} slots"
    assert plan.kv_lens.max(initial=0) <= room, f"{plan.kv_lens} slots in pages for {room}"
    # Read without sign, a page below 0 is one far beyond the last.
    pages = plan.page_table.view(np.uint32)
    assert pages.max(initial=0) < plan.layout.num_pages, f"page {pages.max()} of {plan.layout}"


class Backend(AttentionBackend):
    """The compiled kernel.

    A row comes out the same to the last bit in any batch, in any cut of its stream into causal
    segments, and with any number of threads, at one level. Where the machine has AVX512-BF16 and
    no level is named, long bfloat16 pieces go to a second kernel that rounds otherwise: there the
    cut decides which of the two a row meets.

    Args:
        config: Heads, scale and per-layer rules.
        layout: Shape and dtype of the cache.
        level: Instruction set, from 0 up to what the machine has (2 AVX-512, 1 AVX2); ``None`` is
            the best.
    """

    def __init__(self, config: AttentionConfig, layout: KVLayout, level: int | None = None) -> None:
        super().__init__(config, layout)
        kernel = _load_kernel()
        assert kernel is not None, "a backend that refuses was built"
        self.kernel = kernel
        self.level: int = kernel.LEVEL if level is None else level
        assert 0 <= self.level <= kernel.LEVEL, f"level {level}, the machine has {kernel.LEVEL}"
        self.workspace = Workspace()
        self._short: _Short | None = None
        self._flash = None
        if level is None and layout.dtype == torch.bfloat16 and config.head_dim % 32 == 0:
            flash = _load_kernel("_flash")
            if flash is not None and flash.IS_SUPPORTED:
                self._flash = flash

    @classmethod
    def unsupported(cls, config: AttentionConfig, layout: KVLayout) -> list[str]:
        """Refuse other devices and dtypes, odd head sizes, and a package without the kernel."""
        reasons = []
        if _load_kernel() is None:
            reasons.append("compiled kernel missing: install a C compiler and reinstall")
        if layout.device.type != "cpu":
            reasons.append(f"the cache is on {layout.device}; the kernel runs on the CPU")
        if layout.dtype not in (torch.float32, torch.bfloat16):
            reasons.append(f"the cache's dtype is {layout.dtype}; it must be float32 or bfloat16")
        if config.head_dim % _VECTOR:
            reasons.append(f"head_dim is {config.head_dim}; it must be a multiple of {_VECTOR}")
        return reasons

    def plan(self, kv_plan: KVPlan, is_causal: Sequence[bool]) -> AttentionPlan:
        """Cut the segments into pieces; the kernel's calls are made when a layer first asks."""
        lens, short, flash = kv_plan.qo_lens, self._short, None
        if short is not None and short.qo_lens is lens and short.is_causal is is_causal:
            pieces = short.pieces(kv_plan.kv_lens)
        else:
            limit = LONG_PIECE_LEN if self._flash is not None else PIECE_LEN + 1
            if lens.min(initial=1) and lens.max(initial=0) < limit:
                self._short = short = _Short(kv_plan, is_causal)
                pieces = short.pieces(kv_plan.kv_lens)
            else:
                pieces, flash = _cut(kv_plan, np.asarray(is_causal, np.int32)), self._flash
        return PagedPlan(self, kv_plan, pieces, flash)
