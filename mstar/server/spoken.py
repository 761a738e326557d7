"""What a chat's answer has beside its text: its sound, and what was heard of the user's."""

import base64
import secrets
import time
from collections.abc import Sequence
from typing import Any

from mstar.engine.output import Emitted
from mstar.preprocess.media.wav import pcm16, wav_header
from mstar.preprocess.results import Sound, joined_sound, sounds_of, stretches_of

_LIFETIME_SECONDS = 3600

Json = dict[str, Any]


class SpokenPart:
    """The sound of one choice, as it grows.

    Args:
        kind: The format of the sound.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._id = f"audio_{secrets.token_hex(12)}"
        self._pieces: list[Sound] = []
        self._heard: list[str] = []

    def take(self, emitted: Sequence[Emitted]) -> Json:
        """Take in what was emitted; returns the fields of a delta that carry it."""
        delta: Json = {}
        if heard := [stretch.text for stretch in stretches_of(emitted)]:
            words = "".join(heard)
            delta["input_transcript"] = words if self._heard else words.lstrip()
            self._heard += heard
        sound = joined_sound(sounds_of(emitted))
        if sound is not None:
            data = piece_of(sound, self._kind, is_first=not self._pieces)
            self._pieces.append(sound)
            delta["audio"] = {
                "id": self._id,
                "data": base64.b64encode(data).decode(),
                "transcript": sound.text,
                "expires_at": int(time.time()) + _LIFETIME_SECONDS,
            }
        return delta

    def whole(self, text: str) -> Json:
        """Return the fields of a whole message.

        Args:
            text: What the answer says.
        """
        message: Json = {}
        if self._heard:
            message["input_transcript"] = "".join(self._heard).strip()
        if self._pieces:
            from mstar.preprocess.media.encode import encode_sound  # noqa: PLC0415 - text needs none

            samples = [piece.samples for piece in self._pieces]
            data = encode_sound(samples, self._pieces[0].rate, self._kind)
            message["audio"] = {
                "id": self._id,
                "data": base64.b64encode(data).decode(),
                "transcript": text,
                "expires_at": int(time.time()) + _LIFETIME_SECONDS,
            }
        return message


def piece_of(sound: Sound, kind: str, *, is_first: bool) -> bytes:
    """Return a piece of sound as the next bytes of a stream.

    Args:
        sound: The piece.
        kind: ``wav``, ``pcm`` or ``pcm16``.
        is_first: Nothing was sent before it.
    """
    if kind != "wav":
        from mstar.preprocess.media.encode import bare  # noqa: PLC0415 - text needs none

        return bare(sound.samples, sound.rate)
    return (wav_header(sound.rate) if is_first else b"") + pcm16(sound.samples)
