"""PagedKVCache: the tensors of a paged cache."""

import warnings

import numpy as np
import numpy.typing as npt
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
        self.memory = memory = torch.zeros(
            (layout.num_layers, 2, *shape), dtype=layout.dtype, device=layout.device
        )
        """``[num_layers, 2, num_pages, page_size, num_kv_heads, head_dim]``, contiguous."""
        self.keys: list[Tensor] = [memory[layer, 0] for layer in range(layout.num_layers)]
        self.values: list[Tensor] = [memory[layer, 1] for layer in range(layout.num_layers)]

    def copy_slots(self, source: int, target: int, count: int) -> None:
        """Copy the first ``count`` slots of one page to another, in every layer."""
        self.memory[:, :, target, :count].copy_(self.memory[:, :, source, :count])

    def read_page(self, page: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of one page over all layers, ``[page_nbytes]``, as a copy."""
        image = self.memory[:, :, page].contiguous().view(torch.uint8).cpu()
        found: npt.NDArray[np.uint8] = image.numpy().reshape(-1)
        return found

    def write_page(self, page: int, image: npt.NDArray[np.uint8]) -> None:
        """Put the bytes of one page, ``[page_nbytes]``, back into all layers."""
        target = self.memory[:, :, page]
        with warnings.catch_warnings():
            # The image may be memory that is not to be written to, and is only read.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            source = torch.from_numpy(image)
        target.copy_(source.view(target.dtype).view(target.shape))
