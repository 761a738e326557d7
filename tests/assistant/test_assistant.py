"""The voice assistant out of real weights, in one engine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from mstar.assistant.model import VoiceAssistant
from mstar.catalog import load_model, load_prompting
from mstar.engine.array import to_numpy
from mstar.engine.engine import EngineCore
from mstar.engine.output import RequestOutput
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import ModelNotFoundError, UnsupportedError
from mstar.preprocess.answer_text import AnswerText
from mstar.preprocess.detokenizer import Detokenizer
from mstar.preprocess.media.types import AudioMedia, Media
from mstar.preprocess.processors.base import ChatTask, Draft, SpeechTask, TranscriptionTask
from mstar.preprocess.prompt import request_root

soxr = pytest.importorskip("soxr")
pytestmark = pytest.mark.slow

QUESTIONS = ("What is the capital of France?", "How many legs does a spider have?")
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


class Desk:
    """The assistant with what prepares its requests."""

    def __init__(self) -> None:
        try:
            model, self.dtype = load_model("voice", dtype="float32")
            self.tokenizer, processor = load_prompting("voice")
        except (ModelNotFoundError, UnsupportedError) as error:
            pytest.skip(str(error))
        assert isinstance(model, VoiceAssistant)
        self.model = model
        self.processor: Any = processor

    def engine(self, **numbers: Any) -> EngineCore:
        defaults: dict[str, Any] = {"max_num_seqs": 8, "kv_cache_bytes": 1 << 27}
        return EngineCore(self.model, Deployment(dtype=self.dtype, **(defaults | numbers)))

    def said(self, text: str) -> AudioMedia:
        """Return a text as the assistant's own voice says it, as the listener wants it."""
        voice = self.model.speaker.voice
        samples = soxr.resample(voice.speak(text), voice.rate, self.processor.rate)
        return AudioMedia(samples.astype(np.float32), self.processor.rate)

    def chat(
        self,
        engine: EngineCore,
        messages: Sequence[dict[str, Any]],
        media: Sequence[Media] = (),
        *,
        name: str = "r",
        is_spoken: bool = False,
        salt: str | None = None,
    ) -> PreparedRequest:
        modalities = {"text", "audio"} if is_spoken else {"text"}
        draft = self.processor.chat(messages, media, ChatTask(modalities=frozenset(modalities)))
        return self.prepared(engine, draft, name, salt)

    def prepared(
        self, engine: EngineCore, draft: Draft, name: str = "r", salt: str | None = None
    ) -> PreparedRequest:
        return PreparedRequest(
            request_id=name,
            token_ids=[token for part in draft.parts if isinstance(part, list) for token in part],
            params=GREEDY,
            root=request_root(engine.root, salt),
            context=list(draft.context),
            options=dict(draft.options),
        )

    def answer(self, question: str, engine: EngineCore | None = None) -> list[int]:
        """Return what the language model writes when it is asked in writing."""
        engine = engine or self.engine()
        engine.add_request(self.chat(engine, [{"role": "user", "content": question}]))
        return ids_of(finish(engine)["r"])


@pytest.fixture(scope="module")
def desk() -> Desk:
    return Desk()


def finish(engine: EngineCore) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    engine.check()
    return outputs


