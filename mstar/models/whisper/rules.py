"""Which tokens a Whisper may generate next: changes to logits before one is sampled.

Source: Radford et al. 2022, arXiv:2212.04356, and the checkpoints' generation configs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mstar.engine.resources.mirror import send
from mstar.models.whisper.config import WhisperTokens

_NEVER = float("-inf")
_Bounds = tuple[Tensor, Tensor, Tensor | None, Tensor]
"""The first time that may follow, the one behind the last, the first text (``None``: all of it
may), and whether the row has times; ``[num_rows, 1]`` each."""


class Asked(NamedTuple):
    """What a row of logits is for."""

    generated: Sequence[int]
    """Ids of the transcript so far."""
    timestamps: bool
    """Whether times are to be among them."""
    is_language: bool = False
    """A language is asked for, and no transcript."""


class Rules:
    """The rules of one model.

    Args:
        tokens: Its special ids.
        vocab_size: Width of the logits.
        device: Where they lie.
    """

    def __init__(self, tokens: WhisperTokens, vocab_size: int, device: torch.device) -> None:
        self._tokens = tokens
        self._first = tokens.first_timestamp
        self._num_times = vocab_size - self._first
        self._suppressed, self._begin_suppressed, self._no_timestamps = (
            torch.tensor(sorted(set(ids)), dtype=torch.int64, device=device)
            for ids in (tokens.suppressed, tokens.begin_suppressed, (tokens.no_timestamps,))
        )
        self._columns = torch.arange(vocab_size, dtype=torch.int32, device=device)
        is_no_language = torch.ones(vocab_size, dtype=torch.bool, device=device)
        is_no_language[list(tokens.languages.values())] = False
        self._is_no_language = is_no_language

    def restrict_(
        self, logits: Tensor, asked: Sequence[Asked], before: Tensor | None = None
    ) -> None:
        """Forbid in each row what may not come next; reads nothing back from the device.

        A language is left its likeliest alone.

        Args:
            logits: ``[num_rows, vocab_size]``, float32.
            asked: One a row.
            before: int64 ``[num_rows]``, on the device: the token behind those that are asked
                with, which nobody has read; ``None``: there is none.
        """
        languages = [row for row, own in enumerate(asked) if own.is_language]
        texts = [row for row, own in enumerate(asked) if not own.is_language]
        begun = [row for row in texts if before is None and not asked[row].generated]
        timed = [row for row in texts if asked[row].timestamps]
        self._forbid_(logits, texts, self._suppressed)
        self._forbid_(logits, begun, self._begin_suppressed)
        if timed:
            self._forbid_(logits, timed, self._no_timestamps)
            self._time_(logits, asked, timed, before)
        if languages:
            self._name_(logits, languages)

    @staticmethod
    def _forbid_(logits: Tensor, rows: Sequence[int], ids: Tensor) -> None:
        if len(rows) == len(logits):
            logits.index_fill_(1, ids, _NEVER)
        elif rows:
            at = send(np.array(rows), logits.device)
            logits.index_put_((at[:, None], ids), logits.new_full((), _NEVER))

    def _name_(self, logits: Tensor, rows: Sequence[int]) -> None:
        """Leave nothing but the likeliest language."""
        at = send(np.array(rows), logits.device)
        best = logits[at].masked_fill_(self._is_no_language, _NEVER).argmax(1)
        # 0, or what is no number, so that whoever samples sees that it is none.
        likeliest = logits[at, best] * 0
        logits.index_fill_(0, at, _NEVER)
        logits.index_put_((at, best), likeliest)

    def _time_(
        self,
        logits: Tensor,
        asked: Sequence[Asked],
        rows: Sequence[int],
        before: Tensor | None,
    ) -> None:
        """Let times come in pairs, never fall, and stand at the beginning.

        A time is taken where times together are likelier than any other token.
        """
        first_time, stop_time, first_text, is_timed = (
            self._read_bounds(asked, rows, logits.device)
            if before is None
            else self._unread_bounds(asked, rows, before[:, None])
        )
        text, times = logits[:, : self._first], logits[:, self._first :]
        place = self._columns[: self._num_times]
        times.masked_fill_((place < first_time) | (place >= stop_time), _NEVER)
        if first_text is not None:
            text.masked_fill_(self._columns[: self._first] < first_text, _NEVER)
        is_time = times.logsumexp(1, keepdim=True) > text.amax(1, keepdim=True)
        text.masked_fill_(is_time & is_timed, _NEVER)

    def _read_bounds(
        self, asked: Sequence[Asked], rows: Sequence[int], device: torch.device
    ) -> _Bounds:
        """Return what may follow in rows with times; all may in the others."""
        bounds = np.zeros((4, len(asked), 1), np.int32)
        first_time, stop_time, first_text, is_timed = bounds
        stop_time[:] = self._num_times
        for row in rows:
            first_time[row], stop_time[row], first_text[row] = self._bounds(asked[row].generated)
        is_timed[rows] = 1
        sent = send(bounds, device)
        return sent[0], sent[1], sent[2] if first_text.any() else None, sent[3].bool()

    def _unread_bounds(
        self, asked: Sequence[Asked], rows: Sequence[int], before: Tensor
    ) -> _Bounds:
        """Return the same where one more token, ``[num_rows, 1]``, is on the device."""
        facts = np.zeros((3, len(asked), 1), np.int32)
        behind_text, is_second, is_timed = facts
        for row in rows:
            generated = asked[row].generated
            behind_text[row] = self._behind_text(generated)
            is_second[row] = not generated or generated[-1] >= self._first
        is_timed[rows] = 1
        sent = send(facts, before.device)
        time, timed = before - self._first, sent[2].bool()
        is_time = (time >= 0) & timed
        is_pair = is_time & sent[1].bool()
        return (
            torch.where(is_time, time, sent[0]),
            torch.where(is_pair, 0, self._num_times),
            torch.where(is_time & ~is_pair, self._tokens.end, 0),
            timed,
        )

    def _bounds(self, generated: Sequence[int]) -> tuple[int, int, int]:
        """Return the first time that may follow, the one behind the last, and the first text.

        Times are counted from the first of all; text are all ids before it.
        """
        first, tokens = self._first, self._tokens
        if not generated:
            latest = tokens.max_initial_timestamp
            return 0, self._num_times if latest is None else latest + 1, first
        is_behind_time = generated[-1] >= first
        if is_behind_time and (len(generated) < 2 or generated[-2] >= first):
            # A pair is complete.
            return 0, 0, 0
        if is_behind_time:
            # Only a second time or the end may follow.
            return generated[-1] - first, self._num_times, tokens.end
        return self._behind_text(generated), self._num_times, 0

    def _behind_text(self, generated: Sequence[int]) -> int:
        """Return the first time that may follow text: a stretch is longer than nothing."""
        last = next((token for token in reversed(generated) if token >= self._first), None)
        return 0 if last is None else last + 1 - self._first
