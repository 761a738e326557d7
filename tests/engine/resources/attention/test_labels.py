"""Several streams of one request in one step: each attends to what it has stored itself."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.engine.resources.attention.config import (
    AttentionConfig,
    AttentionSpec,
    AttentionStep,
    LayerAttention,
)
from mstar.engine.resources.attention.manager import AttentionManager
from mstar.engine.resources.base import Deployment, Opening
from mstar.engine.resources.kv.config import KVConfig, KVStep
from mstar.engine.resources.kv.manager import KVManager
from mstar.engine.resources.step import Segment
from tests.oracles import attention as oracle
from tests.oracles.tolerances import ATTENTION

HEADS, KV_HEADS, WIDTH = 4, 2, 16
STREAMS = [("a", "main"), ("b", "main"), ("a", "free"), ("b", "free")]
STEPS = [(5, 2, 5, 2), (1, 1, 1, 1), (1, 4, 1, 4), (0, 1, 0, 1)]
"""New slots of each stream, step by step."""


class Cache:
    """A cache with attention over it, and what each stream has written."""

    def __init__(self, backend: str) -> None:
        deployment = Deployment(
            num_pages=40, page_size=4, max_model_len=32, attention_backend=backend
        )
        shape = KVConfig(num_layers=1, num_kv_heads=KV_HEADS, head_dim=WIDTH)
        self.kv = KVManager("kv", shape, deployment)
        config = AttentionConfig(
            kv_cache="kv",
            num_qo_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=WIDTH,
            scale=0.25,
            layers=(LayerAttention(),),
        )
        spec = AttentionSpec("attention", {"node"}, config)
        self.attention = AttentionManager.build(spec, deployment, {"kv": self.kv})
        self._generator = torch.Generator().manual_seed(0)
        nothing = torch.zeros(0, KV_HEADS, WIDTH)
        self._written = dict.fromkeys(STREAMS, (nothing, nothing))

    def run(self, spans: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Compute a step of random heads; returns its rows and those of the formula."""
        segments = tuple(
            Segment(*stream, span) for stream, span in zip(STREAMS, spans, strict=True)
        )
        assert self.kv.admit(segments, KVStep()) is None
        plan = self.kv.plan(segments, KVStep(), {})
        attention = self.attention.plan(segments, AttentionStep(), {"kv": plan})
        query = torch.randn(sum(spans), HEADS, WIDTH, generator=self._generator)
        keys, values = torch.randn(2, sum(spans), KV_HEADS, WIDTH, generator=self._generator)
        plan.write(0, keys, values)
        rows = attention.run(0, query)
        expected = []
        for stream, *own in zip(
            STREAMS, *(part.split(spans) for part in (query, keys, values)), strict=True
        ):
            before = self._written[stream]
            seen = tuple(torch.cat(pair) for pair in zip(before, own[1:], strict=True))
            self._written[stream] = (seen[0], seen[1])
            queries, known, weighed = (part.double().numpy() for part in (own[0], *seen))
            expected.append(oracle.attend(queries, known, weighed, 0.25))
        self.kv.commit(segments, KVStep())
        self.kv.check()
        return rows, torch.from_numpy(np.concatenate(expected)).float()


@pytest.mark.parametrize("backend", ["eager", "sdpa", "paged"])
def test_streams_of_one_request_do_not_see_each_other(backend: str) -> None:
    cache = Cache(backend)
    for request_id, label in STREAMS:
        opening = Opening(
            request_id=request_id,
            label=label,
            tokens=[1, 2],
            num_prompt_tokens=2,
            max_len=32,
            num_streams=2,
        )
        assert cache.kv.open(opening, 0) is None
    for spans in STEPS:
        rows, expected = cache.run(spans)
        torch.testing.assert_close(rows, expected, atol=ATTENTION[torch.float32], rtol=0)
