"""What a request yields while it runs, and what the engine tells about itself."""

from typing import Literal

import msgspec

from mstar.engine.resources.sampler.config import TokenLogprobs

__all__ = ["EngineStats", "ErrorInfo", "FinishReason", "RequestOutput", "TokenLogprobs"]

FinishReason = Literal["stop", "length", "abort", "error"]


class ErrorInfo(msgspec.Struct, frozen=True):
    """Why a request failed, in the words shown to the user."""

    message: str
    code: str
    param: str | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one step added to one request."""

    request_id: str
    token_ids: list[int]
    """New ids; the id that ends the request is among them."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each new id, where the request asked for them."""
    finish_reason: FinishReason | None = None
    """Set on the last output of the request, and only there."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were not computed, fixed when the request first started."""
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
    num_preemptions: int
