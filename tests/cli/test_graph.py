"""Drawings of graphs: everything is named, and nothing lies on top of anything else."""

import json
import re
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from mstar.cli import main
from mstar.cli.graph_layout import Box, Layout, Link, Place, Point, lay_out
from mstar.cli.graph_svg import graph_svg
from mstar.cli.graph_text import graph_text, walk_line
from mstar.engine.chunks import Sentences, Sized
from mstar.engine.graph import Edge, ForEach, Graph, Loop, Parallel, Run, Sequential, Walk
from mstar.engine.resources.encoder.config import EncoderConfig, EncoderSpec
from mstar.engine.resources.kv.config import KVConfig, KVSpec
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.models.checkpoint import Checkpoint

SVG = "{http://www.w3.org/2000/svg}"
ASSISTANT = Graph(
    nodes=("ear", "writer", "speaker", "codec"),
    walks=(
        ("prefill", Run("writer")),
        (
            "answer",
            Parallel(
                Loop(Run("writer"), until="finished"),
                ForEach(Run("speaker"), "text"),
                ForEach(Run("codec"), "codes"),
            ),
        ),
    ),
    edges=(
        Edge("ear", "writer", "audio"),
        Edge("writer", "speaker", "text", Sentences()),
        Edge("speaker", "codec", "codes", Sized(50, first=10)),
        Edge("ear", "codec", "timbre"),
    ),
    predicates=("finished",),
)
SPECS: list[NodeResourceSpec] = [
    KVSpec("kv", {"writer"}, KVConfig(num_layers=30, num_kv_heads=3, head_dim=64)),
    EncoderSpec("heard", {"ear", "writer"}, EncoderConfig(hidden_size=512)),
]


# In words


@pytest.mark.parametrize(
    ("walk", "line"),
    [
        (Run("a"), "a"),
        (Sequential(Run("a"), Run("b")), "a → b"),
        (Loop(Run("a"), until="done"), "loop until done( a )"),
        (Loop(Run("a"), times=3), "loop 3 times( a )"),
        (Loop(Run("a"), times=3, until="done"), "loop until done or 3 times( a )"),
        (Sequential(Parallel(Run("a"), Run("b")), Run("c")), "( a & b ) → c"),
        (Parallel(Sequential(Run("a"), Run("b")), Sequential(Run("c"))), "( a → b ) & c"),
        (ForEach(Run("a"), "text"), "for each chunk of text( a )"),
    ],
)
def test_a_walk_reads_as_a_line(walk: Walk, line: str) -> None:
    assert walk_line(walk) == line


def test_text_shows_nodes_resources_edges_and_walks() -> None:
    assert graph_text("assistant", ASSISTANT, SPECS).splitlines() == [
        "assistant",
        "",
        "┌─ ear ────────────────────────────┐",
        "│ heard (encoder)  hidden_size 512 │",
        "└──────────────────────────────────┘",
        "",
        "┌─ writer ────────────────────────────────────────────────────┐",
        "│ kv               num_layers 30, num_kv_heads 3, head_dim 64 │",
        "│ heard (encoder)  hidden_size 512                            │",
        "└─────────────────────────────────────────────────────────────┘",
        "",
        "┌─ speaker ─┐",
        "└───────────┘",
        "",
        "┌─ codec ─┐",
        "└─────────┘",
        "",
        "edges",
        "  ear ── audio ─▶ writer",
        "  writer ┄┄ text ┄▶ speaker  (streams sentences)",
        "  speaker ┄┄ codes ┄▶ codec  (streams 10, then 50)",
        "  ear ── timbre ─▶ codec",
        "",
        "walks",
        "  prefill: writer",
        "  answer:  loop until finished( writer ) & for each chunk of text( speaker ) & "
        "for each chunk of codes( codec )",
    ]


# As a picture

Rect = tuple[float, float, float, float]


def of_class(root: ET.Element, name: str) -> list[ET.Element]:
    return [found for found in root.iter() if name in found.get("class", "").split()]


def number(element: ET.Element, name: str) -> float:
    return float(element.get(name, "nan"))


def words_of(text: ET.Element) -> str:
    """What is seen of a text, without what shows when it is pointed at."""
    return (text.text or "") + "".join(child.tail or "" for child in text)


