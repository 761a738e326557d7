import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.manager import KVManager
from mstar.engine.resources.kv.offload import Offload, open_tiers
from mstar.engine.resources.kv.tiers.base import Evicted, Image, Name, Source, Tier
from mstar.engine.resources.kv.tiers.files import PageFiles
from mstar.engine.resources.kv.tiers.stack import TierStack
from mstar.engine.resources.spans import Span
from mstar.errors import ConfigError, StorageError
from tests.engine.resources.kv.sentinel import (
    CONFIG,
    PAGE_SIZE,
    ROOT,
    Spans,
    Stream,
    manager_of,
    opened,
    read,
    run,
)

PAGE_NBYTES = CONFIG.page_nbytes(PAGE_SIZE, 8)
PICTURE = Span(2, b"x" * 32)


class FaultyTier(Tier):
    """A tier as large as is asked for, whose reads fail when they are told to."""

    def __init__(self, medium: str = "CPU", max_pages: int = 1000) -> None:
        super().__init__(max_pages * PAGE_NBYTES, PAGE_NBYTES, PAGE_NBYTES)
        self.medium = medium
        self.pages: list[tuple[tuple[Name, ...], Image]] = []
        """The longest unused first."""
        self.failures: dict[int, str] = {}
        """How reads fail, by their number."""
        self.num_gets = 0

    def put(self, names: Sequence[Name], image: Source) -> list[Evicted]:
        assert isinstance(image, np.ndarray), image
        self._check_page(names, image)
        fresh = tuple(name for name in names if name.key not in self)
        if fresh:
            self.pages.append((fresh, image.copy()))
        return [Evicted(*self.pages.pop(0))] if len(self.pages) > self.max_pages else []

    def get(self, key: bytes) -> tuple[int, Image] | None:
        failure = self.failures.get(self.num_gets)
        self.num_gets += 1
        for place, (names, image) in enumerate(self.pages):
            for name in names:
                if name.key == key:
                    if failure == "corrupt":
                        # Broken content is dropped when it is read.
                        del self.pages[place]
                    if failure == "other slots":
                        return name.num_slots + 1, image
                    return (name.num_slots, image) if failure is None else None
        return None

    def __contains__(self, key: bytes) -> bool:
        return key in self.keys()

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def nbytes(self) -> int:
        return len(self.pages) * PAGE_NBYTES

    def keys(self) -> Iterable[bytes]:
        return [name.key for names, _ in self.pages for name in names]

    def clear(self) -> int:
        count = len(self.pages)
        self.pages.clear()
        return count

    def check(self) -> None:
        keys = list(self.keys())
        assert len(set(keys)) == len(keys)


def with_tiers(num_pages: int, *tiers: Tier) -> KVManager:
    manager = manager_of(num_pages, max_num_seqs=8)
    manager._offload = Offload(TierStack(tiers), manager.cache, manager.pool, manager.index)
    return manager


def write(manager: KVManager, tokens: list[int], spans: Spans | None = None) -> None:
    """Serve a prompt to its end, so that all its pages are kept for reuse."""
    stream = Stream("writer", list(tokens), spans or [], b"root")
    opened(manager, stream)
    assert run(manager, [stream], [len(tokens) - stream.stored])
    manager.close("writer")


def evict(manager: KVManager, num_pages: int) -> None:
    """Let the pool hand out all that is free and ``num_pages`` more."""
    pages = manager.pool.try_allocate(manager.pool.num_free + num_pages)
    assert pages is not None
    manager.pool.release(pages)


def hold(manager: KVManager, num_pages: int) -> list[int]:
    pages = manager.pool.try_allocate(num_pages)
    assert pages is not None
    return pages


def open_restored(manager: KVManager, tokens: list[int], spans: Spans | None = None) -> Stream:
    """Open a stream with what comes back, and check the content of all it reuses."""
    stream = Stream("reader", list(tokens), spans or [], b"root")
    manager.restore(stream.opening())
    opened(manager, stream)
    found, _ = read(manager, "reader")
    torch.testing.assert_close(found, stream.contents[: stream.stored], rtol=0, atol=0)
    manager.check()
    return stream


TOKENS = list(range(1, 14))
"""Four full pages and one token more."""


def test_evicted_pages_go_down_and_come_back_with_all_their_content() -> None:
    tier = FaultyTier()
    manager = with_tiers(8, tier)
    write(manager, TOKENS)
    assert (len(tier), len(manager.index)) == (0, 4)
    evict(manager, 4)
    assert (len(tier), len(manager.index)) == (4, 0)
    stream = open_restored(manager, TOKENS)
    assert stream.stored == 12
    assert dict(stream.opening().sources) == {"host": 12}


