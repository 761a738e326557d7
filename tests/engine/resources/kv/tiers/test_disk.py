import errno
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mstar.engine.resources.kv.tiers import files as files_module
from mstar.engine.resources.kv.tiers.base import Image, Name, Tier
from mstar.engine.resources.kv.tiers.disk import DiskTier
from mstar.engine.resources.kv.tiers.files import PageFiles
from mstar.errors import ConfigError

PAGE_NBYTES = 4096
FILE_NBYTES = PageFiles.nbytes(PAGE_NBYTES, 1)
ROOT = sha256(b"root").digest()
WAIT = 20.0


def name_of(page: int, num_slots: int = 16) -> Name:
    return Name(sha256(f"{page} {num_slots}".encode()).digest(), num_slots)


def image_of(page: int) -> Image:
    digest = sha256(f"page {page}".encode()).digest()
    return np.frombuffer(digest * (PAGE_NBYTES // 32), np.uint8).copy()


def holds(tier: Tier, page: int, num_slots: int = 16) -> bool:
    """Return whether the tier returns the page; whatever it returns must be right."""
    content = tier.get(name_of(page, num_slots).key)
    if content is None:
        return False
    assert content[0] == num_slots
    assert (content[1] == image_of(page)).all(), f"the content of page {page} is another"
    return True


def put(tier: Tier, page: int, *slots: int) -> None:
    assert tier.put([name_of(page, count) for count in slots or (16,)], image_of(page)) == []


def files_under(folder: Path, suffix: str) -> list[Path]:
    # A walk that takes no offence at folders which vanish under it.
    walked = [(base, name) for base, _, names in os.walk(folder) for name in names]
    return [Path(base, name) for base, name in walked if name.endswith(suffix)]


def nbytes_under(folder: Path) -> int:
    return sum(
        {path.stat().st_ino: path.stat().st_size for path in files_under(folder, ".kv")}.values()
    )


Opener = Callable[..., DiskTier]


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Opener]:
    tiers: list[DiskTier] = []

    def opened(max_pages: int = 8, root: bytes = ROOT, **options: Any) -> DiskTier:
        tier = DiskTier(tmp_path, root, max_pages * FILE_NBYTES, PAGE_NBYTES, **options)
        tiers.append(tier)
        return tier

    yield opened
    for tier in tiers:
        tier.check()
        tier.close(WAIT)


class Gate:
    """Holds the writer's thread up before it publishes a page."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        write = PageFiles.write

        def gated(files: PageFiles, *args: Any) -> Any:
            written = write(files, *args)
            self.reached.set()
            assert self.opened.wait(WAIT)
            return written

        monkeypatch.setattr(PageFiles, "write", gated)


def test_page_is_here_before_and_after_it_is_written(
    open_tier: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    tier = open_tier()
    image = image_of(1)
    tier.put([name_of(1), name_of(1, 5)], image)
    image[:] = 0
    assert gate.reached.wait(WAIT)
    assert holds(tier, 1)
    assert holds(tier, 1, 5)
    assert not tier.flush(0.01)
    gate.opened.set()
    assert tier.flush(WAIT)
    assert holds(tier, 1)
    assert holds(tier, 1, 5)
    assert (len(tier), tier.counts.written, tier.counts.hits) == (1, 1, 4)


def test_pages_survive_a_restart(open_tier: Opener) -> None:
    first = open_tier()
    put(first, 1, 16, 5)
    put(first, 2)
    first.close(WAIT)
    second = open_tier()
    assert len(second) == 2
    assert holds(second, 1)
    assert holds(second, 1, 5)
    assert holds(second, 2)
    assert not holds(second, 3)


def test_another_root_never_sees_the_pages(open_tier: Opener) -> None:
    one, two = open_tier(), open_tier(root=sha256(b"other weights").digest())
    put(one, 1)
    one.flush(WAIT)
    assert name_of(1).key not in two
    assert not holds(two, 1)
    # Not even where a file was moved by hand.
    source, target = one._files.path(name_of(1).key), two._files.path(name_of(1).key)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.link(source, target)
    assert not holds(two, 1)
    assert two.counts.corrupt == 1
    assert holds(one, 1)


def test_image_of_another_size_is_never_served(tmp_path: Path, open_tier: Opener) -> None:
    tier = open_tier()
    put(tier, 1)
    tier.flush(WAIT)
    other = DiskTier(tmp_path, ROOT, 10**6, PAGE_NBYTES // 2)
    assert other.get(name_of(1).key) is None
    other.close(WAIT)


def test_files_of_other_roots_go_before_any_of_the_own(tmp_path: Path, open_tier: Opener) -> None:
    old = open_tier(4, root=sha256(b"old").digest())
    for page in range(3):
        put(old, page)
    old.close(WAIT)
    tier = open_tier(4)
    for page in range(3):
        put(tier, page)
        tier.flush(WAIT)
    assert tier.nbytes == nbytes_under(tmp_path) == 4 * FILE_NBYTES
    assert [holds(tier, page) for page in range(3)] == [True] * 3
    assert [holds(old, page) for page in range(3)] == [False, False, True]
    for page in range(3, 5):
        put(tier, page)
    tier.flush(WAIT)
    assert [holds(tier, page) for page in range(5)] == [False, True, True, True, True]
    assert not holds(old, 2)


def test_use_counts_across_restarts_and_processes(open_tier: Opener) -> None:
    one, two = open_tier(3), open_tier(3)
    for page in range(3):
        put(one, page)
    one.flush(WAIT)
    assert holds(two, 0)
    put(one, 3)
    one.flush(WAIT)
    put(one, 0)
    one.close(WAIT)
    three = open_tier(3)
    put(three, 4)
    three.flush(WAIT)
    assert [holds(three, page) for page in range(5)] == [True, False, False, True, True]


def test_use_counts_before_the_folder_is_looked_through_again(open_tier: Opener) -> None:
    tier = open_tier(40)
    for page in range(40):
        put(tier, page)
        tier.flush(WAIT)
    # The folder is looked through every fifth time.
    for page in range(40, 50):
        oldest = 2 * (page - 40)
        assert holds(tier, oldest)
        put(tier, page)
        tier.flush(WAIT)
        assert name_of(oldest).key in tier
        assert name_of(oldest + 1).key not in tier


def test_inode_that_is_used_again_does_not_revive_an_old_page(
    open_tier: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(100)
    put(tier, 1)
    tier.flush(WAIT)
    old = tier._files.path(name_of(1).key)
    write = PageFiles.write

    def reusing(files: PageFiles, *args: Any) -> tuple[int, list[str]]:
        _, (temp,) = write(files, *args)
        content = Path(temp).read_bytes()
        os.replace(old, temp)
        Path(temp).write_bytes(content)
        return os.stat(temp).st_ino, [temp]

    monkeypatch.setattr(PageFiles, "write", reusing)
    put(tier, 2)
    tier.flush(WAIT)
    assert list(tier.keys()) == [name_of(2).key]
    assert tier.nbytes == FILE_NBYTES
    assert holds(tier, 2)


def test_reset_is_not_undone_by_a_look_through_the_folder(
    open_tier: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(8)
    put(tier, 1)
    tier.flush(WAIT)
    scan = PageFiles.scan

    def resetting(files: PageFiles) -> Any:
        scanned = scan(files)
        assert tier.clear() == 2
        return scanned

    monkeypatch.setattr(PageFiles, "scan", resetting)
    put(tier, 2)
    tier.flush(WAIT)
    time.sleep(0.01)
    assert list(tier.keys()) == []
    assert tier.nbytes == 0


def test_smaller_capacity_holds_from_the_start(tmp_path: Path, open_tier: Opener) -> None:
    tier = open_tier(6)
    for page in range(6):
        put(tier, page)
    tier.close(WAIT)
    smaller = open_tier(2)
    assert nbytes_under(tmp_path) == 2 * FILE_NBYTES
    assert [holds(smaller, page) for page in range(6)] == [False] * 4 + [True] * 2


def test_full_queue_drops_and_counts_and_never_waits(
    open_tier: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    tier = open_tier(queue_bytes=2 * PAGE_NBYTES)
    tier.watch()
    for page in range(5):
        put(tier, page)
    assert [holds(tier, page) for page in range(5)] == [True, True, False, False, False]
    assert tier.counts.dropped == 3
    assert not tier.wait_room(0.01)
    gate.opened.set()
    assert tier.wait_room(WAIT)
    assert [change.keys[0] for change in tier.take_changes()] == [name_of(0).key, name_of(1).key]


def test_write_queued_before_a_reset_never_appears_after_it(
    tmp_path: Path, open_tier: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    tier = open_tier()
    for page in range(3):
        put(tier, page)
    assert gate.reached.wait(WAIT)
    assert tier.clear() == 3
    # The same page again, while the old write of it is still under way.
    put(tier, 1)
    gate.opened.set()
    assert tier.flush(WAIT)
    assert [holds(tier, page) for page in range(3)] == [False, True, False]
    assert len(files_under(tmp_path / ROOT.hex(), ".kv")) == 1
    assert tier.clear() == 1
    tier.close(WAIT)
    assert files_under(tmp_path, ".kv") == files_under(tmp_path, ".tmp") == []


def test_reset_removes_what_other_processes_stored(tmp_path: Path, open_tier: Opener) -> None:
    one, two = open_tier(), open_tier()
    put(two, 1)
    two.flush(WAIT)
    assert one.clear() == 1
    assert not holds(one, 1)
    assert not holds(two, 1)
    assert files_under(tmp_path / ROOT.hex(), ".kv") == []
    one.close(WAIT)
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_reset_that_was_cut_short_go_at_the_next_start(
    tmp_path: Path, open_tier: Opener
) -> None:
    tier = open_tier()
    put(tier, 1)
    tier.close(WAIT)
    assert tier._files.put_away()[1] == 1
    assert len(files_under(tmp_path, ".kv")) == 1
    again = open_tier()
    assert not holds(again, 1)
    again.close(WAIT)
    assert files_under(tmp_path, ".kv") == []


def test_reset_that_cannot_remove_a_file_shuts_the_tier(
    open_tier: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(errno.EACCES, "refused")

    tier = open_tier()
    put(tier, 1)
    tier.flush(WAIT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        assert tier.clear() == 0
    assert "could not be removed" in caplog.text
    assert name_of(1).key not in tier
    assert not holds(tier, 1)
    put(tier, 1)
    put(tier, 2)
    assert not holds(tier, 1)
    assert (len(tier), tier.counts.dropped) == (0, 2)


def test_broken_file_is_dropped_with_all_its_names(tmp_path: Path, open_tier: Opener) -> None:
    tier = open_tier()
    tier.watch()
    put(tier, 1, 16, 5)
    tier.flush(WAIT)
    path = Path(tier._files.path(name_of(1).key))
    content = bytearray(path.read_bytes())
    content[-7] ^= 64
    path.write_bytes(content)
    assert not holds(tier, 1, 5)
    assert name_of(1).key not in tier
    assert (tier.counts.corrupt, tier.counts.misses, len(tier)) == (1, 1, 0)
    assert files_under(tmp_path, ".kv") == []
    assert [change.kind for change in tier.take_changes()] == ["stored", "removed", "removed"]
    put(tier, 1)
    assert holds(tier, 1)


def test_vanished_page_is_a_miss_and_is_written_again(open_tier: Opener) -> None:
    tier = open_tier()
    put(tier, 1)
    tier.flush(WAIT)
    os.unlink(tier._files.path(name_of(1).key))
    put(tier, 1)
    tier.flush(WAIT)
    assert holds(tier, 1)
    os.unlink(tier._files.path(name_of(1).key))
    assert not holds(tier, 1)
    assert tier.counts.corrupt == 0


def test_close_writes_what_is_queued_and_then_takes_no_more(open_tier: Opener) -> None:
    tier = open_tier()
    for page in range(4):
        put(tier, page)
    tier.close(WAIT)
    assert (tier.counts.written, tier.counts.dropped) == (4, 0)
    put(tier, 5)
    assert tier.counts.dropped == 1
    assert [holds(tier, page) for page in range(6)] == [True] * 4 + [False] * 2


def test_close_gives_up_on_a_disk_that_hangs(
    open_tier: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    tier = open_tier()
    put(tier, 1)
    put(tier, 2)
    assert gate.reached.wait(WAIT)
    started = time.monotonic()
    tier.close(0.05)
    assert time.monotonic() - started < 5
    assert tier.counts.dropped == 2
    gate.opened.set()


def test_folder_that_cannot_be_written_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"cannot write to '.*file/kv'.*name a folder"):
        DiskTier(tmp_path / "file" / "kv", ROOT, 10**6, PAGE_NBYTES)
    with pytest.raises(ConfigError, match=f"one page takes {FILE_NBYTES}"):
        DiskTier(tmp_path, ROOT, PAGE_NBYTES, PAGE_NBYTES)


def failing(function: Callable[..., Any], code: int, should_fail: Callable[[], bool]) -> Any:
    """Return ``function`` with failures where what it touches is a page file of a test."""

    def wrapped(*args: Any, **options: Any) -> Any:
        is_ours = not isinstance(args[0], str) or args[0].endswith((".kv", ".tmp"))
        if is_ours and should_fail():
            raise OSError(code, os.strerror(code))
        return function(*args, **options)

    return wrapped


CODES = (errno.ENOSPC, errno.EACCES, errno.EIO, errno.EMFILE, errno.ENOENT)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.__getitem__)
@pytest.mark.parametrize(
    "function", ["open", "write", "readv", "link", "replace", "unlink", "utime", "lstat", "close"]
)
def test_no_failure_of_the_disk_reaches_the_caller(
    function: str,
    code: int,
    open_tier: Opener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = open_tier(4)
    tier.watch()
    rng = random.Random(f"{function} {code}")
    original = getattr(os, function)

    with monkeypatch.context() as patch:
        wrapped = failing(original, code, lambda: rng.random() < 0.5)
        if function == "close":

            def wrapped(handle: int) -> None:
                original(handle)
                if rng.random() < 0.5:
                    raise OSError(code, os.strerror(code))

        patch.setattr(os, function, wrapped)
        for _ in range(60):
            page = rng.randrange(7)
            put(tier, page, 16, 5)
            if rng.random() < 0.5:
                assert tier.flush(WAIT)
            holds(tier, rng.randrange(7), rng.choice([16, 5]))
            name_of(rng.randrange(7)).key in tier  # noqa: B015
            tier.check()
    assert tier.flush(WAIT)
    assert len(caplog.records) <= 4, "a failure is logged once"
    # Whole again once the disk is.
    put(tier, 8, 16, 5)
    assert tier.flush(WAIT)
    assert holds(tier, 8)
    assert holds(tier, 8, 5)
    assert replayed(tier, set()) == set(tier.keys())


def test_full_disk_stops_writing_and_goes_on_reading(
    tmp_path: Path, open_tier: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    put(tier, 1)
    tier.flush(WAIT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing(os.write, errno.ENOSPC, lambda: True))
        put(tier, 2)
        tier.flush(WAIT)
        assert holds(tier, 1)
        assert not holds(tier, 2)
    assert tier.counts.dropped == 1
    assert files_under(tmp_path, ".tmp") == []


def replayed(tier: Tier, keys: set[bytes]) -> set[bytes]:
    """Apply the tier's changes to ``keys``."""
    for change in tier.take_changes():
        assert change.medium == "STORAGE"
        if change.kind == "stored":
            assert not keys & set(change.keys), "stored twice"
            keys |= set(change.keys)
        elif change.kind == "removed":
            assert keys >= set(change.keys), "removed and never stored"
            keys -= set(change.keys)
        else:
            keys.clear()
    return keys


class LruMachine(RuleBasedStateMachine):
    """One disk tier, never disturbed, beside a dict of what it must hold."""

    @initialize()
    def make(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.order: OrderedDict[int, None] = OrderedDict()
        self.tier = self.opened()

    def opened(self) -> DiskTier:
        return DiskTier(Path(self.folder.name), ROOT, 4 * FILE_NBYTES, PAGE_NBYTES)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close(WAIT)
            self.folder.cleanup()

    @rule(page=st.integers(0, 7))
    def put(self, page: int) -> None:
        put(self.tier, page)
        assert self.tier.flush(WAIT)
        self.order[page] = None
        self.order.move_to_end(page)
        if len(self.order) > 4:
            self.order.popitem(last=False)

    @rule(page=st.integers(0, 7))
    def get(self, page: int) -> None:
        assert (name_of(page).key in self.tier) == (page in self.order)
        assert holds(self.tier, page) == (page in self.order)
        if page in self.order:
            self.order.move_to_end(page)

    @rule()
    def reopen(self) -> None:
        self.tier.close(WAIT)
        self.tier = self.opened()

    @rule()
    def clear(self) -> None:
        assert self.tier.clear() == len(self.order)
        self.order.clear()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "tier"):
            self.tier.check()
            assert set(self.tier.keys()) == {name_of(page).key for page in self.order}
            assert self.tier.nbytes == len(self.order) * FILE_NBYTES


class SharedMachine(RuleBasedStateMachine):
    """Two disk tiers on one folder that is tampered with: right content or none."""

    @initialize()
    def make(self) -> None:
        self.made = tempfile.TemporaryDirectory()
        self.folder = Path(self.made.name)
        self.tiers = [self.opened(), self.opened()]
        self.reported: list[set[bytes]] = [set(), set()]
        self.sure: set[tuple[int, int]] = set()
        """Pages (with slots) that nothing happened to since they were written."""
        self.is_tampered = False
        self.stranger = self.folder / "notes.txt"
        self.stranger.write_text("mine")

    def opened(self) -> DiskTier:
        tier = DiskTier(self.folder, ROOT, 5 * FILE_NBYTES, PAGE_NBYTES)
        tier.watch()
        return tier

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            for tier in self.tiers:
                tier.close(WAIT)
            assert self.stranger.read_text() == "mine"
            self.made.cleanup()

    @rule(
        which=st.integers(0, 1),
        page=st.integers(0, 5),
        slots=st.lists(st.sampled_from([16, 5]), min_size=1, unique=True),
        is_flushed=st.booleans(),
    )
    def put(self, which: int, page: int, slots: list[int], is_flushed: bool) -> None:
        put(self.tiers[which], page, *slots)
        self.sure.clear()
        if is_flushed:
            for tier in self.tiers:
                assert tier.flush(WAIT)
            # A put does not look into a file that is there, broken or not: a read does.
            self.sure = {
                (page, slot)
                for slot in slots
                if not self.is_tampered or holds(self.tiers[which], page, slot)
            }

    @rule(which=st.integers(0, 1), page=st.integers(0, 5), num_slots=st.sampled_from([16, 5]))
    def get(self, which: int, page: int, num_slots: int) -> None:
        is_here = holds(self.tiers[which], page, num_slots)
        assert is_here or (page, num_slots) not in self.sure

    @rule(which=st.integers(0, 1), page=st.integers(0, 5), num_slots=st.sampled_from([16, 5]))
    def find(self, which: int, page: int, num_slots: int) -> None:
        is_here = name_of(page, num_slots).key in self.tiers[which]
        assert is_here or (page, num_slots) not in self.sure

    @rule(which=st.integers(0, 1))
    def reopen(self, which: int) -> None:
        self.tiers[which].close(WAIT)
        self.tiers[which] = self.opened()
        self.reported[which] = set()

    @rule(which=st.integers(0, 1))
    def clear(self, which: int) -> None:
        for tier in self.tiers:
            tier.flush(WAIT)
        self.tiers[which].clear()
        self.sure.clear()
        self.is_tampered = False
        assert files_under(self.folder / ROOT.hex(), ".kv") == []

    @rule(
        how=st.sampled_from(["delete", "flip", "cut", "empty", "swap"]),
        where=st.integers(0, 1 << 16),
        which=st.integers(0, 31),
    )
    def tamper(self, how: str, where: int, which: int) -> None:
        for tier in self.tiers:
            assert tier.flush(WAIT)
        paths = sorted(files_under(self.folder / ROOT.hex(), ".kv"))
        if not paths:
            return
        path = paths[which % len(paths)]
        self.is_tampered = True
        content = bytearray(path.read_bytes())
        self.sure.clear()
        if how == "delete":
            path.unlink()
        elif how == "swap":
            path.write_bytes(paths[where % len(paths)].read_bytes())
        elif content:
            index = where % len(content)
            if how == "flip":
                content[index] ^= 1 + where % 255
            else:
                del content[index if how == "cut" else 0 :]
            path.write_bytes(content)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "tiers"):
            return
        for tier, reported in zip(self.tiers, self.reported, strict=True):
            tier.flush(WAIT)
            tier.check()
            assert replayed(tier, reported) == set(tier.keys())
        # A file more for each name whose siblings were overwritten or removed.
        assert nbytes_under(self.folder / ROOT.hex()) <= 5 * FILE_NBYTES + 2 * 36


