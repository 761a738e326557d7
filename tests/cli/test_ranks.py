from itertools import combinations
from random import Random
from statistics import NormalDist

import pytest
from hypothesis import given, strategies as st

from mstar.cli.ranks import detectable_shift, rank_test

NUMBERS = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=8)


def exact(a: list[float], b: list[float]) -> float:
    """Return the two-sided p by dealing the values out in every way."""
    pool = a + b

    def u(chosen: tuple[int, ...]) -> float:
        own = [pool[i] for i in chosen]
        other = [pool[i] for i in range(len(pool)) if i not in chosen]
        wins = sum((x > y) + (x == y) / 2 for x in own for y in other)
        return abs(wins - len(own) * len(other) / 2)

    deals = list(combinations(range(len(pool)), len(a)))
    seen = u(tuple(range(len(a))))
    return sum(u(deal) >= seen - 1e-9 for deal in deals) / len(deals)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shift", [0.0, 0.7, 2.0])
def test_p_is_close_to_the_one_by_enumeration(seed: int, shift: float) -> None:
    rng = Random(seed)
    a = [rng.gauss(0, 1) for _ in range(7)]
    b = [rng.gauss(shift, 1) for _ in range(7)]
    assert rank_test(a, b) == pytest.approx(exact(a, b), abs=0.02)


def test_p_with_ties_is_close_to_the_one_by_enumeration() -> None:
    a, b = [1.0, 1, 2, 2, 3, 3, 3], [2.0, 3, 3, 4, 4, 5, 5]
    assert rank_test(a, b) == pytest.approx(exact(a, b), abs=0.02)


@given(NUMBERS, NUMBERS)
def test_p_depends_on_ranks_alone_and_not_on_the_side(a: list[float], b: list[float]) -> None:
    p = rank_test(a, b)
    assert 0.0 <= p <= 1.0
    assert rank_test(b, a) == pytest.approx(p)
    assert rank_test([x**3 + 1 for x in a], [x**3 + 1 for x in b]) == pytest.approx(p)


def test_samples_far_apart_are_told_apart_and_equal_ones_never() -> None:
    assert rank_test([1.0] * 20, [1.0] * 20) == 1.0
    assert rank_test([float(n) for n in range(12)], [float(n) for n in range(50, 62)]) < 1e-4


def test_too_small_a_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="0 and 1"):
        rank_test([], [1.0])
    with pytest.raises(ValueError, match="2 and 1"):
        detectable_shift([1.0, 2.0], [1.0], alpha=0.001)


def test_alike_samples_are_seldom_called_different() -> None:
    rng = Random(1)
    ps = [
        rank_test([rng.random() for _ in range(20)], [rng.random() for _ in range(20)])
        for _ in range(400)
    ]
    assert 0.02 < sum(p < 0.05 for p in ps) / len(ps) < 0.08


def test_the_shift_that_counts_as_visible_is_found_about_as_often_as_promised() -> None:
    rng = Random(2)
    draw = NormalDist(100, 5)
    found = 0
    for _ in range(200):
        a = [draw.inv_cdf(rng.random()) for _ in range(30)]
        b = [draw.inv_cdf(rng.random()) for _ in range(30)]
        shift = detectable_shift(a, b, alpha=0.001)
        b = [draw.inv_cdf(rng.random()) + shift for _ in range(30)]
        found += rank_test(a, b) < 0.001
    assert 0.65 < found / 200 < 0.95


def test_more_values_see_smaller_shifts_and_outliers_hide_none() -> None:
    rng = Random(3)
    values = [rng.gauss(10, 1) for _ in range(200)]
    few = detectable_shift(values[:10], values[10:20], alpha=0.001)
    many = detectable_shift(values[:100], values[100:], alpha=0.001)
    assert many < few / 2
    spoilt = [*values[:99], 1e6]
    assert detectable_shift(spoilt, values[100:], alpha=0.001) < 2 * many
