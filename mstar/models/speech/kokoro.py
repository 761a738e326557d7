"""Kokoro: a voice of 82 million parameters as an ONNX graph, with a style for each speaker.

Text is read as American English, by espeak-ng's phonemes, which are close to those of its training.
Its other languages need dictionaries of their own, above all Japanese: there, phonemes are given in
place of text. A speaker of one language speaks all of them, with an accent.
"""

import json
import zipfile
from pathlib import Path

import numpy as np

from mstar.errors import WeightsError
from mstar.models.onnx import Feeds, Fetched, OnnxSession
from mstar.models.speech.phonemes import Phonemizer, cut
from mstar.models.speech.voice import Delivery, Samples, Voice
from mstar.models.speech.voice_files import KOKORO_FILES

LANGUAGE = "en-us"
"""What text is read as, by espeak-ng's name."""

_RATE = 24_000
_STYLE = 256
_EDGE = 0
"""Id that stands before and behind the phonemes."""


class KokoroVoice(Voice):
    """Kokoro with the speakers of its folder. Its graph draws no noise.

    Args:
        folder: Has the three files of ``KOKORO_FILES``.
        threads: Threads of one run; ``None``: as many as torch takes.

    Raises:
        WeightsError: If a file is missing or is none of Kokoro's.
        UnsupportedError: If ONNX Runtime or espeak-ng is missing.
    """

    def __init__(self, folder: Path, *, threads: int | None = None) -> None:
        graph, vocabulary, styles = (folder / name for name in KOKORO_FILES)
        self._ids = _read_vocabulary(vocabulary)
        self._styles = _read_styles(styles)
        self.session = OnnxSession(graph, threads=threads, name="kokoro", side_by_side=True)
        wanted = {"tokens", "style", "speed"}
        found = {port.name for port in self.session.inputs}
        if found != wanted:
            raise WeightsError(f"{graph}: Kokoro takes {wanted}, this takes {found}")
        self.rate = _RATE
        self.speakers = tuple(self._styles)
        self.language = LANGUAGE
        self._phonemizer = Phonemizer(LANGUAGE)

    def feeds(self, text: str, delivery: Delivery) -> list[Feeds]:
        """Return a run for each sentence; see :meth:`Voice.feeds`."""
        style = self._styles[self.speaker(delivery)]
        speed = np.array([delivery.speed], np.float32)
        sentences = [text] if delivery.is_phonemes else self._phonemizer.sentences(text)
        runs: list[Feeds] = []
        for sentence in sentences:
            known = [phoneme for phoneme in sentence if phoneme in self._ids]
            # A row of the style is for so many phonemes, and there are no more rows than that.
            for piece in cut(known, len(style)):
                if any(map(str.isalnum, piece)):
                    ids = [_EDGE, *(self._ids[phoneme] for phoneme in piece), _EDGE]
                    row = style[len(piece) - 1]
                    runs.append({"tokens": np.array([ids]), "style": row, "speed": speed})
        return runs

    def samples(self, fetched: Fetched) -> Samples:
        """Return a run's sound."""
        return np.clip(fetched["audio"].ravel(), -1.0, 1.0)


def _read_vocabulary(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_bytes())["vocab"]
        return {str(phoneme): int(n) for phoneme, n in found.items()}
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: no vocabulary of Kokoro: {error!r:.200}") from error


def _read_styles(path: Path) -> dict[str, Samples]:
    """Return each speaker's style for every number of phonemes from 1 on, ``[most, 1, 256]``."""
    try:
        with np.load(path) as file:
            found = {str(name): np.asarray(file[name], np.float32) for name in file.files}
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    except (ValueError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{path}: no styles of Kokoro: {error}") from error
    for name, style in found.items():
        if style.ndim != 3 or style.shape[1:] != (1, _STYLE):
            raise WeightsError(
                f"{path}: the style of {name!r} has the shape {style.shape}, not [n, 1, {_STYLE}]"
            )
    if not found:
        raise WeightsError(f"{path}: has no speakers")
    return found
