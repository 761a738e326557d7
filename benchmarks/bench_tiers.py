"""Time to first token behind 1,500 shared tokens: cold, and from the pool, host memory and disk.

SmolLM2-135M in bfloat16, one process. The pool holds one prompt only, so that a prompt between the
two questions evicts what they share; the disk's files are dropped from the page cache where the
system lets us.
"""

import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.library import Engine

ROUNDS = 5
NUM_SHARED, NUM_NEW = 1_500, 30
_ONE = SamplingParams(max_tokens=1, temperature=0)
_GIB = 1 << 30


def _ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1_000, 40_000) for _ in range(count)]


def _ask(engine: Engine, ids: list[int]) -> tuple[float, int]:
    """Return milliseconds to the first token, and cached tokens."""
    started = time.perf_counter()
    (answer,) = engine.generate([ids], _ONE)
    return (time.perf_counter() - started) * 1e3, answer.num_cached_tokens


def _drop_page_cache(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _measure(source: str, folder: Path) -> tuple[list[float], list[float]]:
    """Return cold and warm milliseconds of each round."""
    deployment = Deployment(
        num_pages=400 if source == "pool" else 100,
        max_model_len=1_600,
        host_cache_bytes=_GIB if source == "host" else 0,
        disk_cache_bytes=_GIB if source.startswith("disk") else 0,
        disk_cache_dir=str(folder),
    )
    engine = Engine("smollm2-135m", deployment=deployment)
    _ask(engine, _ids(1, 64))
    cold, warm = [], []
    for turn in range(ROUNDS):
        shared = _ids(100 + turn, NUM_SHARED)
        spent, cached = _ask(engine, shared + _ids(200 + turn, NUM_NEW))
        assert cached == 0, cached
        cold.append(spent)
        if source != "pool":
            _ask(engine, _ids(400 + turn, NUM_SHARED))
        if source.startswith("disk"):
            time.sleep(1.0)
        if source == "disk, not in the page cache":
            _drop_page_cache(folder)
        spent, cached = _ask(engine, shared + _ids(300 + turn, NUM_NEW))
        assert cached >= NUM_SHARED // 16 * 16, cached
        warm.append(spent)
    engine.core.close()
    return cold, warm


def run() -> list[dict[str, Any]]:
    """Return a row a source."""
    rows = []
    for source, limit in (
        ("pool", 0.07),
        ("host", 0.3),
        ("disk", 0.5),
        ("disk, not in the page cache", 0.5),
    ):
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = _measure(source, Path(folder))
        ratios = [w / c for w, c in zip(warm, cold, strict=True)]
        rows.append(
            {
                "from": source,
                "cold (ms)": round(statistics.median(cold), 1),
                "warm (ms)": round(statistics.median(warm), 1),
                "warm / cold": round(statistics.median(ratios), 4),
                "limit": limit,
            }
        )
    return rows
