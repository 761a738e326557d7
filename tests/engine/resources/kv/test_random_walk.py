"""A hundred thousand random steps over pool, tiers, forks and resets; every read is checked."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mstar.engine.resources.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from mstar.engine.resources.spans import Span
from tests.engine.resources.kv.sentinel import (
    CONFIG,
    PAGE_SIZE,
    Spans,
    Stream,
    manager_of,
    read,
    run,
)

PAGE_NBYTES = CONFIG.page_nbytes(PAGE_SIZE, 8)
ROOTS = [bytes([n]) * 32 for n in range(2)]


class Walk:
    """Streams in a small pool, and what each of them must find.

    Args:
        seed: Decides every step.
        folder: Of the tier on disk.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.manager = manager_of(
            self.rng.randrange(10, 40),
            host_cache_bytes=self.rng.choice([0, 4, 12]) * PAGE_NBYTES,
            disk_cache_bytes=self.rng.choice([0, 200]) * PAGE_NBYTES,
            disk_cache_dir=str(folder),
            kv_events=True,
        )
        self.streams: dict[str, Stream] = {}
        self.preempted: list[Stream] = []
        self.number = 0
        self.counts = dict.fromkeys(
            ("open", "reused", "cut", "skip", "fork", "host", "disk", "preempt", "fail", "reset"), 0
        )
        self.told: dict[str, set[bytes]] = {}
        self.full: set[bytes] = set()
        """Keys of full pages that were told at any time; what tiers hold of others has no ids."""
        self.rules: list[tuple[int, Callable[[], None]]] = [
            (20, self.open_new),
            (45, self.compute),
            (20, self.generate),
            (6, self.resume),
            (12, self.skip),
            (6, self.fork),
            (8, self.preempt),
            (14, self.close),
            (2, self.fail),
            (1, self.reset),
        ]

    def step(self) -> None:
        weights, rules = zip(*self.rules, strict=True)
        self.rng.choices(rules, weights)[0]()

    def prompt(self) -> tuple[list[int], Spans]:
        """Few ids and few items, so that prompts begin alike."""
        rng = self.rng
        spans: Spans = []
        tokens: list[int] = []
        for _ in range(rng.randrange(1, 4)):
            if rng.random() < 0.3:
                spans.append(Span(rng.randrange(1, 6), bytes([rng.randrange(2)]) * 32))
                tokens += [0] * spans[-1].length
            length = rng.randrange(1, 5)
            spans.append(Span(length))
            tokens += [rng.randrange(2) for _ in range(length)]
        has_items = any(span.digest for span in spans)
        return tokens[:20], spans if has_items and len(tokens) <= 20 else []

    def open_new(self) -> None:
        tokens, spans = self.prompt()
        self.number += 1
        root = self.rng.choice([*ROOTS, ROOTS[0], ROOTS[0], None])
        stream = Stream(f"r{self.number}", tokens, spans, root)
        if self.rng.random() < 0.2:
            stream.retain_seconds = self.rng.choice([1e-4, 5e-3, 100.0])
        self.open(stream)

    def open(self, stream: Stream) -> None:
        opening = stream.opening()
        opening.sources.clear()
        self.manager.restore(opening)
        offered = stream.match(self.manager)
        if self.manager.open(opening, offered) is not None:
            return
        stream.stored = offered
        assert opening.sources.total() == offered
        self.streams[stream.request_id] = stream
        self.counts["open"] += 1
        self.counts["reused"] += offered
        self.counts["cut"] += offered % PAGE_SIZE != 0
        for tier in ("host", "disk"):
            self.counts[tier] += opening.sources[tier]

    def one(self) -> Stream | None:
        return self.rng.choice(list(self.streams.values())) if self.streams else None

    def compute(self) -> None:
        """A chunk of each of some streams."""
        some = [s for s in self.streams.values() if s.stored < len(s.tokens)]
        chosen = self.rng.sample(some, min(len(some), self.rng.randrange(1, 4)))
        while chosen:
            spans = [self.rng.randint(1, len(s.tokens) - s.stored) for s in chosen]
            if run(self.manager, chosen, spans):
                return
            assert len(self.streams) > 1, "one stream alone was refused"
            self.preempt()
            chosen = [s for s in chosen if s.request_id in self.streams]

    def generate(self) -> None:
        stream = self.one()
        if stream is None:
            return
        for _ in range(self.rng.randrange(1, 6)):
            left = len(stream.tokens) - stream.stored
            if left and not run(self.manager, [stream], [left]):
                return
            if len(stream.tokens) < stream.max_len:
                stream.tokens.append(self.rng.randrange(2))

    def resume(self) -> None:
        if self.preempted:
            self.open(self.preempted.pop())

    def skip(self) -> None:
        """Let every stream go on behind what others computed, if they did."""
        for stream in self.streams.values():
            offered = stream.match(self.manager)
            if offered > stream.stored:
                self.manager.skip(stream.opening(), offered)
                stream.stored = offered
                self.counts["skip"] += 1

    def fork(self) -> None:
        source = self.one()
        if source is None:
            return
        self.number += 1
        target = Stream(f"r{self.number}", list(source.tokens), source.spans, source.root)
        target.num_prompt_tokens = source.num_prompt_tokens
        if self.manager.fork(source.request_id, "main", target.opening()) is None:
            target.stored = source.stored
            self.streams[target.request_id] = target
            self.counts["fork"] += 1

    def preempt(self) -> None:
        if self.streams:
            name, stream = self.streams.popitem()
            self.manager.close(name)
            self.preempted = [*self.preempted[-5:], stream]
            self.counts["preempt"] += 1

    def close(self) -> None:
        stream = self.one()
        if stream is not None:
            del self.streams[stream.request_id]
            self.manager.close(stream.request_id)

    def fail(self) -> None:
        """What a failed stream held is offered no more, but where others hold or build on it."""
        stream = self.one()
        if stream is None:
            return
        name, manager = stream.request_id, self.manager
        row = manager._streams[name, "main"].row
        held = set(manager._table.pages(row).tolist())
        del self.streams[name]
        manager.disown(name)
        manager.close(name)
        for page, _ in manager.index.items():
            if page in held:
                assert not manager.index.is_leaf(page) or manager.pool.ref_count(page)
        self.counts["fail"] += 1

    def reset(self) -> None:
        if self.rng.random() < 0.1:
            self.manager.reset()
            self.counts["reset"] += 1

    def check(self) -> None:
        """Verify all books, every slot that a stream can read, and what consumers were told."""
        self.manager.check()
        for name, stream in self.streams.items():
            found, _ = read(self.manager, name)
            assert len(found) == stream.stored
            torch.testing.assert_close(found, stream.contents[: stream.stored], rtol=0, atol=0)
        offload = self.manager._offload
        if offload is not None:
            for tier in offload.tiers.tiers:
                assert tier.flush(10.0)
        for event in self.manager.take_events():
            match event:
                case BlockStored():
                    self.told.setdefault(str(event.medium), set()).update(event.block_hashes)
                    self.full.update(event.block_hashes)
                case BlockRemoved():
                    gone = set(event.block_hashes)
                    self.told.setdefault(str(event.medium), set()).difference_update(gone)
                case AllBlocksCleared():
                    self.told.clear()
        index = self.manager.index
        keys = {names.key for _, names in index.items() if names.key is not None}
        assert self.told.get("GPU", set()) == keys
        for tier in offload.tiers.tiers if offload is not None else ():
            assert self.told.get(tier.medium, set()) == set(tier.keys()) & self.full

    def end(self) -> None:
        for name in list(self.streams):
            self.manager.close(name)
        self.manager.check()
        total, held, _ = self.manager.usage()
        assert held == 0
        self.manager.reset()
        assert self.manager.usage() == (total, 0, 0)
        self.manager.disconnect(10.0)


def walk(seed: int, num_steps: int, folder: Path) -> dict[str, int]:
    made = Walk(seed, folder)
    for number in range(num_steps):
        made.step()
        if number % 10 == 0:
            made.check()
    made.check()
    made.end()
    return made.counts


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_every_slot_holds_what_its_layout_says_over_a_hundred_thousand_steps(
    part: int, tmp_path: Path
) -> None:
    counts: dict[str, int] = {}
    for seed in range(20 * part, 20 * part + 20):
        for name, count in walk(seed, 1000, tmp_path / str(seed)).items():
            counts[name] = counts.get(name, 0) + count
    # A walk that reaches none of a kind proves nothing about it.
    assert all(counts.values()), counts
