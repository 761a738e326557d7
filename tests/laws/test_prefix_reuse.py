"""Reuse changes what is computed, never what is answered."""

import random
from pathlib import Path
from typing import Any

import pytest

from mstar.models.decoder import DecoderModel
from tests.laws.harness import PAGE_SIZE, Answer, Bench, ask, assert_same, prompt


def _turn(bench: Bench, ids: list[int], **options: object) -> Answer:
    bench.add("turn", ids, **options)  # type: ignore[arg-type]
    return bench.drain()["turn"]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 22])
def test_prompt_asked_twice_is_answered_as_when_cold(model: DecoderModel, length: int) -> None:
    ids = prompt(length, length)
    cold = ask(model, ids)
    bench = Bench(model)
    for expected_reuse in (0, (length - 1) // PAGE_SIZE * PAGE_SIZE):
        answer = _turn(bench, ids)
        assert_same(answer, cold)
        assert answer.num_cached_tokens == expected_reuse


@pytest.mark.parametrize("shared", range(14))
def test_prompts_with_a_common_beginning_share_its_full_pages(
    model: DecoderModel, shared: int
) -> None:
    first, second = prompt(1, 14), prompt(1, 14)[:shared] + prompt(2, 14)[shared:]
    assert shared == 14 or first[shared] != second[shared]
    bench = Bench(model)
    _turn(bench, first)
    answer = _turn(bench, second)
    assert answer.num_cached_tokens == shared // PAGE_SIZE * PAGE_SIZE
    assert_same(answer, ask(model, second))


def test_generated_pages_are_reused_by_the_next_turn(model: DecoderModel) -> None:
    bench = Bench(model)
    history, reusable = prompt(5, 6), 0
    for turn in range(4):
        answer = _turn(bench, history, max_tokens=9)
        assert_same(answer, ask(model, history, max_tokens=9))
        assert answer.num_cached_tokens == reusable
        # The last token's KV is never computed.
        reusable = (len(history) + 8) // PAGE_SIZE * PAGE_SIZE
        history = history + answer.token_ids + prompt(50 + turn, 3)


def test_requests_that_run_together_reuse_each_others_pages_and_agree(
    model: DecoderModel,
) -> None:
    bench = Bench(model, max_num_batched_tokens=9)
    shared = prompt(9, 21)
    prompts = [shared + prompt(60 + n, n) for n in range(6)]
    for number, ids in enumerate(prompts):
        bench.add(str(number), ids)
    answers = bench.drain()
    for number, ids in enumerate(prompts):
        assert_same(answers[str(number)], ask(model, ids))


def test_same_prompt_side_by_side_keeps_one_copy_of_its_pages(model: DecoderModel) -> None:
    ids = prompt(11, 12)
    bench = Bench(model)
    for number in range(4):
        bench.add(str(number), ids, max_tokens=8)
    answers = bench.drain()
    # The first one computes, the others wait for it: all but the page of the last token.
    assert [answer.num_cached_tokens for answer in answers.values()] == [0, 8, 8, 8]
    # 12 prompt tokens and 7 of the 8 generated ones are stored: four full pages.
    assert bench.engine.stats().num_pages_cached == 4


def test_salts_are_worlds_apart(model: DecoderModel) -> None:
    ids = prompt(12, 20)
    cold = ask(model, ids)
    bench = Bench(model)
    for salt, expected_reuse in ((None, 0), ("a", 0), ("b", 0), ("a", 16), (None, 16), ("", 0)):
        answer = _turn(bench, ids, salt=salt)
        assert_same(answer, cold)
        assert answer.num_cached_tokens == expected_reuse, salt


def test_roots_name_weights_dtype_and_page_size(model: DecoderModel, toy: DecoderModel) -> None:
    roots = [
        Bench(model).engine.root,
        Bench(toy).engine.root,
        Bench(model, page_size=8).engine.root,
    ]
    assert len(set(roots)) == 3
    assert None not in roots
    assert Bench(model).engine.root == roots[0]


def test_model_of_unknown_weights_reuses_nothing(model: DecoderModel) -> None:
    model.root_constants = None
    bench = Bench(model)
    assert bench.engine.root is None
    for _ in range(2):
        assert _turn(bench, prompt(1, 20)).num_cached_tokens == 0
    assert bench.engine.stats().num_pages_cached == 0


def test_reset_forgets_everything(model: DecoderModel) -> None:
    ids = prompt(13, 20)
    bench = Bench(model)
    cold = _turn(bench, ids)
    kept = bench.engine.stats().num_pages_cached
    assert kept == (20 + 11) // PAGE_SIZE
    assert bench.engine.reset_prefix_cache() == kept
    again = _turn(bench, ids)
    assert again.num_cached_tokens == 0
    assert_same(again, cold)


@pytest.mark.parametrize("seed", range(4))
def test_any_traffic_over_a_small_pool_is_answered_as_without_reuse(
    model: DecoderModel, seed: int
) -> None:
    rng = random.Random(seed)
    stems = [prompt(stem, 18) for stem in range(3)]
    bench = Bench(model, num_pages=24, max_num_seqs=4, max_num_batched_tokens=rng.choice((5, 64)))
    expected = {}
    for number in range(14):
        ids = rng.choice(stems)[: rng.randrange(1, 19)] + prompt(number, rng.randrange(0, 9))
        count = rng.randrange(1, 14)
        bench.add(str(number), ids, max_tokens=count)
        expected[str(number)] = ask(model, ids, max_tokens=count)
        for _ in range(rng.randrange(4)):
            bench.step()
        if rng.random() < 0.1:
            bench.engine.reset_prefix_cache()
    for name, answer in bench.drain().items():
        assert_same(answer, expected[name])


def test_counters_say_what_was_reused(model: DecoderModel) -> None:
    bench = Bench(model)
    ids = prompt(14, 21)
    _turn(bench, ids)
    _turn(bench, ids)
    stats = bench.engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (42, 20)
    assert (stats.prompt_tokens, stats.cached_tokens) == (42, 20)
    assert stats.generation_tokens == 24


@pytest.mark.parametrize("tier", ["host", "disk", "both"])
@pytest.mark.parametrize("seed", range(3))
def test_pages_that_come_back_from_tiers_change_no_answer(
    model: DecoderModel, tier: str, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    stems = [prompt(stem, 18) for stem in range(4)]
    numbers: dict[str, Any] = {"disk_cache_dir": str(tmp_path)}
    if tier != "disk":
        numbers["host_cache_bytes"] = 1 << 16
    if tier != "host":
        numbers["disk_cache_bytes"] = 1 << 24
    expected: dict[str, Answer] = {}
    for life in range(2):
        bench = Bench(model, num_pages=14, max_num_seqs=3, **numbers)
        for number in range(10):
            name = f"{life}.{number}"
            ids = rng.choice(stems) + prompt(number, rng.randrange(1, 9))
            bench.add(name, ids, max_tokens=4)
            expected[name] = ask(model, ids, max_tokens=4)
            for _ in range(rng.randrange(9)):
                bench.step()
        for name, answer in bench.drain().items():
            assert_same(answer, expected[name])
        stats = bench.engine.stats()
        assert stats.num_evictions > 0
        found = {"host": stats.prefix_hits_host, "disk": stats.prefix_hits_disk}
        assert stats.prefix_hits == stats.prefix_hits_device + sum(found.values())
        if life == 1 and tier != "host":
            # The first life's pages are on disk, and the second began with none of its own.
            assert found["disk"] > 0
        bench.engine.close()
