"""FlashInfer's paged attention on CUDA devices, and a kernel of ours for recorded steps."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.engine.resources.attention.base import (
    AttentionBackend,
    AttentionPlan,
    BackendPlan,
)
from mstar.engine.resources.attention.config import AttentionConfig, LayerAttention
from mstar.engine.resources.attention.sdpa import SdpaPlan
from mstar.engine.resources.kv.layout import KVLayout, KVPlan
from mstar.engine.resources.mirror import Fence, Mirror, pinned, send

_HEAD_DIMS = (64, 128, 256)
_CAPABILITY = (8, 0)
_WORKSPACE_BYTES = 256 << 20
"""Room for partial results where long streams are split among processors."""
_TILE_ROWS = 128
"""Queries, those of the heads that share a key head together, that a program takes."""
_TENSOR_CORE_GROUP = 4
"""Query heads a key head from which decoding on matrix units is faster."""
_HOPPER = (9, 0)
_GATHER_FROM = 1024
"""Queries a segment from which its slots are worth copying to where they stand in a row."""
_GATHER_UP_TO = 1 << 16
"""Slots of all segments that are copied at most: they take memory that nobody set aside."""

_Int32 = npt.NDArray[np.int32]


@cache
def _load(name: str = "flashinfer") -> Any:
    """Return the library, or ``None`` where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@dataclass(frozen=True, slots=True)
