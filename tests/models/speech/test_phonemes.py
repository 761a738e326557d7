# ruff: noqa: RUF001 - these letters are phonemes
import pytest
from hypothesis import given, settings, strategies as st

from mstar.errors import UnsupportedError
from mstar.models.speech.phonemes import Phonemizer, code_points, cut


@pytest.fixture(scope="module")
def english() -> Phonemizer:
    pytest.importorskip("piper")
    return Phonemizer("en-us")


def test_each_sentence_has_its_phonemes(english: Phonemizer) -> None:
    first, second = english.sentences("Hello, world! It sleeps.")
    assert first == "həlˈoʊ, wˈɜːld!"
    assert second == "ɪt slˈiːps."


def test_an_unknown_language_is_refused_by_name() -> None:
    pytest.importorskip("piper")
    with pytest.raises(UnsupportedError, match="no language 'xx-nowhere'"):
        Phonemizer("xx-nowhere")


def test_languages_do_not_get_in_each_others_way(english: Phonemizer) -> None:
    german = Phonemizer("de")
    before = english.sentences("rate"), german.sentences("rate")
    assert before[0] != before[1]
    assert (english.sentences("rate"), german.sentences("rate")) == before


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec=None), max_size=60))
def test_no_text_breaks_the_reader(text: str) -> None:
    pytest.importorskip("piper")
    for sentence in Phonemizer("en-us").sentences(text):
        assert any(map(str.isalnum, sentence))


def test_letters_are_decomposed_for_voices_that_spell() -> None:
    assert code_points("é\0") == "e\u0301 "


@given(st.text("ab ", max_size=60), st.integers(1, 12))
def test_pieces_are_short_and_lose_only_the_blanks_they_are_cut_at(text: str, most: int) -> None:
    pieces = ["".join(piece) for piece in cut(text, most)]
    assert all(1 <= len(piece) <= most for piece in pieces)
    assert "".join(pieces).replace(" ", "") == text.replace(" ", "")
    if all(len(word) <= most for word in text.split(" ")):
        assert [w for piece in pieces for w in piece.split(" ") if w] == text.split()


def test_a_cut_prefers_the_last_blank_and_needs_none() -> None:
    assert ["".join(piece) for piece in cut("one two three", 8)] == ["one two", "three"]
    assert ["".join(piece) for piece in cut("abcdefgh", 3)] == ["abc", "def", "gh"]
    assert cut("", 3) == []
