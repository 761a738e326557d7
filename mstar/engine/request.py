"""A request as it arrives at the engine, and its record while it runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from mstar.engine.graph import Cursor
from mstar.engine.output import FinishReason
from mstar.engine.resources.base import Opening
from mstar.engine.resources.kv.keys import fingerprint
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spans import Span


class Array(msgspec.Struct, frozen=True):
    """A tensor as it crosses processes."""

    dtype: str
    """Name of a numpy dtype; its byte order is the machine's."""
    shape: tuple[int, ...]
    data: bytes
    """Elements in C order."""


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt made ready by whoever prepares prompts; crosses processes as MessagePack."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    page_keys: list[bytes] = []
    """Keys of the prompt's pages, the unfinished last one included; empty: never shared."""
    root: bytes | None = None
    """Key of the empty prefix that the keys were folded from; ``None``: never shared."""
    spans: list[Span] = []
    """Layout of ``token_ids``; empty: all token ids."""
    retain_seconds: float = 0.0
    """How long its pages are protected from eviction after their last use; 0: not at all."""
    inputs: list[dict[str, Array]] = []
    """What the encoder is given for each item, in the order of the spans."""


@dataclass(slots=True)
class RequestItem:
    """One item of a request's prompt."""

    span: Span
    name: bytes
    """Content name of its encoder's output within the tenant."""
    start: int
    """Its first slot."""
    stop: int
    """The slot behind its last one."""
    inputs: dict[str, Array]
    is_encoded: bool = False
    """Its encoder's output is there and stays until the item is computed."""


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One request's record: its tokens, how far it is computed, and its place in its walk.

    Args:
        prepared: What arrived.
        cursor: The request's place in its walk.
        max_len: Slots it may ever fill, prompt included, in tokens.
        stop_token_ids: Ids that end it.
        arrival: Position in the order of arrival.
    """

    __slots__ = (
        "arrival",
        "cursor",
        "finish_reason",
        "items",
        "logprobs",
        "max_len",
        "min_len",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_reported_tokens",
        "opening",
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
        *,
        max_len: int,
        stop_token_ids: frozenset[int],
        arrival: int,
    ) -> None:
        self.prepared = prepared
        self.request_id = prepared.request_id
        self.params = prepared.params
        self.cursor = cursor
        self.tokens: list[int] = list(prepared.token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.sources: Counter[str] = Counter()
        """Where reused prompt tokens were found: tokens by tier."""
        self.max_len = max_len
        self.min_len = self.num_prompt_tokens + prepared.params.min_tokens
        self.stop_token_ids = stop_token_ids
        self.arrival = arrival
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.was_counted = False
        """Its prompt is in the counters."""
        self.was_preempted = False
        self.opening: Opening | None = None
        """What resources know it by; made when it is first needed."""
        self.items = _items_of(prepared) if prepared.spans else []

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
        not begun.
        """
        start = self.num_computed_tokens
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
        """Return the first item, among its next ``budget`` tokens, that is not encoded."""
        start = self.num_computed_tokens
        for item in self.items:
            if item.stop > start and not item.is_encoded:
                return item if item.start < start + budget else None
        return None

    def append(self, token: int) -> FinishReason | None:
        """Record one generated token and return why it ends the request, if it does."""
        tokens = self.tokens
        tokens.append(token)
        if token in self.stop_token_ids and len(tokens) > self.min_len:
            return "stop"
        return "length" if len(tokens) >= self.max_len else None

    def restart(self) -> None:
        """Forget what is computed: everything recorded so far is to be computed again."""
        self.num_computed_tokens = 0
        self.was_preempted = True
        self.status = RequestStatus.WAITING
        for item in self.items:
            item.is_encoded = False

    def generated(self) -> Sequence[int]:
        """Return the ids generated so far."""
        return self.tokens[self.num_prompt_tokens :]


def _items_of(prepared: PreparedRequest) -> list[RequestItem]:
    items: list[RequestItem] = []
    start = 0
    # Without a root nothing is shared, not even under the same digest.
    tenant = prepared.root if prepared.root is not None else prepared.request_id
    for span in prepared.spans:
        stop = start + span.length
        if span.digest is not None:
            name = fingerprint("mstar-item-v1", tenant, span.kind, span.digest)
            items.append(RequestItem(span, name, start, stop, prepared.inputs[len(items)]))
        start = stop
    return items
