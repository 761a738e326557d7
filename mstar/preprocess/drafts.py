"""From what a user asks to ids and items: template, tokenizer and the family's processor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import ContextLengthError, RequestError
from mstar.preprocess.conversation import (
    Conversation,
    part_messages,
    plain_messages,
    read_messages,
)
from mstar.preprocess.expansion import Budget, Expander, decoded, refuse_typed, weave
from mstar.preprocess.media.content import Source
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.media.types import AudioMedia
from mstar.preprocess.processors.base import (
    Assistant,
    ChatTask,
    Draft,
    Framer,
    ImageTask,
    Painter,
    Processor,
    Speaker,
    SpeechTask,
    Task,
    Transcriber,
    TranscriptionTask,
    tasks_of,
)
from mstar.preprocess.tokenizer import TextTokenizer

# Arguments of the rendering itself; the rest are variables of the template.
_RESERVED_KWARGS = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    )
)
_ABILITY: dict[Task, str] = {
    "chat": "answers no chats; serve one that does, such as smollm2-135m",
    "completion": "continues no texts; serve one that does, such as smollm2-135m",
    "transcription": "writes down no speech; serve one that does, such as whisper-base",
    "speech": "does not speak; serve one that does, such as voice",
    "image": "makes no pictures; serve one that does, such as a Janus checkpoint",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRequest:
    """One prompt as a user gives it: exactly one of messages, text, token ids and audio."""

    request_id: str
    params: SamplingParams
    messages: Sequence[Mapping[str, Any]] | None = None
    """A chat, for the model's template."""
    text: str | None = None
    token_ids: Sequence[int] | None = None
    audio: Source | None = None
    """A recording to write down."""
    task: ChatTask | TranscriptionTask | SpeechTask | ImageTask | None = None
    """What is to be done, where it is more than going on with the prompt."""
    cache_salt: str | None = None
    """Only requests with the same salt share pages."""
    retain_seconds: float = 0.0
    """How long its pages are protected from eviction after their last use, as far as the budget
    goes; ``inf``: until a reset."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, ``tools`` and ``documents`` among them."""
    add_generation_prompt: bool = True
    """The chat ends with the beginning of an answer."""
    continue_final_message: bool = False
    """The chat ends inside its last message."""
    add_special_tokens: bool = True
    """A text begins (and ends) as the model wants texts to."""


def require(task: Task, processor: object | None) -> None:
    """Verify that a model can do what it is asked for.

    Args:
        task: What it is asked for.
        processor: The model's; ``None``: it takes text only.

    Raises:
        RequestError: If it cannot; names a model that can.
    """
    able = tasks_of(processor)
    if task not in able:
        raise RequestError(
            f"this model {_ABILITY[task]} (it is there for: {', '.join(sorted(able))})",
            param={"chat": "messages", "completion": "prompt"}.get(task, "model"),
            code="capability_missing",
        )


