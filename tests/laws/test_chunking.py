"""A prompt computed in pieces gives what it gives as a whole."""

import pytest

from mstar.models.decoder import DecoderModel
from tests.laws.harness import Bench, ask, assert_same, prompt

PROMPT = prompt(3, 37)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 7, 16, 36, 37, 38])
def test_any_budget_gives_the_answer_of_the_whole_prompt(model: DecoderModel, budget: int) -> None:
    whole = ask(model, PROMPT)
    bench = Bench(model, max_num_batched_tokens=budget)
    bench.add("chunked", PROMPT)
    assert_same(bench.drain()["chunked"], whole)
    spans = [span for batch in bench.recorder.batches for _, span in batch]
    assert max(spans) == min(budget, 37)
    assert sum(spans) == 37 + 11


def test_chunks_of_one_prompt_run_beside_the_decoding_of_others(model: DecoderModel) -> None:
    prompts = [prompt(seed, length) for seed, length in ((1, 5), (2, 40), (4, 23))]
    expected = [ask(model, ids) for ids in prompts]
    bench = Bench(model, max_num_batched_tokens=6)
    for number, ids in enumerate(prompts):
        bench.add(str(number), ids)
    answers = bench.drain()
    for number, alone in enumerate(expected):
        assert_same(answers[str(number)], alone)
    mixed = [b for b in bench.recorder.batches if {1} < {span for _, span in b}]
    assert mixed
    assert all(sum(span for _, span in batch) <= 6 for batch in bench.recorder.batches)
