"""Drives an engine over any model, and keeps all that requests get and nodes do."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from mstar.engine.array import to_numpy
from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.capture import RecordableNode
from mstar.engine.engine import EngineCore
from mstar.engine.model import Model
from mstar.engine.output import Emitted, ErrorInfo, FinishReason, RequestOutput
from mstar.engine.overlap import Pending
from mstar.engine.request import PreparedRequest, Request, RequestStatus
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplerSpec
from mstar.engine.resources.sampler.manager import Sampled, SamplerPlan, Sampling
from mstar.engine.resources.step import NodeStep
from mstar.preprocess.prompt import request_root

PAGE_SIZE = 4
LOGITS = 2e-4
"""The order of float32 sums differs between batches; logits are of size 1 to 10."""

Ask = Callable[[str, bytes | None], PreparedRequest]
"""Makes a request, given its id and its root."""


class KeepingSampler:
    """A sampler's plan that has the logits kept which it is asked about.

    Args:
        plan: What samples.
        keep: Called with the logits before they are sampled.
    """

    def __init__(self, plan: SamplerPlan, keep: Callable[[Tensor], object]) -> None:
        self._plan = plan
        self._keep = keep

    def sample(self, logits: Tensor) -> Sampled:
        return self.launch(logits).fetch()

    def launch(self, logits: Tensor, before: Tensor | None = None) -> Sampling:
        self._keep(logits)
        return self._plan.launch(logits, before)


class Watcher(Node):
    """A node that keeps what it chose and from which logits, and counts what it encoded.

    Args:
        inner: What computes.
        sampler_key: The resource that it samples with; ``None``: it samples nothing.
    """

    def __init__(self, inner: Node, sampler_key: str | None) -> None:
        self._inner = inner
        self._key = sampler_key
        self.kind = inner.kind  # type: ignore[misc]
        self.max_batch = inner.max_batch
        self.chosen: dict[str, list[int]] = {}
        self.logits: dict[str, list[Tensor]] = {}
        self.sizes: list[int] = []
        """Requests of each batch."""
        self.num_encoded = 0
        self.last: Batch | None = None

    def shape(self, request: Request, part: object) -> Hashable:
        return self._inner.shape(request, part)

    def declare(self, batch: Batch) -> NodeStep:
        return self._inner.declare(batch)

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        self.last = batch
        kept: list[Tensor] = []
        if self._key is not None:
            plans = self._keeping(plans, kept)
        return self.keep(batch, self._inner.forward(batch, plans), kept)

    def _keeping(self, plans: Mapping[str, Any], kept: list[Tensor]) -> dict[str, Any]:
        assert self._key is not None
        sampler = KeepingSampler(plans[self._key], lambda logits: kept.append(logits.clone()))
        return {**plans, self._key: sampler}

    def keep(self, batch: Batch, output: NodeOutput, kept: list[Tensor]) -> NodeOutput:
        """Keep what a step chose, and from what."""
        self.sizes.append(len(batch.requests))
        self.num_encoded += len(batch.items)
        for place, index in enumerate(batch.yielding):
            request = batch.requests[index]
            # Of one that has gone on since the step was launched nobody asks it.
            is_over = request.status is not RequestStatus.RUNNING
            if is_over or batch.node not in request.cursor.ready():
                continue
            name = request.request_id
            self.chosen.setdefault(name, []).append(output.token_ids[place])
            self.logits.setdefault(name, []).append(kept[0][place])
        return output


class RecordedWatcher(Watcher, RecordableNode):
    """One whose inner node's decode steps may be recorded."""

    _inner: RecordableNode

    def __init__(self, inner: RecordableNode, sampler_key: str | None) -> None:
        super().__init__(inner, sampler_key)
        self.num_streams = inner.num_streams
        self.splits_prompts = inner.splits_prompts

    def ids(self, batch: Batch) -> npt.NDArray[np.int64]:
        return self._inner.ids(batch)

    def compute(self, ids: Tensor, plans: Mapping[str, Any]) -> Tensor:
        return self._inner.compute(ids, plans)

    def note(self, batch: Batch, rows: Tensor) -> None:
        self._inner.note(batch, rows)

    def launch(
        self, batch: Batch, rows: Tensor, plans: Mapping[str, Any], before: Tensor | None = None
    ) -> Pending:
        self.last = batch
        kept: list[Tensor] = []
        pending = self._inner.launch(batch, rows, self._keeping(plans, kept), before)
        return _Noted(pending, lambda output: self.keep(batch, output, kept))


class _Noted(Pending):
    def __init__(self, pending: Pending, note: Callable[[NodeOutput], NodeOutput]) -> None:
        self.tokens = pending.tokens
        self._pending = pending
        self._note = note

    def fetch(self) -> NodeOutput:
        return self._note(self._pending.fetch())


def watcher_of(node: Node, sampler_key: str | None) -> Watcher:
    """Return a watcher of a node; arguments as for ``Watcher``."""
    if isinstance(node, RecordableNode):
        return RecordedWatcher(node, sampler_key)
    return Watcher(node, sampler_key)


