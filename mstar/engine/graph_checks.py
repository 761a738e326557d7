"""What a graph must be so that every walk over it comes to its end.

A graph by itself makes sure that its names are those of nodes and predicates. These are the
questions about the whole, asked once, when a model is loaded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from mstar.engine.graph import Edge, ForEach, Graph, Loop, Parallel, Run, Sequential, Walk
from mstar.errors import ConfigError


def check_graph(graph: Graph, encoders: Mapping[str, str] | None = None) -> None:
    """Check a model's graph.

    Args:
        graph: Nodes, edges and walks.
        encoders: Kind of item to the node that encodes it; such nodes stand in no walk.

    Raises:
        ConfigError: Names the node, edge or walk at fault, and what to do.
    """
    check_nodes(graph, encoders or {})
    check_predicates(graph)
    check_cycles(graph)
    for name, walk in graph.walks:
        check_parallel(name, walk)
        check_streams(name, walk, graph.edges)
    check_streaming_edges(graph)


def check_nodes(graph: Graph, encoders: Mapping[str, str]) -> None:
    """Check that every node is run by something.

    Raises:
        ConfigError: If a node stands in no walk and encodes nothing, or an encoder is no node.
    """
    for kind, node in encoders.items():
        if node not in graph.nodes:
            raise ConfigError(
                f"items of kind {kind!r} are encoded by {node!r}, which is no node; there are "
                f"{', '.join(graph.nodes)}"
            )
    visited = {node for _, walk in graph.walks for node in walk.nodes()} | set(encoders.values())
    for node in graph.nodes:
        if node not in visited:
            edges = [edge.name for edge in graph.edges if node in (edge.source, edge.target)]
            ends = f", which edge {edges[0]!r} touches," if edges else ""
            raise ConfigError(
                f"node {node!r}{ends} stands in no walk ({_names(graph)}) and encodes no kind of "
                "item; visit it in a walk, or leave it out"
            )


def check_predicates(graph: Graph) -> None:
    """Check that every predicate ends some loop.

    Raises:
        ConfigError: If one is declared for nothing.
    """
    asked = {predicate for _, walk in graph.walks for predicate in walk.predicates()}
    for predicate in graph.predicates:
        if predicate not in asked:
            raise ConfigError(
                f"predicate {predicate!r} ends no loop of any walk ({_names(graph)}); give it to a "
                "loop as `until`, or leave it out"
            )


def check_cycles(graph: Graph) -> None:
    """Check that edges lead in a circle only where one loop goes round it.

    Raises:
        ConfigError: If no loop of any walk has all nodes of a circle; names its edges.
    """
    loops = [set(loop.nodes()) for _, walk in graph.walks for loop in _loops(walk)]
    for cycle in _cycles(graph):
        nodes = {edge.source for edge in cycle}
        if not any(nodes <= loop for loop in loops):
            way = " → ".join([edge.source for edge in cycle] + [cycle[0].source])
            names = ", ".join(repr(edge.name) for edge in cycle)
            verb = "edges {} lead" if len(cycle) > 1 else "edge {} leads"
            raise ConfigError(
                f"{verb.format(names)} in a circle ({way}), and no loop of a walk "
                f"({_names(graph)}) has all of these nodes; put them into one loop, or leave an "
                "edge out"
            )


def check_parallel(name: str, walk: Walk) -> None:
    """Check that what runs side by side are different nodes.

    Raises:
        ConfigError: If two parts of one ``Parallel`` run the same node for the same request.
    """
    for part in _walks(walk):
        if not isinstance(part, Parallel):
            continue
        seen: set[str] = set()
        for nodes in (set(inner.nodes()) for inner in part.parts):
            for node in sorted(nodes & seen):
                raise ConfigError(
                    f"walk {name!r} runs node {node!r} in two parts of one Parallel; a request "
                    "visits a node once at a time: put the parts into a Sequential"
                )
            seen |= nodes


def check_streams(name: str, walk: Walk, edges: tuple[Edge, ...]) -> None:
    """Check that what a walk does for each chunk of an edge begins, and ends.

    Raises:
        ConfigError: If a ``ForEach`` visits another node than its edge's target, or one that the
            walk visits elsewhere too, stands in a loop, or waits for a source that the walk does
            not visit, or only when the waiting is over.
    """
    by_name = {edge.name: edge for edge in edges if edge.chunks is not None}
    leaves = list(_leaves(walk))
    for leaf in leaves:
        if not isinstance(leaf.walk, ForEach):
            continue
        edge, node = by_name[leaf.walk.edge], leaf.node
        where = f"walk {name!r} visits {node!r} for each chunk of {_way(edge)}"
        if node != edge.target:
            raise ConfigError(f"{where}; visit {edge.target!r}, where it leads")
        if sum(other.node == node for other in leaves) > 1:
            raise ConfigError(
                f"{where}, and visits it elsewhere too; a node for chunks stands once in a walk"
            )
        if any(isinstance(above, Loop) for above, _ in leaf.path):
            raise ConfigError(
                f"{where} inside a loop, which would have no end: the edge ends once; take it out"
            )
        if not any(other.node == edge.source for other in leaves):
            raise ConfigError(
                f"{where}, but {edge.source!r} nowhere, and so would wait without end; put both "
                "into one Parallel"
            )
    try:
        TopologicalSorter(_waits(leaves, by_name)).prepare()
    except CycleError as error:
        circle = [leaves[index] for index in reversed(error.args[1])]
        streams = sorted({leaf.walk.edge for leaf in circle if isinstance(leaf.walk, ForEach)})
        raise ConfigError(
            f"walk {name!r} would wait without end, over edge {', '.join(map(repr, streams))}: "
            f"{' waits for '.join(leaf.node for leaf in circle)}; put an edge's source before or "
            "beside the ForEach that takes from it"
        ) from None


def check_streaming_edges(graph: Graph) -> None:
    """Check that every streaming edge streams.

    Raises:
        ConfigError: If two have one name, or no walk visits the target for each chunk while the
            source goes on.
    """
    streaming = [edge for edge in graph.edges if edge.chunks is not None]
    names = [edge.name for edge in streaming]
    for edge in streaming:
        if names.count(edge.name) > 1:
            raise ConfigError(f"streaming edge {edge.name!r} is declared twice; name them apart")
        found = [name for name, walk in graph.walks if _streams(walk, edge)]
        if not found:
            users = [name for name, walk in graph.walks if edge.name in walk.edges()]
            places = " and ".join(f"walk {name!r}" for name in users)
            raise ConfigError(
                f"{_way(edge)} never streams: "
                + (
                    f"{places} visits {edge.target!r} behind {edge.source!r}, not beside it"
                    if users
                    else f"no walk ({_names(graph)}) visits {edge.target!r} for each chunk of it"
                )
                + "; put the source and a ForEach into one Parallel, or declare no chunks"
            )


# Looking at walks


@dataclass(frozen=True)
class _Leaf:
    """A walk of one node inside another walk."""

    walk: Run | ForEach
    path: tuple[tuple[Walk, int], ...]
    """The walks that it is part of, from the outermost, and in which of their parts it is."""

    @property
    def node(self) -> str:
        return self.walk.node if isinstance(self.walk, Run) else self.walk.body.node


def _leaves(walk: Walk, path: tuple[tuple[Walk, int], ...] = ()) -> Iterator[_Leaf]:
    match walk:
        case Run() | ForEach():
            yield _Leaf(walk, path)
        case _:
            for index, part in enumerate(_parts(walk)):
                yield from _leaves(part, (*path, (walk, index)))


def _parts(walk: Walk) -> tuple[Walk, ...]:
    match walk:
        case Sequential() | Parallel():
            return walk.parts
        case Loop(body):
            return (body,)
        case _:
            return ()


def _walks(walk: Walk) -> Iterator[Walk]:
    """Yield a walk and all that it is made of."""
    yield walk
    for part in _parts(walk):
        yield from _walks(part)


def _loops(walk: Walk) -> Iterator[Loop]:
    return (part for part in _walks(walk) if isinstance(part, Loop))


def _parting(one: _Leaf, other: _Leaf) -> tuple[Walk, int, int] | None:
    """Return the innermost walk that has both leaves, and in which part each of them is."""
    for (above, index), (_, other_index) in zip(one.path, other.path, strict=False):
        if index != other_index:
            return above, index, other_index
    return None


def _waits(leaves: list[_Leaf], streaming: Mapping[str, Edge]) -> dict[int, list[int]]:
    """Return, for every leaf, the leaves that end before it does."""

    def ends_before(one: _Leaf, other: _Leaf) -> bool:
        if isinstance(other.walk, ForEach) and streaming[other.walk.edge].source == one.node:
            return True
        parting = _parting(one, other)
        return (
            parting is not None and isinstance(parting[0], Sequential) and parting[1] < parting[2]
        )

    return {
        index: [before for before, one in enumerate(leaves) if ends_before(one, other)]
        for index, other in enumerate(leaves)
    }


def _streams(walk: Walk, edge: Edge) -> bool:
    """Tell whether a walk visits an edge's target for each chunk while its source goes on.

    Behind a source that is visited once there is nothing to go on with, so that it may also come
    before.
    """
    leaves = list(_leaves(walk))
    consumers = [leaf for leaf in leaves if leaf.walk == ForEach(Run(edge.target), edge.name)]
    sources = [leaf for leaf in leaves if leaf.node == edge.source]

    def feeds(source: _Leaf, consumer: _Leaf) -> bool:
        parting = _parting(source, consumer)
        if parting is None or isinstance(parting[0], Parallel):
            return parting is not None
        is_once = isinstance(source.walk, Run) and len(sources) == 1
        return is_once and not any(isinstance(above, Loop) for above, _ in source.path)

    return any(feeds(source, consumer) for source in sources for consumer in consumers)


# Looking at edges


def _cycles(graph: Graph) -> Iterator[list[Edge]]:
    """Yield every way along edges that comes back to its first node and to no other."""
    order = {node: index for index, node in enumerate(graph.nodes)}

    def go_on(way: list[Edge]) -> Iterator[list[Edge]]:
        start, here = way[0].source, way[-1].target
        if here == start:
            yield way
            return
        # Each circle is found once, from the node in it that was declared first.
        if order[here] > order[start] and here not in {edge.source for edge in way}:
            for edge in graph.edges:
                if edge.source == here:
                    yield from go_on([*way, edge])

    for edge in graph.edges:
        yield from go_on([edge])


def _way(edge: Edge) -> str:
    return f"edge {edge.name!r} from {edge.source!r} to {edge.target!r}"


def _names(graph: Graph) -> str:
    return ", ".join(name for name, _ in graph.walks) or "there is none"
