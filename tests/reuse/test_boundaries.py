"""The last token, the last page, rows that only computing gives, and what counts as a hit."""

import random
from itertools import pairwise

import pytest

from mstar.models.decoder import DecoderModel
from tests.laws.harness import PAGE_SIZE, Bench, ask, assert_same, prompt
from tests.reuse.bench import OpenBench, evict, kv_of, push_down, turn


@pytest.mark.parametrize("num_pages", [1, 2, 5])
def test_prompt_of_whole_pages_leaves_one_page_to_compute_and_goes_on(
    model: DecoderModel, num_pages: int
) -> None:
    """A hit of the whole prompt once left nothing to compute, or broke the chain behind it."""
    ids = prompt(num_pages, num_pages * PAGE_SIZE)
    bench = Bench(model)
    cold = ask(model, ids, max_tokens=1)
    for expected in (0, len(ids) - PAGE_SIZE, len(ids) - PAGE_SIZE):
        answer = turn(bench, ids, max_tokens=1)
        assert answer.num_cached_tokens == expected
        assert_same(answer, cold)
    longer = ids + prompt(99, PAGE_SIZE)
    for expected in (len(ids), len(ids)):
        answer = turn(bench, longer, max_tokens=1)
        assert answer.num_cached_tokens == expected
        assert_same(answer, ask(model, longer, max_tokens=1))
    assert bench.engine.stats().num_pages_cached == num_pages + 1


