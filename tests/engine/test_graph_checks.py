import random
import re
from typing import Any, cast

import pytest
from hypothesis import given, settings, strategies as st

from mstar.engine.chunks import Sentences, Sized
from mstar.engine.graph import Edge, ForEach, Graph, Loop, Parallel, Run, Sequential, Walk
from mstar.engine.graph_checks import check_graph
from mstar.errors import ConfigError

WRITE = Loop(Run("writer"), until="finished")
SPEAK = ForEach(Run("speaker"), "text")
PLAY = ForEach(Run("codec"), "codes")
TEXT = Edge("writer", "speaker", "text", Sentences())
CODES = Edge("speaker", "codec", "codes", Sized(50, first=10))


def graph(*walks: Walk, **changes: Any) -> Graph:
    """A graph whose nodes and predicates are those of its walks."""
    fields: dict[str, Any] = {
        "nodes": tuple(sorted({node for walk in walks for node in walk.nodes()})),
        "predicates": tuple(sorted({name for walk in walks for name in walk.predicates()})),
        "walks": tuple((f"walk{index}", walk) for index, walk in enumerate(walks)),
    }
    return Graph(**(fields | changes))


SOUND = [
    graph(Run("a")),
    graph(Run("writer"), WRITE),
    graph(Run("writer"), Parallel(WRITE, SPEAK), edges=(TEXT,)),
    graph(Parallel(WRITE, SPEAK, PLAY), edges=(TEXT, CODES)),
    graph(Parallel(WRITE, Sequential(Run("voice"), SPEAK)), edges=(TEXT,)),
    graph(Sequential(Run("writer"), SPEAK), edges=(TEXT,)),
    graph(Parallel(WRITE, SPEAK), Sequential(WRITE, SPEAK), edges=(TEXT,)),
    graph(
        Loop(Sequential(Run("a"), Run("b"), Run("c")), times=4),
        edges=(Edge("a", "b", "x"), Edge("b", "c", "y"), Edge("c", "a", "z"), Edge("b", "b", "w")),
    ),
    graph(Sequential(Run("a"), Run("b"), Run("a")), edges=(Edge("a", "b", "x"),)),
    graph(Sequential(Parallel(Run("a"), Run("b")), Run("a"))),
]


@pytest.mark.parametrize("sound", SOUND)
def test_graphs_whose_walks_come_to_their_end_pass(sound: Graph) -> None:
    check_graph(sound)


def test_encoders_stand_in_no_walk() -> None:
    seeing = graph(Run("writer"), nodes=("writer", "eye"), edges=(Edge("eye", "writer", "image"),))
    check_graph(seeing, {"image": "eye", "video": "eye"})
    with pytest.raises(ConfigError, match="'eye', which edge 'image' touches, stands in no walk"):
        check_graph(seeing)
    with pytest.raises(ConfigError, match=r"'audio' are encoded by 'ear', which is no node; .*eye"):
        check_graph(seeing, {"image": "eye", "audio": "ear"})


