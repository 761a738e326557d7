import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from mstar.engine.resources.sampler.transforms import (
    HEAD,
    Limits,
    ban_,
    draw,
    draw_limited,
    draw_sorted,
    head,
    logit_bias_,
    most_likely,
    output_penalty_,
    repetition_penalty_,
    temper,
    truncate,
    uniforms,
)

TESTS = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("oracle_sampling", TESTS / "oracles" / "sampling.py")
assert _spec is not None
assert _spec.loader is not None
oracle: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

INF = math.inf


def limits(vocab: int, *rows: dict[str, Any]) -> Limits:
    """One row for each dict of top_k, top_p and min_p."""
    return Limits(
        torch.tensor([row.get("top_k") or vocab for row in rows]),
        torch.tensor([row.get("top_p", 1.0) for row in rows], dtype=torch.float64),
        torch.tensor([row.get("min_p", 0.0) for row in rows], dtype=torch.float64),
    )


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def coarse(*shape: int, seed: int = 0) -> Tensor:
    """Logits with many ties, as bfloat16 gives them."""
    return (randn(*shape, seed=seed) * 4).round() / 2


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.0, 2.0, -INF]])
    got = repetition_penalty_(
        logits, torch.zeros(4, dtype=torch.int64), torch.tensor([0, 1, 2, 4]), torch.full((4,), 2.0)
    )
    assert got is logits
    assert got.tolist() == [[1.0, -4.0, 0.0, 2.0, -INF]]


def test_output_penalties_count_the_output_only() -> None:
    logits = torch.zeros(2, 3)
    output_penalty_(
        logits,
        torch.tensor([0, 0, 1]),
        torch.tensor([0, 2, 1]),
        torch.tensor([0.0, 3.0, 1.0]),
        (torch.full((3,), 0.5), torch.full((3,), 0.25)),
    )
    assert logits.tolist() == [[0.0, 0.0, -1.25], [0.0, -0.75, 0.0]]


def test_bias_adds_and_a_ban_makes_impossible() -> None:
    logits = torch.zeros(2, 3)
    logit_bias_(logits, torch.tensor([0, 1]), torch.tensor([1, 1]), torch.tensor([5.0, -5.0]))
    ban_(logits, torch.tensor([1]), torch.tensor([2]))
    assert logits.tolist() == [[0.0, 5.0, 0.0], [0.0, -5.0, -INF]]


@pytest.mark.parametrize("vocab", [1, 5, 64, 130, 640, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_likely_token_is_the_first_of_the_largest(vocab: int, dtype: torch.dtype) -> None:
    logits = coarse(7, vocab, seed=vocab).to(dtype)
    values, ids = most_likely(logits)
    for row, value, token in zip(logits.tolist(), values.tolist(), ids.tolist(), strict=True):
        assert token == row.index(max(row))
        assert value == max(row)


@pytest.mark.parametrize("vocab", [5, 64, 640])
def test_a_nan_row_has_nan_as_its_largest_and_others_do_not(vocab: int) -> None:
    logits = randn(3, vocab)
    logits[1, vocab - 2] = float("nan")
    values, ids = most_likely(logits)
    assert values.isnan().tolist() == [False, True, False]
    assert ids[[0, 2]].tolist() == logits[[0, 2]].argmax(1).tolist()


@pytest.mark.parametrize(("vocab", "width"), [(70, 64), (100, 100), (64 * 40, 8), (64 * 300, 64)])
def test_the_head_is_what_a_full_sort_puts_first(vocab: int, width: int) -> None:
    logits = randn(3, vocab, seed=vocab)
    values, ids = head(logits, width)
    wanted = logits.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, wanted.values[:, :width])
    assert torch.equal(ids, wanted.indices[:, :width])


@pytest.mark.parametrize(("vocab", "width"), [(70, 64), (64 * 40, 8), (64 * 300, 64)])
def test_the_head_of_tied_logits_has_the_right_values_and_all_above_the_last(
    vocab: int, width: int
) -> None:
    logits = coarse(3, vocab, seed=vocab)
    values, ids = head(logits, width)
    wanted = logits.sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, wanted.values[:, :width])
    assert torch.equal(logits.gather(1, ids), values)
    for row in range(3):
        above = int((values[row] > values[row, -1]).sum())
        assert ids[row, :above].tolist() == wanted.indices[row, :above].tolist()
        assert len(set(ids[row].tolist())) == width


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.1, 0.7, 1.0, 2.5]),
                "top_k": st.sampled_from([0, 1, 2, 5, 40]),
                "top_p": st.sampled_from([0.05, 0.5, 0.9, 1.0]),
                "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
            }
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 1000),
    has_ties=st.booleans(),
)
def test_truncated_weights_are_the_enumerated_distribution(
    rows: list[dict[str, Any]], seed: int, has_ties: bool
) -> None:
    vocab = 40
    logits = (coarse if has_ties else randn)(len(rows), vocab, seed=seed)
    values, ids = head(logits, vocab)
    temperature = torch.tensor([row["temperature"] for row in rows])
    weights = truncate(temper(values.double(), values[:, 0], temperature), limits(vocab, *rows))
    got = torch.zeros_like(weights).scatter_(1, ids, weights / weights.sum(1, keepdim=True))
    for row, params, probs in zip(logits.tolist(), rows, got.tolist(), strict=True):
        wanted = oracle.distribution(row, **(params | {"temperature": params["temperature"]}))
        assert [p > 0 for p in probs] == [p > 0 for p in wanted]
        assert probs == pytest.approx(wanted, abs=1e-7)


