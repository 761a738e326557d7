import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from mstar.engine.resources.base import Deployment, Opening
from mstar.engine.resources.sampler.config import (
    SamplerConfig,
    SamplerSpec,
    SampleStep,
    SamplingParams,
    TokenLogprobs,
)
from mstar.engine.resources.sampler.manager import MIN_LOGPROB, Sampled, SamplerManager
from mstar.engine.resources.step import Segment
from mstar.errors import RequestError

TESTS = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("oracle_sampling", TESTS / "oracles" / "sampling.py")
assert _spec is not None
assert _spec.loader is not None
oracle: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 5, 5, 7]
NAN = float("nan")


def manager(
    vocab: int = 12, stops: tuple[int, ...] = (), seed: int | None = None
) -> SamplerManager:
    config = SamplerConfig(vocab_size=vocab, stop_token_ids=stops)
    spec = SamplerSpec("sampler", {"decoder"}, config)
    assert spec.resource_class is SamplerManager
    return SamplerManager.build(spec, Deployment(seed=seed), {})


def add(
    made: SamplerManager,
    request_id: str,
    params: SamplingParams | None = None,
    tokens: list[int] | None = None,
    num_prompt_tokens: int | None = None,
    label: str = "main",
) -> list[int]:
    """Open a stream and return its live list of ids."""
    tokens = list(PROMPT) if tokens is None else tokens
    opening = Opening(
        request_id=request_id,
        label=label,
        tokens=tokens,
        num_prompt_tokens=len(tokens) if num_prompt_tokens is None else num_prompt_tokens,
        max_len=1000,
        settings={"sampler": params} if params else {},
    )
    assert made.open(opening, 0) is None
    return tokens


def segments(*request_ids: str) -> tuple[Segment, ...]:
    return tuple(Segment(request_id, "main", 1) for request_id in request_ids)


def sample(made: SamplerManager, step_segments: tuple[Segment, ...], logits: Tensor) -> Sampled:
    before = logits.clone()
    out = made.plan(step_segments, SampleStep(), {}).sample(logits)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert out.token_ids.dtype == torch.int64
    made.check()
    return out


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


MIXED = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_k=3),
    SamplingParams(seed=3, top_p=0.7),
    SamplingParams(seed=4, top_k=70, top_p=0.9, temperature=0.6),
    SamplingParams(seed=5, min_p=0.2, temperature=1.7),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=2),
    SamplingParams(seed=6, presence_penalty=1.0, frequency_penalty=-0.5, top_k=5, min_p=0.05),
    SamplingParams(seed=7, logit_bias={2: 3.0, 9: -3.0}, logprobs=0),
    SamplingParams(seed=8, min_tokens=4, stop_token_ids=(6,), top_p=0.95),
    SamplingParams(seed=9, top_p=0.5, logprobs=5),
    SamplingParams(temperature=1e-6, seed=1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_rows_take_the_first_of_the_largest(dtype: torch.dtype) -> None:
    made = manager()
    for name in "abc":
        add(made, name, GREEDY)
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, 0.5], [-3.0, -2.0, -1.0]])
    logits = torch.nn.functional.pad(logits, (0, 9), value=-9.0).to(dtype)
    out = sample(made, segments("a", "b", "c"), logits)
    assert out.token_ids.tolist() == [1, 0, 2]
    assert (out.logprobs, out.failed) == (None, {})


@pytest.mark.parametrize("vocab", [12, 300, 64 * 12])
def test_every_kind_of_row_draws_what_enumeration_says(vocab: int) -> None:
    made = manager(vocab, stops=(4,))
    names = [str(i) for i in range(len(MIXED))]
    live = [add(made, name, params) for name, params in zip(names, MIXED, strict=True)]
    step = segments(*names)
    for index in range(6):
        logits = randn(len(MIXED), vocab, seed=index)
        got = sample(made, step, logits).token_ids.tolist()
        for row, (params, tokens) in enumerate(zip(MIXED, live, strict=True)):
            output = tokens[len(PROMPT) :]
            banned = {4, *params.stop_token_ids} if index < params.min_tokens else ()
            values = oracle.penalise(
                logits[row].tolist(), PROMPT, output,
                repetition=params.repetition_penalty,
                presence=params.presence_penalty, frequency=params.frequency_penalty,
                bias=params.logit_bias, banned=banned,
            )  # fmt: skip
            temperature = 0 if params.temperature < 1e-5 else params.temperature
            probs = oracle.distribution(
                values, temperature=temperature, top_k=params.top_k, top_p=params.top_p,
                min_p=params.min_p,
            )  # fmt: skip
            token = got[row]
            assert probs[token] > 0, (row, index)
            if temperature:
                uniform = oracle.uniform(params.seed, index)
                below = math.fsum(probs[:token])
                assert below - 1e-5 <= uniform <= below + probs[token] + 1e-5, (row, index)
            tokens.append(token)


