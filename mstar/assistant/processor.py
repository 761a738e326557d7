"""AssistantProcessor: chats with recordings in them, made ready for the voice assistant."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mstar.assistant.model import AssistantOptions, chat_ids
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.preprocess.media.types import AudioMedia, Media
from mstar.preprocess.processors.base import (
    ChatTask,
    Draft,
    Speaker,
    SpeechTask,
    Task,
    Transcriber,
    TranscriptionTask,
)
from mstar.preprocess.tokenizer import TextTokenizer


class AssistantProcessor:
    """Prepares chats, transcriptions and texts to be spoken.

    Args:
        tokenizer: The language model's.
        listener: Prepares recordings.
        speaker: Prepares texts to be spoken.
    """

    tasks: frozenset[Task] = frozenset({"chat", "completion", "transcription", "speech"})
    kinds = frozenset({"audio"})
    modalities = frozenset({"text", "audio"})

    def __init__(self, tokenizer: TextTokenizer, listener: Transcriber, speaker: Speaker) -> None:
        self._tokenizer = tokenizer
        self._listener = listener
        self._speaker = speaker
        self.rate = listener.rate
        self.fingerprint = listener.fingerprint

    def chat(
        self, messages: Sequence[Mapping[str, Any]], media: Sequence[Media], task: ChatTask
    ) -> Draft:
        """Return the prompt of the first recording, or of the chat where there is none.

        Args:
            messages: Contents are strings or lists of parts.
            media: The recordings of their parts, in order.
            task: How to answer.

        Raises:
            RequestError: If the template cannot be rendered.
        """
        heard = [self._transcription(recording) for recording in media]
        options = AssistantOptions(
            messages=[dict(message) for message in messages],
            is_spoken="audio" in task.modalities,
            later=[_later(draft) for draft in heard[1:]],
            template_kwargs={
                **task.template_kwargs,
                "add_generation_prompt": task.add_generation_prompt,
            },
        )
        told: dict[str, Any] = {"assistant": msgspec.to_builtins(options, builtin_types=(bytes,))}
        if options.is_spoken and task.voice is not None:
            told["speech"] = {"voice": task.voice}
        if not heard:
            return Draft(parts=[chat_ids(self._tokenizer, options, ())], options=told)
        first = heard[0]
        return Draft(
            parts=first.parts,
            context=first.context,
            num_context_slots=sum(draft.num_context_slots for draft in heard),
            options={**first.options, **told},
        )

    def transcription(self, audio: AudioMedia, task: TranscriptionTask) -> Draft:
        """Return the prompt of a recording that is to be written down only."""
        return self._listener.transcription(audio, task)

    def speech(self, text: str, task: SpeechTask) -> Draft:
        """Return the prompt of a text that is to be spoken only."""
        return self._speaker.speech(text, task)

    def _transcription(self, recording: Media) -> Draft:
        assert isinstance(recording, AudioMedia), f"a {recording.kind} is no recording"
        return self._listener.transcription(recording, TranscriptionTask(fallback=False))


def _later(draft: Draft) -> PreparedRequest:
    """Return a recording's leg; the assistant gives it its request's id and root."""
    (ids,) = draft.parts
    assert isinstance(ids, list), "the prompt of a recording is ids"
    return PreparedRequest(
        request_id="",
        token_ids=ids,
        params=SamplingParams(),
        context=list(draft.context),
        options=dict(draft.options),
    )
