"""The sampling rules as functions of logits, and the draw that ends them.

The order is fixed: repetition penalty, presence and frequency penalty, logit bias, the ban on stop
tokens; then temperature, top_k, top_p, min_p. What comes before the temperature also changes which
token is the most likely one; what comes after never does.

Functions with a trailing underscore write into the float32 working copy they are given. Every row
is treated by itself and always in the same order of operations, so that its result does not depend
on the other rows.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BLOCK = 256
"""Weights summed before the running sum over a long row, which is slow on a CPU."""
_SPAN = 64
"""Logits whose maximum is taken before the search over a row."""
HEAD = 64
"""How many of the most likely tokens are looked at before the whole vocabulary is sorted."""
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def repetition_penalty_(logits: Tensor, rows: Tensor, ids: Tensor, penalty: Tensor) -> Tensor:
    """Divide positive and multiply negative logits of tokens in prompt or output.

    Args:
        logits: float32 ``[num_rows, vocab_size]``.
        rows: int64 ``[N]``; with ``ids``, the places to change, each once.
        ids: int64 ``[N]``.
        penalty: float32 ``[N]``, above 1 to discourage.

    Source:
        CTRL, arXiv:1909.05858, section 4.1, with the sign rule of transformers and vLLM.
    """
    values = logits[rows, ids]
    values = torch.where(values > 0, values / penalty, values * penalty)
    return logits.index_put_((rows, ids), values)


def output_penalty_(
    logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, penalties: tuple[Tensor, Tensor]
) -> Tensor:
    """Subtract the presence penalty once and the frequency penalty for each occurrence.

    Args:
        logits: float32 ``[num_rows, vocab_size]``.
        rows: int64 ``[N]``; with ``ids``, the places to change, each once.
        ids: int64 ``[N]``.
        counts: float32 ``[N]``: how often the token is in the output.
        penalties: Presence and frequency penalty, float32 ``[N]`` each.
    """
    presence, frequency = penalties
    delta = presence * (counts > 0) + frequency * counts
    return logits.index_put_((rows, ids), -delta, accumulate=True)


def logit_bias_(logits: Tensor, rows: Tensor, ids: Tensor, bias: Tensor) -> Tensor:
    """Add ``bias``, float32 ``[N]``, at the places ``rows``, ``ids``, each given once."""
    return logits.index_put_((rows, ids), bias, accumulate=True)


def ban_(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """Make the tokens at ``rows``, ``ids`` impossible."""
    return logits.index_put_((rows, ids), logits.new_tensor(-torch.inf))


def temper(logits: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Return ``(logits - best) / temperature``: 0 at the most likely token, negative elsewhere.

    Args:
        logits: ``[num_rows, width]``.
        best: ``[num_rows]``: the largest logit of each row's whole vocabulary.
        temperature: ``[num_rows]``, positive.
    """
    return (logits - best[:, None]) / temperature[:, None].to(logits.dtype)


class Limits(NamedTuple):
    """The three rules that leave out unlikely tokens, for ``R`` rows."""

    top_k: Tensor
    """int64 ``[R]``, at least 1; the width of the vocabulary keeps all."""
    top_p: Tensor
    """float64 ``[R]`` in (0, 1]."""
    min_p: Tensor
    """float64 ``[R]`` in [0, 1]."""


