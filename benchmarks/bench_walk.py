"""What a step of a walk costs beside the node: scheduler, runner, cursor, edges, and the record.

Nodes that do nothing and have no resources. ``in a row``: a loop over four nodes, one after the
other. ``streaming``: a node whose every visit puts a chunk on an edge, and one that takes it. The
plain call is that of the node's ``forward`` with the same batch; the target for the overhead, with
one request, is below 100 µs.
"""

import time
from collections.abc import Mapping
from typing import Any

from mstar.engine.batch import Batch, Node, NodeKind, NodeOutput
from mstar.engine.chunks import Sized
from mstar.engine.engine import EngineCore
from mstar.engine.graph import Cursor, Edge, ForEach, Graph, Loop, Parallel, Run, Sequential, Walk
from mstar.engine.model import Model
from mstar.engine.output import Emitted
from mstar.engine.request import PreparedRequest, Request
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams

NUM_REQUESTS = (1, 8, 64)
STEPS = 400
ROUNDS = 5
_EDGE = "chunks"


class FreeNode(Node):
    """Computes nothing.

    Args:
        piece: What each visit puts on the edge; empty: nothing.
    """

    kind = NodeKind.VISIT

    def __init__(self, piece: str = "") -> None:
        self._given = [Emitted(name=_EDGE, text=piece)] if piece else []

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        if not self._given:
            return NodeOutput(token_ids=())
        return NodeOutput(
            token_ids=(), emitted=dict.fromkeys(range(len(batch.requests)), self._given)
        )


class WalkModel(Model):
    """Nothing but a walk.

    Args:
        walk: Over nodes that do nothing.
        edge: Its streaming edge, if it has one.
    """

    def __init__(self, walk: Walk, edge: Edge | None = None) -> None:
        names = tuple(dict.fromkeys(walk.nodes()))
        self.name = "walk"
        self.nodes = {
            name: FreeNode("x" if edge is not None and name == edge.source else "")
            for name in names
        }
        self.graph = Graph(names, (("walk", walk),), () if edge is None else (edge,))
        self.specs = ()
        self.vocab_size = 0
        self.max_model_len = 1
        self.stop_token_ids = frozenset()
        self.root_constants = None

    def first_walk(self, prepared: PreparedRequest) -> Cursor:
        return self.graph.cursor("walk")

    def next_walk(self, request: Request) -> None:
        return None

    def holds(self, predicate: str, request: Request) -> bool:
        raise AssertionError(predicate)


def models(num_rounds: int) -> dict[str, WalkModel]:
    """Return what is measured, by its name; a request makes ``num_rounds`` rounds."""
    row = Sequential(*map(Run, "abcd"))
    stream = Parallel(Loop(Run("a"), times=num_rounds), ForEach(Run("b"), _EDGE))
    return {
        "in a row": WalkModel(Loop(row, times=num_rounds)),
        "streaming": WalkModel(stream, Edge("a", "b", _EDGE, Sized(1))),
    }


def walking_engine(model: WalkModel, num_requests: int) -> EngineCore:
    """Return an engine in which all requests have begun."""
    engine = EngineCore(
        model,
        Deployment(max_num_seqs=num_requests, enable_prefix_caching=False, num_pages=1),
    )
    for number in range(num_requests):
        params = SamplingParams()
        engine.add_request(
            PreparedRequest(request_id=f"request-{number}", token_ids=[], params=params)
        )
    for _ in range(4):
        engine.step()
    assert engine.stats().num_running == num_requests
    return engine


def plain_call(model: WalkModel, num_requests: int) -> float:
    """Return the seconds that a call of the nodes' ``forward`` takes by itself, on average."""
    prepared = PreparedRequest(request_id="request", token_ids=[], params=SamplingParams())
    cursor, component = model.first_walk(prepared), model.component_of("walk")
    request = Request(prepared, cursor, component, max_len=1, arrival=0)
    calls = [
        (node, Batch.of_visits(name, [(request, None)] * num_requests))
        for name, node in model.nodes.items()
    ]
    begin = time.perf_counter()
    for _ in range(STEPS):
        for node, batch in calls:
            node.forward(batch, {})
    return (time.perf_counter() - begin) / STEPS / len(calls)


def run(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return a row a walk and a number of requests: the best round's microseconds."""
    rows: list[dict[str, Any]] = []
    for name in models(1):
        for num_requests in NUM_REQUESTS:
            model = models(rounds * STEPS + 8)[name]
            engine = walking_engine(model, num_requests)
            step, call = float("inf"), float("inf")
            for _ in range(rounds):
                begin = time.perf_counter()
                for _ in range(STEPS):
                    engine.step()
                step = min(step, (time.perf_counter() - begin) / STEPS)
                call = min(call, plain_call(model, num_requests))
            engine.check()
            assert engine.stats().num_running == num_requests
            rows.append(
                {
                    "walk": name,
                    "requests": num_requests,
                    "a step (µs)": round(step * 1e6, 1),
                    "a plain call (µs)": round(call * 1e6, 2),
                    "overhead of a step (µs)": round((step - call) * 1e6, 1),
                    "overhead of a request (µs)": round((step - call) / num_requests * 1e6, 2),
                }
            )
    return rows
