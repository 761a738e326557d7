"""Batch: which segments of which requests one node runs in one step; and what a node is."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, chain
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from mstar.engine.output import Emitted, TokenLogprobs
from mstar.engine.request import Request, RequestItem
from mstar.engine.resources.step import NodeStep, Segment


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The requests that one node serves in one step.

    The scheduler hands out the same object again while neither the requests nor their spans
    change, so that what depends on these alone can be kept from step to step.
    """

    node: str
    requests: tuple[Request, ...]
    segments: tuple[Segment, ...]
    """One a request, in the same order."""
    yielding: tuple[int, ...]
    """Indices of the requests whose known tokens all are computed after this step."""
    is_decode: bool
    """Every request computes its one last token."""
    items: tuple[RequestItem, ...] = ()
    """The item of each request that the node encodes; empty: it encodes none."""
    chunks: tuple[object, ...] | None = None
    """What a visit finds on the node's streaming edge for each request, ``None`` where it has no
    such edge; ``None`` as a whole: it is no visit."""

    @classmethod
    def of(cls, node: str, spans: Sequence[tuple[Request, int]]) -> Self:
        """Return the batch that computes the next ``span`` tokens of each request."""
        yielding = tuple(
            i for i, (request, span) in enumerate(spans) if span == request.num_uncomputed_tokens
        )
        return cls(
            node,
            tuple(request for request, _ in spans),
            tuple(Segment(request.request_id, "main", span) for request, span in spans),
            yielding,
            len(yielding) == len(spans) == sum(span for _, span in spans),
        )

    @classmethod
    def of_items(cls, node: str, items: Sequence[tuple[Request, RequestItem]]) -> Self:
        """Return the batch that encodes an item of each request."""
        return cls(
            node,
            tuple(request for request, _ in items),
            tuple(Segment(request.request_id, "main", 0) for request, _ in items),
            (),
            False,
            tuple(item for _, item in items),
        )

    @classmethod
    def of_visits(cls, node: str, visits: Sequence[tuple[Request, object]]) -> Self:
        """Return the batch of one visit of each request, with the chunk that it is given."""
        return cls(
            node,
            tuple(request for request, _ in visits),
            (),
            (),
            False,
            chunks=tuple(chunk for _, chunk in visits),
        )

    @property
    def is_due(self) -> bool:
        """Whether the walks of all its requests wait for its node."""
        node = self.node
        return all([node in request.cursor.ready() for request in self.requests])  # noqa: C419

    def alone(self, index: int) -> Self:
        """Return the batch of one of its requests."""
        if self.items:
            return self.of_items(self.node, [(self.requests[index], self.items[index])])
        if self.chunks is not None:
            return self.of_visits(self.node, [(self.requests[index], self.chunks[index])])
        return self.of(self.node, [(self.requests[index], self.segments[index].span)])

    def split(self) -> Self:
        """Return the same step as segments of one token each, their requests named as often."""
        spans = [segment.span for segment in self.segments]
        ends = list(accumulate(spans))
        return type(self)(
            self.node,
            tuple(own for own, span in zip(self.requests, spans, strict=True) for _ in range(span)),
            tuple(s._replace(span=1) for s in self.segments for _ in range(s.span)),
            tuple(ends[index] - 1 for index in self.yielding),
            is_decode=False,
        )

    def last_rows(self) -> npt.NDArray[np.int64]:
        """Return where the last token of each yielding request stands among all tokens."""
        spans = np.fromiter((segment.span for segment in self.segments), np.int64)
        rows: npt.NDArray[np.int64] = np.cumsum(spans)[list(self.yielding)] - 1
        return rows

    def token_ids(self, label: str = "main") -> npt.NDArray[np.int64]:
        """Return the ids that the step computes, ``[num_tokens]``, segment after segment.

        Args:
            label: The stream of each request.
        """
        if label == "main":
            streams = [request.tokens for request in self.requests]
        else:
            streams = [request.companions[label] for request in self.requests]
        if self.is_decode:
            return np.array([tokens[-1] for tokens in streams], np.int64)
        pieces = (
            tokens[request.num_computed_tokens : request.num_computed_tokens + segment.span]
            for tokens, request, segment in zip(streams, self.requests, self.segments, strict=True)
        )
        return np.fromiter(chain.from_iterable(pieces), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutput:
    """What a node's forward gave the requests of ``Batch.yielding``, in that order."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None] | None = None
    failures: Mapping[int, str] = field(default_factory=dict)
    """Why a request got no usable result, by its place in ``token_ids``."""
    emitted: Mapping[int, Sequence[Emitted]] = field(default_factory=dict)
    """What else it gave, by the request's place in ``Batch.requests``."""

    def of(self, places: Sequence[int]) -> "NodeOutput":
        """Return the output of some of the requests, by their places in ``token_ids``."""
        logprobs, failures = self.logprobs, self.failures
        return NodeOutput(
            token_ids=[self.token_ids[place] for place in places],
            logprobs=None if logprobs is None else [logprobs[place] for place in places],
            failures={i: failures[place] for i, place in enumerate(places) if place in failures},
        )


class NodeKind(Enum):
    """What a node is run on."""

    TOKENS = "tokens"
    """The next tokens of each request's stream."""
    ITEMS = "items"
    """An item of each request."""
    VISIT = "visit"
    """A request, once for each visit of its walk, with what came over a streaming edge."""


class Node(ABC):
    """One component of a model, as the runner sees it."""

    kind: ClassVar[NodeKind] = NodeKind.TOKENS
    max_batch: int | None = None
    """Requests that one visit or encoding takes at most; ``None``: no bound."""

    def shape(self, request: Request, part: object) -> Hashable:
        """Return what must be equal for requests to be visited, or items encoded, in one batch.

        Args:
            request: One of them.
            part: Its item (``RequestItem``), or its chunk.
        """
        return None

    def declare(self, batch: Batch) -> NodeStep:
        """Return what the step asks of each of the node's resources; by default there are none."""
        return NodeStep(batch.segments)

    @abstractmethod
    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        """Compute the step; its layers call the plans.

        Args:
            batch: What to compute.
            plans: The plan of each of the node's resources, by key.
        """
