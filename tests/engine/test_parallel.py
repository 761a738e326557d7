"""What one engine tells others is enough for them to do as it does."""

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mstar.engine.engine import EngineCore
from mstar.engine.output import RequestOutput
from mstar.engine.parallel import Clock, EngineInStep, LeadingEngine, follow
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.keys import chain
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import ContextLengthError, EngineDeadError, RequestError
from mstar.models.toy import toy_model

NUMBERS = Deployment(
    num_pages=24,
    page_size=4,
    max_num_seqs=3,
    max_model_len=64,
    max_num_batched_tokens=12,
    host_cache_bytes=1 << 16,
)


class Kept:
    """Ranks that are not there yet: their frames are kept."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.loss: str | None = None
        self.pids = [1]
        self.closed = False

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)

    def close(self, timeout: float) -> None:
        self.closed = True


class Pair:
    """An engine that leads, and one that follows when it is asked to."""

    def __init__(self, **changes: Any) -> None:
        numbers = replace(NUMBERS, **changes)
        self.ranks = Kept()
        clock = Clock()
        self.leader = LeadingEngine(toy_model(), replace(numbers, clock=clock), self.ranks, clock)
        self._clock = Clock()
        self.follower = EngineInStep(toy_model(), replace(numbers, clock=self._clock))

    def catch_up(self) -> None:
        frames = iter(self.ranks.frames)
        follow(self.follower, lambda: next(frames, None), self._clock)

    def add(self, name: str, ids: list[int], **params: Any) -> None:
        root = self.leader.root
        assert root is not None
        keys = chain([ids[i : i + 4] for i in range(0, len(ids), 4)], None, root)
        self.leader.add_request(
            PreparedRequest(
                request_id=name,
                token_ids=ids,
                params=SamplingParams(**params),
                root=root,
                page_keys=list(keys),
                retain_seconds=params.get("temperature", 0.0) * 1e-3,
            )
        )

    def drain(self) -> list[RequestOutput]:
        outputs = []
        while self.leader.has_work:
            outputs += self.leader.step()
        return outputs


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "step", "step", "step", "abort", "reset", "check"]),
        st.integers(0, 5),
        st.integers(1, 30),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(CALLS)
def test_any_calls_leave_both_engines_alike(calls: list[tuple[str, int, int]]) -> None:
    """Requests without seeds, pages protected for milliseconds, a host tier and preemptions."""
    pair = Pair()
    leader = pair.leader
    for number, (call, which, length) in enumerate(calls):
        match call:
            case "add":
                ids = [(which * 5 + i) % 90 for i in range(length)]
                pair.add(str(number), ids, max_tokens=1 + length, temperature=which / 2)
            case "step":
                leader.step()
            case "abort":
                leader.abort(str(number - which))
            case "reset":
                leader.reset_prefix_cache()
            case _:
                leader.check()
    pair.catch_up()
    assert pair.follower.stats() == leader.stats()
    pair.follower.check()
    leader.check()
    leader.close()
    assert pair.ranks.closed


def test_refusals_are_the_users_and_nobody_elses() -> None:
    pair = Pair()
    with pytest.raises(RequestError):
        pair.add("strange", [10**6])
    with pytest.raises(ContextLengthError):
        pair.add("large", [1] * 60, max_tokens=10)
    pair.add("fine", [1, 2, 3], max_tokens=3)
    with pytest.raises(RequestError, match="in use"):
        pair.add("fine", [1, 2, 3], max_tokens=3)
    pair.drain()
    pair.catch_up()
    assert pair.follower.stats() == pair.leader.stats()


def test_rank_that_computed_other_tokens_says_so() -> None:
    pair = Pair()
    pair.add("a", [1, 2, 3], max_tokens=4, temperature=0.0)
    pair.drain()
    pair.leader.abort("nobody")
    # The follower is told of another prompt, and so answers another.
    first = pair.ranks.frames[0]
    other = first.replace(b"\x01\x02\x03", b"\x07\x08\x09")
    assert other != first
    pair.ranks.frames[0] = other
    with pytest.raises(EngineDeadError, match="the tokens of this rank have the digest"):
        pair.catch_up()


def test_step_that_fails_ends_the_engine_instead_of_running_its_requests_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair()
    pair.add("a", [1, 2, 3], max_tokens=4)
    pair.add("b", [1, 2, 3], max_tokens=4)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(pair.leader._runner, "run", fail)
    with pytest.raises(EngineDeadError, match="RuntimeError: out of memory"):
        pair.leader.step()
    alone = EngineCore(toy_model(), NUMBERS)
    alone.add_request(
        PreparedRequest(request_id="a", token_ids=[1], params=SamplingParams(max_tokens=2))
    )
    monkeypatch.setattr(alone._runner, "run", fail)
    (output,) = alone.step()
    assert output.error is not None


def test_loss_of_a_rank_is_told_by_the_next_call_and_closing_needs_none() -> None:
    pair = Pair()
    pair.add("a", [1, 2, 3], max_tokens=4)
    pair.leader.step()
    pair.ranks.loss = "rank 1 has ended with status 1"
    with pytest.raises(EngineDeadError, match="rank 1 has ended with status 1"):
        pair.leader.step()
    num_frames = len(pair.ranks.frames)
    pair.leader.close()
    assert len(pair.ranks.frames) == num_frames
    assert pair.ranks.closed
