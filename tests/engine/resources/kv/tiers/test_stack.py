import tempfile
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mstar.engine.resources.kv.tiers.base import Change, Image, Name
from mstar.engine.resources.kv.tiers.disk import DiskTier
from mstar.engine.resources.kv.tiers.files import PageFiles
from mstar.engine.resources.kv.tiers.host import HostTier
from mstar.engine.resources.kv.tiers.stack import TierStack

PAGE_NBYTES = 256
FILE_NBYTES = PageFiles.nbytes(PAGE_NBYTES, 1)
ROOT = sha256(b"root").digest()


def name_of(page: int, num_slots: int = 16) -> Name:
    return Name(sha256(f"{page} {num_slots}".encode()).digest(), num_slots)


def image_of(page: int) -> Image:
    digest = sha256(f"page {page}".encode()).digest()
    return np.frombuffer(digest * (PAGE_NBYTES // 32), np.uint8).copy()


def medium_of(stack: TierStack, page: int, num_slots: int = 16) -> str | None:
    """Return where the stack gets the page from; what it returns must be right."""
    stored = stack.get(name_of(page, num_slots).key)
    if stored is None:
        return None
    assert stored.num_slots == num_slots
    assert (stored.image == image_of(page)).all()
    return stored.medium


class Media:
    """What is where, by the changes alone."""

    def __init__(self) -> None:
        self.keys: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}

    def apply(self, change: Change) -> None:
        keys = self.keys[change.medium]
        if change.kind == "stored":
            keys |= set(change.keys)
        elif change.kind == "removed":
            assert keys >= set(change.keys)
            keys -= set(change.keys)
        else:
            keys.clear()


def stack_of(folder: Path, host_pages: int, disk_pages: int, media: Media) -> TierStack:
    host = HostTier(host_pages * PAGE_NBYTES, PAGE_NBYTES)
    disk = DiskTier(folder, ROOT, disk_pages * FILE_NBYTES, PAGE_NBYTES, 2 * PAGE_NBYTES)
    return TierStack([host, disk], media.apply)


@pytest.fixture
def media() -> Media:
    return Media()


@pytest.fixture
def stack(tmp_path: Path, media: Media) -> Iterator[TierStack]:
    made = stack_of(tmp_path, 3, 6, media)
    yield made
    made.check()
    made.close(flush=False)


def test_what_falls_out_of_host_memory_is_on_the_disk(stack: TierStack, media: Media) -> None:
    for page in range(5):
        stack.put([name_of(page), name_of(page, 5)], image_of(page))
        assert stack.tiers[1].flush(20)
    expected = ["STORAGE", "STORAGE", "CPU", "CPU", "CPU", None]
    assert [stack.find(name_of(page).key) for page in range(6)] == expected
    assert [medium_of(stack, page, 5) for page in range(6)] == expected
    assert media.keys["STORAGE"] == {name_of(page, n).key for page in (0, 1) for n in (16, 5)}


def test_found_page_stays_where_it_is(stack: TierStack) -> None:
    for page in range(4):
        stack.put([name_of(page)], image_of(page))
    assert medium_of(stack, 0) == "STORAGE"
    assert medium_of(stack, 0) == "STORAGE"
    assert medium_of(stack, 1) == "CPU"


def test_one_reset_empties_every_tier(stack: TierStack, media: Media) -> None:
    for page in range(4):
        stack.put([name_of(page)], image_of(page))
    assert stack.clear() == 4
    assert [medium_of(stack, page) for page in range(4)] == [None] * 4
    assert media.keys == {"CPU": set(), "STORAGE": set()}
    assert stack.clear() == 0


def test_moving_page_is_never_reported_as_nowhere(tmp_path: Path) -> None:
    changes: list[Change] = []
    tiers = [
        HostTier(PAGE_NBYTES, PAGE_NBYTES),
        DiskTier(tmp_path, ROOT, 9 * FILE_NBYTES, PAGE_NBYTES),
    ]
    stack = TierStack(tiers, changes.append)
    stack.put([name_of(1)], image_of(1))
    stack.put([name_of(2)], image_of(2))
    assert [(change.kind, change.medium) for change in changes] == [
        ("stored", "CPU"),
        ("stored", "STORAGE"),
        ("stored", "CPU"),
        ("removed", "CPU"),
    ]
    stack.close()


def test_orderly_end_takes_host_memory_to_the_disk(tmp_path: Path, media: Media) -> None:
    stack = stack_of(tmp_path, 6, 4, media)
    for page in range(6):
        stack.put([name_of(page)], image_of(page))
    stack.close()
    assert media.keys["STORAGE"] == {name_of(page).key for page in range(2, 6)}
    again = Media()
    stack = stack_of(tmp_path, 6, 4, again)
    assert again.keys == {"CPU": set(), "STORAGE": media.keys["STORAGE"]}
    assert [medium_of(stack, page) for page in range(6)] == [None] * 2 + ["STORAGE"] * 4
    stack.close()


def test_order_of_use_survives_an_orderly_end(tmp_path: Path, media: Media) -> None:
    stack = stack_of(tmp_path, 3, 3, media)
    for page in (0, 1, 2):
        stack.put([name_of(page)], image_of(page))
    assert medium_of(stack, 0) == "CPU"
    stack.close()
    disk = DiskTier(tmp_path, ROOT, 3 * FILE_NBYTES, PAGE_NBYTES)
    disk.put([name_of(3)], image_of(3))
    assert disk.flush(20)
    assert set(disk.keys()) == {name_of(page).key for page in (2, 0, 3)}
    disk.close(20)


def test_end_without_flush_keeps_the_disk_as_it_is(tmp_path: Path, media: Media) -> None:
    stack = stack_of(tmp_path, 2, 4, media)
    for page in range(3):
        stack.put([name_of(page)], image_of(page))
    stack.close(flush=False)
    assert media.keys["STORAGE"] == {name_of(0).key}


class StackMachine(RuleBasedStateMachine):
    """A stack beside the set of pages ever put: right content or none, changes exact."""

    @initialize()
    def make(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.open()

    def open(self) -> None:
        self.media = Media()
        self.stack = stack_of(Path(self.folder.name), 2, 3, self.media)

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()
            self.folder.cleanup()

    @rule(page=st.integers(0, 8), slots=st.lists(st.sampled_from([16, 5]), min_size=1, unique=True))
    def put(self, page: int, slots: list[int]) -> None:
        self.stack.put([name_of(page, num_slots) for num_slots in slots], image_of(page))
        assert all(medium_of(self.stack, page, num_slots) for num_slots in slots)

    @rule(page=st.integers(0, 8), num_slots=st.sampled_from([16, 5]))
    def get(self, page: int, num_slots: int) -> None:
        found = self.stack.find(name_of(page, num_slots).key)
        medium = medium_of(self.stack, page, num_slots)
        # The disk may still be evicting for a write under way.
        assert medium == found or found == "STORAGE"

    @rule()
    def clear(self) -> None:
        self.stack.clear()
        assert not any(medium_of(self.stack, page) for page in range(9))

    @rule()
    def reopen(self) -> None:
        self.stack.close()
        self.open()

    @invariant()
    def changes_tell_what_is_where(self) -> None:
        if not hasattr(self, "stack"):
            return
        self.stack.check()
        assert self.stack.tiers[1].flush(20)
        self.stack.poll()
        for tier in self.stack.tiers:
            assert self.media.keys[tier.medium] == set(tier.keys())


TestStackMachine = StackMachine.TestCase
TestStackMachine.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


def test_who_waits_for_room_loses_no_page_on_a_slow_disk_below_a_small_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = PageFiles.write

    def slow(files: PageFiles, *args: Any) -> Any:
        time.sleep(0.005)
        return write(files, *args)

    monkeypatch.setattr(PageFiles, "write", slow)
    stack = stack_of(tmp_path, 3, 100, Media())
    for page in range(40):
        assert stack.wait_room(60)
        stack.put([name_of(page)], image_of(page))
    stack.close()
    assert stack.tiers[1].counts.dropped == 0
    again = stack_of(tmp_path, 3, 100, Media())
    assert [medium_of(again, page) for page in range(40)] == ["STORAGE"] * 40
    again.close()