def generate(
    made: SamplerManager,
    names: list[str],
    live: dict[str, list[int]],
    logits_of: Callable[[str, int], Tensor],
    steps: int,
    company: Sequence[str] = (),
) -> None:
    """Sample ``steps`` tokens for all names, their logits depending on their own tokens only."""
    for _ in range(steps):
        order = [*names, *company]
        logits = torch.stack([logits_of(name, len(live[name])) for name in order])
        out = sample(made, segments(*order), logits)
        for name, token in zip(order, out.token_ids.tolist(), strict=True):
            live[name].append(token)


def test_a_rows_tokens_and_logprobs_do_not_depend_on_its_neighbours() -> None:
    vocab = 64 * 8
    names = [str(i) for i in range(len(MIXED))]
    logits = {name: randn(5, vocab, seed=i) for i, name in enumerate(names)}

    def rollout(
        groups: list[list[str]],
    ) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprobs | None]]]:
        made = manager(vocab)
        live = {name: add(made, name, MIXED[int(name)]) for name in names}
        logprobs: dict[str, list[TokenLogprobs | None]] = {name: [] for name in names}
        for index in range(5):
            for group in groups:
                values = torch.stack([logits[name][index] for name in group])
                out = sample(made, segments(*group), values)
                for row, name in enumerate(group):
                    live[name].append(int(out.token_ids[row]))
                    if out.logprobs is not None:
                        logprobs[name].append(out.logprobs[row])
        return live, {name: own for name, own in logprobs.items() if any(own)}

    together, logprobs = rollout([names])
    assert set(logprobs) == {"6", "8", "10"}
    for groups in (
        [[name] for name in names],
        [names[::-1]],
        [names[::2], names[1::2]],
        [names[5:], names[:5]],
    ):
        again, again_logprobs = rollout(groups)
        assert again == together
        assert again_logprobs == logprobs


def test_a_stream_closed_and_opened_again_goes_on_as_if_it_had_not_been() -> None:
    vocab = 40

    def logits_of(name: str, length: int) -> Tensor:
        return randn(vocab, seed=length)

    params = SamplingParams(seed=11, top_k=20, frequency_penalty=0.5, repetition_penalty=1.2)
    made = manager(vocab)
    live = {"a": add(made, "a", params)}
    generate(made, ["a"], live, logits_of, 8)
    other = manager(vocab)
    again = {"a": add(other, "a", params)}
    generate(other, ["a"], again, logits_of, 3)
    other.close("a")
    add(other, "a", params, again["a"], len(PROMPT))
    again["x"] = add(other, "x", SamplingParams())
    generate(other, ["a"], again, logits_of, 5, company=["x"])
    assert again["a"] == live["a"]


def test_without_a_seed_the_engine_draws_one_at_opening() -> None:
    drawn = []
    for seed in (None, None, 5, 5, 6):
        fresh = manager(seed=seed)
        add(fresh, "a", tokens=[])
        tokens = add(fresh, "b", tokens=[], num_prompt_tokens=0)
        for _ in range(30):
            tokens.append(int(sample(fresh, segments("b"), torch.zeros(1, 12)).token_ids))
        drawn.append(tokens)
    assert drawn[2] == drawn[3]
    assert len({tuple(tokens) for tokens in drawn}) == 4


def test_frequencies_follow_the_distribution() -> None:
    vocab, rows, steps = 12, 50, 200
    made = manager(vocab)
    names = [str(i) for i in range(rows)]
    params: dict[str, Any] = {"temperature": 0.8, "top_k": 8, "top_p": 0.95}
    live = [add(made, n, SamplingParams(seed=i, **params)) for i, n in enumerate(names)]
    logits = randn(1, vocab, seed=5)
    step = segments(*names)
    counts = [0] * vocab
    for _ in range(steps):
        for tokens, token in zip(
            live, sample(made, step, logits.expand(rows, -1)).token_ids.tolist(), strict=True
        ):
            tokens.append(token)
            counts[token] += 1
    probs = oracle.distribution(logits[0].tolist(), **params)
    total = rows * steps
    assert all(count == 0 for count, prob in zip(counts, probs, strict=True) if prob == 0)
    statistic = sum((c - total * p) ** 2 / (total * p) for c, p in zip(counts, probs, strict=True)
                    if p > 0)  # fmt: skip
    assert statistic < 30


