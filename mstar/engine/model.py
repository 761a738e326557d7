"""Model: what the engine must be told about a model; families are written elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mstar.engine.batch import Node
from mstar.engine.graph import Cursor, Graph
from mstar.engine.output import Emitted
from mstar.engine.request import Component, PreparedRequest, Request
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spec import NodeResourceSpec


@dataclass(frozen=True, slots=True)
class Leg:
    """What a request goes on with when a walk ends: another prompt, for some component."""

    prepared: PreparedRequest
    """Under the request's own id."""
    walk: str
    emitted: tuple[Emitted, ...] = ()
    """What the leg that has ended gave."""
    params: SamplingParams | None = None
    """How it is sampled; ``None``: as its component says, or else the request."""


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

    telling: frozenset[str] = frozenset()
    """Nodes whose tokens are handed to ``emit``."""

    @abstractmethod
    def first_walk(self, prepared: PreparedRequest) -> Cursor:
        """Return the walk that a new request begins with.

        Raises:
            RequestError: If the model has none for what the request asks.
        """

    @abstractmethod
    def next_walk(self, request: Request) -> Cursor | Leg | None:
        """Return the walk, or the leg, after the one that just ended; ``None`` ends the request."""

    def component_of(self, walk: str) -> Component:
        """Return the component that the tokens of a leg which begins with ``walk`` are for."""
        return Component(
            vocab_size=self.vocab_size,
            stop_token_ids=self.stop_token_ids,
            sampler_key=self.sampler_key,
        )

    def emit(self, request: Request, node: str, token: int) -> Sequence[Emitted]:
        """Return what a token that a node of ``telling`` gave is worth to others.

        It is the last of ``request.tokens``; ``request.finish_reason`` says whether more follow,
        and is set where what was written ends here though the token does not end it.
        """
        return ()

    def trial(self, request_id: str, num_tokens: int, params: SamplingParams) -> PreparedRequest:
        """Return a request that takes what its decoder needs for so many tokens of prompt.

        Where a model's prompts are shorter, so is this one. What encoders and pixel decoders need
        is left to the share of memory that is kept free.
        """
        return PreparedRequest(request_id=request_id, token_ids=[0] * num_tokens, params=params)

    def forget(self, request_id: str) -> None:
        """Drop what the model itself keeps of a request, which has ended in whatever way."""

    @abstractmethod
    def holds(self, predicate: str, request: Request) -> bool:
        """Tell whether a predicate of the graph holds for the request."""
