"""Llama 3.1's rotation far from the beginning, and attention over long contexts, on a CUDA device.

Both are held against plain formulas in float64.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mstar.engine.engine import EngineCore
from mstar.engine.resources.base import Deployment, Opening
from mstar.engine.resources.kv.layout import KVLayout, KVPlan
from mstar.engine.resources.position.config import PositionConfig, PositionStep
from mstar.engine.resources.position.manager import PositionManager, PositionPlan
from mstar.engine.resources.step import Segment
from mstar.models.decoder import load
from mstar.models.dummy import DummyCheckpoint
from mstar.models.fused import rotate_and_store
from tests.gpu import likely
from tests.gpu.likely import TOLERANCE, config, prompts, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DIM, NUM_HEADS, NUM_KV_HEADS = 128, 8, 2
THETA, FACTOR, LOW, HIGH, OLD = 5e5, 8.0, 1.0, 4.0, 8192
POSITIONS = (0, 1, 8191, 8192, 65535, 65536, 100000, 131071)
LIMIT = 131072
# Half a unit in the last place of what is stored, and of the terms where they nearly cancel.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-18}


def frequencies() -> Tensor:
    """The angle per position of each pair, float64, by the three cases of Llama's own code."""
    found = []
    for pair in range(DIM // 2):
        own = THETA ** (-2 * pair / DIM)
        length = 2 * math.pi / own
        if length < OLD / HIGH:
            found.append(own)
        elif length > OLD / LOW:
            found.append(own / FACTOR)
        else:
            kept = (OLD / length - LOW) / (HIGH - LOW)
            found.append((1 - kept) * own / FACTOR + kept * own)
    return torch.tensor(found, dtype=torch.float64, device=likely.DEVICE)


def turned(heads: Tensor, positions: Tensor) -> Tensor:
    """Heads ``[num_tokens, num_heads, DIM]`` rotated in float64, first half against second."""
    angles = positions.double()[:, None, None] * frequencies()
    x, y = heads.double().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((x * cos - y * sin, y * cos + x * sin), -1)


def test_frequencies_are_those_that_are_published() -> None:
    own = frequencies()
    # In float32, as the reference computes them.
    golden = {0: 1, 1: 0.81461722, 16: 0.037606031, 32: 5.2484602e-4, 63: 3.0689259e-7}
    for pair, value in golden.items():
        assert float(own[pair]) == pytest.approx(value, rel=1e-6)


def manager_of() -> PositionManager:
    own = PositionConfig(
        kv_cache="kv",
        head_dim=DIM,
        max_position=LIMIT,
        rope_theta=THETA,
        rope_scale=FACTOR,
        low_freq_factor=LOW,
        high_freq_factor=HIGH,
        old_context_len=OLD,
    )
    deployment = Deployment(device=likely.DEVICE, max_num_seqs=len(POSITIONS), max_model_len=LIMIT)
    manager = PositionManager("position", own, deployment)
    for place, position in enumerate(POSITIONS):
        opening = Opening(
            request_id=str(place), tokens=[0] * LIMIT, num_prompt_tokens=1, max_len=LIMIT
        )
        assert manager.open(opening, position) is None
    return manager


SEGMENTS = tuple(Segment(str(place), "main", 1) for place in range(len(POSITIONS)))


def plans() -> dict[str, PositionPlan]:
    """The positions as steps of different kinds are given them."""
    fixed = manager_of().plan_fixed(len(POSITIONS), SEGMENTS, PositionStep(), {})
    assert fixed is not None
    ids = torch.tensor(POSITIONS)
    whole = (Segment("0", "main", len(POSITIONS)),)
    return {
        "step": manager_of().plan(SEGMENTS, PositionStep(), {}),
        "recorded": fixed,
        "given": manager_of().plan(whole, PositionStep(pos_ids=ids), {}),
    }


@pytest.mark.parametrize("kind", ["step", "recorded", "given"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_heads_turn_by_the_formula_wherever_they_stand(dtype: torch.dtype, kind: str) -> None:
    plan, count = plans()[kind], len(POSITIONS)
    positions = torch.tensor(POSITIONS, device=likely.DEVICE)
    assert torch.equal(plan.ids, positions)
    rotation = plan.rotation(0)
    assert rotation is not None
    angles = positions.double()[:, None] * frequencies()
    rows = torch.cat((angles.cos(), angles.sin()), 1)
    # The table is rounded once, whatever the angle.
    assert rotation.rows.dtype == torch.float32
    assert (rotation.rows.double() - rows).abs().max() <= 2**-24

    generator = torch.Generator(likely.DEVICE).manual_seed(1)
    qkv = torch.randn(
        count, NUM_HEADS + 2 * NUM_KV_HEADS, DIM, generator=generator, device=likely.DEVICE
    ).to(dtype)
    expected = turned(qkv[:, : NUM_HEADS + NUM_KV_HEADS], positions)
    step = ROUNDING[dtype]

    def check(actual: Tensor, wanted: Tensor) -> None:
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), wanted, rtol=step, atol=step / 8)

    check(plan.rotate_merged(qkv[:, : NUM_HEADS + NUM_KV_HEADS], 0), expected)

    shape = (2, count, NUM_KV_HEADS, DIM)
    keys, values = torch.zeros(2, *shape, dtype=dtype, device=likely.DEVICE)
    layout = KVLayout(1, *shape, dtype, torch.device(likely.DEVICE))
    lens = np.ones(count, np.int32)
    kv = KVPlan(
        layout=layout,
        keys=[keys],
        values=[values],
        qo_lens=lens,
        qo_indptr=np.arange(count + 1, dtype=np.int32),
        kv_lens=lens,
        page_table=np.ones((count, 1), np.int32),
        slots=count + torch.arange(count, device=likely.DEVICE),
    )
    query = rotate_and_store(qkv.clone(), NUM_HEADS, plan, kv, 0)
    check(query, expected[:, :NUM_HEADS])
    check(keys[1], expected[:, NUM_HEADS:])
    assert torch.equal(values[1], qkv[:, NUM_HEADS + NUM_KV_HEADS :])
    assert not keys[0].any()


LONG: dict[str, Any] = {
    "max_position_embeddings": LIMIT,
    "rope_theta": THETA,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": FACTOR,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": OLD,
    },
}
LENGTHS = (32_768, 70_000)
"""Of prompts; the second goes beyond where float32 angles would be off by more than bfloat16."""
CHUNK, BLOCK, NUM_NEW = 8192, 512, 6


