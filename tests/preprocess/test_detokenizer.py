from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from mstar.preprocess.detokenizer import Detokenizer
from mstar.preprocess.tokenizer import TextTokenizer

NAMES = ["byte_level", "byte_fallback", "byte_fallback_strip", "word_piece"]
TEXT = st.text(st.sampled_from("abc de\n<é🙂中👩‍🚀"), max_size=30)
FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def _stream(detokenizer: Detokenizer, ids: Sequence[int], cuts: Sequence[int] = (1,)) -> list[str]:
    """Push the ids in pieces of these lengths, over and over; returns what came out each time."""
    found, start, turn = [], 0, 0
    while start < len(ids):
        size = cuts[turn % len(cuts)]
        found.append(detokenizer.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return [*found, detokenizer.finish()]


@pytest.mark.parametrize("name", NAMES)
@FIXTURES
@given(text=TEXT, cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_pieces_of_a_text_are_its_decoding(
    tokenizers: dict[str, TextTokenizer], name: str, text: str, cuts: list[int]
) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = _stream(Detokenizer(tokenizer), ids, cuts)
    assert "".join(found) == tokenizer.decode(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in found)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", NAMES)
@FIXTURES
@given(data=st.data(), cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_pieces_of_any_ids_are_their_decoding(
    tokenizers: dict[str, TextTokenizer],
    name: str,
    skip: bool,
    data: st.DataObject,
    cuts: list[int],
) -> None:
    tokenizer = tokenizers[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24))
    # A whole character at the end, since half a one is told differently.
    ids += tokenizer.encode("a", add_special_tokens=False)
    found = _stream(Detokenizer(tokenizer, skip_special_tokens=skip), ids, cuts)
    assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_half_a_character_at_the_end_is_one_replacement(
    tokenizers: dict[str, TextTokenizer], name: str, cut: int
) -> None:
    tokenizer = tokenizers[name]
    singles = {tokenizer.token_bytes(n): n for n in range(tokenizer.vocab_size)}
    ids = [singles[bytes((byte,))] for byte in "🙂🙂".encode()[:-cut]]
    found = _stream(Detokenizer(tokenizer), ids)
    assert "".join(found) == "🙂\N{REPLACEMENT CHARACTER}"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(found[:-1])


def test_text_leaves_as_soon_as_it_is_whole(tokenizers: dict[str, TextTokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("a🙂b")
    found = _stream(Detokenizer(tokenizer, stop=["xyz"]), ids)
    assert found == ["a", "", "", "🙂", "b", ""]


def test_leading_space_is_kept_where_text_goes_on(tokenizers: dict[str, TextTokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback_strip"]
    ids = tokenizer.encode("  ab", add_special_tokens=False)
    assert "".join(_stream(Detokenizer(tokenizer), ids)) == " ab"
    assert "".join(_stream(Detokenizer(tokenizer, after_text=True), ids)) == "  ab"


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Cut before the stop string that is complete first, the longest of those."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("name", NAMES)
@FIXTURES
@given(
    text=TEXT,
    stops=st.lists(st.text(st.sampled_from("abc \né🙂"), min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_stop_strings_cut_the_text_and_never_leak(
    tokenizers: dict[str, TextTokenizer],
    name: str,
    text: str,
    stops: list[str],
    cuts: list[int],
) -> None:
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    expected, stop = _cut(whole, stops)
    detokenizer = Detokenizer(tokenizer, stops)
    found = _stream(detokenizer, ids, cuts)
    assert "".join(found) == expected
    assert detokenizer.stop_string == stop
    assert detokenizer.stopped is (stop is not None)
    kept = "".join(_stream(Detokenizer(tokenizer, stops, include_stop=True), ids, cuts))
    assert kept == expected + (stop or "")


@FIXTURES
@given(
    text=TEXT,
    stops=st.lists(st.text(st.sampled_from("abc é🙂"), min_size=1, max_size=4), max_size=4),
)
def test_text_is_held_exactly_while_it_may_begin_a_stop_string(
    tokenizers: dict[str, TextTokenizer], text: str, stops: list[str]
) -> None:
    tokenizer = tokenizers["byte_level"]
    detokenizer = Detokenizer(tokenizer, stops)
    seen: list[int] = []
    out = ""
    for token in tokenizer.encode(text, add_special_tokens=False):
        seen.append(token)
        out += detokenizer.push([token])
        if detokenizer.stopped:
            break
        data = b"".join(tokenizer.token_bytes(token) for token in seen)
        known = data.decode(errors="ignore")
        starts = {stop[:n] for stop in stops for n in range(1, len(stop))}
        num_held = max((len(start) for start in starts if known.endswith(start)), default=0)
        assert out == known[: len(known) - num_held]


def test_stop_string_across_tokens_is_found(tokenizers: dict[str, TextTokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    detokenizer = Detokenizer(tokenizer, ["🙂中"])
    assert _stream(detokenizer, tokenizer.encode("c🙂🙂中d"))[:2] == ["c", ""]
    assert detokenizer.stop_string == "🙂中"
    assert detokenizer.push(tokenizer.encode("more")) == ""
    assert detokenizer.finish() == ""


def test_held_text_comes_out_at_the_end(tokenizers: dict[str, TextTokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    detokenizer = Detokenizer(tokenizer, ["abc"])
    assert _stream(detokenizer, tokenizer.encode("dab")) == ["d", "", "ab"]
    assert not detokenizer.stopped


def test_first_complete_stop_string_wins_however_the_tokens_fall(
    tokenizers: dict[str, TextTokenizer],
) -> None:
    tokenizer = tokenizers["byte_level"]
    for cuts in ([1], [2], [9]):
        detokenizer = Detokenizer(tokenizer, ["abcde", "c", "bc"])
        assert "".join(_stream(detokenizer, tokenizer.encode("abcde"), cuts)) == "a"
        assert detokenizer.stop_string == "bc"


@settings(FIXTURES, max_examples=200)
@given(ids=st.lists(st.integers(0, 49_151), max_size=40))
def test_smollm2_streams_as_it_decodes(smollm2: TextTokenizer, ids: list[int]) -> None:
    ids = [*ids, 42]
    assert "".join(_stream(Detokenizer(smollm2), ids)) == smollm2.decode(ids)


@pytest.mark.slow
@settings(FIXTURES, max_examples=300)
@given(
    ids=st.lists(
        st.one_of(st.integers(0, 262_143), st.integers(230, 500), st.integers(260, 262)),
        max_size=40,
    )
)
def test_gemma3_streams_as_it_decodes(gemma3: TextTokenizer, ids: list[int]) -> None:
    ids = [*ids, *gemma3.encode("a", add_special_tokens=False)]
    assert "".join(_stream(Detokenizer(gemma3), ids)) == gemma3.decode(ids)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("stop_after", "expected"), [(0, ""), (1, "ab"), (2, "ab"), (3, "abab"), (9, "abab")]
)
def test_no_stop_string_is_looked_for_in_the_first_ids(
    tokenizers: dict[str, TextTokenizer], size: int, stop_after: int, expected: str
) -> None:
    """One that begins before the border and ends behind it does not end the text."""
    tokenizer = tokenizers["byte_level"]
    singles = {tokenizer.token_bytes(n): n for n in range(tokenizer.vocab_size)}
    ids = [singles[letter.encode()] for letter in "abab"]
    detokenizer = Detokenizer(tokenizer, ["ab"], stop_after=stop_after)
    assert "".join(_stream(detokenizer, ids, [size])) == expected
    assert detokenizer.stopped == (stop_after < 3)
