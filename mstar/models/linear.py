"""Linear: a projection, its weight laid out for the device."""

import torch
from torch import Tensor
from torch.nn import functional

_PACKED_ROWS = 32
"""Batch size that packed weights are laid out for; measured best from 1 to 2,048 rows."""


class Linear:
    """A projection ``x @ weight.T + bias``.

    On the CPU the weight is packed once into oneDNN's own layout, where torch offers it: products
    with few rows then read it at memory speed. The original is not kept.

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
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[num_tokens, out_features]`` for ``[num_tokens, in_features]``."""
        if self._is_packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return functional.linear(x, self._weight, self._bias)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.float32:
        return True
    return weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
