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
from mstar.engine.resources.mirror import Mirror
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
    ids: Mirror
    """int64 ``[size]``: read by the graph."""
    rows: Tensor
    """``[size, ...]``: written by the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """Plans of the step after the last one, in case its batch is the same."""

    batch: Batch
    plans: dict[str, Any]
    revision: int
    """The resources' revisions that they were made at, all together."""


class Recorder:
    """The recordings of one node, a batch size each.

    A step of ``B`` segments replays the smallest size that holds it; the rows beyond ``B`` read
    and write the cache's sink page. While the device computes a step, the next one of the same
    batch is planned; the device gets what was planned behind the step that it computes.

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
        self._ahead: _Ahead | None = None
        self._sent = torch.cuda.Event()
        """Behind the last copy to the device, whose memory the next plans write again."""
        self.num_replays = 0
        """Steps that were replayed."""
        self.num_planned_ahead = 0
        """Those of them that were planned before they were due."""

    def record(self, sizes: Sequence[int]) -> bool:
        """Record all sizes, largest first so that the others fit in its memory.

        Returns:
            False where a resource has no fixed plan; nothing was recorded then.
        """
        step = self._node.declare(Batch.of(self._name, ()))
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)
        for place, size in enumerate(sorted(sizes, reverse=True), 1):
            ids = Mirror(size, torch.int64, self._device)
            for _ in range(_NUM_WARM_UPS):
                plans = self._plan(size, step)
                if plans is None:
                    return False
                self._node.compute(ids.tensor, plans)
            # Plans may keep what they compute on first use, which must be recorded too.
            plans = self._plan(size, step)
            assert plans is not None, f"size {size} was planned before"
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                rows = self._node.compute(ids.tensor, plans)
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
        ahead, self._ahead = self._ahead, None
        if size is None:
            return None
        plans: dict[str, Any] | None
        if ahead is not None and ahead.batch is batch and ahead.revision == self._revision():
            plans = ahead.plans
            self.num_planned_ahead += 1
        else:
            plans = self._plan(size, step)
        if plans is None:
            return None
        recording = self._recordings[size]
        count = len(batch.segments)
        self._sent.synchronize()
        recording.ids.array[:count] = batch.token_ids()
        recording.ids.send(count)
        self._sent.record()
        recording.graph.replay()
        self.num_replays += 1
        next_plans = self._plan(size, step, ahead=1)
        revision = self._revision()
        output = self._node.finish(batch, recording.rows[:count], plans)
        if next_plans is not None:
            self._ahead = _Ahead(batch=batch, plans=next_plans, revision=revision)
        return output

    def _revision(self) -> int:
        return sum(resource.revision for resource in self._resources.values())

    def _plan(self, size: int, step: NodeStep, ahead: int = 0) -> dict[str, Any] | None:
        self._sent.synchronize()
        plans: dict[str, Any] = {}
        for key, resource in self._resources.items():
            segments, own = step.segments_of(key), step.resources[key]
            plan = resource.plan_fixed(size, segments, own, plans, ahead)
            if plan is None:
                break
            plans[key] = plan
        self._sent.record()
        return plans if len(plans) == len(self._resources) else None
