"""The layout of a prompt: spans of token ids, and items that are not tokens."""

from collections.abc import Sequence

import msgspec

from mstar.errors import RequestError

DIGEST_BYTES = 32


class Grid(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Places of an item's slots on three axes: time, row, column; slots come in this order.

    They count from the item's first slot, whose position is that of the stream.
    """

    times: tuple[int, ...]
    """Time of each frame, one frame an entry; a picture is the one frame ``(0,)``."""
    rows: int
    """Slots of a frame from top to bottom."""
    columns: int
    """Slots of a frame from left to right."""

    @property
    def num_slots(self) -> int:
        """Slots of all frames."""
        return len(self.times) * self.rows * self.columns

    @property
    def advance(self) -> int:
        """How far it moves the position counter: behind the farthest place on any axis."""
        return max(*self.times, self.rows - 1, self.columns - 1) + 1


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
    """How far the whole span moves the position counter; ``None``: by its grid's or the scheme's
    rule."""
    is_whole: bool = False
    """Attention inside it goes in both directions: its slots are computed in one step."""
    kind: str = ""
    """Modality of an item; names what encodes it."""
    grid: Grid | None = None
    """Where its slots are on the axes of positions of several axes; ``None``: as the scheme says,
    the same on all axes."""


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
        RequestError: If spans do not cover the prompt, a length, grid or advance is wrong, a
            digest is shorter than SHA-256 makes it, or inputs are missing.
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
        elif span.grid is not None:
            _check_grid(span.grid, span.length, where)
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


def _check_grid(grid: Grid, length: int, where: str) -> None:
    if min(grid.rows, grid.columns, len(grid.times)) < 1 or min(grid.times) < 0:
        raise RequestError(
            f"{where} has a grid of {grid.rows} rows, {grid.columns} columns and the times "
            f"{list(grid.times)}; at least one of each, and no time below 0",
            param="prompt",
        )
    if grid.num_slots != length:
        raise RequestError(
            f"{where} has {length} slots and a grid of {len(grid.times)} frames of {grid.rows} "
            f"rows and {grid.columns} columns, which are {grid.num_slots}",
            param="prompt",
        )
