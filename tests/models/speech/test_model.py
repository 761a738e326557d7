from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mstar.engine.array import to_numpy
from mstar.engine.engine import EngineCore
from mstar.engine.output import Emitted, RequestOutput
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import RequestError
from mstar.models import load_model
from mstar.models.onnx import OnnxSession
from mstar.models.speech.model import MAX_CHARS, SpeechModel
from mstar.models.speech.voice import OPENAI_VOICES, Delivery, Samples, Voice
from tests.models.onnx_graphs import scaled
from tests.models.speaking import piper_path
from tests.oracles.whisper import transcribe, words

TEXT = (
    "It is a truth, universally acknowledged. A man in possession of a good fortune must be in "
    "want of a wife! However little known his feelings are."
)
DEPLOYMENT = Deployment(enable_prefix_caching=False)


class _Letters(Voice):
    """Says each letter as one number, times the speed."""

    rate = 1_000
    speakers = ("ann", "bob")
    language = None

    def __init__(self) -> None:
        pytest.importorskip("onnxruntime")
        self.session = OnnxSession(scaled(), threads=1, name="letters")
        self.spoken: list[str] = []

    def feeds(self, text: str, delivery: Delivery) -> list[Any]:
        self.spoken.append(text)
        factor = np.array([delivery.speed * (1 + self.speakers.index(self.speaker(delivery)))])
        letters = [ord(letter) for letter in text if letter.isalpha()]
        x = np.array([letters], np.float32)
        return [{"x": x, "factor": factor.astype(np.float32)}] if letters else []

    def samples(self, fetched: Any) -> Samples:
        return np.asarray(fetched["y"].ravel(), np.float32)


@pytest.fixture
def engine() -> EngineCore:
    return EngineCore(SpeechModel("letters", _Letters()), DEPLOYMENT)


def _ask(engine: EngineCore, request_id: str = "a", **options: Any) -> None:
    engine.add_request(
        PreparedRequest(
            request_id=request_id, token_ids=[], params=SamplingParams(), options=options
        )
    )


def _run(engine: EngineCore) -> Iterator[RequestOutput]:
    while engine.has_work:
        yield from engine.step()


def _sound(emitted: Emitted) -> np.ndarray:
    assert emitted.name == "audio"
    assert emitted.array is not None
    return to_numpy(emitted.array)


def test_every_sentence_comes_out_before_the_next_is_begun() -> None:
    voice = _Letters()
    engine = EngineCore(SpeechModel("letters", voice), DEPLOYMENT)
    _ask(engine, input=TEXT)
    heard = []
    for output in _run(engine):
        for emitted in output.emitted:
            heard.append(emitted.info["text"])
            assert voice.spoken == heard
            assert emitted.info["rate"] == voice.rate
            assert len(_sound(emitted)) == sum(map(str.isalpha, emitted.info["text"]))
    assert len(heard) == 3
    assert "".join(heard) == TEXT


def test_only_the_last_output_says_that_it_is_the_last(engine: EngineCore) -> None:
    _ask(engine, input=TEXT)
    outputs = list(_run(engine))
    assert [output.finish_reason for output in outputs] == [None, None, "stop"]
    assert all(not output.token_ids and output.error is None for output in outputs)


def test_requests_side_by_side_get_what_each_gets_alone(engine: EngineCore) -> None:
    asked: dict[str, dict[str, Any]] = {
        "a": {"input": TEXT},
        "b": {"input": TEXT, "speech": {"voice": "bob", "speed": 2}},
        "c": {"input": "Hello."},
    }

    def answers(ids: str) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {request_id: [] for request_id in ids}
        for request_id in ids:
            _ask(engine, request_id, **asked[request_id])
        for output in _run(engine):
            for emitted in output.emitted:
                found[output.request_id] += _sound(emitted).tolist()
        return found

    together = answers("abc")
    assert together == {name: answers(name)[name] for name in "abc"}
    assert together["b"] == [4 * value for value in together["a"]]


def test_the_shorter_of_two_requests_does_not_wait_for_the_longer(engine: EngineCore) -> None:
    _ask(engine, "long", input="This is a sentence of its own. " * 20)
    _ask(engine, "short", input="Hello.")
    order = [output.request_id for output in _run(engine) if output.emitted]
    assert order.index("short") <= 2
    assert len(order) == 21


def test_text_with_nothing_to_say_ends_without_sound(engine: EngineCore) -> None:
    _ask(engine, input="... ?!")
    (output,) = _run(engine)
    assert output.emitted == []
    assert output.finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": " \n"}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x" * (MAX_CHARS + 1)}, "input"),
        ({"input": "x", "speech": {"voice": "eve"}}, "voice"),
        ({"input": "x", "speech": {"language": "fr"}}, "language"),
        ({"input": "x", "speech": {"speed": 0}}, "speed"),
    ],
)
def test_what_cannot_be_spoken_is_refused_when_it_arrives(
    engine: EngineCore, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        _ask(engine, **options)
    assert caught.value.param == param
    assert not engine.has_work


def test_a_prompt_of_tokens_is_refused(engine: EngineCore) -> None:
    request = PreparedRequest(
        request_id="a", token_ids=[1], params=SamplingParams(), options={"input": "x"}
    )
    with pytest.raises(RequestError):
        engine.add_request(request)


def test_a_graph_that_fails_ends_its_request_and_no_other(
    engine: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OnnxSession.run

    def failing(self: OnnxSession, feeds: Any) -> Any:
        if feeds["x"].shape[1] == 1:
            raise RuntimeError("letters failed: too short")
        return run(self, feeds)

    monkeypatch.setattr(OnnxSession, "run", failing)
    _ask(engine, "bad", input="x")
    _ask(engine, "good", input="Hello.")
    last = {output.request_id: output for output in _run(engine) if output.finish_reason}
    assert last["good"].finish_reason == "stop"
    error = last["bad"].error
    assert error is not None
    assert "letters failed: too short" in error.message


def test_an_aborted_request_says_no_more(engine: EngineCore) -> None:
    _ask(engine, input=TEXT)
    while not engine.step():
        pass
    assert engine.abort("a")
    assert not engine.has_work
    _ask(engine, input="Hello.")
    assert [output.finish_reason for output in _run(engine)] == ["stop"]


@pytest.mark.slow
def test_the_packaged_voice_is_a_model_that_is_understood() -> None:
    piper_path()
    model, dtype = load_model("piper")
    engine = EngineCore(model, Deployment(dtype=dtype, enable_prefix_caching=False))
    text = "This is the first sentence, spoken at once. And this is the second one."
    _ask(engine, input=text)
    pieces = [emitted for output in _run(engine) for emitted in output.emitted]
    assert len(pieces) == 2
    samples = np.concatenate([_sound(piece) for piece in pieces])
    assert words(transcribe(samples, pieces[0].info["rate"])) == words(text)


def test_names_of_openais_voices_and_none_are_the_models_own() -> None:
    voice = _Letters()
    own = voice.speak("ab")
    for name in (None, "", *OPENAI_VOICES):
        assert np.array_equal(voice.speak("ab", Delivery(voice=name)), own)
    with pytest.raises(RequestError, match=r"'carl'; letters has ann, bob; .* \"\""):
        voice.speak("ab", Delivery(voice="carl"))


def test_a_speaker_that_is_called_as_one_of_openais_voices_speaks() -> None:
    class Named(_Letters):
        speakers = ("ann", "echo")

    assert np.array_equal(
        Named().speak("ab", Delivery(voice="echo")), _Letters().speak("ab", Delivery(voice="bob"))
    )
