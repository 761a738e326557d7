"""An aborted request leaves nothing behind but pages that are right."""

import pytest

from mstar.models.decoder import DecoderModel
from tests.laws.harness import Bench, ask, assert_same, prompt

PROMPT = prompt(21, 13)


@pytest.mark.parametrize("step", range(16))
def test_after_an_abort_at_any_step_the_same_prompt_gets_the_cold_answer(
    model: DecoderModel, step: int
) -> None:
    cold = ask(model, PROMPT)
    bench = Bench(model, max_num_batched_tokens=4)
    bench.add("gone", PROMPT)
    for _ in range(step):
        bench.step()
    assert bench.engine.abort("gone") is (step < 15)
    assert bench.engine.stats().num_pages_used == 0
    assert not bench.engine.abort("gone")
    assert not bench.engine.has_work
    bench.engine.check()
    bench.add("fresh", PROMPT)
    assert_same(bench.drain()["fresh"], cold)


def test_abort_in_a_batch_leaves_the_others_as_they_are(model: DecoderModel) -> None:
    prompts = {str(n): prompt(n, 5 + n) for n in range(5)}
    bench = Bench(model)
    for name, ids in prompts.items():
        bench.add(name, ids)
    for name in "310":
        bench.step()
        bench.step()
        assert bench.engine.abort(name)
    answers = bench.drain()
    for name in "24":
        assert_same(answers[name], ask(model, prompts[name]))
    for name in "310":
        assert answers[name].finish_reason is None


def test_abort_of_a_waiting_request_lets_the_next_one_start(model: DecoderModel) -> None:
    bench = Bench(model, num_pages=12, max_num_seqs=4)
    bench.add("big", prompt(1, 20), max_tokens=10)
    bench.step()
    bench.add("waits", prompt(2, 40), max_tokens=4)
    bench.add("small", prompt(3, 3), max_tokens=4)
    bench.step()
    assert (bench.engine.stats().num_running, bench.engine.stats().num_waiting) == (1, 2)
    assert bench.engine.abort("waits")
    bench.step()
    assert (bench.engine.stats().num_running, bench.engine.stats().num_waiting) == (2, 0)
    assert_same(bench.drain()["small"], ask(model, prompt(3, 3), max_tokens=4))


def test_abort_of_a_request_that_is_not_there_says_so(model: DecoderModel) -> None:
    assert Bench(model).engine.abort("nobody") is False
