"""Piper: VITS voices as ONNX graphs, from phonemes to sound in one run a sentence."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mstar.errors import UnsupportedError, WeightsError
from mstar.models.onnx import Feeds, Fetched, OnnxSession
from mstar.models.speech.onnx_noise import with_noise_inputs
from mstar.models.speech.phonemes import Phonemizer, code_points, cut
from mstar.models.speech.voice import Delivery, Samples, Voice
from mstar.models.speech.voice_files import piper_file

_MAX_PHONEMES = 400
"""Of one run: about half a minute of speech."""
_PAD, _BEGIN, _END = "_", "^", "$"
_CHANNELS = 192
"""Of the frames that get noise; where a voice has more, its noise comes over again."""
_FRAMES = 4
"""Frames of noise for each id at the voice's own speed, where two are common."""
_SILENCE = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperConfig:
    """What the file beside the graph says of a voice."""

    rate: int
    """Samples a second."""
    language: str | None
    """What espeak-ng reads the text as; ``None``: it is spelled."""
    ids: Mapping[str, tuple[int, ...]]
    """Ids of each phoneme."""
    clusters: frozenset[tuple[str, ...]]
    """Runs of phonemes that are one."""
    speakers: Mapping[str, int]
    """Ids of the speakers; one without an id is ``-1``."""
    noise_scale: float
    length_scale: float
    noise_width: float


def read_config(path: Path) -> PiperConfig:
    """Read a voice's configuration.

    Raises:
        WeightsError: If the file is missing or lacks what is needed.
        UnsupportedError: If its phonemes are not espeak-ng's and not letters.
    """
    try:
        config = json.loads(path.read_bytes())
        kind = config.get("phoneme_type", "espeak")
        if kind not in ("espeak", "text"):
            raise UnsupportedError(
                f"{path}: phonemes of type {kind!r} cannot be made here; espeak and text can"
            )
        return _config_of(config, is_spelled=kind == "text")
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: no configuration of a Piper voice: {error!r:.200}") from error


def _config_of(config: dict[str, Any], *, is_spelled: bool) -> PiperConfig:
    inference = config.get("inference") or {}
    ids = {str(name): tuple(map(int, found)) for name, found in config["phoneme_id_map"].items()}
    missing = {_PAD, _BEGIN, _END} - set(ids)
    if missing:
        raise KeyError(f"no ids of {', '.join(sorted(missing))}")
    if int(config.get("num_speakers", 1)) > 1:
        named = {str(name): int(n) for name, n in (config.get("speaker_id_map") or {}).items()}
        named = named or {str(n): n for n in range(int(config["num_speakers"]))}
        first = int(config.get("default_speaker_id", 0))
        speakers = dict(sorted(named.items(), key=lambda pair: (pair[1] != first, pair[1])))
    else:
        speakers = {str(config.get("dataset") or "default"): -1}
    return PiperConfig(
        rate=int(config["audio"]["sample_rate"]),
        language=None if is_spelled else str(config["espeak"]["voice"]),
        ids=ids,
        clusters=frozenset(map(tuple, config.get("vowel_clusters") or ())),
        speakers=speakers,
        noise_scale=float(inference.get("noise_scale", 0.667)),
        length_scale=float(inference.get("length_scale", 1.0)),
        noise_width=float(inference.get("noise_w", 0.8)),
    )


