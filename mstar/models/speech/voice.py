"""What voices have in common: text becomes runs of an ONNX graph, and these become samples."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mstar.errors import RequestError
from mstar.models.onnx import Feeds, Fetched, OnnxSession

MIN_SPEED, MAX_SPEED = 0.25, 4.0
OPENAI_VOICES = frozenset(
    (
        *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"),
        *("marin", "nova", "onyx", "sage", "shimmer", "verse"),
    )
)
"""Names of OpenAI's voices, which programs written for them ask for.

Where no speaker of a model has such a name, it is the model's own voice.
"""

Samples = npt.NDArray[np.float32]
"""Sound, ``[n]``, within -1 and 1."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a text is to be spoken.

    Raises:
        RequestError: If a value is out of its range; names the field.
    """

    voice: str | None = None
    """Who speaks; ``None``, an empty name and ``OPENAI_VOICES``: the model's first."""
    language: str | None = None
    """How the text is read, by espeak-ng's name; ``None``: the voice's own."""
    speed: float = 1.0
    """Times the voice's own."""
    seed: int = 0
    """Decides the noise of voices that have any: the same text sounds the same again."""
    noise: float = 1.0
    """How lively it is, times the voice's own; 0: no noise at all."""
    is_phonemes: bool = False
    """The text is phonemes already."""

    def __post_init__(self) -> None:
        if not MIN_SPEED <= self.speed <= MAX_SPEED:
            raise RequestError(
                f"speed is {self.speed}; it must be from {MIN_SPEED} to {MAX_SPEED}", param="speed"
            )
        if not 0 <= self.noise <= 2:
            raise RequestError(f"noise is {self.noise}; it must be from 0 to 2", param="noise")
        if not 0 <= self.seed < 2**64:
            raise RequestError(f"seed is {self.seed}; it must be from 0 to 2^64 - 1", param="seed")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Delivery":
        """Return what a request's options say of it; other options are others' business.

        Raises:
            RequestError: If a value is of the wrong type or out of its range.
        """
        found: dict[str, Any] = {}
        for name, kind in _FIELDS.items():
            value = options.get(name)
            if value is None:
                continue
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise RequestError(f"{name} is {value!r:.40}, which is of no use", param=name)
            found[name] = value
        return cls(**found)


_FIELDS: dict[str, Any] = {
    "voice": str,
    "language": str,
    "speed": (int, float),
    "seed": int,
    "noise": (int, float),
    "is_phonemes": bool,
}


class Voice(ABC):
    """A graph that speaks.

    A sentence's samples depend on its text and its delivery alone, never on what was said before.
    """

    session: OnnxSession
    rate: int
    """Samples a second."""
    speakers: tuple[str, ...]
    """Whom a delivery may ask for."""
    language: str | None
    """What text is read as; ``None``: it is spelled."""

    @abstractmethod
    def feeds(self, text: str, delivery: Delivery) -> list[Feeds]:
        """Return the inputs of each run that the text takes; none where nothing is to be said.

        Args:
            text: What is spoken, of any length.
            delivery: How; it was checked.
        """

    @abstractmethod
    def samples(self, fetched: Fetched) -> Samples:
        """Return the sound that a run gave."""

    def speak(self, text: str, delivery: Delivery | None = None) -> Samples:
        """Return a text as sound.

        Raises:
            RequestError: If the voice cannot do what the delivery asks.
            RuntimeError: If the graph cannot be run.
        """
        delivery = delivery or Delivery()
        self.check(delivery)
        runs = self.feeds(text, delivery)
        return joined([self.samples(self.session.run(feeds)) for feeds in runs])

    def check(self, delivery: Delivery) -> None:
        """Verify that the voice can speak so.

        Raises:
            RequestError: If it has no such speaker, or does not read text in the language.
        """
        name = self.session.name
        known = delivery.voice in self.speakers or delivery.voice in OPENAI_VOICES
        if delivery.voice and not known:
            raise RequestError(
                f"voice is {delivery.voice!r:.40}; {name} has {', '.join(self.speakers[:20])}; "
                'leave it out, or write "", for its own',
                param="voice",
            )
        if delivery.language not in (None, self.language) and not delivery.is_phonemes:
            raise RequestError(
                f"language is {delivery.language!r:.40}; {name} reads text as {self.language}; for "
                "others give phonemes",
                param="language",
            )

    def speaker(self, delivery: Delivery) -> str:
        """Return who speaks."""
        return delivery.voice if delivery.voice in self.speakers else self.speakers[0]


def joined(parts: Sequence[Samples]) -> Samples:
    """Return sounds one behind the other."""
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
