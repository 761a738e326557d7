"""A preprocess worker: request bodies in, prepared requests or clear errors out; loads no torch."""

import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mstar.catalog import load_prompting
from mstar.engine.output import ErrorInfo
from mstar.engine.request import PreparedRequest
from mstar.errors import MstarError, RequestError
from mstar.preprocess.drafts import require
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.processors.base import ChatTask, Task, tasks_of
from mstar.preprocess.prompt import PromptPreparer, PromptRequest, context_tokens, item_tokens
from mstar.preprocess.tokenizer import TextTokenizer
from mstar.server.child import become_child
from mstar.server.failures import ApiError
from mstar.server.logs import configure_logging
from mstar.server.media_jobs import MEDIA_ROUTES, read_job
from mstar.server.protocol import (
    ParsedRequest,
    ProtocolRules,
    in_users_words,
    parse,
    route_of,
)
from mstar.transport.channel import ChildChannel
from mstar.transport.messages import (
    Abilities,
    AnswerOptions,
    Configure,
    LoadFailed,
    MediaOptions,
    Prepare,
    Prepared,
    PrepareFailed,
    Route,
    Shutdown,
    ToWorker,
    WorkerReady,
)

# Run as a program, the module would else log as __main__, at a level that nobody set.
logger = logging.getLogger("mstar.server.worker")

_MAX_KNOWN_FIELDS = 100
_MEDIA_LIMITS = MediaLimits()
_TASKS: dict[Route, Task] = {
    "chat": "chat",
    "completion": "completion",
    "transcription": "transcription",
    "translation": "transcription",
    "speech": "speech",
    "image": "image",
}
"""What a model must be able to do for a route."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What a worker is started with."""

    model_path: str
    """Folder or file with the tokenizer, or the name of a model put together of several."""
    model_names: tuple[str, ...]
    """Names that requests may use."""
    trust_chat_template_kwargs: bool
    log_level: str
    media: MediaLimits = _MEDIA_LIMITS
    """What images and recordings may cost."""


