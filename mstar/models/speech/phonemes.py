"""Text to phonemes by espeak-ng, as the package piper-tts brings it along."""

import re
import threading
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

from mstar.errors import UnsupportedError
from mstar.models.onnx import require

_LOCK = threading.Lock()
"""espeak-ng has one language at a time in a process."""
_UNREADABLE = re.compile("[\0\ud800-\udfff]")


class Phonemizer:
    """Reads the text of one language.

    Args:
        language: espeak-ng's name for it, such as ``en-us``.

    Raises:
        UnsupportedError: If espeak-ng is not installed, or does not know the language.
    """

    def __init__(self, language: str) -> None:
        self.language = language
        self.sentences("a")

    def sentences(self, text: str) -> list[str]:
        """Return the phonemes of each sentence; what cannot be pronounced leaves none.

        They are code points in decomposed form, with blanks between words and the punctuation
        that shapes the tone.
        """
        espeak = _espeak()
        with _LOCK:
            try:
                found = espeak.phonemize(self.language, _UNREADABLE.sub(" ", text))
            except RuntimeError as error:
                raise UnsupportedError(
                    f"espeak-ng has no language {self.language!r}: {error}"
                ) from error
        return ["".join(sentence) for sentence in found if any(map(_is_spoken, sentence))]


@cache
def _espeak() -> Any:
    return require("piper.phonemize_espeak", "reading text aloud").EspeakPhonemizer()


def _is_spoken(phoneme: str) -> bool:
    return any(map(str.isalnum, phoneme))


def code_points(text: str) -> str:
    """Return the phonemes of a voice that is spelled: the text's own letters, decomposed."""
    return unicodedata.normalize("NFD", _UNREADABLE.sub(" ", text))


def cut(phonemes: Sequence[str], most: int) -> list[Sequence[str]]:
    """Return phonemes in pieces of at most ``most``, cut between words where that can be.

    A piece takes memory by the square of its length, and text need not have stops.
    """
    pieces = []
    start = 0
    while len(phonemes) - start > most:
        stop = start + most
        blank = next((at for at in range(stop, start - 1, -1) if phonemes[at] == " "), stop)
        pieces.append(phonemes[start:blank])
        start = blank + (phonemes[blank] == " ")
    return [piece for piece in (*pieces, phonemes[start:]) if piece]
