"""Has the CPU choose what a CUDA device chose, and holds what both computed against each other."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.engine import EngineCore
from mstar.engine.model import Model
from mstar.engine.resources.step import NodeStep
from mstar.preprocess.prompt import request_root
from tests.gpu.likely import Told, drain
from tests.laws.watching import Answer, Ask, Desk

# What logits are off by on average, as a share of the largest: two to four times what it is on a
# CPU. With another picture or recording they are off by 0.03 to 0.2.
SHARE = {"bfloat16": 0.015, "float16": 2e-3, "float32": 3e-4}
OUTLIER = 10
"""What one of them may be off by, times that."""


def ask_all(core: EngineCore, asks: Sequence[Ask], **params: Any) -> list[Told]:
    """Return what requests are told that run together; ``params`` are put in place of theirs."""
    root = request_root(core.root, None)
    for place, ask in enumerate(asks):
        made = ask(str(place), root)
        core.add_request(msgspec.structs.replace(made, params=replace(made.params, **params)))
    return drain(core, len(asks))


class _Forcing(Node):
    """A node whose requests get the tokens that they are to get, whatever it chooses.

    Args:
        inner: What computes.
        left: Each request's tokens, in order; they are taken out.
    """

    def __init__(self, inner: Node, left: Mapping[str, deque[int]]) -> None:
        self._inner = inner
        self._left = left
        self.kind = inner.kind  # type: ignore[misc]
        self.max_batch = inner.max_batch

    def declare(self, batch: Batch) -> NodeStep:
        return self._inner.declare(batch)

    def shape(self, request: Any, part: object) -> Any:
        return self._inner.shape(request, part)

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        output = self._inner.forward(batch, plans)
        names = [batch.requests[index].request_id for index in batch.yielding]
        return replace(output, token_ids=[self._left[name].popleft() for name in names])


def replayed(
    model: Model, asks: Sequence[Ask], chosen: Sequence[Sequence[int]], **numbers: Any
) -> list[Answer]:
    """Return what requests get on the CPU that are made to choose these tokens, logits included.

    Args:
        model: On the CPU, in float32.
        asks: They run together.
        chosen: All that each chose, what is no answer included.
        numbers: Of the deployment.
    """
    desk = Desk(model, **{"enable_prefix_caching": False, **numbers})
    left = {str(place): deque(own) for place, own in enumerate(chosen)}
    for watcher in desk.watchers.values():
        watcher._inner = _Forcing(watcher._inner, left)
    for place, ask in enumerate(asks):
        desk.add(str(place), ask)
    answers = desk.drain()
    assert not any(left.values()), {name: len(own) for name, own in left.items()}
    return [answers[str(place)] for place in range(len(asks))]


def assert_told(told: Told, logits: Sequence[Tensor], share: float, *, is_best: bool) -> None:
    """Assert that log-probabilities are those of the CPU.

    Args:
        told: With those of the tokens that were chosen, and of others.
        logits: Of the CPU behind the same tokens.
        share: Of the largest logit that they may be off by on average.
        is_best: What was chosen was to be the likeliest.
    """
    assert [entry.token_id for entry in told.logprobs] == told.tokens
    known = [row.double().log_softmax(0) for row in logits]
    most = share * max(float(row.abs().max()) for row in logits)
    entries = [((e.token_id, e.logprob), *e.top) for e in told.logprobs]
    errors = torch.tensor(
        [
            [logprob - float(row[token]) for token, logprob in pairs]
            for pairs, row in zip(entries, known, strict=True)
        ]
    ).abs()
    assert errors.mean() < most, (errors.mean(), most)
    assert errors.max() < OUTLIER * most, (errors.max(), most)
    for entry, row in zip(told.logprobs, known, strict=True):
        assert not is_best or row.max() - row[entry.token_id] < 2 * OUTLIER * most


def assert_near(got: Sequence[Tensor], known: Sequence[Tensor], share: float) -> None:
    """Assert that logits are those of the CPU, but where a rule allows a token on one side only.

    Args:
        got: Behind every token of a request.
        known: Those of the CPU.
        share: Of the largest logit that they may be off by on average.
    """
    most = share * max(float(row[row.isfinite()].abs().max()) for row in known)
    found = []
    for ours, theirs in zip(got, known, strict=True):
        own, other = ours.double().cpu(), theirs.double()
        both = own.isfinite() & other.isfinite()
        # Of languages a rule leaves the likeliest alone.
        assert both.any() or own.isfinite().sum() == 1
        found.append((own - other)[both].abs())
    errors = torch.cat(found)
    assert errors.mean() < most, (errors.mean(), most)
    assert errors.max() < OUTLIER * most, (errors.max(), most)
