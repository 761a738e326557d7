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
            self._heard += heard
            delta["input_transcript"] = "".join(heard)
        sound = joined_sound(sounds_of(emitted))
        if sound is not None:
            is_first = not self._pieces
            self._pieces.append(sound)
            data = pcm16(sound.samples)
            if is_first and self._kind == "wav":
                data = wav_header(sound.rate) + data
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
        sound = joined_sound(self._pieces)
        if sound is not None:
            from mstar.preprocess.media.encode import encode_sound  # noqa: PLC0415 - text needs none

            data = encode_sound(sound.samples, sound.rate, self._kind)
            message["audio"] = {
                "id": self._id,
                "data": base64.b64encode(data).decode(),
                "transcript": text,
                "expires_at": int(time.time()) + _LIFETIME_SECONDS,
            }
        return message