class PiperVoice(Voice):
    """A Piper voice.

    The graph draws noise for the length of phonemes and for the sound; here it is drawn outside,
    by the seed and the number of phonemes alone.

    Args:
        path: The graph, or a folder that has one; its configuration lies beside it, under the name
            with ``.json`` behind.
        threads: Threads of one run; ``None``: as many as torch takes.

    Raises:
        WeightsError: If a file is missing or is none of Piper's.
        UnsupportedError: If ONNX Runtime or espeak-ng is missing, or the voice's phonemes are
            others'.
    """

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        path = piper_file(path)
        self.config = read_config(path.with_name(f"{path.name}.json"))
        try:
            content, self._noises = with_noise_inputs(path.read_bytes())
        except OSError as error:
            raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
        except WeightsError as error:
            raise WeightsError(f"{path}: {error}") from error
        self.session = OnnxSession(content, threads=threads, name=path.stem, side_by_side=True)
        wanted = {"input", "input_lengths", "scales"}
        missing = wanted - {port.name for port in self.session.inputs}
        if missing:
            raise WeightsError(f"{path}: no Piper voice, its graph lacks {sorted(missing)}")
        self.rate = self.config.rate
        self.speakers = tuple(self.config.speakers)
        self.language = self.config.language
        self._phonemizer = None if self.language is None else Phonemizer(self.language)

    def sentences(self, text: str) -> list[list[str]]:
        """Return the phonemes of each sentence of a text; see :class:`Phonemizer`."""
        if self._phonemizer is None:
            return [list(code_points(text))] if text.strip() else []
        return [self._clustered(found) for found in self._phonemizer.sentences(text)]

    def ids(self, phonemes: list[str]) -> list[int]:
        """Return the ids of a sentence; phonemes that the voice has not are left out."""
        known, pad = self.config.ids, self.config.ids[_PAD]
        ids = [*known[_BEGIN], *pad]
        for phoneme in phonemes:
            if phoneme in known:
                ids += known[phoneme]
                ids += pad
        return [*ids, *known[_END]]

    def feeds(self, text: str, delivery: Delivery) -> list[Feeds]:
        """Return a run for each sentence; see :meth:`Voice.feeds`."""
        speaker = self.config.speakers[self.speaker(delivery)]
        sentences = [list(text)] if delivery.is_phonemes else self.sentences(text)
        pieces = [piece for found in sentences for piece in cut(found, _MAX_PHONEMES)]
        runs = (self.ids(list(piece)) for piece in pieces)
        nothing = len(self.ids([]))
        return [self.feeds_of(ids, delivery, speaker=speaker) for ids in runs if len(ids) > nothing]

    def feeds_of(self, ids: list[int], delivery: Delivery, *, speaker: int = -1) -> Feeds:
        """Return the inputs of the run over a sentence's ids.

        Args:
            ids: As :meth:`ids` has them.
            delivery: Speed, seed and noise.
            speaker: The speaker's id; -1: the voice has only one.
        """
        config = self.config
        length_scale = config.length_scale / delivery.speed
        noise, width = config.noise_scale * delivery.noise, config.noise_width * delivery.noise
        feeds: dict[str, Any] = {
            "input": np.array([ids], np.int64),
            "input_lengths": np.array([len(ids)], np.int64),
            "scales": np.array([noise, length_scale, width], np.float32),
        }
        if speaker >= 0:
            feeds["sid"] = np.array([speaker], np.int64)
        rng = np.random.Generator(np.random.PCG64(delivery.seed))
        per_id = max(1, round(_CHANNELS * _FRAMES * max(length_scale, 1.0)))
        for name in self._noises:
            feeds[name] = rng.standard_normal(per_id * len(ids), np.float32)
        return feeds

    def samples(self, fetched: Fetched) -> Samples:
        """Return a run's sound, as loud as can be without clipping."""
        sound = fetched["output"].astype(np.float32, copy=False).ravel()
        peak = float(np.abs(sound).max(initial=0.0))
        return np.zeros_like(sound) if peak < _SILENCE else sound / np.float32(peak)

    def _clustered(self, phonemes: str) -> list[str]:
        clusters = self.config.clusters
        if not clusters:
            return list(phonemes)
        longest = max(map(len, clusters))
        found: list[str] = []
        at = 0
        while at < len(phonemes):
            sizes = range(min(longest, len(phonemes) - at), 1, -1)
            size = next((n for n in sizes if tuple(phonemes[at : at + n]) in clusters), 1)
            found.append(phonemes[at : at + size])
            at += size
        return found
