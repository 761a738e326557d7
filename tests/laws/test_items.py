"""Reuse with items: on equals off, whatever the offsets, chunks, positions and attention."""

import random
from itertools import product

import pytest

from mstar.engine.resources.position.config import PosScheme
from mstar.models.decoder import DecoderModel
from mstar.models.toy_items import ToyEncoder, toy_item_model
from tests.laws.harness import PAGE_SIZE, Answer, Bench, Picture, Prompt, ask, assert_same, prompt

SCHEMES = {
    "sequential": (PosScheme.SEQUENTIAL, 1, None, False),
    "sequential, pictures advance by 2": (PosScheme.SEQUENTIAL, 1, 2, False),
    "blocks": (PosScheme.BLOCK, 1, None, False),
    "blocks of 3, pictures advance by 5": (PosScheme.BLOCK, 3, 5, False),
    "explicit ids in pictures, which advance by 7": (PosScheme.SEQUENTIAL, 1, 7, True),
}
Kind = tuple[DecoderModel, int | None]


@pytest.fixture(scope="module", params=list(SCHEMES.values()), ids=list(SCHEMES))
def kind(request: pytest.FixtureRequest) -> Kind:
    scheme, step, advance, has_grid = request.param
    return toy_item_model(scheme=scheme, block_step=step, has_grid=has_grid), advance


def encoder_of(model: DecoderModel) -> ToyEncoder:
    encoder = model.nodes["encoder"]
    assert isinstance(encoder, ToyEncoder)
    return encoder


def turn(bench: Bench, parts: Prompt, **options: object) -> Answer:
    bench.add("turn", parts, **options)  # type: ignore[arg-type]
    return bench.drain()["turn"]


@pytest.mark.parametrize("is_whole", [False, True], ids=["causal", "whole"])
@pytest.mark.parametrize("before", range(PAGE_SIZE + 1))
def test_second_question_reuses_up_to_the_pictures_last_slot(
    kind: Kind, is_whole: bool, before: int
) -> None:
    model, advance = kind
    for length in range(1, 2 * PAGE_SIZE + 2):
        picture = Picture(1, length, is_whole, advance)
        first: Prompt = [*prompt(1, before), picture, *prompt(2, 5)]
        second: Prompt = [*prompt(1, before), picture, *prompt(3, 6)]
        bench = Bench(model)
        assert_same(turn(bench, first), ask(model, first))
        encoded = encoder_of(model).num_encoded
        answer = turn(bench, second)
        assert answer.num_cached_tokens == before + length
        assert encoder_of(model).num_encoded == encoded, "a covered picture was encoded again"
        assert_same(answer, ask(model, second))


@pytest.mark.parametrize("is_whole", [False, True], ids=["causal", "whole"])
@pytest.mark.parametrize("budget", [9, 64])
def test_chunks_never_change_an_answer_with_pictures(
    kind: Kind, is_whole: bool, budget: int
) -> None:
    model, advance = kind
    for before, length in product(range(4), (3, 8)):
        parts: Prompt = [
            *prompt(4, before),
            Picture(2, length, is_whole, advance),
            *prompt(5, 3),
            Picture(3, length, is_whole, advance),
            Picture(4, 2, is_whole, advance),
            7,
        ]
        bench = Bench(model, max_num_batched_tokens=budget)
        assert_same(turn(bench, parts), ask(model, parts))


def test_hit_that_ends_inside_a_picture_goes_on_rightly(kind: Kind) -> None:
    """Full pages inside a picture are kept when the page where it ends is gone."""
    model, advance = kind
    for is_whole in (False, True):
        picture = Picture(5, 11, is_whole, advance)
        first: Prompt = [*prompt(6, 2), picture, *prompt(7, 2)]
        second: Prompt = [*prompt(6, 2), picture, *prompt(8, 2)]
        bench = Bench(model, num_pages=12)
        turn(bench, first, max_tokens=1)
        # 15 prompt tokens: three full pages and the page where the picture ends, cut at slot 13.
        pool = bench.engine._runner.resources["kv"].pool  # type: ignore[attr-defined]
        pages = pool.try_allocate(pool.num_free + 1)
        pool.release(pages)
        answer = turn(bench, second)
        assert answer.num_cached_tokens == 12
        assert_same(answer, ask(model, second))


def test_prompt_that_fills_the_pool_takes_no_cut_page_that_it_has_no_room_for(kind: Kind) -> None:
    model, advance = kind
    # Three full pages, and one where the picture ends at its second slot.
    picture = Picture(5, 12, True, advance)
    bench = Bench(model, num_pages=4)
    turn(bench, [*prompt(6, 2), picture], max_tokens=1)
    question: Prompt = [*prompt(6, 2), picture, 7]
    answer = turn(bench, question, max_tokens=1)
    assert answer.error is None, answer.error
    assert answer.num_cached_tokens == 12
    assert_same(answer, ask(model, question, max_tokens=1))


