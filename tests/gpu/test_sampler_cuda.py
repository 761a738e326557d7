"""The sampler's kernel against enumeration, and against itself in other company.

Triton's interpreter runs the same on a CPU: ``TRITON_INTERPRET=1 pytest -m gpu FILE``.
"""

import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from mstar.engine.resources.base import Deployment, Opening
from mstar.engine.resources.sampler import fused
from mstar.engine.resources.sampler.config import SamplerConfig, SampleStep, SamplingParams
from mstar.engine.resources.sampler.manager import Sampled, SamplerManager
from mstar.engine.resources.step import Segment

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
]
TESTS = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("oracle_sampling", TESTS / "oracles" / "sampling.py")
assert _spec is not None
assert _spec.loader is not None
oracle: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

PROMPT = [3, 5, 5, 7]
MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_k=3),
    SamplingParams(seed=3, top_p=0.7),
    SamplingParams(seed=4, top_k=70, top_p=0.9, temperature=0.6),
    SamplingParams(seed=5, min_p=0.2, temperature=1.7),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=2),
    SamplingParams(seed=6, presence_penalty=1.0, frequency_penalty=-0.5, top_k=5, min_p=0.05),
    SamplingParams(seed=7, logit_bias={2: 3.0, 9: -3.0}, logprobs=0),
    SamplingParams(seed=8, min_tokens=4, stop_token_ids=(6,), top_p=0.95, logit_bias={6: 9.0}),
    SamplingParams(seed=9, top_p=0.5, logprobs=5, temperature=2.0, repetition_penalty=0.7),
    SamplingParams(temperature=1e-6, seed=1, frequency_penalty=1.0),
]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_INTERPRETED:
        monkeypatch.setattr(
            "mstar.engine.resources.sampler.manager.kernels", lambda device: fused._load()
        )


def manager(vocab: int, stops: tuple[int, ...] = ()) -> SamplerManager:
    config = SamplerConfig(vocab_size=vocab, stop_token_ids=stops)
    made = SamplerManager("sampler", config, Deployment(device=DEVICE))
    assert made._seen is not None, "the kernel is not used"
    return made


def add(made: SamplerManager, name: str, params: SamplingParams) -> list[int]:
    tokens = list(PROMPT)
    opening = Opening(
        request_id=name,
        tokens=tokens,
        num_prompt_tokens=len(tokens),
        max_len=1000,
        settings={"sampler": params},
    )
    assert made.open(opening, 0) is None
    return tokens


def segments(names: Sequence[str]) -> tuple[Segment, ...]:
    return tuple(Segment(name, "main", 1) for name in names)


def sample(made: SamplerManager, step: tuple[Segment, ...], logits: Tensor) -> Sampled:
    on_device = logits.to(DEVICE)
    before = on_device.clone()
    out = made.plan(step, SampleStep(), {}).sample(on_device)
    assert torch.equal(on_device.nan_to_num(), before.nan_to_num())
    assert out.token_ids.device.type == "cpu"
    made.check()
    return out


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def assert_drawn(probs: Sequence[float], uniform: float, token: int, slack: float = 1e-6) -> None:
    """The token is where the running sum passes the number, but for rounding."""
    assert probs[token] > 0, token
    below = math.fsum(probs[:token])
    assert below - slack <= uniform <= below + probs[token] + slack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [12, 300, 5000])
def test_every_kind_of_row_draws_what_enumeration_says(vocab: int, dtype: torch.dtype) -> None:
    made = manager(vocab, stops=(4,))
    names = [str(i) for i in range(len(MIXED))]
    live = [add(made, name, params) for name, params in zip(names, MIXED, strict=True)]
    step = segments(names)
    for index in range(3 if IS_INTERPRETED else 8):
        logits = randn(len(MIXED), vocab, seed=index).to(dtype)
        got = sample(made, step, logits).token_ids.tolist()
        for row, (params, tokens) in enumerate(zip(MIXED, live, strict=True)):
            banned = {4, *params.stop_token_ids} if index < params.min_tokens else ()
            values = oracle.penalise(
                logits[row].tolist(), PROMPT, tokens[len(PROMPT) :],
                repetition=params.repetition_penalty,
                presence=params.presence_penalty, frequency=params.frequency_penalty,
                bias=params.logit_bias, banned=banned,
            )  # fmt: skip
            # The kernel's logits are float32: rounded alike, ties are ties.
            values = torch.tensor(values).tolist()
            temperature = 0 if params.temperature < 1e-5 else params.temperature
            probs = oracle.distribution(
                values, temperature=temperature, top_k=params.top_k, top_p=params.top_p,
                min_p=params.min_p,
            )  # fmt: skip
            if temperature:
                assert_drawn(probs, oracle.uniform(params.seed, index), got[row])
            else:
                assert probs[got[row]] == 1
            tokens.append(got[row])


