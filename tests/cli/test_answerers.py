"""Answers of an engine in this process, as a talk shows them."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mstar.cli.answerers import Ending, EngineAnswerer, Piece, check_abilities
from mstar.engine.array import from_numpy
from mstar.engine.output import Emitted
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import ContextLengthError, RequestError, UnsupportedError
from mstar.library import AnswerPiece

SAMPLES = np.full(10, 0.5, np.float32)
PIECES = (
    AnswerPiece("", (Emitted(name="transcript", text=" Hello?"),)),
    AnswerPiece("Good."),
    AnswerPiece("", (Emitted(name="audio", array=from_numpy(SAMPLES), info={"rate": 8000}),)),
)
DONE = SimpleNamespace(
    num_prompt_tokens=9, num_cached_tokens=4, token_ids=(1, 2), finish_reason="stop"
)
ASKED = [{"role": "user", "content": "x"}]


class FakeEngine:
    """Says what it was asked and answers with the pieces above."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.error = error
        self.is_closed = False

    def stream(self, **asked: Any) -> Any:
        self.asked.append(asked)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self._stream()

    @contextmanager
    def _stream(self) -> Iterator[Any]:
        yield SimpleNamespace(pieces=lambda: iter(PIECES), completion=DONE)
        self.is_closed = True


def answerer(engine: Any, max_tokens: int = 5) -> EngineAnswerer:
    return EngineAnswerer(engine, SamplingParams(max_tokens=max_tokens), "joe")


def test_what_was_heard_written_and_spoken_comes_in_order() -> None:
    engine = FakeEngine()
    first, second, third, ending = answerer(engine).answer(ASKED, is_spoken=True)
    assert isinstance(third, Piece)
    assert (first, second) == (Piece(heard=" Hello?", sounds=[]), Piece(text="Good.", sounds=[]))
    (sound,) = third.sounds
    assert (sound.rate, sound.samples.tolist()) == (8000, SAMPLES.tolist())
    assert ending == Ending(
        num_prompt_tokens=9, num_cached_tokens=4, num_tokens=2, finish_reason="stop"
    )
    (asked,) = engine.asked
    assert (asked["task"].modalities, asked["task"].voice) == ({"text", "audio"}, "joe")
    assert engine.is_closed


def test_an_answer_in_writing_asks_for_no_sound() -> None:
    engine = FakeEngine()
    list(answerer(engine).answer(ASKED, is_spoken=False))
    assert engine.asked[0]["task"].modalities == {"text"}


def test_an_answer_takes_what_the_context_has_left() -> None:
    engine = FakeEngine(ContextLengthError("too many", param="max_tokens"))
    assert len(list(answerer(engine).answer(ASKED, is_spoken=False))) == 4
    assert [asked["params"].max_tokens for asked in engine.asked] == [5, None]
    engine = FakeEngine(ContextLengthError("too long", param="messages"))
    with pytest.raises(RequestError, match="too long"):
        list(answerer(engine).answer(ASKED, is_spoken=False))


def test_what_a_model_lacks_is_named() -> None:
    check_abilities("m", ("text", "audio"), ("text",), "listen")
    with pytest.raises(UnsupportedError, match="m does not speak: it gives text only"):
        check_abilities("m", ("text", "audio"), ("text",), "speak")
    with pytest.raises(UnsupportedError, match="takes text and image only"):
        check_abilities("m", ("text", "image"), (), "listen")