def test_page_that_ends_at_an_item_comes_back_by_its_end() -> None:
    spans = [Span(3), PICTURE, Span(4)]
    first, second = [1, 2, 3, 0, 0, 5, 6, 7, 8], [1, 2, 3, 0, 0, 9, 9, 9, 9]
    manager = with_tiers(8, FaultyTier())
    write(manager, first, spans)
    evict(manager, manager.pool.num_retained)
    stream = open_restored(manager, second, spans)
    assert stream.stored == 5
    assert dict(stream.opening().sources) == {"host": 5}


@pytest.mark.parametrize("failure", ["lose", "corrupt", "other slots"])
@pytest.mark.parametrize("at", range(5))
def test_match_ends_before_the_first_page_that_is_not_sound(failure: str, at: int) -> None:
    tier = FaultyTier()
    manager = with_tiers(12, tier)
    write(manager, TOKENS)
    evict(manager, 4)
    tier.failures = {at: failure}
    free = manager.pool.num_free
    stream = Stream("reader", list(TOKENS), [], b"root")
    manager.restore(stream.opening())
    assert stream.match(manager) == min(at, 4) * PAGE_SIZE
    # Nothing behind the hole is published, and the page that was to take it is free again.
    assert len(manager.index) == min(at, 4)
    assert manager.pool.num_free == free - min(at, 4)
    assert tier.num_gets == min(at + 1, 4)
    manager.check()
    # The next one finds the rest, except what is gone for good.
    tier.failures = {}
    again = open_restored(manager, TOKENS)
    assert again.stored == (min(at, 4) if failure == "corrupt" else 4) * PAGE_SIZE


@pytest.mark.parametrize("failure", ["lose", "corrupt", "other slots"])
def test_cut_page_that_is_not_sound_leaves_the_full_pages_before_it(failure: str) -> None:
    spans = [Span(3), PICTURE, Span(4)]
    tokens = [1, 2, 3, 0, 0, 5, 6, 7, 8]
    tier = FaultyTier()
    manager = with_tiers(8, tier)
    write(manager, tokens, spans)
    evict(manager, manager.pool.num_retained)
    tier.failures = {1: failure}
    stream = open_restored(manager, [1, 2, 3, 0, 0, 9, 9, 9, 9], spans)
    assert stream.stored == 3


def test_failing_fast_tier_is_made_up_for_by_the_slow_one() -> None:
    fast, slow = FaultyTier("CPU"), FaultyTier("STORAGE")
    manager = with_tiers(8, fast, slow)
    write(manager, TOKENS)
    evict(manager, 4)
    for names, image in fast.pages:
        slow.put(names, image)
    fast.failures = {1: "corrupt", 2: "lose"}
    stream = open_restored(manager, TOKENS)
    assert stream.stored == 12
    assert dict(stream.opening().sources) == {"host": 6, "disk": 6}


@pytest.mark.parametrize("num_held", range(3, 9))
def test_pool_without_room_leaves_in_the_tier_what_does_not_fit(num_held: int) -> None:
    tier = FaultyTier()
    manager = with_tiers(8, tier)
    write(manager, TOKENS)
    evict(manager, 4)
    held = hold(manager, num_held)
    stream = Stream("reader", list(TOKENS), [], b"root")
    manager.restore(stream.opening())
    room = 8 - num_held
    assert stream.match(manager) == min(4, room) * PAGE_SIZE
    assert len(tier) == 4, "what is found stays where it is"
    manager.pool.release(held)
    assert open_restored(manager, TOKENS).stored == 12


@pytest.mark.parametrize("num_kept", range(5))
@pytest.mark.parametrize("num_held", [3, 4])
def test_neither_what_matched_nor_what_came_back_goes_for_what_comes_next(
    num_kept: int, num_held: int
) -> None:
    """In a pool of just so many pages each page that comes back must not push out another."""
    manager = with_tiers(8, FaultyTier())
    write(manager, TOKENS)
    evict(manager, 4 - num_kept)
    assert len(manager.index) == num_kept
    held = hold(manager, num_held)
    # Others' pages that are kept fill the rest of the pool, and are the last used ones.
    room = 8 - num_held - num_kept
    if room:
        write(manager, [50 + n for n in range(room * PAGE_SIZE)])
    assert manager.pool.num_free == 0
    stream = Stream("reader", list(TOKENS), [], b"root")
    manager.restore(stream.opening())
    assert stream.match(manager) == 12
    manager.pool.check()
    manager.index.check()
    manager.pool.release(held)


