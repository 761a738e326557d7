import pytest
from tokenizers import pre_tokenizers

from mstar.preprocess.pieces import Joining, Pieces, _byte_alphabet
from mstar.preprocess.tokenizer import TextTokenizer


@pytest.mark.parametrize(
    ("name", "joining", "num_stripped"),
    [
        ("byte_level", Joining.BYTE_LEVEL, 0),
        ("byte_fallback", Joining.BYTE_FALLBACK, 0),
        ("byte_fallback_strip", Joining.BYTE_FALLBACK, 1),
        ("word_piece", Joining.OTHER, 0),
    ],
)
def test_way_of_joining_is_recognised(
    tokenizers: dict[str, TextTokenizer], name: str, joining: Joining, num_stripped: int
) -> None:
    pieces = tokenizers[name].pieces
    assert (pieces.joining, pieces.num_stripped) == (joining, num_stripped)


def test_alphabet_is_that_of_the_tokenizers_package() -> None:
    alphabet = _byte_alphabet()
    assert sorted(alphabet.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert (alphabet[ord(" ")], alphabet[ord("\n")], alphabet[ord("A")]) == ("Ġ", "Ċ", "A")


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_bytes_of_all_tokens_together_are_the_text(
    tokenizers: dict[str, TextTokenizer], name: str
) -> None:
    tokenizer = tokenizers[name]
    text = "ab é🙂 中é <think>\n\nbc"
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == text
    assert any(tokenizer.token_text(token) == "\N{REPLACEMENT CHARACTER}" for token in ids)


def test_unknown_ids_have_no_bytes(tokenizers: dict[str, TextTokenizer]) -> None:
    pieces: Pieces = tokenizers["byte_level"].pieces
    assert pieces[10_000] == (b"", False)
