"""A model's graph as a picture: boxes from left to right, and the walks below."""

import textwrap
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from mstar.cli.graph_layout import Box, Layout, Link, Place, Point, lay_out
from mstar.cli.graph_text import chunks_of, facts_of, resources_of, title_of, walk_line
from mstar.engine.graph import Edge, Graph
from mstar.engine.resources.spec import NodeResourceSpec

# Widths of a character in px, with some room: the font is whichever the reader has.
_NAME_CHAR = 8.8
_CHAR = 7.4
_PAD = 16.0
_ROW = 20.0
_HEAD = 34.0
_TITLE = 44.0
# Characters of a line of a walk, at least.
_WALK_CHARS = 72
_STYLE = """
  text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #59636e; }
  .name { font-size: 14px; font-weight: 600; fill: #1f2328; }
  .label { fill: #1f2328; }
  .sheet { fill: #ffffff; }
  .box { fill: #f6f8fa; stroke: #afb8c1; stroke-width: 1.5; }
  .line { fill: none; stroke: #656d76; stroke-width: 1.5; stroke-linejoin: round; }
  .head { fill: #656d76; }
  .rule { stroke: #d1d9e0; }
  .streams .line { stroke: #0969da; stroke-dasharray: 6 4; }
  .streams .head, .streams .label { fill: #0969da; }
  @media (prefers-color-scheme: dark) {
    text { fill: #9198a1; }
    .name, .label { fill: #e6edf3; }
    .sheet { fill: #0d1117; }
    .box { fill: #161b22; stroke: #3d444d; }
    .line { stroke: #8b949e; }
    .head { fill: #8b949e; }
    .rule { stroke: #3d444d; }
    .streams .line { stroke: #58a6ff; }
    .streams .head, .streams .label { fill: #58a6ff; }
  }
"""


def graph_svg(name: str, graph: Graph, specs: Sequence[NodeResourceSpec]) -> str:
    """Return a model's graph as the text of an SVG file.

    Args:
        name: What the model is called.
        graph: Its nodes, edges and walks.
        specs: The resources of its nodes.
    """
    layout = lay_out(
        [_box_of(node, specs) for node in graph.nodes],
        [Link(edge.source, edge.target, _label_width(edge)) for edge in graph.edges],
    )
    widest = max(len(walk) for walk, _ in graph.walks) if graph.walks else 0
    indent = _PAD + (widest + 2) * _NAME_CHAR
    width = max(layout.width, indent + _WALK_CHARS * _CHAR) + 2 * _PAD
    walks, walks_height = _walks(graph, indent, int((width - indent - _PAD) / _CHAR))
    top = _TITLE + layout.height + _PAD
    height = top + walks_height + _PAD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        f"<title>{escape(f'Graph of {name}')}</title>",
        f"<style>{_STYLE}</style>",
        '<rect class="sheet" width="100%" height="100%" rx="8"/>',
        f'<text class="name" x="{_PAD}" y="{_TITLE - _PAD}">{escape(name)}</text>',
        f'<g class="graph" transform="translate({_PAD} {_TITLE})">',
        *map(_edge, graph.edges, layout.lines),
        *(_node(node, layout, specs) for node in graph.nodes),
        "</g>",
        f'<g class="walks" transform="translate(0 {top:.1f})">',
        f'<line class="rule" x1="{_PAD}" y1="0" x2="{width - _PAD:.1f}" y2="0"/>',
        *walks,
        "</g>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _box_of(node: str, specs: Sequence[NodeResourceSpec]) -> Box:
    titles = [title_of(spec) for spec in resources_of(node, specs)]
    width = max([len(node) * _NAME_CHAR, *(len(title) * _CHAR for title in titles)])
    height = _HEAD + (_ROW * len(titles) + _PAD / 2 if titles else 0)
    return Box(node, width + 2 * _PAD, height)


def _label_width(edge: Edge) -> float:
    return _CHAR * max(len(edge.name), len(chunks_of(edge) or ""))


def _node(node: str, layout: Layout, specs: Sequence[NodeResourceSpec]) -> str:
    place: Place = layout.places[node]
    used = resources_of(node, specs)
    content = _HEAD + _ROW * len(used)
    y = place.y + max(0.0, (place.height - content - (_PAD / 2 if used else 0)) / 2)
    x = place.x + _PAD
    lines = [
        f'<g class="node" data-name={quoteattr(node)}>',
        f'<rect class="box" x="{place.x:.1f}" y="{place.y:.1f}" width="{place.width:.1f}" '
        f'height="{place.height:.1f}" rx="6"/>',
        f'<text class="name" x="{x:.1f}" y="{y + 22:.1f}">{escape(node)}</text>',
    ]
    for row, spec in enumerate(used):
        facts = escape(facts_of(spec))
        lines.append(
            f'<text class="resource" x="{x:.1f}" y="{y + _HEAD + _ROW * row + 12:.1f}">'
            f"<title>{facts}</title>{escape(title_of(spec))}</text>"
        )
    return "\n".join([*lines, "</g>"])


def _edge(edge: Edge, points: Sequence[Point]) -> str:
    chunks = chunks_of(edge)
    kind = "edge" if chunks is None else "edge streams"
    ends = f"data-source={quoteattr(edge.source)} data-target={quoteattr(edge.target)}"
    (x, y), (end_x, end_y) = points[0], points[-1]
    lines = [
        f'<g class="{kind}" data-name={quoteattr(edge.name)} {ends}>',
        f'<path class="line" d="{_path([*points[:-1], (end_x - 6, end_y)])}"/>',
        f'<path class="head" d="M{end_x:.1f} {end_y:.1f}l-9 -4.5v9z"/>',
        f'<text class="label" x="{x + 12:.1f}" y="{y - 6:.1f}">{escape(edge.name)}</text>',
    ]
    if chunks is not None:
        lines.append(f'<text x="{x + 12:.1f}" y="{y + 15:.1f}">{escape(chunks)}</text>')
    return "\n".join([*lines, "</g>"])


def _path(points: Sequence[Point]) -> str:
    x, y = points[0]
    steps = [f"M{x:.1f} {y:.1f}"]
    for to_x, to_y in points[1:]:
        if to_x == x or to_y == y:
            steps.append(f"L{to_x:.1f} {to_y:.1f}")
        else:
            middle = (x + to_x) / 2
            steps.append(f"C{middle:.1f} {y:.1f} {middle:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}")
        x, y = to_x, to_y
    return "".join(steps)


def _walks(graph: Graph, indent: float, num_chars: int) -> tuple[list[str], float]:
    """Return the rows of the walks, and their height together."""
    y = 0.0
    rows = []
    for name, walk in graph.walks:
        y += _ROW + 4
        row = [
            f'<g class="walk" data-name={quoteattr(name)}>',
            f'<text class="name" x="{_PAD}" y="{y:.1f}">{escape(name)}</text>',
        ]
        for number, line in enumerate(textwrap.wrap(walk_line(walk), num_chars)):
            y += _ROW if number else 0
            row.append(f'<text x="{indent:.1f}" y="{y:.1f}">{escape(line)}</text>')
        rows.append("\n".join([*row, "</g>"]))
    return rows, y