class Drafter:
    """Writes the prompts of one model.

    Args:
        tokenizer: The model's.
        max_model_len: Prompt and output of one request together, in tokens.
        processor: The family's; ``None``: the model takes text only.
        limits: What media may cost.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        max_model_len: int,
        processor: object | None,
        limits: MediaLimits,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._processor = processor
        self._limits = limits
        self._expander: Expander | None = None
        if isinstance(processor, Processor):
            self._expander = Expander(processor, limits)
        self._kinds: frozenset[str] = getattr(processor, "kinds", frozenset())
        self._reserved = _reserved_texts(processor, tokenizer)

    def draft(self, request: PromptRequest) -> Draft:
        """Return the prompt that a request asks for.

        Raises:
            RequestError: If the prompt is wrong, or asks for what the model cannot do.
            ContextLengthError: If a text is surely too long; it is not encoded then.
        """
        given = [
            name
            for name in ("messages", "text", "token_ids", "audio")
            if getattr(request, name) is not None
        ]
        if len(given) != 1:
            raise RequestError(
                "a prompt is one of messages, text and token ids; found "
                + (" and ".join(given) if given else "none"),
                param="prompt",
            )
        if request.messages is not None:
            return self._chat(request, request.messages)
        if request.audio is not None:
            return self._transcription(request, request.audio)
        if request.token_ids is not None:
            require("completion", self._processor)
            return Draft(parts=[self._checked(list(request.token_ids))])
        assert request.text is not None
        if not isinstance(request.text, str):
            raise RequestError(f"prompt is {request.text!r:.40}, not a string", param="prompt")
        return self._text(request, request.text)

    def render(self, request: PromptRequest) -> tuple[str, list[dict[str, Any]]]:
        """Return a chat as the template writes it, and the messages as it was given them."""
        assert request.messages is not None
        return self._render(request, read_messages(request.messages, self._kinds))

    def _chat(self, request: PromptRequest, messages: Sequence[Mapping[str, Any]]) -> Draft:
        require("chat", self._processor)
        task = request.task if isinstance(request.task, ChatTask) else ChatTask()
        conversation = read_messages(messages, self._kinds)
        # Arguments of tool calls are read out of JSON, which may spell a text in other letters.
        refuse_typed([messages, conversation.messages], self._reserved, "messages")
        refuse_typed(request.template_kwargs, self._reserved, "chat_template_kwargs")
        modalities = getattr(self._processor, "modalities", frozenset({"text"}))
        if missing := task.modalities - modalities:
            raise RequestError(
                f"modalities has {sorted(missing)[0]!r}; this model answers with "
                f"{' and '.join(sorted(modalities))} only: serve one that speaks, such as voice",
                param="modalities",
                code="capability_missing",
            )
        if isinstance(self._processor, Assistant):
            _check_variables(request.template_kwargs)
            budget = Budget(self._limits)
            rate = self._processor.rate
            media = [decoded(source, rate, budget) for source in conversation.media]
            task = replace(
                task,
                add_generation_prompt=request.add_generation_prompt,
                template_kwargs=request.template_kwargs,
            )
            return self._processor.chat(conversation.messages, media, task)
        text, _ = self._render(request, conversation)
        if self._expander is None:
            return Draft(parts=[self._encode(text, False, "messages")])
        processor = self._processor
        assert isinstance(processor, Processor)
        expanded = self._expander.expand(conversation.media, request.cache_salt)
        return Draft(
            parts=weave(
                text,
                processor.placeholder,
                [source.kind for source in conversation.media],
                expanded,
                lambda piece: self._encode(piece, False, "messages"),
            )
        )

    def _render(
        self, request: PromptRequest, conversation: Conversation
    ) -> tuple[str, list[dict[str, Any]]]:
        _check_variables(request.template_kwargs)
        if self._expander is None:
            messages = plain_messages(conversation)
        else:
            messages = part_messages(conversation)
        text = self._tokenizer.render_chat(
            messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **request.template_kwargs,
        )
        if isinstance(self._processor, Framer):
            text = self._processor.frame(text)
        return text, messages

    def _text(self, request: PromptRequest, text: str) -> Draft:
        if isinstance(request.task, SpeechTask):
            require("speech", self._processor)
            assert isinstance(self._processor, Speaker)
            return self._processor.speech(text, request.task)
        refuse_typed(text, self._reserved, "prompt")
        if isinstance(request.task, ImageTask):
            require("image", self._processor)
            assert isinstance(self._processor, Painter)
            return self._processor.picture(text, request.task)
        require("completion", self._processor)
        return Draft(parts=[self._encode(text, request.add_special_tokens, "prompt")])

    def _transcription(self, request: PromptRequest, source: Source) -> Draft:
        require("transcription", self._processor)
        processor = self._processor
        assert isinstance(processor, Transcriber)
        media = decoded(source, processor.rate, Budget(self._limits))
        assert isinstance(media, AudioMedia)
        task = request.task if isinstance(request.task, TranscriptionTask) else TranscriptionTask()
        refuse_typed(task.prompt, self._tokenizer.control_tokens, "prompt")
        return processor.transcription(media, task)

    def _checked(self, token_ids: list[int]) -> list[int]:
        """Return ids, of which none may stand for media."""
        known = self._tokenizer.control_tokens
        reserved = {known[text]: text for text in self._reserved if text in known}
        for token in token_ids if reserved else ():
            if token in reserved:
                refuse_typed(reserved[token], self._reserved, "prompt")
        return token_ids

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        # Encoding a text many times too long would keep a worker from all other requests.
        if len(text) > self._max_model_len:
            num_tokens = self._tokenizer.min_tokens(text)
            if num_tokens >= self._max_model_len:
                raise too_long(f"at least {num_tokens}", self._max_model_len, param)
        return self._tokenizer.encode(text, add_special_tokens)


def _check_variables(template_kwargs: Mapping[str, Any]) -> None:
    for name in template_kwargs:
        if name in _RESERVED_KWARGS:
            raise RequestError(
                f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs"
            )


def too_long(num_tokens: str, max_model_len: int, param: str) -> ContextLengthError:
    """Return what is wrong with a prompt that leaves no room for an output."""
    return ContextLengthError(
        f"the prompt has {num_tokens} tokens; the context holds {max_model_len}, with at least one "
        "for the output: shorten the prompt",
        param=param,
    )


def _reserved_texts(processor: object | None, tokenizer: TextTokenizer) -> frozenset[str]:
    """Return the texts that stand for media: placeholders, and control tokens in them."""
    placeholders = frozenset(getattr(processor, "placeholder", {}).values())
    tokens = {
        token
        for token in tokenizer.control_tokens
        for placeholder in placeholders
        if token in placeholder
    }
    own: frozenset[str] = getattr(processor, "reserved", frozenset())
    return placeholders | tokens | own
