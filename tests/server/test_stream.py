"""Engine outputs to JSON, without processes."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mstar.engine.output import FinishReason, RequestOutput
from mstar.engine.resources.sampler.config import TokenLogprobs
from mstar.preprocess.tokenizer import TextTokenizer
from mstar.server.stream import Answer
from mstar.transport.messages import AnswerOptions
from tests.server.processes import TinyModel

TEXT = "😀ď漢abcdef"


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyModel) -> TextTokenizer:
    return TextTokenizer.load(tiny.folder)


def options(**changes: Any) -> AnswerOptions:
    plain: dict[str, Any] = {
        "route": "chat",
        "model": "m",
        "stream": True,
        "include_usage": False,
        "continuous_usage": False,
        "num_choices": 1,
        "num_prompt_tokens": [5],
        "num_top_logprobs": None,
        "stop": [],
        "include_stop": False,
        "skip_special_tokens": True,
        "return_token_ids": False,
        "prompt_token_ids": None,
    }
    return AnswerOptions(**(plain | changes))


def outputs(
    ids: list[int], sizes: list[int], reason: FinishReason, logprob: float | None = None
) -> list[RequestOutput]:
    """Return ``ids`` in increments of the given sizes, the last one ending the request."""
    cuts = [0]
    for size in sizes:
        cuts.append(min(len(ids), cuts[-1] + size))
    cuts.append(len(ids))
    parts = [ids[a:b] for a, b in pairwise(cuts)]
    return [
        RequestOutput(
            request_id="r",
            token_ids=part,
            logprobs=None
            if logprob is None
            else [TokenLogprobs(token, logprob, [(token, logprob)]) for token in part],
            finish_reason=reason if index == len(parts) - 1 else None,
            num_prompt_tokens=5,
            num_cached_tokens=2,
        )
        for index, part in enumerate(parts)
    ]


def run(tokenizer: TextTokenizer, shape: AnswerOptions, parts: list[RequestOutput]) -> list[Any]:
    """Return the JSON of all events of a one-choice stream."""
    answer = Answer("id", shape, tokenizer, "fp")
    data = answer.opening()
    for part in parts:
        if answer.num_open:
            data += answer.chunk(0, answer.push(0, part))
    data += answer.closing()
    lines = [line for line in data.decode().split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines]


@given(sizes=st.lists(st.integers(0, 4), max_size=20), stop=st.sampled_from(["", "cde", "漢a"]))
def test_however_ids_arrive_the_text_is_that_of_all_of_them(
    tokenizer: TextTokenizer, sizes: list[int], stop: str
) -> None:
    ids = tokenizer.encode(TEXT)
    shape = options(stop=[stop] if stop else [], include_usage=True)
    chunks = run(tokenizer, shape, outputs(ids, sizes, "length"))
    expected = TEXT.split(stop, maxsplit=1)[0] if stop else TEXT
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert text == expected
    reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop" if stop else "length"]
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == len((expected + stop).encode())
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_cut_character_at_the_end_is_one_replacement(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("a😀")[:-1]
    chunks = run(tokenizer, options(), outputs(ids, [1, 1, 1], "length"))
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == "a\ufffd"


@pytest.mark.parametrize("logprob", [float("-inf"), -1e30, float("nan")])
def test_log_probabilities_are_always_json(tokenizer: TextTokenizer, logprob: float) -> None:
    ids = tokenizer.encode("ab")
    for route in ("chat", "completion"):
        shape = options(route=route, num_top_logprobs=1)
        chunks = run(tokenizer, shape, outputs(ids, [1], "length", logprob))
        found = [c["choices"][0]["logprobs"] for c in chunks]
        values: list[float] = []
        for part in filter(None, found):
            values += part.get("token_logprobs") or [e["logprob"] for e in part["content"]]
        assert values == [-9999.0, -9999.0]


def test_cached_tokens_count_each_prompt_once(tokenizer: TextTokenizer) -> None:
    shape = options(route="completion", num_choices=2, num_prompt_tokens=[5, 7], stream=False)
    answer = Answer("id", shape, tokenizer, "fp")
    for index in range(4):
        for part in outputs(tokenizer.encode("ab"), [1], "length"):
            answer.choices[index].keep(answer.push(index, part))
    assert answer.num_open == 0
    body = json.loads(answer.whole())
    assert [choice["text"] for choice in body["choices"]] == ["ab"] * 4
    assert body["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 8,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
