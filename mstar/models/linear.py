"""Linear: a projection, its weight laid out for the device."""

import importlib
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

ADDED_FROM = 1024
"""Rows on a CUDA device from which writing a sum and reading it again takes a share of the time."""
_PACKED_ROWS = 32
"""Batch size that packed weights are laid out for; measured best from 1 to 2,048 rows."""


class Linear:
    """A projection ``x @ weight.T + bias``.

    On the CPU the weight is packed once into oneDNN's own layout, where torch offers it: products
    with few rows then read it at memory speed. The original is not kept. On CUDA devices one row
    has a kernel of its own, where Triton is, and more may have one that ``choose_kernels`` chose.

    Args:
        weight: ``[out_features, in_features]``, in the model's dtype, on its device.
        bias: ``[out_features]`` or ``None``.
    """

    __slots__ = ("_bias", "_is_packed", "_kernels", "_weight", "out_features")
    is_whole: ClassVar[bool] = True
    """Nothing has to be done with a product before it is added to something."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features = weight.shape[0]
        self._bias = None if bias is None else bias.contiguous()
        self._is_packed = _can_pack(weight)
        if self._is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_ROWS)
        self._weight = weight if self._is_packed else weight.contiguous()
        self._kernels: Any = None
        """``Kernels`` for the weight's shape; ``None``: torch's own."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[num_tokens, out_features]`` for ``[num_tokens, in_features]``."""
        if self._is_packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        if x.is_cuda and x.is_contiguous() and x.dtype == self._weight.dtype:
            product = self._product(x)
            if product is not None:
                return product
        return functional.linear(x, self._weight, self._bias)

    def add_to(self, total: Tensor, x: Tensor) -> Tensor | None:
        """Add what ``x`` gives to ``total`` in place, where that is the faster way.

        Args:
            total: ``[num_tokens, out_features]``.
            x: ``[num_tokens, in_features]``.

        Returns:
            ``None``, or what is left to be added, of the shape of ``total``.
        """
        if self.is_whole and x.is_cuda and x.shape[0] >= ADDED_FROM and self._bias is None:
            total.addmm_(x, self._weight.t())
            return None
        return self(x)

    def _product(self, x: Tensor) -> Tensor | None:
        """Return the whole projection by a kernel other than torch's; ``None``: there is none."""
        num_rows = x.shape[0]
        if num_rows == 1:
            row = _load_cuda()
            if row is None or x.dtype not in row.DTYPES:
                return None
            product: Tensor = row.product(x, self._weight, self._bias)
            return product
        kernel = None if self._kernels is None else self._kernels.find(num_rows)
        if kernel is None:
            return None
        assert self._bias is None, "chosen kernels add no bias"
        out = x.new_empty((num_rows, self.out_features))
        return out if kernel(x, self._weight, out) else None


def choose_kernels(linears: Iterable[Linear], sizes: Sequence[int], most: int = 0) -> None:
    """Have projections use the kernels that are fastest for steps of some sizes, by trying.

    Nothing happens where there is no CUDA device, nor to those that add a bias, which torch's
    kernels do at once.

    Args:
        linears: Which; those of one shape get the same.
        sizes: Of decode steps, in tokens.
        most: Of the largest step, in tokens; 0: there are no others.
    """
    groups: dict[Any, list[Linear]] = {}
    for linear in linears:
        weight = linear._weight
        if weight.device.type == "cuda" and linear._bias is None:
            groups.setdefault((weight.shape, weight.dtype), []).append(linear)
    if not groups:
        return
    from mstar.models import products  # noqa: PLC0415 - only where a GPU is

    weights = [[linear._weight for linear in group] for group in groups.values()]
    found = products.choose(weights, products.bounds(sizes, most))
    for group, kernels in zip(groups.values(), found, strict=True):
        for linear in group:
            linear._kernels = kernels


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
