"""Chooses a batch's tokens on a CUDA device, all rules of all rows in one launch.

What does not change while the batch stays is sent once; a step sends three numbers a row. Counts of
tokens stay on the device, where a step's new token is counted in passing.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.engine.resources.mirror import send
from mstar.engine.resources.sampler.stream import Stream
from mstar.engine.resources.sampler.transforms import uniforms

_MIN_SLOTS = 8


@cache
def _load() -> Any:
    try:
        return importlib.import_module("mstar.engine.resources.sampler.fused_cuda")
    except ImportError:
        return None


def kernels(device: torch.device) -> Any:
    """Return the module of the kernels, ``None`` where they do not run."""
    return _load() if device.type == "cuda" else None


class SeenTokens:
    """Which tokens penalised streams have, and how often, on the device.

    Args:
        vocab_size: Ids from here on are not counted.
        device: Where the counts lie.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self.codes = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        """``[num_slots, vocab_size]``: twice the count in the output, plus 1 for the prompt's."""
        self._slots: dict[Stream, int] = {}
        self._free: list[int] = []
        self._num_counted: dict[Stream, int] = {}

    def slot(self, stream: Stream) -> int:
        """Return the stream's row of ``codes``; it keeps it until ``drop``."""
        if stream not in self._slots:
            if not self._free:
                self._grow()
            self._slots[stream] = self._free.pop()
        return self._slots[stream]

    def drop(self, stream: Stream) -> None:
        """Take the row back, if the stream has one."""
        slot = self._slots.pop(stream, None)
        if slot is not None:
            self._free.append(slot)
            self._num_counted.pop(stream, None)

    def next_token(self, stream: Stream) -> int:
        """Bring the row up to date but for one token, and return that; -1: none is missing."""
        num_counted = self._num_counted.get(stream, -1)
        num_missing = len(stream.tokens) - num_counted
        if num_counted < 0 or not 0 <= num_missing <= 1:
            self._count(stream)
            num_missing = 0
        last = stream.tokens[-1] if num_missing else -1
        return last if last < self.codes.shape[1] else -1

    def catch_up(self, stream: Stream) -> None:
        """Bring the row up to date."""
        if self._num_counted.get(stream, -1) != len(stream.tokens):
            self._count(stream)

    def note(self, stream: Stream, num_more: int = 0) -> None:
        """Take it as done that all the stream's tokens are counted, and ``num_more`` to come."""
        self._num_counted[stream] = len(stream.tokens) + num_more

    def check(self) -> None:
        """Verify that rows belong to one stream each."""
        held = [*self._slots.values(), *self._free]
        assert sorted(held) == list(range(len(self.codes))), (sorted(held), len(self.codes))

    def _grow(self) -> None:
        num_slots, vocab_size = self.codes.shape
        more = torch.zeros(
            (max(num_slots, _MIN_SLOTS), vocab_size), dtype=torch.int32, device=self._device
        )
        self.codes = torch.cat((self.codes, more))
        self._free += range(num_slots, len(self.codes))

    def _count(self, stream: Stream) -> None:
        tokens = np.array(stream.tokens, np.int64)
        prompt, output = np.split(tokens, [stream.num_prompt_tokens])
        vocab_size = self.codes.shape[1]
        ids, counts = np.unique(output[output < vocab_size], return_counts=True)
        row = self.codes[self._slots[stream]].zero_()
        row[send(ids, self._device)] = send(2 * counts.astype(np.int32), self._device)
        if stream.counts_prompt:
            ids = np.unique(prompt[prompt < vocab_size])
            row[send(ids, self._device)] += 1


class FusedChooser:
    """One tuple of streams, with all that does not change from step to step.

    Args:
        streams: One a row of the logits.
        vocab_size: Width of the logits.
        device: Where they lie.
        seen: The counts of all penalised streams.
    """

    def __init__(
        self, streams: Sequence[Stream], vocab_size: int, device: torch.device, seen: SeenTokens
    ) -> None:
        self._streams = streams
        self._device = device
        self._seen = seen
        self._seeds = np.array([stream.seed for stream in streams], np.uint64)
        self._penalised = [(row, s) for row, s in enumerate(streams) if s.has_penalty]
        self._has_draws = not all(stream.is_greedy for stream in streams)
        self._reals = send(_reals(streams), device)
        slots = np.array([seen.slot(s) if s.has_penalty else -1 for s in streams])
        ends, places = _places(streams)
        top_k = [s.params.top_k if 0 < s.params.top_k < vocab_size else vocab_size for s in streams]
        wholes = np.stack((np.array(top_k), slots, ends[:-1], ends[1:]), 1)
        self._wholes = send(wholes, device)
        self._places = None
        if any(stream.has_edits for stream in streams):
            self._places = tuple(send(values, device) for values in places)
        self._still = torch.full((3, len(streams)), -1, dtype=torch.int64, device=device)

    def choose(self, logits: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return each row's largest logit after edits and its token, on the logits' device.

        Args:
            logits: ``[B, vocab_size]``, contiguous; they stay as they are.
            before: int64 ``[B]``, on the logits' device: a token of every stream that comes
                behind those it has; ``None``: the streams have all.

        Returns:
            float32 ``[B]`` and int64 ``[B]``, -1 where the largest logit is not finite.
        """
        step = self._still
        if self._has_draws or self._places is not None:
            step = send(self._step(before is not None), self._device)
            if before is not None and self._penalised:
                torch.minimum(step[2], before, out=step[2])
        edits = None if self._places is None else (self._seen.codes, *self._places)
        best, tokens = _load().choose(logits, self._reals, self._wholes, step, edits)
        for _, stream in self._penalised:
            self._seen.note(stream, 0 if before is None else 1)
        return best, tokens

    def _step(self, is_ahead: bool) -> npt.NDArray[np.int64]:
        """Return the step's numbers; ahead, the largest integer stands for a penalised token."""
        step = np.full((3, len(self._streams)), -1, np.int64)
        step[1] = [stream.num_generated for stream in self._streams]
        step[1] += is_ahead
        step[0] = uniforms(self._seeds, step[1].astype(np.uint64)).numpy().view(np.int64)
        for row, stream in self._penalised:
            if is_ahead:
                self._seen.catch_up(stream)
                step[2, row] = np.iinfo(np.int64).max
            else:
                step[2, row] = self._seen.next_token(stream)
        return step


def _reals(streams: Sequence[Stream]) -> npt.NDArray[np.float64]:
    params = [stream.params for stream in streams]
    scales = [0 if s.is_greedy else 1 / s.params.temperature for s in streams]
    columns = (
        scales,
        [p.top_p for p in params],
        [p.min_p for p in params],
        [p.repetition_penalty for p in params],
        [p.presence_penalty for p in params],
        [p.frequency_penalty for p in params],
    )
    return np.array(columns, np.float64).T.copy()


def _places(
    streams: Sequence[Stream],
) -> tuple[npt.NDArray[np.int64], tuple[npt.NDArray[Any], ...]]:
    """Return where each row's places end, behind a 0, and their ids, biases and bans."""
    ends = [0]
    ids: list[int] = []
    bias: list[float] = []
    until: list[int] = []
    for stream in streams:
        banned = set(stream.banned)
        own = sorted({*stream.bias, *banned})
        ids += own
        bias += [stream.bias.get(token, 0.0) for token in own]
        until += [stream.params.min_tokens if token in banned else 0 for token in own]
        ends.append(len(ids))
    arrays = np.array(ids, np.int32), np.array(bias, np.float32), np.array(until, np.int64)
    return np.array(ends, np.int64), arrays
