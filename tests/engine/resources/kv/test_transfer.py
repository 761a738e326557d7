"""Staged transfers, with streams that run as late and in as odd an order as events let them.

Copies are queued on streams that a test runs, one at a time, at random. Only pages' own stream is
run to its end where a step would be launched. Whatever is not ordered by an event goes wrong in
some run, and shows in the content of a slot.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.engine.resources.kv import transfer
from mstar.engine.resources.kv.cache import PagedKVCache
from mstar.engine.resources.kv.tiers.base import Arrived, Image, Leaving
from mstar.engine.resources.kv.tiers.disk import DiskTier
from tests.engine.resources.kv.sentinel import CONFIG, PAGE_SIZE, manager_of
from tests.engine.resources.kv.test_random_walk import PAGE_NBYTES, Walk

NUM_STAGE_PAGES = 2


class LateEvent:
    def __init__(self, device: "LateDevice") -> None:
        self._device = device
        self.is_over = False

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.is_over)


class LateStream:
    """Work in order, which waits for events of other streams."""

    def __init__(self, device: "LateDevice") -> None:
        self._device = device
        self.queue: deque[LateEvent | Callable[[], object]] = deque()
        """What is to be waited for, or done."""

    @property
    def is_ready(self) -> bool:
        if not self.queue:
            return False
        first = self.queue[0]
        return first.is_over if isinstance(first, LateEvent) else True

    def advance(self) -> None:
        first = self.queue.popleft()
        if not isinstance(first, LateEvent):
            first()

    def record_event(self) -> LateEvent:
        event = LateEvent(self._device)
        self.queue.append(lambda: setattr(event, "is_over", True))
        return event

    def wait_event(self, event: LateEvent) -> None:
        self.queue.append(event)

    def wait_stream(self, stream: "LateStream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class LateDevice:
    """Runs what is queued on its streams only when somebody waits for it."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.RLock()
        self.streams: list[LateStream] = []
        self.steps = self.current = self.open_stream()
        self.num_copies = self.num_moved = 0
        self.is_pinned: Callable[[int], bool] = lambda address: True
        """Tells whether copies to and from host memory are queued; else they are waited for."""

    def open_stream(self, device: object = None) -> LateStream:
        self.streams.append(LateStream(self))
        return self.streams[-1]

    @contextmanager
    def use(self, stream: LateStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run_until(self, is_over: Callable[[], bool]) -> None:
        with self._lock:
            while not is_over():
                assert self._advance(), "streams wait for each other"

    def run_some(self) -> None:
        with self._lock:
            for _ in range(self._rng.choice([0, 0, 1, 3, 20])):
                self._advance()

    def _advance(self) -> bool:
        """Do what is next on the first stream that can go on; the last ones may starve."""
        if self._rng.random() < 0.02:
            self._rng.shuffle(self.streams)
        first = next((stream for stream in self.streams if stream.is_ready), None)
        if first is not None:
            first.advance()
        return first is not None

    def copy(self, source: Tensor, target: Tensor) -> None:
        self.num_copies += 1
        self.current.queue.append(lambda: target.copy_(source))
        if not all(self.is_pinned(each.data_ptr()) for each in (source, target)):
            self.current.synchronize()

    def move(self, memory: Tensor, pages: Sequence[int], rows: Tensor, is_gather: bool) -> None:
        self.num_moved += len(pages)
        places = list(pages)
        self.current.queue.append(lambda: _move(memory, places, rows, is_gather))


_move = transfer.move


def late_device(seed: int, monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """Return a device that ``Staged`` takes for a CUDA device."""
    device = LateDevice(seed)
    monkeypatch.setattr(torch.cuda, "Stream", device.open_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.use)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(transfer, "copy", device.copy)
    monkeypatch.setattr(transfer, "move", device.move)
    monkeypatch.setattr(transfer, "_STAGE_NBYTES", NUM_STAGE_PAGES * PAGE_NBYTES)
    monkeypatch.setattr(transfer.Staged, "num_together", NUM_STAGE_PAGES)
    return device


def use_late(walk: Walk, device: LateDevice) -> None:
    """Let a walk's pages be brought down and up by the device; its steps run behind them."""
    manager = walk.manager
    lower = manager._offload
    assert lower is not None
    lower._transfer = transfer.Staged(manager.cache.memory)
    # As on a CUDA device, only the first tier's memory is pinned, but for what files are read into.
    unpinned: list[Image] = []
    for tier in lower.tiers.tiers:
        if isinstance(tier, DiskTier):
            unpinned.append(tier._read_image)
            if tier is not lower.tiers.tiers[0]:
                tier._spare = [np.empty(PAGE_NBYTES, np.uint8) for _ in range(500)]
                unpinned += tier._spare
    addresses = {image.ctypes.data for image in unpinned}
    device.is_pinned = lambda address: address not in addresses

    def behind(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            device.steps.synchronize()
            done = work(*args)
            device.run_some()
            return done

        return run

    # What touches pages on the stream that steps run on.
    manager.plan = behind(manager.plan)  # type: ignore[method-assign]
    manager.cache.copy_slots = behind(manager.cache.copy_slots)  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(8))
def test_pages_come_back_whole_in_whatever_order_streams_run(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = late_device(seed, monkeypatch)
    num_host, num_disk = [(4, 0), (12, 0), (0, 200), (3, 200)][seed % 4]
    walk = Walk(seed, tmp_path)
    walk.manager.disconnect(5.0)
    walk.manager = manager_of(
        10 + seed % 3,
        host_cache_bytes=num_host * PAGE_NBYTES,
        disk_cache_bytes=num_disk * PAGE_NBYTES,
        disk_cache_dir=str(tmp_path / "tier"),
        kv_events=True,
    )
    use_late(walk, device)
    for number in range(700):
        walk.step()
        if number % 10 == 0:
            walk.check()
    walk.check()
    walk.end()
    assert walk.counts["disk" if num_disk else "host"], walk.counts
    assert device.num_copies > 50
    assert device.num_moved > 50


def test_page_lies_in_host_memory_as_it_does_without_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files on disk serve both."""
    device = late_device(0, monkeypatch)
    layout = manager_of(7).layout
    cache = PagedKVCache(layout)
    cache.memory.copy_(torch.rand(cache.memory.shape, dtype=torch.float64))
    assert layout.page_nbytes == CONFIG.page_nbytes(PAGE_SIZE, 8) == PAGE_NBYTES
    staged, direct = transfer.Staged(cache.memory), transfer.open_transfer(cache)
    assert isinstance(direct, transfer.Direct)
    pages = [5, 1, 7, 2, 3]
    images = [torch.zeros(PAGE_NBYTES, dtype=torch.uint8).numpy() for _ in pages]
    arrived = [
        page.copy_to(image)  # type: ignore[union-attr]
        for page, image in zip(staged.read(pages), images, strict=True)
    ]
    for wait, image, expected_image in zip(arrived, images, direct.read(pages), strict=True):
        wait()
        assert (image == expected_image).all()
    for target, image in zip([6, 4, 2], images, strict=False):
        staged.write(target, image)
    expected = cache.memory.clone()
    expected[:, :, [6, 4, 2]] = expected[:, :, [5, 1, 7]]
    staged.settle()
    device.steps.synchronize()
    assert torch.equal(cache.memory, expected)
    staged.close()


class Copies:
    """A few pages and a few places in host memory, and what must be in each."""

    def __init__(self, seed: int, device: LateDevice) -> None:
        self.rng = random.Random(seed)
        self.device = device
        self.memory = PagedKVCache(manager_of(9).layout).memory
        self.staged = transfer.Staged(self.memory)
        self.pages = [0.0] * 10
        self.places = [0.0] * 3
        self.images = [np.zeros(PAGE_NBYTES, np.uint8) for _ in self.places]
        self.arriving: dict[int, Arrived] = {}
        self.unsettled: set[int] = set()

    def arrive(self, place: int) -> None:
        if place in self.arriving:
            self.arriving.pop(place)()

    def settle(self) -> None:
        self.staged.settle()
        self.unsettled.clear()

    def compute(self) -> None:
        """A step, which is behind all that was queued for its stream."""
        self.settle()
        self.device.steps.synchronize()
        page, number = self.rng.randrange(10), self.rng.random()
        self.memory[:, :, page] = self.pages[page] = number

    def down(self) -> None:
        idle = sorted(set(range(10)) - self.unsettled)
        pages = self.rng.sample(idle, min(len(idle), self.rng.randrange(1, 6)))
        for page, leaving in zip(pages, self.staged.read(pages), strict=True):
            place = self.rng.randrange(len(self.places))
            assert isinstance(leaving, Leaving)
            if self.rng.random() < 0.8:
                self.arrive(place)
                self.arriving[place] = leaving.copy_to(self.images[place])
                self.places[place] = self.pages[page]

    def up(self) -> None:
        place = self.rng.randrange(len(self.places))
        self.arrive(place)
        page = self.rng.choice(sorted(set(range(10)) - self.unsettled))
        self.staged.write(page, self.images[place])
        self.unsettled.add(page)
        if len(self.unsettled) == NUM_STAGE_PAGES:
            # It has settled by itself.
            self.unsettled.clear()
        self.pages[page] = self.places[place]

    def check(self) -> None:
        self.settle()
        self.device.steps.synchronize()
        for page, number in enumerate(self.pages):
            assert (self.memory[:, :, page] == number).all(), page
        for place, number in enumerate(self.places):
            self.arrive(place)
            assert (self.images[place].view(np.float64) == number).all(), place


@pytest.mark.parametrize("seed", range(20))
def test_copies_either_way_meet_nothing_half_done(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = late_device(seed, monkeypatch)
    copies = Copies(seed, device)
    acts = [copies.compute, copies.down, copies.up, copies.settle, device.run_some, copies.check]
    for _ in range(300):
        copies.rng.choices(acts, [2, 4, 8, 1, 4, 1])[0]()
    copies.check()
    copies.staged.close()
