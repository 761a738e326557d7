"""Recorded forwards: decode steps as CUDA graphs, replayed for steps that fit."""

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.resources.base import Resource
from mstar.engine.resources.step import NodeStep

logger = logging.getLogger(__name__)

_MAX_SIZE = 256
_NUM_WARM_UPS = 2
"""Forwards before one is recorded: kernels are compiled and libraries choose theirs in them."""


class RecordableNode(Node):
    """A node whose step of one token a segment is a function of ids and plans."""

    @abstractmethod
    def compute(self, ids: Tensor, plans: Mapping[str, Any]) -> Tensor:
        """Return one row for each segment; launches kernels and reads nothing back.

        Args:
            ids: int64 ``[num_segments]``, on the device.
            plans: As ``forward`` takes them.
        """

    @abstractmethod
    def finish(self, batch: Batch, rows: Tensor, plans: Mapping[str, Any]) -> NodeOutput:
        """Return the output for what ``compute`` gave, one row a yielding request."""


def decode_sizes(limit: int) -> list[int]:
    """Return the batch sizes to record for up to ``limit`` requests, largest first.

    >>> decode_sizes(20)
    [20, 16, 8, 4, 2, 1]
    """
    limit = min(limit, _MAX_SIZE)
    steps = [1, 2, 4, *range(8, 65, 8), *range(80, _MAX_SIZE + 1, 16)]
    return sorted({limit, *(size for size in steps if size < limit)}, reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    ids: Tensor
    """int64 ``[size]``: read by the graph."""
    rows: Tensor
    """``[size, ...]``: written by the graph."""


class Recorder:
    """The recordings of one node, a batch size each.

    A step of ``B`` segments replays the smallest size that holds it; the rows beyond ``B`` read
    and write the cache's sink page.

    Args:
        name: The node's name.
        node: What to record.
        resources: The node's resources by key, in the order in which they plan.
        device: The CUDA device.
    """

    def __init__(
        self,
        name: str,
        node: RecordableNode,
        resources: Mapping[str, Resource],
        device: torch.device,
    ) -> None:
        self._name = name
        self._node = node
        self._resources = resources
        self._device = device
        self._recordings: dict[int, _Recording] = {}
        self._sizes: list[int] = []
        self.num_replays = 0

    def record(self, sizes: Sequence[int]) -> bool:
        """Record all sizes, largest first so that the others fit in its memory.

        Returns:
            False where a resource has no fixed plan; nothing was recorded then.
        """
        step = self._node.declare(Batch.of(self._name, ()))
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)
        for place, size in enumerate(sorted(sizes, reverse=True), 1):
            ids = torch.zeros(size, dtype=torch.int64, device=self._device)
            for _ in range(_NUM_WARM_UPS):
                plans = self._plan(size, step)
                if plans is None:
                    return False
                self._node.compute(ids, plans)
            # Plans may keep what they compute on first use, which must be recorded too.
            plans = self._plan(size, step)
            assert plans is not None, f"size {size} was planned before"
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                rows = self._node.compute(ids, plans)
            self._recordings[size] = _Recording(graph=graph, ids=ids, rows=rows)
            logger.info("recorded decode size %d, %d of %d", size, place, len(sizes))
        self._sizes = sorted(self._recordings)
        return True

    def size_for(self, batch: Batch) -> int | None:
        """Return the size that holds the batch; ``None``: it does not fit any."""
        if not batch.is_decode:
            return None
        return next((size for size in self._sizes if size >= len(batch.segments)), None)

    def run(self, batch: Batch, step: NodeStep) -> NodeOutput | None:
        """Replay the step; ``None`` if it does not fit, and then nothing was done."""
        size = self.size_for(batch)
        plans = None if size is None else self._plan(size, step)
        if size is None or plans is None:
            return None
        recording = self._recordings[size]
        count = len(batch.segments)
        recording.ids[:count].copy_(torch.from_numpy(batch.token_ids()), non_blocking=True)
        recording.graph.replay()
        self.num_replays += 1
        return self._node.finish(batch, recording.rows[:count], plans)

    def _plan(self, size: int, step: NodeStep) -> dict[str, Any] | None:
        plans: dict[str, Any] = {}
        for key, resource in self._resources.items():
            plan = resource.plan_fixed(size, step.segments_of(key), step.resources[key], plans)
            if plan is None:
                return None
            plans[key] = plan
        return plans
