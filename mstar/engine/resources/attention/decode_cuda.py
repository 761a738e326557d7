"""Attention of one new token a segment to a paged cache, as a Triton kernel.

A program takes the query heads that share a key head, and reads its keys and values once, page
after page. Where there are few segments, each one's slots are dealt out to several programs, and
the last of them to be done puts their sums together.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)
"""Queries and caches that the kernel takes."""

_NUM_PROGRAMS, _NUM_SMALL_PROGRAMS = 512, 640
"""Programs that a device is given, where splitting segments makes so many; the latter are of heads
of 64 elements or fewer, of which a program reads less at a time."""
_SMALL_DIM = 64
_MAX_SPLITS = 32


class Pages(NamedTuple):
    """Where segments lie in a cache, and who has been there; int32, on its device."""

    begins: Tensor
    """``[B]``: place of each segment's first page in ``indices``."""
    lens: Tensor
    """``[B]``: slots that each segment's query may see, its own included, in tokens."""
    indices: Tensor
    """Pages of all segments."""
    arrivals: Tensor
    """``[B * num_kv_heads]``: counts programs that are done; zeros before and behind a call."""


def num_splits(num_segments: int, num_kv_heads: int, dim: int) -> int:
    """Return among how many programs the slots of one segment are dealt out; a power of 2.

    It follows from nothing else, so that a recording serves streams of any length.
    """
    most = _NUM_SMALL_PROGRAMS if dim <= _SMALL_DIM else _NUM_PROGRAMS
    splits = 1
    while 2 * splits * num_segments * num_kv_heads <= most and splits < _MAX_SPLITS:
        splits *= 2
    return splits


def decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Pages,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    """Return ``[B, num_qo_heads, head_dim]``: each segment's query attends to its slots.

    Args:
        query: ``[B, num_qo_heads, head_dim]``, contiguous.
        keys: ``[num_pages, page_size, num_kv_heads, head_dim]``, contiguous.
        values: Like ``keys``.
        pages: The segments, each of one slot at least.
        scale: Factor on the scores.
        window: Slots that the query sees at most, the last ones; ``None``: all.
        soft_cap: As in ``LayerAttention``.
    """
    num_segments, num_heads, dim = query.shape
    _, page_size, num_kv_heads, _ = keys.shape
    splits = num_splits(num_segments, num_kv_heads, dim)
    out = torch.empty_like(query)
    sums, extents = out, out
    if splits > 1:
        sums = query.new_empty((num_segments, num_heads, splits, dim), dtype=torch.float32)
        extents = query.new_empty((num_segments, num_heads, splits, 2), dtype=torch.float32)
    _decode_kernel[(num_kv_heads, num_segments, splits)](
        out,
        sums,
        extents,
        pages.arrivals,
        query,
        keys,
        values,
        pages.begins,
        pages.lens,
        pages.indices,
        scale,
        soft_cap or 0.0,
        window or 0,
        HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        DIM=dim,
        PAGE=page_size,
        # A product of matrices has sixteen rows at least.
        ROWS=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        BLOCK=64 if dim <= 128 else 32,
        SPLITS=splits,
        HAS_CAP=soft_cap is not None,
        HAS_WINDOW=window is not None,
        num_warps=2,
    )
    return out


@triton.jit
def _decode_kernel(  # noqa: PLR0913, PLR0915, PLR0917 - a launch takes its arguments by place
    out,
    sums,
    extents,
    arrivals,
    query,
    keys,
    values,
    begins,
    lens,
    indices,
    scale,
    soft_cap,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    head = tl.program_id(0)
    segment = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lens + segment)
    own = indices + tl.load(begins + segment)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    # Blocks begin at multiples of their size, so that none lies on two pages unless it must.
    start = first // BLOCK * BLOCK
    share = tl.cdiv(tl.cdiv(length - start, SPLITS), BLOCK) * BLOCK
    start += split * share
    stop = tl.minimum(start + share, length)

    row = tl.arange(0, ROWS)
    is_row = row < GROUP
    column = tl.arange(0, DIM)
    slot = tl.arange(0, BLOCK)
    query_row = (segment * HEADS + head) * GROUP + row
    asked = tl.load(
        query + query_row[:, None] * DIM + column[None, :], mask=is_row[:, None], other=0.0
    )
    top = tl.full([ROWS], -float("inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    for begin in tl.range(start, stop, BLOCK, num_stages=3):
        at = begin + slot
        inside = (at >= first) & (at < stop)
        if PAGE % BLOCK == 0:
            place = tl.load(own + begin // PAGE).to(tl.int64) * PAGE + begin % PAGE + slot
        else:
            place = tl.load(own + at // PAGE, mask=inside, other=0).to(tl.int64) * PAGE + at % PAGE
        where = (place * HEADS + head)[:, None] * DIM + column[None, :]
        key = tl.load(keys + where, mask=inside[:, None], other=0.0)
        value = tl.load(values + where, mask=inside[:, None], other=0.0)
        score = tl.dot(asked, tl.trans(key)) * scale
        if HAS_CAP:
            # tanh(z) is 2 * logistic(2z) - 1.
            score = soft_cap * (2 * tl.sigmoid(2 * score / soft_cap) - 1)
        score = tl.where(inside[None, :], score * 1.4426950408889634, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        shrink = tl.exp2(top - new_top)
        share_of = tl.exp2(score - new_top[:, None])
        weight = weight * shrink + tl.sum(share_of, 1)
        total = total * shrink[:, None] + tl.dot(share_of.to(value.dtype), value)
        top = new_top
    if SPLITS > 1:
        part = query_row * SPLITS + split
        tl.store(sums + part[:, None] * DIM + column[None, :], total, mask=is_row[:, None])
        tl.store(extents + part * 2, top, mask=is_row)
        tl.store(extents + part * 2 + 1, weight, mask=is_row)
        # One thread counts the program in, and must do so behind what all threads wrote.
        tl.debug_barrier()
        count = arrivals + segment * HEADS + head
        if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.store(count, 0)
            _merge(out, sums, extents, query_row, is_row, ROWS, DIM, SPLITS)
    else:
        target = out + query_row[:, None] * DIM + column[None, :]
        tl.store(target, (total / weight[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _merge(  # noqa: PLR0913, PLR0917 - a function of Triton's takes its arguments by place
    out,
    sums,
    extents,
    query_row,
    is_row,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    column = tl.arange(0, DIM)[None, :]
    top = tl.full([ROWS], -float("inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        top = tl.maximum(top, _read(extents + (query_row * SPLITS + split) * 2, is_row))
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    for split in tl.static_range(SPLITS):
        part = query_row * SPLITS + split
        own_weight = _read(extents + part * 2 + 1, is_row)
        # A part without slots has no weight, and nothing as its largest score.
        scale = tl.where(own_weight > 0, tl.exp2(_read(extents + part * 2, is_row) - top), 0.0)
        weight += own_weight * scale
        total += _read(sums + part[:, None] * DIM + column, is_row[:, None]) * scale[:, None]
    mean = (total / weight[:, None]).to(out.dtype.element_ty)
    tl.store(out + query_row[:, None] * DIM + column, mean, mask=is_row[:, None])


@triton.jit
def _read(place, mask):
    """Load what another program wrote, of which this one's processor may have an older copy."""
    return tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