class Worker:
    """Prepares bodies for one server.

    Args:
        tokenizer: Of the model.
        rules: What requests may do.
        processor: Of the model, where it is one for more than text.
        limits: What media may cost.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        rules: ProtocolRules,
        processor: object | None = None,
        limits: MediaLimits | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._processor = processor
        self._limits = limits
        self._preparer: PromptPreparer | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._warned: set[str] = set()

    def configure(self, message: Configure) -> None:
        """Prepare for the engine that ``message`` describes from now on."""
        facts = message.facts
        self._preparer = PromptPreparer(
            self._tokenizer,
            facts.max_model_len,
            facts.page_size,
            facts.deployment_root,
            facts.vocab_size,
            processor=self._processor,
            limits=self._limits,
        )

    def handle(self, job: Prepare) -> Prepared | PrepareFailed:
        """Return the answer to one job, whatever its body holds."""
        try:
            return self._prepare(job)
        except ApiError as error:
            return PrepareFailed(job_id=job.job_id, status=error.status, error=error.error)
        except RequestError as error:
            failure = ApiError(400, error.message, code=error.code, param=error.param)
            return PrepareFailed(job_id=job.job_id, status=400, error=failure.error)
        except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError):
            # A body must not end the worker; what it found is our mistake or the machine's, not
            # the client's.
            logger.error("request %s: %s", job.request_id, traceback.format_exc())
            info = ErrorInfo(f"preparing request {job.request_id} failed", "internal_error")
            return PrepareFailed(job_id=job.job_id, status=500, error=info)

    def render(self, parsed: ParsedRequest) -> tuple[str, list[dict[str, Any]]]:
        """Return a chat as the template writes it, and the messages as the template is given them.

        Raises:
            RequestError: If the messages are wrong.
        """
        assert self._preparer is not None, "a chat came before the engine's numbers"
        (request,) = _prompt_requests("", parsed)
        return self._preparer.render(request)

    def _prepare(self, job: Prepare) -> Prepared:
        assert self._preparer is not None, "a job came before the engine's numbers"
        route = job.route or route_of(job.body)
        try:
            if route in MEDIA_ROUTES:
                return self._prepare_media(job, self._preparer)
            return self._prepare_text(job, route, self._preparer)
        except (ApiError, RequestError) as error:
            # No other form of the body would help where the model cannot do it at all.
            if isinstance(error, RequestError) or error.status == 400:
                require(_TASKS[route], self._processor)
            raise

    def _prepare_text(self, job: Prepare, route: Route, preparer: PromptPreparer) -> Prepared:
        parsed = parse(route, job.body, self._rules)
        self._warn(parsed.unknown_fields)
        requests = _prompt_requests(job.request_id, parsed)
        try:
            prompts = [preparer.prepare(request) for request in requests]
        except RequestError as error:
            raise in_users_words(error, parsed.names) from None
        options = _options(route, parsed, prompts, self._rules.model_names[0])
        return self._prepared(job, prompts, options)

    def _prepare_media(self, job: Prepare, preparer: PromptPreparer) -> Prepared:
        asked = read_job(job, self._rules)
        self._warn(asked.unknown_fields)
        prompt = preparer.prepare(asked.request)
        return self._prepared(job, [prompt], asked.options(prompt, self._rules.model_names[0]))

    def _prepared(
        self, job: Prepare, prompts: list[PreparedRequest], options: AnswerOptions
    ) -> Prepared:
        request_ids, blobs = [], []
        for prompt in prompts:
            for place in range(options.num_choices):
                request = _choice(prompt, place)
                request_ids.append(request.request_id)
                blobs.append(self._encoder.encode(request))
        return Prepared(
            job_id=job.job_id,
            request_ids=request_ids,
            requests=blobs,
            options=options,
        )

    def _warn(self, fields: Sequence[str]) -> None:
        for name in fields:
            if name not in self._warned and len(self._warned) < _MAX_KNOWN_FIELDS:
                self._warned.add(name)
                logger.warning("requests carry the unknown field %r, which has no effect", name)


def _prompt_requests(request_id: str, parsed: ParsedRequest) -> list[PromptRequest]:
    if parsed.conversation is not None:
        return [
            PromptRequest(
                request_id=request_id,
                params=parsed.params,
                messages=parsed.conversation,
                task=ChatTask(modalities=parsed.modalities, voice=parsed.voice),
                cache_salt=parsed.cache_salt,
                retain_seconds=parsed.retain_seconds,
                template_kwargs=parsed.template_kwargs,
                add_generation_prompt=parsed.add_generation_prompt,
                continue_final_message=parsed.continue_final_message,
            )
        ]
    return [
        PromptRequest(
            request_id=f"{request_id}-p{index}" if index else request_id,
            params=parsed.params,
            text=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else prompt,
            cache_salt=parsed.cache_salt,
            retain_seconds=parsed.retain_seconds,
            add_special_tokens=parsed.add_special_tokens,
        )
        for index, prompt in enumerate(parsed.prompts)
    ]


def _choice(prompt: PreparedRequest, place: int) -> PreparedRequest:
    """Return the request of the ``place``-th choice: its own id, and its own seed."""
    if place == 0:
        return prompt
    params = prompt.params
    if params.seed is not None:
        # The same seed would give the same answer again.
        params = replace(params, seed=(params.seed + place) % 2**63)
    request_id = f"{prompt.request_id}-n{place}"
    return msgspec.structs.replace(prompt, request_id=request_id, params=params)


def _options(
    route: Route, parsed: ParsedRequest, prompts: list[PreparedRequest], model: str
) -> AnswerOptions:
    return AnswerOptions(
        route=route,
        model=model,
        stream=parsed.stream,
        include_usage=parsed.stream_options.include_usage,
        continuous_usage=parsed.stream_options.continuous_usage_stats,
        num_choices=parsed.num_choices,
        num_prompt_tokens=[len(prompt.token_ids) for prompt in prompts],
        num_top_logprobs=parsed.params.logprobs,
        stop=list(parsed.params.stop),
        stop_after=parsed.params.min_tokens,
        include_stop=parsed.include_stop,
        skip_special_tokens=parsed.skip_special_tokens,
        return_token_ids=parsed.return_token_ids,
        prompt_token_ids=(
            [prompt.token_ids for prompt in prompts] if parsed.return_token_ids else None
        ),
        num_item_tokens=[item_tokens(prompt) for prompt in prompts],
        num_context_tokens=context_tokens(prompts[0]),
        media=None if parsed.sound_format is None else MediaOptions(format=parsed.sound_format),
    )


def abilities_of(processor: object | None) -> Abilities:
    """Return what a model with this processor can be asked for; ``None`` is one of text only."""
    tasks = tasks_of(processor)
    kinds: frozenset[str] = getattr(processor, "kinds", frozenset())
    modalities: frozenset[str] = getattr(processor, "modalities", frozenset())
    reads_text = tasks - {"transcription"}
    heard = {"audio"} if "transcription" in tasks else set()
    made = {"speech": "audio", "image": "image"}
    writes_text = tasks - made.keys()
    return Abilities(
        tasks=tuple(sorted(tasks)),
        input_modalities=(*(["text"] if reads_text else []), *sorted(kinds | heard)),
        output_modalities=(
            *(["text"] if writes_text else []),
            *sorted((modalities - {"text"}) | {made[task] for task in tasks & made.keys()}),
        ),
    )


def main() -> None:
    """Run as the child that the standard input describes."""
    endpoint, settings = become_child(WorkerSettings)
    configure_logging(settings.log_level)
    channel: ChildChannel[ToWorker] = ChildChannel(endpoint, ToWorker)  # type: ignore[arg-type]
    try:
        tokenizer, processor = load_prompting(settings.model_path)
    except MstarError as error:
        channel.send(LoadFailed(error=str(error), is_users_error=True))
        channel.close()
        return
    rules = ProtocolRules(
        model_names=settings.model_names,
        trust_chat_template_kwargs=settings.trust_chat_template_kwargs,
    )
    worker = Worker(tokenizer, rules, processor, settings.media)
    channel.send(WorkerReady(abilities=abilities_of(processor)))
    while True:
        match channel.receive(timeout=None):
            case Configure() as message:
                worker.configure(message)
            case Prepare() as job:
                channel.send(worker.handle(job))
            case Shutdown():
                break
    channel.close()


if __name__ == "__main__":
    main()
