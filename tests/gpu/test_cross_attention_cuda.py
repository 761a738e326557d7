"""Attention to encoder outputs of 30 seconds of sound, on a CUDA device, is what the formula gives.

An output of 1,500 slots is one page, which is no size that a kernel would choose.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mstar.engine.resources.base import Deployment, Item
from mstar.engine.resources.cross_attention.config import (
    CrossAttentionConfig,
    CrossAttentionStep,
)
from mstar.engine.resources.cross_attention.manager import CrossAttentionManager
from mstar.engine.resources.step import Segment
from tests.gpu import likely
from tests.gpu.likely import HEAD_DIM
from tests.oracles.tolerances import ATTENTION

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS, HEADS, LENGTH = 2, 6, 1500
LENGTHS = {b"a": LENGTH, b"b": 701, b"c": 1, b"d": 64}


class Reader(NamedTuple):
    """A segment of a step."""

    request_id: str
    name: bytes
    span: int


PROMPTS = [Reader("r0", b"a", 5), Reader("r1", b"b", 1), Reader("r2", b"c", 3)]
MANY = [Reader(f"r{n}", (b"a", b"b", b"d")[n % 3], 1 + 40 * (n == 4)) for n in range(40)]
STEPS = {
    "decode": [Reader(f"r{n}", name, 1) for n, name in enumerate(LENGTHS)],
    "prompts": PROMPTS,
    "one": [Reader("r0", b"a", 1)],
    "many": MANY,
}


def expected(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """``[span, heads, dim]`` of one segment, every slot seen, in float64."""
    scores = torch.einsum("nhd,khd->hnk", query.double(), keys.double()) * scale
    return torch.einsum("hnk,khd->nhd", scores.softmax(-1), values.double())


@pytest.mark.parametrize("page_size", [LENGTH, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_token_sees_all_of_its_output(dtype: str, page_size: int) -> None:
    dim, kind = HEAD_DIM[dtype], getattr(torch, dtype)
    config = CrossAttentionConfig(
        num_layers=LAYERS,
        num_qo_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=dim,
        scale=dim**-0.5,
        max_length=LENGTH,
        page_size=page_size,
    )
    deployment = Deployment(device=likely.DEVICE, dtype=dtype, encoder_cache_tokens=5 * LENGTH)
    manager = CrossAttentionManager("cross", config, deployment)
    generator = torch.Generator(likely.DEVICE).manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=likely.DEVICE).to(kind)

    contents = {name: drawn(2, LAYERS, length, HEADS, dim) for name, length in LENGTHS.items()}
    made = tuple(Item("maker", name, length) for name, length in LENGTHS.items())
    step = CrossAttentionStep(made=made)
    assert manager.admit((), step) is None
    plan = manager.plan((), step, {})
    together = torch.cat(list(contents.values()), 2)
    for layer in range(LAYERS):
        plan.store(layer, *together[:, layer])
    manager.commit((), step)
    for readers in STEPS.values():
        for reader in readers:
            assert manager.pin(Item(reader.request_id, reader.name, LENGTHS[reader.name]))
    # Each step twice, others between: a plan is kept while its segments stay.
    for readers in (*STEPS.values(), *reversed(STEPS.values())):
        segments = tuple(Segment(reader.request_id, "main", reader.span) for reader in readers)
        step = CrossAttentionStep(read=tuple(reader.name for reader in readers))
        for _ in range(2):
            assert manager.admit(segments, step) is None
            plan = manager.plan(segments, step, {})
            for layer in range(LAYERS):
                query = drawn(sum(reader.span for reader in readers), HEADS, dim)
                found, row = plan.run(layer, query), 0
                assert found.dtype == kind
                for reader in readers:
                    own = slice(row, row + reader.span)
                    keys, values = contents[reader.name][:, layer]
                    wanted = expected(query[own], keys, values, config.scale)
                    error = (found[own].double() - wanted).abs().max().item()
                    assert error < ATTENTION[kind], (reader, layer, error)
                    row = own.stop
            manager.commit(segments, step)
    manager.close("maker")
    manager.check()
