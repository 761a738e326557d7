"""Toy models of what composite models are made of, and one that has all of it."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mstar.engine.batch import Batch, Node, NodeKind, NodeOutput
from mstar.engine.chunks import Sized
from mstar.engine.graph import Cursor, Edge, ForEach, Graph, Loop, Parallel, Run, Sequential, Walk
from mstar.engine.model import Leg, Model
from mstar.engine.output import Emitted
from mstar.engine.request import (
    Companion,
    Component,
    ContextItem,
    PreparedRequest,
    Request,
    context_root,
)
from mstar.engine.resources.encoder.config import EncoderConfig, EncoderSpec, EncoderStep
from mstar.engine.resources.kv.config import KVStep
from mstar.engine.resources.position.config import PositionStep
from mstar.engine.resources.sampler.config import SampleStep, SamplingParams
from mstar.engine.resources.step import NodeStep, Segment
from mstar.models.composite import Scope
from mstar.models.decoder import DecoderModel, DecoderNode, load
from mstar.models.dummy import DummyCheckpoint
from mstar.models.toy import TOY_CONFIG
from mstar.models.toy_items import ToyEncoder, toy_item_model
from mstar.preprocess.items import array_of, item_digest, prompt_keys

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PAGE_SIZE = 4
SOUND_SLOTS = 6


def keyed(name: str, ids: list[int], root: bytes | None, **fields: Any) -> PreparedRequest:
    """Return a request for a prompt of ids, greedy unless its parameters are given."""
    keys = [] if root is None else prompt_keys(ids, (), PAGE_SIZE, root)
    own: dict[str, Any] = {"params": GREEDY, "page_keys": keys} | fields
    return PreparedRequest(request_id=name, token_ids=ids, root=root, **own)


class Visited(Node):
    """A node of visits that does what it is told and notes who came together."""

    kind = NodeKind.VISIT

    def __init__(
        self,
        act: Callable[[Request, object], Sequence[Emitted]] = lambda request, chunk: (),
        max_batch: int | None = None,
        shape: Callable[[Request, object], Hashable] = lambda request, part: None,
    ) -> None:
        self._act = act
        self._shape = shape
        self.max_batch = max_batch
        self.batches: list[list[str]] = []

    def shape(self, request: Request, part: object) -> Hashable:
        return self._shape(request, part)

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        self.batches.append([request.request_id for request in batch.requests])
        assert batch.chunks is not None
        pairs = zip(batch.requests, batch.chunks, strict=True)
        return NodeOutput(
            token_ids=(), emitted={i: self._act(*pair) for i, pair in enumerate(pairs)}
        )


def decoder_of(seed: int, name: str, node_class: type[DecoderNode]) -> DecoderModel:
    """Return a toy decoder with nodes of a class of its own."""
    config = TOY_CONFIG | {"architectures": ["LlamaForCausalLM"]}
    return load(
        DummyCheckpoint(Path("toy"), config, seed=seed),
        name=name,
        dtype=torch.float32,
        device=torch.device("cpu"),
        node_class=node_class,
    )


class Listener(DecoderNode):
    """A decoder that adds the mean of what it is beside to every embedding."""

    def declare(self, batch: Batch) -> NodeStep:
        step = super().declare(batch)
        return NodeStep(step.segments, {**step.resources, "encoder": EncoderStep()})

    def embed(self, ids: Tensor, batch: Batch, plans: Mapping[str, Any]) -> Tensor:
        x = self.embed_ids(ids)
        row = 0
        for request, segment in zip(batch.requests, batch.segments, strict=True):
            for item in request.context:
                x[row : row + segment.span] += plans["encoder"].read(item.name).mean(0)
            row += segment.span
        return x


def listener() -> tuple[DecoderModel, ToyEncoder]:
    """Return a decoder of items of kind ``sound`` beside its stream, and its encoder."""
    model = decoder_of(3, "listener", Listener)
    (decoder,) = model.nodes
    hidden_size = TOY_CONFIG["hidden_size"]
    encoder = ToyEncoder(hidden_size, 3)
    model.nodes = {**model.nodes, "encoder": encoder}
    model.graph = replace(
        model.graph, nodes=(decoder, "encoder"), edges=(Edge("encoder", decoder, "sound"),)
    )
    model.encoders = {"sound": "encoder"}
    config = EncoderConfig(hidden_size=hidden_size)
    model.specs = (*model.specs, EncoderSpec("encoder", {decoder, "encoder"}, config))
    return model, encoder


def listening(
    name: str, ids: list[int], sound: int, root: bytes | None, **fields: Any
) -> PreparedRequest:
    """Return a request that listens to a sound, which follows from its number."""
    features = np.random.default_rng(sound).standard_normal((SOUND_SLOTS, 8), np.float32)
    digest = item_digest(
        features, kind="sound", processor=b"toy", parameters={}, length=SOUND_SLOTS
    )
    context = [ContextItem("sound", digest, SOUND_SLOTS, {"features": array_of(features)})]
    begin = context_root(root, context)
    keys = [] if begin is None else prompt_keys(ids, (), PAGE_SIZE, begin)
    return keyed(name, ids, root, page_keys=keys, context=context, **fields)


class Guided(DecoderNode):
    """A decoder that samples from what its main stream says beyond its companion."""

    scale = 3.0

    def declare(self, batch: Batch) -> NodeStep:
        segments: list[Segment] = []
        for segment in batch.segments:
            segments += [segment, segment._replace(label="other")]
        sampled = tuple(batch.segments[i] for i in batch.yielding)
        step = super().declare(batch)
        return NodeStep(
            tuple(segments),
            {
                "kv": KVStep(),
                "position": PositionStep(),
                "attention": step.resources["attention"],
                "sampler": SampleStep(sampled),
            },
        )

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        spans = [segment.span for segment in batch.segments]
        both = zip(
            torch.from_numpy(batch.token_ids()).split(spans),
            torch.from_numpy(batch.token_ids("other")).split(spans),
            strict=True,
        )
        ids = torch.cat([piece for pair in both for piece in pair])
        logits = self.compute(ids, plans)
        ends = torch.tensor([span for span in spans for _ in range(2)]).cumsum(0) - 1
        main, other = logits[ends[0::2]], logits[ends[1::2]]
        guided = (other + self.scale * (main - other))[list(batch.yielding)]
        if not batch.yielding:
            return NodeOutput(token_ids=())
        return NodeOutput(token_ids=plans["sampler"].sample(guided).token_ids.tolist())


def guided_model() -> DecoderModel:
    """Return a decoder of two streams a request."""
    return decoder_of(4, "guided", Guided)


def guiding(
    name: str, ids: list[int], other: list[int], root: bytes | None, **fields: Any
) -> PreparedRequest:
    """Return a request of two streams."""
    keys = [] if root is None else prompt_keys(other, (), PAGE_SIZE, root)
    return keyed(name, ids, root, companions=[Companion("other", other, keys)], **fields)


_LISTEN, _CHAT, _GUIDE = Scope("listen"), Scope("chat"), Scope("guide")
SPEAK, CLOSE = "speak", "close"
_WORDS = "words"


class Circus(Model):
    """Everything at once, as a request's option ``act`` says.

    - ``chat``: text and pictures to text.
    - ``speak``: the same, and every few tokens are visited by a speaker meanwhile.
    - ``guide``: two streams to text; then three visits, one of which tells all ids.
    - ``listen``: a sound beside a prompt to ids that stay inside, and are spoken about in a leg
      of ``speak``.
    - ``close``: three visits, no tokens.

    With the option ``fails`` the first of three visits fails.
    """

    name = "circus"

    def __init__(self) -> None:
        self.acts = {_LISTEN: listener()[0], _CHAT: toy_item_model(1), _GUIDE: guided_model()}
        self.nodes = {}
        self.specs = []
        self.encoders = {}
        walks: list[tuple[str, Walk]] = []
        edges: list[Edge] = []
        self._components: dict[str, Component] = {}
        for scope, part in self.acts.items():
            specs = scope.specs(part)
            self.nodes |= scope.nodes(part)
            self.specs += specs
            self.encoders = {**self.encoders, **{k: scope(n) for k, n in part.encoders.items()}}
            walks += scope.walks(part)
            edges += scope.edges(part)
            own = scope.component(part.component_of("prefill"), specs)
            self._components[scope.name] = replace(own, is_silent=scope is _LISTEN)
        nothing = Component(vocab_size=0, stop_token_ids=frozenset(), resources=frozenset())
        self._components[CLOSE] = nothing
        self._writer = _CHAT(next(iter(self.acts[_CHAT].nodes)))
        self.telling = frozenset((self._writer,))
        self.nodes["speaker"] = Visited(self._speak, max_batch=2)
        self.nodes["closer"] = Visited(self._close, shape=lambda r, _: len(r.tokens) % 2)
        write = Loop(Run(self._writer), until=_CHAT("finished"))
        walks += [
            (SPEAK, Parallel(write, ForEach(Run("speaker"), _WORDS))),
            (CLOSE, Sequential(Run("closer"), Loop(Run("closer"), times=2))),
        ]
        edges.append(Edge(self._writer, "speaker", _WORDS, Sized(3, first=1)))
        finished = tuple(scope("finished") for scope in self.acts)
        self.graph = Graph(tuple(self.nodes), tuple(walks), tuple(edges), finished)
        part = self.acts[_CHAT]
        self.vocab_size, self.max_model_len = part.vocab_size, part.max_model_len
        self.stop_token_ids = part.stop_token_ids
        self.root_constants = {"weights": "the toys 1, 3 and 4"}

    @staticmethod
    def _speak(request: Request, chunk: object) -> Sequence[Emitted]:
        assert isinstance(chunk, np.ndarray)
        return [Emitted(name="speech", array=array_of(chunk))]

    @staticmethod
    def _close(request: Request, chunk: object) -> Sequence[Emitted]:
        if request.prepared.options.get("fails"):
            raise ValueError("this visit fails")
        return [Emitted(name="told", info={"ids": list(request.generated())})]

    def first_walk(self, prepared: PreparedRequest) -> Cursor:
        act: str = prepared.options["act"]
        return self.graph.cursor(act if act in (SPEAK, CLOSE) else f"{act}.prefill")

    def next_walk(self, request: Request) -> Cursor | Leg | None:
        act = request.cursor.name.partition(".")[0]
        if request.cursor.local_name == "prefill" and request.finish_reason is None:
            return self.graph.cursor(f"{act}.decode")
        if act == _GUIDE.name:
            return self.graph.cursor(CLOSE)
        if act == _LISTEN.name:
            heard = list(request.generated())
            before = request.prepared
            fields = {"params": before.params, "options": before.options}
            leg = keyed(request.request_id, [7, *heard], before.root, **fields)
            return Leg(leg, SPEAK, (Emitted(name="heard", info={"ids": heard}),))
        return None

    def component_of(self, walk: str) -> Component:
        return self._components[_CHAT.name if walk == SPEAK else walk.partition(".")[0]]

    def emit(self, request: Request, node: str, token: int) -> Sequence[Emitted]:
        if request.cursor.name != SPEAK:
            return ()
        return [Emitted(name=_WORDS, array=array_of(np.array([token])))]

    def holds(self, predicate: str, request: Request) -> bool:
        return request.finish_reason is not None
