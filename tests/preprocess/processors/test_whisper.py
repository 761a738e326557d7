"""What a Whisper is given: features, prompt and options."""

from typing import Any

import numpy as np
import pytest

from mstar.errors import RequestError
from mstar.models.locate import resolve
from mstar.preprocess.media.types import AudioMedia
from mstar.preprocess.mel import log_mel
from mstar.preprocess.processors.base import Draft, Transcriber, TranscriptionTask
from mstar.preprocess.processors.whisper import WhisperProcessor, build
from mstar.preprocess.tokenizer import TextTokenizer
from tests.oracles.whisper_folder import RATE, features, require

NOISE = np.random.default_rng(0).standard_normal(31 * RATE).astype(np.float32) * 0.1


def processor_of(name: str) -> WhisperProcessor:
    require(name)
    folder = resolve(name)
    return build(folder, {}, TextTokenizer.load(folder))


@pytest.fixture(scope="module")
def english() -> WhisperProcessor:
    return processor_of("whisper-tiny.en")


@pytest.fixture(scope="module")
def several() -> WhisperProcessor:
    return processor_of("whisper-base")


def draft_of(processor: WhisperProcessor, num_samples: int = RATE, **task: Any) -> Draft:
    audio = AudioMedia(NOISE[:num_samples], RATE)
    return processor.transcription(audio, TranscriptionTask(**task))


def ids_of(draft: Draft) -> list[int]:
    (ids,) = draft.parts
    assert isinstance(ids, list)
    return ids


@pytest.mark.parametrize("seconds", [31, 12])
def test_features_are_those_of_transformers(seconds: int) -> None:
    samples = NOISE[: seconds * RATE].copy()
    samples[5 * RATE : 9 * RATE] = 0.0
    padded = np.pad(samples, (0, max(0, 30 * RATE - len(samples))))
    difference = np.abs(log_mel(padded, 80) - features(samples)[0].numpy())
    assert difference.max() < 1e-4
    assert difference.mean() < 1e-6


def test_features_do_not_depend_on_the_blocks_they_are_made_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = log_mel(NOISE[:RATE], 80)
    monkeypatch.setattr("mstar.preprocess.mel._BLOCK", 7)
    np.testing.assert_allclose(log_mel(NOISE[:RATE], 80), whole, atol=1e-5)


def test_a_short_recording_fills_a_window_and_a_long_one_is_whole(
    english: WhisperProcessor,
) -> None:
    assert isinstance(english, Transcriber)
    for num_samples, num_frames, stop_frame in (
        (1, 3000, 1),
        (RATE, 3000, 100),
        (30 * RATE, 3000, 3000),
        (30 * RATE + 161, 3001, 3001),
    ):
        draft = draft_of(english, num_samples)
        (item,) = draft.context
        assert item.inputs["features"].shape == (80, num_frames)
        assert item.length == 1500
        assert draft.options["num_frames"] == num_frames
        assert draft.options["stop_frame"] == stop_frame
        assert draft.options["timestamps"] == (num_samples > 30 * RATE)


def test_prompts_name_task_and_language(
    english: WhisperProcessor, several: WhisperProcessor
) -> None:
    assert ids_of(draft_of(english)) == [50257, 50362]
    assert ids_of(draft_of(english, language="EN")) == [50257, 50362]
    # Without a language the model is asked for it first.
    assert ids_of(draft_of(several)) == [50258]
    assert ids_of(draft_of(several, language="de")) == [50258, 50261, 50359, 50363]
    segments = frozenset({"segment"})
    timed = draft_of(several, language="en", translate=True, timestamps=segments)
    assert ids_of(timed) == [50258, 50259, 50358]
    assert ids_of(draft_of(several, language="German")) == ids_of(draft_of(several, language="de"))
    said = draft_of(several, language="en", prompt=" Hello. ")
    assert ids_of(said) == [50361, 2425, 13, 50258, 50259, 50359, 50363]


def test_names_tell_recordings_apart_and_nothing_else(
    english: WhisperProcessor, several: WhisperProcessor
) -> None:
    def name(processor: WhisperProcessor, *given: Any, **task: Any) -> bytes:
        return draft_of(processor, *given, **task).context[0].digest

    own = name(several)
    assert own == name(several, prompt="Hello", language="de", translate=True)
    assert len({own, name(several, RATE - 1), name(several, RATE + 1)}) == 3


def test_what_the_model_cannot_do_is_refused(
    english: WhisperProcessor, several: WhisperProcessor
) -> None:
    wrong: list[tuple[WhisperProcessor, dict[str, Any], str]] = [
        (english, {"language": "de"}, "language"),
        (several, {"language": "xx"}, "language"),
        (english, {"translate": True}, "model"),
        (several, {"timestamps": frozenset({"word"})}, "timestamp_granularities"),
    ]
    for processor, task, param in wrong:
        with pytest.raises(RequestError) as caught:
            draft_of(processor, **task)
        assert caught.value.param == param
