"""Chooses the next batch: admits, chunks, preempts, finishes; counts, never touches a tensor.

A step runs one node on the requests that wait for it: of the nodes that are waited for, the one
that was served longest ago, so that none starves.

First come, first served: a request starts only when all before it have. Requests that generate
come first in a step's token budget, then unfinished prompts, then new requests. When resources
cannot let every running request grow, the youngest goes back to the queue; since one request
alone always fits, the oldest always gets on.
"""

from bisect import insort
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Protocol

from mstar.engine.batch import Batch, NodeKind
from mstar.engine.request import Request, RequestItem, RequestStatus
from mstar.engine.resources.base import Refusal


class Gate(Protocol):
    """Says whether the resources can take a request or a step."""

    def open(self, request: Request) -> Refusal | None:
        """Begin a request: set how much of it is computed already, or refuse."""

    def close(self, request: Request) -> None:
        """Give back all that the request holds."""

    def catch_up(self, request: Request) -> bool:
        """Move a running request over what others computed meanwhile.

        Returns whether another is computing what comes next for it.
        """

    def next_encoder(self, request: Request, budget: int) -> str | None:
        """Return the node that must encode an item before the request's next tokens run."""

    def admit(self, batch: Batch) -> Refusal | None:
        """Reserve what a step needs, or refuse."""

    def shape(self, node: str, request: Request, part: object) -> Hashable:
        """Return what must be equal for an item or a visit to share a batch of the node."""

    def max_batch(self, node: str) -> int | None:
        """Return how many items or visits one batch of the node holds; ``None``: no bound."""


