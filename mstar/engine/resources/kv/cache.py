"""PagedKVCache: the tensors of a paged cache."""

import torch
from torch import Tensor

from mstar.engine.resources.kv.layout import KVLayout


class PagedKVCache:
    """Keys and values of all layers, allocated once.

    Pages start as zeros: a kernel may multiply a masked slot by zero, and zero times an
    uninitialised NaN would not be zero.

    Args:
        layout: Shape, dtype and device.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        shape = (layout.num_pages, layout.page_size, layout.num_kv_heads, layout.head_dim)
        memory = torch.zeros(
            (layout.num_layers, 2, *shape), dtype=layout.dtype, device=layout.device
        )
        self.keys: list[Tensor] = [memory[layer, 0] for layer in range(layout.num_layers)]
        self.values: list[Tensor] = [memory[layer, 1] for layer in range(layout.num_layers)]

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page in every layer."""
        for tensor in (*self.keys, *self.values):
            tensor[target].copy_(tensor[source])