def test_tokens_as_likely_as_the_kth_stay_and_top_p_takes_the_lower_id() -> None:
    tied = torch.tensor([[1.0, 3.0, 1.0, 1.0]])
    values, ids = head(tied, 4)
    scores = temper(values.double(), values[:, 0], torch.ones(1))
    assert ids.tolist() == [[1, 0, 2, 3]]
    assert (truncate(scores, limits(4, {"top_k": 2})) > 0).tolist() == [[True] * 4]
    assert (truncate(scores, limits(4, {"top_p": 0.8})) > 0).tolist() == [
        [True, True, False, False]
    ]


def test_top_p_of_a_head_counts_what_lies_behind_it() -> None:
    scores = torch.zeros(1, 4, dtype=torch.float64)
    kept = truncate(scores, limits(8, {"top_p": 0.2}), torch.tensor([8.0], dtype=torch.float64))
    assert (kept > 0).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("warp", ["top_k", "top_p", "min_p"])
def test_transformers_keeps_the_same_tokens(warp: str) -> None:
    transformers = pytest.importorskip("transformers")
    value = {"top_k": 7, "top_p": 0.8, "min_p": 0.1}[warp]
    kind = {"top_k": "TopKLogitsWarper", "top_p": "TopPLogitsWarper", "min_p": "MinPLogitsWarper"}
    logits = randn(20, 50, seed=3) * 2
    theirs = getattr(transformers, kind[warp])(value)(None, logits).isfinite()
    values, ids = head(logits, 50)
    scores = temper(values.double(), values[:, 0], torch.ones(20))
    weights = truncate(scores, limits(50, *[{warp: value}] * 20))
    assert torch.equal(torch.zeros_like(theirs).scatter_(1, ids, weights > 0), theirs)


