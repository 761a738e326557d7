"""A batch of N gives what N batches of one give."""

import pytest
from torch import Tensor

from mstar.engine.batch import Batch
from mstar.models.decoder import DecoderModel
from tests.laws.harness import Bench, ask, assert_same, prompt

PROMPTS = [prompt(seed, length) for seed, length in enumerate((1, 3, 4, 5, 17, 30))]


def test_requests_in_a_batch_get_what_each_gets_alone(model: DecoderModel) -> None:
    expected = [ask(model, ids) for ids in PROMPTS]
    bench = Bench(model, enable_prefix_caching=False)
    for number, ids in enumerate(PROMPTS):
        bench.add(str(number), ids)
    answers = bench.drain()
    assert max(len(batch) for batch in bench.recorder.batches) == len(PROMPTS)
    for number, alone in enumerate(expected):
        assert_same(answers[str(number)], alone)


def test_requests_that_join_and_leave_a_running_batch_do_not_disturb_it(
    model: DecoderModel,
) -> None:
    expected = [ask(model, ids, max_tokens=4 + 3 * n) for n, ids in enumerate(PROMPTS)]
    bench = Bench(model, enable_prefix_caching=False, max_num_seqs=3)
    for number, ids in enumerate(PROMPTS):
        bench.add(str(number), ids, max_tokens=4 + 3 * number)
        bench.step()
        bench.step()
    answers = bench.drain()
    for number, alone in enumerate(expected):
        assert_same(answers[str(number)], alone)


def test_logprobs_do_not_depend_on_who_else_asks(model: DecoderModel) -> None:
    alone = ask(model, PROMPTS[3], logprobs=3)
    bench = Bench(model)
    bench.add("with", PROMPTS[3], logprobs=3)
    bench.add("without", PROMPTS[4])
    answers = bench.drain()
    assert answers["with"].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert len(alone.logprobs) == len(alone.token_ids)
    assert answers["without"].logprobs == []


def test_request_that_makes_the_node_raise_fails_alone(model: DecoderModel) -> None:
    expected = [ask(model, ids) for ids in PROMPTS]

    def raises(batch: Batch, logits: Tensor) -> None:
        for request in batch.requests:
            if request.request_id == "2" and len(request.tokens) >= len(PROMPTS[2]) + 3:
                raise FloatingPointError("bad luck")

    bench = Bench(model, raises)
    for number, ids in enumerate(PROMPTS):
        bench.add(str(number), ids)
    answers = bench.drain()
    for number, alone in enumerate(expected):
        if number != 2:
            assert_same(answers[str(number)], alone)
    failed = answers["2"]
    assert failed.finish_reason == "error"
    assert failed.token_ids == expected[2].token_ids[:3]
    assert failed.error is not None
    assert failed.error.code == "internal_error"
    assert "bad luck" in failed.error.message


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_request_whose_logits_are_not_numbers_fails_alone(model: DecoderModel, bad: float) -> None:
    expected = [ask(model, ids) for ids in PROMPTS]

    def spoils(batch: Batch, logits: Tensor) -> None:
        for row, index in enumerate(batch.yielding):
            if batch.requests[index].request_id == "4":
                logits[row] = bad

    bench = Bench(model, spoils)
    for number, ids in enumerate(PROMPTS):
        bench.add(str(number), ids)
    answers = bench.drain()
    for number, alone in enumerate(expected):
        if number != 4:
            assert_same(answers[str(number)], alone)
    failed = answers["4"].error
    assert answers["4"].finish_reason == "error"
    assert failed is not None
    assert failed.code == "invalid_logits"
    assert "'4'" in failed.message
    assert bench.engine.stats().generation_tokens == 12 * (len(PROMPTS) - 1)


def test_what_a_failed_request_computed_is_not_reused(model: DecoderModel) -> None:
    expected = ask(model, PROMPTS[4])
    is_bad = True

    def spoils(batch: Batch, logits: Tensor) -> None:
        if is_bad:
            logits[:] = float("nan")

    bench = Bench(model, spoils)
    bench.add("first", PROMPTS[4])
    assert bench.drain()["first"].finish_reason == "error"
    assert bench.engine.stats().num_pages_cached == 0
    is_bad = False
    bench.add("second", PROMPTS[4])
    again = bench.drain()["second"]
    assert again.num_cached_tokens == 0
    assert_same(again, expected)
    assert bench.engine.stats().num_pages_cached > 0
