"""Steps launched ahead give every request what it gets where each step waits for the last.

The recorder is the engine's own, and so is what the sampler keeps on a device; replaced are the
device's parts: a graph computes anew when it is replayed, and tokens are chosen by plain rules.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from mstar.engine.batch import Batch, NodeOutput
from mstar.engine.capture import RecordableNode, Recorder, _Recording, decode_sizes
from mstar.engine.engine import EngineCore
from mstar.engine.overlap import Flight, Pending
from mstar.engine.request import Component, PreparedRequest, Request
from mstar.engine.resources.attention import sdpa
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.keys import chain
from mstar.engine.resources.kv.manager import KVManager
from mstar.engine.resources.mirror import Fence, Fetch, Mirror, send
from mstar.engine.resources.position.manager import PositionManager
from mstar.engine.resources.sampler.config import SamplingParams, TokenLogprobs
from mstar.engine.resources.sampler.manager import SamplerManager
from mstar.engine.resources.step import NodeStep
from mstar.models.base import text_graph
from mstar.models.decoder import DecoderModel
from mstar.models.toy import toy_model

CPU = torch.device("cpu")
PAGE_SIZE = 4


def choose(
    logits: Tensor,
    reals: Tensor,
    wholes: Tensor,
    step: Tensor,
    edits: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """What ``fused_cuda.choose`` does, but for top_k, top_p and min_p."""
    best = torch.empty(len(logits))
    tokens = torch.empty(len(logits), dtype=torch.int64)
    for row, raw in enumerate(logits):
        x = raw.double()
        scale, _, _, repetition, presence, frequency = reals[row].tolist()
        _, slot, begin, end = wholes[row].tolist()
        if edits is not None:
            seen, ids, added, until = edits
            if slot >= 0:
                if (new := int(step[2, row])) >= 0:
                    seen[slot, new] += 2
                count = (seen[slot] >> 1).double()
                turned = torch.where(x > 0, x / repetition, x * repetition)
                taken = presence * (count > 0) + frequency * count
                x = torch.where(seen[slot] > 0, turned - taken, x)
            x = x.clone()
            for place in range(begin, end):
                x[ids[place]] += added[place]
                if step[1, row] < until[place]:
                    x[ids[place]] = -torch.inf
        best[row], tokens[row] = x.max(0)
        if not bool(best[row].isfinite()):
            tokens[row] = -1
        elif scale:
            reached = (x * scale).softmax(0).cumsum(0)
            uniform = step[0, row].view(torch.float64)
            tokens[row] = torch.searchsorted(reached, uniform, right=True).clamp(max=len(x) - 1)
    return best, tokens


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Keep counts of tokens as on a device, and have fixed plans of attention."""
    with pytest.MonkeyPatch.context() as patch:
        kernels = SimpleNamespace(choose=choose)
        patch.setattr("mstar.engine.resources.sampler.manager.kernels", lambda device: kernels)
        patch.setattr("mstar.engine.resources.sampler.fused._load", lambda: kernels)
        patch.setattr(sdpa.Backend, "plan_fixed", sdpa.Backend.plan)
        yield


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    with as_on_a_device():
        yield


class Graph:
    """A replay of one size."""

    def __init__(self, recorder: "CpuRecorder", size: int) -> None:
        self._recorder = recorder
        self._size = size

    def replay(self) -> None:
        recorder = self._recorder
        recording = recorder._recordings[self._size]
        recording.rows.copy_(recorder._node.compute(recording.ids.tensor, recorder.plans))
        if recorder.num_replays in recorder.broken:
            recording.rows[recorder.broken[recorder.num_replays]] = torch.nan


class CpuRecorder(Recorder):
    """A recorder of a device that does at once what is queued."""

    plans: dict[str, Any]
    broken: Mapping[int, int]
    """Rows without usable logits, by the number of replays before."""

    def record(self, sizes: Sequence[int]) -> bool:
        self.broken = {}
        step = self._node.declare(Batch.of(self._name, ()))
        for size in sizes:
            ids = Mirror(self._node.num_streams * size, torch.int64, CPU)
            with torch.inference_mode():
                plans = self._plan(size, step)
                assert plans is not None
                rows = self._node.compute(ids.tensor, plans)
            self._recordings[size] = _Recording(graph=Graph(self, size), ids=ids, rows=rows)
        self._sizes = sorted(sizes)
        return True

    def _plan(self, size: int, step: NodeStep, ahead: int = 0) -> dict[str, Any] | None:
        plans = super()._plan(size, step, ahead)
        self.plans = plans or {}
        return plans


