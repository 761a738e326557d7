"""A request as it arrives at the engine, and its record while it runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from mstar.engine.array import Array
from mstar.engine.graph import Cursor
from mstar.engine.output import FinishReason
from mstar.engine.resources.base import Opening
from mstar.engine.resources.kv.keys import fingerprint
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spans import Span


class ContextItem(msgspec.Struct, frozen=True):
    """An item that a stream attends to from outside: it takes none of the stream's slots."""

    kind: str
    """Its modality; names what encodes it."""
    digest: bytes
    """Its content name, 32 bytes. The root that the stream's keys are folded from commits to it."""
    length: int
    """Slots of its encoder's output, in tokens."""
    inputs: dict[str, Array]
    """What the encoder is given."""


class Companion(msgspec.Struct, frozen=True):
    """A second stream of a request, which goes along with the first token by token.

    A node computes both in one forward and samples once; what is sampled is the next id of both.
    """

    label: str
    token_ids: list[int]
    """As many as the main stream's."""
    page_keys: list[bytes] = []
    """As the main stream's, folded from the same root."""


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt made ready by whoever prepares prompts; crosses processes as MessagePack."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    page_keys: list[bytes] = []
    """Keys of the prompt's pages, the unfinished last one included; empty: never shared."""
    root: bytes | None = None
    """Key of the tenant's empty prefix; ``None``: never shared. The keys are folded from it, or
    from ``context_root`` where there is a context."""
    spans: list[Span] = []
    """Layout of ``token_ids``; empty: all token ids."""
    retain_seconds: float = 0.0
    """How long its pages are protected from eviction after their last use; 0: not at all."""
    inputs: list[dict[str, Array]] = []
    """What the encoder is given for each item, in the order of the spans."""
    context: list[ContextItem] = []
    """Items that its tokens attend to from outside the stream."""
    num_context_slots: int = 0
    """Slots of context in all its legs together, where there are more than ``context`` has."""
    companions: list[Companion] = []
    options: dict[str, Any] = {}
    """What the model is told beside prompt and sampling parameters; plain data."""


@dataclass(slots=True)
class RequestItem:
    """One item of a request's prompt, or of its context."""

    span: Span
    name: bytes
    """Content name of its encoder's output within the tenant."""
    start: int
    """Its first slot; 0 for one of the context."""
    stop: int
    """The slot behind its last one; 0 for one of the context."""
    inputs: dict[str, Array]
    is_encoded: bool = False
    """Its encoder's output is there and stays until the item is computed."""


def context_root(root: bytes | None, context: Sequence[ContextItem]) -> bytes | None:
    """Return the key of the empty prefix of a stream that attends to items from outside.

    Args:
        root: The request's; ``None`` keeps it out of reuse.
        context: The items, in order.
    """
    if root is None or not context:
        return root
    named = (part for item in context for part in (item.kind, item.digest, item.length))
    return fingerprint("mstar-context-root-v1", root, *named)


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class Component:
    """The part of a model that a request's tokens are for, as long as one of its legs lasts."""

    vocab_size: int
    """0: a leg has no tokens at all."""
    stop_token_ids: frozenset[int]
    """Ids that end a leg."""
    max_model_len: int | None = None
    """The context it was made for, in tokens; ``None``: the deployment's is the only bound."""
    sampler_key: str = "sampler"
    """Key of the resource that the sampling parameters are for."""
    resources: frozenset[str] | None = None
    """Keys of the resources that know its streams; ``None``: all."""
    is_silent: bool = False
    """Its tokens are no answer: they stay inside."""
    params: SamplingParams | None = None
    """How its tokens are sampled; ``None``: as the request asks."""


