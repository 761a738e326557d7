"""Decode steps of a node that reads items are replayed, but where they read one.

The recorder is the engine's own; a graph computes anew when it is replayed, as in test_overlap.
"""

from collections.abc import Iterator

import pytest

from mstar.engine.capture import RecordableNode, decode_sizes
from mstar.engine.resources.mirror import Fence
from mstar.models.toy_items import toy_item_model
from tests.engine.test_overlap import CPU, CpuRecorder, as_on_a_device
from tests.laws.families import asking
from tests.laws.harness import Picture, prompt
from tests.laws.watching import Ask, Desk


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with as_on_a_device():
        yield


def recorded() -> tuple[Desk, CpuRecorder]:
    model = toy_item_model()
    desk = Desk(model, max_num_seqs=4, attention_backend="sdpa")
    runner = desk.engine._runner
    (name, *_) = model.nodes
    node = model.nodes[name]
    assert isinstance(node, RecordableNode)
    recorder = CpuRecorder(name, node, runner.resources, CPU, Fence(CPU))
    recorder.record(decode_sizes(4))
    runner._recorders[name] = recorder
    return desk, recorder


def alone(ask: Ask) -> list[int]:
    return Desk(toy_item_model(), enable_prefix_caching=False).ask(ask).tokens


ASKS = (
    asking(prompt(1, 3), Picture(1, 6).item(), prompt(2, 2), max_tokens=12),
    asking(prompt(3, 5), max_tokens=12),
    asking(prompt(4, 1), Picture(2, 3, is_whole=True).item(), prompt(5, 1), max_tokens=9),
)


def test_tokens_behind_items_are_those_of_steps_that_are_not_recorded() -> None:
    desk, recorder = recorded()
    for turn in range(2):
        for place, ask in enumerate(ASKS):
            desk.add(str(place), ask)
        answers = desk.drain()
        for place, ask in enumerate(ASKS):
            assert answers[str(place)].tokens == alone(ask)
        assert recorder.num_replays >= 10 * (turn + 1)
        assert recorder.num_ahead >= 8 * (turn + 1)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_single_token_that_is_an_items_last_slot_is_not_replayed(is_whole: bool) -> None:
    desk, recorder = recorded()
    ask = asking(prompt(6, 4), Picture(3, 1, is_whole).item(), max_tokens=3)
    first = desk.ask(ask)
    num_replays = recorder.num_replays
    again = desk.ask(ask)
    # All but the last slot was there, so that the prompt was a step of one token.
    assert again.num_cached_tokens == 4
    assert recorder.num_replays - num_replays == num_replays == 2
    assert first.tokens == again.tokens == alone(ask)
