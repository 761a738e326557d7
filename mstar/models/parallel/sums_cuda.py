"""Sums and gathers over ranks whose GPUs write to each other's memory, one Triton kernel each.

A program has a piece of its rank's share: it writes it into the inboxes of the others, and takes
theirs from its own inbox, where it looks until all of them is there::

    rank 0   share ──► inbox of 1        look at own inbox ─► share of 1 ─► sum
    rank 1   share ──► inbox of 0        look at own inbox ─► share of 0 ─► sum

What is not there yet has a pattern that no share has, so that neither flags nor an order of writes
is needed: every element says itself that it has come. Who took a piece writes the pattern again.
A piece has slots of its own, used in turns of two: who has got the next share of a piece knows
that the one before it was taken. Programs wait only for their like on other devices. Launches come
in the same order there, and programs of a launch in the order of their numbers, as devices start
them though nothing promises it, so that the first of those that are not done always gets on.
All ranks add up in the order of the ranks, and so have the same bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernels take."""
EMPTY = -(1 << 15)
"""What each two bytes of an inbox hold, as an int16, where nothing has come: -0.0, or as float32
-4.6e-41. A share that has it gives 0.0 for it."""

_THREAD_ELEMENTS = 16


class Boxes(NamedTuple):
    """Where the ranks' shares meet."""

    inboxes: Tensor
    """int64 ``[size]``: address of each rank's inbox, ``[2, size, num_slots, slot]`` elements."""
    turns: Tensor
    """int32 ``[num_slots]``: uses of each slot until now."""
    rank: int
    size: int
    slot: int
    """Elements of one piece; a power of two where shares are gathered."""


def can_sum(share: Tensor, boxes: Boxes) -> bool:
    """Tell whether ``total`` and ``add_norm`` take ``[num_rows, width]`` of one of ``DTYPES``."""
    num_rows, width = share.shape
    return 0 < num_rows <= len(boxes.turns) and width <= boxes.slot