class Request:
    """One request's record: its tokens, how far it is computed, and its place in its walk.

    A request has one leg, or several, one after the other: prompts of its own, each for a
    component of the model.

    Args:
        prepared: What arrived; the first leg.
        cursor: The request's place in its walk.
        component: What the leg's tokens are for.
        max_len: Slots the leg may ever fill, prompt included, in tokens.
        arrival: Position in the order of arrival.
    """

    __slots__ = (
        "arrival",
        "companions",
        "component",
        "context",
        "cursor",
        "finish_reason",
        "has_items",
        "items",
        "logprobs",
        "max_len",
        "min_len",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_reported_tokens",
        "openings",
        "params",
        "prepared",
        "request_id",
        "sources",
        "status",
        "stop_token_ids",
        "tokens",
        "was_counted",
        "was_preempted",
    )

    def __init__(
        self,
        prepared: PreparedRequest,
        cursor: Cursor,
        component: Component,
        *,
        max_len: int,
        arrival: int,
    ) -> None:
        self.request_id = prepared.request_id
        self.arrival = arrival
        self.begin(prepared, cursor, component, max_len)

    def begin(
        self, prepared: PreparedRequest, cursor: Cursor, component: Component, max_len: int
    ) -> None:
        """Begin a leg: nothing of it is computed; arguments as for the class."""
        self.prepared = prepared
        self.params = component.params or prepared.params
        self.cursor = cursor
        self.component = component
        self.tokens: list[int] = list(prepared.token_ids)
        self.companions = {c.label: list(c.token_ids) for c in prepared.companions}
        """Ids of each companion stream, by label."""
        self.num_prompt_tokens = len(self.tokens)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.sources: Counter[str] = Counter()
        """Where reused prompt tokens were found: tokens by tier."""
        self.max_len = max_len
        self.min_len = self.num_prompt_tokens + self.params.min_tokens
        own_stops = frozenset() if self.params.ignore_eos else component.stop_token_ids
        self.stop_token_ids = own_stops | frozenset(self.params.stop_token_ids)
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.was_counted = False
        """Its prompt is in the counters."""
        self.was_preempted = False
        self.openings: tuple[Opening, ...] = ()
        """What resources know its streams by, the main one first; made when first needed."""
        self.items = _items_of(prepared) if prepared.spans else []
        self.context = _context_of(prepared) if prepared.context else []
        self.has_items = bool(self.items or self.context)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is not written yet."""
        return len(self.tokens) - self.num_computed_tokens

    def reuse(self, num_tokens: int, sources: Mapping[str, int]) -> None:
        """Note that the first ``num_tokens`` need not be computed.

        Args:
            num_tokens: From the first on.
            sources: Where those that are new among them were found: tokens by tier.
        """
        if not self.was_preempted:
            self.num_cached_tokens += num_tokens - self.num_computed_tokens
            self.sources.update(sources)
        self.num_computed_tokens = num_tokens

    def chunk(self, budget: int) -> int:
        """Return how many of its next tokens one step may compute, ``budget`` at most.

        An item whose slots attend in both directions is not cut, and one that is not encoded is
        not begun; nothing is before the whole context is.
        """
        start = self.num_computed_tokens
        for item in self.context:
            if not item.is_encoded:
                return 0
        stop = min(start + budget, len(self.tokens))
        for item in self.items:
            if item.stop > start and (
                (item.start < stop and not item.is_encoded)
                or (item.span.is_whole and item.start < stop < item.stop)
            ):
                stop = max(item.start, start)
                break
        return stop - start

    def next_item(self, budget: int) -> RequestItem | None:
        """Return the first item, of its context or next ``budget`` tokens, that is not encoded."""
        for item in self.context:
            if not item.is_encoded:
                return item
        start = self.num_computed_tokens
        for item in self.items:
            if item.stop > start and not item.is_encoded:
                return item if item.start < start + budget else None
        return None

    def append(self, token: int) -> FinishReason | None:
        """Record one generated token and return why it ends the request, if it does."""
        tokens = self.tokens
        tokens.append(token)
        if self.companions:
            for companion in self.companions.values():
                companion.append(token)
        if token in self.stop_token_ids and len(tokens) > self.min_len:
            return "stop"
        return "length" if len(tokens) >= self.max_len else None

    def restart(self) -> None:
        """Forget what is computed: everything recorded so far is to be computed again."""
        self.num_computed_tokens = 0
        self.was_preempted = True
        self.status = RequestStatus.WAITING
        for item in (*self.items, *self.context):
            item.is_encoded = False

    def generated(self) -> Sequence[int]:
        """Return the ids generated so far."""
        return self.tokens[self.num_prompt_tokens :]


def _tenant_of(prepared: PreparedRequest) -> bytes | str:
    # Without a root nothing is shared, not even under the same digest.
    return prepared.root if prepared.root is not None else prepared.request_id


def _context_of(prepared: PreparedRequest) -> list[RequestItem]:
    tenant = _tenant_of(prepared)
    return [
        RequestItem(
            Span(item.length, item.digest, kind=item.kind),
            fingerprint("mstar-context-v1", tenant, item.kind, item.digest),
            0,
            0,
            item.inputs,
        )
        for item in prepared.context
    ]


def _items_of(prepared: PreparedRequest) -> list[RequestItem]:
    items: list[RequestItem] = []
    start = 0
    tenant = _tenant_of(prepared)
    for span in prepared.spans:
        stop = start + span.length
        if span.digest is not None:
            name = fingerprint("mstar-item-v1", tenant, span.kind, span.digest)
            items.append(RequestItem(span, name, start, stop, prepared.inputs[len(items)]))
        start = stop
    return items
