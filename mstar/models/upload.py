"""Upload: brings weights from mapped files to a CUDA device as fast as the disk gives them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_NUM_THREADS = 8
_PIECE_NBYTES = 4 << 20

_Bytes = npt.NDArray[np.uint8]


class _Stage:
    """Pinned memory of one thread: one half is filled while the other is on its way."""

    def __init__(self, device: torch.device) -> None:
        self._halves = [
            torch.empty(_PIECE_NBYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self._sent = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0
        self.stream = torch.cuda.Stream(device)

    def send(self, source: _Bytes, target: Tensor) -> None:
        """Copy a piece; it is there once ``stream`` is done."""
        self._turn = 1 - self._turn
        half, sent = self._halves[self._turn], self._sent[self._turn]
        sent.synchronize()
        np.copyto(half.numpy()[: len(source)], source)
        with torch.cuda.stream(self.stream):
            target.copy_(half[: len(source)], non_blocking=True)
            sent.record(self.stream)


class Upload:
    """Copies tensors to a CUDA device, several threads reading one of them together.

    A mapped file is read where it is touched, a few pages at a time, so that one thread alone waits
    for each of them; and what is copied from memory that is not pinned is copied twice, by one
    thread as well.

    Args:
        device: The CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "mstar-upload")
        self._stages: list[_Stage] = []
        self._own = threading.local()

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the CPU on the device; what is queued from now on finds it there."""
        if tensor.nbytes < _PIECE_NBYTES:
            return tensor.to(self._device)
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format, device=self._device)
        source = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        target = out.view(-1).view(torch.uint8)
        queue = torch.cuda.current_stream(self._device)
        # What was queued before may still use the memory that the copy has been given.
        free = queue.record_event()

        def send(begin: int) -> None:
            stage = self._stage()
            stage.stream.wait_event(free)
            piece = slice(begin, begin + _PIECE_NBYTES)
            stage.send(source[piece], target[piece])

        # The list raises what a thread raised.
        list(self._threads.map(send, range(0, len(source), _PIECE_NBYTES)))
        for stage in self._stages:
            queue.wait_stream(stage.stream)
        return out

    def _stage(self) -> _Stage:
        """Return the calling thread's."""
        stage: _Stage | None = getattr(self._own, "stage", None)
        if stage is None:
            stage = self._own.stage = _Stage(self._device)
            self._stages.append(stage)
        return stage