def test_other_picture_of_the_same_size_shares_nothing_of_it(kind: Kind) -> None:
    model, advance = kind
    bench = Bench(model)
    turn(bench, [*prompt(1, 5), Picture(1, 6, True, advance), *prompt(2, 3)])
    parts: Prompt = [*prompt(1, 5), Picture(2, 6, True, advance), *prompt(2, 3)]
    answer = turn(bench, parts)
    assert answer.num_cached_tokens == 4
    assert_same(answer, ask(model, parts))


def test_longest_of_several_pictures_that_end_on_one_page_is_taken(kind: Kind) -> None:
    model, advance = kind
    tiny = [Picture(seed, 1, False, advance) for seed in range(3)]
    bench = Bench(model)
    turn(bench, [*tiny, *prompt(1, 4)])
    for shared in range(4):
        parts: Prompt = [*tiny[:shared], *prompt(9, 5)]
        answer = turn(bench, parts, max_tokens=2)
        assert answer.num_cached_tokens == shared
        assert_same(answer, ask(model, parts, max_tokens=2))


def test_generated_text_behind_pictures_is_reused_by_the_next_turn(kind: Kind) -> None:
    model, advance = kind
    bench = Bench(model)
    history: Prompt = [*prompt(5, 3), Picture(7, 6, True, advance), *prompt(6, 2)]
    for number in range(3):
        answer = turn(bench, history, max_tokens=9)
        assert_same(answer, ask(model, history, max_tokens=9))
        history = [*history, *answer.token_ids, *prompt(50 + number, 3)]


def test_same_picture_side_by_side_is_encoded_and_computed_once(kind: Kind) -> None:
    model, advance = kind
    picture = Picture(8, 13, True, advance)
    questions: list[Prompt] = [[*prompt(1, 3), picture, *prompt(20 + n, 3)] for n in range(5)]
    expected = [ask(model, parts) for parts in questions]
    before = encoder_of(model).num_encoded
    bench = Bench(model)
    for number, parts in enumerate(questions):
        bench.add(str(number), parts)
    answers = bench.drain()
    assert encoder_of(model).num_encoded == before + 1
    assert [answers[str(n)].num_cached_tokens for n in range(5)] == [0, 16, 16, 16, 16]
    for number in range(5):
        assert_same(answers[str(number)], expected[number])


def test_tenants_share_neither_pages_nor_encoder_outputs(kind: Kind) -> None:
    model, advance = kind
    parts: Prompt = [*prompt(1, 3), Picture(9, 6, True, advance), *prompt(2, 3)]
    bench = Bench(model)
    encoder = encoder_of(model)
    for salt, is_new in ((None, True), ("a", True), ("b", True), ("a", False), (None, False)):
        before = encoder.num_encoded
        answer = turn(bench, parts, salt=salt)
        assert (answer.num_cached_tokens == 0) == is_new
        assert (encoder.num_encoded == before + 1) == is_new


@pytest.mark.parametrize("room", [6, 7, 12])
def test_encoder_outputs_that_do_not_fit_together_hang_nothing(kind: Kind, room: int) -> None:
    model, advance = kind
    bench = Bench(model, encoder_cache_tokens=room, max_num_batched_tokens=16)
    prompts: list[Prompt] = [
        [
            Picture(2 * n, 6, True, advance),
            *prompt(n, 2),
            Picture(2 * n + 1, 5, n % 2 == 0, advance),
            n,
        ]
        for n in range(2, 6)
    ]
    expected = [ask(model, parts) for parts in prompts]
    for number, parts in enumerate(prompts):
        bench.add(str(number), parts)
    answers = bench.drain()
    for number in range(4):
        assert_same(answers[str(number)], expected[number])


@pytest.mark.parametrize("seed", range(6))
def test_any_traffic_with_pictures_over_a_small_pool_is_answered_as_without_reuse(
    kind: Kind, seed: int
) -> None:
    model, advance = kind
    rng = random.Random(seed)
    pictures = [Picture(n, rng.randrange(1, 9), n % 2 == 0, advance) for n in range(4)]
    stems: list[list[int | Picture]] = [
        [*prompt(n, rng.randrange(6)), pictures[n], *prompt(n, rng.randrange(4)), pictures[n - 1]]
        for n in range(3)
    ]
    bench = Bench(
        model,
        num_pages=24,
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice((9, 64)),
        encoder_cache_tokens=rng.choice((9, 30)),
    )
    expected = {}
    for number in range(12):
        stem = rng.choice(stems)
        cut = rng.randrange(1, len(stem) + 1)
        parts: Prompt = [
            *stem[:cut],
            *prompt(number, rng.randrange(1, 6)),
        ]
        count = rng.randrange(1, 10)
        bench.add(str(number), parts, max_tokens=count)
        expected[str(number)] = ask(model, parts, max_tokens=count)
        for _ in range(rng.randrange(4)):
            bench.step()
        if rng.random() < 0.1:
            bench.engine.reset_prefix_cache()
    for name, answer in bench.drain().items():
        assert_same(answer, expected[name])
