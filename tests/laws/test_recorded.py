"""Decode steps that are replayed give what steps give that are not.

The recorder is the engine's own; a graph computes anew when it is replayed, as in test_overlap.
"""

from collections.abc import Iterator

import pytest

from mstar.engine.capture import Recorder, decode_sizes
from mstar.engine.resources.mirror import Fence
from mstar.models.whisper.model import TRANSCRIPT
from tests.engine.test_overlap import CPU, CpuRecorder, as_on_a_device
from tests.laws.families import Family, family_of
from tests.laws.watching import Desk, RecordedWatcher, assert_same
from tests.models.whisper_folder import SLOTS

NAMES = ("whisper", "janus-paints")
"""Families with rules that go by tokens, and with a node of two streams beside another."""


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with as_on_a_device():
        yield


def recorded(family: Family, **numbers: int) -> tuple[Desk, list[Recorder]]:
    desk = Desk(family.model, attention_backend="sdpa", **numbers)
    runner = desk.engine._runner
    sent = Fence(CPU)
    for name, node in desk.watchers.items():
        if isinstance(node, RecordedWatcher):
            resources = {key: runner.resources[key] for key in runner._keys_of[name]}
            recorder = CpuRecorder(name, node, resources, CPU, sent)
            recorder.record(decode_sizes(desk.engine.deployment.max_num_seqs))
            runner._recorders[name] = recorder
    return desk, list(runner._recorders.values())


def assert_alike(desk: Desk, plain: Desk, family: Family) -> None:
    """Ask both desks all that a family is asked, and compare the answers."""
    for place, ask in enumerate(family.asks):
        desk.add(str(place), ask)
        plain.add(str(place), ask)
    answers, known = desk.drain(), plain.drain()
    for key, answer in answers.items():
        assert_same(answer, known[key])


def assert_nothing_is_known(family: Family) -> None:
    """Assert that nobody keeps how sure a Whisper was of requests that have ended."""
    facts = getattr(family.model, "facts", ())
    assert len(facts) == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [2048, 33])
def test_requests_get_what_they_get_step_by_step(name: str, budget: int) -> None:
    family = family_of(name)
    desk, recorders = recorded(family, max_num_batched_tokens=budget)
    plain = Desk(family.model, attention_backend="sdpa", max_num_batched_tokens=budget)
    for turn in range(2):
        # The second time pages are there, and what is left of prompts may be single tokens.
        assert_alike(desk, plain, family)
        assert all(recorder.num_replays > 5 * (turn + 1) for recorder in recorders)
    assert any(recorder.num_ahead > 0 for recorder in recorders)
    assert desk.largest_batch > 2
    assert_nothing_is_known(family)


@pytest.mark.parametrize("name", NAMES)
def test_one_that_is_aborted_leaves_the_others_as_they_are(name: str) -> None:
    family = family_of(name)
    desk, recorders = recorded(family)
    for place, ask in enumerate(family.asks):
        desk.add(str(place), ask)
    while sum(recorder.num_replays for recorder in recorders) < 3:
        desk.step()
    desk.abort("0")
    answers = desk.drain()
    assert_nothing_is_known(family)
    for key, answer in answers.items():
        plain = Desk(family.model, attention_backend="sdpa")
        assert_same(answer, plain.ask(family.asks[int(key)], name=key))


@pytest.mark.parametrize("name", NAMES)
def test_what_follows_a_cached_prompt_is_replayed_or_not_alike(name: str) -> None:
    family = family_of(name)
    desk, _ = recorded(family)
    plain = Desk(family.model, attention_backend="sdpa")
    ask = family.at(family.offsets[-1], 1, 1)
    for _ in range(2):
        assert_same(desk.ask(ask), plain.ask(ask))


def test_what_was_launched_for_a_window_is_not_read_for_the_next() -> None:
    """Pages of one slot leave one token of every prompt to compute, as in a decode step."""
    family = family_of("whisper")
    desk, (recorder,) = recorded(family, page_size=1)
    plain = Desk(family.model, attention_backend="sdpa", page_size=1)
    for ask in family.asks:
        for _ in range(2):
            ahead = recorder.num_ahead
            assert_same(desk.ask(ask), plain.ask(ask))
            assert recorder.num_ahead > ahead


@pytest.mark.parametrize("budget", [2048, SLOTS])
def test_prompts_of_few_tokens_are_replayed_as_so_many_segments(
    monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    family = family_of("whisper")
    numbers = {"max_num_seqs": 64, "max_num_batched_tokens": budget}
    desk, (recorder,) = recorded(family, **numbers)
    plain = Desk(family.model, attention_backend="sdpa", **numbers)

    def refuse(*_: object) -> None:
        raise AssertionError("a step was not replayed")

    monkeypatch.setattr(desk.watchers["decoder"], "forward", refuse)
    assert_alike(desk, plain, family)
    assert recorder.num_replays > recorder.num_ahead > 0


@pytest.mark.slow
def test_a_listener_inside_another_model_is_replayed_alike() -> None:
    family = family_of("assistant")
    ask = family.asks[-1]
    desk, recorders = recorded(family, **family.numbers)
    answer = desk.ask(ask)
    assert all(recorder.num_ahead > 0 for recorder in recorders)
    assert len(recorders) == 2
    plain = Desk(family.model, attention_backend="sdpa", **family.numbers)
    assert_same(answer, plain.ask(ask), family.atol)
    assert all(
        "no_speech_prob" in piece.info for piece in answer.emitted if piece.name == TRANSCRIPT
    )