class _Pages:
    """The pages of some segments; int32 on the CPU."""

    indptr: _Int32
    """``[B + 1]``: a segment's first page among all."""
    indices: _Int32
    last_page_len: _Int32
    """``[B]``: slots in use of each segment's last page."""

    @classmethod
    def of(cls, kv_lens: _Int32, page_table: _Int32, page_size: int) -> "_Pages":
        """Return the pages that ``kv_lens`` slots take, each segment having at least one."""
        counts = -(-kv_lens // page_size)
        indptr = np.zeros(len(counts) + 1, np.int32)
        counts.cumsum(out=indptr[1:])
        table = page_table[:, : int(counts.max())]
        # Boolean indexing reads row after row, which is the order that is wanted.
        indices = table[np.arange(table.shape[1]) < counts[:, None]]
        last_page_len = kv_lens - (counts - 1) * page_size
        return cls(indptr, indices, last_page_len.astype(np.int32))

    def tensors(self, device: torch.device) -> list[Tensor]:
        """Return the three as the library takes them, which copies them to ``device``."""
        return [pinned(own, device) for own in (self.indptr, self.indices, self.last_page_len)]

    def kv_lens(self, page_size: int) -> _Int32:
        """Return the slots in use of each segment."""
        return (np.diff(self.indptr) - 1) * page_size + self.last_page_len

    def slots(self, page_size: int) -> _Int32:
        """Return all slots in use, segment after segment, counted from the cache's first."""
        used = np.full(len(self.indices), page_size, np.int32)
        used[self.indptr[1:] - 1] = self.last_page_len
        place = np.arange(page_size, dtype=np.int32)
        slots: _Int32 = (self.indices[:, None] * page_size + place)[place < used[:, None]]
        return slots


@dataclass(frozen=True, slots=True)
class _Group:
    """Segments of one step that one kernel takes together."""

    kind: str
    """``decode``: one token each; ``causal``: more than one; ``full``: as many, not causal."""
    rows: slice | Tensor
    """Their new tokens among all ``T``."""
    qo_indptr: Tensor
    """int32 ``[B + 1]`` on the CPU, pinned: a segment's first token among the group's."""
    pages: _Pages
    segments: npt.NDArray[np.int64]
    """Their numbers in the step."""


def _groups(kv_plan: KVPlan, is_causal: Sequence[bool]) -> list[_Group]:
    qo_lens = kv_plan.qo_lens
    causal = np.asarray(is_causal, bool)
    members = {
        # A single token stands at the last slot, behind which there is nothing to see.
        "decode": qo_lens == 1,
        "causal": (qo_lens > 1) & causal,
        "full": (qo_lens > 1) & ~causal,
    }
    return [
        _group(kind, kv_plan, np.flatnonzero(own)) for kind, own in members.items() if own.any()
    ]


def _group(kind: str, kv_plan: KVPlan, segments: npt.NDArray[np.int64]) -> _Group:
    lens = kv_plan.qo_lens[segments]
    device = kv_plan.layout.device
    qo_indptr = np.zeros(len(segments) + 1, np.int32)
    lens.cumsum(out=qo_indptr[1:])
    first, last = kv_plan.qo_indptr[segments[0]], kv_plan.qo_indptr[segments[-1] + 1]
    rows: slice | Tensor = slice(int(first), int(last))
    if last - first != qo_indptr[-1]:
        starts = kv_plan.qo_indptr[segments] - qo_indptr[:-1]
        index = np.arange(qo_indptr[-1]) + np.repeat(starts, lens)
        rows = send(index, device)
    pages = _Pages.of(
        kv_plan.kv_lens[segments], kv_plan.page_table[segments], kv_plan.layout.page_size
    )
    return _Group(kind, rows, pinned(qo_indptr, device), pages, segments)


class FlashInferPlan(BackendPlan):
    """A step's groups; a rule's kernels are planned when a layer first asks.

    Args:
        backend: Owner of the kernels, which serve one plan at a time.
        kv_plan: The step.
        is_causal: One a segment.
    """

    _backend: "Backend"

    def __init__(self, backend: "Backend", kv_plan: KVPlan, is_causal: Sequence[bool]) -> None:
        super().__init__(backend, kv_plan)
        self._keys, self._values = kv_plan.keys, kv_plan.values
        self._groups = _groups(kv_plan, is_causal)
        self._planned: dict[LayerAttention, list[tuple[slice | Tensor, Any]]] = {}

    def run(self, layer: int, query: Tensor) -> Tensor:
        """Attend group after group."""
        rules = self._backend.config.layers[layer]
        planned = self._planned.get(rules)
        if planned is None:
            planned = self._planned[rules] = self._plan(rules)
        query = query.contiguous()
        cache = (self._keys[layer], self._values[layer])
        out = torch.empty_like(query)
        for rows, wrapper in planned:
            if isinstance(wrapper, SdpaPlan):
                out[rows] = wrapper.run(layer, query[rows])
            elif isinstance(rows, slice):
                wrapper.run(query[rows], cache, out=out[rows])
            else:
                out[rows] = wrapper.run(query[rows], cache)
        return out

    def _plan(self, rules: LayerAttention) -> list[tuple[slice | Tensor, Any]]:
        assert self._backend.is_current(self), "a plan runs after the next was made"
        return [(group.rows, self._plan_group(group, rules)) for group in self._groups]

    def _plan_group(self, group: _Group, rules: LayerAttention) -> Any:
        plan = self._kv_plan
        kv_lens = plan.kv_lens[group.segments]
        if group.kind != "full" or rules.window is None or kv_lens.max() <= rules.window:
            return self._backend.plan_group(group, rules)
        # The library cuts what such a query may see to window and tile: the slots behind it get
        # lost where a stream is split among processors.
        part = replace(
            plan,
            qo_lens=plan.qo_lens[group.segments],
            qo_indptr=group.qo_indptr.numpy(),
            kv_lens=kv_lens,
            page_table=plan.page_table[group.segments],
        )
        return SdpaPlan(self._backend, part, (False,) * len(kv_lens))


class _Gathered:
    """Runs a group over a copy of its keys and values in which each segment's stand in a row.

    Hopper's kernel fetches such by whole tiles, a fifth faster than slot by slot out of pages.

    Args:
        wrapper: Of the library, for keys and values that are not paged.
        slots: int32, on the device: the group's slots in the cache, segment after segment.
    """

    def __init__(self, wrapper: Any, slots: Tensor) -> None:
        self._wrapper = wrapper
        self._slots = slots

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor], out: Tensor | None = None) -> Tensor:
        """Attend; ``cache`` are one layer's pages of keys and of values."""
        keys, values = (pages.flatten(0, 1).index_select(0, self._slots) for pages in cache)
        found: Tensor = self._wrapper.run(query, keys, values, out=out)
        return found


