"""How the paged cache lies in memory, as kernels see it, and where one step reads and writes."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SINK_PAGE = 0
"""The page that padding reads and writes; it belongs to no stream."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and dtype of one paged cache, layout ``NHD``.

    A layer's keys (and values) are one tensor
    ``[num_pages, page_size, num_kv_heads, head_dim]``; page 0 is the sink.
    """

    num_layers: int
    num_pages: int
    """Pages in memory, the sink page included."""
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page over all layers, keys and values together."""
        slots = 2 * self.num_layers * self.page_size
        return slots * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(slots=True, kw_only=True)
class KVPlan:
    """Where the segments of one step lie in the cache.

    With ``B`` segments and ``T`` new tokens in all; arrays are on the CPU, tensors on the cache's
    device. Segments stand in the step's order.
    """

    layout: KVLayout
    keys: list[Tensor]
    """Per layer ``[num_pages, page_size, num_kv_heads, head_dim]``."""
    values: list[Tensor]
    qo_lens: npt.NDArray[np.int32]
    """``[B]``: new tokens of each segment."""
    qo_indptr: npt.NDArray[np.int32]
    """``[B + 1]``: a segment's first new token among all ``T``."""
    kv_lens: npt.NDArray[np.int32]
    """``[B]``: stored tokens of the stream once this step is written."""
    page_table: npt.NDArray[np.int32]
    """``[B, max_pages]``: a stream's pages in order, C-contiguous, filled up with the sink page."""
    slots: Tensor
    """int64 ``[T]``: ``page * page_size + offset`` where each new token is written."""

    def of_last(self, rows: npt.NDArray[np.int64]) -> "KVPlan":
        """Return the plan to read by of some tokens, each the last of its segment.

        Args:
            rows: ``[num_rows]``, ascending: the tokens among all ``T``.
        """
        segments = np.searchsorted(self.qo_indptr, rows, side="right") - 1
        last = self.qo_indptr[segments + 1] - 1
        assert (rows == last).all(), f"rows {rows} of segments that end at {last}"
        return replace(
            self,
            qo_lens=np.ones(len(rows), np.int32),
            qo_indptr=np.arange(len(rows) + 1, dtype=np.int32),
            kv_lens=self.kv_lens[segments],
            page_table=self.page_table[segments],
        )

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the new tokens' keys and values.

        Args:
            layer: Index of the layer.
            keys: ``[T, num_kv_heads, head_dim]`` in the cache's dtype.
            values: The same shape.
        """
        flat = (-1, self.layout.num_kv_heads, self.layout.head_dim)
        self.keys[layer].view(flat).index_copy_(0, self.slots, keys)
        self.values[layer].view(flat).index_copy_(0, self.slots, values)
