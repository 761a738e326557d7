"""A seed decides a request's tokens, whatever else runs."""

from typing import Any

from mstar.models.decoder import DecoderModel
from tests.laws.harness import Bench, ask, prompt

SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 16}


def test_same_seed_same_tokens_in_any_batch_chunk_and_pool(model: DecoderModel) -> None:
    ids = prompt(1, 19)
    alone = ask(model, ids, seed=42, **SAMPLED)
    cases: tuple[dict[str, Any], ...] = (
        {},
        {"max_num_batched_tokens": 5},
        {"num_pages": 20, "max_num_seqs": 3},
        {"enable_prefix_caching": False},
    )
    for numbers in cases:
        bench = Bench(model, **numbers)
        for number in range(5):
            bench.add(str(number), ids, seed=42 if number % 2 else number, **SAMPLED)
        answers = bench.drain()
        assert answers["1"].token_ids == alone.token_ids, numbers
        assert answers["3"].token_ids == alone.token_ids, numbers
        assert len({tuple(answers[name].token_ids) for name in "0124"}) == 4, numbers


def test_requests_without_a_seed_differ(model: DecoderModel) -> None:
    bench = Bench(model)
    for number in range(4):
        bench.add(str(number), prompt(1, 5), **SAMPLED)
    tokens = {tuple(answer.token_ids) for answer in bench.drain().values()}
    assert len(tokens) == 4