@pytest.mark.parametrize("width", [1, 3, 512, 513, 700, 5003])
def test_a_draw_is_the_inverse_of_the_running_sum(width: int) -> None:
    weights = randn(40, width, seed=width).exp()
    weights[:, :: max(2, width // 50)] = 0
    weights[:, width // 2] = 1
    uniform = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = draw(weights, uniform).tolist()
    for row, u, token in zip(weights.double().tolist(), uniform.tolist(), got, strict=True):
        total = math.fsum(row)
        assert row[token] > 0
        assert math.fsum(row[:token]) - 1e-5 * total <= u * total
        assert u * total <= math.fsum(row[: token + 1]) + 1e-5 * total


@pytest.mark.parametrize("width", [3, 600, 5003])
@pytest.mark.parametrize("edge", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_never_draw_an_impossible_token(
    width: int, edge: float
) -> None:
    weights = torch.zeros(3, width)
    weights[0, 1] = weights[1, 0] = weights[2, -1] = 0.1
    assert draw(weights, torch.full((3,), edge, dtype=torch.float64)).tolist() == [1, 0, width - 1]


def test_numbers_in_the_unit_interval_follow_the_published_generator() -> None:
    assert oracle.splitmix64(0) == 0xE220A8397B1DCDAF
    seeds = [0, 1, 7, 2**63, 2**64 - 1]
    indices = [0, 1, 2, 100, 5]
    got = uniforms(np.array(seeds, np.uint64), np.array(indices, np.uint64))
    assert got.dtype == torch.float64
    assert got.tolist() == [oracle.uniform(s, i) for s, i in zip(seeds, indices, strict=True)]


def test_numbers_of_one_seed_and_of_neighbouring_seeds_spread_evenly() -> None:
    span = np.arange(20_000, dtype=np.uint64)
    zero = np.zeros_like(span)
    along, across = uniforms(zero, span), uniforms(span, zero)
    for numbers in (along, across, uniforms(span, span)):
        assert bool(((numbers >= 0) & (numbers < 1)).all())
        counts = torch.bincount((numbers * 50).long(), minlength=50).double()
        assert float(((counts - 400) ** 2 / 400).sum()) < 90
    assert abs(float(torch.corrcoef(torch.stack((along, across)))[0, 1])) < 0.03


CASES: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": HEAD - 1, "min_p": 0.02},
    {"top_k": 20, "top_p": 0.5},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.9999, "min_p": 0.01},
    {"top_p": 0.999},
]


@pytest.mark.parametrize("make", [randn, coarse])
@pytest.mark.parametrize("vocab", [33, 300, 64 * 260])
@pytest.mark.parametrize("params", CASES, ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_looking_at_the_head_only_draws_what_the_whole_distribution_says(
    params: dict[str, Any], vocab: int, make: Callable[..., Tensor], temperature: float
) -> None:
    if vocab > 300 and temperature > 1:
        temperature = 1.0
    logits = make(4, vocab, seed=vocab) * 2
    uniform = torch.tensor([0.001, 0.3, 0.7, 0.999], dtype=torch.float64)
    params = dict(params)
    params["top_k"] = min(params.get("top_k", 0), vocab)
    best = logits.amax(1)
    mass = None
    if not params["top_k"]:
        mass = ((logits.double() - best[:, None]) / temperature).exp().sum(1)
    given_limits = limits(vocab, *[params] * 4)
    temperatures = torch.full((4,), temperature)
    got = [
        way(logits, best, temperatures, given_limits, mass, uniform).tolist()
        for way in (draw_limited, draw_sorted)
    ]
    for row in range(4):
        probs = oracle.distribution(logits[row].tolist(), temperature=temperature, **params)
        for tokens in got:
            token = tokens[row]
            assert probs[token] > 0
            below = math.fsum(probs[:token])
            assert below - 1e-5 <= uniform[row] <= below + probs[token] + 1e-5


@pytest.mark.parametrize("vocab", [300, 1000, 64 * 260])
def test_a_row_draws_the_same_alone_and_in_any_company(vocab: int) -> None:
    logits = torch.cat((randn(6, vocab, seed=1) * 3, coarse(6, vocab, seed=2)))
    uniform = torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    probs = logits.softmax(1)
    together = draw(probs, uniform)
    rows: list[dict[str, Any]] = [CASES[i % 4] for i in range(12)]
    all_limits = limits(vocab, *rows)
    ones = torch.ones(12)
    limited = draw_limited(logits, logits.amax(1), ones, all_limits, None, uniform)
    for i in range(12):
        one = slice(i, i + 1)
        assert torch.equal(logits[one].softmax(1), probs[one])
        assert draw(probs[one], uniform[one]).item() == together[i]
        alone = draw_limited(
            logits[one],
            logits[one].amax(1),
            ones[one],
            limits(vocab, rows[i]),
            None,
            uniform[one],
        )
        assert alone.item() == limited[i]
