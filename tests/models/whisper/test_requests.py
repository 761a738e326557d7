"""What a Whisper is asked, and what it tells; the laws over it stand in ``tests/laws``."""

from typing import Any

import msgspec
import pytest

from mstar.engine.engine import EngineCore
from mstar.engine.memory import fit
from mstar.engine.resources.base import Deployment
from mstar.errors import ConfigError, RequestError
from tests.laws.families import family_of
from tests.laws.watching import PAGE_SIZE, Desk
from tests.models.whisper_folder import ENGLISH, FRAMES, GERMAN


def test_a_long_recording_is_written_down_window_by_window() -> None:
    family = family_of("whisper")
    (long,) = (ask for ask in family.asks if ask("r", None).options["num_frames"] == 130)
    answer = Desk(family.model).ask(long)
    starts = [piece.info["start"] for piece in answer.emitted]
    assert starts == sorted(starts)
    assert len(starts) >= 130 // FRAMES
    assert {piece.name for piece in answer.emitted} == {"transcript"}


def test_the_language_stays_inside_and_is_told_with_the_text() -> None:
    family = family_of("whisper")
    for ask in family.asks:
        options = ask("r", None).options
        answer = Desk(family.model).ask(ask)
        assert {ENGLISH, GERMAN}.isdisjoint(answer.tokens)
        is_detected = not {ENGLISH, GERMAN}.isdisjoint(answer.chosen)
        assert is_detected == (options["language"] is None)
        assert {piece.info["language"] for piece in answer.emitted} <= {"en", "de"}
        assert answer.emitted


def test_what_is_no_recording_is_refused() -> None:
    family = family_of("whisper")
    desk, whole = Desk(family.model), family.asks[0]("r", None)
    wrong: list[dict[str, Any]] = [
        {"options": {}},
        {"context": []},
        {"context": whole.context * 2},
    ]
    for change in wrong:
        with pytest.raises(RequestError, match="one recording"):
            desk.put(msgspec.structs.replace(whole, **change))
    assert not desk.engine.has_work


def test_a_trial_takes_the_largest_steps_and_ends() -> None:
    model = family_of("whisper").model
    started: list[EngineCore] = []

    def start(deployment: Deployment) -> EngineCore:
        started.append(EngineCore(model, deployment))
        return started[-1]

    def measure() -> tuple[int, int]:
        assert not started[-1].has_work
        counted = started[-1].stats()
        assert counted.generation_tokens > 0
        return 10**9, 10**9

    for max_model_len in (model.max_model_len, 20, 8):
        wanted = Deployment(max_model_len=max_model_len, max_num_seqs=3, page_size=PAGE_SIZE)
        assert (fit(wanted, model, start, measure).num_pages or 0) > 100
    wanted = Deployment(max_model_len=2, max_num_seqs=3, page_size=PAGE_SIZE)
    with pytest.raises(ConfigError, match="max_model_len 2 "):
        fit(wanted, model, start, measure)
