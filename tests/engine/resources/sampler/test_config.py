import subprocess
import sys
from typing import Any

import pytest

from mstar.engine.resources.sampler.config import SamplerConfig, SamplingParams
from mstar.errors import RequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: float("nan")}),
        ("seed", 2**64),
        ("seed", True),
        ("logprobs", 21),
        ("stop", "word"),
        ("logit_bias", None),
        ("logit_bias", [1]),
        ("stop", ("",)),
        ("stop", None),
        ("stop", 5),
        ("stop", (b"word",)),
        ("stop", ("x" * 1001,)),
        ("stop_token_ids", None),
        ("stop_token_ids", 5),
        ("stop_token_ids", (-1,)),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_name_of_its_field(
    name: str, value: object
) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**dict[str, Any]({name: value}))
    assert caught.value.param == name
    assert name in str(caught.value)


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens is 9; it must not exceed max_tokens 8"):
        SamplingParams(min_tokens=9, max_tokens=8)
    SamplingParams(min_tokens=8, max_tokens=8)


def test_ends_of_the_ranges_are_legal() -> None:
    low = SamplingParams(temperature=0, top_k=-1, top_p=1, min_p=1, seed=-(2**63), logprobs=0)
    assert (low.temperature, low.top_k, low.seed, low.logprobs) == (0, -1, -(2**63), 0)
    high = SamplingParams(temperature=100, seed=2**64 - 1, logprobs=20, logit_bias={0: -100})
    assert (high.temperature, high.seed, high.logprobs) == (100, 2**64 - 1, 20)
    assert high.logit_bias == {0: -100}


def test_a_bias_beyond_the_vocabulary_is_refused() -> None:
    config = SamplerConfig(vocab_size=10)
    config.check_params(SamplingParams(logit_bias={9: 1.0}))
    with pytest.raises(RequestError, match="token id 10; ids lie below 10"):
        config.check_params(SamplingParams(logit_bias={10: 1.0}))


def test_declaring_loads_no_torch() -> None:
    code = (
        "import sys, mstar.engine.resources.sampler.config\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
