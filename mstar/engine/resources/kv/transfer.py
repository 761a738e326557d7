"""Transfer: what brings pages from a cache's device to host memory and back."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache, partial
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from mstar.engine.resources.kv.cache import PagedKVCache
from mstar.engine.resources.kv.layout import SINK_PAGE
from mstar.engine.resources.kv.tiers.base import Arrived, Image, Leaving, Source
from mstar.engine.resources.mirror import send

_STAGE_NBYTES = 16 << 20
"""Device memory through which pages pass at a time; there are two such pieces each way."""


class Transfer(ABC):
    """Copies pages of one cache; one thread calls."""

    num_together = 1
    """Pages that are best made room for in one go, by reading what leaves for them."""

    @abstractmethod
    def read(self, pages: Sequence[int]) -> Iterator[Source]:
        """Yield the content of each page, as it is behind all work that is queued now.

        A page may be written to by work that is queued later. What is yielded is valid until the
        next is asked for.
        """

    @abstractmethod
    def write(self, page: int, image: Image) -> None:
        """Put the bytes of a page back; it is there once ``settle`` was called.

        Args:
            page: Whose content nobody wants.
            image: ``[page_nbytes]``. If it is pinned it is still read afterwards, and nothing but
                pages of ``read`` may be copied there next.
        """

    @abstractmethod
    def settle(self) -> None:
        """Let work that is queued from now on find what was written."""

    @abstractmethod
    def close(self) -> None:
        """Return once nothing is on its way."""


def open_transfer(cache: PagedKVCache) -> Transfer:
    """Return what brings the pages of a cache to host memory and back."""
    return Staged(cache.memory) if cache.layout.device.type == "cuda" else Direct(cache)


class Direct(Transfer):
    """Pages in host memory are copied when they are asked for."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache

    def read(self, pages: Sequence[int]) -> Iterator[Source]:
        """Yield copies."""
        return map(self._cache.read_page, pages)

    def write(self, page: int, image: Image) -> None:
        """Copy at once."""
        self._cache.write_page(page, image)

    def settle(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Staged(Transfer):
    """Pages on a CUDA device pass through memory in between, a stage, on streams of their own.

    ::

        read     steps' stream   page -> stage
                 down                    stage -> host        beside steps
        write    up                      host -> stage        beside steps
                 steps' stream           stage -> page        at settle

    Only the stream that steps run on touches pages, a short kernel for many of them at a time. So
    a page that is read holds what steps in flight still write to it, a step that is launched later
    may have it anew, and one that is launched behind ``settle`` finds what came back. What is left
    to go wrong, and what prevents it:

    * A stage is filled before what it held has left it: whoever fills it waits, on the device, for
      the last copy out of it. There are two for each way, so that one is filled meanwhile.
    * Host memory is read before a page has arrived: whoever reads it calls what ``copy_to`` gave;
      tiers do, before they give an image away, even to ``write``.
    * Host memory takes another page while it is still copied up: copies down wait, on the device,
      for all copies up that were asked for before. Memory that is not pinned has been read when
      ``write`` returns.
    * Memory is given up under a copy: ``close`` waits for all, and the stages are known to the
      allocator to be used on both streams.

    Args:
        memory: ``[num_layers, 2, num_pages, ...]``, contiguous.
    """

    num_together = 8

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._device = memory.device
        self._down = torch.cuda.Stream(self._device)
        self._up = torch.cuda.Stream(self._device)
        page_nbytes = memory[:, :, 0].numel() * memory.itemsize
        num_rows = min(max(1, _STAGE_NBYTES // page_nbytes), memory.shape[2])
        self._leaving = [_Stage(memory, num_rows, page_nbytes, self._down) for _ in range(2)]
        """The next to be filled is the first, as below."""
        self._coming = [_Stage(memory, num_rows, page_nbytes, self._up) for _ in range(2)]
        self._unsettled: list[int] = []
        """Pages whose content is in the first rows of the stage that is filled, or on the way."""
        for is_gather in (True, False):
            # Kernels are compiled now, and not while a request waits.
            move(memory, [SINK_PAGE], self._leaving[0].rows, is_gather)

    def read(self, pages: Sequence[int]) -> Iterator[Source]:
        """Yield pages that have left the cache, and can be copied on from the stage."""
        count = self._leaving[0].num_rows
        for first in range(0, len(pages), count):
            part = pages[first : first + count]
            assert not set(part) & set(self._unsettled), (part, self._unsettled)
            stage = self._leaving[0]
            self._leaving.reverse()
            steps = torch.cuda.current_stream(self._device)
            stage.wait_free(steps)
            move(self._memory, part, stage.rows, is_gather=True)
            self._down.wait_stream(steps)
            self._down.wait_stream(self._up)
            for row in stage.rows[: len(part)]:
                yield _Leaving(row, stage, self._down)

    def write(self, page: int, image: Image) -> None:
        """Begin to copy a page to the stage."""
        stage = self._coming[0]
        place = len(self._unsettled)
        if not place:
            stage.wait_free(self._up)
        with torch.cuda.stream(self._up):
            copy(torch.from_numpy(image), stage.rows[place])
        self._unsettled.append(page)
        if place + 1 == stage.num_rows:
            self.settle()

    def settle(self) -> None:
        """Queue the copy from the stage to the pages."""
        if not self._unsettled:
            return
        stage = self._coming[0]
        self._coming.reverse()
        steps = torch.cuda.current_stream(self._device)
        steps.wait_stream(self._up)
        move(self._memory, self._unsettled, stage.rows, is_gather=False)
        stage.free = steps.record_event()
        self._unsettled = []

    def close(self) -> None:
        """Wait for both streams."""
        self._down.synchronize()
        self._up.synchronize()


class _Stage:
    """Device memory that pages pass through, a row each."""

    def __init__(
        self, memory: Tensor, num_rows: int, page_nbytes: int, stream: torch.cuda.Stream
    ) -> None:
        self.num_rows = num_rows
        self.rows = memory.new_empty((num_rows, page_nbytes), dtype=torch.uint8)
        """``[num_rows, page_nbytes]``."""
        self.rows.record_stream(stream)
        self.free: torch.cuda.Event | None = None
        """Behind the last copy out of it."""

    def wait_free(self, stream: torch.cuda.Stream) -> None:
        """Let a stream fill it once it may be."""
        if self.free is not None:
            stream.wait_event(self.free)


class _Leaving(Leaving):
    """A page in a stage."""

    __slots__ = ("_row", "_stage", "_stream")

    def __init__(self, row: Tensor, stage: _Stage, stream: torch.cuda.Stream) -> None:
        self._row = row
        self._stage = stage
        self._stream = stream

    def copy_to(self, image: Image) -> Arrived:
        """Begin to copy the row to the host."""
        with torch.cuda.stream(self._stream):
            copy(self._row, torch.from_numpy(image))
        event: torch.cuda.Event = self._stream.record_event()
        self._stage.free = event
        return partial(event.synchronize)


def copy(source: Tensor, target: Tensor) -> None:
    """Copy between host and device on the current stream, without waiting if memory is pinned."""
    host = target if target.device.type == "cpu" else source
    target.copy_(source, non_blocking=host.is_pinned())


def move(memory: Tensor, pages: Sequence[int], rows: Tensor, is_gather: bool) -> None:
    """Copy pages out of a cache to the first of ``rows``, or the other way, on the current stream.

    Args:
        memory: ``[num_layers, 2, num_pages, ...]``, contiguous.
        pages: Which.
        rows: uint8 ``[num_rows, page_nbytes]``.
        is_gather: Out of the cache.
    """
    if memory.device.type == "cuda" and (kernels := _load()) is not None:
        places = send(np.array(pages, np.int64), memory.device)
        (kernels.gather if is_gather else kernels.scatter)(memory, places, rows)
        return
    for row, page in zip(rows, pages, strict=False):
        inside = memory[:, :, page]
        outside = row.view(memory.dtype).view(inside.shape)
        if is_gather:
            outside.copy_(inside)
        else:
            inside.copy_(outside)


@cache
def _load() -> ModuleType | None:
    try:
        return importlib.import_module("mstar.engine.resources.kv.pages_cuda")
    except ImportError:
        return None