class FixedDecodePlan(BackendPlan):
    """Steps of one token in each of a fixed number of segments, one after another.

    Args:
        backend: Has scale and per-layer rules.
        kv_plan: A step of so many segments.
        kernels: The module ``decode_cuda``.
        indices: int32 with room for all their pages.
    """

    def __init__(
        self, backend: AttentionBackend, kv_plan: KVPlan, kernels: Any, indices: Mirror
    ) -> None:
        super().__init__(backend, kv_plan)
        self._kernels = kernels
        self._size = len(kv_plan.qo_lens)
        self._indices = indices
        device = indices.tensor.device
        self._bounds = Mirror(2 * self._size, torch.int32, device)
        """Each segment's first place in ``indices``, then each one's slots."""
        num_counts = self._size * backend.config.num_kv_heads
        self._arrivals = torch.zeros(num_counts, dtype=torch.int32, device=device)

    def fill(self, kv_plan: KVPlan) -> None:
        """Plan a step; what was recorded of ``run`` computes this one from now on."""
        pages = _Pages.of(kv_plan.kv_lens, kv_plan.page_table, kv_plan.layout.page_size)
        count, room = len(pages.indices), len(self._indices.array)
        assert count <= room, f"{count} pages, room for {room}"
        self._kv_plan = kv_plan
        # Most steps read the pages that the last one read.
        if not np.array_equal(self._indices.array[:count], pages.indices):
            self._indices.array[:count] = pages.indices
            self._indices.send(count)
        self._bounds.array[: self._size] = pages.indptr[:-1]
        self._bounds.array[self._size :] = kv_plan.kv_lens
        self._bounds.send()

    def run(self, layer: int, query: Tensor) -> Tensor:
        """Attend with all segments."""
        begins, lens = self._bounds.tensor.view(2, -1)
        config, plan = self._backend.config, self._kv_plan
        rules = config.layers[layer]
        out: Tensor = self._kernels.decode(
            query.contiguous(),
            plan.keys[layer],
            plan.values[layer],
            self._kernels.Pages(begins, lens, self._indices.tensor, self._arrivals),
            scale=config.scale,
            window=rules.window,
            soft_cap=rules.soft_cap,
        )
        return out