def can_join(share: Tensor, boxes: Boxes) -> bool:
    """Tell whether ``join`` takes ``[num_rows, width]`` of one of ``DTYPES``."""
    num_rows, width = share.shape
    num_pieces: int = num_rows * -(-width // boxes.slot)
    return 0 < num_pieces <= len(boxes.turns)


def total(share: Tensor, boxes: Boxes) -> Tensor:
    """Return the sum of all ranks' ``share``, in a new tensor.

    Args:
        share: ``[num_rows, width]``, contiguous; such as ``can_sum`` agrees to.
        boxes: Where to meet.
    """
    return _sum(share, share, None, 0.0, boxes)


def add_norm(x: Tensor, share: Tensor, weight: Tensor, eps: float, boxes: Boxes) -> Tensor:
    """Add the sum of all ranks' ``share`` to ``x`` in place and return it normalised.

    Args:
        x: ``[num_rows, width]``, contiguous.
        share: The same shape and dtype, contiguous; such as ``can_sum`` agrees to.
        weight: float32 ``[width]``.
        eps: Added to the mean square.
        boxes: Where to meet.
    """
    return _sum(x, share, weight, eps, boxes)


def _sum(x: Tensor, share: Tensor, weight: Tensor | None, eps: float, boxes: Boxes) -> Tensor:
    assert can_sum(share, boxes), share.shape
    num_rows, width = share.shape
    out = torch.empty_like(x)
    # A warp at least: its threads find out together whether all has come.
    block = max(32, triton.next_power_of_2(width))
    _sum_kernel[(num_rows,)](
        out,
        x,
        share,
        x if weight is None else weight,
        boxes.inboxes,
        boxes.turns,
        width,
        len(boxes.turns) * boxes.slot,
        eps,
        RANK=boxes.rank,
        SIZE=boxes.size,
        SLOT=boxes.slot,
        HAS_NORM=weight is not None,
        BLOCK=block,
        num_warps=min(max(block // (32 * _THREAD_ELEMENTS), 1), 16),
    )
    return out


def join(share: Tensor, boxes: Boxes) -> Tensor:
    """Return all ranks' ``share`` side by side, ``[num_rows, size * width]``.

    Args:
        share: ``[num_rows, width]``, contiguous; such as ``can_join`` agrees to.
        boxes: Where to meet.
    """
    assert can_join(share, boxes), share.shape
    num_rows, width = share.shape
    out = share.new_empty((num_rows, boxes.size * width))
    _join_kernel[(num_rows * triton.cdiv(width, boxes.slot),)](
        out,
        share,
        boxes.inboxes,
        boxes.turns,
        width,
        len(boxes.turns) * boxes.slot,
        RANK=boxes.rank,
        SIZE=boxes.size,
        SLOT=boxes.slot,
        num_warps=8,
    )
    return out


@triton.jit
def _is_empty(x):
    if x.dtype.primitive_bitwidth == 32:
        found = x.to(tl.int32, bitcast=True) == -0x7FFF8000
    else:
        found = x.to(tl.int16, bitcast=True) == -0x8000
    return found


@triton.jit
def _inbox(inboxes, rank, share):
    # Without being told Triton takes it to be aligned to nothing, and writes number by number.
    return tl.multiple_of(tl.load(inboxes + rank).to(share.dtype), 16)


@triton.jit
def _give(  # noqa: PLR0913, PLR0917 - a function of Triton's takes its arguments by place
    own,
    inside,
    place,
    inboxes,
    share,
    room,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
):
    # The rank takes its own as the others do, so that all have the same bits.
    given = tl.where(_is_empty(own), 0.0, own).to(own.dtype)
    for step in tl.static_range(1, SIZE):
        inbox = _inbox(inboxes, (RANK + step) % SIZE, share)
        tl.store(inbox + place + RANK * room, given, mask=inside)
    return given


@triton.jit
def _take(peer, inside, place, inboxes, share, room, RANK: tl.constexpr):
    inbox = _inbox(inboxes, RANK, share) + place + peer * room
    got = tl.load(inbox, mask=inside, other=0.0, volatile=True)
    while tl.max(_is_empty(got).to(tl.int32), 0) != 0:
        got = tl.load(inbox, mask=inside, other=0.0, volatile=True)
    # All threads have theirs: they found it out together.
    if got.dtype.primitive_bitwidth == 32:
        empty = tl.full(got.shape, -0x7FFF8000, tl.int32)
    else:
        empty = tl.full(got.shape, -0x8000, tl.int16)
    tl.store(inbox, empty.to(got.dtype, bitcast=True), mask=inside)
    return got


@triton.jit
def _sum_kernel(  # noqa: PLR0913, PLR0917 - a launch takes its arguments by place
    out,
    x,
    share,
    weight,
    inboxes,
    turns,
    width,
    room,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row.to(tl.int64) * width + column
    turn = tl.load(turns + row) + 1
    place = (turn & 1).to(tl.int64) * SIZE * room + row * SLOT + column
    own = tl.load(share + at, mask=inside, other=0.0)
    own = _give(own, inside, place, inboxes, share, room, RANK, SIZE)
    before = tl.zeros([BLOCK], tl.float32)
    factor = before
    if HAS_NORM:
        before = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(weight + column, mask=inside, other=0.0)
    value = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            value += own.to(tl.float32)
        else:
            value += _take(peer, inside, place, inboxes, share, room, RANK).to(tl.float32)
    tl.store(turns + row, turn)
    if HAS_NORM:
        # What later layers read is the rounded sum, so that is what is normalised.
        rounded = (value + before).to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
        value = value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)) * factor
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _join_kernel(  # noqa: PLR0913, PLR0917 - a launch takes its arguments by place
    out,
    share,
    inboxes,
    turns,
    width,
    room,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    SLOT: tl.constexpr,
):
    piece = tl.program_id(0)
    num_blocks = tl.cdiv(width, SLOT)
    row = (piece // num_blocks).to(tl.int64)
    column = piece % num_blocks * SLOT + tl.arange(0, SLOT)
    inside = column < width
    turn = tl.load(turns + piece) + 1
    place = (turn & 1).to(tl.int64) * SIZE * room + piece * SLOT + tl.arange(0, SLOT)
    own = tl.load(share + row * width + column, mask=inside, other=0.0)
    own = _give(own, inside, place, inboxes, share, room, RANK, SIZE)
    target = out + row * SIZE * width + column
    tl.store(target + RANK * width, own, mask=inside)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            got = _take(peer, inside, place, inboxes, share, room, RANK)
            tl.store(target + peer * width, got, mask=inside)
    tl.store(turns + piece, turn)