def ids_of(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def texts(outputs: Sequence[RequestOutput], name: str) -> list[str]:
    return [
        (piece.text or piece.info.get("text", "")).strip()
        for output in outputs
        for piece in output.emitted
        if piece.name == name
    ]


def sound(outputs: Sequence[RequestOutput]) -> np.ndarray[Any, np.dtype[np.float32]]:
    pieces = [p for output in outputs for p in output.emitted if p.name == "audio"]
    arrays = [to_numpy(piece.array) for piece in pieces if piece.array is not None]
    return np.concatenate(arrays) if arrays else np.zeros(0, np.float32)


HEARD = [{"role": "user", "content": [{"type": "audio"}]}]


def words(text: str) -> list[str]:
    return "".join(c.lower() if c.isalnum() else " " for c in text).split()


def test_a_spoken_question_gets_the_answer_of_the_written_one(desk: Desk) -> None:
    engine = desk.engine()
    for question in QUESTIONS:
        engine.add_request(desk.chat(engine, HEARD, [desk.said(question)]))
        outputs = finish(engine)["r"]
        (heard,) = texts(outputs, "transcript")
        assert words(heard) == words(question)
        assert ids_of(outputs) == desk.answer(heard)
        assert not texts(outputs, "audio")


def test_a_spoken_answer_read_back_is_what_was_written(desk: Desk) -> None:
    engine = desk.engine()
    engine.add_request(
        desk.chat(engine, HEARD, [desk.said("What colour is the sky?")], is_spoken=True)
    )
    outputs = finish(engine)["r"]
    written = desk.tokenizer.decode(ids_of(outputs), skip_special_tokens=True)
    assert words(" ".join(texts(outputs, "audio"))) == words(written)
    samples = soxr.resample(sound(outputs), desk.model.speaker.voice.rate, desk.processor.rate)
    task = TranscriptionTask(language="en")
    draft = desk.processor.transcription(
        AudioMedia(samples.astype(np.float32), desk.processor.rate), task
    )
    engine.add_request(desk.prepared(engine, draft))
    back = " ".join(texts(finish(engine)["r"], "transcript"))
    assert words(back) == words(written)


def test_the_first_sentence_is_heard_while_the_next_is_written(desk: Desk) -> None:
    engine = desk.engine()
    request = desk.chat(
        engine, [{"role": "user", "content": "Tell me about spiders."}], is_spoken=True
    )
    engine.add_request(request)
    outputs = finish(engine)["r"]
    kinds = ["audio" if output.emitted else "text" for output in outputs]
    first = kinds.index("audio")
    assert "text" in kinds[first:]
    assert len(texts(outputs, "audio")) >= 2
    assert [output.finish_reason is None for output in outputs] == [True] * (len(outputs) - 1) + [
        False
    ]


def test_a_stop_string_ends_what_is_written_and_what_stands_before_it_is_said(desk: Desk) -> None:
    engine = desk.engine()
    messages = [{"role": "user", "content": "Tell me about spiders."}]
    whole = desk.tokenizer.decode(desk.answer("Tell me about spiders."), skip_special_tokens=True)
    stop = words(whole)[-3]
    before = whole[: whole.index(f" {stop}")]
    for is_spoken in (True, False):
        request = desk.chat(engine, messages, is_spoken=is_spoken)
        params = replace(GREEDY, stop=(f" {stop}",))
        engine.add_request(msgspec.structs.replace(request, params=params))
        answer = AnswerText(Detokenizer(desk.tokenizer, params.stop), is_spoken=is_spoken)
        pieces, outputs = [], []
        while engine.has_work:
            for output in engine.step():
                outputs.append(output)
                pieces.append(answer.push(output))
                if answer.is_cut:
                    engine.abort("r")
        assert "".join(piece.text for piece in pieces) == before
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
        assert words(" ".join(texts(outputs, "audio"))) == (words(before) if is_spoken else [])
        assert len(ids_of(outputs)) < 40
    params = replace(GREEDY, stop=(" ",), min_tokens=20)
    engine.add_request(
        msgspec.structs.replace(desk.chat(engine, messages, is_spoken=True), params=params)
    )
    assert 20 < len(ids_of(finish(engine)["r"])) < 30


def test_a_stop_token_is_neither_written_nor_said(desk: Desk) -> None:
    engine = desk.engine()
    messages = [{"role": "user", "content": "Tell me about spiders."}]
    ids = desk.answer("Tell me about spiders.")
    number = next(n for n in range(10, len(ids)) if ids[n] not in ids[:n])
    params = replace(GREEDY, stop_token_ids=(ids[number],))
    before = desk.tokenizer.decode(ids[:number], skip_special_tokens=True)
    for is_spoken in (True, False):
        request = desk.chat(engine, messages, is_spoken=is_spoken)
        engine.add_request(msgspec.structs.replace(request, params=params))
        outputs = finish(engine)["r"]
        answer = AnswerText(Detokenizer(desk.tokenizer), is_spoken=is_spoken)
        assert "".join(answer.push(output).text for output in outputs) == before
        assert ids_of(outputs) == ids[: number + 1]
        assert words(" ".join(texts(outputs, "audio"))) == (words(before) if is_spoken else [])


def test_conversations_at_once_get_what_each_gets_alone(desk: Desk) -> None:
    alone: dict[str, list[RequestOutput]] = {}
    for name, question in zip("ab", QUESTIONS, strict=True):
        engine = desk.engine()
        engine.add_request(
            desk.chat(engine, HEARD, [desk.said(question)], name=name, is_spoken=True)
        )
        alone |= finish(engine)
    engine = desk.engine()
    for name, question in zip("abcd", QUESTIONS * 2, strict=True):
        engine.add_request(
            desk.chat(engine, HEARD, [desk.said(question)], name=name, is_spoken=True)
        )
    together = finish(engine)
    for name, twin in zip("abcd", "abab", strict=True):
        assert ids_of(together[name]) == ids_of(alone[twin])
        assert np.array_equal(sound(together[name]), sound(alone[twin]))


def test_several_recordings_stand_where_they_were_said(desk: Desk) -> None:
    engine = desk.engine()
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "audio"}]},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": [{"type": "text", "text": "And now:"}, {"type": "audio"}]},
    ]
    media = [desk.said(question) for question in QUESTIONS]
    engine.add_request(desk.chat(engine, messages, media))
    outputs = finish(engine)["r"]
    first, second = texts(outputs, "transcript")
    written = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": f"And now:\n{second}"},
    ]
    engine.add_request(desk.chat(engine, written))
    assert ids_of(outputs) == ids_of(finish(engine)["r"])


