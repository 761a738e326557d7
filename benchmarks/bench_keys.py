"""What page keys cost beside the bare SHA-256 calls, and beside two plainer encodings."""

import hashlib
import pickle
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mstar.engine.resources.kv.keys import PageItem, chain

NUM_IDS = 50_000
PAGE_SIZE = 16
ROUNDS = 150
READY = bytes(104)
"""A buffer of two SHA-256 blocks, as a full page of 16 ids fills."""


def _limit(num_pages: int) -> None:
    sha256 = hashlib.sha256
    ready = READY
    for _ in range(num_pages):
        sha256(ready).digest()


def _pickled(pages: list[list[int]], root: bytes) -> list[bytes]:
    keys, prev = [], root
    for ids in pages:
        blob = pickle.dumps((prev, tuple(ids), None), pickle.HIGHEST_PROTOCOL)
        prev = hashlib.sha256(blob).digest()
        keys.append(prev)
    return keys


def _one_by_one(pages: list[list[int]], root: bytes) -> list[bytes]:
    keys, prev = [], root
    for ids in pages:
        h = hashlib.sha256()
        h.update(len(prev).to_bytes(4, "little"))
        h.update(prev)
        h.update((4 * len(ids)).to_bytes(4, "little"))
        for token in ids:
            h.update(token.to_bytes(4, "little"))
        h.update(bytes(4))
        prev = h.digest()
        keys.append(prev)
    return keys


def best_of(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return each case's least seconds, the cases taking turns."""
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, case in cases.items():
            begin = time.perf_counter()
            case()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def run(rounds: int = ROUNDS) -> list[dict[str, str | float]]:
    """Time ``chain`` over one prompt in every form it may come in; checks included."""
    rng = random.Random(0)
    ids = [rng.randrange(2, 150_000) for _ in range(NUM_IDS)]
    pages = [ids[i : i + PAGE_SIZE] for i in range(0, NUM_IDS, PAGE_SIZE)]
    tuples = [tuple(page) for page in pages]
    int64: Any = np.array(pages, dtype=np.int64)
    uint32: Any = int64.astype(np.uint32)
    tensor: Any = torch.from_numpy(int64)
    root = bytes(32)
    items = {page: [PageItem(0, 0, 4, root)] for page in range(0, len(pages), 4)}
    expected = _one_by_one(pages, root)
    forms: list[Any] = [pages, tuples, int64, uint32, tensor]
    assert all(chain(form, None, root) == expected for form in forms)
    times = best_of(
        {
            "bare sha256 (the limit)": lambda: _limit(len(pages)),
            "chain: lists": lambda: chain(pages, None, root),
            "chain: tuples": lambda: chain(tuples, None, root),
            "chain: numpy int64": lambda: chain(int64, None, root),
            "chain: numpy uint32": lambda: chain(uint32, None, root),
            "chain: torch int64": lambda: chain(tensor, None, root),
            "chain: lists, an item on every 4th": lambda: chain(pages, items, root),
            "sha256 over pickled tuples": lambda: _pickled(pages, root),
            "ids one by one": lambda: _one_by_one(pages, root),
        },
        rounds,
    )
    limit, pickled, single = (
        times[name]
        for name in ("bare sha256 (the limit)", "sha256 over pickled tuples", "ids one by one")
    )
    return [
        {
            "case": name,
            "ms": round(seconds * 1e3, 3),
            "ns/id": round(seconds * 1e9 / NUM_IDS, 1),
            "x limit": round(seconds / limit, 3),
            "faster than pickled": round(pickled / seconds, 2),
            "faster than one by one": round(single / seconds, 2),
        }
        for name, seconds in times.items()
    ]


def main() -> None:
    """Print the table."""
    rows = run()
    print(f"chain over {NUM_IDS:,} ids, {PAGE_SIZE} a page; best of {ROUNDS}")
    table = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(text.ljust(n) for text, n in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