def test_restore_stops_at_the_last_slot_that_may_be_reused() -> None:
    tier = FaultyTier()
    manager = with_tiers(8, tier)
    write(manager, TOKENS)
    evict(manager, 4)
    stream = Stream("reader", TOKENS[:12], [], b"root")
    manager.restore(stream.opening())
    assert (stream.match(manager), tier.num_gets) == (9, 3)
    other = Stream("other", TOKENS, [], b"other root")
    manager.restore(other.opening())
    nobody = Stream("nobody", TOKENS, [], None)
    manager.restore(nobody.opening())
    assert tier.num_gets == 3


def test_picture_that_the_prompt_ends_with_is_not_fetched_to_its_end() -> None:
    """Its last slot has to be computed."""
    tier = FaultyTier()
    manager = with_tiers(8, tier)
    write(manager, [1, 2, 3, 0, 0, 5, 6], [Span(3), PICTURE, Span(2)])
    evict(manager, manager.pool.num_retained)
    stream = Stream("reader", [1, 2, 3, 0, 0], [Span(3), PICTURE], b"root")
    manager.restore(stream.opening())
    assert (stream.match(manager), tier.num_gets) == (3, 1)


def test_page_that_came_back_stands_on_the_one_before_it() -> None:
    manager = with_tiers(8, FaultyTier())
    spans = [Span(6), PICTURE, Span(2)]
    tokens = [1, 2, 3, 4, 5, 6, 0, 0, 7, 8]
    write(manager, tokens, spans)
    evict(manager, manager.pool.num_retained)
    stream = Stream("reader", [*tokens[:8], 9, 9], spans, b"root")
    manager.restore(stream.opening())
    assert stream.match(manager) == 8
    order = [page for page, _ in manager.index.items()]
    assert len(order) == 3
    for page in reversed(order[1:]):
        with pytest.raises(AssertionError, match=f"page {page} goes before 1 pages"):
            manager.index.remove(page)


def test_page_that_came_back_for_nothing_is_the_devices_own_once_it_is_handed_out_anew() -> None:
    manager = with_tiers(5, FaultyTier())
    write(manager, TOKENS)
    evict(manager, 4)
    manager.restore(Stream("nobody", list(TOKENS), [], b"root").opening())
    assert len(manager.index) == 4
    evict(manager, 4)
    others = [40 + token for token in TOKENS]
    write(manager, others)
    stream = open_restored(manager, others)
    assert {k: n for k, n in stream.opening().sources.items() if n} == {"device": 12}


def test_what_is_in_the_pool_is_not_read_from_a_tier() -> None:
    tier = FaultyTier()
    manager = with_tiers(8, tier)
    write(manager, TOKENS)
    evict(manager, 4)
    for _ in range(3):
        open_restored(manager, TOKENS)
        manager.close("reader")
    assert tier.num_gets == 4


@given(
    kept=st.integers(0, 4),
    in_fast=st.sets(st.integers(0, 3)),
    fails=st.sets(st.integers(0, 3)),
)
@settings(max_examples=60, deadline=None)
def test_hits_by_tier_add_up_to_the_reuse_page_by_page(
    kept: int, in_fast: set[int], fails: set[int]
) -> None:
    fast, slow = FaultyTier("CPU"), FaultyTier("STORAGE")
    manager = with_tiers(8, fast, slow)
    write(manager, TOKENS)
    evict(manager, 4 - kept)
    # A stream's last page is evicted first.
    stored = dict(zip(range(3, kept - 1, -1), fast.pages, strict=True))
    fast.pages = [pair for page, pair in stored.items() if page in in_fast]
    slow.pages = [pair for page, pair in stored.items() if page not in in_fast]
    fast.failures = dict.fromkeys(fails, "lose")
    expected, read_from_fast = {"device": kept * PAGE_SIZE}, 0
    for page in range(kept, 4):
        if page in in_fast:
            read_from_fast += 1
            if read_from_fast - 1 in fails:
                break
        else:
            # The fast one is asked first in any case.
            read_from_fast += 1
        tier = "host" if page in in_fast else "disk"
        expected[tier] = expected.get(tier, 0) + PAGE_SIZE
    stream = open_restored(manager, TOKENS)
    sources = stream.opening().sources
    assert sources.total() == stream.stored == sum(expected.values())
    assert {k: n for k, n in sources.items() if n} == {k: n for k, n in expected.items() if n}
    manager.close("reader")
    # Once used, a page is the device's own.
    again = open_restored(manager, TOKENS[: stream.stored + 1])
    assert {k: n for k, n in again.opening().sources.items() if n} == (
        {"device": stream.stored} if stream.stored else {}
    )


