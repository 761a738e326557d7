"""The element-wise steps of a transformer layer: one pass each, compiled for CPU and CUDA.

Where the compiled module or Triton is missing, or for another device or dtype, torch does the same
in several passes.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mstar.engine.resources.kv.layout import KVPlan
from mstar.engine.resources.position.manager import PositionPlan


def _load() -> ModuleType | None:
    """Return the compiled module, after torch so that it shares torch's OpenMP threads."""
    try:
        return importlib.import_module("mstar.models._fused")
    except ImportError:
        return None


@cache
def _load_cuda() -> ModuleType | None:
    """Return the Triton kernels; loaded when a tensor on a CUDA device first asks for them."""
    try:
        return importlib.import_module("mstar.models.fused_cuda")
    except ImportError:
        return None


_KERNELS = _load()
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def _is_compiled(x: Tensor) -> bool:
    return (
        _KERNELS is not None
        and x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float32)
        and x.is_contiguous()
    )


def _cuda_kernels(x: Tensor) -> Any:
    """Return the Triton kernels if they can take ``x``, else ``None``."""
    if not x.is_cuda or not x.is_contiguous():
        return None
    kernels = _load_cuda()
    return kernels if kernels is not None and x.dtype in kernels.DTYPES else None


class LayerNorm:
    """Layer normalisation over the last axis, with the residual sum before it.

    Args:
        weight: ``[width]`` in the model's dtype.
        bias: ``[width]``, likewise.
        eps: Added to the variance.

    Source:
        Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """

    __slots__ = ("_bias", "_eps", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        assert weight.shape == bias.shape, (weight.shape, bias.shape)
        self._weight, self._bias = weight.contiguous(), bias.contiguous()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised, in a new tensor of its own dtype and shape."""
        return self.add(x, None)

    def add(self, x: Tensor, added: Tensor | None) -> Tensor:
        """Add ``added`` to ``x`` in place and return the sum normalised, in a new tensor.

        Args:
            x: ``[..., width]`` in the model's dtype.
            added: The same shape and dtype, or ``None`` to add nothing.
        """
        assert x.shape[-1:] == self._weight.shape, (x.shape, self._weight.shape)
        if added is not None:
            assert added.shape == x.shape, (added.shape, x.shape)
            assert added.dtype == x.dtype, (added.dtype, x.dtype)
        if (kernels := _cuda_kernels(x)) is not None:
            summed: Tensor = kernels.norm(x, added, self._weight, self._eps, self._bias)
            return summed
        if added is not None:
            x += added
        return functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class RMSNorm:
    """Root mean square normalisation over the last axis, with the residual sum before it.

    Args:
        weight: ``[width]`` in the model's dtype.
        eps: Added to the mean square.
        is_offset: The stored weight is the factor minus one.

    Source:
        Zhang and Sennrich 2019, arXiv:1910.07467; the offset form as Gemma has it.
    """

    __slots__ = ("_eps", "_weight", "_width")

    def __init__(self, weight: Tensor, eps: float, *, is_offset: bool = False) -> None:
        self._eps = eps
        self._width = weight.shape[0]
        self._weight = (weight.float() + 1 if is_offset else weight.float()).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised, in a new tensor of its own dtype and shape."""
        return self.add(x, None)

    def add(self, x: Tensor, added: Tensor | None) -> Tensor:
        """Add ``added`` to ``x`` in place and return the sum normalised, in a new tensor.

        Args:
            x: ``[..., width]``.
            added: The same shape and dtype, or ``None`` to add nothing.
        """
        assert x.shape[-1] == self._width, (x.shape, self._width)
        if added is not None:
            assert added.shape == x.shape, (added.shape, x.shape)
            assert added.dtype == x.dtype, (added.dtype, x.dtype)
        if _KERNELS is None or not _is_compiled(x) or self._width > _KERNELS.MAX_WIDTH:
            if (kernels := _cuda_kernels(x)) is not None:
                summed: Tensor = kernels.norm(x, added, self._weight, self._eps)
                return summed
            if added is not None:
                x += added
            wide = functional.rms_norm(x.float(), (self._width,), self._weight, self._eps)
            return wide.to(x.dtype)
        out = torch.empty_like(x)
        if added is not None:
            added = added.contiguous()
        _KERNELS.norm(
            torch.get_num_threads(),
            x.dtype == torch.bfloat16,
            x.numel() // self._width,
            self._width,
            out.data_ptr(),
            x.data_ptr(),
            0 if added is None else added.data_ptr(),
            self._weight.data_ptr(),
            self._eps,
        )
        return out


def gated(merged: Tensor, activation: str) -> Tensor:
    """Return ``activation(gate) * up``, ``[num_tokens, width]``.

    Args:
        merged: ``[num_tokens, 2 * width]``, the gate's elements before up's.
        activation: ``silu``, ``gelu_tanh`` or ``gelu``.
    """
    if activation == "gelu" or _KERNELS is None or not _is_compiled(merged):
        if activation != "gelu" and (kernels := _cuda_kernels(merged)) is not None:
            product: Tensor = kernels.gate(merged, activation == "gelu_tanh")
            return product
        gate, up = merged.chunk(2, -1)
        return _ACTIVATIONS[activation](gate) * up
    assert activation in _ACTIVATIONS, activation
    num_tokens, width = merged.shape
    out = merged.new_empty((num_tokens, width // 2))
    _KERNELS.gate(
        torch.get_num_threads(),
        merged.dtype == torch.bfloat16,
        num_tokens,
        width // 2,
        activation == "gelu_tanh",
        out.data_ptr(),
        merged.data_ptr(),
    )
    return out


def rotate_and_store(
    qkv: Tensor, num_heads: int, position: PositionPlan, kv: KVPlan, layer: int
) -> Tensor:
    """Rotate q and k, if the layer does, write k and v to the cache, and return q.

    The result is ``[num_tokens, num_heads, head_dim]``.

    Args:
        qkv: ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``: q's heads, k's, v's.
        num_heads: Heads of q.
        position: The step's positions.
        kv: Where the step is written.
        layer: Index of the layer.
    """
    num_tokens, total, dim = qkv.shape
    num_kv_heads = (total - num_heads) // 2
    rotation = position.rotation(layer)
    # Whole heads are rotated, or nothing is.
    is_whole = rotation is None or (rotation.is_plain and rotation.rows.shape[1] == dim)
    if (
        _KERNELS is None
        or rotation is None
        or not is_whole
        or rotation.rows.dtype != torch.float32
        or not _is_compiled(qkv)
        or qkv.dtype != kv.layout.dtype
    ):
        if (
            is_whole
            and dim % 2 == 0
            and qkv.dtype == kv.layout.dtype
            and (kernels := _cuda_kernels(qkv)) is not None
        ):
            query: Tensor = kernels.heads(
                qkv,
                num_heads,
                None if rotation is None else rotation.rows,
                kv.keys[layer],
                kv.values[layer],
                kv.slots,
                rotation is not None and rotation.interleave,
            )
            return query
        qk = position.rotate_merged(qkv[:, : num_heads + num_kv_heads], layer)
        kv.write(layer, qk[:, num_heads:], qkv[:, num_heads + num_kv_heads :])
        return qk[:, :num_heads]
    # The kernel trusts these lengths.
    assert num_tokens == len(rotation.rows) == len(kv.slots), (num_tokens, len(kv.slots))
    out = qkv.new_empty((num_tokens, num_heads, dim))
    _KERNELS.heads(
        torch.get_num_threads(),
        qkv.dtype == torch.bfloat16,
        num_tokens,
        num_heads,
        num_kv_heads,
        dim,
        rotation.interleave,
        out.data_ptr(),
        kv.keys[layer].data_ptr(),
        kv.values[layer].data_ptr(),
        kv.slots.data_ptr(),
        qkv.data_ptr(),
        rotation.rows.data_ptr(),
    )
    return out
