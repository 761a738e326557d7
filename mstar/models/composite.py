"""Models made of models: each keeps its nodes, resources and walks, under a name of its own."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.capture import RecordableNode
from mstar.engine.graph import Edge, ForEach, Graph, Loop, Parallel, Run, Sequential, Walk
from mstar.engine.model import Model
from mstar.engine.overlap import Pending
from mstar.engine.request import Component, Request
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import NodeStep


class Part(Protocol):
    """What is known of a part, be it loaded or only described."""

    @property
    def graph(self) -> Graph:
        """Its nodes and walks."""
        ...

    @property
    def specs(self) -> Sequence[NodeResourceSpec]:
        """What its nodes need."""
        ...


@dataclass(frozen=True)
class Scope:
    """A name that stands before all names of a part.

    Args:
        name: The part's; it may not contain a dot.
    """

    name: str

    def __call__(self, name: str) -> str:
        """Return the name that something of the part has in the whole."""
        return f"{self.name}.{name}"

    def nodes(self, model: Model) -> dict[str, Node]:
        """Return the part's nodes, by their names in the whole."""
        return {
            self(name): (
                _RecordableScoped(self, node)
                if isinstance(node, RecordableNode)
                else _Scoped(self, node)
            )
            for name, node in model.nodes.items()
        }

    def specs(self, part: Part) -> list[NodeResourceSpec]:
        """Return what the part's nodes need, under keys of the whole."""
        return [self._spec(spec) for spec in part.specs]

    def _spec(self, spec: NodeResourceSpec) -> NodeResourceSpec:
        config: Any = spec.config
        if hasattr(config, "kv_cache"):
            config = replace(config, kv_cache=self(config.kv_cache))
        return replace(
            spec,
            resource_key=self(spec.resource_key),
            nodes={self(node) for node in spec.nodes},
            config=config,
        )

    def walks(self, part: Part) -> list[tuple[str, Walk]]:
        """Return the part's walks, over nodes of the whole."""
        return [(self(name), self._walk(walk)) for name, walk in part.graph.walks]

    def _walk(self, walk: Walk) -> Walk:
        match walk:
            case Run(node):
                return Run(self(node))
            case ForEach(Run(node), edge):
                return ForEach(Run(self(node)), self(edge))
            case Loop(body, times, until):
                return Loop(self._walk(body), times, None if until is None else self(until))
            case Sequential() | Parallel():
                return type(walk)(*map(self._walk, walk.parts))
        raise AssertionError(f"{walk!r} is no walk that can be part of another model")

    def edges(self, part: Part) -> list[Edge]:
        """Return the part's edges, between nodes of the whole; kinds of items keep their names."""
        return [
            replace(
                edge,
                source=self(edge.source),
                target=self(edge.target),
                name=edge.name if edge.chunks is None else self(edge.name),
            )
            for edge in part.graph.edges
        ]

    def component(self, component: Component, specs: list[NodeResourceSpec]) -> Component:
        """Return what the part says of its legs, in the names of the whole.

        Args:
            component: What the part says by itself.
            specs: What ``specs`` returned.
        """
        own = component.resources
        keys = {spec.resource_key for spec in specs} if own is None else set(map(self, own))
        return replace(
            component, sampler_key=self(component.sampler_key), resources=frozenset(keys)
        )


class _Scoped(Node):
    """A node of a part, in the whole."""

    def __init__(self, scope: Scope, node: Node) -> None:
        self._scope = scope
        self.inner = node
        self.kind = node.kind  # type: ignore[misc]
        self.max_batch = node.max_batch

    def shape(self, request: Request, part: object) -> Hashable:
        return self.inner.shape(request, part)

    def declare(self, batch: Batch) -> NodeStep:
        step = self.inner.declare(batch)
        scope = self._scope
        return NodeStep(step.segments, {scope(key): own for key, own in step.resources.items()})

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        return self.inner.forward(batch, self._own(plans))

    def _own(self, plans: Mapping[str, Any]) -> dict[str, Any]:
        start = len(self._scope.name) + 1
        return {key[start:]: plan for key, plan in plans.items()}


class _RecordableScoped(_Scoped, RecordableNode):
    """A node of a part whose decode steps can be recorded."""

    inner: RecordableNode

    def __init__(self, scope: Scope, node: RecordableNode) -> None:
        super().__init__(scope, node)
        self.num_streams = node.num_streams
        self.splits_prompts = node.splits_prompts

    def ids(self, batch: Batch) -> npt.NDArray[np.int64]:
        return self.inner.ids(batch)

    def prepare(self, sizes: Sequence[int], num_tokens: int) -> None:
        self.inner.prepare(sizes, num_tokens)

    def compute(self, ids: Tensor, plans: Mapping[str, Any]) -> Tensor:
        return self.inner.compute(ids, self._own(plans))

    def note(self, batch: Batch, rows: Tensor) -> None:
        self.inner.note(batch, rows)

    def launch(
        self, batch: Batch, rows: Tensor, plans: Mapping[str, Any], before: Tensor | None = None
    ) -> Pending:
        return self.inner.launch(batch, rows, self._own(plans), before)
