"""Pages that are shown before they are written, kept after they are gone, or that nobody gets."""

import random

import pytest
import torch

from mstar.engine.resources.position.config import PosScheme
from mstar.models.decoder import DecoderModel
from mstar.models.toy_items import toy_item_model
from tests.laws.harness import PAGE_SIZE, Bench, Picture, Prompt, ask, assert_same, prompt
from tests.reuse.bench import after_forward, evict, kv_of, turn


@pytest.mark.parametrize("failing_step", range(5))
def test_step_that_failed_leaves_no_page_that_it_wrote_or_would_have_written(
    model: DecoderModel, failing_step: int
) -> None:
    """A page that was shown when its step was planned once outlived the step's failure."""
    ids = prompt(4, 19)
    cold = ask(model, ids)
    bench = Bench(model, max_num_batched_tokens=PAGE_SIZE)
    kv, num_steps = kv_of(bench), 0

    def spoil() -> None:
        nonlocal num_steps
        if num_steps == failing_step:
            row = kv._streams["fails", "main"].row
            written = kv._table.pages(row)[num_steps:].tolist()
            for layer in range(kv.layout.num_layers):
                kv.cache.keys[layer][written] = 99.0
                kv.cache.values[layer][written] = 99.0
            raise FloatingPointError("half written")
        num_steps += 1

    with after_forward(bench, spoil):
        bench.add("fails", ids)
        answer = bench.drain()["fails"]
    assert answer.error is not None
    assert "half written" in answer.error.message
    again = turn(bench, ids)
    assert again.num_cached_tokens == failing_step * PAGE_SIZE
    assert_same(again, cold)


def test_nothing_is_shown_before_the_step_that_writes_it_has_ended(model: DecoderModel) -> None:
    ids = prompt(8, 18)
    bench = Bench(model, max_num_batched_tokens=PAGE_SIZE)
    kv = kv_of(bench)
    shown: list[int] = []

    with after_forward(bench, lambda: shown.append(len(kv.index))):
        turn(bench, ids, max_tokens=3)
    # Five steps for the prompt, then 18 and 19 stored slots.
    assert shown == [0, 1, 2, 3, 4, 4, 4]
    assert len(kv.index) == 5


@pytest.mark.parametrize("num_evicted", range(8))
def test_hit_has_no_hole_however_many_pages_were_evicted(
    model: DecoderModel, num_evicted: int
) -> None:
    """Evicting a page from the middle once left those behind it to be counted, or found."""
    ids = prompt(2, 7 * PAGE_SIZE + 1)
    bench = Bench(model, num_pages=12)
    cold = turn(bench, ids, max_tokens=3)
    assert bench.engine.stats().num_pages_cached == 7
    evict(bench, num_evicted)
    assert bench.engine.stats().num_pages_cached == 7 - num_evicted
    answer = turn(bench, ids, max_tokens=3)
    assert answer.num_cached_tokens == (7 - num_evicted) * PAGE_SIZE
    assert_same(answer, cold)


def test_recycled_page_is_found_by_no_name_of_before(model: DecoderModel) -> None:
    bench = Bench(model, num_pages=12)
    kv = kv_of(bench)
    turn(bench, prompt(1, 30), max_tokens=1)
    names = dict(kv.index._page)
    assert len(names) == 7
    turn(bench, prompt(2, 40), max_tokens=1)
    kept = kv.index._page
    assert len(set(kept.values())) == len(kept)
    for name, page in names.items():
        assert kept.get(name) in (None, page)
        if name not in kept:
            assert kv.index.key(page) != name
    assert turn(bench, prompt(1, 30), max_tokens=1).num_cached_tokens < 28


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_many_requests_behind_a_prefix_that_fills_most_of_the_pool_all_end(
    model: DecoderModel, is_warm: bool
) -> None:
    """All were once let in by the pages that they share, and then none could take the next."""
    prefix = prompt(1, 59 * PAGE_SIZE)
    bench = Bench(model, num_pages=96, max_num_seqs=32)
    if is_warm:
        turn(bench, [*prefix, 5], max_tokens=1)
    prompts = [[*prefix, *prompt(100 + n, 2)] for n in range(32)]
    for number, ids in enumerate(prompts):
        bench.add(str(number), ids, max_tokens=16)
    answers = bench.drain(max_steps=400)
    assert [answer.finish_reason for answer in answers.values()] == ["length"] * 32
    hits = [answer.num_cached_tokens for answer in answers.values()]
    assert hits == [len(prefix) if is_warm else 0, *[len(prefix)] * 31]
    for number in (0, 13, 31):
        assert_same(answers[str(number)], ask(model, prompts[number], max_tokens=16))


