"""A decoder that reads items: encoder outputs stand in the embeddings of their slots."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mstar.engine.batch import Batch
from mstar.engine.request import Request, RequestItem
from mstar.engine.resources.attention.config import AttentionStep
from mstar.engine.resources.base import Item
from mstar.engine.resources.encoder.config import EncoderStep
from mstar.engine.resources.encoder.manager import EncoderPlan
from mstar.engine.resources.step import NodeStep, Segment
from mstar.models.decoder import DecoderNode


class Piece(NamedTuple):
    """What a step computes of one item."""

    request: Request
    item: RequestItem
    row: int
    """Its first token among all of the step."""
    start: int
    """First slot of the item that is computed."""
    stop: int


def pieces(batch: Batch) -> Iterator[Piece]:
    """Yield the parts of items that a step computes, in the step's order."""
    row = 0
    for request, segment in zip(batch.requests, batch.segments, strict=True):
        first = request.num_computed_tokens
        last = first + segment.span
        for item in request.items:
            start, stop = max(first, item.start), min(last, item.stop)
            if start < stop:
                at = row + start - first
                yield Piece(request, item, at, start - item.start, stop - item.start)
        row += segment.span


def item_of(request: Request, item: RequestItem) -> Item:
    """Return an item as resources know it."""
    return Item(request.request_id, item.name, item.span.length)


class ItemDecoderNode(DecoderNode):
    """A decoder whose prompts may have items.

    Inside an item that is to be computed whole, attention goes in both directions.
    """

    encoder_key = "encoder"
    """The resource that has the encoders' outputs."""

    def declare(self, batch: Batch) -> NodeStep:
        """Ask for attention in both directions inside whole items, and for their outputs."""
        step = super().declare(batch)
        found = list(pieces(batch))
        done = tuple(
            item_of(piece.request, piece.item)
            for piece in found
            if piece.stop == piece.item.span.length and not _is_read_again(piece)
        )
        resources = dict(step.resources)
        if any(piece.item.span.is_whole for piece in found):
            segments, is_causal = _cut_at_whole_items(batch)
            resources["attention"] = AttentionStep(is_causal=is_causal)
        else:
            segments = batch.segments
        resources[self.encoder_key] = EncoderStep(batch.segments, done=done, num_read=len(found))
        return NodeStep(segments, resources)

    def embed(self, ids: Tensor, batch: Batch, plans: Mapping[str, Any]) -> Tensor:
        """Return the embeddings, encoder outputs in the slots of items."""
        found = list(pieces(batch))
        if not found:
            return self.embed_ids(ids)
        # Placeholders are no ids of the model.
        x = self.embed_ids(self._masked(ids, found))
        outputs: EncoderPlan = plans[self.encoder_key]
        for piece in found:
            rows = outputs.read(piece.item.name)[piece.start : piece.stop]
            x[piece.row : piece.row + len(rows)] = rows.to(x.dtype)
        return x

    @staticmethod
    def _masked(ids: Tensor, found: list[Piece]) -> Tensor:
        ids = ids.clone()
        for piece in found:
            ids[piece.row : piece.row + piece.stop - piece.start] = 0
        return ids


def _is_read_again(piece: Piece) -> bool:
    """Tell whether a later item of the request, the same content again, counts on the output."""
    name, stop = piece.item.name, piece.item.stop
    later = (item for item in piece.request.items if item.start >= stop)
    return any(item.name == name and item.is_encoded for item in later)


def _cut_at_whole_items(batch: Batch) -> tuple[tuple[Segment, ...], tuple[bool, ...]]:
    """Return the batch's segments, each whole item one of its own, and which are causal."""
    segments: list[Segment] = []
    is_causal: list[bool] = []

    def add(request: Request, span: int, causal: bool) -> None:
        if span:
            segments.append(Segment(request.request_id, "main", span))
            is_causal.append(causal)

    for request, segment in zip(batch.requests, batch.segments, strict=True):
        at = request.num_computed_tokens
        last = at + segment.span
        for item in request.items:
            if item.span.is_whole and at < item.stop and item.start < last:
                add(request, max(item.start - at, 0), True)
                at = max(item.start, at)
                add(request, item.stop - at, False)
                at = item.stop
        add(request, last - at, True)
    return tuple(segments), tuple(is_causal)


def tensor_of(array: Any, device: torch.device) -> Tensor:
    """Return an input of an encoder as a tensor on ``device``.

    Args:
        array: A ``mstar.engine.request.Array``.
        device: Where the encoder runs.
    """
    flat = torch.frombuffer(bytearray(array.data), dtype=getattr(torch, array.dtype))
    return flat.view(array.shape).to(device)
