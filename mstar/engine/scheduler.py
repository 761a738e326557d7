"""Chooses the next batch: admits, chunks, preempts, finishes; counts, never touches a tensor.

First come, first served: a request starts only when all before it have. Requests that generate
come first in a step's token budget, then unfinished prompts, then new requests. When resources
cannot let every running request grow, the youngest goes back to the queue; since one request
alone always fits, the oldest always gets on.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from mstar.engine.batch import Batch
from mstar.engine.request import Request, RequestStatus
from mstar.engine.resources.base import Refusal


class Gate(Protocol):
    """Says whether the resources can take a request or a step."""

    def open(self, request: Request) -> Refusal | None:
        """Begin a request: set how much of it is computed already, or refuse."""

    def close(self, request: Request) -> None:
        """Give back all that the request holds."""

    def admit(self, batch: Batch) -> Refusal | None:
        """Reserve what a step needs, or refuse."""


class Scheduler:
    """The queue and the running requests.

    Args:
        gate: Asked before a request starts and before a step runs.
        max_num_seqs: Requests that may run at once.
        max_num_batched_tokens: Tokens of one step at most.
        has_one_node: Every walk is over the same node, which spares a look at each.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        has_one_node: bool = False,
    ) -> None:
        self._gate = gate
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._has_one_node = has_one_node
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._is_blocked = False
        """The head of the queue was refused and nothing was given back since."""
        self._steady: Batch | None = None
        """The last batch, while the next one is sure to be the same."""
        self._last_served: dict[str, int] = {}
        self._num_batches = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have started and not ended."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self._waiting.append(request)
        if not self._is_blocked and len(self._running) < self._max_num_seqs:
            self._steady = None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands, and give back what it holds."""
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
            self._is_blocked = False
        elif request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._close(request)
        request.status = RequestStatus.FINISHED
        self._steady = None

    def schedule(self) -> tuple[Batch | None, Sequence[tuple[Request, Refusal]]]:
        """Return the next batch, and the requests that cannot be served at all.

        The batch is admitted. ``None`` means that there is nothing to do.
        """
        rejected: list[tuple[Request, Refusal]] = []
        batch = self._steady
        if batch is None or not (self._has_one_node or batch.is_due):
            batch = self._compose(rejected)
        while batch is not None:
            refusal = self._gate.admit(batch)
            if refusal is None:
                break
            if len(self._running) == 1:
                rejected.append((self._running[0], refusal))
                self.remove(self._running[0])
            else:
                self._preempt()
            batch = self._compose(rejected)
        is_whole = batch is not None and len(batch.requests) == len(self._running)
        is_over = self._is_blocked or not self._waiting or self.num_running >= self._max_num_seqs
        self._steady = batch if batch and is_whole and is_over and batch.is_decode else None
        return batch, rejected

    def _compose(self, rejected: list[tuple[Request, Refusal]]) -> Batch | None:
        node = self._next_node()
        budget = self._max_num_batched_tokens
        spans: list[tuple[Request, int]] = []
        prompts: list[tuple[Request, int]] = []
        for request in self._running:
            if node not in request.cursor.ready():
                continue
            (spans if request.num_uncomputed_tokens == 1 else prompts).append((request, 1))
        spans = spans[:budget]
        budget -= len(spans)
        for request, _ in prompts:
            span = min(request.num_uncomputed_tokens, budget)
            if span:
                spans.append((request, span))
                budget -= span
        while budget and (started := self._start_next(rejected)) is not None:
            node = node or started.cursor.ready()[0]
            if node in started.cursor.ready():
                span = min(started.num_uncomputed_tokens, budget)
                spans.append((started, span))
                budget -= span
        if node is None or not spans:
            return None
        self._num_batches += 1
        self._last_served[node] = self._num_batches
        return Batch.of(node, spans)

    def _next_node(self) -> str | None:
        """Return the node, of those that running requests wait for, that waited longest."""
        ready = {node for request in self._running for node in request.cursor.ready()}
        return min(ready, key=lambda node: (self._last_served.get(node, 0), node), default=None)

    def _start_next(self, rejected: list[tuple[Request, Refusal]]) -> Request | None:
        """Start the head of the queue if there is room."""
        while self._waiting and not self._is_blocked and self.num_running < self._max_num_seqs:
            request = self._waiting[0]
            refusal = self._gate.open(request)
            if refusal is None:
                self._waiting.popleft()
                self._running.append(request)
                request.status = RequestStatus.RUNNING
                return request
            if self._running:
                self._is_blocked = True
            else:
                self._waiting.popleft()
                request.status = RequestStatus.FINISHED
                rejected.append((request, refusal))
        return None

    def _preempt(self) -> None:
        """Send the youngest running request back to the head of the queue."""
        request = max(self._running, key=lambda running: running.arrival)
        self._running.remove(request)
        self._close(request)
        request.restart()
        self._waiting.appendleft(request)
        self._is_blocked = True
        self.num_preemptions += 1

    def _close(self, request: Request) -> None:
        self._gate.close(request)
        self._is_blocked = False

    def check(self) -> None:
        """Verify that every request stands in one place and the queue is in order."""
        for place, status in (
            (self._waiting, RequestStatus.WAITING),
            (self._running, RequestStatus.RUNNING),
        ):
            assert all(request.status is status for request in place), status
        arrivals = [request.arrival for request in self._waiting]
        assert arrivals == sorted(arrivals), f"the queue is out of order: {arrivals}"
        ids = [request.request_id for request in (*self._waiting, *self._running)]
        assert len(set(ids)) == len(ids), "a request stands in two places"
        assert self.num_running <= self._max_num_seqs, (self.num_running, self._max_num_seqs)