TestLruMachine = LruMachine.TestCase
TestLruMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestSharedMachine = SharedMachine.TestCase
TestSharedMachine.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)

CHILD = textwrap.dedent(
    """
    import random, sys, time
    from hashlib import sha256
    from pathlib import Path
    import numpy as np
    from mstar.engine.resources.kv.tiers.base import Name
    from mstar.engine.resources.kv.tiers.disk import DiskTier

    folder, seed, seconds, max_pages = sys.argv[1], *map(float, sys.argv[2:])
    tier = DiskTier(Path(folder), sha256(b"root").digest(), int(max_pages * 4200), 4096)
    rng = random.Random(seed)
    print("ready", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        page = rng.randrange(40)
        names = [Name(sha256(f"{page} {n}".encode()).digest(), n) for n in (16, 5)]
        digest = sha256(f"page {page}".encode()).digest()
        image = np.frombuffer(digest * 128, np.uint8)
        what = rng.random()
        if what < 0.5:
            tier.put(names, image)
        elif what < 0.95:
            name = rng.choice(names)
            content = tier.get(name.key)
            if content is not None:
                assert content[0] == name.num_slots and (content[1] == image).all(), "wrong content"
        elif what < 0.98:
            tier.flush(1.0)
        else:
            tier.clear()
    tier.close(10.0)
    tier.check()
    assert tier.counts.corrupt == 0, tier.counts
    print(tier.counts.written, tier.counts.hits, tier.counts.dropped)
    """
)