def area_of(text: ET.Element) -> Rect:
    """What a line of text covers: a monospaced font of 12 px, or of 14 px in names."""
    size = 14 if text.get("class") == "name" else 12
    x, y = number(text, "x"), number(text, "y")
    words = words_of(text)
    return (x, y - 0.8 * size, x + 0.61 * size * len(words), y + 0.25 * size)


def box_of(node: ET.Element) -> Rect:
    (rect,) = of_class(node, "box")
    x, y = number(rect, "x"), number(rect, "y")
    return (x, y, x + number(rect, "width"), y + number(rect, "height"))


def meet(one: Rect, other: Rect) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def within(inner: Rect, outer: Rect) -> bool:
    return (
        outer[0] <= inner[0]
        and outer[1] <= inner[1]
        and inner[2] <= outer[2]
        and inner[3] <= outer[3]
    )


def check_picture(svg: str, graph: Graph) -> ET.Element:
    """Assert that all of a graph is named and that no box or text lies on another."""
    root = ET.fromstring(svg)
    nodes = {node.get("data-name"): node for node in of_class(root, "node")}
    assert set(nodes) == set(graph.nodes)
    for name, node in nodes.items():
        texts = node.findall(f"{SVG}text")
        assert texts[0].text == name
        assert all(within(area_of(text), box_of(node)) for text in texts)
    labels: list[Rect] = []
    for edge, drawn in zip(graph.edges, of_class(root, "edge"), strict=True):
        ends = (drawn.get("data-source"), drawn.get("data-target"), drawn.get("data-name"))
        assert ends == (edge.source, edge.target, edge.name)
        assert ("streams" in drawn.get("class", "")) == (edge.chunks is not None)
        texts = drawn.findall(f"{SVG}text")
        assert texts[0].text == edge.name
        labels += map(area_of, texts)
    assert [walk.get("data-name") for walk in of_class(root, "walk")] == [n for n, _ in graph.walks]
    boxes = [box_of(node) for node in nodes.values()]
    for one, other in combinations([*boxes, *labels], 2):
        assert not meet(one, other), (one, other)
    page = (0.0, 0.0, number(root, "width"), number(root, "height"))
    (sheet,) = of_class(root, "graph")
    x, y = map(float, re.findall(r"[\d.]+", sheet.get("transform", "")))
    for area in [*boxes, *labels]:
        assert within((area[0] + x, area[1] + y, area[2] + x, area[3] + y), page)
    (walks,) = of_class(root, "walks")
    _, y = map(float, re.findall(r"[\d.]+", walks.get("transform", "")))
    for text in walks.iter(f"{SVG}text"):
        left, top, right, bottom = area_of(text)
        assert within((left, top + y, right, bottom + y), page)
    assert all(area[3] + float(sheet.get("transform", "").split()[1][:-1]) <= y for area in boxes)
    return root


def test_picture_names_everything_and_nothing_overlaps() -> None:
    root = check_picture(graph_svg("assistant", ASSISTANT, SPECS), ASSISTANT)
    resources = of_class(root, "resource")
    assert [words_of(text) for text in resources] == ["heard (encoder)", "kv", "heard (encoder)"]
    facts = [text.findtext(f"{SVG}title") for text in resources]
    assert facts[1] == "num_layers 30, num_kv_heads 3, head_dim 64"
    said = [words_of(text) for text in of_class(root, "walks")[0].iter(f"{SVG}text")]
    assert said[:2] == ["prefill", "writer"]
    assert " ".join(said[3:]) == walk_line(dict(ASSISTANT.walks)["answer"])
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")


def test_names_with_signs_of_xml_stay_names() -> None:
    graph = Graph(("a<b>&\"'",), (("w", Run("a<b>&\"'")),))
    check_picture(graph_svg("<&>", graph, ()), graph)


def test_long_walks_are_broken_into_lines() -> None:
    graph = Graph(("a",), (("w", Sequential(*[Run("a")] * 80)), ("v", Run("a"))))
    root = check_picture(graph_svg("m", graph, ()), graph)
    rows = of_class(root, "walk")[0].findall(f"{SVG}text")
    assert len(rows) > 3
    assert " ".join(row.text or "" for row in rows[1:]) == " → ".join(["a"] * 80)


