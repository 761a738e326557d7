"""The product of one row with a weight as a Triton kernel.

It does nothing but read the weight, which matrix units cannot speed up: each program adds up one
output in float32, so that there are thousands of them even where cuBLAS has too few tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)
"""What the kernel takes."""

_BLOCK = 1024


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T``, ``[1, out_features]``.

    Args:
        x: ``[1, in_features]``, contiguous.
        weight: ``[out_features, in_features]`` of the same dtype, contiguous.
    """
    out_features, in_features = weight.shape
    out = x.new_empty((1, out_features))
    block = min(triton.next_power_of_2(in_features), _BLOCK)
    _product_kernel[(out_features,)](
        out,
        x,
        weight,
        WIDTH=in_features,
        BLOCK=block,
        num_warps=max(1, block // 128),
    )
    return out


@triton.jit
def _product_kernel(out, x, weight, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = weight + tl.program_id(0).to(tl.int64) * WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.range(0, WIDTH, BLOCK, num_stages=1):
        column = begin + tl.arange(0, BLOCK)
        inside = column < WIDTH
        factor = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        total += factor * tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, 0).to(out.dtype.element_ty))