def test_stop_tokens_are_impossible_until_enough_is_generated() -> None:
    made = manager(stops=(0,))
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (1,)}
    tokens = {
        "a": add(made, "a", SamplingParams(**params)),
        "b": add(made, "b", SamplingParams(**params, ignore_eos=True)),
        "c": add(made, "c", GREEDY),
    }
    logits = torch.arange(12, 0, -1.0).expand(3, -1)
    step = segments("a", "b", "c")
    seen = []
    for _ in range(3):
        seen.append(sample(made, step, logits).token_ids.tolist())
        for name, token in zip("abc", seen[-1], strict=True):
            tokens[name].append(token)
    assert seen == [[2, 0, 0], [2, 0, 0], [0, 0, 0]]


def test_ids_without_a_logit_are_ignored_by_penalties() -> None:
    made = manager(vocab=4)
    add(made, "a", SamplingParams(temperature=0.0, repetition_penalty=2.0), [1, 900, 2])
    out = sample(made, segments("a"), torch.tensor([[0.9, 1.0, 1.0, 0.8]]))
    assert out.token_ids.tolist() == [0]


def test_penalties_follow_a_list_that_was_cut_back() -> None:
    made = manager(vocab=4)
    tokens = add(made, "a", SamplingParams(temperature=0.0, frequency_penalty=2.0), [0])
    logits = torch.tensor([[0.0, 1.0, 0.5, 0.0]])
    step = segments("a")
    assert sample(made, step, logits).token_ids.tolist() == [1]
    tokens += [1, 1]
    assert sample(made, step, logits).token_ids.tolist() == [2]
    del tokens[1:]
    assert sample(made, step, logits).token_ids.tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(dtype: torch.dtype) -> None:
    vocab = 64
    made = manager(vocab)
    add(made, "a", SamplingParams(temperature=0.0, logprobs=3, logit_bias={9: 50.0}))
    add(made, "b", GREEDY)
    add(made, "c", SamplingParams(seed=3, logprobs=0, temperature=0.3))
    logits = randn(3, vocab, seed=1).to(dtype)
    out = sample(made, segments("a", "b", "c"), logits)
    assert out.logprobs is not None
    wanted = logits.double().log_softmax(1)
    first, nobody, last = out.logprobs
    assert nobody is None
    assert first is not None
    assert last is not None
    assert first.token_id == 9 == int(out.token_ids[0])
    assert first.logprob == pytest.approx(wanted[0, 9].item(), abs=1e-5)
    best = logits[0].float().sort(descending=True, stable=True)
    assert [token for token, _ in first.top] == best.indices[:3].tolist()
    assert [lp for _, lp in first.top] == pytest.approx(
        wanted[0, best.indices[:3]].tolist(), abs=1e-5
    )
    assert last.top == []
    assert last.logprob == pytest.approx(wanted[2, int(out.token_ids[2])].item(), abs=1e-5)


def test_logprobs_of_impossible_tokens_are_finite_and_a_small_vocabulary_suffices() -> None:
    made = manager(vocab=4)
    add(made, "a", SamplingParams(temperature=0.0, logprobs=20))
    out = sample(made, segments("a"), torch.tensor([[0.0, -math.inf, -math.inf, -math.inf]]))
    assert out.logprobs is not None
    assert out.logprobs[0] is not None
    assert out.logprobs[0].top == [(0, 0.0), *((t, MIN_LOGPROB) for t in (1, 2, 3))]


@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize("bad", [NAN, math.inf])
@pytest.mark.parametrize("vocab", [12, 64 * 5])
def test_rows_without_a_usable_maximum_fail_alone_and_by_name(
    vocab: int, bad: float, is_greedy: bool
) -> None:
    params = [GREEDY] * 3 if is_greedy else [MIXED[3], MIXED[7], MIXED[10]]
    logits = randn(3, vocab, seed=2)

    def tokens(values: Tensor) -> Sampled:
        made = manager(vocab)
        for name, own in zip("abc", params, strict=True):
            add(made, name, own)
        return sample(made, segments("a", "b", "c"), values)

    good = tokens(logits)
    assert good.failed == {}
    broken = logits.clone()
    broken[1, 7] = bad
    out = tokens(broken)
    assert list(out.failed) == [1]
    assert "'b'" in out.failed[1]
    assert out.token_ids.tolist() == [good.token_ids[0], -1, good.token_ids[2]]
    if not is_greedy:
        assert out.logprobs is not None
        assert good.logprobs is not None
        assert out.logprobs[2] == good.logprobs[2]
    for row in range(3):
        broken[row] = -math.inf
    assert sorted(tokens(broken).failed) == [0, 1, 2]


