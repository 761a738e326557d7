"""A request that was preempted gives what it gives when nothing interrupts it."""

from typing import Any

import pytest

from mstar.models.decoder import DecoderModel
from tests.laws.harness import Bench, ask, assert_same, prompt

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 11, "top_p": 0.95},
    "penalised": {
        "temperature": 0.7,
        "seed": 5,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.6,
    },
    "min_tokens": {"ignore_eos": False, "min_tokens": 15},
    "logprobs": {"logprobs": 2},
}


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("name", PARAMS)
def test_preempted_requests_are_answered_as_if_uninterrupted(
    model: DecoderModel, name: str, reuse: bool
) -> None:
    prompts = [prompt(seed, 6 + seed) for seed in range(4)]
    params = {"max_tokens": 24} | PARAMS[name]
    expected = [ask(model, ids, **params) for ids in prompts]
    # Each needs up to 9 pages; the four together never fit.
    bench = Bench(model, num_pages=14, max_num_seqs=4, enable_prefix_caching=reuse)
    for number, ids in enumerate(prompts):
        bench.add(str(number), ids, **params)
    answers = bench.drain()
    assert bench.engine.stats().num_preemptions > 0
    for number, alone in enumerate(expected):
        assert_same(answers[str(number)], alone)
        assert answers[str(number)].logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_youngest_is_preempted_and_the_oldest_never(model: DecoderModel) -> None:
    bench = Bench(model, num_pages=14, max_num_seqs=4)
    for number in range(4):
        bench.add(str(number), prompt(number, 6), max_tokens=24)
    ended = []
    while bench.engine.has_work:
        ended += [o.request_id for o in bench.step() if o.finish_reason]
    assert ended == ["0", "1", "2", "3"]
    served = [request for batch in bench.recorder.batches for request, _ in batch]
    assert served.count("0") == 24


def test_resuming_reuses_what_the_request_itself_has_computed(model: DecoderModel) -> None:
    bench = Bench(model, num_pages=14, max_num_seqs=2)
    for number in range(2):
        bench.add(str(number), prompt(number, 8), max_tokens=28)
    answers = bench.drain()
    assert bench.engine.stats().num_preemptions == 1
    spans = [span for batch in bench.recorder.batches for request, span in batch if request == "1"]
    assert spans[0] == 8
    (resumed,) = [at for at, span in enumerate(spans) if at and span > 1]
    # The other one grew into its last pages; the first ones were still there.
    assert spans[resumed] < resumed
    assert [answers[name].num_cached_tokens for name in "01"] == [0, 0]
