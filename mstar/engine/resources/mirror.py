"""What crosses between the CPU and a device without waiting for what the device does."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which this thread launches on ``device`` what does not name a device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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


class Fence:
    """A place in the work queued on a device, which can be waited for.

    Args:
        device: On a CPU nothing is queued, and so nothing waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self) -> None:
        """Put it behind all that is queued now."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Return once the device has come to where it was last set."""
        if self._event is not None:
            self._event.synchronize()


class Fetch:
    """Tensors on their way to the CPU.

    Args:
        tensors: What is copied, once all that is queued now has run.
        stream: Takes the copies, so that nothing queued later waits for them, nor they for it;
            ``None``: the tensors are on the CPU.
    """

    __slots__ = ("_copies", "_event", "_sources")

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None) -> None:
        self._copies = self._sources = list(tensors)
        """The sources are kept while they are read: their memory is not given to others."""
        self._event: torch.cuda.Event | None = None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            with torch.cuda.stream(stream):
                self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
                self._event = stream.record_event()

    def wait(self) -> list[Tensor]:
        """Return the tensors on the CPU, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


def pinned(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on the CPU that ``device`` can copy by itself.

    A copy from other memory waits for what the device does, and so does who asks for it.
    """
    host = torch.from_numpy(values)
    return host.pin_memory() if device.type == "cuda" else host


def send(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device, behind all work queued there."""
    return pinned(values, device).to(device, non_blocking=True)