class Backend(AttentionBackend):
    """Paged decode, extend and prefill on CUDA devices.

    It compiles a kernel when a kind of step first needs it, which takes up to a minute and is
    remembered on disk.

    Args:
        config: Heads, scale and per-layer rules.
        layout: Shape and dtype of the cache.
    """

    def __init__(self, config: AttentionConfig, layout: KVLayout) -> None:
        super().__init__(config, layout)
        self._library = _load()
        assert self._library is not None, "a backend that refuses was built"
        properties = torch.cuda.get_device_properties(layout.device)
        self._num_processors: int = properties.multi_processor_count
        self._is_hopper = (properties.major, properties.minor) == _HOPPER
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=layout.device)
        self._wrappers: dict[tuple[str, str, LayerAttention], tuple[Any, Fence]] = {}
        self._fixed: dict[int, FixedDecodePlan] = {}
        self._indices: Mirror | None = None
        """Pages of recorded steps; one at a time is computed, so that they share it."""
        self._current: AttentionPlan | None = None

    @classmethod
    def unsupported(cls, config: AttentionConfig, layout: KVLayout) -> list[str]:
        """Refuse other devices, old cards, other dtypes and odd head sizes."""
        reasons = []
        if layout.device.type != "cuda":
            reasons.append(f"the cache is on {layout.device}; the kernels run on CUDA devices")
        elif (capability := torch.cuda.get_device_capability(layout.device)) < _CAPABILITY:
            reasons.append(
                f"the device has compute capability {capability[0]}.{capability[1]}; "
                f"it must be at least {_CAPABILITY[0]}.{_CAPABILITY[1]}"
            )
        elif _load() is None:
            reasons.append("flashinfer is not installed: pip install 'mstar-engine[gpu]'")
        if layout.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"the cache's dtype is {layout.dtype}; it must be float16 or bfloat16")
        if config.head_dim not in _HEAD_DIMS:
            known = ", ".join(map(str, _HEAD_DIMS))
            reasons.append(f"head_dim is {config.head_dim}; it must be one of {known}")
        return reasons

    def plan(self, kv_plan: KVPlan, is_causal: Sequence[bool]) -> AttentionPlan:
        """Group the segments by the kernel that takes them."""
        self._current = FlashInferPlan(self, kv_plan, is_causal)
        return self._current

    def plan_fixed(self, kv_plan: KVPlan, is_causal: Sequence[bool]) -> AttentionPlan | None:
        """Plan a step of single causal tokens, where Triton is; others are refused."""
        kernels = _load("mstar.engine.resources.attention.decode_cuda")
        if kernels is None or not all(is_causal) or not (kv_plan.qo_lens == 1).all():
            return None
        size = len(kv_plan.qo_lens)
        fixed = self._fixed.get(size)
        if fixed is None:
            room = size * kv_plan.layout.num_pages
            known = self._indices
            if known is None or len(known.array) < room:
                known = self._indices = Mirror(room, torch.int32, kv_plan.layout.device)
            fixed = self._fixed[size] = FixedDecodePlan(self, kv_plan, kernels, known)
        fixed.fill(kv_plan)
        return fixed

    def is_current(self, plan: AttentionPlan) -> bool:
        """Tell whether ``plan`` is the last that ``plan`` returned."""
        return plan is self._current

    def plan_group(self, group: _Group, rules: LayerAttention) -> Any:
        """Return the wrapper that runs a group, planned."""
        layout, config = self.layout, self.config
        if group.kind == "decode":
            return self._planned(
                (group.kind, "fa2", rules),
                self._decode_wrapper,
                *group.pages.tensors(layout.device),
                config.num_qo_heads,
                config.num_kv_heads,
                config.head_dim,
                layout.page_size,
                window_left=_window_left(rules),
                logits_soft_cap=rules.soft_cap,
                q_data_type=layout.dtype,
                kv_data_type=layout.dtype,
                sm_scale=config.scale,
            )
        is_causal = group.kind == "causal"
        library_backend = self._prefill_backend(group, rules)
        if library_backend == "auto" and self._gathers(group):
            return self._gathered(group, is_causal)
        prefill = self._library.BatchPrefillWithPagedKVCacheWrapper
        return self._planned(
            (group.kind, library_backend, rules),
            partial(prefill, self._workspace, "NHD", backend=library_backend),
            group.qo_indptr,
            *group.pages.tensors(layout.device),
            config.num_qo_heads,
            config.num_kv_heads,
            config.head_dim,
            layout.page_size,
            causal=is_causal,
            sm_scale=config.scale,
            window_left=_window_left(rules) if is_causal else -1,
            logits_soft_cap=rules.soft_cap,
            q_data_type=layout.dtype,
            kv_data_type=layout.dtype,
        )

    def _planned(
        self,
        key: tuple[str, str, LayerAttention],
        make: Callable[[], Any],
        *arguments: Any,
        **settings: Any,
    ) -> Any:
        """Return the wrapper of a key, planned.

        The library plans in pinned memory of the wrapper's and queues a copy of it, which a device
        that lags behind has not made yet when the next step is planned.
        """
        found = self._wrappers.get(key)
        if found is None:
            found = self._wrappers[key] = (make(), Fence(self.layout.device))
        wrapper, arrived = found
        arrived.wait()
        wrapper.plan(*arguments, **settings)
        arrived.set()
        return wrapper

    def _gathers(self, group: _Group) -> bool:
        """Tell whether a group of the plainest rule is faster over keys that stand in a row."""
        num_queries, num_segments = int(group.qo_indptr[-1]), len(group.segments)
        return (
            self._is_hopper
            and num_queries >= _GATHER_FROM * num_segments
            and int(group.pages.kv_lens(self.layout.page_size).sum()) <= _GATHER_UP_TO
        )

    def _gathered(self, group: _Group, is_causal: bool) -> _Gathered:
        layout, config = self.layout, self.config
        kv_indptr = np.zeros(len(group.segments) + 1, np.int32)
        group.pages.kv_lens(layout.page_size).cumsum(out=kv_indptr[1:])
        prefill = self._library.BatchPrefillWithRaggedKVCacheWrapper
        wrapper = self._planned(
            (group.kind, "gathered", LayerAttention()),
            partial(prefill, self._workspace, "NHD", backend="fa3"),
            group.qo_indptr,
            pinned(kv_indptr, layout.device),
            config.num_qo_heads,
            config.num_kv_heads,
            config.head_dim,
            causal=is_causal,
            sm_scale=config.scale,
            q_data_type=layout.dtype,
            kv_data_type=layout.dtype,
        )
        slots = send(group.pages.slots(layout.page_size), layout.device)
        return _Gathered(wrapper, slots)

    def _prefill_backend(self, group: _Group, rules: LayerAttention) -> str:
        """Return which of the library's kernels takes a group.

        Hopper's own compile for minutes, so only the plainest rule has them. They give a tile of
        queries all its slots one after another, so that few queries behind many slots leave most
        processors idle; the others deal slots out.
        """
        if rules != LayerAttention():
            return "fa2"
        config = self.config
        rows = np.diff(group.qo_indptr.numpy()) * (config.num_qo_heads // config.num_kv_heads)
        num_programs = int((-(-rows // _TILE_ROWS)).sum()) * config.num_kv_heads
        return "fa2" if 2 * num_programs <= self._num_processors else "auto"

    def _decode_wrapper(self) -> Any:
        """Return a wrapper for single tokens."""
        group = self.config.num_qo_heads // self.config.num_kv_heads
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=group >= _TENSOR_CORE_GROUP
        )


def _window_left(rules: LayerAttention) -> int:
    """Return the slots that a query sees before its own; -1: all."""
    return -1 if rules.window is None else rules.window - 1
