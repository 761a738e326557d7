"""Recorded forwards: decode steps and short prompts as CUDA graphs, replayed for steps that fit.

A replay may be launched ahead, behind another whose tokens nobody has read; see ``overlap``.
"""

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.overlap import Flight, Pending
from mstar.engine.pieces import Pieces, Place, place_of
from mstar.engine.resources.base import Resource
from mstar.engine.resources.mirror import Fence, Mirror, send
from mstar.engine.resources.step import NodeStep

logger = logging.getLogger(__name__)

_MAX_SIZE = 256
_NUM_WARM_UPS = 2
"""Forwards before one is recorded: kernels are compiled and libraries choose theirs in them."""


class RecordableNode(Node):
    """A node whose step of one token a stream is a function of ids and plans.

    The tokens that a step gives are the ids of its requests' next step on the node.
    """

    num_streams = 1
    """Streams of a request that a step computes; its segments are those of one stream of all
    requests after the other."""
    splits_prompts = False
    """Whether tokens of a prompt may be segments of their own in a step of single tokens. They
    are ids then, in one stream, one position behind the other."""

    def ids(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Return the ids of a step, one a segment."""
        return batch.token_ids()

    def prepare(self, sizes: Sequence[int], num_tokens: int) -> None:
        """Get ready for steps that will come, before any is recorded; by default nothing is done.

        Args:
            sizes: Of decode steps, in requests.
            num_tokens: Of the largest step, in tokens.
        """

    @abstractmethod
    def compute(self, ids: Tensor, plans: Mapping[str, Any]) -> Tensor:
        """Return one row for each segment; launches kernels and reads nothing back.

        Args:
            ids: int64 ``[num_segments]``, on the device.
            plans: As ``forward`` takes them.
        """

    def note(self, batch: Batch, rows: Tensor) -> None:
        """Take note of what a step gives all its tokens; by default nothing is done.

        Args:
            batch: The step, which nobody launched ahead.
            rows: What ``compute`` gave, a row for each token of each segment.
        """

    @abstractmethod
    def launch(
        self, batch: Batch, rows: Tensor, plans: Mapping[str, Any], before: Tensor | None = None
    ) -> Pending:
        """Have the output made of what ``compute`` gave; reads nothing back.

        Args:
            batch: The step.
            rows: One for each stream of its yielding requests, in the segments' order.
            plans: As ``forward`` takes them.
            before: int64 ``[num_requests]``, on the device: the tokens that were computed, where
                the requests' lists end before these; ``None``: their last.
        """


class SelectingNode(RecordableNode):
    """One whose steps of several tokens a segment are functions of ids and plans, too.

    That holds as long as requests are token ids, in one stream each.
    """

    @abstractmethod
    def compute_rows(self, ids: Tensor, plans: Mapping[str, Any], rows: Tensor) -> Tensor:
        """Return what ``compute`` does, of some tokens.

        Args:
            ids: int64 ``[num_tokens]``, on the device.
            plans: As ``forward`` takes them.
            rows: int64 ``[num_rows]``, on the device: the tokens whose output is wanted.
        """


def decode_sizes(limit: int) -> list[int]:
    """Return the batch sizes to record for up to ``limit`` requests, largest first.

    >>> decode_sizes(20)
    [20, 16, 8, 4, 2, 1]
    """
    limit = min(limit, _MAX_SIZE)
    steps = [1, 2, 4, *range(8, 65, 8), *range(80, _MAX_SIZE + 1, 16)]
    return sorted({limit, *(size for size in steps if size < limit)}, reverse=True)


class _Graph(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recording:
    graph: _Graph
    ids: Mirror
    """int64 ``[num_streams * size]``: read by the graph."""
    rows: Tensor
    """``[num_streams * size, ...]``: written by the graph."""


class Recorder:
    """The recordings of one node, a batch size each.

    A step of ``B`` requests replays the smallest size that holds it; the rows beyond theirs read
    and write the cache's sink page. All work is queued on the device's current stream, so that a
    step launched ahead finds what the one before it wrote, and whatever is queued later, in pages
    given up meanwhile too, comes behind both.

    Args:
        name: The node's name.
        node: What to record.
        resources: The node's resources by key, in the order in which they plan.
        device: The CUDA device.
        sent: Behind the last copy to the device, whose memory the next plans write again; recorders
            of the same resources share it.
    """

    def __init__(
        self,
        name: str,
        node: RecordableNode,
        resources: Mapping[str, Resource],
        device: torch.device,
        sent: Fence,
    ) -> None:
        self._name = name
        self._node = node
        self._resources = resources
        self._device = device
        self._recordings: dict[int, _Recording] = {}
        self._sizes: list[int] = []
        self._pieces: dict[int, Pieces] = {}
        """By tokens of the step, ascending."""
        self._place: Place | None = None
        self._pool: Any = None
        self._sent = sent
        self.num_replays = 0
        """Steps that were replayed."""
        self.num_ahead = 0
        """Those of them that were launched ahead."""
        self.num_pieced = 0
        """Steps that were replayed in pieces."""

    def record(self, sizes: Sequence[int]) -> bool:
        """Record all sizes, largest first so that the others fit in its memory.

        Returns:
            False where a resource has no fixed plan; nothing was recorded then.
        """
        step = self._node.declare(Batch.of(self._name, ()))
        pool = self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)
        for place, size in enumerate(sorted(sizes, reverse=True), 1):
            ids = Mirror(self._node.num_streams * size, torch.int64, self._device)
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

    def record_pieces(self, sizes: Sequence[int], num_rows: int) -> bool:
        """Record short steps, where the node and its resources are of the kinds that allow it.

        Args:
            sizes: Tokens of the steps.
            num_rows: Requests that one of them may have at most.

        Returns:
            False where they are not; nothing was recorded then.
        """
        node = self._node
        if not isinstance(node, SelectingNode) or not self._has_pieces():
            return False
        step = node.declare(Batch.of(self._name, ()))
        stream = torch.cuda.Stream(self._device)
        for size in sorted(sizes, reverse=True):
            pieces = Pieces(size, num_rows, self._device)
            plans = self._plan_pieces(size, step)
            place = self._place = place_of(plans)
            pieces.record(node.compute_rows, plans, place, self._pool, stream)
            self._pieces[size] = pieces
            logger.info("recorded steps of up to %d tokens", size)
        self._pieces = dict(sorted(self._pieces.items()))
        return True

    def _has_pieces(self) -> bool:
        return all(resource.in_pieces is not None for resource in self._resources.values())

    def _size_for(self, num_segments: int) -> int | None:
        """Return the smallest size that holds so many; ``None``: none does."""
        return next((size for size in self._sizes if size >= num_segments), None)

    def run(
        self, batch: Batch, step: NodeStep, flight: Flight | None = None, goes_on: bool = False
    ) -> tuple[NodeOutput, Flight | None] | None:
        """Replay the step; ``None`` if it does not fit, and then nothing was done.

        Args:
            batch: What to compute.
            step: What the node declares for it.
            flight: What is under way; it is the step, or is not read.
            goes_on: The same requests will have a step behind this one, some of them at least;
                it is launched if it can be.

        Returns:
            The step's output, and what was launched behind it.
        """
        if not batch.is_decode:
            output = self._run_pieces(batch, step) or self._run_split(batch)
            return None if output is None else (output, None)
        rows = None
        if flight is not None and flight.revision == self._revision():
            rows = flight.rows_of(batch)
        if flight is None or rows is None:
            flight = self._launch(batch, step)
            rows = range(len(batch.segments))
        if flight is None:
            return None
        following = None
        if goes_on:
            tokens = flight.pending.tokens
            if len(rows) < len(tokens):
                tokens = tokens[send(np.array(rows), self._device)]
            following = self._launch(batch, step, tokens)
            self.num_ahead += following is not None
        return flight.fetch(rows), following

    def _launch(self, batch: Batch, step: NodeStep, before: Tensor | None = None) -> Flight | None:
        """Queue a step, behind the one that gives the tokens ``before`` if they are given."""
        size = self._size_for(len(batch.segments)) if batch.is_decode else None
        plans = None if size is None else self._plan(size, step, 0 if before is None else 1)
        if size is None or plans is None:
            return None
        if before is None:
            rows = self._replay(size, self._node.ids(batch))
            self._node.note(batch, rows)
        else:
            rows = self._replay_behind(size, before)
        pending = self._node.launch(batch, rows, plans, before)
        return Flight(batch=batch, pending=pending, revision=self._revision())

    def _replay(self, size: int, ids: npt.NDArray[np.int64]) -> Tensor:
        """Queue a planned step of ids, and return what it gives them."""
        recording = self._recordings[size]
        self._sent.wait()
        recording.ids.array[: len(ids)] = ids
        recording.ids.send(len(ids))
        self._sent.set()
        recording.graph.replay()
        self.num_replays += 1
        return recording.rows[: len(ids)]

    def _replay_behind(self, size: int, before: Tensor) -> Tensor:
        """Do the same with tokens that are on the device, in all streams."""
        recording, count = self._recordings[size], self._node.num_streams * len(before)
        # A row that failed has no token; it is computed with another, and not read.
        targets = recording.ids.tensor[:count].view(-1, len(before))
        torch.clamp(before.expand_as(targets), min=0, out=targets)
        recording.graph.replay()
        self.num_replays += 1
        return recording.rows[:count]

    def _run_split(self, batch: Batch) -> NodeOutput | None:
        """Replay a step of few tokens as one of so many segments; ``None`` if it does not fit."""
        node = self._node
        if not node.splits_prompts or _has_items(batch):
            return None
        ids = batch.token_ids()
        size = self._size_for(len(ids))
        plans = None if size is None else self._plan(size, node.declare(batch.split()))
        if size is None or plans is None:
            return None
        rows = self._replay(size, ids)
        node.note(batch, rows)
        if not batch.yielding:
            return NodeOutput(token_ids=())
        last = send(batch.last_rows(), self._device)
        return node.launch(batch, rows[last], plans).fetch()

    def _run_pieces(self, batch: Batch, step: NodeStep) -> NodeOutput | None:
        """Replay a step of several tokens a segment; ``None`` if it does not fit."""
        place = self._place
        # Whatever else a node may want of a step shows in its segments or in the requests' items.
        if place is None or step.segments is not batch.segments or _has_items(batch):
            return None
        count = sum(segment.span for segment in batch.segments)
        pieces = next((own for size, own in self._pieces.items() if size >= count), None)
        if pieces is None or len(batch.yielding) > pieces.num_rows:
            return None
        plans = self._plan_pieces(pieces.size, step)
        rows = batch.last_rows()
        pieces.fill(batch.token_ids(), rows, plans[place.kv].slots)
        self._sent.set()
        out = pieces.run(plans[place.attention], count, rows)
        self.num_pieced += 1
        if not batch.yielding:
            return NodeOutput(token_ids=())
        return self._node.launch(batch, out[: len(batch.yielding)], plans).fetch()

    def _plan_pieces(self, size: int, step: NodeStep) -> dict[str, Any]:
        """Return the plans of a step, the positions filled up to ``size`` tokens."""
        self._sent.wait()
        plans: dict[str, Any] = {}
        for key, resource in self._resources.items():
            segments, own = step.segments_of(key), step.resources[key]
            if resource.in_pieces == "plan_fixed":
                plans[key] = resource.plan_fixed(size, segments, own, plans)
            else:
                plans[key] = resource.plan(segments, own, plans)
        self._sent.set()
        return plans

    def _revision(self) -> int:
        return sum(resource.revision for resource in self._resources.values())

    def _plan(self, size: int, step: NodeStep, ahead: int = 0) -> dict[str, Any] | None:
        self._sent.wait()
        plans: dict[str, Any] = {}
        num_segments = self._node.num_streams * size
        for key, resource in self._resources.items():
            segments, own = step.segments_of(key), step.resources[key]
            plan = resource.plan_fixed(num_segments, segments, own, plans, ahead)
            if plan is None:
                break
            plans[key] = plan
        self._sent.set()
        return plans if len(plans) == len(self._resources) else None


def _has_items(batch: Batch) -> bool:
    return any(request.items for request in batch.requests)
