"""Chooses a batch's tokens with torch, on any device: rows of the same rules together."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mstar.engine.resources.mirror import send
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.sampler.stream import Stream
from mstar.engine.resources.sampler.transforms import (
    HEAD,
    Limits,
    ban_,
    draw,
    draw_limited,
    draw_sorted,
    logit_bias_,
    most_likely,
    output_penalty_,
    repetition_penalty_,
    uniforms,
)


class TorchChooser:
    """One tuple of streams, with all that does not change from step to step.

    Args:
        streams: One a row of the logits.
        vocab_size: Width of the logits.
        device: Where they lie.
    """

    def __init__(self, streams: Sequence[Stream], vocab_size: int, device: torch.device) -> None:
        self._num_rows = len(streams)
        self._edits = _Edits(streams, device) if any(s.has_edits for s in streams) else None
        members: dict[str, list[tuple[int, Stream]]] = {kind: [] for kind in _DRAWS}
        for row, stream in enumerate(streams):
            if not stream.is_greedy:
                members[_kind(stream.params, vocab_size)].append((row, stream))
        self._groups = {
            kind: _Group(own, vocab_size).to(device) for kind, own in members.items() if own
        }

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's largest logit after edits and its token, on the logits' device.

        Args:
            logits: ``[B, vocab_size]``, contiguous; they stay as they are.

        Returns:
            ``[B]`` and int64 ``[B]``, -1 where the largest logit is not finite.
        """
        best, tokens = self._choose(logits)
        finite = best.isfinite()
        if tokens.device.type == "cpu" and bool(finite.all()):
            return best, tokens
        return best, torch.where(finite, tokens, -1)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self._edits is None and not self._groups:
            return most_likely(logits)
        work = logits.to(torch.float32, copy=self._edits is not None)
        if self._edits is not None:
            self._edits.apply_(work)
        best, tokens = most_likely(work)
        for kind, group in self._groups.items():
            is_whole = len(group.streams) == self._num_rows
            own = work if is_whole else work[group.rows]
            tokens[group.rows] = _DRAWS[kind](own, best[group.rows], group)
        return best, tokens


class _Edits:
    """The changes to logits before the temperature, of all rows of a batch together."""

    def __init__(self, streams: Sequence[Stream], device: torch.device) -> None:
        self._device = device
        self._penalised = [(row, s) for row, s in enumerate(streams) if s.has_penalty]
        self._min_tokens = [(row, s) for row, s in enumerate(streams) if s.banned]
        places = [(row, token, s.bias[token]) for row, s in enumerate(streams) for token in s.bias]
        self._bias = None
        if places:
            rows, ids, bias = zip(*places, strict=True)
            self._bias = (
                torch.tensor(rows, device=device),
                torch.tensor(ids, device=device),
                torch.tensor(bias, dtype=torch.float32, device=device),
            )

    def apply_(self, logits: Tensor) -> None:
        """Write the changes into float32 ``[B, vocab_size]``."""
        if self._penalised:
            self._penalise_(logits)
        if self._bias is not None:
            logit_bias_(logits, *self._bias)
        banned = [
            (row, token)
            for row, stream in self._min_tokens
            if stream.num_generated < stream.params.min_tokens
            for token in stream.banned
        ]
        if banned:
            rows, ids = torch.tensor(banned, device=self._device).unbind(1)
            ban_(logits, rows, ids)

    def _penalise_(self, logits: Tensor) -> None:
        seen = [stream.history.update() for _, stream in self._penalised]
        lens = [len(ids) for ids, _ in seen]
        rows = self._spread([row for row, _ in self._penalised], lens, np.int64)
        ids = send(np.concatenate([ids for ids, _ in seen]), self._device)
        counts = send(np.concatenate([own for _, own in seen]), self._device)
        params = [stream.params for _, stream in self._penalised]
        repetition = self._spread([p.repetition_penalty for p in params], lens, np.float32)
        presence = self._spread([p.presence_penalty for p in params], lens, np.float32)
        frequency = self._spread([p.frequency_penalty for p in params], lens, np.float32)
        repetition_penalty_(logits, rows, ids, repetition)
        output_penalty_(logits, rows, ids, counts, (presence, frequency))

    def _spread(self, values: Sequence[float], lens: Sequence[int], dtype: type) -> Tensor:
        return send(np.repeat(np.asarray(values, dtype), lens), self._device)


class _Group:
    """Rows of a batch that are drawn in the same way."""

    def __init__(self, members: Sequence[tuple[int, Stream]], vocab_size: int) -> None:
        streams = [stream for _, stream in members]
        params = [stream.params for stream in streams]
        self.streams = streams
        self.rows = torch.tensor([row for row, _ in members])
        self.seeds = np.array([stream.seed for stream in streams], np.uint64)
        self.temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32)
        self.limits = Limits(
            torch.tensor([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]),
            torch.tensor([p.top_p for p in params], dtype=torch.float64),
            torch.tensor([p.min_p for p in params], dtype=torch.float64),
        )
        self.has_min_p = any(p.min_p for p in params)
        self.has_temperature = any(p.temperature != 1 for p in params)

    def to(self, device: torch.device) -> "_Group":
        """Move the tensors; returns itself."""
        self.rows = self.rows.to(device)
        self.temperature = self.temperature.to(device)
        self.limits = Limits(*(limit.to(device) for limit in self.limits))
        return self

    def uniform(self) -> Tensor:
        """Return float64 ``[R]``: each row's random number, on the rows' device."""
        indices = np.array([stream.num_generated for stream in self.streams], np.uint64)
        return uniforms(self.seeds, indices).to(self.rows.device)


def _kind(params: SamplingParams, vocab_size: int) -> str:
    if 0 < params.top_k < vocab_size:
        return "small_top_k" if params.top_k < HEAD else "top_k"
    return "top_p" if params.top_p < 1 else "all"


def _draw_all(logits: Tensor, best: Tensor, group: _Group) -> Tensor:
    if group.has_temperature:
        logits = logits / group.temperature[:, None]
    probs = logits.softmax(1)
    if group.has_min_p:
        floor = group.limits.min_p * probs.amax(1)
        probs = probs * (probs >= floor.to(probs.dtype)[:, None])
    return draw(probs, group.uniform())


def _draw_small_top_k(logits: Tensor, best: Tensor, group: _Group) -> Tensor:
    return draw_limited(logits, best, group.temperature, group.limits, None, group.uniform())


def _draw_top_k(logits: Tensor, best: Tensor, group: _Group) -> Tensor:
    return draw_sorted(logits, best, group.temperature, group.limits, None, group.uniform())


def _draw_top_p(logits: Tensor, best: Tensor, group: _Group) -> Tensor:
    # The largest probability is exp(0) over the sum that is wanted.
    scores = logits / group.temperature[:, None] if group.has_temperature else logits
    mass = 1 / scores.softmax(1).amax(1).double()
    return draw_limited(logits, best, group.temperature, group.limits, mass, group.uniform())


_DRAWS: Mapping[str, Callable[[Tensor, Tensor, _Group], Tensor]] = {
    "all": _draw_all,
    "small_top_k": _draw_small_top_k,
    "top_k": _draw_top_k,
    "top_p": _draw_top_p,
}
