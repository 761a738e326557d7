"""Linear: a projection, its weight laid out for the device."""

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_PACKED_ROWS = 32
"""Batch size that packed weights are laid out for; measured best from 1 to 2,048 rows."""


class Linear:
    """A projection ``x @ weight.T + bias``.

    On the CPU the weight is packed once into oneDNN's own layout, where torch offers it: products
    with few rows then read it at memory speed. The original is not kept. On CUDA devices one row
    has a kernel of its own, where Triton is.

    Args:
        weight: ``[out_features, in_features]``, in the model's dtype, on its device.
        bias: ``[out_features]`` or ``None``.
    """

    __slots__ = ("_bias", "_is_packed", "_weight", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features = weight.shape[0]
        self._bias = bias
        self._is_packed = _can_pack(weight)
        if self._is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_ROWS)
        self._weight = weight if self._is_packed else weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[num_tokens, out_features]`` for ``[num_tokens, in_features]``."""
        if self._is_packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        if x.is_cuda and x.shape[0] == 1 and x.is_contiguous():
            kernels = _load_cuda()
            if kernels is not None and x.dtype in kernels.DTYPES:
                row: Tensor = kernels.product(x, self._weight)
                return row if self._bias is None else row + self._bias
        return functional.linear(x, self._weight, self._bias)


@cache
def _load_cuda() -> Any:
    """Return the Triton kernel; loaded when a row on a CUDA device first asks for it."""
    try:
        return importlib.import_module("mstar.models.product_cuda")
    except ImportError:
        return None


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.float32:
        return True
    return weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
