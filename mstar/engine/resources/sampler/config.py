"""What a request asks of sampling, and what a node declares about it."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from mstar.engine.resources.base import Resource
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ResourceStep
from mstar.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 1000
"""Of one stop string, in characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    Raises:
        RequestError: If a value is out of its range; names the field, the value and the range.
    """

    max_tokens: int | None = None
    """Tokens to generate at most; ``None``: what the context leaves."""
    min_tokens: int = 0
    """Before so many tokens, stop tokens are masked and stop strings not looked for."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Keep the ``top_k`` most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches ``top_p``."""
    min_p: float = 0.0
    """Drop tokens less likely than ``min_p`` times the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    presence_penalty: float = 0.0
    """Subtracted once from logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted for each time a token is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits, by token id."""
    seed: int | None = None
    """Same seed, same tokens, in any batch; ``None``: drawn afresh by the engine."""
    logprobs: int | None = None
    """Log-probabilities of the chosen and the ``logprobs`` most likely tokens; ``None``: none."""
    stop: tuple[str, ...] = ()
    """Strings that end the output and are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the output, beside the model's own."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""

    def __post_init__(self) -> None:  # noqa: C901, PLR0912 - one rule a field
        def number(name: str, low: float, high: float, *, integer: bool = False) -> None:
            value = getattr(self, name)
            kind = int if integer else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind):
                what = "an integer" if integer else "a number"
                raise RequestError(f"{name} must be {what}, not {value!r:.40}", param=name)
            if not (low <= value <= high) or math.isnan(value):
                raise RequestError(
                    f"{name} is {value}; it must lie between {low} and {high}", param=name
                )

        if self.max_tokens is not None:
            number("max_tokens", 1, 2**31 - 1, integer=True)
        number("min_tokens", 0, 2**31 - 1, integer=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; it must not exceed max_tokens {self.max_tokens}",
                param="min_tokens",
            )
        number("temperature", 0.0, 100.0)
        number("top_k", -1, 2**31 - 1, integer=True)
        number("top_p", 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p is 0; it must be above 0 and at most 1", param="top_p")
        number("min_p", 0.0, 1.0)
        number("repetition_penalty", 1e-3, 1e3)
        number("presence_penalty", -2.0, 2.0)
        number("frequency_penalty", -2.0, 2.0)
        if self.seed is not None:
            number("seed", -(2**63), 2**64 - 1, integer=True)
        if self.logprobs is not None:
            number("logprobs", 0, MAX_LOGPROBS, integer=True)
        if (
            not isinstance(self.stop, (tuple, list))
            or len(self.stop) > MAX_STOP_STRINGS
            or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LEN for s in self.stop)
        ):
            raise RequestError(
                f"stop is {self.stop!r:.60}; it must be a sequence of at most {MAX_STOP_STRINGS} "
                f"strings, each of 1 to {MAX_STOP_LEN} characters",
                param="stop",
            )
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias is {self.logit_bias!r:.40}; it must map token ids to numbers",
                param="logit_bias",
            )
        if not isinstance(self.stop_token_ids, Collection):
            raise RequestError(
                f"stop_token_ids is {self.stop_token_ids!r:.40}; it must be a sequence of token "
                "ids",
                param="stop_token_ids",
            )
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(self, name):
                if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                    raise RequestError(f"{name} names the token id {token!r:.40}", param=name)
        for token, bias in self.logit_bias.items():
            if not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias of token {token} is {bias!r:.40}; "
                    "it must lie between -100 and 100",
                    param="logit_bias",
                )


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one sampled token, of the raw logits' distribution."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """The most likely ids with their log-probabilities, best first."""


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """What the sampler must know of a node's logits."""

    vocab_size: int
    stop_token_ids: tuple[int, ...] = ()
    """The model's own end tokens, masked while ``min_tokens`` is not reached."""

    def check_params(self, params: SamplingParams) -> None:
        """Raise unless the request's token ids are in the vocabulary.

        Raises:
            RequestError: If ``logit_bias`` names an id that the model lacks.
        """
        for token in params.logit_bias:
            if token >= self.vocab_size:
                raise RequestError(
                    f"logit_bias names the token id {token}; ids lie below {self.vocab_size}",
                    param="logit_bias",
                )


@dataclass(frozen=True)
class SamplerSpec(NodeResourceSpec):
    """A node's need of a sampler."""

    config: SamplerConfig

    @property
    def resource_class(self) -> type[Resource]:
        """The sampler's manager."""
        from mstar.engine.resources.sampler.manager import SamplerManager

        return SamplerManager


@dataclass(frozen=True)
class SampleStep(ResourceStep):
    """One token for each of the step's own segments, in their order."""
