"""Rendering: what turns the engine's outputs into the bytes of one HTTP answer, on any route."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from mstar.engine.output import FinishReason, RequestOutput
from mstar.transport.messages import AnswerOptions

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"


def event(data: bytes) -> bytes:
    """Return one server-sent event around JSON."""
    return b"data: " + data + b"\n\n"


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Tokens of one answer so far."""

    num_prompt: int
    """A prompt counts once, whatever ``n`` is."""
    num_cached: int
    num_completion: int


class Rendering(ABC):
    """One answer as it grows."""

    content_type: str
    """Of the answer."""
    keep_alive: bytes = KEEP_ALIVE
    """What a silent stream carries now and then; nothing where it may carry nothing else."""
    is_heavy: bool = False
    """Writing the whole answer takes longer than the event loop may be kept."""
    num_open: int
    """Choices that have not ended."""

    @abstractmethod
    def take(self, index: int, output: RequestOutput) -> bytes:
        """Take in an output of choice ``index``; returns what goes out of it, if streamed."""

    @abstractmethod
    def is_open(self, index: int) -> bool:
        """Tell whether choice ``index`` goes on."""

    def is_cut(self, index: int) -> bool:
        """Tell whether choice ``index`` ended at a stop string, which the engine does not know."""
        return False

    def opening(self) -> bytes:
        """Return what a stream begins with; nothing: its head waits for the first piece."""
        return b""

    def closing(self) -> bytes:
        """Return what a stream ends with."""
        return DONE

    def failing(self, error: bytes) -> bytes | None:
        """Return what ends a stream that failed; ``None``: it has no way to say so, and breaks off.

        Args:
            error: The JSON of the error.
        """
        return event(error) + DONE

    @abstractmethod
    def whole(self) -> bytes:
        """Return the body of an answer that is not streamed."""

    @abstractmethod
    def counts(self) -> Counts:
        """Return the tokens so far."""

    @abstractmethod
    def finish_reasons(self) -> Sequence[FinishReason | None]:
        """Return why each choice has ended; ``None``: it goes on."""


class PlainRendering(Rendering):
    """An answer that keeps no more than counts of its own.

    Args:
        options: How the answer is to be shaped.
    """

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._reasons: list[FinishReason | None] = [None] * options.num_choices
        self._num_tokens = 0
        self._num_cached = 0
        self.num_open = options.num_choices

    def take(self, index: int, output: RequestOutput) -> bytes:
        """Count an output."""
        self._num_tokens += len(output.token_ids)
        if index == 0:
            self._num_cached = output.num_cached_tokens
        if output.finish_reason is not None:
            self._reasons[index] = output.finish_reason
            self.num_open -= 1
        return self.added(index, output)

    @abstractmethod
    def added(self, index: int, output: RequestOutput) -> bytes:
        """Take in an output that was counted; returns what goes out of it, if streamed."""

    def is_open(self, index: int) -> bool:
        """Tell whether choice ``index`` goes on."""
        return self._reasons[index] is None

    def counts(self) -> Counts:
        """Return the tokens so far."""
        return Counts(
            num_prompt=sum(self._options.num_prompt_tokens),
            num_cached=self._num_cached,
            num_completion=self._num_tokens,
        )

    def finish_reasons(self) -> Sequence[FinishReason | None]:
        """Return why each choice has ended."""
        return self._reasons
