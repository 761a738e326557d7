"""Model: what the engine must be told about a model; families are written elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mstar.engine.batch import Node
from mstar.engine.graph import Cursor, Graph
from mstar.engine.request import Request
from mstar.engine.resources.spec import NodeResourceSpec


class Model(ABC):
    """A graph of nodes, the resources they need, and the walks requests take over them."""

    name: str
    graph: Graph
    nodes: Mapping[str, Node]
    specs: Sequence[NodeResourceSpec]
    vocab_size: int
    max_model_len: int
    """The context the model was made for, in tokens."""
    stop_token_ids: frozenset[int]
    """Ids that end a request."""
    root_constants: Mapping[str, str] | None
    """What its KV depends on beside the deployment's numbers; ``None``: unknown, so no reuse."""
    encoders: Mapping[str, str] = MappingProxyType({})
    """The node that encodes items of each kind; a request may have items of these kinds only."""
    sampler_key: str = "sampler"
    """Key of the resource that a request's sampling parameters are for."""

    @abstractmethod
    def first_walk(self, request_id: str) -> Cursor:
        """Return the walk that a new request begins with."""

    @abstractmethod
    def next_walk(self, request: Request) -> Cursor | None:
        """Return the walk after the one that just ended; ``None`` ends the request."""

    @abstractmethod
    def holds(self, predicate: str, request: Request) -> bool:
        """Tell whether a predicate of the graph holds for the request."""
