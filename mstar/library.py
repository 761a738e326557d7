"""mstar in process: load a model and generate, without a server."""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from mstar.calls import Prompt, as_params, as_prompt, as_prompts, as_task
from mstar.catalog import load_prompting, locate, open_engine
from mstar.engine.output import Emitted, EngineStats, FinishReason, RequestOutput, TokenLogprobs
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import MstarError, RequestError
from mstar.preprocess.answer_text import AnswerText
from mstar.preprocess.detokenizer import Detokenizer
from mstar.preprocess.media.content import sound_source
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.media.types import Pixels, Samples
from mstar.preprocess.processors.base import ChatTask, ImageTask, SpeechTask, TranscriptionTask
from mstar.preprocess.prompt import PromptPreparer, PromptRequest, context_tokens, item_tokens
from mstar.preprocess.results import (
    Sound,
    Transcript,
    joined_sound,
    pictures_of,
    sounds_of,
    transcript_of,
)
from mstar.turns import Turns


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What one prompt was answered with."""

    text: str
    token_ids: tuple[int, ...]
    """All generated ids, the one that ended the answer included."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """One for each id, where they were asked for."""
    finish_reason: FinishReason
    num_prompt_tokens: int
    """Places of recordings that were listened to included."""
    num_cached_tokens: int
    """Prompt tokens that were reused instead of computed."""
    num_item_tokens: Mapping[str, int]
    """Prompt tokens that are images, audio or video, by kind."""
    emitted: tuple[Emitted, ...] = ()
    """What was given beside tokens."""

    @property
    def sound(self) -> Sound | None:
        """What the answer sounds like; ``None``: it was not spoken."""
        return joined_sound(sounds_of(self.emitted))


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What an answer has more than before."""

    text: str
    emitted: tuple[Emitted, ...] = ()
    """What was given beside tokens: sound, or what was heard."""


class _Answer:
    """One answer while it comes in.

    Args:
        text: Follows its text; ``None``: its tokens are no text.
        request: What it is an answer to.
    """

    def __init__(
        self,
        text: AnswerText | None,
        request: PreparedRequest,
    ) -> None:
        self._text = text
        self._num_item_tokens = item_tokens(request)
        self._num_context_tokens = context_tokens(request)
        self._emitted: list[Emitted] = []
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last: RequestOutput | None = None
        self._reason: FinishReason | None = None
        self._error: MstarError | None = None

    def raise_error(self) -> None:
        """Raise what the request failed with, if it did."""
        if self._error is not None:
            raise self._error

    @property
    def is_done(self) -> bool:
        return self._reason is not None

    @property
    def is_cut(self) -> bool:
        """Whether a stop string ended it before the engine did."""
        return self._text is not None and self._text.is_cut

    def push(self, output: RequestOutput) -> AnswerPiece:
        """Take one output and return what it adds, text as far as it is certain."""
        self._last = output
        if output.error is not None:
            # Raised where this answer is asked for: the others of the same step go on.
            self._error = MstarError(f"request {output.request_id} failed: {output.error.message}")
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs or ()
        self._emitted += output.emitted
        if self._text is None:
            self._reason = output.finish_reason
            return AnswerPiece("", tuple(output.emitted))
        delta = self._text.push(output)
        self._reason = delta.finish_reason
        self._pieces.append(delta.text)
        return AnswerPiece(delta.text, tuple(output.emitted))

    def completion(self) -> Completion:
        """Return the whole answer."""
        self.raise_error()
        assert self._last is not None
        assert self._reason is not None
        return Completion(
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs) if self._logprobs else None,
            finish_reason=self._reason,
            num_prompt_tokens=self._last.num_prompt_tokens + self._num_context_tokens,
            num_cached_tokens=self._last.num_cached_tokens,
            num_item_tokens=self._num_item_tokens,
            emitted=tuple(self._emitted),
        )


