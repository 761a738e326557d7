"""Random traffic over one engine whose model has everything: nobody's answer depends on it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.engine.array import to_numpy
from mstar.engine.engine import EngineCore
from mstar.engine.output import FinishReason
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.events import EventBatch
from mstar.engine.resources.kv.manager import KVManager
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.preprocess.items import prompt_keys
from mstar.preprocess.prompt import request_root
from mstar.transport.event_order import Batch, IndexMirror
from tests.engine.toys import PAGE_SIZE, Circus, guiding, keyed, listening
from tests.laws.harness import Picture, layout, prompt

ACTS = ("chat", "speak", "guide", "listen", "close")
LENGTHS = (3, 6, 9)
"""Slots of the pictures."""


@dataclass(frozen=True)
class Wish:
    """What somebody asks: one of few, so that prompts begin alike and are asked twice."""

    act: str
    stem: int
    """Number of its beginning, and of the pictures in it."""
    tail: int
    max_tokens: int
    seed: int | None
    """``None``: greedy."""
    fails: bool = False
    """Its visits fail, where it has any."""

    def request(self, name: str, root: bytes | None) -> PreparedRequest:
        params = SamplingParams(
            temperature=0.0 if self.seed is None else 1.0,
            seed=self.seed,
            max_tokens=self.max_tokens,
            ignore_eos=self.tail % 2 == 0,
        )
        fields: dict[str, Any] = {
            "params": params,
            "options": {"act": self.act, "fails": self.fails},
        }
        ids = [*prompt(self.stem, 3 + 2 * self.stem), *prompt(9 + self.tail, self.tail + 1)]
        match self.act:
            case "close":
                return keyed(name, [], root, **fields | {"page_keys": []})
            case "guide":
                return guiding(name, ids, [ids[0], *[2] * (len(ids) - 1)], root, **fields)
            case "listen":
                return listening(name, ids, self.stem, root, **fields)
        pictures = [Picture(n, LENGTHS[n], is_whole=n != 1) for n in range(self.stem)]
        made = layout([*ids[: self.stem + 1], *pictures, *ids[self.stem + 1 :]])
        keys = [] if root is None else prompt_keys(made.token_ids, made.spans, PAGE_SIZE, root)
        fields |= {"page_keys": keys, "spans": made.spans, "inputs": made.inputs}
        return keyed(name, made.token_ids, root, **fields)


Told = tuple[list[int], list[tuple[str, Any]], FinishReason | None]
"""All that one request got: ids, what was emitted, and why it ended."""


@cache
def circus() -> Circus:
    return Circus()


def engine_of(**numbers: Any) -> EngineCore:
    defaults: dict[str, Any] = {"page_size": PAGE_SIZE, "max_num_seqs": 4, "max_model_len": 40}
    return EngineCore(circus(), Deployment(**(defaults | numbers)))


@cache
def quiet() -> EngineCore:
    """Return an engine that serves one after the other and keeps nothing."""
    return engine_of(num_pages=64, enable_prefix_caching=False)


@cache
def alone(wish: Wish) -> Told:
    """Return what is told to somebody who is alone, without reuse."""
    engine = quiet()
    engine.add_request(wish.request("r", None))
    told: dict[str, Told] = {"r": ([], [], None)}
    while engine.has_work:
        take(engine, told)
    return told["r"]


def take(engine: EngineCore, told: dict[str, Told]) -> None:
    """Run a step, and add what it gave to what was told."""
    for output in engine.step():
        if output.error is not None:
            assert "this visit fails" in output.error.message
        ids, pieces, reason = told[output.request_id]
        assert reason is None, f"{output} after the end"
        pieces += [
            (p.name, p.info if p.array is None else to_numpy(p.array).tolist())
            for p in output.emitted
        ]
        told[output.request_id] = (ids + output.token_ids, pieces, output.finish_reason)


class Traffic:
    """An engine with little room, and what it told whom."""

    def __init__(self, **numbers: Any) -> None:
        tight: dict[str, Any] = {
            "num_pages": 13,
            "max_num_batched_tokens": 12,
            "encoder_cache_tokens": 12,
        }
        self.engine = engine_of(**(tight | numbers))
        self.wishes: dict[str, Wish] = {}
        self.told: dict[str, Told] = {}
        self.num_aborted = 0
        self._number = 0

    @property
    def alive(self) -> Sequence[str]:
        return [name for name, (_, _, reason) in self.told.items() if reason is None]

    def add(self, wish: Wish, salt: str | None) -> None:
        name = str(self._number)
        self._number += 1
        self.engine.add_request(wish.request(name, request_root(self.engine.root, salt)))
        self.wishes[name], self.told[name] = wish, ([], [], None)

    def step(self) -> None:
        take(self.engine, self.told)

    def abort(self, name: str) -> None:
        assert self.engine.abort(name)
        del self.wishes[name], self.told[name]
        self.num_aborted += 1

    def check(self) -> None:
        self.engine.check()
        assert self.engine.has_work == bool(self.alive)

    def end(self) -> None:
        """Run to the end: everybody was told what he is told alone, and nothing is held."""
        steps = 0
        while self.engine.has_work:
            self.step()
            self.check()
            steps += 1
            assert steps < 2000, f"no end: {self.engine.stats()}"
        for name, wish in self.wishes.items():
            assert self.told[name] == alone(wish), (name, wish)
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)


WISHES = st.builds(
    Wish,
    act=st.sampled_from(ACTS),
    stem=st.integers(0, 2),
    tail=st.integers(0, 2),
    max_tokens=st.integers(1, 7),
    seed=st.sampled_from([None, 1, 2]),
    fails=st.booleans(),
)


class Machine(RuleBasedStateMachine):
    """Hypothesis chooses who comes, goes and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    @rule(wish=WISHES, salt=st.sampled_from([None, None, "a"]))
    def add(self, wish: Wish, salt: str | None) -> None:
        self.traffic.add(wish, salt)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.traffic.step()
            self.traffic.check()

    @precondition(lambda self: self.traffic.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.traffic.abort(data.draw(st.sampled_from(self.traffic.alive)))

    @rule()
    def reset(self) -> None:
        self.traffic.engine.reset_prefix_cache()

    @invariant()
    def books_are_right(self) -> None:
        self.traffic.check()

    def teardown(self) -> None:
        self.traffic.end()


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestMachine = pytest.mark.slow(Machine.TestCase)


def walk(seed: int, num_rounds: int) -> Traffic:
    """Return what random traffic left behind; few rounds of it are idle."""
    rng = random.Random(seed)
    traffic = Traffic(
        num_pages=rng.choice((12, 13, 20)),
        max_num_batched_tokens=rng.choice((9, 12, 32)),
        encoder_cache_tokens=rng.choice((9, 12, 30)),
        max_num_seqs=rng.choice((2, 4, 7)),
    )
    for _ in range(num_rounds):
        if rng.random() < 0.35:
            wish = Wish(
                rng.choice(ACTS),
                rng.randrange(3),
                rng.randrange(3),
                rng.randrange(1, 8),
                rng.choice((None, 1, 2)),
                rng.random() < 0.2,
            )
            traffic.add(wish, rng.choice((None, None, "a")))
        if traffic.alive and rng.random() < 0.03:
            traffic.abort(rng.choice(traffic.alive))
        if rng.random() < 0.02:
            traffic.engine.reset_prefix_cache()
        traffic.step()
        traffic.check()
    traffic.end()
    return traffic


def test_traffic_tells_everybody_what_he_is_told_alone() -> None:
    assert walk(0, 120).engine.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_long_traffic_tells_everybody_what_he_is_told_alone(part: int) -> None:
    walks = [walk(seed, 150) for seed in range(6 * part, 6 * part + 6)]
    # Traffic that meets none of a kind proves nothing about it.
    stats = [traffic.engine.stats() for traffic in walks]
    assert sum(s.num_preemptions for s in stats) > 0
    assert sum(s.cached_tokens for s in stats) > 0
    assert sum(s.num_encoder_hits for s in stats) > 0
    assert sum(s.num_evictions for s in stats) > 0
    assert sum(traffic.num_aborted for traffic in walks) > 0


@pytest.mark.parametrize("num_pages", [40, 12])
def test_events_of_several_caches_are_told_in_one_order(num_pages: int) -> None:
    engine = engine_of(num_pages=num_pages, kv_events=True, host_cache_bytes=4000)
    mirror, root = IndexMirror(), request_root(engine.root, None)
    caches = [r for r in engine._runner.resources.values() if isinstance(r, KVManager)]
    assert len(caches) > 1
    most = 0
    for number in range(40):
        act = ("chat", "guide", "speak", "listen")[number % 4]
        engine.add_request(Wish(act, number % 3, number % 5, 3, None).request(str(number), root))
        if number in (0, 17):
            engine.reset_prefix_cache()
        while engine.has_work:
            engine.step()
        if number % 3 == 0:
            continue
        mirror.apply(Batch(number, EventBatch(float(number), engine.take_events())))
        held = {(names.key, "GPU") for own in caches for _, names in own.index.items() if names.key}
        offloads = [own._offload for own in caches if own._offload is not None]
        for keys in (tier.keys() for own in offloads for tier in own.tiers.tiers):
            held |= {(key, "CPU") for key in keys}
        told = set(mirror.pages)
        # The cuts of pages, which tiers have too, are told to nobody.
        assert told <= held
        assert {key for key, medium in held - told if medium == "GPU"} == set()
        most = max(most, len(told))
    assert most > 5
