"""VoiceAssistant: speech or text in, text and speech out, by three models in one engine.

A request with recordings first has a leg of the listener for each window of them; the language
model's leg is the chat with the transcripts in it, and what it writes goes to the speaker sentence
by sentence::

    recording -> listen.encoder -> listen.decoder -> (transcript)
    chat -> answer.decoder -> sentences -> speaker -> (sound)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from mstar.engine.chunks import Sentences
from mstar.engine.graph import Cursor, Edge, ForEach, Graph, Loop, Parallel, Run, Walk
from mstar.engine.model import Leg, Model
from mstar.engine.output import Emitted
from mstar.engine.request import Component, PreparedRequest, Request
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.models.composite import Part, Scope
from mstar.models.speech.model import SPEAKER, SpeechModel
from mstar.models.whisper.model import TRANSCRIPT, WhisperModel
from mstar.preprocess.detokenizer import Detokenizer
from mstar.preprocess.tokenizer import TextTokenizer

_LISTEN, _ANSWER = Scope("listen"), Scope("answer")
_ANSWERED = "answered"
"""The streaming edge from the language model to the speaker."""
_EXACT = SamplingParams(temperature=0.0)
"""How recordings are written down, whatever the answer is sampled with."""
_WRITE, _SPEAK = _ANSWER("write"), _ANSWER("speak")
"""Walks of the answer: in writing, or spoken too."""


class AssistantOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a request tells the assistant; crosses processes as plain data."""

    messages: list[dict[str, Any]]
    """The chat, as the language model's template takes it. A content may be a list of text parts
    and of parts of type ``audio``, which stand for the recordings in their order."""
    is_spoken: bool = False
    later: list[PreparedRequest] = []
    """Requests for the recordings behind the first."""
    template_kwargs: dict[str, Any] = {}


def assistant_options(prepared: PreparedRequest) -> AssistantOptions | None:
    """Return what a request tells the assistant; ``None``: it is a plain prompt.

    Raises:
        msgspec.ValidationError: If it was not prepared for an assistant.
    """
    told = prepared.options.get("assistant")
    return None if told is None else msgspec.convert(told, AssistantOptions)


@dataclass(slots=True)
class _Talk:
    """What the assistant keeps of a request while it runs."""

    options: AssistantOptions
    later: list[PreparedRequest]
    """Requests for recordings that were not listened to yet."""
    heard: list[str] = field(default_factory=list)
    """The transcript of each recording so far."""
    stretches: list[str] = field(default_factory=list)
    """Of the recording that is listened to."""
    written: Detokenizer | None = None
    """Makes text of the answer's tokens."""


class VoiceAssistant(Model):
    """A listener, a language model and a speaker.

    Args:
        name: What it is called.
        listener: Writes down recordings.
        answerer: Writes the answers.
        speaker: Speaks them.
        tokenizer: The language model's, with its chat template.
    """

    def __init__(
        self,
        name: str,
        listener: WhisperModel,
        answerer: Model,
        speaker: SpeechModel,
        tokenizer: TextTokenizer,
    ) -> None:
        self.name = name
        self.listener = listener
        self._answerer = answerer
        self.speaker = speaker
        self._tokenizer = tokenizer
        self._talks: dict[str, _Talk] = {}
        heard, written = _LISTEN.specs(listener), _ANSWER.specs(answerer)
        self.specs = assistant_specs(listener, answerer)
        self._writer = _writer(answerer)
        self._hearing = frozenset(map(_LISTEN, listener.telling))
        self.telling = self._hearing | {self._writer}
        self.nodes = {
            **_LISTEN.nodes(listener),
            **_ANSWER.nodes(answerer),
            **speaker.nodes,
        }
        self.graph = assistant_graph(listener, answerer, speaker)
        self.encoders = {kind: _LISTEN(node) for kind, node in listener.encoders.items()}
        self._listening = {
            walk: replace(
                _LISTEN.component(listener.component_of(walk), heard), is_silent=True, params=_EXACT
            )
            for walk, _ in listener.graph.walks
        }
        self._answering = _ANSWER.component(answerer.component_of("decode"), written)
        self._answering = replace(self._answering, max_model_len=answerer.max_model_len)
        self.vocab_size = answerer.vocab_size
        self.max_model_len = answerer.max_model_len
        self.stop_token_ids = answerer.stop_token_ids
        self.root_constants = joined_constants(
            {part.name: part.root_constants for part in (listener, answerer)}
        )

    def first_walk(self, prepared: PreparedRequest) -> Cursor:
        """Return the walk that listens, or the one that answers where there is nothing to hear.

        Raises:
            RequestError: If the voice cannot speak as the options ask.
        """
        if "input" in prepared.options:
            return self.graph.cursor(self.speaker.first_walk(prepared).name)
        options = assistant_options(prepared)
        if options is not None and options.is_spoken:
            self.speaker.check(prepared)
        if prepared.context:
            return self.graph.cursor(_LISTEN(self.listener.first_walk(prepared).name))
        return self.graph.cursor(_walk_of(options))

    def next_walk(self, request: Request) -> Cursor | Leg | None:
        """Return the next window or recording, then the answer, then nothing."""
        if not request.cursor.name.startswith(_LISTEN("")):
            return None
        match self.listener.next_walk(request):
            case Leg() as leg:
                return replace(leg, walk=_LISTEN(leg.walk))
            case None:
                return self._after_recording(request)

    def _after_recording(self, request: Request) -> Leg | None:
        talk = self._talk_of(request)
        if talk is None:
            # Only what was said is asked for.
            return None
        talk.heard.append("".join(talk.stretches).strip())
        talk.stretches = []
        if talk.later:
            prepared = msgspec.structs.replace(
                talk.later.pop(0),
                request_id=request.request_id,
                params=request.prepared.params,
                root=request.prepared.root,
                retain_seconds=request.prepared.retain_seconds,
            )
            return Leg(prepared, _LISTEN(self.listener.first_walk(prepared).name))
        prepared = msgspec.structs.replace(
            request.prepared,
            token_ids=chat_ids(self._tokenizer, talk.options, talk.heard),
            page_keys=[],
            spans=[],
            inputs=[],
            context=[],
        )
        return Leg(prepared, _walk_of(talk.options))

    def component_of(self, walk: str) -> Component:
        """Return the listener, the language model or the speaker."""
        if walk in (_WRITE, _SPEAK):
            return self._answering
        if walk.startswith(_LISTEN("")):
            return self._listening[walk.removeprefix(_LISTEN(""))]
        return self.speaker.component_of(walk)

    def holds(self, predicate: str, request: Request) -> bool:
        """Tell whether a leg has its last token, which is what both ``finished`` ask."""
        return request.finish_reason is not None

    def emit(self, request: Request, node: str, token: int) -> Sequence[Emitted]:
        """Return what was heard, or for the speaker what was written."""
        talk = self._talk_of(request)
        if node in self._hearing:
            found = self.listener.emit(request, node.removeprefix(_LISTEN("")), token)
            if talk is not None:
                talk.stretches += [p.text or "" for p in found if p.name == TRANSCRIPT]
            return found
        if talk is None or request.cursor.name != _SPEAK:
            return ()
        params = request.params
        if talk.written is None:
            talk.written = Detokenizer(self._tokenizer, params.stop, stop_after=params.min_tokens)
        text = talk.written.push(() if request.finish_reason == "stop" else (token,))
        if talk.written.stopped:
            request.finish_reason = "stop"
        if request.finish_reason is not None:
            text += talk.written.finish()
        return [Emitted(name=_ANSWERED, text=text)] if text else ()

    def _talk_of(self, request: Request) -> _Talk | None:
        """Return what is kept of a request, from its first token on; ``None``: it is no chat."""
        talk = self._talks.get(request.request_id)
        if talk is None and (options := assistant_options(request.prepared)) is not None:
            talk = self._talks[request.request_id] = _Talk(options, list(options.later))
        return talk

    def forget(self, request_id: str) -> None:
        """Drop the talk of a request, and what the three models keep of it."""
        self._talks.pop(request_id, None)
        for part in (self.listener, self._answerer, self.speaker):
            part.forget(request_id)