class Plain:
    """The two layers in float64, as formulas; weights are rounded as the model's are.

    Args:
        checkpoint: Of the model.
        dtype: Of the model.
    """

    def __init__(self, checkpoint: DummyCheckpoint, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._config = checkpoint.config

    def _take(self, name: str, *shape: int) -> Tensor:
        stored = self._checkpoint.tensor(f"model.{name}.weight", shape)
        return stored.to(likely.DEVICE, self._dtype).double()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        # What the config leaves unsaid.
        eps: float = self._config.get("rms_norm_eps", 1e-6)
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        return x * scale * self._take(name, x.shape[-1])

    def logits(self, ids: list[int], last: int) -> Tensor:
        """Return float64 ``[last, vocab_size]`` behind the last ids."""
        own = self._config
        width, size, vocab = own["hidden_size"], own["intermediate_size"], own["vocab_size"]
        x = self._take("embed_tokens", vocab, width)[torch.tensor(ids, device=likely.DEVICE)]
        for layer in range(2):
            prefix = f"layers.{layer}."
            normed = self._norm(x, prefix + "input_layernorm")
            # Of the last layer nothing else is asked.
            rows = len(x) if layer == 0 else last
            query, key, value = (
                functional.linear(
                    normed, self._take(f"{prefix}self_attn.{name}_proj", heads * DIM, width)
                ).view(len(x), heads, DIM)
                for name, heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS))
            )
            places = torch.arange(len(x), device=likely.DEVICE)
            query, key = turned(query, places)[-rows:], turned(key, places)
            out = functional.linear(
                _attended(query, key, value),
                self._take(prefix + "self_attn.o_proj", width, NUM_HEADS * DIM),
            )
            x = x[-rows:] + out
            normed = self._norm(x, prefix + "post_attention_layernorm")
            gate, up = (
                functional.linear(normed, self._take(f"{prefix}mlp.{name}_proj", size, width))
                for name in ("gate", "up")
            )
            down = self._take(prefix + "mlp.down_proj", width, size)
            x = x + functional.linear(functional.silu(gate) * up, down)
        head = self._checkpoint.tensor("lm_head.weight", (vocab, width))
        return functional.linear(self._norm(x, "norm"), head.to(x.device, self._dtype).double())


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of the last queries, ``[num_rows, NUM_HEADS * DIM]``, a block at a time."""
    out = torch.empty_like(query)
    first = len(key) - len(query)
    group = NUM_HEADS // NUM_KV_HEADS
    for begin in range(0, len(query), BLOCK):
        own = query[begin : begin + BLOCK].unflatten(1, (NUM_KV_HEADS, group))
        stop = first + begin + len(own)
        scores = torch.einsum("nhgd,khd->hgnk", own, key[:stop]) * DIM**-0.5
        places = torch.arange(stop - len(own), stop, device=key.device)
        hidden = torch.arange(stop, device=key.device) > places[:, None]
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        attended = torch.einsum("hgnk,khd->nhgd", weights, value[:stop])
        out[begin : begin + BLOCK] = attended.flatten(1, 2)
    return out.flatten(1)


@pytest.mark.parametrize("place", range(len(LENGTHS)))
def test_long_prompts_in_chunks_are_as_likely_as_the_formula_says(place: int) -> None:
    """Prefilled in chunks, then generated, then once more behind what is cached."""
    length, dtype = LENGTHS[place], "bfloat16"
    checkpoint = DummyCheckpoint(Path("long"), config(DIM, **LONG))
    kind = getattr(torch, dtype)
    model = load(checkpoint, name="long", dtype=kind, device=torch.device(likely.DEVICE))
    core = EngineCore(
        model,
        Deployment(
            device=likely.DEVICE,
            dtype=dtype,
            max_num_batched_tokens=CHUNK,
            max_model_len=length + 200,
            max_num_seqs=4,
            page_size=64,
            num_pages=-(-length // 64) + 40,
        ),
    )
    (ids,) = prompts(20 + place, (length,))
    (tail,) = prompts(30, (37,))
    # Behind what was cached comes something short, for which other kernels are taken.
    for asked in (ids, ids[:-50] + tail):
        (result,) = run(core, [asked], max_tokens=NUM_NEW)
        chosen = [entry.token_id for entry in result]
        logits = Plain(checkpoint, kind).logits(asked + chosen[:-1], NUM_NEW)
        known = logits.log_softmax(-1)
        for entry, row in zip(result, known, strict=True):
            for token, logprob in ((entry.token_id, entry.logprob), *entry.top):
                assert abs(logprob - float(row[token])) < TOLERANCE[dtype], (token, logprob)
            assert row.max() - row[entry.token_id] < 2 * TOLERANCE[dtype]
    assert core.stats().cached_tokens >= (length - 64) // 64 * 64