def test_logprobs_of_a_warm_answer_are_those_of_a_cold_one(model: DecoderModel) -> None:
    ids = prompt(5, 21)
    cold = ask(model, ids, logprobs=4)
    bench = Bench(model)
    for expected in (0, 20):
        answer = turn(bench, ids, logprobs=4)
        assert answer.num_cached_tokens == expected
        assert len(answer.logprobs) == len(answer.token_ids) == 12
        assert answer.logprobs == pytest.approx(cold.logprobs, abs=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_every_prompt_token_counts_once_as_cached_or_as_computed(
    model: DecoderModel, seed: int
) -> None:
    """Retries in the queue and preemption once counted the same hit again."""
    rng = random.Random(seed)
    stems = [prompt(stem, 18) for stem in range(3)]
    num_pages = rng.choice((24, 200))
    bench = Bench(model, num_pages=num_pages, max_num_seqs=4, max_num_batched_tokens=16)
    lengths = {}
    for number in range(12):
        ids = rng.choice(stems)[: rng.randrange(1, 19)] + prompt(number, rng.randrange(4))
        lengths[str(number)] = len(ids)
        bench.add(str(number), ids, max_tokens=rng.randrange(1, 14))
        for _ in range(rng.randrange(3)):
            bench.step()
    answers = bench.drain()
    stats = bench.engine.stats()
    hits = [answer.num_cached_tokens for answer in answers.values()]
    assert stats.prompt_tokens == stats.prefix_queries == sum(lengths.values())
    assert stats.cached_tokens == stats.prefix_hits == sum(hits)
    assert stats.generation_tokens == sum(len(answer.token_ids) for answer in answers.values())
    spans: dict[str, int] = {}
    for batch in bench.recorder.batches:
        for name, span in batch:
            spans[name] = spans.get(name, 0) + span
    if stats.num_preemptions == 0:
        for name, answer in answers.items():
            # The last generated token's KV is never computed.
            computed = spans[name] - (len(answer.token_ids) - 1)
            assert computed + answer.num_cached_tokens == lengths[name]
            assert computed >= 1


def test_preempted_requests_report_what_they_found_when_they_first_began(
    model: DecoderModel,
) -> None:
    bench = Bench(model, num_pages=14, max_num_seqs=4)
    ids = [prompt(seed, 6 + seed) for seed in range(4)]
    for number, own in enumerate(ids):
        bench.add(str(number), own, max_tokens=24)
    counted = [0]
    while bench.engine.has_work:
        bench.step()
        counted.append(bench.engine.stats().prefix_queries)
    answers = bench.drain()
    stats = bench.engine.stats()
    assert stats.num_preemptions > 0
    assert {answer.num_cached_tokens for answer in answers.values()} == {0}
    assert (stats.prefix_queries, stats.prefix_hits) == (sum(map(len, ids)), 0)
    assert all(before <= after for before, after in pairwise(counted))


def test_refused_head_of_the_queue_that_is_asked_again_counts_once(model: DecoderModel) -> None:
    bench = Bench(model, num_pages=16, max_num_seqs=4)
    ids = prompt(1, 17)
    turn(bench, ids, max_tokens=1)
    bench.add("runs", prompt(2, 20), max_tokens=24)
    bench.step()
    bench.add("waits", [*ids, *prompt(3, 24)], max_tokens=8)
    num_waits = 0
    while bench.engine.stats().num_waiting:
        bench.step()
        num_waits += 1
    assert num_waits > 3
    hit = bench.drain()["waits"].num_cached_tokens
    stats = bench.engine.stats()
    assert stats.prefix_queries == 17 + 20 + 41
    assert stats.prefix_hits == hit


@pytest.mark.parametrize("num_kept", range(6))
def test_pool_and_tiers_together_leave_a_token_to_compute(
    model: DecoderModel, open_bench: OpenBench, tiers: dict[str, int], num_kept: int
) -> None:
    """A tier that offered the whole prompt left nothing to run."""
    ids = prompt(3, 5 * PAGE_SIZE)
    cold = ask(model, ids, max_tokens=1)
    bench = open_bench(model, **tiers)
    turn(bench, ids, max_tokens=1)
    evict(bench, 5 - num_kept)
    answer = turn(bench, ids, max_tokens=1)
    assert answer.num_cached_tokens == 4 * PAGE_SIZE
    assert_same(answer, cold)
    stats = bench.engine.stats()
    hits = (stats.prefix_hits_device, stats.prefix_hits_host + stats.prefix_hits_disk)
    in_pool = min(num_kept, 4) * PAGE_SIZE
    assert hits == (in_pool, 4 * PAGE_SIZE - in_pool)
    assert sum(hits) == stats.prefix_hits == stats.cached_tokens
    longer = [*ids, 7]
    assert turn(bench, longer, max_tokens=1).num_cached_tokens == 5 * PAGE_SIZE


def test_page_from_a_tier_is_put_where_nobody_reads(
    model: DecoderModel, open_bench: OpenBench, tiers: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A part that came from outside was once written over pages that others were reading."""
    ids = prompt(4, 21)
    bench = open_bench(model, num_pages=32, max_num_seqs=3, **tiers)
    turn(bench, ids, max_tokens=1)
    push_down(bench)
    kv = kv_of(bench)
    write, written = kv.cache.write_page, []

    def check_and_write(page: int, image: object) -> None:
        assert kv.pool.ref_count(page) == 1
        assert kv.index.key(page) is None
        rows = [kv._table.pages(stream.row).tolist() for stream in kv._streams.values()]
        assert page not in [held for row in rows for held in row]
        written.append(page)
        write(page, image)  # type: ignore[arg-type]

    monkeypatch.setattr(kv.cache, "write_page", check_and_write)
    bench.add("runs", [*ids[:9], *prompt(5, 9)], max_tokens=9)
    bench.step()
    bench.add("other", prompt(6, 12), max_tokens=9)
    bench.step()
    bench.add("asks", ids, max_tokens=9)
    answers = bench.drain()
    assert len(written) == 5
    assert [answers[name].num_cached_tokens for name in ("runs", "other", "asks")] == [8, 0, 20]
    assert_same(answers["runs"], ask(model, [*ids[:9], *prompt(5, 9)], max_tokens=9))
    assert_same(answers["asks"], ask(model, ids, max_tokens=9))


@pytest.mark.parametrize("seed", range(2))
def test_tokens_by_tier_and_computed_ones_add_up_to_the_prompts(
    model: DecoderModel, open_bench: OpenBench, tiers: dict[str, int], seed: int
) -> None:
    rng = random.Random(seed)
    stems = [prompt(stem, 22) for stem in range(4)]
    bench = open_bench(model, num_pages=20, max_num_seqs=3, **tiers)
    num_tokens = 0
    for number in range(14):
        ids = rng.choice(stems)[: rng.randrange(4, 23)] + prompt(number, rng.randrange(4))
        bench.add(str(number), ids, max_tokens=1)
        num_tokens += len(ids)
        for _ in range(rng.randrange(3)):
            bench.step()
    answers = bench.drain()
    stats = bench.engine.stats()
    assert stats.num_preemptions == 0
    assert sum(answer.num_cached_tokens for answer in answers.values()) == stats.prefix_hits
    by_tier = (stats.prefix_hits_device, stats.prefix_hits_host, stats.prefix_hits_disk)
    assert sum(by_tier) == stats.prefix_hits
    computed = sum(span for batch in bench.recorder.batches for _, span in batch)
    assert sum(by_tier) + computed == stats.prompt_tokens == num_tokens
