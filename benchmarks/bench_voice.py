"""How soon a spoken question's answer is heard, and what four conversations at once gain.

Whisper base hears, SmolLM2-135M answers and Piper speaks, in one engine. The first rows are one
conversation each; ``first sound`` over ``whole answer`` should be below 0.40. The last two rows are
the same four one after the other and at once, which should be at least 1.6 times as fast. All rows
are means of rounds that take turns, since the machine's speed drifts by more than a tenth within
minutes. Nothing is reused from one run for the next.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import soxr

from mstar.assistant.model import VoiceAssistant
from mstar.catalog import load_model, load_prompting
from mstar.engine.engine import EngineCore
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.preprocess.media.types import AudioMedia, Samples
from mstar.preprocess.processors.base import AUDIO, ChatTask
from mstar.preprocess.prompt import request_root

QUESTIONS = (
    "Why is the sky blue?",
    "How do bees make honey?",
    "What is a volcano?",
    "Why do we need to sleep?",
)
MAX_TOKENS = 80
NUM_ROUNDS = 3
SPOKEN = ChatTask(modalities=frozenset(("text", "audio")))


@dataclass
class Talk:
    """What one conversation took, in seconds from when it was asked for."""

    first: float = 0.0
    """To the first sound."""
    whole: float = 0.0
    num_pieces: int = 0
    """Pieces of sound."""
    spoken: float = 0.0
    """Seconds of sound."""
    num_tokens: int = 0


class Desk:
    """The assistant in one engine, and recordings of the questions."""

    def __init__(self) -> None:
        model, dtype = load_model("voice")
        assert isinstance(model, VoiceAssistant)
        _, processor = load_prompting("voice")
        self._processor: Any = processor
        self._engine = EngineCore(model, Deployment(dtype=dtype, kv_cache_bytes=1 << 28))
        voice = model.speaker.voice
        self.questions = [self._heard(voice.speak(text), voice.rate) for text in QUESTIONS]
        self._num_rounds = 0

    def _heard(self, samples: Samples, rate: int) -> AudioMedia:
        return AudioMedia(soxr.resample(samples, rate, self._processor.rate), self._processor.rate)

    def talk(self, questions: list[AudioMedia]) -> list[Talk]:
        """Ask questions at once, as a tenant that nobody has been before."""
        self._num_rounds += 1
        root = request_root(self._engine.root, f"round {self._num_rounds}")
        begin = time.perf_counter()
        for number, question in enumerate(questions):
            self._engine.add_request(self._prepared(question, str(number), root))
        talks = [Talk() for _ in questions]
        while self._engine.has_work:
            for output in self._engine.step():
                talk = talks[int(output.request_id)]
                talk.whole = time.perf_counter() - begin
                talk.num_tokens += len(output.token_ids)
                for piece in output.emitted:
                    if piece.name == AUDIO and piece.array is not None:
                        talk.first = talk.first or talk.whole
                        talk.num_pieces += 1
                        talk.spoken += piece.array.shape[0] / piece.info["rate"]
        return talks

    def _prepared(self, question: AudioMedia, name: str, root: bytes | None) -> PreparedRequest:
        messages = [{"role": "user", "content": [{"type": "audio"}]}]
        draft = self._processor.chat(messages, [question], SPOKEN)
        return PreparedRequest(
            request_id=name,
            token_ids=[token for part in draft.parts for token in part],
            params=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
            root=root,
            context=list(draft.context),
            options=dict(draft.options),
        )


def run() -> list[dict[str, Any]]:
    """Return a row for each question, and for all of them one by one and at once."""
    desk = Desk()
    desk.talk(desk.questions[:1])
    alone: list[list[Talk]] = []
    together: list[list[Talk]] = []
    for _ in range(NUM_ROUNDS):
        alone.append([desk.talk([question])[0] for question in desk.questions])
        together.append(desk.talk(desk.questions))
    rows = [_row(text, list(talks)) for text, *talks in zip(QUESTIONS, *alone, strict=True)]
    after = [sum(talk.whole for talk in talks) for talks in alone]
    at_once = [max(talk.whole for talk in talks) for talks in together]
    ratios = [one / other for one, other in zip(after, at_once, strict=True)]
    faster = f"{sum(after) / sum(at_once):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
    whole = "whole answer (s)"
    rows.append(_row("all, one by one", list(chain(*alone))) | {whole: _mean(after)})
    rows.append(
        _row("all at once", list(chain(*together))) | {whole: _mean(at_once), "faster": faster}
    )
    return rows


def _mean(values: Iterable[float]) -> float:
    return round(float(np.mean(list(values))), 2)


def _row(name: str, talks: list[Talk]) -> dict[str, Any]:
    assert all(talk.num_pieces for talk in talks), "an answer was not spoken"
    return {
        "question": name,
        "first sound (s)": _mean(talk.first for talk in talks),
        "whole answer (s)": _mean(talk.whole for talk in talks),
        "share": _mean(talk.first / talk.whole for talk in talks),
        "tokens": _mean(talk.num_tokens for talk in talks),
        "pieces": _mean(talk.num_pieces for talk in talks),
        "spoken (s)": _mean(talk.spoken for talk in talks),
    }