GRAPHS = st.integers(1, 7).flatmap(
    lambda n: st.lists(
        st.tuples(st.integers(0, n - 1), st.integers(0, n - 1), st.booleans()), max_size=12
    ).map(
        lambda pairs: Graph(
            tuple(f"node{i}" * (i % 3 + 1) for i in range(n)),
            tuple((f"walk{i}", Run(f"node{i}" * (i % 3 + 1))) for i in range(n)),
            tuple(
                Edge(
                    f"node{a}" * (a % 3 + 1),
                    f"node{b}" * (b % 3 + 1),
                    f"edge{i}",
                    Sized(5) if streams else None,
                )
                for i, (a, b, streams) in enumerate(pairs)
            ),
        )
    )
)


@settings(deadline=None, max_examples=60)
@given(GRAPHS)
def test_any_graph_is_drawn_without_overlaps(graph: Graph) -> None:
    check_picture(graph_svg("model", graph, SPECS), graph)


def stretches(line: list[Point] | tuple[Point, ...]) -> list[Rect]:
    """What the parts of a way cover."""
    return [
        (min(ax, bx), min(ay, by), max(ax, bx), max(ay, by))
        for (ax, ay), (bx, by) in pairwise(line)
    ]


@settings(deadline=None, max_examples=60)
@given(GRAPHS)
def test_lines_lead_from_box_to_box_and_cross_no_other(graph: Graph) -> None:
    links = [Link(edge.source, edge.target, 50.0) for edge in graph.edges]
    layout: Layout = lay_out([Box(name, 60.0, 40.0) for name in graph.nodes], links)
    areas = {
        name: (place.x, place.y, place.x + place.width, place.y + place.height)
        for name, place in layout.places.items()
    }
    for link, line in zip(links, layout.lines, strict=True):
        source, target = layout.places[link.source], layout.places[link.target]
        assert line[0][0] == source.x + source.width
        assert line[-1][0] == target.x
        assert is_beside(line[0], source)
        assert is_beside(line[-1], target)
        for stretch in stretches(list(line)):
            assert not any(meet(stretch, area) for area in areas.values())
            assert within(stretch, (0.0, 0.0, layout.width, layout.height))
    ends = [line[0] for line in layout.lines] + [line[-1] for line in layout.lines]
    assert len(set(ends)) == len(ends)


def is_beside(point: Point, place: Place) -> bool:
    return place.y < point[1] < place.y + place.height


def test_what_is_in_line_is_drawn_in_line() -> None:
    boxes = [Box(name, 60.0, height) for name, height in (("a", 40.0), ("b", 90.0), ("c", 50.0))]
    layout = lay_out(boxes, [Link("a", "b", 10.0), Link("b", "c", 10.0)])
    heights = {y for line in layout.lines for _, y in line}
    assert len(heights) == 1
    assert layout.places["a"].x < layout.places["b"].x < layout.places["c"].x


# The command


def test_command_draws_a_folder_without_reading_its_weights(
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "tensor", refuse)
    assert main(["graph", str(tiny_folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{tiny_folder}\n\n┌─ decoder ─")
    assert "\n  decode:  loop until finished( decoder )\n" in text
    for key in ("kv", "position", "attention", "sampler"):
        assert f"\n│ {key} " in text
    file = tmp_path / "graph.svg"
    assert main(["graph", str(tiny_folder), "--svg", str(file)]) == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    nodes = of_class(ET.fromstring(file.read_text("utf-8")), "node")
    assert [node.get("data-name") for node in nodes] == ["decoder"]


def test_command_can_do_with_a_config_alone(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["graph", str(tmp_path)]) == 2
    assert main(["graph", str(tmp_path), "--load-format", "dummy"]) == 0
    assert "┌─ decoder ─" in capsys.readouterr().out


def test_command_says_what_it_cannot_draw_or_write(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["graph", str(tmp_path / "nothing")]) == 2
    assert main(["graph", str(tiny_folder), "--svg", str(tmp_path / "no" / "folder.svg")]) == 2
    assert "folder.svg cannot be written" in capsys.readouterr().err
