"""Logits of every position, out of the runner, the resources and the node that serve requests."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.engine import EngineCore
from mstar.engine.model import Model
from mstar.engine.request import PreparedRequest, Request
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.step import NodeStep
from mstar.engine.runner import Runner
from mstar.models.decoder import DecoderNode


class Recorder(Node):
    """A decoder that keeps the logits of each step.

    Args:
        inner: The decoder.
        first: Position from which they are kept, by request.
    """

    def __init__(self, inner: DecoderNode, first: Mapping[str, int]) -> None:
        self._inner = inner
        self._first = first
        self.logits: dict[str, list[Tensor]] = {}

    def declare(self, batch: Batch) -> NodeStep:
        return self._inner.declare(batch)

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        ids = torch.from_numpy(batch.token_ids())
        kv = plans["kv"]
        hidden = self._inner.hidden(
            self._inner.embed_ids(ids), kv, plans["position"], plans["attention"]
        )
        rows = kv.qo_indptr.tolist()
        for i, request in enumerate(batch.requests):
            skipped = max(0, self._first[request.request_id] - request.num_computed_tokens)
            kept = hidden[rows[i] : rows[i + 1]][skipped:]
            self.logits.setdefault(request.request_id, []).append(self._inner.logits(kept))
        return NodeOutput(token_ids=())


def all_logits(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    chunk: int | None = None,
    last: int | None = None,
    deployment: Deployment | None = None,
) -> list[Tensor]:
    """Return ``[len(prompt), vocab_size]`` for each prompt, all computed side by side.

    Args:
        model: A decoder.
        prompts: Token ids.
        chunk: Tokens of each prompt in one step; ``None``: the whole prompt at once.
        last: Only so many rows, from each prompt's end; ``None``: all.
        deployment: The numbers of the resources.
    """
    (name,) = model.nodes
    node = model.nodes[name]
    assert isinstance(node, DecoderNode)
    recorder = Recorder(
        node,
        {str(i): max(0, len(prompt) - (last or len(prompt))) for i, prompt in enumerate(prompts)},
    )
    deployment = deployment or small_deployment()
    runner = Runner({name: recorder}, model.specs, deployment)
    # One id past each prompt, so that no step is asked for a token.
    requests = [
        Request(
            PreparedRequest(
                request_id=str(i), token_ids=[*prompt, 0], params=SamplingParams(temperature=0)
            ),
            model.graph.cursor("prefill"),
            model.component_of("prefill"),
            max_len=len(prompt) + 1,
            arrival=i,
        )
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        assert runner.open(request) is None
    while True:
        spans = [
            (request, min(request.num_uncomputed_tokens - 1, chunk or request.max_len))
            for request in requests
            if request.num_uncomputed_tokens > 1
        ]
        if not spans:
            break
        batch = Batch.of(name, spans)
        assert runner.admit(batch) is None
        runner.run(batch)
        for request, span in spans:
            request.num_computed_tokens += span
        runner.check()
    return [torch.cat(recorder.logits[request.request_id]) for request in requests]


def greedy(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    deployment: Deployment | None = None,
) -> list[list[int]]:
    """Return the most likely continuation of each prompt, as the engine serves it."""
    engine = EngineCore(model, deployment or small_deployment())
    answers: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        engine.add_request(
            PreparedRequest(request_id=str(i), token_ids=list(prompt), params=params)
        )
        answers[str(i)] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            answers[output.request_id] += output.token_ids
    engine.check()
    return list(answers.values())


def small_deployment(
    *,
    dtype: str = "float32",
    backend: str | None = None,
    max_num_batched_tokens: int = 512,
    page_size: int = 4,
    num_pages: int = 128,
    max_model_len: int = 128,
) -> Deployment:
    """Return a deployment of a few pages without reuse."""
    return Deployment(
        dtype=dtype,
        max_num_seqs=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=num_pages,
        enable_prefix_caching=False,
        attention_backend=backend,
    )