@pytest.mark.parametrize("params", MIXED, ids=str)
@pytest.mark.parametrize("vocab", [12, 64 * 5])
def test_a_row_of_nan_alone_fails_in_every_kind(params: SamplingParams, vocab: int) -> None:
    made = manager(vocab)
    add(made, "a", params)
    out = sample(made, segments("a"), torch.full((1, vocab), NAN))
    assert list(out.failed) == [0]
    assert out.token_ids.tolist() == [-1]


def test_a_bias_beyond_the_vocabulary_opens_nothing() -> None:
    made = manager(vocab=4)
    with pytest.raises(RequestError, match="token id 4"):
        add(made, "a", SamplingParams(logit_bias={4: 1.0}))
    made.check()
    add(made, "a", GREEDY)


def test_logits_of_another_width_are_an_assertion_with_the_numbers() -> None:
    made = manager(vocab=4)
    add(made, "a", GREEDY)
    with pytest.raises(AssertionError, match=r"\(1, 5\).*\(1, 4\)"):
        made.plan(segments("a"), SampleStep(), {}).sample(torch.zeros(1, 5))


def test_a_plan_is_kept_while_the_segments_are_the_same_object_and_nothing_closed() -> None:
    made = manager()
    add(made, "a", GREEDY)
    step = segments("a")
    first = made.plan(step, SampleStep(), {})
    assert made.plan(step, SampleStep(), {}) is first
    made.close("a")
    add(made, "a", SamplingParams(temperature=0.0, logit_bias={1: 90.0}))
    out = sample(made, step, torch.tensor([[1.0] + [0.0] * 11]))
    assert out.token_ids.tolist() == [1]


def test_labels_of_a_request_close_together_and_unknown_ids_are_ignored() -> None:
    made = manager()
    add(made, "a", GREEDY)
    add(made, "a", GREEDY, label="text")
    made.close("nobody")
    made.close("a")
    made.check()
    with pytest.raises(KeyError):
        made.plan(segments("a"), SampleStep(), {})


class Books(RuleBasedStateMachine):
    """Open and closed streams with penalties, against counts made anew each time."""

    @initialize()
    def begin(self) -> None:
        self.made = manager(vocab=6)
        self.live: dict[str, tuple[list[int], list[int], SamplingParams]] = {}

    @rule(name=st.sampled_from("abcd"), index=st.sampled_from([0, 6, 7]),
          prompt=st.lists(st.integers(0, 8), max_size=4))  # fmt: skip
    def open(self, name: str, index: int, prompt: list[int]) -> None:
        if name not in self.live:
            params = SamplingParams(
                temperature=0.0, repetition_penalty=(1.0, 1.5)[index > 5],
                frequency_penalty=(0.0, 0.7)[index == 7], presence_penalty=(0.0, 0.3)[index > 5],
            )  # fmt: skip
            self.live[name] = (add(self.made, name, params, list(prompt)), list(prompt), params)

    @rule(name=st.sampled_from("abcde"))
    def close(self, name: str) -> None:
        self.made.close(name)
        self.live.pop(name, None)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        tokens, prompt, _ = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        del tokens[data.draw(st.integers(len(prompt), len(tokens))) :]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), seed=st.integers(0, 10_000))
    def step(self, data: st.DataObject, seed: int) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True, min_size=1))
        logits = randn(len(names), 6, seed=seed)
        out = self.made.plan(segments(*names), SampleStep(), {}).sample(logits)
        for row, name in enumerate(names):
            tokens, prompt, params = self.live[name]
            values = oracle.penalise(
                logits[row].tolist(), prompt, tokens[len(prompt) :],
                repetition=params.repetition_penalty, presence=params.presence_penalty,
                frequency=params.frequency_penalty,
            )  # fmt: skip
            token = int(out.token_ids[row])
            assert values[token] == pytest.approx(max(values), abs=1e-5)
            tokens.append(token)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "made"):
            self.made.check()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
