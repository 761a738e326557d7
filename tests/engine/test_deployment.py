import math
from dataclasses import replace
from typing import Any

import pytest

from mstar.catalog import open_engine
from mstar.engine.resources.base import Deployment
from mstar.errors import ConfigError
from mstar.server.config import EngineOptions


def sizes(deployment: Deployment) -> tuple[int, int, int]:
    return (deployment.max_num_seqs, deployment.max_num_batched_tokens, deployment.page_size)


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", (64, 2048, 16)), ("cuda", (256, 8192, 64)), ("cuda:1", (256, 8192, 64))],
)
def test_sizes_that_are_left_open_suit_the_device(
    device: str, expected: tuple[int, int, int]
) -> None:
    assert sizes(Deployment(device=device)) == expected
    served = EngineOptions(model="tiny", device=device).deployment("bfloat16")
    assert sizes(served) == expected


def test_sizes_that_are_given_stay() -> None:
    given: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 100, "page_size": 32}
    deployment = Deployment(device="cuda", **given)
    assert sizes(deployment) == (3, 100, 32)
    assert sizes(replace(deployment, dtype="float16")) == (3, 100, 32)
    served = EngineOptions(model="tiny", device="cuda", **given).deployment("bfloat16")
    assert sizes(served) == (3, 100, 32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"page_size": 2**31}, "page_size is 2147483648; it must be a whole number"),
        ({"max_model_len": -1}, "max_model_len is -1"),
        ({"retention_share": 1.5}, "retention_share is 1.5"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0.0"),
        ({"disk_cache_bytes": 1, "enable_prefix_caching": False}, "prefix caching is off"),
    ],
)
def test_a_server_is_refused_its_numbers_before_any_process_starts(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(model="tiny", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_pages": 2.5}, "num_pages is 2.5; it must be a whole number"),
        ({"num_pages": "12"}, "num_pages is '12'"),
        ({"kv_cache_bytes": 1.5e9}, r"kv_cache_bytes is 1500000000\.0"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size is '2'"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size is True"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"gpu_memory_utilization": "x"}, "gpu_memory_utilization is 'x'"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization is nan"),
        ({"retention_share": None}, "retention_share is None"),
        ({"host_cache_bytes": -1}, "host_cache_bytes is -1"),
        ({"cuda_graphs": "x"}, "cuda_graphs is 'x'; it must be True or False"),
        ({"attention_backend": "nonsense"}, "attention_backend is 'nonsense'; there are paged"),
    ],
)
def test_an_engine_is_refused_its_numbers_before_a_model_is_loaded(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_engine("no model", Deployment(**given))


@pytest.mark.parametrize("device", [None, 0])
def test_a_device_is_a_name(device: Any) -> None:
    with pytest.raises(ConfigError, match=r"device is .*; it must be a name"):
        Deployment(device=device)
