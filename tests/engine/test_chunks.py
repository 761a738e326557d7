# ruff: noqa: RUF001 - stops and quotes of other scripts look like those of ASCII.
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from mstar.engine.chunks import ChunkPolicy, Inbox, Sentences, Sized
from mstar.errors import ConfigError


def chunks(policy: ChunkPolicy, *pieces: Any) -> list[Any]:
    """Every chunk of a stream, from first to last."""
    chunker = policy.start()
    return [*(chunk for piece in pieces for chunk in chunker.push(piece)), *chunker.flush()]


def sentences(text: str, max_chars: int = 240) -> list[str]:
    return chunks(Sentences(min_chars=1, max_chars=max_chars), text)


# Sizes


def test_sizes_cut_as_soon_as_a_chunk_is_whole() -> None:
    chunker = Sized(3).start()
    assert chunker.push([1, 2]) == []
    assert chunker.push([]) == []
    assert chunker.push([3, 4, 5, 6, 7]) == [[1, 2, 3], [4, 5, 6]]
    assert chunker.flush() == [[7]]
    assert chunker.flush() == []


def test_first_chunk_may_be_smaller_and_is_so_again_in_the_next_stream() -> None:
    chunker = Sized(4, first=1).start()
    assert chunker.push([1, 2, 3, 4, 5, 6]) == [[1], [2, 3, 4, 5]]
    assert chunker.flush() == [[6]]
    assert chunker.push([7]) == [[7]]


def test_arrays_are_cut_along_their_first_axis() -> None:
    rows = np.arange(14, dtype=np.float32).reshape(7, 2)
    cut = chunks(Sized(3), rows[:2], rows[2:2], rows[2:])
    assert [len(chunk) for chunk in cut] == [3, 3, 1]
    assert np.array_equal(np.concatenate(cut), rows)
    assert all(chunk.dtype == np.float32 for chunk in cut)


