"""Pages of a cache to memory in one piece and back, as a Triton kernel: one launch for many pages.

A cache may be so large that torch would launch a copy for each layer of each page.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_BLOCK = 2048
"""Words that a program moves at a time."""


def gather(memory: Tensor, pages: Tensor, rows: Tensor) -> None:
    """Copy pages out of a cache.

    Args:
        memory: ``[num_layers, 2, num_pages, ...]``, contiguous.
        pages: int64 ``[num_moved]``.
        rows: uint8 ``[num_moved or more, page_nbytes]``, contiguous: takes a page each.
    """
    _move(memory, pages, rows, is_gather=True)


def scatter(memory: Tensor, pages: Tensor, rows: Tensor) -> None:
    """Copy pages into a cache; what ``gather`` does, the other way."""
    _move(memory, pages, rows, is_gather=False)


def _move(memory: Tensor, pages: Tensor, rows: Tensor, is_gather: bool) -> None:
    num_layers, num_kinds, num_pages = memory.shape[:3]
    num_parts = num_layers * num_kinds
    nbytes = rows.shape[1] // num_parts
    word = next(word for word in _WORDS if nbytes % word.itemsize == 0)
    _move_kernel[(len(pages), num_parts)](
        memory.view(-1).view(word),
        rows.view(word),
        pages,
        num_pages,
        nbytes // word.itemsize,
        IS_GATHER=is_gather,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit
def _move_kernel(
    memory, rows, pages, num_pages, width, IS_GATHER: tl.constexpr, BLOCK: tl.constexpr
):
    # Offsets go beyond 32 bits.
    place = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    inside = memory + (part * num_pages + tl.load(pages + place)) * width
    outside = rows + (place * tl.num_programs(1) + part) * width
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < width
        if IS_GATHER:
            tl.store(outside + at, tl.load(inside + at, mask=mask), mask=mask)
        else:
            tl.store(inside + at, tl.load(outside + at, mask=mask), mask=mask)
