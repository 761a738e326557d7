"""A tiny model that reads items: an encoder and a decoder with seeded weights, for tests."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.graph import Edge
from mstar.engine.resources.encoder.config import EncoderConfig, EncoderSpec, EncoderStep
from mstar.engine.resources.encoder.manager import EncoderPlan
from mstar.engine.resources.position.config import (
    PositionConfig,
    PositionSpec,
    PositionStep,
    PosScheme,
)
from mstar.engine.resources.position.counters import SpanCounters
from mstar.engine.resources.step import NodeStep
from mstar.models.decoder import DecoderModel, load
from mstar.models.dummy import DummyCheckpoint
from mstar.models.items import ItemDecoderNode, item_of, pieces, tensor_of
from mstar.models.toy import TOY_CONFIG

KIND = "picture"
"""Kind of the items that the toy takes."""
NUM_FEATURES = 8
"""Elements of one slot's input, which is named ``features``: ``[length, 8]``, float32."""
_ENCODER = "encoder"


class ToyEncoder(Node):
    """Maps each slot's features, and the item's mean, to an embedding."""

    def __init__(self, hidden_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._weight = torch.randn(NUM_FEATURES, hidden_size, generator=generator)
        self.num_encoded = 0
        """Items that it was run on."""

    def declare(self, batch: Batch) -> NodeStep:
        """Ask for room for the outputs."""
        made = tuple(map(item_of, batch.requests, batch.items))
        return NodeStep(batch.segments, {_ENCODER: EncoderStep(made=made)})

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        """Encode the batch's items."""
        plan: EncoderPlan = plans[_ENCODER]
        for request, item in zip(batch.requests, batch.items, strict=True):
            plan.store(item_of(request, item), self._encode(item.inputs["features"]))
            self.num_encoded += 1
        return NodeOutput(token_ids=())

    def _encode(self, features: Any) -> Tensor:
        x = tensor_of(features, self._weight.device)
        return (x + x.mean(0)) @ self._weight


class ToyGridDecoder(ItemDecoderNode):
    """Numbers the slots of a picture by rows of two, and tells the positions itself."""

    def declare(self, batch: Batch) -> NodeStep:
        """Give the ids of every slot, where a picture is among them."""
        step = super().declare(batch)
        found = list(pieces(batch))
        if not found:
            return step
        ids = []
        for request, segment in zip(batch.requests, batch.segments, strict=True):
            counters = SpanCounters(request.prepared.spans, PositionConfig(kv_cache="kv"))
            first = request.num_computed_tokens
            ids.append(torch.from_numpy(counters.ids(first, first + segment.span)))
        joined = torch.cat(ids)
        for piece in found:
            rows = slice(piece.row, piece.row + piece.stop - piece.start)
            places = torch.arange(piece.start, piece.stop)
            joined[rows] += places // 2 - places
        position = PositionStep(pos_ids=joined)
        return NodeStep(step.segments, {**step.resources, "position": position})


def toy_item_model(
    seed: int = 0,
    scheme: PosScheme = PosScheme.SEQUENTIAL,
    block_step: int = 1,
    *,
    has_grid: bool = False,
    **changes: Any,
) -> DecoderModel:
    """Return a two-layer decoder that reads pictures, with drawn weights, on the CPU.

    Args:
        seed: Decides every weight.
        scheme: Rule of its positions.
        block_step: Belongs to ``PosScheme.BLOCK``.
        has_grid: The decoder gives the ids inside pictures itself.
        changes: Fields of its ``config.json`` that are to differ from the toy's own.
    """
    config = TOY_CONFIG | {"architectures": ["LlamaForCausalLM"]} | changes
    model = load(
        DummyCheckpoint(Path("toy"), config, seed=seed),
        name="toy-items",
        dtype=torch.float32,
        device=torch.device("cpu"),
        node_class=ToyGridDecoder if has_grid else ItemDecoderNode,
    )
    (decoder,) = model.nodes
    hidden_size = config["hidden_size"]
    model.nodes = {**model.nodes, _ENCODER: ToyEncoder(hidden_size, seed)}
    model.graph = replace(
        model.graph,
        nodes=(*model.graph.nodes, _ENCODER),
        edges=(Edge(_ENCODER, decoder, KIND),),
    )
    model.encoders = {KIND: _ENCODER}
    positioned = (
        replace(spec, config=replace(spec.config, scheme=scheme, block_step=block_step))
        if isinstance(spec, PositionSpec)
        else spec
        for spec in model.specs
    )
    model.specs = (
        *positioned,
        EncoderSpec(_ENCODER, {decoder, _ENCODER}, EncoderConfig(hidden_size=hidden_size)),
    )
    return model
