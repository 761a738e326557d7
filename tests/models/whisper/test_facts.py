"""How sure a Whisper was of a window, against float64 sums over the logits of transformers."""

import math
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

from mstar.engine.engine import EngineCore
from mstar.engine.output import Emitted
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.models import load_model
from mstar.models.locate import resolve
from mstar.models.whisper.model import WhisperModel
from mstar.models.whisper.rules import Asked, Rules
from mstar.preprocess.media.types import AudioMedia
from mstar.preprocess.processors.base import TranscriptionTask
from mstar.preprocess.processors.whisper import build
from mstar.preprocess.tokenizer import TextTokenizer
from tests.laws.families import family_of
from tests.laws.watching import Ask, Desk
from tests.models.whisper_folder import END, FRAMES, MELS, START, VOCAB, tokenizer
from tests.oracles.whisper_folder import RATE, recording, require

NO_SPEECH = 67
FIGURES = ("avg_logprob", "no_speech_prob", "compression_ratio")


def whisper() -> WhisperModel:
    model = family_of("whisper").model
    assert isinstance(model, WhisperModel)
    return model


def figures(pieces: list[Emitted]) -> list[float]:
    return [piece.info[name] for piece in pieces for name in FIGURES]


def windows(pieces: list[Emitted]) -> list[list[Emitted]]:
    """Return pieces by the window that they were heard in."""
    seeks = sorted({piece.info["seek"] for piece in pieces})
    return [[piece for piece in pieces if piece.info["seek"] == seek] for seek in seeks]


def window_of(ask: Ask) -> tuple[list[int], torch.Tensor, dict[str, Any]]:
    """Return the prompt of a request of one window, its features in float64, and its options."""
    prepared = ask("r", None)
    features = np.frombuffer(prepared.context[0].inputs["features"].data, np.float32)
    window = torch.from_numpy(features.reshape(MELS, -1)[:, :FRAMES].copy()).double()
    return prepared.token_ids, window[None], prepared.options


@pytest.mark.parametrize("budget", [None, 33])
def test_figures_are_those_of_the_whole_models_logits_in_float64(budget: int | None) -> None:
    family = family_of("whisper")
    model = whisper()
    oracle: Any = WhisperForConditionalGeneration.from_pretrained(family.folder).double()
    asks = [ask for ask in family.asks if ask("r", None).options["language"] is not None]
    asks = [ask for ask in asks if ask("r", None).options["num_frames"] <= FRAMES]
    asks += [family.at(1, 0, 0), family.at(9, 1, 1)]
    desk = Desk(model, **({} if budget is None else {"max_num_batched_tokens": budget}))
    for place, ask in enumerate(asks):
        desk.add(str(place), ask)
    answers = desk.drain()
    letters = tokenizer()
    rules = Rules(model.tokens, VOCAB, torch.device("cpu"))
    for place, ask in enumerate(asks):
        prompt, features, options = window_of(ask)
        chosen = answers[str(place)].chosen
        stream = torch.tensor([[*prompt, *chosen]])
        with torch.no_grad():
            logits = oracle(features, decoder_input_ids=stream).logits[0]
        begin = prompt.index(START)
        silent = logits[begin].softmax(0)[NO_SPEECH].item()
        total = 0.0
        for step, token in enumerate(chosen):
            row = logits[len(prompt) - 1 + step].clone()
            rules.restrict_(row[None], [Asked(chosen[:step], options["timestamps"])])
            total += row.log_softmax(0)[token].item()
        said = [token for token in chosen if token != END]
        (piece,) = answers[str(place)].emitted
        assert piece.info["avg_logprob"] == pytest.approx(total / (len(said) + 1), abs=1e-4)
        assert piece.info["no_speech_prob"] == pytest.approx(silent, abs=1e-4)
        # The window's text, be there more than its stretches have kept.
        text = letters.decode([token for token in said if token < END]).strip().encode()
        assert piece.info["compression_ratio"] == len(text) / len(zlib.compress(text))