def test_tokens_that_only_the_device_knows_are_counted_as_if_they_were_known() -> None:
    vocab = 300
    made, waiting = manager(vocab, stops=(4,)), manager(vocab, stops=(4,))
    names = [str(i) for i in range(len(MIXED))]
    live = [add(made, name, params) for name, params in zip(names, MIXED, strict=True)]
    known = [add(waiting, name, params) for name, params in zip(names, MIXED, strict=True)]
    step = segments(names)
    logits = [randn(len(MIXED), vocab, seed=index).to(DEVICE) for index in range(7)]
    under_way = made.plan(step, SampleStep(), {}).launch(logits[0])
    for index in range(6):
        plan = made.plan_fixed(len(live), step, SampleStep(), {}, 1)
        assert plan is not None
        following = plan.launch(logits[index + 1], under_way.tokens)
        got = under_way.fetch()
        expected = sample(waiting, step, logits[index])
        assert torch.equal(got.token_ids, expected.token_ids)
        assert got.logprobs == expected.logprobs
        for place, token in enumerate(got.token_ids.tolist()):
            live[place].append(token)
            known[place].append(token)
        under_way = following
        made.check()


@settings(
    max_examples=15 if IS_INTERPRETED else 150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.1, 0.7, 1.0, 2.5]),
                "top_k": st.sampled_from([0, 1, 2, 5, 40, 100]),
                "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
                "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
            }
        ),
        min_size=1,
        max_size=4,
    ),
    vocab=st.sampled_from([7, 40, 1100]),
    seed=st.integers(0, 1000),
    shape=st.sampled_from(["spread", "tied", "flat", "masked", "wide"]),
)
def test_the_kept_tokens_are_the_enumerated_ones(
    rows: list[dict[str, Any]], vocab: int, seed: int, shape: str
) -> None:
    """Drawn at points all over the unit interval, a row yields all that is kept and no other."""
    logits = randn(len(rows), vocab, seed=seed)
    if shape == "tied":
        logits = logits.round()
    elif shape == "flat":
        logits = torch.zeros_like(logits)
    elif shape == "masked":
        logits[:, : vocab - 3] = -math.inf
    elif shape == "wide":
        logits = logits * 1e30
    num_points = 16
    made = manager(vocab)
    names = [f"{row}.{point}" for row in range(len(rows)) for point in range(num_points)]
    for place, name in enumerate(names):
        add(made, name, SamplingParams(seed=place, **rows[place // num_points]))
    wide = logits.repeat_interleave(num_points, 0)
    got = sample(made, segments(names), wide).token_ids.tolist()
    for row, params in enumerate(rows):
        probs = oracle.distribution(logits[row].tolist(), **params)
        for point in range(num_points):
            place = row * num_points + point
            assert_drawn(probs, oracle.uniform(place, 0), got[place])


def test_ties_at_the_cut_of_top_p_are_kept_from_the_first() -> None:
    vocab = 6000
    made = manager(vocab)
    names = [str(i) for i in range(200)]
    for place, name in enumerate(names):
        add(made, name, SamplingParams(seed=place, top_p=0.25))
    tokens = sample(made, segments(names), torch.zeros(200, vocab)).token_ids
    assert int(tokens.max()) < vocab / 4
    wanted = [int(oracle.uniform(place, 0) * vocab / 4) for place in range(200)]
    assert tokens.tolist() == wanted


def test_a_rows_tokens_and_logprobs_do_not_depend_on_its_neighbours() -> None:
    vocab = 3000
    names = [str(i) for i in range(len(MIXED))]
    logits = {name: randn(4, vocab, seed=i) for i, name in enumerate(names)}

    def rollout(groups: list[list[str]]) -> tuple[dict[str, list[int]], dict[str, list[Any]]]:
        made = manager(vocab)
        live = {name: add(made, name, MIXED[int(name)]) for name in names}
        logprobs: dict[str, list[Any]] = {name: [] for name in names}
        for index in range(2 if IS_INTERPRETED else 4):
            for group in groups:
                values = torch.stack([logits[name][index] for name in group])
                out = sample(made, segments(group), values)
                for row, name in enumerate(group):
                    live[name].append(int(out.token_ids[row]))
                    if out.logprobs is not None and out.logprobs[row] is not None:
                        logprobs[name].append(out.logprobs[row])
        return live, logprobs

    together = rollout([names])
    assert [name for name, own in together[1].items() if own] == ["6", "8", "10"]
    for groups in ([[name] for name in names], [names[::-1]], [names[::2], names[1::2]]):
        assert rollout(groups) == together


def test_rows_without_a_usable_maximum_fail_alone_and_by_name() -> None:
    vocab = 700
    for bad in (math.nan, math.inf):
        made = manager(vocab)
        names = [str(i) for i in range(len(MIXED))]
        for name, params in zip(names, MIXED, strict=True):
            add(made, name, params)
        logits = randn(len(MIXED), vocab)
        logits[3, 650] = bad
        logits[7] = -math.inf
        out = sample(made, segments(names), logits)
        assert sorted(out.failed) == [3, 7]
        assert "'3'" in out.failed[3]
        assert [row for row in range(len(MIXED)) if out.token_ids[row] < 0] == [3, 7]


def test_counts_on_the_device_follow_lists_that_grow_and_are_cut_back() -> None:
    vocab = 40
    made = manager(vocab)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5)
    names = [str(i) for i in range(11)]
    live = {name: add(made, name, params) for name in names}
    assert made._seen is not None
    rng = np.random.default_rng(0)
    for index in range(12):
        name = names[int(rng.integers(11))]
        if index % 4 == 3:
            made.close(name)
            live[name] = add(made, name, params)
        else:
            # An id without a logit among them.
            live[name] += [[9], [9, 2, 50], [50]][index % 3]
            del live[names[0]][5:]
        out = sample(made, segments(names), randn(11, vocab, seed=index))
        for row, own in enumerate(names):
            live[own].append(int(out.token_ids[row]))
            stream = made._streams[own, "main"]
            counted = torch.zeros(vocab, dtype=torch.int32)
            for token in live[own][len(PROMPT) : -1]:
                if token < vocab:
                    counted[token] += 2
            counted[sorted(set(PROMPT))] += 1
            assert torch.equal(made._seen.codes[made._seen.slot(stream)].cpu(), counted)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_whole_vocabulary_draws_what_the_cpu_draws_from_the_same_numbers(
    temperature: float,
) -> None:
    """bfloat16 logits of a real width, thousands of them tied, against float64 and a sort."""
    vocab = 3000 if IS_INTERPRETED else 128_256
    rules: list[dict[str, Any]] = [
        {"top_k": 50},
        {"top_k": 2000, "top_p": 0.9},
        {"top_p": 0.9},
        {"top_p": 0.3, "min_p": 0.01},
        {"min_p": 0.02},
        {},
    ]
    for dtype in (torch.bfloat16, torch.float32):
        made = manager(vocab)
        names = [str(i) for i in range(4 * len(rules))]
        for place, name in enumerate(names):
            params = rules[place % len(rules)]
            add(made, name, SamplingParams(seed=place, temperature=temperature, **params))
        logits = randn(len(names), vocab, seed=3).to(dtype)
        got = sample(made, segments(names), logits).token_ids.tolist()
        wide = logits.double()
        weights = ((wide - wide.amax(1, keepdim=True)) / temperature).exp()
        order = wide.sort(dim=1, descending=True, stable=True).indices
        for place, token in enumerate(got):
            params = rules[place % len(rules)]
            own = weights[place]
            if "top_k" in params:
                own = own * (wide[place] >= wide[place, order[place, params["top_k"] - 1]])
            ranked = own[order[place]]
            before = ranked.cumsum(0) - ranked
            kept = before < params.get("top_p", 2.0) * own.sum()
            own = own * torch.zeros_like(kept).scatter_(0, order[place], kept)
            own = own * (own >= params.get("min_p", 0.0))
            reached = own.cumsum(0) / own.sum()
            uniform = oracle.uniform(place, 0)
            assert own[token] > 0
            below = float(reached[token] - own[token] / own.sum())
            assert below - 2e-6 <= uniform <= float(reached[token]) + 2e-6
