"""The layout of a prompt: spans of token ids, and items that are not tokens."""

from collections.abc import Sequence

import msgspec

from mstar.errors import RequestError

DIGEST_BYTES = 32


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run of slots of a stream that is one thing.

    Every id in ``token_ids`` has its slot; at an item's slots they are placeholders that no key
    and no embedding reads.
    """

    length: int
    """Slots, in tokens."""
    digest: bytes | None = None
    """Content name of an item (image, audio clip, latent); ``None``: token ids."""
    advance: int | None = None
    """How far the whole span moves the position counter; ``None``: by the scheme's rule."""
    is_whole: bool = False
    """Attention inside it goes in both directions: its slots are computed in one step."""
    kind: str = ""
    """Modality of an item; names what encodes it."""


def pairs(spans: Sequence[Span]) -> list[tuple[int, bytes | None]]:
    """Return spans as ``page_items`` takes them: length and digest."""
    return [(span.length, span.digest) for span in spans]


def is_item_slot(spans: Sequence[Span], slot: int) -> bool:
    """Tell whether a slot of a stream belongs to an item."""
    for span in spans:
        if slot < span.length:
            return span.digest is not None
        slot -= span.length
    return False


def check_spans(spans: Sequence[Span], num_slots: int, num_inputs: int) -> None:
    """Verify a layout.

    Args:
        spans: The layout.
        num_slots: Slots of the prompt, in tokens.
        num_inputs: Items that have something to encode.

    Raises:
        RequestError: If spans do not cover the prompt, a length or advance is wrong, a digest is
            shorter than SHA-256 makes it, or inputs are missing.
    """
    for index, span in enumerate(spans):
        where = f"span {index} of the layout"
        if span.length < 1:
            raise RequestError(f"{where} has {span.length} slots; at least 1", param="prompt")
        if span.digest is None:
            if span != Span(span.length):
                raise RequestError(f"{where} is token ids and has an item's fields", param="prompt")
        elif len(span.digest) != DIGEST_BYTES:
            raise RequestError(
                f"{where} has a digest of {len(span.digest)} bytes; it must have {DIGEST_BYTES}",
                param="prompt",
            )
        elif span.advance is not None and span.advance < 0:
            raise RequestError(f"{where} moves positions by {span.advance}", param="prompt")
    if sum(span.length for span in spans) != num_slots:
        raise RequestError(
            f"the layout has {sum(span.length for span in spans)} slots, the prompt {num_slots}",
            param="prompt",
        )
    num_items = sum(span.digest is not None for span in spans)
    if num_items != num_inputs:
        raise RequestError(
            f"the layout has {num_items} items and {num_inputs} inputs", param="prompt"
        )
