"""The element-wise steps of a transformer layer as Triton kernels, one launch each.

Elements are read and written in the tensors' dtype, and all arithmetic is float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the kernels take."""

_GATE_BLOCK = 1024
_HEADS_BLOCK = 8


def norm(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, bias: Tensor | None = None
) -> Tensor:
    """Add ``added`` to ``x`` in place and return the sum normalised, in a new tensor.

    Args:
        x: ``[..., width]``, contiguous.
        added: The same shape and dtype, or ``None`` to add nothing.
        weight: ``[width]``, contiguous, of any floating dtype.
        eps: Added to the mean square, or to the variance.
        bias: Like ``weight``, for layer normalisation; ``None``: the mean is left in.
    """
    out = torch.empty_like(x)
    width = x.shape[-1]
    num_rows = x.numel() // width
    if num_rows:
        block = triton.next_power_of_2(width)
        _norm_kernel[(num_rows,)](
            out,
            x,
            x if added is None else added.contiguous(),
            weight,
            weight if bias is None else bias,
            width,
            eps,
            HAS_ADDED=added is not None,
            IS_CENTERED=bias is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return out


def gate(merged: Tensor, is_tanh: bool) -> Tensor:
    """Return ``activation(gate) * up``, ``[num_tokens, width]``.

    Args:
        merged: ``[num_tokens, 2 * width]``, contiguous, the gate's elements before up's.
        is_tanh: The activation is gelu by tanh, else silu.
    """
    num_tokens, doubled = merged.shape
    width = doubled // 2
    out = merged.new_empty((num_tokens, width))
    if num_tokens:
        _gate_kernel[(num_tokens, triton.cdiv(width, _GATE_BLOCK))](
            out, merged, width, IS_TANH=is_tanh, BLOCK=_GATE_BLOCK, num_warps=4
        )
    return out


def heads(
    qkv: Tensor,
    num_heads: int,
    rows: Tensor | None,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    interleave: bool,
) -> Tensor:
    """Rotate q and k, write k and v to the cache, and return q ``[num_tokens, num_heads, dim]``.

    Args:
        qkv: ``[num_tokens, num_heads + 2 * num_kv_heads, dim]``, contiguous: q's heads, k's, v's.
        num_heads: Heads of q.
        rows: float32 ``[num_tokens, dim]``: cosines of all pairs, then their sines; ``None``:
            nothing is rotated.
        keys: One layer's keys ``[num_pages, page_size, num_kv_heads, dim]``, contiguous.
        values: Like ``keys``.
        slots: int64 ``[num_tokens]``: where each token is written, counted in slots.
        interleave: Pair ``i`` is elements ``2i, 2i + 1``, else ``i, i + dim / 2``.
    """
    num_tokens, total, dim = qkv.shape
    out = qkv.new_empty((num_tokens, num_heads, dim))
    if num_tokens:
        _heads_kernel[(num_tokens, triton.cdiv(total, _HEADS_BLOCK))](
            out,
            keys,
            values,
            slots,
            qkv,
            qkv if rows is None else rows,
            num_heads,
            (total - num_heads) // 2,
            HALF=dim // 2,
            PAIRS=triton.next_power_of_2(dim // 2),
            INTERLEAVE=interleave,
            HAS_ROTATION=rows is not None,
            BLOCK=_HEADS_BLOCK,
            num_warps=4,
        )
    return out


@triton.jit
def _norm_kernel(  # noqa: PLR0913, PLR0917 - a launch takes its arguments by place
    out,
    x,
    added,
    weight,
    bias,
    width,
    eps,
    HAS_ADDED: tl.constexpr,
    IS_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        value += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        # What later layers read is the rounded sum, so that is what is normalised.
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if IS_CENTERED:
        value = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    value *= scale * factor
    if IS_CENTERED:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(out, merged, width, IS_TANH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = merged + row * 2 * width + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    if IS_TANH:  # noqa: SIM108 - decided when it is compiled
        # (1 + tanh(z)) / 2 is the logistic function of 2z; the constant is 2 * sqrt(2 / pi).
        turn = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        turn = gate
    value = gate * tl.sigmoid(turn) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _heads_kernel(  # noqa: PLR0913, PLR0917 - a launch takes its arguments by place
    out,
    keys,
    values,
    slots,
    qkv,
    rows,
    num_heads,
    num_kv_heads,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.arange(0, PAIRS)
    total = num_heads + 2 * num_kv_heads
    inside = (head < total)[:, None] & (pair < HALF)[None, :]
    if INTERLEAVE:
        first = (2 * pair)[None, :]
        second = first + 1
    else:
        first = pair[None, :]
        second = first + HALF
    source = qkv + (token * total + head)[:, None] * (2 * HALF)
    x = tl.load(source + first, mask=inside, other=0.0)
    y = tl.load(source + second, mask=inside, other=0.0)
    new_x, new_y = x, y
    if HAS_ROTATION:
        angle = rows + token * (2 * HALF) + pair
        cos = tl.load(angle, mask=pair < HALF, other=0.0)[None, :]
        sin = tl.load(angle + HALF, mask=pair < HALF, other=0.0)[None, :]
        wide_x = x.to(tl.float32)
        wide_y = y.to(tl.float32)
        new_x = (wide_x * cos - wide_y * sin).to(x.dtype)
        new_y = (wide_y * cos + wide_x * sin).to(x.dtype)

    is_query = inside & (head < num_heads)[:, None]
    target = out + (token * num_heads + head)[:, None] * (2 * HALF)
    tl.store(target + first, new_x, mask=is_query)
    tl.store(target + second, new_y, mask=is_query)

    slot = tl.load(slots + token) * num_kv_heads
    kv_head = head - num_heads
    is_key = inside & ((kv_head >= 0) & (kv_head < num_kv_heads))[:, None]
    target = keys + (slot + kv_head)[:, None] * (2 * HALF)
    tl.store(target + first, new_x, mask=is_key)
    tl.store(target + second, new_y, mask=is_key)

    kv_head -= num_kv_heads
    is_value = inside & (kv_head >= 0)[:, None]
    target = values + (slot + kv_head)[:, None] * (2 * HALF)
    tl.store(target + first, x, mask=is_value)
    tl.store(target + second, y, mask=is_value)
