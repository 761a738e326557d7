from dataclasses import replace
from typing import Any

import pytest

from mstar.engine.resources.base import Deployment
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
