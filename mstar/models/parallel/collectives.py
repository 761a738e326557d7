"""Sums and gathers over the ranks of one model, by torch.distributed: NCCL on GPUs, gloo on CPUs.

On GPUs that reach each other's memory, what is not large goes by kernels of ours instead: those of
decode steps take less than half as long, and do the norm behind a sum, too.
"""

import importlib
import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mstar.models.parallel.shard import Shard

logger = logging.getLogger(__name__)

# Newer versions of torch have it under another name, and warn of the old one.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_TIMEOUT = timedelta(minutes=10)
"""Of one collective; kernels may be compiled before a rank gets to it."""
_LEAVE_SECONDS = 10.0
_SUM_BYTES = 16 << 20
"""Sums of which a rank sends no more than this, its share to each of the others, go by the kernel:
2,048 rows of 4,096 numbers of two bytes between two ranks."""
_SLOT_STEP = 256
"""Bytes; slots of sums are multiples of it."""
_JOIN_SLOTS, _JOIN_SLOT_BYTES = 2304, 16 << 10
"""What is gathered goes by the kernel if it has no more pieces: logits of 256 rows of 147,456 ids,
from two ranks."""


class DistributedShard(Shard):
    """A rank that is a process of its own, with a device of its own.

    Args:
        rank: Which part, from 0.
        size: How many there are.
        device: The rank's device.
        meeting: A file that does not exist yet, the same for all ranks.
    """

    def __init__(self, rank: int, size: int, device: torch.device, meeting: Path) -> None:
        super().__init__(rank, size)
        is_cuda = self.is_cuda = device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
            device_id=device if is_cuda else None,
        )
        self._device = device
        self._peers = _Peers.meet(rank, size, device) if is_cuda else None

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``, ``[num_rows, width]``, which may be overwritten."""
        x, peers = x.contiguous(), self._peers
        if peers is not None and (boxes := peers.sums(x)) is not None:
            found: Tensor = peers.kernels.total(x, boxes)
            return found
        dist.all_reduce(x)
        return x

    def add_norm(self, x: Tensor, share: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Add the sum of all ranks' ``share`` to ``x`` and normalise it; ``None``: not at once."""
        peers = self._peers
        boxes = None if peers is None else peers.sums(share)
        if peers is None or boxes is None or not x.is_contiguous():
            return None
        found: Tensor = peers.kernels.add_norm(x, share.contiguous(), weight, eps, boxes)
        return found

    def join(self, x: Tensor) -> Tensor:
        """Return all ranks' ``x`` side by side, ``[num_rows, size * width]``."""
        x, peers = x.contiguous(), self._peers
        if peers is not None and (boxes := peers.joins(x)) is not None:
            found: Tensor = peers.kernels.join(x, boxes)
            return found
        num_rows, width = x.shape
        parts = x.new_empty(self.size * num_rows, width)
        _gather(parts, x)
        return parts.view(self.size, num_rows, width).transpose(0, 1).reshape(num_rows, -1)

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers."""
        found = torch.tensor(number, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found.item())

    def close(self) -> None:
        """Leave the group, which nothing recorded uses any more."""
        self._peers = None
        if not self.is_cuda:
            dist.destroy_process_group()
            return
        _leave(dist.destroy_process_group)

    def abandon(self) -> None:
        """Leave the group alone, whatever became of the others."""
        if not self.is_cuda:
            self.close()
            return
        _leave(dist.distributed_c10d._abort_process_group)


def _leave(how: Callable[[], object]) -> None:
    """Leave the group, unless NCCL waits for a rank that is gone: then it ends with the process."""
    leaving = threading.Thread(target=how, name="leave-ranks", daemon=True)
    leaving.start()
    leaving.join(_LEAVE_SECONDS)


class _Peers:
    """GPUs that write to each other's memory.

    Args:
        kernels: The module ``sums_cuda``.
        memory: uint8, which the other ranks reach: an inbox for gathers, then one for sums.
        addresses: Of each rank's memory, as this rank's GPU reaches it.
        rank: Which of them this is.
    """

    _meetings = itertools.count()
    """Of this process."""

    def __init__(
        self, kernels: ModuleType, memory: Tensor, addresses: list[int], rank: int
    ) -> None:
        self.kernels: Any = kernels
        self._memory = memory
        self._rank = rank
        self._begins = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        self._joins = self._boxes(self._begins, self._turns(_JOIN_SLOTS), _JOIN_SLOT_BYTES)
        self._sums: Mapping[torch.dtype, Any] | None = None
        self._sum_begins = self._begins + _join_bytes(len(addresses))
        self._sum_turns = self._turns(_sum_room(len(addresses)) // _SLOT_STEP)

    def _turns(self, num_slots: int) -> Tensor:
        return torch.zeros(num_slots, dtype=torch.int32, device=self._memory.device)

    def _boxes(self, begins: Tensor, turns: Tensor, slot_bytes: int) -> Mapping[torch.dtype, Any]:
        """Return the inboxes that begin at these addresses, by dtype."""
        kernels, size = self.kernels, len(begins)
        return {
            dtype: kernels.Boxes(begins, turns, self._rank, size, slot_bytes // dtype.itemsize)
            for dtype in kernels.DTYPES
        }

    @classmethod
    def meet(cls, rank: int, size: int, device: torch.device) -> "_Peers | None":
        """Return the ranks' GPUs; ``None`` where any of them does not reach another."""
        peers: _Peers | None = None
        # Torch counts meetings, too, and brings together only processes that had as many.
        is_first = torch.tensor(int(next(cls._meetings) == 0), device=device)
        dist.all_reduce(is_first, dist.ReduceOp.MIN)
        if not is_first.item():
            return None
        try:
            symmetric = importlib.import_module("torch.distributed._symmetric_memory")
            kernels = importlib.import_module("mstar.models.parallel.sums_cuda")
            num_bytes = _join_bytes(size) + 2 * size * _sum_room(size)
            memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
            memory.view(torch.int16).fill_(kernels.EMPTY)
            handle = symmetric.rendezvous(memory, dist.group.WORLD)
            addresses = list(handle.buffer_ptrs)
            if addresses[rank] != memory.data_ptr():
                raise RuntimeError("the memory that ranks share begins before what was asked for")
            peers = cls(kernels, memory, addresses, rank)
        except (ImportError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            logger.info("GPUs do not reach each other, sums go by NCCL: %s", reason)
        # All have emptied their inboxes behind this.
        has_all = torch.tensor(int(peers is not None), device=device)
        dist.all_reduce(has_all, dist.ReduceOp.MIN)
        return peers if has_all.item() else None

    def sums(self, share: Tensor) -> Any:
        """Return where a share of a sum goes; ``None``: it is none for the kernel.

        Room is for rows of as many bytes as the first one's, which are the model's.
        """
        if self._sums is None:
            slot_bytes = -(-share.shape[1] * share.itemsize // _SLOT_STEP) * _SLOT_STEP
            turns = self._sum_turns[: _sum_room(len(self._begins)) // slot_bytes]
            self._sums = self._boxes(self._sum_begins, turns, slot_bytes)
        boxes = self._sums.get(share.dtype)
        return boxes if boxes is not None and self.kernels.can_sum(share, boxes) else None

    def joins(self, share: Tensor) -> Any:
        """Return where a share to be gathered goes; ``None``: it is none for the kernel."""
        boxes = self._joins.get(share.dtype)
        return boxes if boxes is not None and self.kernels.can_join(share, boxes) else None


def _join_bytes(size: int) -> int:
    """Return the bytes of a rank's inbox for gathers."""
    return 2 * size * _JOIN_SLOTS * _JOIN_SLOT_BYTES


def _sum_room(size: int) -> int:
    """Return the bytes of one rank's share of a sum, at most."""
    return _SUM_BYTES // max(size - 1, 1) // _SLOT_STEP * _SLOT_STEP
