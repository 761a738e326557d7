"""Mirror: a tensor that keeps its place on a device, filled without waiting for the device."""

from typing import Any

import numpy.typing as npt
import torch


class Mirror:
    """A tensor on the device and pinned memory of its shape, from which it is filled.

    Whoever writes ``array`` makes sure that what was sent before has arrived.

    Args:
        size: Number of elements.
        dtype: Of the elements.
        device: Where the tensor lies.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._host = torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")
        self.array: npt.NDArray[Any] = self._host.numpy()
        """What is sent next, ``[size]``."""
        self.tensor = torch.zeros(size, dtype=dtype, device=device)
        """``[size]``, on the device."""

    def send(self, count: int | None = None) -> None:
        """Copy the first ``count`` elements to the device, behind all work queued there."""
        self.tensor[:count].copy_(self._host[:count], non_blocking=True)
