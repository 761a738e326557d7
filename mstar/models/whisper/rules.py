"""Which tokens a Whisper may generate next: changes to logits before one is sampled.

Source: Radford et al. 2022, arXiv:2212.04356, and the checkpoints' generation configs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mstar.models.whisper.config import WhisperTokens

_NEVER = float("-inf")


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
        plain = sorted(set(tokens.suppressed))
        self._suppressed = torch.tensor(plain, dtype=torch.int64, device=device)
        begin = sorted({*plain, *tokens.begin_suppressed})
        self._begin_suppressed = torch.tensor(begin, dtype=torch.int64, device=device)
        is_no_language = torch.ones(vocab_size, dtype=torch.bool, device=device)
        is_no_language[list(tokens.languages.values())] = False
        self._is_no_language = is_no_language

    def language_(self, logits: Tensor) -> None:
        """Leave nothing but the likeliest language in one row, ``[vocab_size]``, float32."""
        best = logits.masked_fill(self._is_no_language, _NEVER).argmax()
        logits.fill_(_NEVER)
        logits[best] = 0.0

    def text_(self, logits: Tensor, generated: Sequence[int], *, timestamps: bool) -> None:
        """Forbid in one row what may not come next in a transcript.

        Args:
            logits: ``[vocab_size]``, float32.
            generated: Ids of the transcript so far.
            timestamps: Whether times are to be among them.
        """
        logits.index_fill_(0, self._suppressed if generated else self._begin_suppressed, _NEVER)
        if timestamps:
            self._pair_(logits, generated)
            self._prefer_(logits)

    def _pair_(self, logits: Tensor, generated: Sequence[int]) -> None:
        """Let times come in pairs, never fall, and stand at the beginning."""
        first, tokens = self._first, self._tokens
        logits[tokens.no_timestamps] = _NEVER
        if not generated:
            logits[:first] = _NEVER
            if tokens.max_initial_timestamp is not None:
                logits[first + tokens.max_initial_timestamp + 1 :] = _NEVER
            return
        is_behind_time = generated[-1] >= first
        is_behind_pair = is_behind_time and (len(generated) < 2 or generated[-2] >= first)
        if is_behind_pair:
            logits[first:] = _NEVER
            return
        last = next((token for token in reversed(generated) if token >= first), None)
        if is_behind_time:
            # Only a second time or the end may follow.
            logits[: tokens.end] = _NEVER
        elif last is not None:
            # A stretch is longer than nothing.
            last += 1
        if last is not None:
            logits[first:last] = _NEVER

    def _prefer_(self, logits: Tensor) -> None:
        """Take a time where times together are likelier than any other token."""
        first = self._first
        if bool(logits[first:].logsumexp(0) > logits[:first].amax()):
            logits[:first] = _NEVER
