import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings, strategies as st

from mstar.engine.graph import Cursor, Edge, Graph, Loop, Parallel, Run, Sequential, Walk
from mstar.errors import ConfigError


def never(name: str, request: object) -> bool:
    return False


def visits(walk: Walk, holds: Callable[[str, object], bool] = never) -> list[str]:
    """Take the first ready node each time, until the end."""
    cursor = Cursor("walk", walk)
    out: list[str] = []
    while cursor.ready():
        node = cursor.ready()[0]
        assert cursor.complete(node, holds, None) is cursor.is_done
        out.append(node)
        assert len(out) < 1000
    assert cursor.is_done
    return out


def test_sequential_visits_its_parts_in_order() -> None:
    assert visits(Sequential(Run("a"), Run("b"), Run("a"))) == ["a", "b", "a"]


def test_loop_with_times_ends_by_itself() -> None:
    assert visits(Loop(Sequential(Run("a"), Run("b")), times=2)) == ["a", "b", "a", "b"]
    assert visits(Loop(Run("a"), times=3)) == ["a", "a", "a"]
    assert visits(Loop(Loop(Run("a"), times=2), times=2)) == ["a"] * 4


@pytest.mark.parametrize("body", [Run("a"), Sequential(Run("a"))])
def test_loop_ends_after_the_round_in_which_its_predicate_holds(body: Walk) -> None:
    asked = []

    def third(name: str, request: object) -> bool:
        asked.append((name, request))
        return len(asked) == 3

    assert visits(Loop(body, until="full"), third) == ["a", "a", "a"]
    assert asked == [("full", None)] * 3


def test_loop_with_both_ends_takes_whichever_comes_first() -> None:
    assert visits(Loop(Run("a"), times=2, until="full")) == ["a", "a"]
    assert visits(Loop(Run("a"), times=2, until="full"), lambda name, request: True) == ["a"]


def test_parallel_parts_may_be_visited_in_any_order() -> None:
    cursor = Cursor("walk", Parallel(Sequential(Run("a"), Run("b")), Run("c")))
    assert cursor.ready() == ("a", "c")
    assert not cursor.complete("c", never, None)
    assert cursor.ready() == ("a",)
    assert not cursor.complete("a", never, None)
    assert cursor.complete("b", never, None)
    assert cursor.ready() == ()


def test_visit_that_the_walk_does_not_wait_for_is_caught() -> None:
    cursor = Cursor("walk", Sequential(Run("a"), Run("b")))
    with pytest.raises(AssertionError, match=r"'walk' waits for \('a',\), not for 'b'"):
        cursor.complete("b", never, None)


WALKS = st.recursive(
    st.sampled_from("abc").map(Run),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: Sequential(*parts)),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: Parallel(*parts)),
        st.tuples(inner, st.integers(1, 3)).map(lambda pair: Loop(pair[0], times=pair[1])),
    ),
    max_leaves=6,
)


def expanded(walk: Walk) -> Iterator[str]:
    """Every visit of a walk whose loops have times, in one of the orders it allows."""
    if isinstance(walk, Run):
        yield walk.node
    elif isinstance(walk, Loop):
        for _ in range(walk.times or 0):
            yield from expanded(walk.body)
    elif isinstance(walk, (Sequential, Parallel)):
        for part in walk.parts:
            yield from expanded(part)


@settings(deadline=None)
@given(WALKS, st.integers(0, 3))
def test_any_order_of_visits_makes_the_same_visits(walk: Walk, seed: int) -> None:
    rng = random.Random(seed)
    cursor = Cursor("walk", walk)
    out = []
    while not cursor.is_done:
        node = rng.choice(cursor.ready())
        cursor.complete(node, never, None)
        out.append(node)
    assert sorted(out) == sorted(expanded(walk))
    assert visits(walk) == list(expanded(walk))


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (Sequential, "Sequential has no parts"),
        (lambda: Loop(Run("a")), "loop over a has no end"),
        (lambda: Loop(Run("a"), times=0), "`times` is 0"),
        (lambda: Graph(("a", "a"), ()), "node 'a' is declared twice"),
        (lambda: Graph(("a",), (("w", Run("a")), ("w", Run("a")))), "walk 'w' is declared twice"),
        (
            lambda: Graph(("a",), (("w", Run("b")),)),
            "walk 'w' names 'b', which is no node; there are a",
        ),
        (lambda: Graph(("a",), (), (Edge("a", "b", "x"),)), "edge 'x' .*names 'b'.*there are a"),
        (
            lambda: Graph(("a",), (("w", Loop(Run("a"), until="p")),)),
            "walk 'w' names 'p', which is no predicate; there are none",
        ),
        (lambda: Graph(("a",), (("w", Run("a")),)).cursor("v"), "no walk 'v'; walks are w"),
    ],
)
def test_wrong_declarations_name_the_culprit(declare: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declare()


def test_walks_are_values() -> None:
    walk = Sequential(Run("a"), Loop(Run("b"), times=2))
    assert walk == Sequential(Run("a"), Loop(Run("b"), times=2))
    assert walk != Parallel(Run("a"), Loop(Run("b"), times=2))
    assert len({walk, Sequential(*walk.parts)}) == 1
