"""Sampling of a batch whose requests all ask for something else, with torch and in one kernel."""

import random
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from mstar.engine.resources.base import Deployment, Opening
from mstar.engine.resources.sampler.config import SamplerConfig, SampleStep, SamplingParams
from mstar.engine.resources.sampler.manager import SamplerManager
from mstar.engine.resources.step import Segment

VOCAB = 128_256
RULES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 0.6, "top_k": 200, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.8, "top_p": 0.8, "repetition_penalty": 1.1},
    {"temperature": 1.0, "logit_bias": dict.fromkeys(range(0, 3000, 100), 2.0)},
]


def logits_of(kind: str, num_rows: int) -> Tensor:
    """Return bfloat16 logits: of random weights, or as unequal as a trained model's."""
    generator = torch.Generator("cuda").manual_seed(0)
    noise = torch.randn(num_rows, VOCAB, generator=generator, device="cuda")
    if kind == "flat":
        return (2 * noise).bfloat16()
    ranks = torch.rand(num_rows, VOCAB, generator=generator, device="cuda").argsort(1) + 1
    return (noise - 2 * ranks.log() + 10).bfloat16()


def manager(num_rows: int, is_fused: bool, is_greedy: bool) -> tuple[SamplerManager, list[Any]]:
    """Return a manager with one stream a row, and their lists of ids."""
    made = SamplerManager("sampler", SamplerConfig(vocab_size=VOCAB), Deployment(device="cuda"))
    if not is_fused:
        made._seen = None
    rng = random.Random(0)
    live = []
    for row in range(num_rows):
        rules = RULES[0] if is_greedy else RULES[row % len(RULES)]
        tokens = [rng.randrange(VOCAB) for _ in range(1000)]
        opening = Opening(
            request_id=str(row),
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            max_len=2000,
            settings={"sampler": SamplingParams(seed=row, **rules)},
        )
        made.open(opening, 0)
        live.append(tokens)
    return made, live


def measure(num_rows: int, kind: str, is_fused: bool) -> dict[str, object]:
    """Return a row of the table."""
    made, live = manager(num_rows, is_fused, kind == "greedy")
    logits = logits_of("flat" if kind == "greedy" else kind, num_rows)
    step = tuple(Segment(str(row), "main", 1) for row in range(num_rows))

    def sample() -> None:
        sampled = made.plan(step, SampleStep(), {}).sample(logits)
        assert not sampled.failed
        for tokens, token in zip(live, sampled.token_ids.tolist(), strict=True):
            tokens.append(token)

    for _ in range(3):
        sample()
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        started = time.perf_counter()
        sample()
        times.append((time.perf_counter() - started) * 1e3)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(4):
            sample()
        torch.cuda.synchronize()
    launched = [e for e in profiled.events() if e.device_time]
    return {
        "what": f"{num_rows} rows, {kind}",
        "with": "one kernel" if is_fused else "torch",
        "ms a step": f"{statistics.median(times):.3f}",
        "device ms": f"{sum(e.device_time for e in launched) / 4e3:.3f}",
        "kernels and copies": len(launched) // 4,
    }


def rows(sizes: list[int]) -> list[dict[str, object]]:
    """Return the table for batches of these sizes."""
    return [
        measure(size, kind, is_fused)
        for size in sizes
        for kind in ("greedy", "flat", "peaked")
        for is_fused in (False, True)
    ]
