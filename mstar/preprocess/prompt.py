"""A prompt made ready for the engine: template, ids, checks and page keys."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mstar.engine.request import Companion, PreparedRequest, context_root
from mstar.engine.resources.kv.keys import fingerprint
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spans import Span
from mstar.errors import ContextLengthError, RequestError
from mstar.preprocess.drafts import Drafter, PromptRequest, too_long
from mstar.preprocess.items import lay_out, prompt_keys
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.processors.base import Draft
from mstar.preprocess.tokenizer import TextTokenizer

__all__ = ["PromptPreparer", "PromptRequest", "item_tokens", "request_root"]

MAX_SALT_LEN = 128
_SALT_FORBIDDEN = "@/\\\0"


def request_root(deployment_root: bytes | None, cache_salt: str | None) -> bytes | None:
    """Return the key of a request's empty prefix; ``None`` keeps it out of reuse.

    Args:
        deployment_root: What the deployment's KV depends on; ``None``: reuse is off.
        cache_salt: What the request keeps others apart by.
    """
    if deployment_root is None:
        return None
    # ``None`` has a text, which could be somebody's salt: no salt is no field.
    salt = () if cache_salt is None else (cache_salt,)
    return fingerprint("mstar-request-root-v1", deployment_root, "cache_salt", *salt)


class PromptPreparer:
    """Prepares the prompts of one deployment.

    Args:
        tokenizer: The model's.
        max_model_len: Prompt and output of one request together, in tokens.
        page_size: Slots of one KV page, in tokens.
        deployment_root: What the deployment's KV depends on; ``None``: reuse is off.
        vocab_size: Rows of the model's embedding table; ids lie below it.
        processor: The family's, for what is more than text; ``None``: there is none.
        limits: What media may cost.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        max_model_len: int,
        page_size: int,
        deployment_root: bytes | None,
        vocab_size: int,
        *,
        processor: object | None = None,
        limits: MediaLimits | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.page_size = page_size
        self.deployment_root = deployment_root
        self.vocab_size = vocab_size
        limits = limits or MediaLimits()
        self._drafter = Drafter(tokenizer, max_model_len, processor, limits)

    def prepare(self, request: PromptRequest) -> PreparedRequest:
        """Return the request as the engine takes it.

        Raises:
            RequestError: If the prompt, the salt or an id is wrong, or the model cannot do what is
                asked; names the field at fault.
            ContextLengthError: If prompt, or prompt and ``max_tokens``, exceed the context.
        """
        check_cache_salt(request.cache_salt)
        check_retention(request.retain_seconds)
        draft = self._drafter.draft(request)
        if request.token_ids is not None:
            self._check_ids("prompt", request.token_ids)
        self._check_ids("logit_bias", request.params.logit_bias)
        self._check_ids("stop_token_ids", request.params.stop_token_ids)
        layout = lay_out(draft.parts)
        param = "messages" if request.messages is not None else "prompt"
        if draft.parts:
            self._check_length(len(layout.token_ids), request.params, param)
        root = request_root(self.deployment_root, request.cache_salt)
        begin = context_root(root, draft.context)
        spans = layout.spans if layout.inputs else []
        return PreparedRequest(
            request_id=request.request_id,
            token_ids=layout.token_ids,
            params=_with_end(request.params, draft),
            page_keys=self._keys(layout.token_ids, spans, begin),
            root=root,
            spans=spans,
            inputs=layout.inputs,
            retain_seconds=float(request.retain_seconds),
            context=list(draft.context),
            num_context_slots=draft.num_context_slots,
            companions=[
                Companion(label, list(ids), self._keys(ids, (), begin))
                for label, ids in draft.companions.items()
            ],
            options=dict(draft.options),
        )

    def render(self, request: PromptRequest) -> tuple[str, list[dict[str, Any]]]:
        """Return a chat as the template writes it, and the messages as the template is given them.

        Raises:
            RequestError: As for ``prepare``.
        """
        return self._drafter.render(request)

    def _keys(
        self, token_ids: Sequence[int], spans: Sequence[Span], root: bytes | None
    ) -> list[bytes]:
        return [] if root is None else prompt_keys(token_ids, spans, self.page_size, root)

    def _check_ids(self, param: str, token_ids: Sequence[int] | Mapping[int, float]) -> None:
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(
                    f"{param} has {token!r:.40}, which is not a token id", param=param
                )
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{param} has the token id {token}; the model's ids are 0 to "
                    f"{self.vocab_size - 1}",
                    param=param,
                )

    def _check_length(self, num_tokens: int, params: SamplingParams, param: str) -> None:
        if num_tokens == 0:
            raise RequestError("the prompt is empty; it needs at least one token", param=param)
        if num_tokens >= self.max_model_len:
            raise too_long(str(num_tokens), self.max_model_len, param)
        max_tokens = params.max_tokens
        if max_tokens is not None and num_tokens + max_tokens > self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens and max_tokens is {max_tokens}, "
                f"{num_tokens + max_tokens} in all; the context holds {self.max_model_len}: "
                f"lower max_tokens to {self.max_model_len - num_tokens} or shorten the prompt",
                param="max_tokens",
            )


def item_tokens(prepared: PreparedRequest) -> dict[str, int]:
    """Return the tokens of a prompt that are items, and those of its context, by kind."""
    counts: Counter[str] = Counter()
    for span in prepared.spans:
        if span.digest is not None:
            counts[span.kind] += span.length
    if prepared.context:
        counts[prepared.context[0].kind] += context_tokens(prepared)
    return dict(counts)


def context_tokens(prepared: PreparedRequest) -> int:
    """Return the slots that a prompt and what follows it attend to from outside."""
    return max(prepared.num_context_slots, sum(item.length for item in prepared.context))


def _with_end(params: SamplingParams, draft: Draft) -> SamplingParams:
    """Return the parameters with the output's length, where only the family says it."""
    if params.max_tokens is not None or draft.max_tokens is None:
        return params
    return replace(params, max_tokens=draft.max_tokens)


def check_cache_salt(cache_salt: str | None) -> None:
    r"""Verify a salt.

    Raises:
        RequestError: If it is empty, longer than 128 characters, or has one of ``@ / \`` or NUL.
    """
    if cache_salt is None:
        return
    if not isinstance(cache_salt, str) or not 1 <= len(cache_salt) <= MAX_SALT_LEN:
        raise RequestError(
            f"cache_salt must be a string of 1 to {MAX_SALT_LEN} characters, found "
            f"{cache_salt!r:.40}",
            param="cache_salt",
        )
    # A lone surrogate has no bytes to make a key of.
    bad = [c for c in cache_salt if c in _SALT_FORBIDDEN or "\ud800" <= c <= "\udfff"]
    if bad:
        raise RequestError(
            f"cache_salt has the character {bad[0]!r}; @, /, \\, NUL and lone surrogates are not "
            "allowed",
            param="cache_salt",
        )


def check_retention(retain_seconds: float) -> None:
    """Verify a retention hint.

    Raises:
        RequestError: If it is no number, or below zero.
    """
    is_number = isinstance(retain_seconds, (int, float)) and not isinstance(retain_seconds, bool)
    if not is_number or not retain_seconds >= 0:
        raise RequestError(
            f"retain_seconds is {retain_seconds!r:.40}; it must be a number of seconds, at least "
            "0, or inf for pages that stay until a reset",
            param="retain_seconds",
        )