class TextStream(Iterator[str]):
    """Pieces of one answer's text as they come; afterwards the whole answer.

    Closing it early, leaving its ``with`` block or forgetting it ends the request.
    """

    def __init__(self, engine: "Engine", request_id: str, answer: _Answer) -> None:
        self._engine = engine
        self._request_id = request_id
        self._answer = answer
        self._is_closed = False

    def __next__(self) -> str:
        for piece in self.pieces():
            if piece.text:
                return piece.text
        raise StopIteration

    def pieces(self) -> Iterator[AnswerPiece]:
        """Yield the rest of the answer with what it has beside text, as it comes."""
        while (piece := self._engine._advance(self._request_id)) is not None:
            yield piece
        was_open = not self._is_closed
        self.close()
        self._answer.raise_error()
        if was_open and not self._answer.is_done:
            raise RuntimeError("the engine was closed in the middle of this answer")

    @property
    def completion(self) -> Completion:
        """The answer, once the stream is at its end."""
        if not self._answer.is_done:
            state = "was closed before its end" if self._is_closed else "is not at its end"
            raise RuntimeError(f"the stream {state}; read all of it first")
        return self._answer.completion()

    def close(self) -> None:
        """End the request if it is still running."""
        if not self._is_closed:
            self._is_closed = True
            self._engine._drop(self._request_id)

    def __del__(self) -> None:
        # Whoever leaves a loop early and forgets the stream would else leave its request running.
        # Garbage may be collected in the middle of a step, so the engine does it later.
        if not self._is_closed:
            self._engine._forgotten.append(self._request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Engine:
    """A loaded model that generates.

    Threads may share it: their requests run together, and each drives the engine in turn. A process
    that is forked off cannot use it.

    ::

        with Engine("smollm2-135m") as engine:
            for completion in engine.generate(["The sky is", "Grass is"]):
                print(completion.text)

    Args:
        model: A folder, a GGUF file, a built-in name or a Hugging Face id.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        load_format: ``auto``, or ``dummy`` to draw weights for the model's config, for measuring.
        deployment: The engine's numbers; its dtype is set from ``dtype``.
        limits: What images and recordings may cost.
        progress: Called with layers loaded and layers in all.

    Raises:
        ModelNotFoundError: If the name leads nowhere.
        WeightsError: If the checkpoint is broken.
        UnsupportedError: If the architecture is not built.
        ConfigError: If the numbers do not fit.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str = "auto",
        load_format: str = "auto",
        deployment: Deployment | None = None,
        limits: MediaLimits | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.model = model = os.fspath(model)
        """What it was asked for by."""
        deployment = deployment or Deployment()
        self.core = open_engine(
            model, deployment, dtype=dtype, load_format=load_format, progress=progress
        )
        loaded = self.core.model
        self.tokenizer, processor = load_prompting(locate(model))
        self._preparer = PromptPreparer(
            self.tokenizer,
            self.core.deployment.max_model_len,
            self.core.deployment.page_size,
            self.core.root,
            loaded.vocab_size,
            processor=processor,
            limits=limits,
        )
        self._answers: dict[str, _Answer] = {}
        self._pieces: dict[str, list[AnswerPiece]] = {}
        """Of answers: what nobody has read yet."""
        self._forgotten: list[str] = []
        """Requests whose streams are gone."""
        self._is_closed = False
        self._late_close: float | None = None
        """Timeout of a ``close`` that came in the middle of a turn."""
        self._numbers = itertools.count()
        self._turns = Turns()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        numbers = self.core.deployment
        state = ", closed" if self._is_closed else ""
        return f"<Engine {self.model!r}: {numbers.dtype} on {numbers.device}{state}>"

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Keep other threads out of the block.

        Raises:
            RuntimeError: If this is another process than the one that the engine was made in, or
                the engine is at work in this thread.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"the engine was made in process {self._pid}, and process {os.getpid()} is a fork "
                "of it, which has none of its threads; make an engine here, or start processes by "
                "'spawn'"
            )
        if self._turns.is_mine:
            raise RuntimeError(
                "the engine is at work in this thread, and was called out of what interrupted it, "
                "as a signal's handler: have that raise an exception, and call where it is caught"
            )
        with self._turns:
            try:
                yield
            finally:
                if self._late_close is not None:
                    self._close(self._late_close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        retain_seconds: float = 0.0,
    ) -> list[Completion]:
        """Return an answer for each prompt, in their order; all run together.

        Args:
            prompts: One prompt, or several.
            params: For all prompts, or one for each.
            cache_salt: Only requests with the same salt reuse each other's computation.
            retain_seconds: How long the prompts' pages are protected from eviction after their last
                use; ``inf``: until a reset. ``Deployment.retention_share`` is the budget for it.

        Raises:
            RequestError: If a prompt or a parameter is wrong; then none runs.
        """
        many = as_prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise RequestError(
                f"there are {len(many)} prompts and {len(each)} params; give one for each, or one "
                "for all",
                param="params",
            )
        requests = [
            self._prompt_request(prompt, own, cache_salt, retain_seconds)
            for prompt, own in zip(many, each, strict=True)
        ]
        return self._complete(requests)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        task: ChatTask | None = None,
        cache_salt: str | None = None,
        retain_seconds: float = 0.0,
    ) -> Completion:
        """Return the answer to a conversation.

        Args:
            messages: Mappings with ``role`` and ``content``, which is a text or a list of parts:
                ``{"type": "text", "text": …}``, ``{"type": "image", "image": …}`` (bytes of a file,
                an image of PIL, a uint8 array ``[height, width, 3]`` or a data URL) and
                ``{"type": "audio", "audio": …}`` (bytes of a file, or float samples with ``rate``
                beside them), as far as the model takes them; OpenAI's parts as well.
            params: How to sample.
            task: Whether the answer is to be spoken, and by whom.
            cache_salt: Only requests with the same salt reuse each other's computation.
            retain_seconds: As for ``generate``.
        """
        request = self._chat_request(messages, params, cache_salt, retain_seconds)
        return self._complete([replace(request, task=as_task(task, ChatTask))])[0]

    def transcribe(
        self,
        audio: bytes | Samples,
        params: SamplingParams | None = None,
        *,
        rate: int | None = None,
        task: TranscriptionTask | None = None,
        cache_salt: str | None = None,
    ) -> Transcript:
        """Return a recording as text.

        Args:
            audio: A file's bytes, or samples.
            params: How to sample; by default the likeliest words.
            rate: Of samples: how many a second.
            task: Language, timestamps and what was said before.
            cache_salt: As for ``generate``.
        """
        request = PromptRequest(
            request_id=self._next_id(),
            params=SamplingParams(temperature=0.0) if params is None else as_params(params),
            audio=sound_source(audio, rate, "audio"),
            task=as_task(task or TranscriptionTask(), TranscriptionTask),
            cache_salt=cache_salt,
        )
        return transcript_of(self._complete([request])[0].emitted)

    def speak(self, text: str, task: SpeechTask | None = None) -> Sound:
        """Return a text as it sounds.

        Args:
            text: What is to be said.
            task: Voice and speed.
        """
        request = PromptRequest(
            request_id=self._next_id(),
            params=SamplingParams(),
            text=text,
            task=as_task(task or SpeechTask(), SpeechTask),
        )
        sound = self._complete([request])[0].sound
        if sound is None:
            raise RequestError("there is nothing to be heard of this text", param="input")
        return sound

    def draw(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        *,
        task: ImageTask | None = None,
        cache_salt: str | None = None,
    ) -> Pixels:
        """Return a picture, uint8 ``[height, width, 3]``.

        Args:
            prompt: What is to be seen.
            params: How to sample.
            task: Size, and how closely the prompt is followed.
            cache_salt: As for ``generate``.
        """
        request = PromptRequest(
            request_id=self._next_id(),
            params=as_params(params),
            text=prompt,
            task=as_task(task or ImageTask(), ImageTask),
            cache_salt=cache_salt,
        )
        return pictures_of(self._complete([request])[0].emitted)[0]

    def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        task: ChatTask | None = None,
        cache_salt: str | None = None,
        retain_seconds: float = 0.0,
    ) -> TextStream:
        """Return the answer to a prompt or a conversation, piece by piece.

        Arguments are those of ``generate`` and ``chat``.
        """
        if (prompt is None) == (messages is None):
            raise RequestError("give either a prompt or messages", param="prompt")
        if messages is not None:
            request = self._chat_request(messages, params, cache_salt, retain_seconds)
        else:
            assert prompt is not None
            request = self._prompt_request(as_prompt(prompt), params, cache_salt, retain_seconds)
        request = replace(request, task=as_task(task, ChatTask))
        (answer,) = self._start([request])
        return TextStream(self, request.request_id, answer)

    def stats(self) -> EngineStats:
        """Return the engine's gauges and counters."""
        with self._turn():
            self._drop_forgotten()
            return self.core.stats()

    def reset_prefix_cache(self) -> int:
        """Forget everything kept for reuse, in every tier; returns how many pages went."""
        with self._turn():
            return self.core.reset_prefix_cache()

    def close(self, timeout: float = 30.0) -> None:
        """End what runs and put pages that are kept for reuse on disk, where there is a disk tier.

        Afterwards nothing can be generated any more; closing twice does nothing.

        Args:
            timeout: Seconds that the disk may take; what is not written by then is dropped.
        """
        if self._turns.is_mine:
            # A signal's handler says so; what it interrupted comes to its end first.
            self._late_close = timeout
            return
        with self._turn():
            self._close(timeout)

    def _close(self, timeout: float) -> None:
        if not self._is_closed:
            self._is_closed = True
            for request_id in list(self._answers):
                self._end(request_id)
            self.core.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_id(self) -> str:
        return f"request-{next(self._numbers)}"

    def _prompt_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        cache_salt: str | None,
        retain_seconds: float,
    ) -> PromptRequest:
        return PromptRequest(
            request_id=self._next_id(),
            params=as_params(params),
            text=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else prompt,
            cache_salt=cache_salt,
            retain_seconds=retain_seconds,
        )

    def _chat_request(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None,
        cache_salt: str | None,
        retain_seconds: float,
    ) -> PromptRequest:
        return PromptRequest(
            request_id=self._next_id(),
            params=as_params(params),
            messages=messages,
            cache_salt=cache_salt,
            retain_seconds=retain_seconds,
        )

    def _complete(self, requests: Sequence[PromptRequest]) -> list[Completion]:
        answers = self._start(requests)
        try:
            while not all(answer.is_done for answer in answers):
                self._step()
        finally:
            for request in requests:
                self._drop(request.request_id)
        return [answer.completion() for answer in answers]

    def _start(self, requests: Sequence[PromptRequest]) -> list[_Answer]:
        """Queue all requests, or none if one is wrong; returns their answers."""
        with self._turn():
            self._check_open()
            self._drop_forgotten()
            prepared = [self._preparer.prepare(request) for request in requests]
            answers = []
            try:
                for request, asked in zip(prepared, requests, strict=True):
                    self.core.add_request(request)
                    text = self._text_of(asked.task, request.params)
                    answers.append(_Answer(text, request))
                    self._answers[request.request_id] = answers[-1]
                    self._pieces[request.request_id] = []
            except Exception:
                for request in prepared:
                    self._end(request.request_id)
                raise
        return answers

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the engine is closed; make another one")

    def _text_of(self, task: object, params: SamplingParams) -> AnswerText | None:
        """Return what follows an answer's text; ``None``: its tokens are no text."""
        if task is not None and not isinstance(task, ChatTask):
            return None
        detokenizer = Detokenizer(self.tokenizer, params.stop, stop_after=params.min_tokens)
        is_spoken = task is not None and "audio" in task.modalities
        return AnswerText(detokenizer, is_spoken=is_spoken)

    def _step(self) -> None:
        with self._turn():
            self._check_open()
            self._drop_forgotten()
            for output in self.core.step():
                answer = self._answers.get(output.request_id)
                if answer is None:
                    continue
                piece = answer.push(output)
                if piece.text or piece.emitted:
                    self._pieces[output.request_id].append(piece)
                if answer.is_cut:
                    self.core.abort(output.request_id)

    def _advance(self, request_id: str) -> AnswerPiece | None:
        """Run until there is more of one answer, and return it; ``None`` at the answer's end."""
        answer, pieces = self._answers.get(request_id), self._pieces.get(request_id)
        if answer is None or pieces is None:
            return None
        while not pieces and not answer.is_done:
            self._step()
        if not pieces:
            return None
        with self._turn():
            text = "".join(piece.text for piece in pieces)
            emitted = tuple(one for piece in pieces for one in piece.emitted)
            pieces.clear()
        return AnswerPiece(text, emitted)

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            self._end(self._forgotten.pop())

    def _drop(self, request_id: str) -> None:
        """End a request and forget its answer."""
        with self._turn():
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        """Do the same in a turn."""
        self.core.abort(request_id)
        self._answers.pop(request_id, None)
        self._pieces.pop(request_id, None)