class Scheduler:
    """The queue and the running requests.

    Args:
        gate: Asked before a request starts and before a step runs.
        max_num_seqs: Requests that may run at once.
        max_num_batched_tokens: Tokens of one step at most.
        kinds: What each node is run on; a node that is missing computes tokens.
        has_one_node: Every walk is over the same node, which spares a look at each.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        kinds: Mapping[str, NodeKind] = MappingProxyType({}),
        has_one_node: bool = False,
    ) -> None:
        self._gate = gate
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._kinds = kinds
        self._has_one_node = has_one_node
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._is_blocked = False
        """The head of the queue was refused and nothing was given back since."""
        self._steady: Batch | None = None
        """The last batch, while the next one is sure to be the same."""
        self._is_waited_for_alone = True
        """Nobody waited for another node when the last batch was composed."""
        self._has_put_off = False
        """Some that generate waited for an item in the last step; they come first in this one."""
        self._last_served: dict[str, int] = {}
        self._last_visited: dict[str, int] = {}
        """Batch of each request's last visit; who waited longest is visited first."""
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
        self._last_visited.pop(request.request_id, None)
        self._steady = None

    def wake(self) -> None:
        """Take note that a request waits for a node that it did not wait for before."""
        self._steady = None

    def requeue(self, request: Request) -> None:
        """Put a request that ended a leg where its arrival has it in the queue."""
        self._running.remove(request)
        self._close(request)
        self._queue(request)
        self._steady = None

    def _queue(self, request: Request) -> None:
        """Put a request that has run where its arrival has it in the queue."""
        insort(self._waiting, request, key=lambda waiting: waiting.arrival)

    def schedule(
        self, launched: Batch | None = None
    ) -> tuple[Batch | None, Sequence[tuple[Request, Refusal]]]:
        """Return the next batch, and the requests that cannot be served at all.

        The batch is admitted. ``None`` means that there is nothing to do.

        Args:
            launched: A batch whose next step is under way: what is left of it comes first.
        """
        rejected: list[tuple[Request, Refusal]] = []
        batch = self._steady
        if batch is None or not (self._has_one_node or batch.is_due):
            batch = self._rest_of(launched) or self._compose(rejected)
        while batch is not None:
            refusal = self._gate.admit(batch)
            if refusal is None:
                break
            if len(self._running) == 1:
                rejected.append((self._running[0], refusal))
                self.remove(self._running[0])
            else:
                self._preempt()
            batch = self._rest_of(launched) or self._compose(rejected)
        is_whole = batch is not None and len(batch.requests) == len(self._running)
        is_whole = is_whole and self._is_waited_for_alone
        is_over = self._is_blocked or not self._waiting or self.num_running >= self._max_num_seqs
        self._steady = batch if batch and is_whole and is_over and batch.is_decode else None
        return batch, rejected

    def goes_on(self) -> bool:
        """Tell whether the last batch's requests have the next one to themselves.

        It may turn out that they ended, which is sure of no more than some of them.
        """
        batch = self._steady
        if batch is None:
            return False
        num_ends = sum([len(r.tokens) + 1 >= r.max_len for r in batch.requests])
        return num_ends == 0 or (num_ends < len(batch.requests) and not self._waiting)

    def _rest_of(self, launched: Batch | None) -> Batch | None:
        """Return the requests of a batch that wait for its next step, if there are any."""
        if launched is None:
            return None
        node = launched.node
        left = [
            request
            for request in launched.requests
            if request.status is RequestStatus.RUNNING
            and request.num_uncomputed_tokens == 1
            and node in request.cursor.ready()
        ]
        if len(left) == len(launched.requests):
            return launched
        return Batch.of(node, [(request, 1) for request in left]) if left else None

    def _compose(self, rejected: list[tuple[Request, Refusal]]) -> Batch | None:
        ready = [(request, self._nodes_of(request)) for request in self._running]
        node = self._next_node(ready)
        due = [request for request, nodes in ready if node in nodes]
        spans = self._spans(due) if self._kind_of(node) is NodeKind.TOKENS else []
        budget = self._max_num_batched_tokens - sum(span for _, span in spans)
        while budget > 0 and (started := self._start_next(rejected)) is not None:
            nodes = self._nodes_of(started)
            ready.append((started, nodes))
            node = node or next(iter(nodes), None)
            if node not in nodes:
                continue
            if self._kind_of(node) is not NodeKind.TOKENS:
                due.append(started)
                budget -= self._cost(node, started)
            elif span := started.chunk(budget):
                spans.append((started, span))
                budget -= span
        if node is None:
            return None
        self._num_batches += 1
        self._last_served[node] = self._num_batches
        self._is_waited_for_alone = all(nodes == (node,) for _, nodes in ready)
        match self._kind_of(node):
            case NodeKind.TOKENS:
                return Batch.of(node, spans)
            case NodeKind.ITEMS:
                return Batch.of_items(node, self._items(node, due))
            case NodeKind.VISIT:
                return Batch.of_visits(node, self._visits(node, due))

    def _kind_of(self, node: str | None) -> NodeKind:
        return NodeKind.TOKENS if node is None else self._kinds.get(node, NodeKind.TOKENS)

    def _cost(self, node: str | None, request: Request) -> int:
        """Return what a visit, or the request's next item, takes of a step's budget."""
        if self._kind_of(node) is NodeKind.VISIT:
            return 1
        item = request.next_item(self._max_num_batched_tokens)
        assert item is not None, f"request {request.request_id!r} has nothing to encode"
        return item.span.length

    def _nodes_of(self, request: Request) -> tuple[str, ...]:
        """Return the nodes that a request waits for; none while another computes for it."""
        if request.num_uncomputed_tokens > 1 and self._gate.catch_up(request):
            return ()
        if request.has_items:
            encoder = self._gate.next_encoder(request, self._max_num_batched_tokens)
            if encoder is not None:
                return (encoder,)
        return request.cursor.ready()

    def _spans(self, due: list[Request]) -> list[tuple[Request, int]]:
        """Return how many tokens of each running request are computed."""
        budget = self._max_num_batched_tokens
        decodes = [(request, 1) for request in due if request.num_uncomputed_tokens == 1]
        prompts = [request for request in due if request.num_uncomputed_tokens > 1]
        room = budget - len(decodes)
        needed = 0
        if prompts and room > 0 and not self._has_put_off and not prompts[0].chunk(room):
            # An item that is not cut needs so much of the budget that others wait for a step.
            needed = next((n for n in range(room, budget + 1) if prompts[0].chunk(n)), 0)
            decodes = decodes[: budget - needed]
        self._has_put_off = needed > 0
        spans = decodes[:budget]
        budget -= len(spans)
        for request in prompts:
            span = request.chunk(budget)
            if span:
                spans.append((request, span))
                budget -= span
        return spans

    def _items(self, node: str, due: list[Request]) -> list[tuple[Request, RequestItem]]:
        """Return one item of each request, as many as the budget holds, none of them twice."""
        budget = self._max_num_batched_tokens
        chosen: dict[bytes, tuple[Request, RequestItem]] = {}
        shape: Hashable = None
        for request in due:
            item = request.next_item(self._max_num_batched_tokens)
            assert item is not None, f"request {request.request_id!r} has nothing to encode"
            if item.name in chosen or item.span.length > budget:
                continue
            own = self._gate.shape(node, request, item)
            if not chosen or own == shape:
                shape = own
                chosen[item.name] = (request, item)
                budget -= item.span.length
        return list(islice(chosen.values(), self._gate.max_batch(node)))

    def _visits(self, node: str, due: list[Request]) -> list[tuple[Request, object]]:
        """Return the requests, of the shape of the first, that a node visits; with their chunks."""
        last = self._last_visited
        due = sorted(due, key=lambda request: last.get(request.request_id, 0))
        visits = [(request, request.cursor.chunk_for(node)) for request in due]
        shapes = [self._gate.shape(node, *visit) for visit in visits]
        alike = (v for v, shape in zip(visits, shapes, strict=True) if shape == shapes[0])
        chosen = list(islice(alike, self._gate.max_batch(node)))
        last.update((request.request_id, self._num_batches) for request, _ in chosen)
        return chosen

    def _next_node(self, ready: list[tuple[Request, tuple[str, ...]]]) -> str | None:
        """Return the node, of those that running requests wait for, that waited longest."""
        waiting = {node for _, nodes in ready for node in nodes}
        return min(waiting, key=lambda node: (self._last_served.get(node, 0), node), default=None)

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
        """Send the youngest running request back to the queue.

        It stands at the head there, unless an older one waits for its next leg.
        """
        request = max(self._running, key=lambda running: running.arrival)
        self._running.remove(request)
        self._close(request)
        request.restart()
        self._queue(request)
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
