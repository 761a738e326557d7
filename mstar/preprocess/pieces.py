"""What bytes each token stands for, read from how the tokenizer joins tokens into text."""

import json
import re
from enum import Enum
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Joining(Enum):
    """How a tokenizer's decoder makes text of tokens."""

    BYTE_LEVEL = "byte_level"
    """Every token is bytes; text is all of them together, broken characters replaced."""
    BYTE_FALLBACK = "byte_fallback"
    """Tokens are text; a run of byte tokens is text if all of it is valid, else replaced."""
    OTHER = "other"
    """Anything else: only the tokenizer itself knows."""


class Pieces:
    """The bytes behind token ids.

    Args:
        backend: The tokenizer.
    """

    joining: Joining
    num_stripped: int = 0
    """Leading spaces that decoding takes from the beginning of a text, at most."""
    special_ids: frozenset[int]
    """Ids of control tokens, which are not part of the text."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._known: dict[int, tuple[bytes, bool]] = {}
        self.special_ids = frozenset(
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        )
        self.joining, self._replacement, self.num_stripped = _classify(backend)
        self._bytes_of = {char: byte for byte, char in _byte_alphabet().items()}

    def __getitem__(self, token: int) -> tuple[bytes, bool]:
        """Return a token's bytes, and whether it is a lone byte that others may complete.

        An id that the tokenizer does not know has no bytes.
        """
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._find(token)
        return found

    def _find(self, token: int) -> tuple[bytes, bool]:
        text = self._backend.id_to_token(token)
        if text is None:
            return b"", False
        if self.joining is Joining.BYTE_LEVEL:
            try:
                return bytes(self._bytes_of[char] for char in text), False
            except KeyError:
                # Added tokens may use any character; they stand for themselves.
                return text.encode(), False
        if self.joining is Joining.BYTE_FALLBACK:
            if _BYTE_TOKEN.fullmatch(text):
                return bytes((int(text[3:5], 16),)), True
            return text.replace(self._replacement, " ").encode(), False
        return self._backend.decode([token], skip_special_tokens=False).encode(), False


def _classify(backend: Tokenizer) -> tuple[Joining, str, int]:
    """Return the way of joining, the character written for a space, and the spaces stripped."""
    if backend.decoder is None:
        return Joining.OTHER, "", 0
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Joining.BYTE_LEVEL, "", 0
    num_stripped = 0
    if kinds[-1] == "Strip" and steps[-1]["content"] == " " and not steps[-1]["stop"]:
        num_stripped = int(steps[-1]["start"])
        kinds.pop()
    if kinds == ["Replace", "ByteFallback", "Fuse"]:
        pattern, content = steps[0]["pattern"], steps[0]["content"]
        if "String" in pattern and content == " ":
            return Joining.BYTE_FALLBACK, str(pattern["String"]), num_stripped
    return Joining.OTHER, "", 0


def _byte_alphabet() -> dict[int, str]:
    """Return the printable character that byte-level vocabularies write for each byte.

    Source:
        GPT-2's ``bytes_to_unicode``: printable Latin-1 stands for itself, the others follow from
        U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + index) for index, byte in enumerate(others)
    }
