"""What a request must keep to be taken in by an engine."""

from mstar.engine.model import Model
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.spans import check_spans
from mstar.errors import CapacityError, ContextLengthError, RequestError


def max_len(prepared: PreparedRequest, model: Model, limit: int) -> int:
    """Return the slots that a request may ever fill, prompt included, in tokens.

    Args:
        prepared: The request.
        model: What serves it.
        limit: Prompt and output of one request together, in tokens.

    Raises:
        RequestError: If it has no tokens, or an id outside the vocabulary.
        ContextLengthError: If prompt and output exceed ``limit``.
    """
    ids = prepared.token_ids
    if not ids:
        raise RequestError("the prompt has no tokens; give it at least one", param="prompt")
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < model.vocab_size)
        raise RequestError(
            f"token id {wrong} is outside the vocabulary of {model.vocab_size}",
            param="prompt",
        )
    for name in ("logit_bias", "stop_token_ids"):
        for token in getattr(prepared.params, name):
            if token >= model.vocab_size:
                raise RequestError(
                    f"{name} names token id {token}, outside the vocabulary of {model.vocab_size}",
                    param=name,
                )
    max_tokens = prepared.params.max_tokens
    if len(ids) >= limit:
        raise ContextLengthError(
            f"the prompt has {len(ids)} tokens and the context holds {limit}, of which at "
            "least one must stay for the answer; shorten the prompt",
            param="prompt",
        )
    if max_tokens is not None and len(ids) + max_tokens > limit:
        raise ContextLengthError(
            f"{len(ids)} prompt tokens and max_tokens={max_tokens} exceed the context of "
            f"{limit} tokens; lower max_tokens to {limit - len(ids)} or shorten the prompt",
            param="max_tokens",
        )
    return limit if max_tokens is None else len(ids) + max_tokens


def check_layout(prepared: PreparedRequest, model: Model, limit: int) -> None:
    """Verify that the layout covers the ids and every item can be encoded and computed.

    Args:
        prepared: The request.
        model: What serves it.
        limit: Tokens of one step at most.

    Raises:
        RequestError: If the layout is wrong, or the model takes no items of a kind.
        CapacityError: If an item is larger than a step.
    """
    spans, encoders = prepared.spans, model.encoders
    if not spans and not prepared.inputs:
        return
    check_spans(spans, len(prepared.token_ids), len(prepared.inputs))
    for span in spans:
        if span.digest is None:
            continue
        if span.kind not in encoders:
            known = ", ".join(sorted(encoders)) or "none"
            raise RequestError(
                f"the prompt has an item of kind {span.kind!r}; {model.name} takes: {known}",
                param="prompt",
            )
        if span.length > limit:
            raise CapacityError(
                f"an item of {span.length} slots is encoded in one step, which holds {limit} "
                "tokens; make it smaller or raise max_num_batched_tokens",
                param="prompt",
            )
