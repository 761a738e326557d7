"""What a request must keep to be taken in by an engine."""

from mstar.engine.model import Model
from mstar.engine.request import Component, PreparedRequest
from mstar.engine.resources.spans import DIGEST_BYTES, check_spans
from mstar.errors import CapacityError, ContextLengthError, RequestError


def max_len(prepared: PreparedRequest, component: Component, limit: int) -> int:
    """Return the slots that a leg of a request may ever fill, prompt included, in tokens.

    Args:
        prepared: The leg.
        component: What its tokens are for; with an empty vocabulary it takes none.
        limit: Prompt and output of one request together, in tokens.

    Raises:
        RequestError: If it has no tokens, or an id outside the vocabulary.
        ContextLengthError: If prompt and output exceed ``limit``, or what the component was made
            for.
    """
    ids = prepared.token_ids
    if component.vocab_size == 0:
        if ids:
            raise RequestError("the model takes no tokens; give it text only", param="prompt")
        return 0
    if component.max_model_len is not None:
        limit = min(limit, component.max_model_len)
    if not ids:
        raise RequestError("the prompt has no tokens; give it at least one", param="prompt")
    _check_ids(prepared, component)
    max_tokens = (component.params or prepared.params).max_tokens
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


def _check_ids(prepared: PreparedRequest, component: Component) -> None:
    ids = prepared.token_ids
    for companion in prepared.companions:
        if len(companion.token_ids) != len(ids):
            raise RequestError(
                f"the stream {companion.label!r} has {len(companion.token_ids)} tokens and goes "
                f"along with one of {len(ids)}; they must be as many",
                param="prompt",
            )
    for stream in (ids, *(companion.token_ids for companion in prepared.companions)):
        if min(stream) < 0 or max(stream) >= component.vocab_size:
            wrong = next(i for i in stream if not 0 <= i < component.vocab_size)
            raise RequestError(
                f"token id {wrong} is outside the vocabulary of {component.vocab_size}",
                param="prompt",
            )
    params = component.params or prepared.params
    for name in ("logit_bias", "stop_token_ids"):
        for token in getattr(params, name):
            if token >= component.vocab_size:
                raise RequestError(
                    f"{name} names token id {token}, outside the vocabulary of "
                    f"{component.vocab_size}",
                    param=name,
                )


def check_keys(prepared: PreparedRequest, page_size: int) -> None:
    """Verify that the keys may be those of this deployment's pages.

    Keys of smaller pages say less than a page holds: two prompts could be taken for one.

    Args:
        prepared: The request.
        page_size: Slots of a page, in tokens.

    Raises:
        RequestError: If there are more keys than pages.
    """
    num_tokens = len(prepared.token_ids)
    num_pages = -(-num_tokens // page_size)
    for keys in (prepared.page_keys, *(own.page_keys for own in prepared.companions)):
        if len(keys) > num_pages:
            raise RequestError(
                f"page_keys has {len(keys)} keys and {num_tokens} tokens are {num_pages} pages of "
                f"{page_size}; key them by the deployment's page_size",
                param="page_keys",
            )


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
    spans, context = prepared.spans, prepared.context
    if spans or prepared.inputs:
        check_spans(spans, len(prepared.token_ids), len(prepared.inputs))
    for item in context:
        if len(item.digest) != DIGEST_BYTES or item.length < 1:
            raise RequestError(
                f"an item beside the prompt has {item.length} slots and a digest of "
                f"{len(item.digest)} bytes; it must have a slot at least, and {DIGEST_BYTES} bytes",
                param="prompt",
            )
    items = [(span.kind, span.length) for span in spans if span.digest is not None]
    for kind, length in [*items, *((item.kind, item.length) for item in context)]:
        if kind not in model.encoders:
            known = ", ".join(sorted(model.encoders)) or "none"
            raise RequestError(
                f"the prompt has an item of kind {kind!r}; {model.name} takes: {known}",
                param="prompt",
            )
        if length > limit:
            raise CapacityError(
                f"an item of {length} slots is encoded in one step, which holds {limit} "
                "tokens; make it smaller or raise max_num_batched_tokens",
                param="prompt",
            )
