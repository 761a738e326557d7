from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from mstar.engine.engine import EngineCore
from mstar.engine.output import RequestOutput
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import CapacityError, ConfigError, ContextLengthError, RequestError
from mstar.models.decoder import DecoderModel
from mstar.models.toy import toy_model

SMALL = Deployment(max_num_seqs=3, max_num_batched_tokens=8, page_size=4, num_pages=10)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def request(request_id: str, ids: list[int], **changes: Any) -> PreparedRequest:
    params = replace(GREEDY, **changes)
    return PreparedRequest(request_id=request_id, token_ids=ids, params=params)


def test_numbers_that_were_left_open_are_settled(toy: DecoderModel) -> None:
    engine = EngineCore(toy, SMALL)
    assert engine.deployment.max_model_len == 40
    assert engine.deployment.num_pages == 10
    roomy = EngineCore(toy, replace(SMALL, num_pages=1000))
    assert roomy.deployment.max_model_len == toy.max_model_len
    assert EngineCore(toy).deployment.num_pages == (1 << 30) // (2 * 2 * 16 * 2 * 16 * 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": -1}, "max_num_seqs is -1"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
        ({"page_size": -1}, "page_size is -1"),
        ({"page_size": 1.5}, "page_size is 1.5; it must be a whole number"),
        ({"page_size": None}, "page_size is None; it must be a whole number"),
        ({"page_size": "16"}, "page_size is '16'; it must be a whole number"),
        ({"page_size": 10**7, "num_pages": None}, "0 pages of .*; .* or take a smaller page_size"),
        ({"max_model_len": -1}, "max_model_len is -1; .* between 0 and"),
        ({"max_model_len": 10**20}, "max_model_len is 1000000.*; .* between 0 and"),
        (
            {"max_model_len": 2**31 - 1},
            "max_model_len is 2147483647 tokens and the KV pool holds 40",
        ),
        ({"encoder_cache_tokens": -1}, "encoder_cache_tokens is -1"),
        ({"retention_share": float("nan")}, "retention_share is nan"),
        ({"max_num_seqs": 10**12}, r"max_num_seqs is 1000000000000; .* 65536"),
        ({"num_pages": 10**12}, r"of 1000000000000 pages takes \d+\.\d GiB on cpu"),
        ({"num_pages": 10**30}, r"takes \d+\.\d GiB on cpu, which are not there"),
        (
            {"host_cache_bytes": 1 << 20, "enable_prefix_caching": False},
            "host_cache_bytes is 1048576 and prefix caching is off",
        ),
        (
            {"disk_cache_bytes": 9, "enable_prefix_caching": False},
            "disk_cache_bytes is 9 and prefix caching is off",
        ),
        ({"max_model_len": 41}, "max_model_len is 41 tokens and the KV pool holds 40"),
        ({"num_pages": 0}, "would hold 0 pages"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2 and .* is loaded whole"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    toy: DecoderModel, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineCore(toy, replace(SMALL, **change))


@pytest.mark.parametrize(
    ("ids", "changes", "error", "param", "message"),
    [
        ([], {}, RequestError, "prompt", "no tokens"),
        ([3, 160], {}, RequestError, "prompt", "token id 160 is outside the vocabulary of 160"),
        ([-1], {}, RequestError, "prompt", "token id -1"),
        ([3] * 40, {}, ContextLengthError, "prompt", "40 tokens and the context holds 40"),
        ([3] * 38, {}, ContextLengthError, "max_tokens", "lower max_tokens to 2"),
        ([3], {"stop_token_ids": (160,)}, RequestError, "stop_token_ids", "160"),
        ([3], {"logit_bias": {160: 1.0}}, RequestError, "logit_bias", "160"),
    ],
)
def test_wrong_request_is_refused_before_it_is_queued(
    toy: DecoderModel,
    ids: list[int],
    changes: dict[str, Any],
    error: type[RequestError],
    param: str,
    message: str,
) -> None:
    engine = EngineCore(toy, SMALL)
    with pytest.raises(error, match=message) as caught:
        engine.add_request(request("a", ids, **changes))
    assert caught.value.param == param
    assert not engine.has_work
    engine.add_request(request("a", [3]))


def test_id_is_free_again_once_its_request_ended(toy: DecoderModel) -> None:
    engine = EngineCore(toy, SMALL)
    engine.add_request(request("a", [3]))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request(request("a", [4]))
    while engine.has_work:
        engine.step()
    engine.add_request(request("a", [4]))


def test_keys_of_smaller_pages_are_refused(toy: DecoderModel) -> None:
    core = EngineCore(toy, SMALL)
    size = core.deployment.page_size
    ids = [1] * (3 * size)
    asked: dict[str, Any] = {
        "request_id": "a",
        "token_ids": ids,
        "params": SamplingParams(max_tokens=1),
    }
    message = rf"page_keys has 6 keys and {3 * size} tokens are 3 pages of {size}; "
    with pytest.raises(RequestError, match=message) as caught:
        core.add_request(PreparedRequest(**asked, page_keys=[bytes(32)] * 6))
    assert caught.value.param == "page_keys"
    assert not core.has_work


def test_request_whose_answer_never_fits_the_pool_is_refused_with_numbers() -> None:
    model = toy_model()
    engine = EngineCore(model, replace(SMALL, max_model_len=40))
    # The bound of the context is that of the pool; a resource may still say no by itself.
    kv = engine._runner.resources["kv"]
    engine._walker._deployment = replace(engine.deployment, max_model_len=100)
    with pytest.raises(CapacityError, match="11 KV pages of 4 tokens, and the pool has 10"):
        engine.add_request(request("a", [3] * 38, max_tokens=5))
    kv.check()
    assert not engine.has_work


def test_every_output_is_one_token_and_the_last_says_why(toy: DecoderModel) -> None:
    engine = EngineCore(toy, SMALL)
    engine.add_request(request("a", [3, 4, 5], logprobs=1))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [len(output.token_ids) for output in outputs] == [1] * 4
    assert [output.finish_reason for output in outputs] == [None, None, None, "length"]
    assert all(output.num_prompt_tokens == 3 for output in outputs)
    for output in outputs:
        assert output.logprobs is not None
        (one,) = output.logprobs
        assert one.token_id == output.token_ids[0]
        assert one.top == [(one.token_id, one.logprob)]
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(outputs), type=list[RequestOutput])
    assert again == outputs
    assert engine.step() == []