@pytest.mark.parametrize("before", range(2, 6))
@pytest.mark.parametrize(
    ("scheme", "block_step"),
    [(PosScheme.SEQUENTIAL, 1), (PosScheme.BLOCK, 1), (PosScheme.BLOCK, 2)],
)
def test_resumed_request_stands_where_it_stood_when_it_was_preempted(
    scheme: PosScheme, block_step: int, before: int
) -> None:
    """Generated ids that were computed again at once, behind a hit, once made one block."""
    model = toy_item_model(scheme=scheme, block_step=block_step)
    # The layouts end at the end of a page, or one to three slots behind.
    prompts: list[Prompt] = [[*prompt(n, before), Picture(n, 5, n % 2 == 0), n] for n in range(4)]
    bench = Bench(model, num_pages=12, max_num_seqs=4)
    for number, parts in enumerate(prompts):
        bench.add(str(number), parts, max_tokens=24)
    answers = bench.drain()
    assert bench.engine.stats().num_preemptions > 1
    for number, parts in enumerate(prompts):
        assert_same(answers[str(number)], ask(model, parts, max_tokens=24))


@pytest.mark.parametrize("seed", range(3))
def test_after_heavy_churn_a_prompt_finds_its_own_pages_or_none(
    model: DecoderModel, seed: int
) -> None:
    rng = random.Random(seed)
    needle = prompt(50 + seed, 23)
    cold = ask(model, needle, max_tokens=5)
    bench = Bench(model, num_pages=20, max_num_seqs=3)
    hits = set()
    for number in range(25):
        for other in range(rng.randrange(4)):
            # Some begin as the needle does, some end as it does.
            cut = rng.randrange(23)
            ids = needle[:cut] + prompt(1000 * number + other, rng.randrange(1, 24))
            bench.add(f"{number} {other}", ids[-40:], max_tokens=rng.randrange(1, 8))
        bench.add(f"{number} back", [*prompt(number, 4), *needle[4:]], max_tokens=1)
        bench.drain()
        answer = turn(bench, needle, max_tokens=5)
        hits.add(answer.num_cached_tokens)
        assert_same(answer, cold)
    assert len(hits) > 2, "the pool was never too small"


def test_pages_are_held_by_as_many_as_read_them_and_by_none_in_the_end(
    model: DecoderModel,
) -> None:
    """Slots freed twice, or never, have ended servers when they were idle."""
    bench = Bench(model, num_pages=40, max_num_seqs=4)
    kv = kv_of(bench)
    ids = prompt(1, 17)
    turn(bench, ids, max_tokens=1)
    for number in range(4):
        bench.add(str(number), [*ids, number + 2], max_tokens=20)
    bench.step()
    shared = kv._table.pages(kv._streams["0", "main"].row)[:4].tolist()
    assert [kv.pool.ref_count(page) for page in shared] == [4] * 4
    for left, name in enumerate("2031", -3):
        bench.engine.abort(name)
        bench.engine.check()
        assert [kv.pool.ref_count(page) for page in shared] == [-left] * 4
    total, held, kept = kv.usage()
    assert (held, kept, kv.pool.num_free) == (0, len(kv.index), total - len(kv.index))
    torch.testing.assert_close(turn(bench, ids).logits, ask(model, ids).logits, rtol=0, atol=2e-4)
