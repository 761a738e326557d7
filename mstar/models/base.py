"""What generating text asks of a model: one walk for the prompt, one for the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mstar.engine.graph import Cursor, Graph, Loop, Run
from mstar.engine.model import Model
from mstar.engine.request import PreparedRequest, Request
from mstar.engine.resources.spec import NodeResourceSpec


@dataclass(frozen=True, kw_only=True)
class Description:
    """What can be said of a model without its weights in memory."""

    root_constants: Mapping[str, str] | None
    """What its KV depends on beside the deployment's numbers; ``None``: unknown."""
    graph: Graph
    specs: Sequence[NodeResourceSpec]
    vocab_size: int
    max_model_len: int
    """The context the model was made for, in tokens."""


def text_graph(node: str) -> Graph:
    """Return the graph of a model that is one node and generates text."""
    return Graph(
        nodes=(node,),
        walks=(("prefill", Run(node)), ("decode", Loop(Run(node), until="finished"))),
        predicates=("finished",),
    )


class TextModel(Model):
    """A model that computes the prompt, then one token after the other."""

    def first_walk(self, prepared: PreparedRequest) -> Cursor:
        """Return the walk over the prompt."""
        return self.graph.cursor("prefill")

    def next_walk(self, request: Request) -> Cursor | None:
        """Return the walk that generates, unless the first token ended the request."""
        if request.cursor.local_name == "prefill" and request.finish_reason is None:
            return self.graph.cursor("decode")
        return None

    def holds(self, predicate: str, request: Request) -> bool:
        """Tell whether the request has its last token, which is what ``finished`` asks."""
        return request.finish_reason is not None