@dataclass
class Answer:
    """All that one request got."""

    tokens: list[int] = field(default_factory=list)
    emitted: list[Emitted] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None
    num_cached_tokens: int = 0
    """Of its last leg."""
    chosen: list[int] = field(default_factory=list)
    """Ids that were sampled, those that are no answer included."""
    logits: list[Tensor] = field(default_factory=list)
    """Those behind every id that was sampled."""


class Desk:
    """An engine on a model, its books checked after every step.

    Args:
        model: Left as it is.
        numbers: Of the deployment.
    """

    def __init__(self, model: Model, **numbers: Any) -> None:
        samplers = {
            node: spec.resource_key
            for spec in model.specs
            if isinstance(spec, SamplerSpec)
            for node in spec.nodes
        }
        nodes = model.nodes
        self.watchers = {n: watcher_of(node, samplers.get(n)) for n, node in nodes.items()}
        defaults: dict[str, Any] = {"max_num_seqs": 8, "page_size": PAGE_SIZE, "num_pages": 400}
        model.nodes = self.watchers
        try:
            self.engine = EngineCore(model, Deployment(**(defaults | numbers)))
        finally:
            model.nodes = nodes
        self.answers: dict[str, Answer] = {}

    @property
    def num_encoded(self) -> int:
        """Items that encoders were run on."""
        return sum(watcher.num_encoded for watcher in self.watchers.values())

    @property
    def largest_batch(self) -> int:
        return max(max(w.sizes, default=0) for w in self.watchers.values())

    def add(self, name: str, ask: Ask, salt: str | None = None) -> None:
        self.put(ask(name, request_root(self.engine.root, salt)))

    def put(self, prepared: PreparedRequest) -> None:
        self.engine.add_request(prepared)
        self.answers[prepared.request_id] = Answer()

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        self.engine.check()
        for output in outputs:
            answer = self.answers[output.request_id]
            assert answer.finish_reason is None, f"{output} after the end"
            answer.tokens += output.token_ids
            answer.emitted += output.emitted
            answer.finish_reason = output.finish_reason
            answer.num_cached_tokens = output.num_cached_tokens
            answer.error = output.error
        return outputs

    def abort(self, name: str) -> None:
        """End a request, of which nothing is told."""
        assert self.engine.abort(name)
        self._taken(name)
        del self.answers[name]
        self.engine.check()

    def drain(self, max_steps: int = 3000) -> dict[str, Answer]:
        """Run to the end; returns all answers so far, and forgets them."""
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < max_steps, f"no end after {steps} steps: {self.engine.stats()}"
        assert_nothing_is_held(self.engine)
        for name, answer in self.answers.items():
            answer.chosen, answer.logits = self._taken(name)
        answers, self.answers = self.answers, {}
        return answers

    def ask(self, ask: Ask, salt: str | None = None, name: str = "r") -> Answer:
        """Return the answer to one request, by itself."""
        self.add(name, ask, salt)
        return self.drain()[name]

    def _taken(self, name: str) -> tuple[list[int], list[Tensor]]:
        chosen: list[int] = []
        logits: list[Tensor] = []
        for watcher in self.watchers.values():
            chosen += watcher.chosen.pop(name, [])
            logits += watcher.logits.pop(name, [])
        return chosen, logits


def assert_nothing_is_held(engine: EngineCore) -> None:
    """Assert that no request has left anything behind but what is kept for reuse."""
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0), stats


def assert_same(got: Answer, expected: Answer, atol: float = LOGITS) -> None:
    """Assert that a request got what another got.

    Args:
        got: One answer.
        expected: The other.
        atol: Of logits and sound.
    """
    assert got.error is None, got.error
    assert got.tokens == expected.tokens
    assert got.chosen == expected.chosen
    assert got.finish_reason == expected.finish_reason
    torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=atol)
    assert_same_pieces(got.emitted, expected.emitted, atol)


def assert_same_pieces(got: Sequence[Emitted], expected: Sequence[Emitted], atol: float) -> None:
    """Assert that what was emitted beside tokens is the same; pictures by a level at most."""
    told = [[(p.name, p.text, _named(p.info)) for p in pieces] for pieces in (got, expected)]
    assert told[0] == told[1]
    for one, other in zip(got, expected, strict=True):
        # Figures out of logits differ as these do; a log-probability by twice as much.
        assert _figures(one.info) == pytest.approx(_figures(other.info), abs=2 * atol)
        assert (one.array is None) == (other.array is None)
        if one.array is not None and other.array is not None:
            ours, theirs = (np.asarray(to_numpy(a), np.float64) for a in (one.array, other.array))
            assert ours.shape == theirs.shape
            most = 1.0 if one.array.dtype == "uint8" else atol
            assert np.abs(ours - theirs).max(initial=0.0) <= most


def _figures(info: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in info.items() if isinstance(value, float)}


def _named(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is no float, with the names of what is."""
    return {name: None if isinstance(value, float) else value for name, value in info.items()}
