"""Windows that repeat themselves or are unlikely are written down again, silent ones left out."""

from contextlib import closing
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mstar import Engine
from mstar.engine.request import PreparedRequest
from mstar.models.whisper.fallback import is_silent, is_worth_another, temperature_of
from mstar.preprocess.processors.base import TranscriptionTask
from tests.laws.families import family_of
from tests.laws.watching import Ask, Desk
from tests.models.whisper_folder import FRAMES
from tests.oracles.whisper_folder import RATE, recording, require

SURE = {"avg_logprob": -0.3, "compression_ratio": 1.5, "no_speech_prob": 0.9}


@pytest.mark.parametrize(
    ("change", "silent", "again"),
    [
        ({}, False, False),
        ({"avg_logprob": -1.1}, True, True),
        ({"avg_logprob": -1.1, "no_speech_prob": 0.5}, False, True),
        ({"avg_logprob": -0.9, "no_speech_prob": 1.0}, False, False),
        ({"compression_ratio": 2.5}, False, True),
        ({"compression_ratio": 2.3}, False, False),
    ],
)
def test_thresholds_are_the_papers(change: dict[str, float], silent: bool, again: bool) -> None:
    told = SURE | change
    assert is_silent(told) == silent
    for attempt in range(5):
        assert is_worth_another(attempt, told) == again
    assert not is_worth_another(5, told)


def test_what_is_not_known_of_silence_is_no_silence() -> None:
    assert not is_silent({"avg_logprob": -3.0, "compression_ratio": 1.0})


def test_temperatures_rise_to_one() -> None:
    assert [temperature_of(n) for n in range(6)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])


def changed(ask: Ask, temperature: float, **options: object) -> Ask:
    """The same request with other options."""

    def own(name: str, root: bytes | None) -> PreparedRequest:
        before = ask(name, root)
        params = replace(before.params, temperature=temperature)
        return msgspec.structs.replace(before, params=params, options=before.options | options)

    return own


@pytest.fixture
def unsure() -> Ask:
    """A request of several windows that drawn weights are unsure of."""
    (ask,) = (ask for ask in family_of("whisper").asks if ask("r", None).options["fallback"])
    return ask


def test_a_window_that_stays_unlikely_is_what_the_last_attempt_says(unsure: Ask) -> None:
    desk = Desk(family_of("whisper").model)
    got, known = desk.ask(unsure), desk.ask(changed(unsure, 1.0, fallback=False))
    assert [piece.info["temperature"] for piece in got.emitted] == [1.0] * len(got.emitted)
    assert len({piece.info["seek"] for piece in got.emitted}) > 1
    assert got.emitted == known.emitted
    greedy = desk.ask(changed(unsure, 0.0, fallback=False))
    assert got.tokens[:3] == greedy.tokens[:3] != known.tokens[:3]
    assert len(got.tokens) > 4 * len(known.tokens)


def test_the_same_recording_is_written_down_the_same_way_without_a_seed(unsure: Ask) -> None:
    def seedless(name: str, root: bytes | None) -> PreparedRequest:
        before = unsure(name, root)
        return msgspec.structs.replace(before, params=replace(before.params, seed=None))

    first, again = (Desk(family_of("whisper").model).ask(seedless) for _ in range(2))
    assert first.tokens == again.tokens
    assert first.tokens != Desk(family_of("whisper").model).ask(unsure).tokens


def test_a_temperature_that_is_asked_for_is_kept(unsure: Ask) -> None:
    desk = Desk(family_of("whisper").model)
    got, known = (desk.ask(changed(unsure, 0.7, fallback=fallback)) for fallback in (True, False))
    assert got.tokens == known.tokens
    assert {piece.info["temperature"] for piece in got.emitted} == {0.7}


def test_silent_windows_say_nothing_and_the_next_begins_behind_them(
    monkeypatch: pytest.MonkeyPatch, unsure: Ask
) -> None:
    monkeypatch.setattr("mstar.models.whisper.fallback._MIN_NO_SPEECH", -1.0)
    desk = Desk(family_of("whisper").model)
    answer = desk.ask(unsure)
    num_frames = unsure("r", None).options["num_frames"]
    assert answer.emitted == []
    assert answer.finish_reason in {"stop", "length"}
    # A window gives ten tokens at most, or its end.
    assert len(answer.tokens) <= 10 * -(-num_frames // FRAMES)


@pytest.mark.slow
def test_noise_says_nothing_and_what_repeats_itself_is_not_kept() -> None:
    require("whisper-tiny.en")
    engine = Engine("whisper-tiny.en", dtype="float32")
    noise = 0.1 * np.random.default_rng(0).standard_normal(80_000)
    pitches = 300 + 200 * np.sin(np.arange(320_000) / 900)
    howl = 0.3 * np.sign(np.sin(2 * np.pi * np.cumsum(pitches) / RATE))
    plain = TranscriptionTask(fallback=False)
    with closing(engine):
        for samples, is_long in ((noise, False), (howl, True)):
            heard = engine.transcribe(samples.astype(np.float32), rate=RATE, task=plain).text
            assert heard
            assert (len(heard) > 500) == is_long
            own = engine.transcribe(samples.astype(np.float32), rate=RATE)
            assert not any(s.facts["compression_ratio"] > 2.4 for s in own.stretches)
            assert is_long or own.text == ""
        said = recording("beckett")
        told = [engine.transcribe(said, rate=RATE, task=task) for task in (None, plain)]
        assert told[0] == told[1]
