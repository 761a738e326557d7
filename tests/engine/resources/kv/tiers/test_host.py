from collections import OrderedDict
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mstar.engine.resources.kv.tiers import host
from mstar.engine.resources.kv.tiers.base import Image, Name
from mstar.engine.resources.kv.tiers.host import HostTier
from mstar.errors import ConfigError, EngineDeadError

PAGE_NBYTES = 64


def name_of(page: int, num_slots: int = 16) -> Name:
    return Name(sha256(f"{page} {num_slots}".encode()).digest(), num_slots)


def image_of(page: int) -> Image:
    return np.frombuffer(sha256(f"page {page}".encode()).digest() * 2, np.uint8).copy()


def test_capacity_below_one_page_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="63 bytes and one page takes 64"):
        HostTier(63, PAGE_NBYTES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned here")
def test_pinning_memory_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="pin_memory is True"):
        HostTier(PAGE_NBYTES, PAGE_NBYTES, pin_memory=True)


@pytest.mark.gpu
def test_pinned_tier_keeps_its_images_in_memory_that_a_device_reads_directly() -> None:
    tier = HostTier(2 * PAGE_NBYTES, PAGE_NBYTES, pin_memory=True)
    tier.put([name_of(1)], image_of(1))
    content = tier.get(name_of(1).key)
    assert content is not None
    image = torch.from_numpy(content[1])
    assert image.is_pinned()
    assert torch.equal(image.cuda().cpu(), torch.from_numpy(image_of(1)))


def test_memory_is_taken_as_pages_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CHUNK_NBYTES", 4 * PAGE_NBYTES)
    sizes: list[int] = []
    empty = torch.empty

    def counted(shape: tuple[int, int], **options: Any) -> torch.Tensor:
        sizes.append(shape[0])
        return empty(shape, **options)

    monkeypatch.setattr(torch, "empty", counted)
    tier = HostTier(10 * PAGE_NBYTES, PAGE_NBYTES)
    assert sizes == []
    for page in range(5):
        tier.put([name_of(page)], image_of(page))
    assert sizes == [4, 4]
    for page in range(5, 40):
        tier.put([name_of(page)], image_of(page))
    assert sizes == [4, 4, 3]
    tier.check()


@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_tier_settles_for_the_memory_there_is(
    num_chunks: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "_CHUNK_NBYTES", 4 * PAGE_NBYTES)
    empty = torch.empty
    left = num_chunks

    def limited(shape: tuple[int, int], **options: Any) -> torch.Tensor:
        nonlocal left
        if not left:
            raise RuntimeError("can't allocate memory")
        left -= 1
        return empty(shape, **options)

    monkeypatch.setattr(torch, "empty", limited)
    tier = HostTier(100 * PAGE_NBYTES, PAGE_NBYTES)
    pages = {name_of(page): page for page in range(20)}
    fallen = []
    for name, page in pages.items():
        for evicted in tier.put([name], image_of(page)):
            assert isinstance(evicted.image, np.ndarray)
            assert (evicted.image == image_of(pages[evicted.names[0]])).all()
            fallen.append(evicted.names[0])
        tier.check()
    # What finds no room goes on to the next tier, like what falls out.
    assert {*fallen, *(name for name in pages if name.key in tier)} == set(pages)
    assert len(tier) == max(0, 4 * num_chunks - 1) == tier.max_pages
    assert tier.counts.written + tier.counts.dropped == 20
    assert "can't allocate" in caplog.text


def test_a_tier_that_other_ranks_have_ends_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(shape: tuple[int, int], **options: Any) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    tier = HostTier(100 * PAGE_NBYTES, PAGE_NBYTES, has_twins=True)
    monkeypatch.setattr(torch, "empty", none)
    with pytest.raises(EngineDeadError, match=r"has 0 pages .* of its 100.* can't allocate"):
        tier.put([name_of(0)], image_of(0))


class HostMachine(RuleBasedStateMachine):
    """A host tier beside a dict of the pages it must hold, in the order of their use."""

    @initialize(max_pages=st.integers(1, 5), chunk_len=st.integers(1, 3))
    def make(self, max_pages: int, chunk_len: int) -> None:
        self.tier = HostTier(max_pages * PAGE_NBYTES + 13, PAGE_NBYTES)
        self.tier._chunk_len = chunk_len
        self.max_pages = max_pages
        self.order: OrderedDict[int, tuple[int, list[Name]]] = OrderedDict()
        """Page and names of every image, by a running number."""
        self.count = 0
        self.reported: set[bytes] = set()
        self.tier.watch()

    def holder(self, key: bytes) -> int | None:
        for number, (_, names) in self.order.items():
            if any(name.key == key for name in names):
                return number
        return None

    @rule(
        page=st.integers(0, 9), slots=st.lists(st.sampled_from([16, 5, 9]), min_size=1, unique=True)
    )
    def put(self, page: int, slots: list[int]) -> None:
        names = [name_of(page, num_slots) for num_slots in slots]
        evicted = self.tier.put(names, image_of(page))
        fresh = []
        for name in names:
            number = self.holder(name.key)
            if number is None:
                fresh.append(name)
            else:
                self.order.move_to_end(number)
        if fresh:
            self.order[self.count] = (page, fresh)
            self.count += 1
        expected = []
        if len(self.order) > self.max_pages:
            expected.append(self.order.popitem(last=False)[1])
        assert [list(gone.names) for gone in evicted] == [gone[1] for gone in expected]
        for gone, (gone_page, _) in zip(evicted, expected, strict=True):
            assert isinstance(gone.image, np.ndarray)
            assert (gone.image == image_of(gone_page)).all()

    @rule(page=st.integers(0, 9), num_slots=st.sampled_from([16, 5, 9]))
    def get(self, page: int, num_slots: int) -> None:
        key = name_of(page, num_slots).key
        number = self.holder(key)
        assert (key in self.tier) == (number is not None)
        content = self.tier.get(key)
        if number is None:
            assert content is None
        else:
            assert content is not None
            assert content[0] == num_slots
            assert (content[1] == image_of(page)).all()
            self.order.move_to_end(number)

    @rule()
    def clear(self) -> None:
        assert self.tier.clear() == len(self.order)
        self.order.clear()

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.tier.check()
        assert len(self.tier) == len(self.order)
        assert self.tier.nbytes == len(self.order) * PAGE_NBYTES
        newest_first = [list(image.names) for image in self.tier.transient()]
        assert newest_first == [names for _, names in reversed(self.order.values())]
        for change in self.tier.take_changes():
            assert change.medium == "CPU"
            if change.kind == "stored":
                assert not self.reported & set(change.keys)
                self.reported |= set(change.keys)
            elif change.kind == "removed":
                assert self.reported >= set(change.keys)
                self.reported -= set(change.keys)
            else:
                self.reported.clear()
        assert self.reported == {name.key for _, names in self.order.values() for name in names}


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
