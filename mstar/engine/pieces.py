"""Recorded pieces: short steps as CUDA graphs between which attention runs as it is planned.

A step of a few hundred tokens takes the device less time than launching its kernels one by one
takes the CPU. What differs from step to step beside its length is attention alone, so everything
between two layers' attention is one graph::

    embed, norm, qkv, rotate + store │ attention │ out, MLP, norm, qkv, rotate + store │ ... │ head
    graph 0                            layer 0     graph 1                                graph n
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.engine.resources.attention.base import AttentionPlan
from mstar.engine.resources.kv.layout import SINK_PAGE, KVPlan
from mstar.engine.resources.mirror import Mirror

_Int64 = npt.NDArray[np.int64]
Compute = Callable[[Tensor, Mapping[str, Any], Tensor], Tensor]
"""Returns what a step gives for ids, plans, and the rows that are wanted of it."""

_NUM_WARM_UPS = 2
_SIZES = (16, 32, 64, 128, 256, 512)
_SIZES_OF_RANKS = (768, 1024, 1536, 2048)
"""Ranks share a step's work, but each launches all of its kernels."""
_MAX_ROWS = 64


def piece_sizes(max_num_tokens: int, num_ranks: int = 1) -> list[int]:
    """Return the lengths of steps to record, in tokens, largest first.

    >>> piece_sizes(100)
    [64, 32, 16]
    """
    sizes = _SIZES + (_SIZES_OF_RANKS if num_ranks > 1 else ())
    return sorted((size for size in sizes if size <= max_num_tokens), reverse=True)


class Place(NamedTuple):
    """Where plans stand among those of a node, by resource key."""

    kv: str
    attention: str


def place_of(plans: Mapping[str, Any]) -> Place:
    """Return where the plans of the cache and of attention stand."""
    (kv,) = (key for key, plan in plans.items() if isinstance(plan, KVPlan))
    (attention,) = (key for key, plan in plans.items() if isinstance(plan, AttentionPlan))
    return Place(kv, attention)


@dataclass(slots=True, kw_only=True)
class _Break:
    """Where attention comes between two graphs."""

    graph: torch.cuda.CUDAGraph
    layer: int
    query: Tensor
    """``[size, num_qo_heads, head_dim]``: written by the graph."""
    attended: Tensor
    """The same shape: read by the next one."""
    is_last: bool
    """The rows that are wanted attend alone, ``[num_rows, ...]``."""


class _Warming(AttentionPlan):
    """Stands in for attention while kernels are compiled and chosen."""

    def run(self, layer: int, query: Tensor) -> Tensor:
        return torch.zeros_like(query)

    def of_last(self, rows: npt.NDArray[np.int64]) -> AttentionPlan:
        return self


class _Breaking(AttentionPlan):
    """Stands in for attention while a step is recorded: one graph ends and the next begins."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._query: Tensor | None = None
        self._attended: Tensor | None = None
        self._is_last = False
        self.graph = self._begin()
        """The one that is being recorded."""
        self.breaks: list[_Break] = []

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        return graph

    def run(self, layer: int, query: Tensor) -> Tensor:
        # Layers share the memory of their queries; copies belong to the graph that ends here.
        if self._query is None or self._query.shape != query.shape:
            self._query = query.contiguous()
        else:
            self._query.copy_(query)
        self.graph.capture_end()
        if self._attended is None or self._attended.shape != query.shape:
            self._attended = torch.zeros_like(self._query)
        attended = self._attended
        self.breaks.append(
            _Break(
                graph=self.graph,
                layer=layer,
                query=self._query,
                attended=attended,
                is_last=self._is_last,
            )
        )
        self.graph = self._begin()
        return attended

    def of_last(self, rows: npt.NDArray[np.int64]) -> AttentionPlan:
        self._is_last = True
        return self


class Pieces:
    """The recorded pieces of steps of up to ``size`` tokens.

    Args:
        size: Tokens that the recording has; those beyond the step's write to the sink page.
        num_rows: Rows of its output.
        device: The CUDA device.
    """

    def __init__(self, size: int, num_rows: int, device: torch.device) -> None:
        self.size = size
        self.num_rows = min(size, num_rows, _MAX_ROWS)
        self._ids = Mirror(size, torch.int64, device)
        self._rows = Mirror(self.num_rows, torch.int64, device)
        self._slots = torch.full((size,), SINK_PAGE, dtype=torch.int64, device=device)
        self._breaks: list[_Break] = []
        self._last: torch.cuda.CUDAGraph | None = None
        self._out: Tensor | None = None

    def record(
        self,
        compute: Compute,
        plans: Mapping[str, Any],
        place: Place,
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> None:
        """Record a step.

        Args:
            compute: What to record.
            plans: Plans of a step whose tensors lie where those of every step will.
            place: Which of them are the cache's and attention's.
            pool: Memory of recordings.
            stream: To record on.
        """
        kv: KVPlan = plans[place.kv]
        plans = {**plans, place.kv: replace(kv, slots=self._slots)}
        for _ in range(_NUM_WARM_UPS):
            compute(self._ids.tensor, {**plans, place.attention: _Warming()}, self._rows.tensor)
        torch.cuda.synchronize()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            breaking = _Breaking(pool)
            self._out = compute(
                self._ids.tensor, {**plans, place.attention: breaking}, self._rows.tensor
            )
            breaking.graph.capture_end()
        torch.cuda.synchronize()
        self._breaks, self._last = breaking.breaks, breaking.graph

    def fill(self, ids: _Int64, rows: _Int64, slots: Tensor) -> None:
        """Bring a step's numbers to where the graphs read them; nobody else writes them now.

        Args:
            ids: ``[num_tokens]``.
            rows: ``[num_yielding]``.
            slots: int64 ``[num_tokens]``, on the device.
        """
        count = len(ids)
        self._ids.array[:count] = ids
        self._ids.send(count)
        self._rows.array[: len(rows)] = rows
        self._rows.send(len(rows))
        self._slots[:count] = slots
        self._slots[count:].zero_()

    def run(self, attention: AttentionPlan, num_tokens: int, rows: _Int64) -> Tensor:
        """Queue the step that was filled in, and return its output ``[num_rows, ...]``.

        Args:
            attention: The step's.
            num_tokens: Of the step.
            rows: As in ``fill``.
        """
        for piece in self._breaks:
            piece.graph.replay()
            if piece.is_last:
                attention, num_tokens = attention.of_last(rows), len(rows)
            attended = attention.run(piece.layer, piece.query[:num_tokens])
            piece.attended[:num_tokens] = attended
        assert self._last is not None, "nothing was recorded"
        assert self._out is not None, "nothing was recorded"
        self._last.replay()
        return self._out