def test_windows_have_figures_of_their_own_and_stretches_those_of_their_window() -> None:
    family = family_of("whisper")
    (long,) = (ask for ask in family.asks if ask("r", None).options["num_frames"] == 130)
    pieces = Desk(whisper()).ask(long).emitted
    found = windows(pieces)
    assert len(found) >= 130 // FRAMES
    of_windows = [{tuple(figures([piece])) for piece in window} for window in found]
    assert all(len(own) == 1 for own in of_windows)
    assert len(set.union(*of_windows)) > 1
    times = [piece.info[side] for piece in pieces for side in ("start", "end")]
    assert times == [float(f"{time:.2f}") for time in times]


def test_a_window_whose_first_tokens_were_reused_knows_as_much() -> None:
    ask = family_of("whisper").at(9, 0, 0)
    desk = Desk(whisper())
    first, again = desk.ask(ask), desk.ask(ask)
    prompt = ask("r", None).token_ids
    assert again.num_cached_tokens > prompt.index(START)
    assert figures(again.emitted) == pytest.approx(figures(first.emitted), abs=1e-5)


def test_a_start_that_the_language_was_asked_with_is_known() -> None:
    """With pages of one slot the transcript reuses the one token that a language is asked with."""
    options = ((ask, ask("r", None).options) for ask in family_of("whisper").asks)
    ask = next(ask for ask, own in options if own["language"] is None and not own["previous"])
    desk = Desk(whisper(), page_size=1)
    desk.put(msgspec.structs.replace(ask("r", desk.engine.root), page_keys=[]))
    answer = desk.drain()["r"]
    known = Desk(whisper()).ask(ask)
    assert figures(answer.emitted) == pytest.approx(figures(known.emitted), abs=1e-5)


def test_what_was_never_computed_is_not_told() -> None:
    ask = family_of("whisper").at(9, 1, 0)
    model = whisper()
    desk = Desk(model)
    desk.ask(ask)
    model.facts._known.clear()
    piece, *_ = desk.ask(ask).emitted
    assert "no_speech_prob" not in piece.info
    assert piece.info["avg_logprob"] < 0


def test_the_known_are_bounded_and_tenants_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstar.models.whisper.facts._MAX_KNOWN", 2)
    model, family = whisper(), family_of("whisper")
    known = model.facts._known
    known.clear()
    desk, ask = Desk(model), family.at(9, 0, 0)
    desk.ask(ask, "a")
    desk.ask(ask, "b")
    assert len(known) == 2
    desk.ask(family.at(8, 0, 1), "b")
    assert len(known) == 2


def test_nothing_is_kept_of_requests_that_ended_in_whatever_way() -> None:
    model, family = whisper(), family_of("whisper")
    desk, facts = Desk(model), model.facts
    for place, ask in enumerate(family.asks):
        desk.add(str(place), ask)
    for _ in range(12):
        desk.step()
    assert len(facts) > 1
    desk.abort("0")
    desk.drain()
    assert len(facts) == 0


@pytest.mark.slow
def test_silence_is_told_from_speech() -> None:
    require("whisper-base")
    model, _ = load_model("whisper-base", dtype="float32")
    folder = resolve("whisper-base")
    processor = build(folder, {}, TextTokenizer.load(folder))
    engine = EngineCore(model, Deployment(dtype="float32"))

    def heard(samples: Any) -> dict[str, Any]:
        draft = processor.transcription(AudioMedia(samples, RATE), TranscriptionTask(language="en"))
        (ids,) = draft.parts
        engine.add_request(
            msgspec.structs.replace(
                family_of("whisper").asks[0]("r", None),
                token_ids=ids,
                params=SamplingParams(temperature=0.0, max_tokens=40),
                context=list(draft.context),
                options=dict(draft.options),
            )
        )
        pieces = []
        while engine.has_work:
            pieces += [piece for output in engine.step() for piece in output.emitted]
        return pieces[0].info

    silence, speech = heard(np.zeros(5 * RATE, np.float32)), heard(recording("beckett"))
    assert silence["no_speech_prob"] > 0.6
    assert speech["no_speech_prob"] < 0.2
    assert math.exp(speech["avg_logprob"]) > 0.5