def _walk_of(options: AssistantOptions | None) -> str:
    return _SPEAK if options is not None and options.is_spoken else _WRITE


def chat_ids(
    tokenizer: TextTokenizer, options: AssistantOptions, heard: Sequence[str]
) -> list[int]:
    """Return a chat as the language model reads it.

    Args:
        tokenizer: The language model's.
        options: The chat.
        heard: What stands for each recording in it, in order.

    Raises:
        RequestError: If the template cannot be rendered.
    """
    left = iter(heard)

    def words(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return "\n".join(part["text"] if part["type"] == "text" else next(left) for part in content)

    messages = [
        message | {"content": words(message.get("content"))} for message in options.messages
    ]
    kwargs = {"add_generation_prompt": True} | options.template_kwargs
    return tokenizer.encode(tokenizer.render_chat(messages, **kwargs), add_special_tokens=False)


def _writer(answerer: Part) -> str:
    (decoder,) = answerer.graph.nodes
    return _ANSWER(decoder)


def assistant_graph(listener: Part, answerer: Part, speaker: Part) -> Graph:
    """Return the graph of an assistant of three models, loaded or described."""
    writer, finished = _writer(answerer), _ANSWER("finished")
    write = Loop(Run(writer), until=finished)
    walks: list[tuple[str, Walk]] = [
        *_LISTEN.walks(listener),
        (_WRITE, write),
        (_SPEAK, Parallel(write, ForEach(Run(SPEAKER), _ANSWERED))),
        *speaker.graph.walks,
    ]
    return Graph(
        nodes=(*map(_LISTEN, listener.graph.nodes), writer, *speaker.graph.nodes),
        walks=tuple(walks),
        edges=(
            *_LISTEN.edges(listener),
            Edge(writer, SPEAKER, _ANSWERED, Sentences(first_chars=40)),
            *speaker.graph.edges,
        ),
        predicates=(*map(_LISTEN, listener.graph.predicates), finished),
    )


def assistant_specs(listener: Part, answerer: Part) -> tuple[NodeResourceSpec, ...]:
    """Return what an assistant's nodes need; its speaker needs nothing."""
    return (*_LISTEN.specs(listener), *_ANSWER.specs(answerer))


def joined_constants(parts: Mapping[str, Mapping[str, str] | None]) -> dict[str, str] | None:
    """Return what the KV of all parts depends on; ``None`` where that of one is unknown.

    Args:
        parts: By the parts' names.
    """
    constants: dict[str, str] = {}
    weights = []
    for name, own in parts.items():
        if own is None:
            return None
        constants |= {f"{name}.{key}": value for key, value in own.items()}
        weights.append(own["weights"])
    return {"weights": " ".join(weights), **constants}
