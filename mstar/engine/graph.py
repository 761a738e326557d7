"""A model as a graph of nodes, and a request's walk over it.

A walk is a small program over nodes::

    Sequential(Run("encoder"), Loop(Run("decoder"), until="finished"))

and where a node works on what another has ready so far, over a streaming edge::

    Parallel(Loop(Run("decoder"), until="finished"), ForEach(Run("speaker"), "sentences"))

Walks are values; a :class:`Cursor` is one request's place in one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from mstar.engine.chunks import ChunkPolicy, Inbox
from mstar.errors import ConfigError

T = TypeVar("T")
Holds = Callable[[str, T], bool]
"""Tells whether the predicate of that name holds for the request."""


Inboxes = Mapping[str, Inbox]
"""What has come over each streaming edge of a walk and is not consumed yet."""


@dataclass(frozen=True)
class Edge:
    """Something that one node hands to another."""

    source: str
    target: str
    name: str
    chunks: ChunkPolicy | None = None
    """How a streaming edge cuts what comes over it: the target starts on the first chunk while
    the source goes on. ``None``: the target is given the whole."""


class Walk(ABC):
    """A program over nodes."""

    @abstractmethod
    def nodes(self) -> Iterator[str]:
        """Yield the name of every node in it, repeats included."""

    @abstractmethod
    def predicates(self) -> Iterator[str]:
        """Yield the name of every predicate in it."""

    def edges(self) -> Iterator[str]:
        """Yield the name of every streaming edge that it consumes."""
        yield from ()

    @abstractmethod
    def _start(self, inboxes: Inboxes) -> "_Place":
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

    def _start(self, inboxes: Inboxes) -> "_Place":
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

    def edges(self) -> Iterator[str]:
        """Yield the streaming edges of all parts."""
        for part in self.parts:
            yield from part.edges()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.parts == getattr(other, "parts", None)

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.parts))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.parts))})"


class Sequential(_Parts):
    """One part after the other."""

    def _start(self, inboxes: Inboxes) -> "_Place":
        return _SequentialPlace(self.parts, inboxes)


class Parallel(_Parts):
    """All parts side by side; done when all are."""

    def _start(self, inboxes: Inboxes) -> "_Place":
        return _ParallelPlace(self.parts, inboxes)


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

    def edges(self) -> Iterator[str]:
        """Yield the streaming edges of the body."""
        yield from self.body.edges()

    def _start(self, inboxes: Inboxes) -> "_Place":
        if isinstance(self.body, Run):
            return _RunLoopPlace(self.body, self)
        return _LoopPlace(self, inboxes)


@dataclass(frozen=True)
class ForEach(Walk):
    """Visit a node for every chunk of a streaming edge, until its source has ended."""

    body: Run
    edge: str
    """Name of the edge; it leads to the node."""

    def nodes(self) -> Iterator[str]:
        """Yield the one node."""
        yield self.body.node

    def predicates(self) -> Iterator[str]:
        """Yield nothing."""
        yield from ()

    def edges(self) -> Iterator[str]:
        """Yield the one edge."""
        yield self.edge

    def _start(self, inboxes: Inboxes) -> "_Place":
        return _ForEachPlace(self.body.node, inboxes[self.edge])


class _Place(ABC):
    """Where a request stands within one walk."""

    is_done = False

    @abstractmethod
    def ready(self) -> tuple[str, ...]:
        """Return the nodes that may be visited now."""

    @abstractmethod
    def complete(self, node: str, holds: Holds[T], request: T) -> bool:
        """Take note of a visit; returns whether this place was waiting for it."""

    @abstractmethod
    def expects(self, node: str) -> bool:
        """Tell whether the node may be visited, now or later."""

    def settle(self) -> None:
        """Go on over parts that ended without a visit: their edges did."""


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

    def expects(self, node: str) -> bool:
        return not self.is_done and node == self._ready[0]


class _ForEachPlace(_Place):
    def __init__(self, node: str, inbox: Inbox) -> None:
        self._ready = (node,)
        self._inbox = inbox

    def ready(self) -> tuple[str, ...]:
        return self._ready if self._inbox.has_chunk else ()

    def complete(self, node: str, holds: Holds[T], request: T) -> bool:
        if node != self._ready[0] or not self._inbox.has_chunk:
            return False
        self._inbox.pop()
        self.settle()
        return True

    def settle(self) -> None:
        self.is_done = self._inbox.is_over

    def expects(self, node: str) -> bool:
        return not self._inbox.is_over and node == self._ready[0]


class _SequentialPlace(_Place):
    def __init__(self, parts: tuple[Walk, ...], inboxes: Inboxes) -> None:
        self._parts = parts
        self._inboxes = inboxes
        self._index = 0
        self._place = parts[0]._start(inboxes)

    def ready(self) -> tuple[str, ...]:
        return self._place.ready()

    def complete(self, node: str, holds: Holds[T], request: T) -> bool:
        if self.is_done or not self._place.complete(node, holds, request):
            return False
        self._go_on()
        return True

    def settle(self) -> None:
        self._place.settle()
        self._go_on()

    def _go_on(self) -> None:
        while self._place.is_done and not self.is_done:
            self._index += 1
            if self._index == len(self._parts):
                self.is_done = True
            else:
                self._place = self._parts[self._index]._start(self._inboxes)
                self._place.settle()

    def expects(self, node: str) -> bool:
        later = self._parts[self._index + 1 :]
        return self._place.expects(node) or any(node in part.nodes() for part in later)


class _ParallelPlace(_Place):
    def __init__(self, parts: tuple[Walk, ...], inboxes: Inboxes) -> None:
        self._places = [part._start(inboxes) for part in parts]

    def ready(self) -> tuple[str, ...]:
        return tuple(node for place in self._places for node in place.ready())

    def complete(self, node: str, holds: Holds[T], request: T) -> bool:
        for place in self._places:
            if place.complete(node, holds, request):
                self.is_done = all(place.is_done for place in self._places)
                return True
        return False

    def settle(self) -> None:
        for place in self._places:
            place.settle()
        self.is_done = all(place.is_done for place in self._places)

    def expects(self, node: str) -> bool:
        return any(place.expects(node) for place in self._places)


class _LoopPlace(_Place):
    def __init__(self, loop: Loop, inboxes: Inboxes) -> None:
        self._loop = loop
        self._inboxes = inboxes
        self._rounds = 0
        self._place = loop.body._start(inboxes)

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
                self._place = loop.body._start(self._inboxes)
        return True

    def expects(self, node: str) -> bool:
        return not self.is_done and node in self._loop.nodes()


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
        edges: The graph's streaming edges that the walk consumes.
    """

    __slots__ = ("_edges", "_place", "inboxes", "name")

    def __init__(self, name: str, walk: Walk, edges: tuple[Edge, ...] = ()) -> None:
        self.name = name
        self._edges = edges
        self.inboxes = {edge.name: Inbox(edge.chunks) for edge in edges if edge.chunks is not None}
        """By the edge's name."""
        self._place = walk._start(self.inboxes)

    @property
    def local_name(self) -> str:
        """The walk's name within its component: what stands behind the last dot."""
        return self.name.rpartition(".")[2]

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
        if self._edges:
            self._close_edges()
        return place.is_done

    def _close_edges(self) -> None:
        """Close the edges whose source has ended, which may end their consumers in turn."""
        place, is_closing = self._place, True
        while is_closing:
            place.settle()
            ended = [
                inbox
                for edge in self._edges
                if not (inbox := self.inboxes[edge.name]).is_closed
                and not place.expects(edge.source)
            ]
            for inbox in ended:
                inbox.close()
            is_closing = bool(ended)

    def chunk_for(self, node: str) -> object | None:
        """Return the next chunk for a node, which completing its visit takes; ``None``: none."""
        for edge in self._edges:
            if edge.target == node and self.inboxes[edge.name].has_chunk:
                return self.inboxes[edge.name].peek()
        return None


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
            for consumed in walk.edges():
                _require(consumed, "streaming edge", self._streaming, f"walk {name!r}")

    @property
    def _streaming(self) -> tuple[str, ...]:
        return tuple(edge.name for edge in self.edges if edge.chunks is not None)

    def cursor(self, name: str) -> Cursor:
        """Return a cursor at the start of the walk ``name``."""
        for walk_name, walk in self.walks:
            if walk_name == name:
                consumed = set(walk.edges())
                return Cursor(name, walk, tuple(e for e in self.edges if e.name in consumed))
        raise ConfigError(
            f"there is no walk {name!r}; walks are {', '.join(n for n, _ in self.walks)}"
        )


def _require(name: str, kind: str, known: tuple[str, ...], where: str) -> None:
    if name not in known:
        listed = ", ".join(known) or "none"
        raise ConfigError(f"{where} names {name!r}, which is no {kind}; there are {listed}")
