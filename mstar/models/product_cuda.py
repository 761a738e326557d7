"""The product of one row with a weight as a Triton kernel.

It does nothing but read the weight, which matrix units cannot speed up: each program adds up an
output or two in float32, so that there are thousands of them even where cuBLAS has too few tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)
"""What the kernel takes."""

_SHORT, _LONG = 1536, 4096
"""Elements of a row: up to short one warp reads it in few rounds, from long on eight warps do."""
_ENOUGH, _MANY = 2048, 8192
"""Outputs: from enough on, if even, a program of one warp has two; from many on no program needs
eight warps to keep the device busy."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias``, ``[1, out_features]``.

    Args:
        x: ``[1, in_features]``, contiguous.
        weight: ``[out_features, in_features]`` of the same dtype, contiguous.
        bias: ``[out_features]``, likewise, or ``None``.
    """
    out_features, in_features = weight.shape
    out = x.new_empty((1, out_features))
    rows, block, num_warps = _tile(out_features, in_features)
    _product_kernel[(out_features // rows,)](
        out,
        x,
        weight,
        weight if bias is None else bias,
        WIDTH=in_features,
        HAS_BIAS=bias is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=num_warps,
    )
    return out


def _tile(out_features: int, in_features: int) -> tuple[int, int, int]:
    """Return the outputs of a program, the elements of a row that it reads at once, its warps."""
    if in_features <= _SHORT:
        return 2 if out_features >= _ENOUGH and out_features % 2 == 0 else 1, 256, 1
    return (1, 512, 2) if in_features < _LONG or out_features >= _MANY else (1, 1024, 8)


@triton.jit
def _product_kernel(  # noqa: PLR0913, PLR0917 - a launch takes its arguments by place
    out,
    x,
    weight,
    bias,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    row = tl.arange(0, ROWS)
    own = weight + first.to(tl.int64) * WIDTH + row[:, None] * WIDTH
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in tl.range(0, WIDTH, BLOCK, num_stages=1):
        column = begin + tl.arange(0, BLOCK)
        inside = column < WIDTH
        factor = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        part = tl.load(own + column[None, :], mask=inside[None, :], other=0.0)
        total += factor[None, :] * part.to(tl.float32)
    value = tl.sum(total, 1)
    if HAS_BIAS:
        value += tl.load(bias + first + row).to(tl.float32)
    tl.store(out + first + row, value.to(out.dtype.element_ty))
