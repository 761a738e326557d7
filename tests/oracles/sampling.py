"""The distribution after each sampling rule, by enumeration; slow, independent of the package."""

import math
from collections.abc import Mapping, Sequence

MASK = 2**64 - 1


def penalise(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: Mapping[int, float] | None = None,
    banned: Sequence[int] = (),
) -> list[float]:
    out = []
    for token, raw in enumerate(logits):
        value = raw
        if token in prompt or token in output:
            value = value / repetition if value > 0 else value * repetition
        if token in output:
            value -= presence
        value -= frequency * list(output).count(token)
        value += (bias or {}).get(token, 0.0)
        out.append(-math.inf if token in banned else value)
    return out


def distribution(
    logits: Sequence[float],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[float]:
    """Probabilities by id after temperature, top_k, top_p and min_p, in this order."""
    if temperature == 0:
        best = max(range(len(logits)), key=lambda t: (logits[t], -t))
        return [float(t == best) for t in range(len(logits))]
    peak = max(logits)
    weights = [math.exp((value - peak) / temperature) for value in logits]
    if 0 < top_k < len(weights):
        least = sorted(logits, reverse=True)[top_k - 1]
        weights = [w if value >= least else 0.0 for w, value in zip(weights, logits, strict=True)]
    total = math.fsum(weights)
    order = sorted(range(len(weights)), key=lambda t: (-logits[t], t))
    if top_p < 1:
        kept: set[int] = set()
        reached = 0.0
        for token in order:
            if reached >= top_p * total and kept:
                break
            kept.add(token)
            reached += weights[token]
        weights = [w if token in kept else 0.0 for token, w in enumerate(weights)]
    floor = min_p * max(weights)
    weights = [w if w >= floor else 0.0 for w in weights]
    total = math.fsum(weights)
    return [w / total for w in weights]


def inverse_cdf(probs: Sequence[float], uniform: float) -> int:
    reached = 0.0
    for token, prob in enumerate(probs):
        reached += prob
        if reached > uniform:
            return token
    return max(token for token, prob in enumerate(probs) if prob > 0)


def splitmix64(state: int) -> int:
    """The generator's next output after ``state``, as its authors publish it."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, index: int) -> float:
    """Output number ``index`` of SplitMix64 whose state is one output of the seed."""
    state = splitmix64(seed & MASK)
    for _ in range(index):
        state = (state + 0x9E3779B97F4A7C15) & MASK
    return (splitmix64(state) >> 11) / 2**53