def child(folder: Path, seed: int, seconds: float, max_pages: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", CHILD, str(folder)]
    command += map(str, (seed, seconds, max_pages))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_kill_at_any_moment_leaves_right_pages_and_at_most_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    num_held = 0
    for seed in range(10):
        with child(tmp_path, seed, 60.0, 30) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()
            time.sleep(rng.uniform(0.0, 0.15))
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT)
        tier = DiskTier(tmp_path, ROOT, 30 * FILE_NBYTES, PAGE_NBYTES)
        num_held += sum(holds(tier, page, slots) for page in range(40) for slots in (16, 5))
        assert tier.counts.corrupt == 0
        tier.check()
        tier.close(WAIT)
        # The one page that the killed writer was at, by both its names.
        assert len(files_under(tmp_path, ".tmp")) <= 2 * (seed + 1)
        assert nbytes_under(tmp_path) <= 30 * FILE_NBYTES
    assert num_held > 0
    monkeypatch.setattr(files_module, "_STALE_S", -1.0)
    DiskTier(tmp_path, ROOT, 30 * FILE_NBYTES, PAGE_NBYTES).close(WAIT)
    assert files_under(tmp_path, ".tmp") == []


@pytest.mark.slow
def test_two_processes_share_a_folder_without_harm(tmp_path: Path) -> None:
    processes = [child(tmp_path, seed, 2.0, 12) for seed in (1, 2)]
    ended = [(*process.communicate(timeout=60), process.returncode) for process in processes]
    for out, err, code in ended:
        assert (code, err) == (0, "")
        written, hits, _ = map(int, out.splitlines()[1].split())
        assert written > 10
        assert hits > 10
    # Each may be ahead of the other by an eighth of the capacity and the page at hand.
    assert nbytes_under(tmp_path) <= (12 + 2 + 2) * 4200
    assert files_under(tmp_path, ".tmp") == []


def test_pipe_under_a_pages_name_is_a_miss_and_keeps_nobody_waiting(open_tier: Opener) -> None:
    tier = open_tier()
    put(tier, 1)
    assert tier.flush(WAIT)
    (path,) = files_under(tier._files.folder, ".kv")
    path.unlink()
    os.mkfifo(path)
    assert not holds(open_tier(), 1)
