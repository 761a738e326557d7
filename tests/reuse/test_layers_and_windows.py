"""Layers that see a part of what is kept."""

import pytest

from mstar.models.decoder import DecoderModel
from mstar.models.toy import toy_model
from tests.laws.harness import PAGE_SIZE, Bench, ask, assert_same, prompt
from tests.reuse.bench import CASES, WINDOW, evict, turn


@pytest.fixture
def windowed() -> DecoderModel:
    architecture, changes = CASES["windowed"]
    return toy_model(7, architecture, **changes)


@pytest.mark.parametrize("shared", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 5 * WINDOW + 3])
def test_pages_that_left_the_window_are_reused_and_answers_stay(
    windowed: DecoderModel, shared: int
) -> None:
    """Prefixes beyond the window were once not reused at all, or read where none were kept."""
    first = prompt(1, shared) + prompt(2, 6)
    second = prompt(1, shared) + prompt(3, 9)
    cold = ask(windowed, second)
    bench = Bench(windowed)
    turn(bench, first)
    answer = turn(bench, second)
    assert answer.num_cached_tokens == shared // PAGE_SIZE * PAGE_SIZE
    assert_same(answer, cold)
    # The windows do matter: with wider ones the same weights say something else.
    architecture, changes = CASES["windowed"]
    wide = toy_model(7, architecture, **{**changes, "sliding_window": 200})
    is_same = bool((ask(wide, second).logits - cold.logits).abs().max() < 1e-3)
    assert not is_same


@pytest.mark.parametrize("num_evicted", range(1, 10, 2))
def test_windowed_layers_and_full_ones_lose_the_same_pages(
    windowed: DecoderModel, num_evicted: int
) -> None:
    """A hit that only the windowed layers could serve would leave the full ones without pages."""
    ids = prompt(4, 10 * PAGE_SIZE + 1)
    bench = Bench(windowed, num_pages=16)
    turn(bench, ids, max_tokens=2)
    evict(bench, num_evicted)
    answer = turn(bench, ids, max_tokens=6)
    assert answer.num_cached_tokens == (10 - num_evicted) * PAGE_SIZE
    assert_same(answer, ask(windowed, ids, max_tokens=6))


def test_page_that_one_row_has_left_behind_is_not_taken_from_another(
    windowed: DecoderModel,
) -> None:
    """One row is far beyond the window of its first pages while another begins to read them."""
    stem = prompt(5, 4 * PAGE_SIZE)
    ids = {"far": [*stem, 5], "near": [*stem, 6], "short": stem[: 2 * PAGE_SIZE + 1]}
    bench = Bench(windowed, num_pages=24, max_num_seqs=4)
    bench.add("far", ids["far"], max_tokens=40)
    for _ in range(25):
        bench.step()
    bench.add("near", ids["near"], max_tokens=12)
    bench.add("short", ids["short"], max_tokens=12)
    bench.add("other", prompt(9, 20), max_tokens=4)
    answers = bench.drain()
    assert answers["near"].num_cached_tokens == len(stem)
    assert answers["short"].num_cached_tokens == 2 * PAGE_SIZE
    assert_same(answers["far"], ask(windowed, ids["far"], max_tokens=40))
    for name in ("near", "short"):
        assert_same(answers[name], ask(windowed, ids[name]))
