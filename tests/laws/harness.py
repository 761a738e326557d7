"""Drives an engine to its end and keeps what every request got, logits included."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.engine import EngineCore
from mstar.engine.model import Model
from mstar.engine.output import ErrorInfo, FinishReason, RequestOutput
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spans import Span
from mstar.engine.resources.step import NodeStep
from mstar.models.toy_items import KIND, NUM_FEATURES
from mstar.preprocess.items import Layout, PromptItem, array_of, item_digest, lay_out, prompt_keys
from mstar.preprocess.prompt import request_root
from tests.laws.watching import KeepingSampler

PAGE_SIZE = 4
# Logits are of size 1 to 10; the order of float32 sums differs between batches.
LOGITS = 2e-4


@dataclass(frozen=True)
class Picture:
    """An item of a prompt; its content follows from its seed."""

    seed: int
    length: int
    is_whole: bool = False
    advance: int | None = None

    def features(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        rng = np.random.default_rng(self.seed)
        return rng.standard_normal((self.length, NUM_FEATURES), np.float32)

    def item(self) -> PromptItem:
        features = self.features()
        digest = item_digest(
            features,
            kind=KIND,
            processor=b"toy",
            parameters={},
            length=self.length,
            advance=self.advance,
            is_whole=self.is_whole,
        )
        span = Span(self.length, digest, self.advance, self.is_whole, KIND)
        return PromptItem(span, {"features": array_of(features)})


Prompt = Sequence[int | Picture]
"""Token ids and pictures in their order."""


def layout(parts: Prompt) -> Layout:
    """Return the layout of a prompt; without spans where there is no picture."""
    runs: list[Sequence[int] | PromptItem] = []
    for is_picture, group in groupby(parts, lambda part: isinstance(part, Picture)):
        run = list(group)
        if is_picture:
            runs += [part.item() for part in run if isinstance(part, Picture)]
        else:
            runs.append([part for part in run if isinstance(part, int)])
    laid_out = lay_out(runs)
    return laid_out if laid_out.inputs else Layout(laid_out.token_ids, [], [])


class Recorder(Node):
    """A node that keeps the logits behind every token.

    Args:
        inner: What computes.
        change: Called with a batch and its logits before they are sampled; may write to them.
    """

    def __init__(self, inner: Node, change: Callable[[Batch, Tensor], None] | None = None) -> None:
        self._inner = inner
        self._change = change
        self.logits: dict[str, dict[int, Tensor]] = {}
        self.batches: list[tuple[tuple[str, int], ...]] = []
        """Request and span of each segment, a step each."""

    def declare(self, batch: Batch) -> NodeStep:
        return self._inner.declare(batch)

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        self.batches.append(tuple((s.request_id, s.span) for s in batch.segments))

        def keep(logits: Tensor) -> None:
            if self._change is not None:
                self._change(batch, logits)
            for row, index in enumerate(batch.yielding):
                request = batch.requests[index]
                own = self.logits.setdefault(request.request_id, {})
                own[len(request.tokens) - request.num_prompt_tokens] = logits[row].clone()

        sampler = KeepingSampler(plans["sampler"], keep)
        return self._inner.forward(batch, {**plans, "sampler": sampler})


@dataclass
class Answer:
    """All that one request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: ErrorInfo | None = None
    logits: Tensor = field(default_factory=lambda: torch.zeros(0))


class Bench:
    """An engine on a model, its books checked after every step.

    Args:
        model: Its node is replaced by a recorder.
        change: What the recorder does to logits.
        numbers: Of the deployment.
    """

    def __init__(
        self,
        model: Model,
        change: Callable[[Batch, Tensor], None] | None = None,
        **numbers: Any,
    ) -> None:
        name, node = next(iter(model.nodes.items()))
        inner = node._inner if isinstance(node, Recorder) else node
        self.recorder = Recorder(inner, change)
        model.nodes = {**model.nodes, name: self.recorder}
        defaults = {"max_num_seqs": 8, "page_size": PAGE_SIZE, "num_pages": 200}
        self.engine = EngineCore(model, Deployment(**(defaults | numbers)))
        self.answers: dict[str, Answer] = {}

    def add(
        self,
        request_id: str,
        parts: "Prompt",
        *,
        salt: str | None = None,
        **params: Any,
    ) -> None:
        root = request_root(self.engine.root, salt)
        made = layout(parts)
        ids, spans = made.token_ids, made.spans
        size = self.engine.deployment.page_size
        wanted = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | params
        self.engine.add_request(
            PreparedRequest(
                request_id=request_id,
                token_ids=ids,
                params=SamplingParams(**wanted),
                page_keys=prompt_keys(ids, spans, size, root) if root is not None else [],
                root=root,
                spans=spans,
                inputs=made.inputs,
            )
        )
        self.answers[request_id] = Answer()

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        self.engine.check()
        for output in outputs:
            answer = self.answers[output.request_id]
            assert answer.finish_reason is None, f"{output} after the end"
            answer.token_ids += output.token_ids
            answer.logprobs += [one.logprob for one in output.logprobs or ()]
            answer.finish_reason = output.finish_reason
            answer.num_cached_tokens = output.num_cached_tokens
            answer.error = output.error
        return outputs

    def drain(self, max_steps: int = 3000) -> dict[str, Answer]:
        """Run to the end; returns all answers so far, and forgets them."""
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < max_steps, f"no end after {steps} steps: {self.engine.stats()}"
        stats = self.engine.stats()
        assert stats.num_pages_used == 0, stats
        for request_id, answer in self.answers.items():
            rows = self.recorder.logits.pop(request_id, {})
            if rows:
                answer.logits = torch.stack([rows[index] for index in sorted(rows)])
        answers, self.answers = self.answers, {}
        return answers


def ask(model: Model, ids: "Prompt", *, numbers: Any = None, **params: Any) -> Answer:
    """Return what a request gets from a fresh engine without reuse, all by itself."""
    bench = Bench(model, **({"enable_prefix_caching": False} | (numbers or {})))
    bench.add("alone", ids, **params)
    return bench.drain()["alone"]


def prompt(seed: int, num_ids: int, vocab_size: int = 160) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, vocab_size) for _ in range(num_ids)]


def assert_same(got: Answer, expected: Answer) -> None:
    assert got.token_ids == expected.token_ids
    assert got.finish_reason == expected.finish_reason
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=LOGITS)