def test_stop_token_ends_the_answer_and_is_in_it(toy: DecoderModel) -> None:
    def answer(**changes: Any) -> tuple[list[int], str | None]:
        engine = EngineCore(toy, replace(SMALL, num_pages=40))
        engine.add_request(request("a", [3, 4, 5], max_tokens=20, **changes))
        ids: list[int] = []
        reason = None
        while engine.has_work:
            for output in engine.step():
                ids += output.token_ids
                reason = output.finish_reason
        return ids, reason

    whole, reason = answer()
    assert reason == "length"
    stop = whole[6]
    first = whole.index(stop) + 1
    assert answer(stop_token_ids=(stop,)) == (whole[:first], "stop")
    longer, _ = answer(stop_token_ids=(stop,), min_tokens=12)
    assert stop not in longer[:12]
    toy.stop_token_ids = frozenset({stop})
    assert answer() == (whole, "length")
    assert answer(ignore_eos=False) == (whole[:first], "stop")


def test_stats_tell_pages_requests_and_tokens(toy: DecoderModel) -> None:
    engine = EngineCore(toy, replace(SMALL, max_num_seqs=1))
    for name in "ab":
        engine.add_request(request(name, [3] * 6))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (1, 1, 1)
    assert (stats.num_pages, stats.num_pages_used, stats.num_pages_cached) == (10, 2, 0)
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.num_steps) == (12, 8, 8)
    assert (stats.num_running, stats.num_pages_used) == (0, 0)
    # Neither request had a root.
    assert (stats.prefix_queries, stats.num_pages_cached) == (0, 0)


def test_engine_without_reuse_has_no_root(toy: DecoderModel) -> None:
    engine = EngineCore(toy, replace(SMALL, enable_prefix_caching=False))
    assert engine.root is None
    assert engine.root_constants == {}


def test_root_constants_name_everything_that_the_kv_depends_on(toy: DecoderModel) -> None:
    constants = EngineCore(toy, SMALL).root_constants
    assert {"weights", "model", "code", "dtype", "page_size", "resource.kv"} <= set(constants)
    assert constants["page_size"] == "4"
    assert "rope_theta" in constants["resource.position"]


class EngineMachine(RuleBasedStateMachine):
    """Requests with common beginnings come, go and are reset in a pool that is too small."""

    model = toy_model()

    @initialize(num_pages=st.integers(6, 14), max_num_seqs=st.integers(1, 4))
    def start(self, num_pages: int, max_num_seqs: int) -> None:
        numbers = replace(SMALL, num_pages=num_pages, max_num_seqs=max_num_seqs)
        self.engine = EngineCore(self.model, numbers)
        self.num_pages = num_pages
        self.wanted: dict[str, int] = {}
        self.got: dict[str, int] = {}
        self.number = 0

    @rule(
        length=st.integers(1, 16),
        tail=st.lists(st.integers(3, 4), max_size=3),
        max_tokens=st.integers(1, 10),
        root=st.sampled_from([b"a", b"a", b"b", None]),
        seed=st.integers(0, 3),
    )
    def add(
        self, length: int, tail: list[int], max_tokens: int, root: bytes | None, seed: int
    ) -> None:
        ids = ([3] * length + tail)[: self.num_pages * 4 - max_tokens]
        self.number += 1
        name = f"r{self.number}"
        params = replace(GREEDY, max_tokens=max_tokens, seed=seed, temperature=float(seed > 1))
        self.engine.add_request(
            PreparedRequest(request_id=name, token_ids=ids, params=params, root=root)
        )
        self.wanted[name], self.got[name] = max_tokens, 0

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        assert self.engine.abort(name)
        del self.wanted[name]

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.one_step()
            self.engine.check()

    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()
        assert self.engine.stats().num_pages_cached == 0

    def one_step(self) -> None:
        for output in self.engine.step():
            name = output.request_id
            assert output.error is None, output.error
            self.got[name] += len(output.token_ids)
            if output.finish_reason is not None:
                assert self.got[name] == self.wanted.pop(name)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        stats = self.engine.stats()
        assert self.engine.has_work == bool(self.wanted)
        assert stats.num_running + stats.num_waiting == len(self.wanted)
        assert stats.num_pages_used + stats.num_pages_cached <= self.num_pages

    def teardown(self) -> None:
        steps = 0
        while hasattr(self, "engine") and self.engine.has_work:
            self.one_step()
            steps += 1
            assert steps < 2000, self.engine.stats()
        if hasattr(self, "engine"):
            self.engine.check()
            assert self.engine.stats().num_pages_used == 0
            self.engine.reset_prefix_cache()
            assert self.engine.stats().num_pages_cached == 0


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
