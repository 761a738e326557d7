"""What a family says of its prompts: how media become slots, and what else it can be asked for.

A class has what its model can do and no more: :class:`Processor` for media at placeholders of a
chat, and of the others those whose task it serves, with ``tasks`` naming them all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from mstar.engine.request import ContextItem
from mstar.preprocess.items import PromptItem
from mstar.preprocess.media.types import AudioMedia, Media

Task = Literal["chat", "completion", "transcription", "speech", "image"]
"""What a request asks for."""
TEXT_TASKS: frozenset[Task] = frozenset({"chat", "completion"})
"""What a model can do that says nothing of it."""

AUDIO, IMAGE, TRANSCRIPT = "audio", "image", "transcript"
"""Names of what a request yields beside tokens (``mstar.engine.output.Emitted``).

- audio: ``array`` float32 ``[num_samples]``, ``info["rate"]`` samples a second, ``info["text"]``
  what is said in it, where it is known.
- image: ``array`` uint8 ``[height, width, 3]``.
- transcript: one stretch of speech: its ``text``, ``info["start"]`` and ``info["end"]`` in seconds
  from the recording's beginning, ``info["language"]`` its code; where known ``tokens``, ``words``
  (each ``word``, ``start``, ``end``), and of the window that it was heard in: ``seek``, its first
  hundredth of a second, ``temperature``, ``avg_logprob``, ``compression_ratio`` and
  ``no_speech_prob``.
"""


@runtime_checkable
class Processor(Protocol):
    """Turns media that stand in a chat into slots."""

    kinds: frozenset[str]
    """Kinds of media that it takes: ``image``, ``audio``, ``video``."""
    placeholder: Mapping[str, str]
    """By kind: the text that the family's chat template renders for one item."""
    fingerprint: bytes
    """Of everything that decides slots and values, version and config included."""
    max_items: int | None
    """Items of one prompt, at most; ``None``: as many as the context holds."""

    def expand(self, media: Media) -> Sequence[str | list[int] | PromptItem]:
        """Return what stands at an item's placeholder: texts, ids and items, in order.

        Texts become ids together with what stands next to them in the prompt.

        Raises:
            RequestError: If the model cannot take this one: its size or length.
        """
        ...


@runtime_checkable
class Framer(Protocol):
    """Puts something around chats that their template does not write."""

    def frame(self, text: str) -> str:
        """Return a rendered chat as the model is to read it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A prompt as a family writes it, before it is checked and keyed."""

    parts: Sequence[list[int] | PromptItem]
    """Ids and items of the stream."""
    context: Sequence[ContextItem] = ()
    """Items that take no slots of the stream and are attended to from outside it."""
    num_context_slots: int = 0
    """Slots of context in all legs together, where there are more than ``context`` has."""
    companions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By label: ids of further streams, as many as the main one has slots."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the model wants to know; plain data."""
    max_tokens: int | None = None
    """Tokens of the output where the request does not say; ``None``: the context's rest."""


@dataclass(frozen=True, kw_only=True)
class TranscriptionTask:
    """How speech is to be written down."""

    language: str | None = None
    """Code of two or three letters, or English name; ``None``: as heard."""
    prompt: str = ""
    """What was said before; sets spelling and style."""
    translate: bool = False
    """Write English, whatever is spoken."""
    timestamps: frozenset[str] = frozenset()
    """``segment`` and ``word``: what is to be timed; empty: nothing."""
    fallback: bool = True
    """Write down again, at higher temperatures, what repeats itself or is unlikely, where a
    temperature of 0 is asked for; and leave silence out."""


@dataclass(frozen=True, kw_only=True)
class SpeechTask:
    """How a text is to be spoken."""

    voice: str | None = None
    """``None``: the model's own."""
    speed: float = 1.0
    instructions: str = ""
    """How to speak, in words."""


@dataclass(frozen=True, kw_only=True)
class ImageTask:
    """What picture is to be made."""

    size: tuple[int, int] | None = None
    """Width and height, in pixels; ``None``: the model's own."""
    guidance: float | None = None
    """How closely it follows the prompt; ``None``: the model's own scale."""


@dataclass(frozen=True, kw_only=True)
class ChatTask:
    """How a conversation is to be answered."""

    modalities: frozenset[str] = frozenset({"text"})
    """``text`` and ``audio``: what the answer consists of."""
    voice: str | None = None
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Transcriber(Protocol):
    """Writes down speech; has ``transcription`` among its ``tasks``."""

    tasks: frozenset[Task]
    rate: int
    """Samples a second that it wants."""
    fingerprint: bytes

    def transcription(self, audio: AudioMedia, task: TranscriptionTask) -> Draft:
        """Return the prompt.

        Raises:
            RequestError: If the model does not know the language, or cannot do the task.
        """
        ...


@runtime_checkable
class Speaker(Protocol):
    """Speaks texts; has ``speech`` among its ``tasks``."""

    tasks: frozenset[Task]

    def speech(self, text: str, task: SpeechTask) -> Draft:
        """Return the prompt.

        Raises:
            RequestError: If there is no such voice, or the text cannot be spoken.
        """
        ...


@runtime_checkable
class Painter(Protocol):
    """Makes pictures; has ``image`` among its ``tasks``."""

    tasks: frozenset[Task]

    def picture(self, prompt: str, task: ImageTask) -> Draft:
        """Return the prompt.

        Raises:
            RequestError: If the model does not make this size.
        """
        ...


@runtime_checkable
class Assistant(Protocol):
    """Answers conversations in a way of its own, instead of by template and placeholders."""

    tasks: frozenset[Task]
    kinds: frozenset[str]
    modalities: frozenset[str]
    """What its answers may consist of: ``text``, ``audio``."""
    rate: int
    """Samples a second that it wants."""

    def chat(
        self, messages: Sequence[Mapping[str, Any]], media: Sequence[Media], task: ChatTask
    ) -> Draft:
        """Return the prompt.

        Args:
            messages: Contents are strings or lists of parts; media are parts
                ``{"type": kind}`` without more.
            media: Of those parts, in their order.
            task: How to answer.
        """
        ...


def tasks_of(processor: object) -> frozenset[Task]:
    """Return what a model with this processor can be asked for; ``None`` is one of text only."""
    tasks: frozenset[Task] = getattr(processor, "tasks", TEXT_TASKS)
    return tasks
