"""A request as it arrives at the engine, and its record while it runs."""

from collections.abc import Sequence
from enum import Enum

import msgspec

from mstar.engine.graph import Cursor
from mstar.engine.output import FinishReason
from mstar.engine.resources.sampler.config import SamplingParams


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt made ready by whoever prepares prompts; crosses processes as MessagePack."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    page_keys: list[bytes] = []
    """Keys of the prompt's pages, the unfinished last one included; empty: never shared."""
    root: bytes | None = None
    """Key of the empty prefix that the keys were folded from; ``None``: never shared."""
    spans: list[tuple[int, bytes | None]] = []
    """Layout: length and digest of each span, ``None`` for token ids; empty: all token ids."""


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
        "logprobs",
        "max_len",
        "min_len",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_reported_tokens",
        "params",
        "prepared",
        "request_id",
        "status",
        "stop_token_ids",
        "tokens",
        "was_started",
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
        self.max_len = max_len
        self.min_len = self.num_prompt_tokens + prepared.params.min_tokens
        self.stop_token_ids = stop_token_ids
        self.arrival = arrival
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.was_started = False

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is not written yet."""
        return len(self.tokens) - self.num_computed_tokens

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
        self.status = RequestStatus.WAITING

    def generated(self) -> Sequence[int]:
        """Return the ids generated so far."""
        return self.tokens[self.num_prompt_tokens :]