BROKEN = [
    (
        graph(Run("a"), nodes=("a", "b")),
        r"node 'b' stands in no walk \(walk0\) and encodes no kind of item",
    ),
    (
        graph(Run("a"), predicates=("done",)),
        r"predicate 'done' ends no loop of any walk \(walk0\)",
    ),
    (
        graph(Sequential(Run("a"), Run("b")), edges=(Edge("a", "b", "x"), Edge("b", "a", "y"))),
        r"edges 'x', 'y' lead in a circle \(a → b → a\), and no loop of a walk \(walk0\)",
    ),
    (
        graph(Run("a"), edges=(Edge("a", "a", "x"),)),
        r"edge 'x' leads in a circle \(a → a\)",
    ),
    (
        graph(
            Sequential(
                Loop(Sequential(Run("a"), Run("b")), times=2),
                Loop(Sequential(Run("b"), Run("c")), times=2),
            ),
            edges=(
                Edge("a", "b", "x"),
                Edge("b", "a", "y"),
                Edge("b", "c", "z"),
                Edge("c", "a", "w"),
            ),
        ),
        r"edges 'x', 'z', 'w' lead in a circle \(a → b → c → a\)",
    ),
    (
        graph(Parallel(Run("a"), Sequential(Run("b"), Loop(Run("a"), times=2)))),
        r"walk 'walk0' runs node 'a' in two parts of one Parallel",
    ),
    (
        graph(Run("c"), Sequential(Run("c"), Parallel(Run("b"), Run("b")))),
        r"walk 'walk1' runs node 'b' in two parts of one Parallel",
    ),
    (
        graph(Parallel(WRITE, SPEAK), edges=(Edge("writer", "writer", "text", Sized(1)),)),
        r"visits 'speaker' for each chunk of edge 'text' from 'writer' to 'writer'; visit 'writer'",
    ),
    (
        graph(Parallel(WRITE, SPEAK), SPEAK, edges=(TEXT,)),
        r"walk 'walk1' visits 'speaker' for each chunk of edge 'text' from 'writer' to 'speaker', "
        r"but 'writer' nowhere, and so would wait without end",
    ),
    (
        graph(Parallel(WRITE, SPEAK), Sequential(SPEAK, WRITE), edges=(TEXT,)),
        r"walk 'walk1' would wait without end, over edge 'text': "
        r"(writer waits for speaker waits for writer|speaker waits for writer waits for speaker); ",
    ),
    (
        graph(Parallel(SPEAK, Sequential(PLAY, WRITE)), edges=(TEXT, CODES)),
        r"would wait without end, over edge 'codes', 'text'",
    ),
    (
        graph(ForEach(Run("a"), "self"), edges=(Edge("a", "a", "self", Sized(1)),)),
        r"edge 'self' leads in a circle \(a → a\)",
    ),
    (
        graph(Parallel(WRITE, Loop(SPEAK, times=2)), edges=(TEXT,)),
        r"'speaker' for each chunk of edge 'text' .* inside a loop, which would have no end",
    ),
    (
        graph(Loop(Parallel(Run("writer"), SPEAK), until="finished"), edges=(TEXT,)),
        r"inside a loop, which would have no end",
    ),
    (
        graph(Sequential(Parallel(WRITE, SPEAK), SPEAK), edges=(TEXT,)),
        r"'speaker' for each chunk of edge 'text' .*, and visits it elsewhere too",
    ),
    (
        graph(Sequential(Run("speaker"), Parallel(WRITE, SPEAK)), edges=(TEXT,)),
        r"'speaker' for each chunk of edge 'text' .*, and visits it elsewhere too",
    ),
    (
        graph(Sequential(WRITE, SPEAK), edges=(TEXT,)),
        r"edge 'text' from 'writer' to 'speaker' never streams: walk 'walk0' visits 'speaker' "
        r"behind 'writer', not beside it; put the source and a ForEach into one Parallel",
    ),
    (
        graph(Sequential(Run("writer"), Run("writer"), SPEAK), edges=(TEXT,)),
        r"never streams: walk 'walk0' visits 'speaker' behind 'writer', not beside it",
    ),
    (
        graph(Sequential(WRITE, SPEAK, PLAY), Parallel(WRITE, SPEAK), edges=(TEXT, CODES)),
        r"edge 'codes' .* never streams: walk 'walk0' visits 'codec' behind 'speaker'",
    ),
    (
        graph(Sequential(WRITE, Run("speaker")), edges=(TEXT,)),
        r"never streams: no walk \(walk0\) visits 'speaker' for each chunk of it",
    ),
    (
        graph(Parallel(WRITE, SPEAK), edges=(TEXT, TEXT)),
        r"streaming edge 'text' is declared twice",
    ),
]


@pytest.mark.parametrize(("broken", "message"), BROKEN)
def test_what_would_not_end_is_refused_by_name(broken: Graph, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_graph(broken)
    assert not re.search(r"'walk\d', 'walk\d'|None", str(caught.value))


@st.composite
def pipelines(draw: st.DrawFn) -> Graph:
    """Nodes that each take from one before, under a random tree of walks; not all of it sound."""
    count = draw(st.integers(2, 5))
    parts: list[Walk] = [Loop(Run("n0"), times=draw(st.integers(1, 3)))]
    edges: list[Edge] = []
    for index in range(1, count):
        source = draw(st.integers(0, index - 1))
        chunks = Sized(draw(st.integers(1, 3)))
        edges.append(Edge(f"n{source}", f"n{index}", f"e{index}", chunks))
        parts.append(ForEach(Run(f"n{index}"), f"e{index}"))
        if draw(st.booleans()):
            before = Run(f"{index}") if draw(st.booleans()) else Loop(Run(f"{index}"), times=2)
            parts[-1] = Sequential(before, parts[-1])
    parts = draw(st.permutations(parts)) if draw(st.booleans()) else parts
    while len(parts) > 1:
        at = draw(st.integers(0, len(parts) - 2))
        kind = draw(st.sampled_from([Parallel, Parallel, Sequential]))
        parts[at : at + 2] = [kind(*parts[at : at + 2])]
    if draw(st.integers(0, 9)) == 0:
        parts = [Loop(parts[0], times=2)]
    return graph(parts[0], edges=tuple(edges))


@settings(deadline=None, max_examples=150)
@given(pipelines(), st.integers(0, 2**32))
def test_a_walk_over_a_graph_that_passes_comes_to_its_end(made: Graph, seed: int) -> None:
    try:
        check_graph(made)
    except ConfigError:
        return
    rng = random.Random(seed)
    cursor = made.cursor("walk0")
    sent: dict[str, int] = dict.fromkeys(cursor.inboxes, 0)
    taken: dict[str, int] = dict.fromkeys(cursor.inboxes, 0)
    for _ in range(1000):
        if cursor.is_done:
            break
        assert cursor.ready(), "the walk waits for nothing"
        node = rng.choice(cursor.ready())
        chunk = cursor.chunk_for(node)
        for edge in made.edges:
            if edge.target == node and chunk is not None:
                taken[edge.name] += len(cast("list[int]", chunk))
            if edge.source == node:
                piece = [0] * rng.randrange(4)
                cursor.inboxes[edge.name].put(piece)
                sent[edge.name] += len(piece)
        cursor.complete(node, lambda name, request: False, None)
    assert cursor.is_done
    assert taken == sent
