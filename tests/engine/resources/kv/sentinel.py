"""A KV manager whose every slot holds a number that commits to all that stands before it."""

import zlib
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from mstar.engine.resources.base import Deployment, Opening
from mstar.engine.resources.kv.config import KVConfig, KVStep
from mstar.engine.resources.kv.layout import KVPlan
from mstar.engine.resources.kv.manager import KVManager
from mstar.engine.resources.spans import Span
from mstar.engine.resources.step import Segment
from mstar.preprocess.items import prompt_keys

PAGE_SIZE = 3
ROOT = bytes(range(32))
"""Of the deployment, which names the folder on disk; streams have roots of their own."""
CONFIG = KVConfig(num_layers=2, num_kv_heads=1, head_dim=2)
STEP = KVStep()
Spans = list[Span]


def manager_of(
    num_pages: int, *, max_num_seqs: int = 2, reuse: bool = True, **numbers: Any
) -> KVManager:
    deployment = Deployment(
        dtype="float64",
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_num_seqs=max_num_seqs,
        max_model_len=24,
        enable_prefix_caching=reuse,
        **numbers,
    )
    manager = KVManager("kv", CONFIG, deployment)
    manager.connect(ROOT if reuse else None)
    return manager


def slots_of(tokens: list[int], spans: Spans) -> list[Hashable]:
    """What fills each slot: an id, or one slot of an item."""
    slots: list[Hashable] = []
    for span in spans:
        for at in range(span.length):
            name = (at, span.length, span.digest)
            slots.append(tokens[len(slots)] if span.digest is None else name)
    return slots + list(tokens[len(slots) :])


def contents(root: bytes | None, slots: list[Hashable]) -> torch.Tensor:
    """A number for each slot that commits to all before it, ``[len(slots)]``, float64."""
    values, state = [], zlib.crc32(repr(root).encode())
    for slot in slots:
        state = zlib.crc32(repr(slot).encode(), state)
        values.append(float(state))
    return torch.tensor(values, dtype=torch.float64)


class Stream:
    """One open stream, and what must stand in its slots."""

    def __init__(self, request_id: str, tokens: list[int], spans: Spans, root: Any) -> None:
        self.request_id = request_id
        self.tokens = tokens
        self.num_prompt_tokens = len(tokens)
        self.spans = spans
        self.root = root
        self.stored = 0
        self.retain_seconds = 0.0
        self._opening: Opening | None = None
        self.is_sharing = root is not None
        self.max_len = 24

    def opening(self, num_keys: int | None = None) -> Opening:
        if self._opening is None:
            self._opening = self._new_opening(num_keys)
        return self._opening

    def _new_opening(self, num_keys: int | None) -> Opening:
        keys: list[bytes] = []
        if self.root is not None:
            prompt = self.tokens[: self.num_prompt_tokens]
            keys = prompt_keys(prompt, self.spans, PAGE_SIZE, self.root)[:num_keys]
        return Opening(
            request_id=self.request_id,
            tokens=self.tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            max_len=self.max_len,
            page_keys=keys,
            root=self.root,
            spans=self.spans,
            retain_seconds=self.retain_seconds,
        )

    @property
    def item_ends(self) -> list[int]:
        ends = [sum(s.length for s in self.spans[: i + 1]) for i in range(len(self.spans))]
        return [end for end, s in zip(ends, self.spans, strict=True) if s.digest is not None]

    def match(self, manager: KVManager) -> int:
        return manager.match(self.opening(), len(self.tokens) - 1)

    @property
    def slots(self) -> list[Hashable]:
        return slots_of(self.tokens, self.spans)

    @property
    def contents(self) -> torch.Tensor:
        return contents(self.root, self.slots)


def read(
    manager: KVManager, request_id: str, label: str = "main"
) -> tuple[torch.Tensor, list[int]]:
    """Return what a stream's stored slots hold in the last layer's values, and its pages."""
    plan = manager.plan((Segment(request_id, label, 0),), STEP, {})
    length = int(plan.kv_lens[0])
    slots = np.arange(length)
    pages = plan.page_table[0][slots // PAGE_SIZE]
    flat = plan.values[1].reshape(-1, 2)[:, 1]
    full = plan.page_table[0][: length // PAGE_SIZE].tolist()
    return flat[torch.from_numpy(pages.astype(np.int64) * PAGE_SIZE + slots % PAGE_SIZE)], full


def write(plan: KVPlan, values: torch.Tensor) -> None:
    for layer in range(CONFIG.num_layers):
        rows = values[:, None, None].expand(-1, 1, 2)
        plan.write(layer, -rows, rows)


def run(manager: KVManager, streams: list[Stream], spans: list[int]) -> bool:
    """Admit, plan, write and commit one step; returns whether it was admitted."""
    segments = tuple(Segment(s.request_id, "main", n) for s, n in zip(streams, spans, strict=True))
    if manager.admit(segments, STEP) is not None:
        return False
    plan = manager.plan(segments, STEP, {})
    new = [s.contents[s.stored : s.stored + n] for s, n in zip(streams, spans, strict=True)]
    write(plan, torch.cat(new))
    manager.commit(segments, STEP)
    for stream, span in zip(streams, spans, strict=True):
        stream.stored += span
    return True


def opened(manager: KVManager, stream: Stream) -> int:
    reused = stream.match(manager)
    assert manager.open(stream.opening(), reused) is None
    stream.stored = reused
    return reused