@dataclass
class Answer:
    """All that one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None


class Bench:
    """An engine whose decode steps are recorded, its books checked after every step."""

    def __init__(self, model: DecoderModel, overlap: bool = True, **numbers: Any) -> None:
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_pages": 100}
        self.engine = EngineCore(
            model,
            Deployment(
                page_size=PAGE_SIZE,
                overlap=overlap,
                attention_backend="sdpa",
                **(defaults | numbers),
            ),
        )
        runner = self.engine._runner
        ((name, node),) = model.nodes.items()
        assert isinstance(node, RecordableNode)
        self.recorder = CpuRecorder(name, node, runner.resources, CPU, Fence(CPU))
        self.recorder.record(decode_sizes(self.engine.deployment.max_num_seqs))
        runner._recorders[name] = self.recorder
        kv = runner.resources["kv"]
        assert isinstance(kv, KVManager)
        self.kv = kv
        self.answers: dict[str, Answer] = {}
        self.prompts: dict[str, list[int]] = {}

    def add(self, request_id: str, ids: list[int], **params: Any) -> None:
        wanted = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "seed": 1} | params
        self.engine.add_request(
            PreparedRequest(
                request_id=request_id,
                token_ids=ids,
                params=SamplingParams(**wanted),
                root=self.engine.root,
            )
        )
        self.answers[request_id] = Answer()
        self.prompts[request_id] = ids

    def step(self) -> list[str]:
        """Returns the requests that got something."""
        outputs = self.engine.step()
        self.engine.check()
        for output in outputs:
            answer = self.answers[output.request_id]
            assert answer.finish_reason is None, f"{output} after the end"
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs or []
            answer.finish_reason = output.finish_reason
            answer.error = output.error.code if output.error else None
        return [output.request_id for output in outputs]

    def drain(self) -> dict[str, Answer]:
        for _ in range(1000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        assert self.engine.stats().num_pages_used == 0
        return self.answers

    def names(self) -> set[bytes]:
        """The names of all pages that can be reused."""
        return {names.key for _, names in self.kv.index.items() if names.key is not None}


def steady(bench: Bench, count: int = 3, **params: Any) -> None:
    """Add requests, and run until all of them generate."""
    for place in range(count):
        bench.add(str(place), [5 + place, 6, 7], **params)
    bench.step()
    assert bench.step() == [str(place) for place in range(count)]
    assert bench.engine._runner.launched is not None


def alone(ids: list[int], **params: Any) -> Answer:
    bench = Bench(toy_model(), overlap=False, enable_prefix_caching=False)
    bench.add("alone", ids, **params)
    return bench.drain()["alone"]


def test_every_step_of_a_steady_batch_but_the_first_is_launched_ahead(toy: DecoderModel) -> None:
    bench = Bench(toy)
    steady(bench)
    for _ in range(10):
        assert bench.step() == ["0", "1", "2"]
    assert not bench.engine.has_work
    # Nothing was computed for nothing: that all end was known.
    assert (bench.recorder.num_replays, bench.recorder.num_ahead) == (11, 10)
    for place in range(3):
        assert bench.answers[str(place)] == alone([5 + place, 6, 7])


def test_nothing_is_launched_ahead_where_that_is_switched_off(toy: DecoderModel) -> None:
    bench = Bench(toy, overlap=False)
    bench.add("a", [3, 4])
    bench.drain()
    assert (bench.recorder.num_replays, bench.recorder.num_ahead) == (11, 0)


def test_what_is_under_way_is_read_for_those_that_go_on_when_one_stops(toy: DecoderModel) -> None:
    stop = alone([6, 6, 7]).token_ids[4]
    bench = Bench(toy)
    for place in range(3):
        bench.add(str(place), [5 + place, 6, 7], stop_token_ids=(stop,) if place == 1 else ())
    bench.drain()
    assert bench.answers["1"].finish_reason == "stop"
    assert bench.answers["1"].token_ids == alone([6, 6, 7]).token_ids[:5]
    for place in (0, 2):
        assert bench.answers[str(place)] == alone([5 + place, 6, 7])
    assert (bench.recorder.num_replays, bench.recorder.num_ahead) == (11, 10)


def test_page_is_not_named_by_the_slot_computed_behind_a_stop(toy: DecoderModel) -> None:
    answer = alone([6, 6, 7]).token_ids
    stop = answer[4]
    assert stop not in answer[:4]
    bench = Bench(toy)
    steady(bench, stop_token_ids=(stop,))
    bench.drain()
    tokens = [6, 6, 7, *answer[:5]]
    assert len(tokens) == 2 * PAGE_SIZE, "the slot would fill its page"
    assert bench.engine.root is not None
    first, second = chain([tokens[:4], tokens[4:]], None, bench.engine.root)
    assert first in bench.names()
    assert second not in bench.names()


def test_abort_in_flight_gives_pages_back_at_once_and_touches_nobody(toy: DecoderModel) -> None:
    bench = Bench(toy)
    steady(bench)
    used = bench.engine.stats().num_pages_used
    assert bench.engine.abort("1")
    assert bench.engine.stats().num_pages_used < used
    assert bench.step() == ["0", "2"]
    bench.drain()
    assert bench.answers["1"].finish_reason is None
    for place in (0, 2):
        assert bench.answers[str(place)] == alone([5 + place, 6, 7])
    assert bench.recorder.num_replays == 11


def test_step_of_aborted_requests_is_not_read_for_others_of_their_names(toy: DecoderModel) -> None:
    bench = Bench(toy)
    steady(bench)
    for place in range(3):
        assert bench.engine.abort(str(place))
    assert not bench.engine.has_work
    for place in range(3):
        bench.add(str(place), [9, 8 + place, 7, 6, 5])
    bench.drain()
    for place in range(3):
        assert bench.answers[str(place)] == alone([9, 8 + place, 7, 6, 5])


def test_arrival_waits_for_the_step_under_way_and_then_comes_in(toy: DecoderModel) -> None:
    bench = Bench(toy)
    steady(bench)
    bench.add("late", [3, 3, 3, 3, 3])
    assert bench.step() == ["0", "1", "2"]
    assert bench.engine._runner.launched is None
    assert bench.step() == ["0", "1", "2", "late"]
    bench.drain()
    assert bench.answers["late"] == alone([3, 3, 3, 3, 3])


def test_row_without_usable_logits_fails_alone(toy: DecoderModel) -> None:
    bench = Bench(toy)
    bench.recorder.broken = {4: 1}
    steady(bench)
    bench.drain()
    assert bench.answers["1"].error == "invalid_logits"
    assert bench.answers["1"].token_ids == alone([6, 6, 7]).token_ids[:5]
    for place in (0, 2):
        assert bench.answers[str(place)] == alone([5 + place, 6, 7])


def test_streams_that_were_moved_meanwhile_are_computed_again(toy: DecoderModel) -> None:
    bench = Bench(toy)
    penalty: dict[str, Any] = {"frequency_penalty": 1.0, "temperature": 0.8}
    steady(bench, **penalty)
    position = bench.engine._runner.resources["position"]
    assert isinstance(position, PositionManager)
    position.set_counter("1", "main", position.counter("1"))
    bench.drain()
    assert bench.recorder.num_replays == 12
    for place in range(3):
        assert bench.answers[str(place)] == alone([5 + place, 6, 7], **penalty)


def test_without_a_page_to_write_to_the_step_waits_for_the_last(toy: DecoderModel) -> None:
    bench = Bench(toy)
    steady(bench, count=1)
    others = bench.kv.pool.try_allocate(bench.kv.pool.num_available)
    assert others is not None
    # Slots of its second page, which is full when seven tokens are stored and the last is read.
    while bench.engine._runner.launched is not None:
        assert bench.engine.step()
    assert len(bench.answers["0"].token_ids) < 12
    bench.kv.pool.release(others)
    bench.drain()


def test_failure_of_a_step_under_way_is_that_of_its_request(toy: DecoderModel) -> None:
    bench = Bench(toy)
    steady(bench)
    launched = bench.engine._runner._flight
    assert launched is not None

    def fail() -> NodeOutput:
        raise RuntimeError("the device is gone")

    launched.pending.fetch = fail  # type: ignore[method-assign]
    assert bench.step() == ["0", "1", "2"], "each was computed by itself"
    bench.drain()
    for place in range(3):
        assert bench.answers[str(place)] == alone([5 + place, 6, 7])


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.2, "seed": 3, "stop_token_ids": tuple(range(0, 160, 9))},
    {"temperature": 0.7, "seed": 4, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "logprobs": 3, "stop_token_ids": tuple(range(1, 160, 9))},
    {
        "temperature": 0.9,
        "min_tokens": 4,
        "stop_token_ids": tuple(range(0, 160, 3)),
        "logit_bias": {9: 2.0},
    },
]
PREFIXES: tuple[list[int], ...] = ([], [11, 12, 13, 14], [11, 12, 13, 14, 15, 16, 17, 18])
adds = st.tuples(
    st.just("add"),
    st.sampled_from(PREFIXES),
    st.lists(st.integers(2, 159), min_size=1, max_size=6),
    st.sampled_from(KINDS),
    st.integers(4, 14),
)
events = st.lists(
    st.one_of(
        adds,
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
    ),
    min_size=3,
    max_size=14,
)


def play(schedule: Sequence[tuple[Any, ...]], **numbers: Any) -> tuple[Bench, set[str]]:
    """Run a schedule to its end; returns the engine, and the requests that were aborted."""
    bench = Bench(toy_model(), **numbers)
    aborted = set()
    for kind, *event in schedule:
        if kind == "add":
            prefix, own, params, max_tokens = event
            bench.add(str(len(bench.answers)), prefix + own, max_tokens=max_tokens, **params)
        elif kind == "step":
            for _ in range(event[0]):
                bench.step()
        elif bench.engine.abort(str(event[0])):
            aborted.add(str(event[0]))
    bench.drain()
    return bench, aborted


def named(bench: Bench) -> set[bytes]:
    """The names that answers allow: of full pages before the last token of each."""
    root, names = bench.engine.root, set[bytes]()
    assert root is not None
    for request_id, answer in bench.answers.items():
        tokens = bench.prompts[request_id] + answer.token_ids
        full = (len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE
        names |= set(
            chain([tokens[i : i + PAGE_SIZE] for i in range(0, full, PAGE_SIZE)], None, root)
        )
    return names


@settings(max_examples=40, deadline=None)
@given(schedule=events, num_pages=st.sampled_from([9, 100]))
def test_any_schedule_gives_what_it_gives_where_each_step_waits(
    schedule: list[tuple[Any, ...]], num_pages: int
) -> None:
    ahead, aborted = play(schedule, num_pages=num_pages)
    waiting, also_aborted = play(schedule, num_pages=num_pages, overlap=False)
    assert waiting.recorder.num_ahead == 0
    for request_id, expected in waiting.answers.items():
        got = ahead.answers[request_id]
        length = len(expected.token_ids)
        if request_id in aborted | also_aborted:
            length = min(length, len(got.token_ids))
            assert got.token_ids[:length] == expected.token_ids[:length]
        else:
            assert got.token_ids == expected.token_ids
            assert got.finish_reason == expected.finish_reason
        for one, other in zip(got.logprobs[:length], expected.logprobs[:length], strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert ahead.names() <= named(ahead)
    if num_pages == 100 and not aborted | also_aborted:
        assert ahead.names() == waiting.names() == named(ahead)


def record(number: int) -> Request:
    return Request(
        PreparedRequest(request_id=str(number), token_ids=[5], params=SamplingParams()),
        text_graph("node").cursor("decode"),
        Component(vocab_size=160, stop_token_ids=frozenset()),
        max_len=9,
        arrival=number,
    )


class Known(Pending):
    def __init__(self, output: NodeOutput) -> None:
        self.tokens = torch.tensor(output.token_ids)
        self._output = output

    def fetch(self) -> NodeOutput:
        return self._output


def test_flight_has_the_rows_of_a_batch_of_its_requests_and_of_no_other() -> None:
    requests = [record(number) for number in range(4)]
    output = NodeOutput(token_ids=[7, 8, -1], logprobs=[None] * 3, failures={2: "bad"})
    batch = Batch.of("node", [(request, 1) for request in requests[:3]])
    flight = Flight(batch=batch, pending=Known(output), revision=0)
    assert flight.rows_of(batch) == range(3)
    assert flight.fetch(range(3)) is output
    rest = Batch.of("node", [(requests[2], 1), (requests[0], 1)])
    rows = flight.rows_of(rest)
    assert rows == [2, 0]
    assert flight.fetch(rows) == NodeOutput(
        token_ids=[-1, 7], logprobs=[None] * 2, failures={0: "bad"}
    )
    assert flight.rows_of(Batch.of("node", [(requests[0], 1), (requests[3], 1)])) is None
    assert flight.rows_of(Batch.of("node", [(record(0), 1)])) is None, "another of that name"
    assert flight.rows_of(Batch.of("other", [(requests[0], 1)])) is None


def test_on_a_cpu_nothing_is_waited_for() -> None:
    values = torch.arange(4)
    (fetched,) = Fetch([values], None).wait()
    assert fetched is values
    fence = Fence(CPU)
    fence.set()
    fence.wait()
    assert send(values.numpy(), CPU).tolist() == [0, 1, 2, 3]


def test_sampler_that_counts_on_the_cpu_has_no_plan_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstar.engine.resources.sampler.manager.kernels", lambda device: None)
    bench = Bench(toy_model())
    sampler = bench.engine._runner.resources["sampler"]
    assert isinstance(sampler, SamplerManager)
    bench.add("a", [3, 4, 5])
    bench.drain()
    assert bench.recorder.num_ahead == 0
    assert bench.recorder.num_replays == 11
