"""Who answers in a talk: an engine in this process, or a server."""

import base64
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from mstar.cli.client import Client, ServerError
from mstar.errors import ConfigError, ContextLengthError, UnsupportedError

if TYPE_CHECKING:
    from mstar.engine.resources.sampler.config import SamplingParams
    from mstar.library import Engine, TextStream
    from mstar.preprocess.processors.base import ChatTask
    from mstar.preprocess.results import Sound

Messages = Sequence[Mapping[str, Any]]
_HEADER_NBYTES = 44
"""Of a WAV from our servers; its rate stands in the bytes from 24 to 28."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of an answer."""

    text: str = ""
    heard: str = ""
    """What the recording in the question says."""
    sounds: "Sequence[Sound]" = ()


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What an answer took; comes behind its last piece."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    """Of the answer."""
    finish_reason: str


Reply = Generator[Piece | Ending, None, None]
"""Pieces, then the ending; closing it early ends the request."""


class Answerer(Protocol):
    """Answers conversations."""

    max_tokens: int | None
    """Of one answer."""

    def answer(self, messages: Messages, *, is_spoken: bool) -> Reply:
        """Yield the answer to a conversation.

        Args:
            messages: With contents as OpenAI has them.
            is_spoken: Yield sound too.

        Raises:
            MstarError: If it cannot be answered.
        """
        ...


class EngineAnswerer:
    """An engine in this process.

    Args:
        engine: With the model.
        params: How to sample; an answer gets fewer than ``max_tokens`` where the context has no
            more.
        voice: Who speaks; ``None``: the model's own voice.
    """

    def __init__(
        self, engine: "Engine", params: "SamplingParams", voice: str | None = None
    ) -> None:
        self._engine = engine
        self._params = params
        self._voice = voice
        self.max_tokens = params.max_tokens

    def answer(self, messages: Messages, *, is_spoken: bool) -> Reply:
        """Yield the answer; see :class:`Answerer`."""
        from mstar.preprocess.processors.base import ChatTask  # noqa: PLC0415
        from mstar.preprocess.results import sounds_of, stretches_of  # noqa: PLC0415

        modalities = ("text", "audio") if is_spoken else ("text",)
        task = ChatTask(modalities=frozenset(modalities), voice=self._voice)
        with self._start(messages, task) as stream:
            for piece in stream.pieces():
                heard = "".join(stretch.text for stretch in stretches_of(piece.emitted))
                yield Piece(text=piece.text, heard=heard, sounds=sounds_of(piece.emitted))
            done = stream.completion
        yield Ending(
            num_prompt_tokens=done.num_prompt_tokens,
            num_cached_tokens=done.num_cached_tokens,
            num_tokens=len(done.token_ids),
            finish_reason=done.finish_reason,
        )

    def _start(self, messages: Messages, task: "ChatTask") -> "TextStream":
        try:
            return self._engine.stream(messages=messages, params=self._params, task=task)
        except ContextLengthError as error:
            if error.param != "max_tokens":
                raise
            params = replace(self._params, max_tokens=None)
            return self._engine.stream(messages=messages, params=params, task=task)


class ServerAnswerer:
    """A running server.

    Args:
        client: Talks to it.
        model: What the server calls the model.
        fields: Of every request: how to sample.
        voice: Who speaks; ``None``: the model's own voice.
    """

    def __init__(
        self, client: Client, model: str, fields: Mapping[str, Any], voice: str | None = None
    ) -> None:
        self._client = client
        self._fields = {"model": model, **fields}
        self._voice = {} if voice is None else {"voice": voice}
        self.max_tokens: int | None = fields.get("max_tokens")

    def answer(self, messages: Messages, *, is_spoken: bool) -> Reply:
        """Yield the answer; see :class:`Answerer`."""
        body = {
            **self._fields,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if is_spoken:
            body["modalities"] = ["text", "audio"]
            body["audio"] = {"format": "wav", **self._voice}
        try:
            yield from self._read(body)
        except ServerError as error:
            if error.param != "max_tokens" or "max_tokens" not in body:
                raise
            # It was refused before anything was said.
            del body["max_tokens"]
            yield from self._read(body)

    def _read(self, body: Mapping[str, Any]) -> Reply:
        rate, reason = 0, ""
        usage: dict[str, Any] = {}
        for event in self._client.stream("/v1/chat/completions", body):
            usage = event.data.get("usage") or usage
            for choice in event.data.get("choices") or ():
                reason = choice.get("finish_reason") or reason
                delta = choice.get("delta") or {}
                data = base64.b64decode((delta.get("audio") or {}).get("data") or "")
                if data and not rate:
                    rate, data = _rate_of(data), data[_HEADER_NBYTES:]
                yield Piece(
                    text=delta.get("content") or "",
                    heard=delta.get("input_transcript") or "",
                    sounds=[_sound(data, rate)] if data else (),
                )
        details = usage.get("prompt_tokens_details") or {}
        yield Ending(
            num_prompt_tokens=usage.get("prompt_tokens", 0),
            num_cached_tokens=details.get("cached_tokens", 0),
            num_tokens=usage.get("completion_tokens", 0),
            finish_reason=reason,
        )


def _rate_of(data: bytes) -> int:
    if data[:4] != b"RIFF" or len(data) < _HEADER_NBYTES:
        raise ServerError("the server's sound does not begin as a WAV does")
    return int.from_bytes(data[24:28], "little")


def _sound(data: bytes, rate: int) -> "Sound":
    import numpy as np  # noqa: PLC0415 - a talk in writing needs none

    from mstar.preprocess.results import Sound  # noqa: PLC0415

    return Sound(np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768), rate)


def check_abilities(model: str, takes: Sequence[str], gives: Sequence[str], wants: str) -> None:
    """Verify that a model listens or speaks.

    Args:
        model: Its name.
        takes: Modalities of its input.
        gives: Modalities of its output.
        wants: ``listen`` or ``speak``.

    Raises:
        UnsupportedError: If it does not.
    """
    has, shown = (takes, "takes") if wants == "listen" else (gives, "gives")
    if "audio" not in has:
        only = " and ".join(has) or "nothing"
        raise UnsupportedError(f"{model} does not {wants}: it {shown} {only} only; voice does")


def abilities_here(model: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return what a model takes and gives in chats, from its files; loads no weights.

    Raises:
        ModelNotFoundError: If there is no such model.
        UnsupportedError: If it does not chat.
    """
    from mstar.catalog import load_prompting, locate  # noqa: PLC0415
    from mstar.preprocess.processors.base import tasks_of  # noqa: PLC0415

    _, processor = load_prompting(locate(model))
    if "chat" not in tasks_of(processor):
        tasks = ", ".join(sorted(tasks_of(processor)))
        raise UnsupportedError(f"{model} does not chat; what it does is {tasks}")
    return (
        ("text", *sorted(getattr(processor, "kinds", ()))),
        ("text", *sorted(set(getattr(processor, "modalities", ())) - {"text"})),
    )


def abilities_there(client: Client, model: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return what a server's model takes and gives.

    Raises:
        ServerError: If the server does not answer.
        ConfigError: If it has no such model; names those that it has.
    """
    models = client.get("/v1/models").get("data") or []
    known = {str(found.get("id")): found.get("architecture") or {} for found in models}
    if model not in known:
        raise ConfigError(f"{client.url} has no model {model!r}; it has {', '.join(known)}")
    about = known[model]
    return about.get("input_modalities") or ("text",), about.get("output_modalities") or ("text",)
