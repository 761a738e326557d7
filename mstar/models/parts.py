"""Composite checkpoints: one part of them at a time, and the models that are made of the parts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mstar.engine.batch import Node
from mstar.engine.graph import Edge, Graph
from mstar.engine.resources.encoder.config import EncoderConfig, EncoderSpec
from mstar.errors import WeightsError
from mstar.models.base import Description
from mstar.models.checkpoint import Checkpoint
from mstar.models.decoder import DecoderModel

ENCODER = "encoder"
"""Name of the node, and key of the resource, that has the encoder's outputs."""


class PartCheckpoint(Checkpoint):
    """One part of a checkpoint, under the names that the part has by itself.

    Args:
        whole: Where the tensors are.
        prefixes: Beginnings of names in the whole, and what stands for them in the part. A tensor
            whose name begins with none of them, or with one for which ``None`` stands, belongs to
            another part; the longest counts.
        config: The part's own.
    """

    def __init__(
        self, whole: Checkpoint, prefixes: Mapping[str, str | None], config: dict[str, Any]
    ) -> None:
        super().__init__(
            whole.path,
            config=config,
            generation_config=whole.generation_config,
            tensors={},
            rope_interleaved=whole.rope_interleaved,
            freq_factors=whole.freq_factors,
        )
        self._whole = whole
        self._prefixes = dict(sorted(prefixes.items(), key=lambda pair: -len(pair[0])))

    @property
    def own_dtype(self) -> str:
        """Name of the dtype that the whole is to compute in."""
        return self._whole.own_dtype

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an output of the whole."""
        return self._whole.eos_token_ids

    def names(self) -> tuple[str, ...]:
        """Return the names of the part's tensors."""
        return tuple(own for name in self._whole.names() if (own := self._own(name)) is not None)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and any(full in self._whole for full in self._full(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape.

        Raises:
            WeightsError: If there is no such tensor.
        """
        return self._whole.shape(self.stored_as(name))

    def tensor(self, name: str, shape: tuple[int, ...] | Any | None = None) -> Tensor:
        """Read a tensor; see ``Checkpoint.tensor``."""
        return self._whole.tensor(self.stored_as(name), shape)

    def begin_fingerprint(self, cache_dir: Path | None = None) -> None:
        """Begin to name the content of the whole."""
        self._whole.begin_fingerprint(cache_dir)

    def fingerprint(self, cache_dir: Path | None = None) -> bytes | None:
        """Return the content name of the whole, all its parts included."""
        return self._whole.fingerprint(cache_dir)

    def stored_as(self, name: str) -> str:
        """Return the name in the whole of a tensor, there or not."""
        found = self._full(name)
        return next((full for full in found if full in self._whole), (found or [name])[0])

    def owns(self, name: str) -> bool:
        """Tell whether a tensor of the whole, by its name there, belongs to the part."""
        return self._own(name) is not None

    def _own(self, name: str) -> str | None:
        for prefix, short in self._prefixes.items():
            if name.startswith(prefix):
                return None if short is None else short + name[len(prefix) :]
        return None

    def _full(self, name: str) -> list[str]:
        """Return the names in the whole that would be this one in the part."""
        found = [
            prefix + name[len(short) :]
            for prefix, short in self._prefixes.items()
            if short is not None and name.startswith(short)
        ]
        return [full for full in found if self._own(full) == name]


def with_encoder(
    model: DecoderModel, encoder: Node, kinds: tuple[str, ...], hidden_size: int
) -> DecoderModel:
    """Return a decoder whose prompts have items, given the node that encodes them.

    Args:
        model: Its node is an ``ItemDecoderNode``.
        encoder: Stores one output of ``[length, hidden_size]`` for each item.
        kinds: The kinds of items that it encodes.
        hidden_size: Elements of one slot's output.
    """
    model.nodes = {**model.nodes, ENCODER: encoder}
    model.graph = encoder_graph(model.graph, kinds)
    model.encoders = dict.fromkeys(kinds, ENCODER)
    model.specs = (*model.specs, encoder_spec(model.graph, hidden_size))
    return model


def described_with_encoder(
    text: Description, kinds: tuple[str, ...], hidden_size: int
) -> Description:
    """Return what a decoder says of itself, given an encoder as ``with_encoder`` does it."""
    graph = encoder_graph(text.graph, kinds)
    return replace(text, graph=graph, specs=(*text.specs, encoder_spec(graph, hidden_size)))


def encoder_graph(graph: Graph, kinds: tuple[str, ...]) -> Graph:
    """Return the graph of a decoder with an encoder before it."""
    (decoder,) = graph.nodes
    edges = tuple(Edge(ENCODER, decoder, kind) for kind in kinds)
    return replace(graph, nodes=(decoder, ENCODER), edges=edges)


def encoder_spec(graph: Graph, hidden_size: int) -> EncoderSpec:
    """Return the declaration of the outputs that an encoder makes and a decoder reads."""
    return EncoderSpec(ENCODER, set(graph.nodes), EncoderConfig(hidden_size=hidden_size))


def check_parts(whole: Checkpoint, parts: Sequence[PartCheckpoint]) -> None:
    """Refuse a checkpoint with tensors that belong to none of its parts.

    Raises:
        WeightsError: If there is one.
    """
    strange = [n for n in whole.names() if not any(part.owns(n) for part in parts)]
    if strange:
        raise WeightsError(
            f"{whole.path}: {len(strange)} tensors belong to no part of the model, among them "
            f"{min(strange)!r}"
        )
