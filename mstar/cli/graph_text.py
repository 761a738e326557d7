"""A model's graph in words: nodes with their resources, edges, and a line for every walk."""

from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

from mstar.engine.graph import Edge, ForEach, Graph, Loop, Parallel, Run, Sequential, Walk
from mstar.engine.resources.spec import NodeResourceSpec


def graph_text(name: str, graph: Graph, specs: Sequence[NodeResourceSpec]) -> str:
    """Return a model's graph drawn with characters.

    Args:
        name: What the model is called.
        graph: Its nodes, edges and walks.
        specs: The resources of its nodes.
    """
    parts = [name]
    parts += ["\n".join(_box(node, specs)) for node in graph.nodes]
    if graph.edges:
        parts.append("\n".join(["edges", *map(_edge_line, graph.edges)]))
    width = max((len(walk) for walk, _ in graph.walks), default=0) + 1
    lines = [f"  {walk + ':':<{width}} {walk_line(program)}" for walk, program in graph.walks]
    parts.append("\n".join(["walks", *lines]))
    return "\n\n".join(parts)


def walk_line(walk: Walk) -> str:
    """Return a walk as a line to be read.

    >>> walk_line(Sequential(Run("encoder"), Loop(Run("decoder"), until="finished")))
    'encoder → loop until finished( decoder )'
    """
    match walk:
        case Run(node):
            return node
        case Loop(body, times, until):
            return f"loop {_ends(times, until)}( {walk_line(body)} )"
        case ForEach(body, edge):
            return f"for each chunk of {edge}( {walk_line(body)} )"
        case Sequential():
            return " → ".join(map(_part, walk.parts))
        case Parallel():
            return " & ".join(map(_part, walk.parts))
        case _:
            return repr(walk)


def _part(walk: Walk) -> str:
    line = walk_line(walk)
    has_many = isinstance(walk, (Sequential, Parallel)) and len(walk.parts) > 1
    return f"( {line} )" if has_many else line


def _ends(times: int | None, until: str | None) -> str:
    if until is None:
        return f"{times} times"
    return f"until {until}" if times is None else f"until {until} or {times} times"


def chunks_of(edge: Edge) -> str | None:
    """Return how a streaming edge is cut, in words; ``None`` for an edge that does not stream."""
    return None if edge.chunks is None else f"streams {edge.chunks}"


def resources_of(node: str, specs: Sequence[NodeResourceSpec]) -> list[NodeResourceSpec]:
    """Return the resources that a node uses."""
    return [spec for spec in specs if node in spec.nodes]


def title_of(spec: NodeResourceSpec) -> str:
    """Return a resource's key, with its kind where the key does not tell it."""
    # Every resource is a folder, named by its kind.
    kind = type(spec).__module__.split(".")[-2]
    return spec.resource_key if kind in spec.resource_key else f"{spec.resource_key} ({kind})"


def facts_of(spec: NodeResourceSpec) -> str:
    """Return the plain numbers and names that a resource is configured with."""
    if not is_dataclass(spec.config):
        return ""
    facts = []
    for field in fields(spec.config):
        value: Any = getattr(spec.config, field.name)
        if field.default is not MISSING and value == field.default:
            continue
        value = value.name.lower() if isinstance(value, Enum) else value
        if isinstance(value, (int, float, str)) and value is not False:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            facts.append(field.name if value is True else f"{field.name} {shown}")
    return ", ".join(facts)


def _box(node: str, specs: Sequence[NodeResourceSpec]) -> list[str]:
    used = resources_of(node, specs)
    width = max((len(title_of(spec)) for spec in used), default=0)
    lines = [f"{title_of(spec):<{width}}  {facts_of(spec)}".rstrip() for spec in used]
    inner = max([len(node) + 2, *map(len, lines)])
    return [
        f"┌─ {node} {'─' * (inner - len(node) - 1)}┐",
        *(f"│ {line:<{inner + 1}}│" for line in lines),
        f"└{'─' * (inner + 2)}┘",
    ]


def _edge_line(edge: Edge) -> str:
    chunks = chunks_of(edge)
    line = f"  {edge.source} ── {edge.name} ─▶ {edge.target}"
    if chunks is None:
        return line
    return f"  {edge.source} ┄┄ {edge.name} ┄▶ {edge.target}  ({chunks})"
