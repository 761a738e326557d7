"""What the tests of bug classes share beside the bench of the laws."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.resources.kv.manager import KVManager
from mstar.engine.resources.kv.tiers.stack import TierStack
from mstar.engine.resources.step import NodeStep
from mstar.preprocess.items import PromptItem
from tests.laws.harness import Answer, Bench, Picture, Prompt

WINDOW = 8
TIERS: dict[str, dict[str, int]] = {
    "host": {"host_cache_bytes": 1 << 20},
    "disk": {"disk_cache_bytes": 1 << 20},
    # Room for four pages of the models here; what falls out goes to the disk.
    "both": {"host_cache_bytes": 4 << 11, "disk_cache_bytes": 1 << 20},
}
OpenBench = Callable[..., Bench]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("LlamaForCausalLM", {}),
    "windowed": (
        "Gemma3ForCausalLM",
        {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    ),
}


@dataclass(frozen=True)
class Forged(Picture):
    """A picture with a digest of the test's choice."""

    digest: bytes = b""

    def item(self) -> PromptItem:
        made = super().item()
        span = msgspec.structs.replace(made.span, digest=self.digest)
        return PromptItem(span, made.inputs)


class Spy(Node):
    """A node that does what another does, and then something more before the step has ended."""

    def __init__(self, inner: Node, after: Callable[[], None]) -> None:
        self._inner = inner
        self._after = after

    def declare(self, batch: Batch) -> NodeStep:
        return self._inner.declare(batch)

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        output = self._inner.forward(batch, plans)
        self._after()
        return output


@contextmanager
def after_forward(bench: Bench, after: Callable[[], None]) -> Iterator[None]:
    """Do something at the end of every forward of a bench's decoder, before it is committed."""
    inner = bench.recorder._inner
    bench.recorder._inner = Spy(inner, after)
    try:
        yield
    finally:
        bench.recorder._inner = inner


def turn(bench: Bench, parts: Prompt, **options: object) -> Answer:
    """Ask a bench that has nothing else to do."""
    bench.add("turn", parts, **options)  # type: ignore[arg-type]
    return bench.drain()["turn"]


def kv_of(bench: Bench) -> KVManager:
    found = bench.engine._runner.resources["kv"]
    assert isinstance(found, KVManager)
    return found


def evict(bench: Bench, num_pages: int) -> None:
    """Let the pool hand out all free pages and ``num_pages`` that are kept for reuse."""
    pool = kv_of(bench).pool
    pages = pool.try_allocate(pool.num_free + num_pages)
    assert pages is not None
    pool.release(pages)
    bench.engine.check()


def tiers_of(bench: Bench) -> TierStack:
    offload = kv_of(bench)._offload
    assert offload is not None
    return offload.tiers


def push_down(bench: Bench) -> None:
    """Leave nothing in the pool that could be reused: all of it is in the tiers."""
    evict(bench, bench.engine.stats().num_pages_cached)
    assert bench.engine.stats().num_pages_cached == 0
    for tier in tiers_of(bench).tiers:
        assert tier.flush(10.0)