def truncate(scores: Tensor, limits: Limits, mass: Tensor | None = None) -> Tensor:
    """Return unnormalised probabilities after top_k, top_p and min_p.

    A token as likely as the ``top_k``-th stays, as in transformers and vLLM. top_p keeps a token
    while those before it do not reach ``top_p`` of what top_k left. min_p compares with the most
    likely token, which always stays.

    Args:
        scores: ``[R, width]`` after the temperature, largest first and the largest 0.
        limits: The rules' parameters.
        mass: float64 ``[R]``: sum of ``exp(score)`` over the whole vocabulary where ``scores`` is
            only its head and top_k keeps all; ``None``: the sum over what top_k keeps.

    Returns:
        float64 ``[R, width]``; 0 for tokens left out.
    """
    last = (limits.top_k - 1).clamp(max=scores.shape[1] - 1)[:, None]
    kept = scores >= scores.gather(1, last)
    weights = scores.double().exp() * kept
    reached = weights.cumsum(1)
    total = reached[:, -1] if mass is None else mass
    top_p = limits.top_p[:, None]
    # Rounding must not drop the tail where top_p keeps all.
    kept = (reached - weights < top_p * total[:, None]) | (top_p >= 1)
    kept[:, 0] = True
    kept &= weights >= limits.min_p[:, None] * weights[:, :1]
    return weights * kept


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row and its id, the lowest among equal ones.

    A row with a NaN has NaN as its largest.

    Args:
        logits: ``[num_rows, vocab_size]``, any floating dtype.
    """
    if logits.shape[1] % _SPAN:
        values, ids = logits.max(1)
        return values, ids
    # Finding the span by its maximum first is several times faster than one search on a CPU.
    spans = logits.view(len(logits), -1, _SPAN)
    values, span = spans.amax(2).max(1)
    inside = spans.gather(1, span[:, None, None].expand(-1, 1, _SPAN))[:, 0].argmax(1)
    return values, span * _SPAN + inside


def head(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the ``width`` largest logits of each row and their ids, largest first.

    Among equal ones the lower id stands first, though which of those equal to the last one are
    present is left open.

    Args:
        logits: ``[num_rows, vocab_size]``.
        width: At most ``vocab_size``.
    """
    vocab = logits.shape[1]
    if vocab % _SPAN or vocab < 4 * _SPAN * width:
        values, ids = logits.topk(width, dim=1)
    else:
        # Each of the largest lies in one of the ``width`` spans with the largest maxima.
        spans = logits.view(len(logits), -1, _SPAN)
        chosen = spans.amax(2).topk(width, dim=1).indices
        inside = spans.gather(1, chosen[:, :, None].expand(-1, -1, _SPAN)).flatten(1)
        values, places = inside.topk(width, dim=1)
        ids = chosen.gather(1, places // _SPAN) * _SPAN + places % _SPAN
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def draw_limited(
    logits: Tensor,
    best: Tensor,
    temperature: Tensor,
    limits: Limits,
    mass: Tensor | None,
    uniform: Tensor,
) -> Tensor:
    """Return a token for each row, drawn after temperature, top_k, top_p and min_p.

    Looks at the ``HEAD`` most likely tokens, and at all only in rows that those do not settle.

    Args:
        logits: float32 ``[R, vocab_size]``.
        best: float32 ``[R]``: the largest logit of each row.
        temperature: float32 ``[R]``, positive.
        limits: The rules' parameters; without ``mass``, each top_k is below ``HEAD``.
        mass: As ``truncate`` takes it.
        uniform: float64 ``[R]`` in [0, 1).

    Returns:
        int64 ``[R]``.
    """
    if logits.shape[1] <= HEAD:
        return draw_sorted(logits, best, temperature, limits, mass, uniform)
    values, ids = head(logits, HEAD)
    scores = temper(values.double(), best, temperature)
    weights = truncate(scores, limits, mass)
    # Something as likely as the last one kept may lie behind the head.
    edge = scores.gather(1, _last_kept(weights))
    if mass is None:
        edge = torch.minimum(edge, scores.gather(1, limits.top_k[:, None] - 1))
    is_settled = edge[:, 0] > scores[:, -1]
    ids, order = ids.sort(dim=1)
    place = draw(weights.gather(1, order), uniform)
    tokens = ids.gather(1, place[:, None])[:, 0]
    if not bool(is_settled.all()):
        rows = (~is_settled).nonzero()[:, 0]
        tokens[rows] = draw_sorted(
            logits[rows],
            best[rows],
            temperature[rows],
            Limits(*(limit[rows] for limit in limits)),
            None if mass is None else mass[rows],
            uniform[rows],
        )
    return tokens


def draw_sorted(
    logits: Tensor,
    best: Tensor,
    temperature: Tensor,
    limits: Limits,
    mass: Tensor | None,
    uniform: Tensor,
) -> Tensor:
    """Do what ``draw_limited`` does for any top_k, by sorting every row's logits.

    Among tokens as likely as the last one that top_p keeps, those with lower ids are kept.
    """
    ascending = _sorted(logits)
    values = ascending.flip(1)
    weights = truncate(temper(values.double(), best, temperature), limits, mass)
    last = _last_kept(weights)
    edge = values.gather(1, last)
    kept = logits >= edge
    end = torch.searchsorted(ascending, edge, right=True)
    room = last + 1 - (logits.shape[1] - end)
    if bool((end - torch.searchsorted(ascending, edge) > room).any()):
        tied = logits == edge
        kept &= ~tied | (tied.cumsum(1) <= room)
    return draw(temper(logits, best, temperature).exp_().mul_(kept), uniform)


def _last_kept(weights: Tensor) -> Tensor:
    """Return ``[R, 1]``: the last place with a positive weight, largest first; 0 if none has."""
    return ((weights > 0).sum(1, keepdim=True) - 1).clamp_(min=0)


def _sorted(logits: Tensor) -> Tensor:
    """Return each row's values, smallest first."""
    if logits.device.type == "cpu":
        # numpy sorts values with vector instructions, torch carries indices along.
        return torch.from_numpy(np.sort(logits.detach().numpy(), axis=1))
    return logits.sort(dim=1).values


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return where the running sum of each row first exceeds ``uniform`` of the row's sum.

    Args:
        weights: ``[R, width]``, not negative, at least one positive in each row.
        uniform: float64 ``[R]`` in [0, 1).

    Returns:
        int64 ``[R]``; the weight there is positive.
    """
    width = weights.shape[1]
    if width <= 2 * _BLOCK:
        return _search(weights.double().cumsum(1), uniform)[0]
    whole = width // _BLOCK * _BLOCK
    sums = weights[:, :whole].view(len(weights), -1, _BLOCK).sum(2, dtype=torch.float32)
    tail = weights[:, whole:].sum(1, keepdim=True, dtype=torch.float32)
    block, rest = _search(torch.cat((sums, tail), 1).double().cumsum(1), uniform)
    places = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, places.clamp(max=width - 1)).double() * (places < width)
    chosen, _ = _search(inside.cumsum(1), rest)
    return block * _BLOCK + chosen


def _search(reached: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return where ``uniform`` of each row's sum falls, and how far into that place, in [0, 1).

    Args:
        reached: float64 ``[R, width]``, running sums.
        uniform: float64 ``[R]`` in [0, 1).
    """
    total = reached[:, -1]
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform * total, below)[:, None]
    place = torch.searchsorted(reached, target, right=True).clamp_(max=reached.shape[1] - 1)
    upper = reached.gather(1, place)
    lower = reached.gather(1, (place - 1).clamp(min=0)) * (place > 0)
    inside = ((target - lower) / (upper - lower)).clamp(0.0, 1.0)[:, 0]
    return place[:, 0], inside


def uniforms(seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]) -> Tensor:
    """Return a number in [0, 1) for each pair of seed and index of the generated token.

    It depends on nothing else, so a request draws the same numbers in any batch and after a
    restart.

    Returns:
        float64 ``[R]`` on the CPU, multiples of ``2 ** -53``.

    Source:
        SplitMix64: Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA
        2014, with the mixing constants of Stafford's variant 13. We start its sequence at the
        mixed seed, so that neighbouring seeds do not run along the same sequence.
    """
    state = _mix(seeds + _GAMMA) + (indices + np.uint64(1)) * _GAMMA
    return torch.from_numpy((_mix(state) >> np.uint64(11)) * 2.0**-53)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
