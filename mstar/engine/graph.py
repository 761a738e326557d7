"""A model as a graph of nodes, and a request's walk over it.

A walk is a small program over nodes::

    Sequential(Run("encoder"), Loop(Run("decoder"), until="finished"))

Walks are values; a :class:`Cursor` is one request's place in one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from mstar.errors import ConfigError

T = TypeVar("T")
Holds = Callable[[str, T], bool]
"""Tells whether the predicate of that name holds for the request."""


@dataclass(frozen=True)
class Edge:
    """A tensor that one node hands to another."""

    source: str
    target: str
    name: str


class Walk(ABC):
    """A program over nodes."""

    @abstractmethod
    def nodes(self) -> Iterator[str]:
        """Yield the name of every node in it, repeats included."""

    @abstractmethod
    def predicates(self) -> Iterator[str]:
        """Yield the name of every predicate in it."""

    @abstractmethod
    def _start(self) -> "_Place":
        """Return a fresh place at its beginning."""


@dataclass(frozen=True)
class Run(Walk):
    """Visit one node once."""

    node: str

    def nodes(self) -> Iterator[str]:
        """Yield the one node."""
        yield self.node

    def predicates(self) -> Iterator[str]:
        """Yield nothing."""
        yield from ()

    def _start(self) -> "_Place":
        return _RunPlace(self.node)


class _Parts(Walk):
    """Several walks under one rule."""

    def __init__(self, *parts: Walk) -> None:
        if not parts:
            raise ConfigError(f"{type(self).__name__} has no parts; give it at least one walk")
        self.parts = parts

    def nodes(self) -> Iterator[str]:
        """Yield the nodes of all parts."""
        for part in self.parts:
            yield from part.nodes()

    def predicates(self) -> Iterator[str]:
        """Yield the predicates of all parts."""
        for part in self.parts:
            yield from part.predicates()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.parts == getattr(other, "parts", None)

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.parts))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.parts))})"


class Sequential(_Parts):
    """One part after the other."""

    def _start(self) -> "_Place":
        return _SequentialPlace(self.parts)


class Parallel(_Parts):
    """All parts side by side; done when all are."""

    def _start(self) -> "_Place":
        return _ParallelPlace(self.parts)


@dataclass(frozen=True)
class Loop(Walk):
    """Repeat a walk a number of times, or until a predicate holds after a round.

    Raises:
        ConfigError: If it has neither ``times`` nor ``until``, or ``times`` is below 1.
    """

    body: Walk
    times: int | None = None
    """Rounds at most."""
    until: str | None = None
    """Name of the predicate that ends it."""

    def __post_init__(self) -> None:
        if self.times is None and self.until is None:
            nodes = ", ".join(self.body.nodes())
            raise ConfigError(f"the loop over {nodes} has no end; give it `times` or `until`")
        if self.times is not None and self.times < 1:
            raise ConfigError(f"a loop's `times` is {self.times}; it must be at least 1")

    def nodes(self) -> Iterator[str]:
        """Yield the nodes of the body."""
        yield from self.body.nodes()

    def predicates(self) -> Iterator[str]:
        """Yield the predicates of the body, and its own."""
        yield from self.body.predicates()
        if self.until is not None:
            yield self.until

    def _start(self) -> "_Place":
        return _RunLoopPlace(self.body, self) if isinstance(self.body, Run) else _LoopPlace(self)


class _Place(ABC):
    """Where a request stands within one walk."""

    is_done = False

    @abstractmethod
    def ready(self) -> tuple[str, ...]:
        """Return the nodes that may be visited now."""

    @abstractmethod
    def complete(self, node: str, holds: Holds[T], request: T) -> bool:
        """Take note of a visit; returns whether this place was waiting for it."""


class _RunPlace(_Place):
    def __init__(self, node: str) -> None:
        self._ready = (node,)

    def ready(self) -> tuple[str, ...]:
        return () if self.is_done else self._ready

    def complete(self, node: str, holds: Holds[T], request: T) -> bool:
        if self.is_done or node != self._ready[0]:
            return False
        self.is_done = True
        return True


class _SequentialPlace(_Place):
    def __init__(self, parts: tuple[Walk, ...]) -> None:
        self._parts = parts
        self._index = 0
        self._place = parts[0]._start()

    def ready(self) -> tuple[str, ...]:
        return self._place.ready()

    def complete(self, node: str, holds: Holds[T], request: T) -> bool:
        if self.is_done or not self._place.complete(node, holds, request):
            return False
        if self._place.is_done:
            self._index += 1
            if self._index == len(self._parts):
                self.is_done = True
            else:
                self._place = self._parts[self._index]._start()
        return True


class _ParallelPlace(_Place):
    def __init__(self, parts: tuple[Walk, ...]) -> None:
        self._places = [part._start() for part in parts]

    def ready(self) -> tuple[str, ...]:
        return tuple(node for place in self._places for node in place.ready())

    def complete(self, node: str, holds: Holds[T], request: T) -> bool:
        for place in self._places:
            if place.complete(node, holds, request):
                self.is_done = all(place.is_done for place in self._places)
                return True
        return False


class _LoopPlace(_Place):
    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._rounds = 0
        self._place = loop.body._start()

    def ready(self) -> tuple[str, ...]:
        return () if self.is_done else self._place.ready()

    def complete(self, node: str, holds: Holds[T], request: T) -> bool:
        if self.is_done or not self._place.complete(node, holds, request):
            return False
        if self._place.is_done:
            self._rounds += 1
            loop = self._loop
            if self._rounds == loop.times or (
                loop.until is not None and holds(loop.until, request)
            ):
                self.is_done = True
            else:
                self._place = loop.body._start()
        return True


class _RunLoopPlace(_RunPlace):
    """A loop over one node, which most requests are in most of the time."""

    def __init__(self, body: Run, loop: Loop) -> None:
        super().__init__(body.node)
        self._node = body.node
        self._times, self._until = loop.times, loop.until
        self._rounds = 0

    def complete(self, node: str, holds: Holds[T], request: T) -> bool:
        if self.is_done or node != self._node:
            return False
        self._rounds += 1
        if self._rounds == self._times or (self._until is not None and holds(self._until, request)):
            self.is_done = True
        return True


class Cursor:
    """One request's place in a walk.

    Args:
        name: What the model calls the walk.
        walk: The program.
    """

    __slots__ = ("_place", "name")

    def __init__(self, name: str, walk: Walk) -> None:
        self.name = name
        self._place = walk._start()

    @property
    def is_done(self) -> bool:
        """Whether the walk is at its end."""
        return self._place.is_done

    def ready(self) -> tuple[str, ...]:
        """Return the nodes that may be visited now; more than one inside ``Parallel``."""
        return self._place.ready()

    def complete(self, node: str, holds: Holds[T], request: T) -> bool:
        """Take note that ``node`` was visited; returns whether the walk is at its end.

        Args:
            node: One of ``ready()``.
            holds: Asked for the predicates of loops whose round this visit ends.
            request: Whose walk it is.
        """
        place = self._place
        taken = place.complete(node, holds, request)
        assert taken, f"walk {self.name!r} waits for {self.ready()}, not for {node!r}"
        return place.is_done


@dataclass(frozen=True)
class Graph:
    """A model's nodes, the tensors between them, and the walks a request may take.

    Raises:
        ConfigError: If a name is used twice, an edge or a walk leads to no node, or a walk's
            predicate is not declared; names the culprit.
    """

    nodes: tuple[str, ...]
    walks: tuple[tuple[str, Walk], ...]
    edges: tuple[Edge, ...] = ()
    predicates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for kind, names in (("node", self.nodes), ("walk", tuple(n for n, _ in self.walks))):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ConfigError(f"{kind} {twice[0]!r} is declared twice")
        for edge in self.edges:
            where = f"edge {edge.name!r} from {edge.source!r} to {edge.target!r}"
            for end in (edge.source, edge.target):
                _require(end, "node", self.nodes, where)
        for name, walk in self.walks:
            for node in walk.nodes():
                _require(node, "node", self.nodes, f"walk {name!r}")
            for predicate in walk.predicates():
                _require(predicate, "predicate", self.predicates, f"a loop of walk {name!r}")

    def cursor(self, name: str) -> Cursor:
        """Return a cursor at the start of the walk ``name``."""
        for walk_name, walk in self.walks:
            if walk_name == name:
                return Cursor(name, walk)
        raise ConfigError(
            f"there is no walk {name!r}; walks are {', '.join(n for n, _ in self.walks)}"
        )


def _require(name: str, kind: str, known: tuple[str, ...], where: str) -> None:
    if name not in known:
        listed = ", ".join(known) or "none"
        raise ConfigError(f"{where} names {name!r}, which is no {kind}; there are {listed}")
