"""How sure a Whisper was of a window, in the figures that its authors judge transcripts by.

All are of a whole window, and each of its stretches is told the same. Their definitions are those
of Radford et al. 2022, arXiv:2212.04356, and of the code published with it:

- ``avg_logprob``: The sum of the log-probabilities of the tokens that were sampled, the end
  included and timestamps too, divided by the number of tokens without the end, plus one. They are
  taken from what the rules leave of the logits, at temperature 1, whatever was sampled with.
- ``no_speech_prob``: The probability of the token for no speech behind the one that starts the
  transcript, before any rule.
- ``compression_ratio``: Bytes of the text in UTF-8 over those that zlib makes of them; text that
  repeats itself has a high one.
"""

import zlib
from dataclasses import dataclass, field

from torch import Tensor

from mstar.engine.request import Request
from mstar.engine.resources.kv.keys import fingerprint
from mstar.models.whisper.config import WhisperTokens

_MAX_KNOWN = 1024


@dataclass(slots=True)
class _Window:
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens generated so far."""
    no_speech: float | None = None


class Facts:
    """What is known of the windows that are being written down, one a request.

    Args:
        tokens: The model's special ids.
    """

    def __init__(self, tokens: WhisperTokens) -> None:
        self._tokens = tokens
        self._windows: dict[str, _Window] = {}
        self._known: dict[bytes, float] = {}
        """Of prompts: ``no_speech_prob``, for windows whose first tokens need not be computed."""

    def __len__(self) -> int:
        """Return the number of windows that are kept."""
        return len(self._windows)

    def due(self, request: Request, span: int) -> int | None:
        """Return which of a request's next ``span`` tokens has logits for ``note_start``.

        ``None``: none has, or what they say is known.
        """
        computed = request.num_computed_tokens
        if computed >= request.num_prompt_tokens:
            return None
        place = self._start_of(request) - computed
        return place if 0 <= place < span and self._window(request).no_speech is None else None

    def note_start(self, request: Request, logits: Tensor) -> None:
        """Take note of a window's first logits, ``[vocab_size]``, float32, before any rule."""
        found = float(logits.softmax(0)[self._tokens.no_speech])
        self._window(request).no_speech = found
        if request.prepared.root is not None:
            key = self._name_of(request)
            self._known.pop(key, None)
            self._known[key] = found
            if len(self._known) > _MAX_KNOWN:
                del self._known[next(iter(self._known))]

    def note_sampled(self, request: Request, logprob: float) -> None:
        """Take note of a token.

        Args:
            request: Which was given it.
            logprob: Of the token, in what the rules leave of the logits.
        """
        # At the token's own place, so that a step that is run again changes nothing.
        place = len(request.tokens) - request.num_prompt_tokens
        self._window(request).logprobs[place:] = [logprob]

    def told(self, request: Request, text: str) -> dict[str, float]:
        """Return what is known of a window that has its last token, by name.

        Args:
            request: Whose it is.
            text: All that the window says.
        """
        window = self._window(request)
        num_tokens = sum(token != self._tokens.end for token in request.generated())
        data = text.strip().encode()
        told = {
            "avg_logprob": sum(window.logprobs) / (num_tokens + 1),
            "compression_ratio": len(data) / len(zlib.compress(data)),
        }
        no_speech = window.no_speech
        if no_speech is None:
            no_speech = self._known.get(self._name_of(request))
        return told if no_speech is None else told | {"no_speech_prob": no_speech}

    def drop(self, request_id: str) -> None:
        """Forget a request's window."""
        self._windows.pop(request_id, None)

    def _window(self, request: Request) -> _Window:
        return self._windows.setdefault(request.request_id, _Window())

    def _start_of(self, request: Request) -> int:
        """Return the slot of the token that starts the transcript."""
        ids = request.prepared.token_ids
        return len(ids) - 1 - ids[::-1].index(self._tokens.start)

    def _name_of(self, request: Request) -> bytes:
        """Return the name of all that a window's first logits depend on; tenants share none."""
        prepared = request.prepared
        (item,) = prepared.context
        ids = prepared.token_ids[: self._start_of(request) + 1]
        return fingerprint("mstar-whisper-start-v1", prepared.root or b"", item.digest, *ids)
