"""What requests yield beside tokens, put together: sound, pictures and transcripts."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mstar.engine.array import to_numpy
from mstar.engine.output import Emitted
from mstar.preprocess.media.types import Pixels, Samples
from mstar.preprocess.media.wav import wav
from mstar.preprocess.processors.base import AUDIO, IMAGE, TRANSCRIPT


@dataclass(frozen=True, eq=False)
class Sound:
    """Speech, or whatever was made to be heard."""

    samples: Samples
    """float32 ``[num_samples]``, between -1 and 1."""
    rate: int
    """Samples a second."""
    text: str = ""
    """What is said in it, where it is known."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return len(self.samples) / self.rate

    def wav(self) -> bytes:
        """Return it as a WAV file."""
        return wav(self.samples, self.rate)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A stretch of speech that was written down."""

    text: str
    start: float
    """In seconds from the recording's beginning."""
    end: float
    tokens: tuple[int, ...] = ()
    facts: dict[str, Any]
    """What else the model says of it: ``avg_logprob``, ``words`` and the like."""


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """A recording that was written down."""

    text: str
    language: str | None
    """Its code."""
    stretches: tuple[Stretch, ...]


_OWN_FACTS = frozenset({"start", "end", "tokens", "language"})


def sounds_of(emitted: Iterable[Emitted]) -> list[Sound]:
    """Return the pieces of sound among what was emitted."""
    return [
        Sound(to_numpy(one.array), int(one.info["rate"]), str(one.info.get("text") or ""))
        for one in emitted
        if one.name == AUDIO and one.array is not None
    ]


def joined_sound(pieces: Sequence[Sound]) -> Sound | None:
    """Return pieces of one rate as one sound; ``None``: there is none."""
    if not pieces:
        return None
    rates = {piece.rate for piece in pieces}
    assert len(rates) == 1, rates
    samples = np.concatenate([piece.samples for piece in pieces])
    return Sound(samples, pieces[0].rate, "".join(piece.text for piece in pieces))


def pictures_of(emitted: Iterable[Emitted]) -> list[Pixels]:
    """Return the pictures among what was emitted, uint8 ``[height, width, 3]`` each."""
    return [to_numpy(one.array) for one in emitted if one.name == IMAGE and one.array is not None]


def stretches_of(emitted: Iterable[Emitted]) -> list[Stretch]:
    """Return the stretches of speech among what was emitted."""
    return [
        Stretch(
            text=one.text or "",
            start=float(one.info.get("start") or 0.0),
            end=float(one.info.get("end") or 0.0),
            tokens=tuple(one.info.get("tokens") or ()),
            facts={name: fact for name, fact in one.info.items() if name not in _OWN_FACTS},
        )
        for one in emitted
        if one.name == TRANSCRIPT
    ]


def language_of(emitted: Iterable[Emitted]) -> str | None:
    """Return the language of the first transcript that says it."""
    found = (one.info.get("language") for one in emitted if one.name == TRANSCRIPT)
    return next((str(language) for language in found if language), None)


def transcript_of(emitted: Sequence[Emitted]) -> Transcript:
    """Return all that was written down of one recording."""
    stretches = stretches_of(emitted)
    return Transcript(
        text="".join(stretch.text for stretch in stretches).strip(),
        language=language_of(emitted),
        stretches=tuple(stretches),
    )
