"""Trace replay through the cache's production code, without a model; page 512, one process.

Two public traces in file order, prompts only: with a pool that never fills, where the hit rates are
known exactly, and with 10,000 pages.
"""

from pathlib import Path
from typing import Any

from mstar.simulate.outcome import Reading, Setup
from mstar.simulate.replay import replay
from mstar.simulate.trace import read_trace

TRACES = Path(__file__).parents[2] / "shared" / "traces"
NUM_PAGES = (None, 10_000)


def run(traces: Path = TRACES) -> list[dict[str, Any]]:
    """Return a row a trace, pool and reading; none where the traces are not there."""
    rows: list[dict[str, Any]] = []
    for path in sorted(traces.glob("*.jsonl*")):
        requests = read_trace(path)
        for num_pages in NUM_PAGES:
            for reading in Reading:
                outcome = replay(requests, Setup(num_pages=num_pages), reading)
                rows.append(
                    {
                        "trace": path.name.partition(".")[0],
                        "requests": outcome.num_requests,
                        "pool (pages)": num_pages or "unlimited",
                        "reading": reading.value,
                        "hit": f"{outcome.num_hits:,}",
                        "of": f"{outcome.num_possible:,} {reading.unit}",
                        "rate (%)": round(100 * outcome.hit_rate, 1),
                        "evictions": outcome.num_evictions,
                        "replay (s)": round(outcome.seconds, 2),
                    }
                )
    return rows
