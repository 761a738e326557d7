"""Streaming edges: how what a node yields piece by piece is cut into chunks for the next node.

A policy is a value that an edge carries; a chunker is one request's use of it::

    chunker = Sentences().start()
    chunker.push("It is 3.5 m")  # []
    chunker.push(" high. Now")  # ["It is 3.5 m high. "]
    chunker.flush()  # ["Now"]

Chunks depend on the content alone, never on where one piece ended and the next began, and
together they are the content.
"""
# ruff: noqa: RUF001 - stops and quotes of other scripts look like those of ASCII.

import re
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from mstar.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    Piece = str | list[Any] | npt.NDArray[Any]
    """Text, a list, or an array whose first axis is time; all pieces of an edge are alike."""


class Chunker(ABC):
    """Cuts one request's stream."""

    @abstractmethod
    def push(self, piece: "Piece") -> "list[Piece]":
        """Take the next piece, which may be empty; returns the chunks that are whole now."""

    @abstractmethod
    def flush(self) -> "list[Piece]":
        """Return what is left, at the end of the stream; the chunker is as new then."""


@dataclass(frozen=True)
class ChunkPolicy(ABC):
    """How a streaming edge is cut."""

    @abstractmethod
    def start(self) -> Chunker:
        """Return a chunker for one request's stream."""


@dataclass(frozen=True)
class Sized(ChunkPolicy):
    """Chunks of a number of elements: ids of a list, rows of an array, characters of a text.

    Raises:
        ConfigError: If a size is below 1, or the first chunk's above the others'.
    """

    size: int
    """Elements of a chunk; the last one may have fewer."""
    first: int | None = None
    """Elements of the first chunk, fewer than ``size`` so that output begins early."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"a chunk's `size` is {self.size}; it must be at least 1")
        if self.first is not None and not 1 <= self.first <= self.size:
            raise ConfigError(
                f"the `first` chunk's size is {self.first}; it must be from 1 to {self.size}, the "
                "`size` of the others"
            )

    def __str__(self) -> str:
        return f"{self.size}" if self.first is None else f"{self.first}, then {self.size}"

    def start(self) -> Chunker:
        """Return a chunker for one request's stream."""
        return _SizedChunker(self)


class _SizedChunker(Chunker):
    def __init__(self, policy: Sized) -> None:
        self._size, self._first = policy.size, policy.first or policy.size
        self._wanted = self._first
        self._held: Piece | None = None

    def push(self, piece: "Piece") -> "list[Piece]":
        held = piece if self._held is None else _joined(self._held, piece)
        chunks: list[Piece] = []
        start = 0
        while len(held) - start >= self._wanted:
            chunks.append(held[start : start + self._wanted])
            start += self._wanted
            self._wanted = self._size
        self._held = held[start:] if start < len(held) else None
        return chunks

    def flush(self) -> "list[Piece]":
        rest = self._held
        self._held, self._wanted = None, self._first
        return [] if rest is None else [rest]


def _joined(held: "Piece", piece: "Piece") -> "Piece":
    if isinstance(held, str):
        assert isinstance(piece, str), f"a {type(piece).__name__} behind text"
        return held + piece
    if isinstance(held, list):
        assert isinstance(piece, list), f"a {type(piece).__name__} behind a list"
        return held + piece
    import numpy as np  # noqa: PLC0415 - a graph must load without it

    return np.concatenate((held, cast("npt.NDArray[Any]", piece)))


