"""What reuse costs where nothing is reused: throughput with it off and on, at 0 % hits.

SmolLM2-135M in bfloat16, 32 prompts of 64 to 512 tokens, 32 generated tokens each, no two alike.
The two engines take turns in one process; the ratio is the median over the turns.
"""

import random
import statistics
import time
from typing import Any

from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.library import Engine

ROUNDS = 7
NUM_REQUESTS = 32
_PARAMS = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)


def _prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(1_000, 40_000) for _ in range(rng.randrange(64, 513))]
        for _ in range(NUM_REQUESTS)
    ]


def _run(engine: Engine, prompts: list[list[int]]) -> float:
    """Return generated tokens a second."""
    started = time.perf_counter()
    answers = engine.generate(prompts, _PARAMS)
    spent = time.perf_counter() - started
    assert all(answer.num_cached_tokens == 0 for answer in answers)
    return sum(len(answer.token_ids) for answer in answers) / spent


def run() -> list[dict[str, Any]]:
    """Return a row an engine."""
    engines = {
        name: Engine("smollm2-135m", deployment=Deployment(enable_prefix_caching=is_on))
        for name, is_on in (("off", False), ("on", True))
    }
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(ROUNDS + 1):
        prompts = _prompts(turn)
        for name in sorted(engines, reverse=turn % 2 == 0):
            speed = _run(engines[name], prompts)
            if turn:
                speeds[name].append(speed)
    ratio = statistics.median(on / off for on, off in zip(speeds["on"], speeds["off"], strict=True))
    return [
        {
            "reuse": name,
            "tokens/s": round(statistics.median(speeds[name]), 1),
            "on / off": round(ratio, 4) if name == "on" else "",
            "limit": 0.99 if name == "on" else "",
        }
        for name in ("off", "on")
    ]