def test_text_can_be_cut_by_size_too() -> None:
    assert chunks(Sized(4), "ab", "cdefg") == ["abcd", "efg"]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(), max_size=9), max_size=9),
    st.integers(1, 7),
    st.integers(1, 7),
)
def test_sized_chunks_are_the_stream_whatever_its_pieces(
    pieces: list[list[int]], size: int, first: int
) -> None:
    policy = Sized(size, min(first, size))
    whole = [value for piece in pieces for value in piece]
    cut = chunks(policy, *pieces)
    assert [value for chunk in cut for value in chunk] == whole
    assert cut == chunks(policy, whole)
    lengths = [len(chunk) for chunk in cut]
    wanted = [min(first, size)] + [size] * len(lengths)
    assert lengths[:-1] == wanted[: len(lengths) - 1]
    assert all(0 < got <= most for got, most in zip(lengths, wanted, strict=False))


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: Sized(0), "`size` is 0; it must be at least 1"),
        (lambda: Sized(4, first=0), "size is 0; it must be from 1 to 4"),
        (lambda: Sized(4, first=5), "size is 5; it must be from 1 to 4"),
        (lambda: Sentences(min_chars=0), "sentences of 0 to 240"),
        (lambda: Sentences(min_chars=9, max_chars=8), "sentences of 9 to 8"),
    ],
)
def test_sizes_that_cannot_be_are_refused(declare: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declare()


# Sentences


@pytest.mark.parametrize(
    "expected",
    [
        ["One is here. ", "Two is there! ", "Is three? ", "Yes."],
        ["It is 3.5 m high. ", "Version 1.2.3 is out. ", "Pi is 3.14."],
        ["Dr. Smith met Mrs. Jones. ", "They talked, e.g. about Prof. Lee."],
        ["J. R. R. Tolkien wrote it. ", "George W. Bush did not."],
        ["He lives in the U.S. Senate. ", "It ends at 5 p.m. ", "Then he goes."],
        ["See No. 5 and fig. 3. ", "I said no. ", "Never."],
        ["Wait... ", "What? ", "Well... maybe not… or so. ", "So."],
        ["What?! ", "No!! ", "Never."],
        ["See https://a.example/x?y=1. ", "Or mail to a.b@c.example. ", "Done."],
        ['"Stop!" he said. ', '"Go." ', "(Really.) ", "“Now.” ", "Then."],
        ["**Bold.** ", "_So._ ", "Then."],
        ["« Bonjour. » ", "Il dit. ", "Quoi ? ", "Rien."],
        ["„Hallo.“ ", "Danach z. B. Hans. ", "»Ja.« ", "»Nein.«"],
        ["你好。", "「真的吗？」", "他说！", "好……的"],
        ["آیا؟ ", "نعم۔ ", "لا"],
        ["He has 5. ", "She has 1,000,000. ", "They have $2.50."],
        ["A line\n", "1. First one.\n", "2. Second one.\n", "\nA paragraph"],
        ["one. two is lower case, as after etc. and the like. ", "Three."],
    ],
)
def test_sentences_end_where_a_reader_ends_them(expected: list[str]) -> None:
    assert sentences("".join(expected)) == expected


def test_a_stop_waits_for_what_stands_behind_it() -> None:
    chunker = Sentences(min_chars=1).start()
    assert chunker.push("It is 3.") == []
    assert chunker.push("5 m high.") == []
    assert chunker.push(" ") == []
    assert chunker.push("S") == ["It is 3.5 m high. "]
    assert chunker.push('he said "no.') == []
    assert chunker.push('" ') == []
    assert chunker.push("Then\n") == ['She said "no." ', "Then\n"]


def test_first_sentence_comes_at_once_and_short_ones_later_wait_for_more() -> None:
    text = "Hi. Yes. No. This one is long enough by itself. Ok. "
    assert chunks(Sentences(min_chars=10), text) == [
        "Hi. ",
        "Yes. No. This one is long enough by itself. ",
        "Ok. ",
    ]


def test_what_nobody_can_say_is_no_sentence() -> None:
    assert sentences("\n\n... --- \n* So it is. And") == ["\n\n... --- \n* So it is. ", "And"]


def test_long_runs_are_cut_at_the_best_place_below_the_limit() -> None:
    assert sentences("one two; three four, five six seven", 30) == [
        "one two; ",
        "three four, five six seven",
    ]
    assert sentences("one two, three four five six", 20) == ["one two, ", "three four five six"]
    assert sentences("one two three four five", 12) == ["one two ", "three four ", "five"]
    assert sentences("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]
    assert sentences("by 1,000 and Dr. Who and so on", 20) == ["by 1,000 and Dr. ", "Who and so on"]
    assert sentences("今天天气很好，我们去公园", 10) == ["今天天气很好，", "我们去公园"]


def test_the_first_chunk_may_end_at_a_clause_that_is_long_enough() -> None:
    policy = Sentences(4, 80, 12)
    text = "A volcano, as we know, is a mountain, with fire. It may sleep, or not, for long. "
    assert chunks(policy, text) == [
        "A volcano, as we know, ",
        "is a mountain, with fire. ",
        "It may sleep, or not, for long. ",
    ]
    assert chunks(policy, "It has 1,000,000 tons, or so. ") == [
        "It has 1,000,000 tons, ",
        "or so. ",
    ]
    for first in (3, 81):
        with pytest.raises(ConfigError, match=f"`first_chars` is {first}; .* 4 to 80"):
            Sentences(4, 80, first)


TEXTS = st.text(
    st.one_of(
        st.sampled_from(".!?…,;: \n\"')»«”。！」1aAbDr"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=120,
)


@settings(deadline=None)
@example("0\n", [], 1, 0, None)
@given(
    TEXTS,
    st.lists(st.integers(0, 120), max_size=8),
    st.integers(1, 12),
    st.integers(0, 30),
    st.none() | st.integers(0, 30),
)
def test_sentences_are_the_text_whatever_its_pieces(
    text: str, places: list[int], min_chars: int, more: int, first: int | None
) -> None:
    first_chars = None if first is None else min_chars + min(first, more)
    policy = Sentences(min_chars, min_chars + more, first_chars)
    ends = sorted(places)
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    cut = chunks(policy, *pieces)
    assert "".join(cut) == text
    assert cut == chunks(policy, text)
    assert cut == chunks(policy, *text)
    assert all(0 < len(chunk) <= policy.max_chars for chunk in cut)


# Inboxes


def test_inbox_hands_out_chunks_until_its_stream_is_over() -> None:
    inbox = Inbox(Sized(2))
    assert not inbox.has_chunk
    inbox.put([1, 2, 3, 4, 5])
    assert inbox.has_chunk
    assert inbox.peek() == [1, 2]
    assert inbox.pop() == [1, 2]
    assert inbox.pop() == [3, 4]
    assert not inbox.has_chunk
    assert not inbox.is_over
    inbox.close()
    inbox.close()
    assert not inbox.is_over
    assert inbox.pop() == [5]
    assert inbox.is_over


def test_inbox_without_a_piece_is_over_when_closed() -> None:
    inbox = Inbox(Sentences())
    inbox.close()
    assert inbox.is_over
    with pytest.raises(AssertionError, match="behind the end"):
        inbox.put("late")
