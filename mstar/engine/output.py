"""What a request yields while it runs, and what the engine tells about itself."""

from typing import Any, Literal

import msgspec

from mstar.engine.array import Array
from mstar.engine.resources.sampler.config import TokenLogprobs

__all__ = ["Emitted", "EngineStats", "ErrorInfo", "FinishReason", "RequestOutput", "TokenLogprobs"]

FinishReason = Literal["stop", "length", "abort", "error"]


class ErrorInfo(msgspec.Struct, frozen=True):
    """Why a request failed, in the words shown to the user."""

    message: str
    code: str
    param: str | None = None


class Emitted(msgspec.Struct, frozen=True, kw_only=True):
    """What a request yields beside tokens: a piece of speech, an image, a transcript."""

    name: str
    """What it is. The name of a streaming edge sends it there, and not to the user."""
    text: str | None = None
    array: Array | None = None
    info: dict[str, Any] = {}
    """What else there is to know of it; plain data."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one step added to one request."""

    request_id: str
    token_ids: list[int]
    """New ids; the id that ends the request is among them."""
    has_stop_token: bool = False
    """The last of them is a stop token that ended what was written, and no text."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each new id, where the request asked for them."""
    finish_reason: FinishReason | None = None
    """Set on the last output of the request, and only there."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were not computed, fixed when the request first started."""
    emitted: list[Emitted] = []
    error: ErrorInfo | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of one engine; counters only grow."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_used: int
    """Pages that running requests hold."""
    num_pages_cached: int
    """Pages that are kept for reuse only."""
    num_steps: int
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    prefix_queries: int
    """Prompt tokens of requests that were allowed to reuse, counted once a request."""
    prefix_hits: int
    """Of those, tokens that were reused."""
    prefix_hits_device: int
    """Of those, tokens whose pages were in the pool; with the next two it makes the hits."""
    prefix_hits_host: int
    prefix_hits_disk: int
    num_preemptions: int
    num_evictions: int
    """Pages kept for reuse that were handed out anew."""
    num_pages_host: int
    """Pages in the tier in host memory."""
    num_pages_disk: int
    """Pages in the tier on disk, as far as this engine knows."""
    num_pages_broken: int
    """Pages of tiers whose content was not what had been written; they were computed anew."""
    num_encoder_hits: int
    """Items whose encoder's output was found."""
    num_events_lost: int = 0
    """Batches of KV events that no reader will see; whoever publishes them counts."""


TOKEN_COUNTERS = (
    "prompt_tokens",
    "cached_tokens",
    "generation_tokens",
    "prefix_queries",
    "prefix_hits",
    "prefix_hits_device",
    "prefix_hits_host",
    "prefix_hits_disk",
)
"""Counters of ``EngineStats`` that the engine keeps."""
RESOURCE_COUNTERS = (
    "num_evictions",
    "num_pages_host",
    "num_pages_disk",
    "num_pages_broken",
    "num_encoder_hits",
)
"""Numbers of ``EngineStats`` that resources report."""
