"""Voices: a text to be spoken goes to the model as it is, with how it is to be spoken."""

from pathlib import Path
from typing import Any

from mstar.errors import RequestError
from mstar.preprocess.processors.base import Draft, SpeechTask, Task
from mstar.preprocess.tokenizer import TextTokenizer


class SpeechProcessor:
    """Prepares texts for a voice."""

    tasks: frozenset[Task] = frozenset({"speech"})

    def speech(self, text: str, task: SpeechTask) -> Draft:
        """Return a prompt without tokens; the voice itself checks text, name and speed.

        Raises:
            RequestError: If somebody tells it in words how to speak.
        """
        if task.instructions:
            raise RequestError(
                "this voice takes no instructions; leave them out", param="instructions"
            )
        return Draft(parts=[], options={"input": text, "speech": speech_options(task)})


def speech_options(task: SpeechTask) -> dict[str, Any]:
    """Return how to speak, as voices are told it."""
    return {"speed": task.speed} | ({} if task.voice is None else {"voice": task.voice})


def build(path: Path, config: dict[str, Any], tokenizer: TextTokenizer) -> SpeechProcessor:
    """Return the processor of a voice; nothing of it is read here."""
    return SpeechProcessor()