@given(
    seed=st.integers(0, 2**32 - 1),
    num_pages=st.integers(8, 20),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 40)),
    failures=st.dictionaries(
        st.integers(0, 60), st.sampled_from(["lose", "corrupt", "other slots"]), max_size=20
    ),
)
@settings(max_examples=40, deadline=None)
def test_tiers_that_fail_at_any_read_never_give_a_wrong_slot(
    seed: int, num_pages: int, sizes: tuple[int, int], failures: dict[int, str]
) -> None:
    """Many prompts with pictures through a small pool, every reused slot compared."""
    rng = np.random.default_rng(seed)
    tiers = FaultyTier("CPU", sizes[0]), FaultyTier("STORAGE", sizes[1])
    for tier in tiers:
        tier.failures = failures
    manager = with_tiers(num_pages, *tiers)
    stems = [rng.integers(1, 9, 21).tolist() for _ in range(3)]
    for _ in range(20):
        tokens = [*stems[rng.integers(3)][: rng.integers(1, 21)], int(rng.integers(1, 9))]
        spans: Spans = []
        if len(tokens) > 6 and rng.random() < 0.5:
            spans = [Span(3), Span(2, bytes([rng.integers(2)]) * 32), Span(len(tokens) - 5)]
        stream = open_restored(manager, tokens, spans)
        assert stream.opening().sources.total() == stream.stored
        assert run(manager, [stream], [len(tokens) - stream.stored])
        manager.close("reader")
        for page, names in manager.index.items():
            assert names.key is None or manager.index.get(names.key) == page
        manager.check()
    assert manager.usage()[1] == 0


def test_all_that_is_indexed_goes_down_when_the_engine_ends() -> None:
    tier = FaultyTier()
    manager = with_tiers(8, tier)
    write(manager, TOKENS)
    manager.disconnect(5.0)
    assert len(tier) == 4
    warm = with_tiers(8, tier)
    assert open_restored(warm, TOKENS).stored == 12


def test_one_reset_empties_the_tiers_too() -> None:
    fast, slow = FaultyTier("CPU"), FaultyTier("STORAGE")
    manager = with_tiers(8, fast, slow)
    write(manager, TOKENS)
    evict(manager, 2)
    slow.put(*fast.pages[0])
    assert manager.reset() == 2 + 2 + 1
    assert (len(fast), len(slow)) == (0, 0)
    assert open_restored(manager, TOKENS).stored == 0


def test_reset_that_leaves_files_behind_says_so_and_forgets_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(
        3, disk_cache_bytes=1 << 20, disk_cache_dir=str(tmp_path), host_cache_bytes=1 << 20
    )
    write(manager, [1, 2, 3, 4, 5, 6])

    def refuse(files: PageFiles) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(PageFiles, "put_away", refuse)
    with pytest.raises(StorageError, match=r"Read-only file system.*remove the folder"):
        manager.reset()
    assert manager.usage() == (3, 0, 0)
    again = Stream("again", [1, 2, 3, 4, 5, 6], [], b"root")
    manager.restore(again.opening())
    assert again.match(manager) == 0
    manager.check()
    manager.disconnect(10.0)


def test_tiers_are_those_that_a_deployment_has_room_for(tmp_path: Path) -> None:
    deployment = Deployment(
        host_cache_bytes=3 * PAGE_NBYTES,
        disk_cache_bytes=100 * PAGE_NBYTES,
        disk_cache_dir=str(tmp_path),
    )
    both = open_tiers(deployment, "kv", ROOT, PAGE_NBYTES)
    try:
        assert [tier.medium for tier in both] == ["CPU", "STORAGE"]
        assert both[0].max_pages == 3
    finally:
        for tier in both:
            tier.close(5.0)
    assert (tmp_path / "kv").is_dir()
    assert open_tiers(Deployment(), "kv", ROOT, PAGE_NBYTES) == []
    with pytest.raises(ConfigError, match="900 bytes of disk are asked for and no folder"):
        open_tiers(Deployment(disk_cache_bytes=900), "kv", ROOT, PAGE_NBYTES)
    with pytest.raises(ConfigError, match=f"may hold 7 bytes and one page takes {PAGE_NBYTES}"):
        open_tiers(Deployment(host_cache_bytes=7), "kv", ROOT, PAGE_NBYTES)
