"""An engine of ranks or of one process, asked and compared."""

from collections.abc import Sequence
from typing import Any

import pytest

from mstar.engine.engine import EngineCore
from mstar.engine.output import TokenLogprobs
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.keys import chain
from mstar.engine.resources.sampler.config import SamplingParams

NUMBERS = Deployment(
    num_pages=40, page_size=4, max_num_seqs=4, max_model_len=128, max_num_batched_tokens=16
)
PROMPTS = [[(7 * i + j * j) % 90 + 3 for j in range(5 + 9 * i)] for i in range(6)]


def add(engine: EngineCore, name: str, ids: Sequence[int], **params: Any) -> None:
    size = engine.deployment.page_size
    assert engine.root is not None
    pages = [list(ids[i : i + size]) for i in range(0, len(ids), size)]
    wanted = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, "logprobs": 3} | params
    engine.add_request(
        PreparedRequest(
            request_id=name,
            token_ids=list(ids),
            params=SamplingParams(**wanted),
            root=engine.root,
            page_keys=list(chain(pages, None, engine.root)),
        )
    )


def drain(engine: EngineCore) -> dict[str, list[TokenLogprobs]]:
    told: dict[str, list[TokenLogprobs]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            told.setdefault(output.request_id, []).extend(output.logprobs or [])
    engine.check()
    return told


def assert_same(
    found: dict[str, list[TokenLogprobs]], expected: dict[str, list[TokenLogprobs]]
) -> None:
    """The same tokens, and log-probabilities that differ by the order of sums only."""
    assert found.keys() == expected.keys()
    for name, own in expected.items():
        assert [e.token_id for e in found[name]] == [e.token_id for e in own], name
        for entry, known in zip(found[name], own, strict=True):
            assert entry.logprob == pytest.approx(known.logprob, abs=1e-4)