def test_the_same_recording_is_encoded_once_for_a_tenant_and_not_for_another(desk: Desk) -> None:
    engine = desk.engine()
    encoder: Any = desk.model.nodes["listen.encoder"]
    recording = desk.said(QUESTIONS[0])
    counts, cached = [], []
    for salt in ("one", "one", "two"):
        before = encoder.inner.num_encoded
        engine.add_request(desk.chat(engine, HEARD, [recording], salt=salt))
        outputs = finish(engine)["r"]
        counts.append(encoder.inner.num_encoded - before)
        cached.append(outputs[-1].num_cached_tokens)
    assert counts == [1, 0, 1]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


def test_an_abort_while_it_speaks_leaves_nothing_behind(desk: Desk) -> None:
    engine = desk.engine()
    engine.add_request(desk.chat(engine, HEARD, [desk.said(QUESTIONS[0])], is_spoken=True))
    while not any(output.token_ids for output in engine.step()):
        pass
    assert engine.abort("r")
    engine.check()
    stats = engine.stats()
    assert (stats.num_running, stats.num_pages_used) == (0, 0)
    assert desk.answer(QUESTIONS[1], engine) == desk.answer(QUESTIONS[1])


def test_an_abort_while_it_listens_leaves_nothing_with_the_listener(desk: Desk) -> None:
    engine = desk.engine()
    engine.add_request(desk.chat(engine, HEARD, [desk.said(QUESTIONS[0])]))
    facts = desk.model.listener.facts
    while not len(facts):
        assert engine.step() is not None
    assert engine.abort("r")
    assert len(facts) == 0
    engine.add_request(desk.chat(engine, HEARD, [desk.said(QUESTIONS[0])]))
    (heard,) = [p for output in finish(engine)["r"] for p in output.emitted]
    assert heard.info["avg_logprob"] > -1
    assert heard.info["no_speech_prob"] < 0.5
    assert len(facts) == 0


def test_a_chat_too_long_with_what_was_said_ends_with_the_reason(desk: Desk) -> None:
    engine = desk.engine(max_model_len=80)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "word " * 60}, {"type": "audio"}]}
    ]
    engine.add_request(desk.chat(engine, messages, [desk.said(QUESTIONS[0])]))
    last = finish(engine)["r"][-1]
    assert last.error is not None
    assert last.error.code == "context_length_exceeded"
    assert "99 tokens and the context holds 80" in last.error.message
    assert texts([last], "transcript"), "what was heard is told all the same"


def test_a_text_alone_is_spoken_as_it_is(desk: Desk) -> None:
    engine = desk.engine()
    draft = desk.processor.speech("Good morning. How are you?", SpeechTask())
    engine.add_request(desk.prepared(engine, draft))
    outputs = finish(engine)["r"]
    assert texts(outputs, "audio") == ["Good morning.", "How are you?"]
    voice = desk.model.speaker.voice
    whole = np.concatenate([voice.speak("Good morning. "), voice.speak("How are you?")])
    assert np.array_equal(sound(outputs), whole)


def test_what_a_chat_reuses_is_told_by_the_cache_that_it_is_in_alone(desk: Desk) -> None:
    engine = desk.engine()
    messages = [{"role": "user", "content": "What colour is the sky? " * 8}]
    request = desk.chat(engine, messages)
    engine.add_request(request)
    finish(engine)
    again = msgspec.structs.replace(request, request_id="again")
    foretold = engine.explain(again)
    engine.add_request(again)
    (cached,) = {output.num_cached_tokens for output in finish(engine)["again"]}
    assert cached >= len(request.token_ids) - engine.deployment.page_size > 0
    for told in (foretold, engine.explain_request("again")):
        assert told is not None
        assert [(key, report.num_matched_tokens) for key, report in told.items()] == [
            ("answer.kv", cached)
        ]
