"""Upload: brings weights from mapped files to a CUDA device as fast as the disk gives them."""

import logging
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_NUM_THREADS = 8
_PIECE_NBYTES = 4 << 20


class _Stage:
    """Pinned memory for one piece at a time: one half is filled while the other is on its way."""

    def __init__(self, device: torch.device) -> None:
        self._halves = [
            torch.empty(_PIECE_NBYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self._sent = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0
        self.stream = torch.cuda.Stream(device)

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy a piece to a device, in the target's dtype; it is there once ``stream`` is done."""
        self._turn = 1 - self._turn
        half, sent = self._halves[self._turn], self._sent[self._turn]
        sent.synchronize()
        # torch would copy with threads of its own, of which there are enough.
        np.copyto(half.numpy()[: source.nbytes], source.view(torch.uint8).numpy())
        piece = half[: source.nbytes].view(source.dtype)
        with torch.cuda.stream(self.stream):
            if piece.dtype != target.dtype:
                # Rounded there: here it would take longer than to read it.
                piece = piece.to(target.device, non_blocking=True)
            target.copy_(piece, non_blocking=True)
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
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._threads = ThreadPoolExecutor(
            _NUM_THREADS, "mstar-upload", torch.cuda.set_device, (self._device,)
        )
        self._stages: list[_Stage] | None = None
        """None there are where memory cannot be pinned."""

    def copy(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor of the CPU on the device; what is queued from now on finds it there."""
        if tensor.nbytes < _PIECE_NBYTES:
            return tensor.to(self._device, dtype)
        if self._stages is None:
            self._stages = self._pin()
        if not self._stages:
            return tensor.to(self._device, dtype)
        # Threads write to it that know nothing of the caller's mode.
        with torch.inference_mode(False):
            out = torch.empty(tensor.shape, dtype=dtype, device=self._device)
        self._send(tensor.detach().contiguous().view(-1), out.view(-1), self._stages)
        return out

    def _pin(self) -> list[_Stage]:
        try:
            return [_Stage(self._device) for _ in range(_NUM_THREADS)]
        except RuntimeError as error:
            logger.info("weights are copied by one thread, since memory is not pinned: %s", error)
            return []

    def _send(self, source: Tensor, target: Tensor, stages: list[_Stage]) -> None:
        queue = torch.cuda.current_stream(self._device)
        # What was queued before may still use the memory that the copy has been given.
        unused = queue.record_event()
        idle: SimpleQueue[_Stage] = SimpleQueue()
        for stage in stages:
            stage.stream.wait_event(unused)
            idle.put(stage)
        length = _PIECE_NBYTES // source.itemsize

        def send(begin: int) -> None:
            stage = idle.get()
            try:
                stage.send(source[begin : begin + length], target[begin : begin + length])
            finally:
                idle.put(stage)

        try:
            # The list raises what a thread raised.
            list(self._threads.map(send, range(0, len(source), length)))
        finally:
            for stage in stages:
                queue.wait_stream(stage.stream)
