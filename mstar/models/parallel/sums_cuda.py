"""Sums and gathers over ranks whose GPUs write to each other's memory, one Triton kernel each.

A program has a piece of its rank's share: it writes it into the inboxes of the others, says so,
and takes theirs from its own inbox once they have said so::

    rank 0   share ──► inbox of 1 ─► flag of 1        wait for own flag ─► share of 1 ─► sum
    rank 1   share ──► inbox of 0 ─► flag of 0        wait for own flag ─► share of 0 ─► sum

Flags count turns, and inboxes are used in turns of two: who has got the next share of a piece
knows that the one before it was read. Programs wait only for their like on other devices, which
were started in the same order there, so that the first of those that are not done always gets on.
All ranks add up in the order of the ranks, and so have the same bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernels take."""
MAX_PIECES = 4096
"""Programs of one launch."""
MAX_ROWS = 256
"""Rows of one share."""

_JOIN_BLOCK = 8192
_THREAD_ELEMENTS = 16


class Boxes(NamedTuple):
    """Where the ranks' shares meet."""

    inboxes: Tensor
    """int64 ``[size]``: address of each rank's inbox, ``[2, size, room]`` elements."""
    flags: Tensor
    """int64 ``[size]``: address of each rank's flags, int32 ``[size, MAX_PIECES]``."""
    turns: Tensor
    """int32 ``[MAX_PIECES]``: uses of each piece until now."""
    rank: int
    size: int
    room: int
    """Elements of one rank's share."""


def total(share: Tensor, boxes: Boxes) -> Tensor:
    """Return the sum of all ranks' ``share``, in a new tensor.

    Args:
        share: ``[num_rows, width]``, contiguous; of ``room`` elements at most.
        boxes: Where to meet.
    """
    return _sum(share, share, None, 0.0, boxes)


def add_norm(x: Tensor, share: Tensor, weight: Tensor, eps: float, boxes: Boxes) -> Tensor:
    """Add the sum of all ranks' ``share`` to ``x`` in place and return it normalised.

    Args:
        x: ``[num_rows, width]``, contiguous.
        share: The same shape and dtype, contiguous; of ``room`` elements at most.
        weight: float32 ``[width]``.
        eps: Added to the mean square.
        boxes: Where to meet.
    """
    return _sum(x, share, weight, eps, boxes)


def _sum(x: Tensor, share: Tensor, weight: Tensor | None, eps: float, boxes: Boxes) -> Tensor:
    num_rows, width = share.shape
    _check(share, num_rows, boxes)
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _sum_kernel[(num_rows,)](
        out,
        x,
        share,
        x if weight is None else weight,
        boxes.inboxes,
        boxes.flags,
        boxes.turns,
        width,
        boxes.room,
        eps,
        RANK=boxes.rank,
        SIZE=boxes.size,
        PIECES=MAX_PIECES,
        HAS_NORM=weight is not None,
        BLOCK=block,
        num_warps=min(max(block // (32 * _THREAD_ELEMENTS), 1), 16),
    )
    return out


def join(share: Tensor, boxes: Boxes) -> Tensor:
    """Return all ranks' ``share`` side by side, ``[num_rows, size * width]``.

    Args:
        share: ``[num_rows, width]``, contiguous; of ``room`` elements at most.
        boxes: Where to meet.
    """
    num_rows, width = share.shape
    num_pieces = num_rows * triton.cdiv(width, _JOIN_BLOCK)
    _check(share, num_pieces, boxes)
    out = share.new_empty((num_rows, boxes.size * width))
    _join_kernel[(num_pieces,)](
        out,
        share,
        boxes.inboxes,
        boxes.flags,
        boxes.turns,
        width,
        boxes.room,
        RANK=boxes.rank,
        SIZE=boxes.size,
        PIECES=MAX_PIECES,
        BLOCK=_JOIN_BLOCK,
        num_warps=8,
    )
    return out


def _check(share: Tensor, num_pieces: int, boxes: Boxes) -> None:
    assert num_pieces <= MAX_PIECES, (num_pieces, MAX_PIECES)
    assert share.numel() <= boxes.room, (share.shape, boxes.room)


@triton.jit
def _give(  # noqa: PLR0913, PLR0917 - a launch takes its arguments by place
    own,
    inside,
    place,
    turn,
    inboxes,
    flags,
    share,
    turns,
    room,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PIECES: tl.constexpr,
):
    piece = tl.program_id(0)
    for step in tl.static_range(1, SIZE):
        inbox = tl.load(inboxes + (RANK + step) % SIZE).to(share.dtype)
        tl.store(inbox + place + RANK * room, own, mask=inside)
    # One thread raises the flags, and must do so behind what all threads wrote.
    tl.debug_barrier()
    for step in tl.static_range(1, SIZE):
        flag = tl.load(flags + (RANK + step) % SIZE).to(turns.dtype) + RANK * PIECES + piece
        tl.atomic_xchg(flag, turn, sem="release", scope="sys")


@triton.jit
def _take(  # noqa: PLR0913, PLR0917 - a launch takes its arguments by place
    peer,
    inside,
    place,
    turn,
    inboxes,
    flags,
    share,
    turns,
    room,
    RANK: tl.constexpr,
    PIECES: tl.constexpr,
):
    flag = tl.load(flags + RANK).to(turns.dtype) + peer * PIECES + tl.program_id(0)
    # The difference stays right when the count of turns wraps around.
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") - turn < 0:
        pass
    tl.debug_barrier()
    inbox = tl.load(inboxes + RANK).to(share.dtype)
    return tl.load(inbox + place + peer * room, mask=inside, other=0.0, volatile=True)


@triton.jit
def _sum_kernel(  # noqa: PLR0913, PLR0917 - a launch takes its arguments by place
    out,
    x,
    share,
    weight,
    inboxes,
    flags,
    turns,
    width,
    room,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PIECES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row.to(tl.int64) * width + column
    turn = tl.load(turns + row) + 1
    place = (turn & 1).to(tl.int64) * SIZE * room + at
    own = tl.load(share + at, mask=inside, other=0.0)
    _give(own, inside, place, turn, inboxes, flags, share, turns, room, RANK, SIZE, PIECES)
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
            value += _take(
                peer, inside, place, turn, inboxes, flags, share, turns, room, RANK, PIECES
            ).to(tl.float32)
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
    flags,
    turns,
    width,
    room,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece = tl.program_id(0)
    num_blocks = tl.cdiv(width, BLOCK)
    row = (piece // num_blocks).to(tl.int64)
    column = piece % num_blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    turn = tl.load(turns + piece) + 1
    place = (turn & 1).to(tl.int64) * SIZE * room + at
    own = tl.load(share + at, mask=inside, other=0.0)
    _give(own, inside, place, turn, inboxes, flags, share, turns, room, RANK, SIZE, PIECES)
    target = out + row * SIZE * width + column
    tl.store(target + RANK * width, own, mask=inside)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            got = _take(peer, inside, place, turn, inboxes, flags, share, turns, room, RANK, PIECES)
            tl.store(target + peer * width, got, mask=inside)
    tl.store(turns + piece, turn)