@dataclass(frozen=True)
class Sentences(ChunkPolicy):
    """Chunks of whole sentences, for speech.

    A sentence ends at its stop, with the quotes and brackets that close behind it and the blanks
    up to the next one; a line ends a sentence too. Stops in numbers, names and addresses, and
    behind abbreviations and initials, end none. What could still go on is kept until the
    characters behind it have come.

    Raises:
        ConfigError: If ``min_chars`` is below 1 or above ``max_chars``, or ``first_chars`` is not
            between them.
    """

    min_chars: int = 24
    """A shorter sentence waits for the next, but for the first one, which begins the output."""
    max_chars: int = 240
    """Longer runs are cut at the last semicolon, else comma, else blank that they have."""
    first_chars: int | None = None
    """The first chunk may end at a comma, semicolon or colon too, once it is so long: output begins
    early. ``None``: it may not."""

    def __post_init__(self) -> None:
        first = self.min_chars if self.first_chars is None else self.first_chars
        if not 1 <= self.min_chars <= self.max_chars:
            raise ConfigError(
                f"sentences of {self.min_chars} to {self.max_chars} characters; `min_chars` must "
                "be at least 1 and at most `max_chars`"
            )
        if not self.min_chars <= first <= self.max_chars:
            raise ConfigError(
                f"`first_chars` is {first}; it must be from {self.min_chars} to {self.max_chars}, "
                "`min_chars` and `max_chars`"
            )

    def __str__(self) -> str:
        return "sentences"

    def start(self) -> Chunker:
        """Return a chunker for one request's stream."""
        return _SentenceChunker(self)


class _SentenceChunker(Chunker):
    def __init__(self, policy: Sentences) -> None:
        self._min, self._max = policy.min_chars, policy.max_chars
        self._least_first = policy.first_chars
        self._text = ""
        self._is_first = True

    def push(self, piece: "Piece") -> "list[Piece]":
        assert isinstance(piece, str), f"sentences of a {type(piece).__name__}"
        chunks: list[Piece] = []
        # One character after the other: where a piece ended must not matter.
        waiting = list(reversed(piece))
        while waiting:
            self._text += waiting.pop()
            cut = self._cut()
            if cut is not None:
                chunks.append(self._text[:cut])
                waiting += reversed(self._text[cut:])
                self._text = ""
                self._is_first = False
        return chunks

    def flush(self) -> "list[Piece]":
        rest = self._text
        self._text, self._is_first = "", True
        return [rest] if rest else []

    def _cut(self) -> int | None:
        """Return where the text is to be cut, now that its last character is known."""
        end = _sentence_end(self._text)
        if end is not None and end <= self._max and self._is_enough(self._text[:end]):
            return end
        if self._is_first and self._least_first is not None and _is_clause(self._text[:-1]):
            # Its last character begins the next clause.
            end = len(self._text) - 1
            if self._least_first <= end <= self._max and not self._text[-1].isspace():
                return end
        if len(self._text) > self._max:
            return _cut_below(self._text[: self._max], self._min)
        return None

    def _is_enough(self, sentence: str) -> bool:
        if not any(map(str.isalnum, sentence)):
            return False
        return self._is_first or len(sentence.strip()) >= self._min


# Where sentences end

# Stops of scripts without blanks between sentences; nothing need follow them.
_WIDE = "。！？｡"
_STOPS = ".!?…؟۔।‽" + _WIDE
# What may stand between a stop and the end of its sentence, emphasis of Markdown included.
_CLOSERS = "\"'”’“»«›)]}*_`」』）】》〉"
# French sets a blank before its quotes, a narrow one or one that breaks no line.
_BLANKS = " \u00a0\u202f"
# They stand before names and in the middle of sentences; a stop behind them ends nothing.
_ABBREVIATIONS = frozenset(
    re.findall(
        r"\w+",
        "mr mrs ms mx dr prof st sr sra jr gen col sgt capt lt rev hon pres gov sen rep mt messrs "
        "mme mlle hr fr vs viz cf ca approx esp bzw resp evtl ggf sog",
    )
)
# Before a number only: "No. 5", but not "He said no. Then".
_BEFORE_NUMBERS = frozenset(
    re.findall(
        r"\w+",
        "no nos nr fig figs eq eqs sec ch vol pp art op tab bd "
        "jan feb mar apr jun jul aug sep sept oct nov dec",
    )
)
# Dotted, and yet often the last word of a sentence.
_AT_ENDS = frozenset(("a.m", "p.m"))
_DOTTED = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
# The word before a stop, with the dots that it has inside.
_LAST_WORD = re.compile(r"[\w.]*\Z")
# Where a run that is too long may be cut, best first.
_CUTS = (
    re.compile(rf"(?P<stop>[.;:!?…]+)[{re.escape(_CLOSERS)}]*\s+|[；：…]"),
    re.compile(r",\s+|[，、]"),
    re.compile(r"\s+"),
)


