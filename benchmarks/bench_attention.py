"""How long one layer's attention takes, per backend, and how fast it reads the KV cache."""

import importlib
import time
from dataclasses import dataclass

import numpy as np
import torch

from mstar.engine.resources.attention.base import AttentionBackend
from mstar.engine.resources.attention.config import BACKENDS, AttentionConfig, LayerAttention
from mstar.engine.resources.kv.layout import KVLayout, KVPlan

PAGE_SIZE = 16
NUM_LAYERS = 30
SECONDS = 0.5
"""Time given to each row, in seconds."""


@dataclass(frozen=True)
class Shape:
    """One batch of equal segments over a cache of ``NUM_LAYERS`` layers."""

    name: str
    batch: int
    qo_len: int
    kv_len: int
    num_qo_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    window: int | None = None


SHAPES = (
    Shape("decode B=1", 1, 1, 512),
    Shape("decode B=1, long", 1, 1, 4096),
    Shape("decode B=32", 32, 1, 96),
    Shape("decode B=32", 32, 1, 320),
    Shape("extend 8", 4, 8, 512),
    Shape("extend 32", 4, 32, 512),
    Shape("extend 128", 1, 128, 512),
    Shape("prefill", 1, 256, 256),
    Shape("gemma decode B=1, window 512", 1, 1, 2048, 4, 1, 256, 512),
    Shape("gemma decode B=1", 1, 1, 2048, 4, 1, 256),
    Shape("gemma decode B=32, window 512", 32, 1, 1024, 4, 1, 256, 512),
)


def build(shape: Shape, dtype: torch.dtype) -> tuple[AttentionConfig, KVPlan, torch.Tensor]:
    """Return the declaration, the step over randomly placed pages, and the queries."""
    generator = torch.Generator().manual_seed(0)
    pages_each = -(-shape.kv_len // PAGE_SIZE)
    num_pages = shape.batch * pages_each + 1
    layout = KVLayout(
        num_layers=NUM_LAYERS,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    size = (num_pages, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
    caches = [torch.randn(size, generator=generator).to(dtype) for _ in range(2 * NUM_LAYERS)]
    order = torch.randperm(num_pages - 1, generator=generator).add(1).to(torch.int32)
    num_tokens = shape.batch * shape.qo_len
    plan = KVPlan(
        layout=layout,
        keys=caches[::2],
        values=caches[1::2],
        qo_lens=np.full(shape.batch, shape.qo_len, np.int32),
        qo_indptr=np.arange(shape.batch + 1, dtype=np.int32) * np.int32(shape.qo_len),
        kv_lens=np.full(shape.batch, shape.kv_len, np.int32),
        page_table=np.ascontiguousarray(order.view(shape.batch, pages_each).numpy()),
        slots=torch.zeros(num_tokens, dtype=torch.int64),
    )
    config = AttentionConfig(
        kv_cache="kv",
        num_qo_heads=shape.num_qo_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        layers=(LayerAttention(window=shape.window),) * NUM_LAYERS,
    )
    query = torch.randn(num_tokens, shape.num_qo_heads, shape.head_dim, generator=generator)
    return config, plan, query.to(dtype)


def measure(backend: AttentionBackend, plan: KVPlan, query: torch.Tensor) -> tuple[float, float]:
    """Return the least seconds of one step's planning and the median seconds of one layer."""
    is_causal = (True,) * len(plan.qo_lens)
    planning: list[float] = []
    running: list[float] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(running) < 3:
        start = time.perf_counter()
        step = backend.plan(plan, is_causal)
        step.run(0, query)
        planned = time.perf_counter()
        for layer in range(NUM_LAYERS):
            step.run(layer, query)
        running.append((time.perf_counter() - planned) / NUM_LAYERS)
        planning.append(planned - start)
    # What plans make on first use counts as planning; the layer that was run for it does not.
    return max(0.0, min(planning) - min(running)), float(np.median(running))


def run(
    names: tuple[str, ...] = tuple(BACKENDS), dtype: torch.dtype = torch.bfloat16
) -> list[dict[str, str | float]]:
    """Return a row for each shape and each backend that can do it."""
    rows: list[dict[str, str | float]] = []
    for shape in SHAPES:
        config, plan, query = build(shape, dtype)
        seen = min(shape.kv_len, shape.window + shape.qo_len - 1 if shape.window else shape.kv_len)
        nbytes = 2 * shape.batch * seen * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        for name in names:
            backend: type[AttentionBackend] = importlib.import_module(BACKENDS[name]).Backend
            if backend.unsupported(config, plan.layout):
                continue
            planning, running = measure(backend(config, plan.layout), plan, query)
            rows.append(
                {
                    "shape": shape.name,
                    "kv_len": shape.kv_len,
                    "backend": name,
                    "plan_us": round(planning * 1e6, 1),
                    "layer_us": round(running * 1e6, 1),
                    "kv_gb_per_s": round(nbytes / running / 1e9, 2),
                }
            )
    return rows


def main() -> None:
    rows = run()
    print(f"{torch.get_num_threads()} threads, bfloat16, pages of {PAGE_SIZE}, {NUM_LAYERS} layers")
    for row in ([dict(zip(rows[0], rows[0], strict=True))] if rows else []) + rows:
        print(
            "  ".join(
                f"{value!s:<30}" if i == 0 else f"{value!s:>11}"
                for i, value in enumerate(row.values())
            )
        )


if __name__ == "__main__":
    main()
