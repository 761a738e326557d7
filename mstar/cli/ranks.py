"""Whether two samples differ, by ranks: the Mann-Whitney U test and what it could have seen."""

from collections.abc import Sequence
from math import erfc, pi, sqrt
from statistics import NormalDist, quantiles

# What lies between the first and the last decile of a normal distribution, in deviations.
_DECILES_TO_SIGMA = 2 * NormalDist().inv_cdf(0.9)


def rank_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Return how likely ranks at least as uneven are where both samples come from one distribution.

    Two-sided, by the normal approximation with corrections for ties and for continuity; good from
    about eight values a side.

    Raises:
        ValueError: If a sample is empty.

    Source:
        Mann and Whitney, 1947, "On a test of whether one of two random variables is
        stochastically larger than the other".

    >>> rank_test([1, 2, 3], [1, 2, 3])
    1.0
    """
    if not a or not b:
        raise ValueError(f"the samples have {len(a)} and {len(b)} values; each needs one")
    num_a, num_b = len(a), len(b)
    total = num_a + num_b
    ranks, ties = _ranks([*a, *b])
    u = sum(ranks[:num_a]) - num_a * (num_a + 1) / 2
    tied = sum(count**3 - count for count in ties) / (total * (total - 1))
    variance = num_a * num_b / 12 * (total + 1 - tied)
    distance = abs(u - num_a * num_b / 2) - 0.5
    if distance <= 0 or variance <= 0:
        return 1.0
    return erfc(distance / sqrt(2 * variance))


def _ranks(values: Sequence[float]) -> tuple[list[float], list[int]]:
    """Return ranks from 1, equal values sharing their mean, and the sizes of such groups."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    ties = []
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and values[order[end]] == values[order[begin]]:
            end += 1
        for place in order[begin:end]:
            ranks[place] = (begin + 1 + end) / 2
        ties.append(end - begin)
        begin = end
    return ranks, ties


def detectable_shift(
    a: Sequence[float], b: Sequence[float], alpha: float, power: float = 0.8
) -> float:
    """Return the shift between two samples that :func:`rank_test` would most likely have seen.

    Args:
        a: One sample.
        b: The other.
        alpha: Likelihood below which the samples count as different.
        power: How likely a shift of this size is found.

    Raises:
        ValueError: If a sample has fewer than two values.

    Source:
        The size of a two-sample test of normal values, times pi/3: the efficiency of ranks.
    """
    if min(len(a), len(b)) < 2:
        raise ValueError(f"the samples have {len(a)} and {len(b)} values; each needs two")
    normal = NormalDist()
    distance = normal.inv_cdf(1 - alpha / 2) + normal.inv_cdf(power)
    sigma = max(_sigma(a), _sigma(b))
    return distance * sigma * sqrt((1 / len(a) + 1 / len(b)) * pi / 3)


def _sigma(values: Sequence[float]) -> float:
    """Return a standard deviation that single outliers do not move."""
    deciles = quantiles(values, n=10, method="inclusive")
    return (deciles[-1] - deciles[0]) / _DECILES_TO_SIGMA