def _sentence_end(text: str) -> int | None:
    """Return where a sentence ends if the last character shows that one is over."""
    last = text[-1]
    if last == "\n":
        return len(text)
    if last.isspace() or len(text) == 1:
        return None
    body = text[:-1].rstrip()
    has_gap = len(body) < len(text) - 1
    bare = body.rstrip(_CLOSERS + _BLANKS)
    words = bare.rstrip(_STOPS)
    stop = bare[len(words) :]
    if not stop or last in _STOPS:
        return None
    if stop[-1] in _WIDE:
        return None if last in _CLOSERS and not has_gap else len(text) - 1
    if not has_gap or (last == "»" and text.count("«") >= text.count("»")):
        # In the second case the quote closes, behind a blank.
        return None
    is_over = _is_over(words, stop, is_closed=len(bare) < len(body), following=last)
    return len(text) - 1 if is_over else None


def _is_clause(text: str) -> bool:
    """Tell whether a clause ends here, with the blank behind it."""
    bare = text.rstrip()
    return len(bare) < len(text) and bare.endswith((",", ";", ":"))


def _is_over(words: str, stop: str, *, is_closed: bool, following: str) -> bool:
    """Tell whether a stop with a blank behind it ends its sentence.

    Args:
        words: What stands before the stop.
        stop: One or more stops in a row.
        is_closed: Quotes or brackets close behind it.
        following: First character of the next word.
    """
    is_plain = set(stop) <= set(".…")
    if following.islower() and (is_plain or is_closed):
        return False
    return stop != "." or not _is_abbreviated(words, following)


def _is_abbreviated(words: str, following: str) -> bool:
    line = words.rpartition("\n")[2].strip()
    if line.isdigit():
        # The number of a point in a list.
        return True
    found = _LAST_WORD.search(words)
    word = found.group().lower() if found else ""
    if word in _BEFORE_NUMBERS:
        return following.isdigit()
    if word in _AT_ENDS:
        return False
    return word in _ABBREVIATIONS or _DOTTED.fullmatch(word) is not None


def _cut_below(head: str, least: int) -> int:
    """Return where a run without an end is cut, in characters of ``head``."""
    for pattern in _CUTS:
        ends = [found.end() for found in pattern.finditer(head) if _may_cut(head, found)]
        if ends and ends[-1] >= least:
            return ends[-1]
    return len(head)


def _may_cut(head: str, found: re.Match[str]) -> bool:
    stop = found.groupdict().get("stop")
    if stop is None or stop != ".":
        return True
    return not _is_abbreviated(head[: found.start("stop")], head[found.end() : found.end() + 1])


class Inbox:
    """One request's side of a streaming edge: what waits for the consumer.

    Args:
        policy: How the stream is cut.
    """

    __slots__ = ("_chunker", "_chunks", "_is_closed")

    def __init__(self, policy: ChunkPolicy) -> None:
        self._chunker = policy.start()
        self._chunks: deque[Piece] = deque()
        self._is_closed = False

    @property
    def has_chunk(self) -> bool:
        """Whether the consumer can be run."""
        return bool(self._chunks)

    @property
    def is_closed(self) -> bool:
        """Whether nothing will come any more."""
        return self._is_closed

    @property
    def is_over(self) -> bool:
        """Whether nothing waits and nothing will come."""
        return self._is_closed and not self._chunks

    def put(self, piece: "Piece") -> None:
        """Take a piece from the producer."""
        assert not self._is_closed, "a piece came behind the end of its stream"
        self._chunks.extend(self._chunker.push(piece))

    def close(self) -> None:
        """Note that the producer is done; what is left becomes the last chunk."""
        if not self._is_closed:
            self._is_closed = True
            self._chunks.extend(self._chunker.flush())

    def peek(self) -> "Piece":
        """Return the chunk that is next, which stays."""
        return self._chunks[0]

    def pop(self) -> "Piece":
        """Return the chunk that is next, and take it out."""
        return self._chunks.popleft()
