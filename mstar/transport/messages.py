"""The typed messages that mstar's processes send each other, as tagged MessagePack maps.

Prepared requests travel as ready-made MessagePack blobs: the API process passes them from a worker
to the engine without reading them.
"""

from typing import Literal

import msgspec

from mstar.engine.output import EngineStats, ErrorInfo, RequestOutput
from mstar.engine.resources.kv.explain import ReuseReport

Route = Literal["chat", "completion", "transcription", "translation", "speech", "image"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages; the tag names the class on the wire."""


class EventSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's KV events can be read."""

    endpoint: str
    """Address to subscribe at, as the engine has bound it."""
    replay_endpoint: str | None
    """Address to ask for replays; ``None``: there are none."""
    topic: str


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the other processes must know of a loaded engine."""

    deployment_root: bytes | None
    """Deployment part of the root key; ``None``: nothing is shared between requests."""
    root_constants: dict[str, str]
    """What the root key is made of, by name; known also where nothing is shared."""
    root_missing: list[str] = []
    """Why nothing is shared, in words; empty: the cache is open."""
    page_size: int
    """Slots of one KV page, in tokens."""
    num_pages: int
    """KV pages that requests can hold together."""
    max_model_len: int
    """Prompt and output of one request together, in tokens, at most."""
    vocab_size: int
    """Ids are below this."""
    max_num_seqs: int
    """Requests that run at once, at most."""
    max_num_batched_tokens: int
    """Tokens of one step, at most."""
    dtype: str
    """Name of the model's torch dtype."""
    device: str
    """Where the model runs."""
    model_name: str
    """As the checkpoint was named."""
    load_seconds: float
    """From the start of the process to ready."""
    event_sources: list[EventSource] = []
    """Where its KV events are; empty: it publishes none."""
    rank_pids: list[int] = []
    """Processes of the ranks beside the engine's own."""


class MediaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How sound, pictures and transcripts of an answer are to be shaped."""

    format: str
    """Of sound or pictures, or of the transcript."""
    is_event_stream: bool = False
    """Sound: as server-sent events instead of its bytes."""
    seconds: float = 0.0
    """Length of the recording that is written down."""
    granularities: list[str] = []
    """``segment`` and ``word``: what of a transcript is timed."""
    num_tokens: int = 0
    """Tokens that one picture is made of."""


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer to one HTTP request is to be shaped."""

    route: Route
    model: str
    """Name that the answer carries."""
    stream: bool
    include_usage: bool
    """Streaming: one last chunk with the usage."""
    continuous_usage: bool
    """Streaming: the usage so far on every chunk."""
    num_choices: int
    """Choices for each prompt."""
    num_prompt_tokens: list[int]
    """Length of each prompt, in tokens."""
    num_top_logprobs: int | None
    """Alternatives to report for each token; ``None``: no log-probabilities at all."""
    stop: list[str]
    stop_after: int = 0
    """Ids at the beginning in whose text no stop string is looked for."""
    include_stop: bool
    """The stop string that ended the output stays part of it."""
    skip_special_tokens: bool
    return_token_ids: bool
    prompt_token_ids: list[list[int]] | None
    """Set where ``return_token_ids`` is."""
    num_item_tokens: list[dict[str, int]] = []
    """Of each prompt: its tokens that are images, audio or video, by kind."""
    num_context_tokens: int = 0
    """Tokens that are attended to from outside the first prompt; the answer's own may follow."""
    media: MediaOptions | None = None
    """Set where the answer is more than text."""


# From the API process to a preprocess worker.


class Configure(Message, frozen=True, kw_only=True, tag="configure"):
    """The engine is loaded: these numbers hold from now on."""

    facts: EngineFacts


class Prepare(Message, frozen=True, kw_only=True, tag="prepare"):
    """Turn one request body into prepared requests."""

    job_id: int
    request_id: str
    """Ids of the prepared requests begin with this."""
    route: Route | None
    """``None``: the one that the body's fields are for."""
    body: bytes
    """The HTTP body as it came."""
    content_type: str = ""
    """Of the body, where it is no JSON."""


# From a preprocess worker to the API process.


class Abilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a model can be asked for."""

    tasks: tuple[str, ...] = ("chat", "completion")
    input_modalities: tuple[str, ...] = ("text",)
    output_modalities: tuple[str, ...] = ("text",)


class WorkerReady(Message, frozen=True, kw_only=True, tag="worker_ready"):
    """The worker has loaded its tokenizer."""

    abilities: Abilities = Abilities()


class Prepared(Message, frozen=True, kw_only=True, tag="prepared"):
    """A body became requests, all of them valid."""

    job_id: int
    request_ids: list[str]
    """One for each choice of each prompt, prompt by prompt."""
    requests: list[bytes]
    """A ``PreparedRequest`` in MessagePack for each id."""
    options: AnswerOptions


class PrepareFailed(Message, frozen=True, kw_only=True, tag="prepare_failed"):
    """A body is wrong."""

    job_id: int
    status: int
    """HTTP status."""
    error: ErrorInfo


# From the API process to the engine.


class AddRequests(Message, frozen=True, kw_only=True, tag="add"):
    """Queue these requests; each is answered by an acceptance or a rejection."""

    requests: list[bytes]
    """A ``PreparedRequest`` in MessagePack each."""


class AbortRequests(Message, frozen=True, kw_only=True, tag="abort"):
    """Forget these requests and give back what they hold; unknown ids are ignored."""

    request_ids: list[str]


class Question(Message, frozen=True, kw_only=True):
    """Base of what wants one answer with the same number."""

    call_id: int


class ExplainPrompt(Question, frozen=True, kw_only=True, tag="explain_prompt"):
    """Ask how much of a prompt could be reused now; it is not run."""

    request: bytes
    """A ``PreparedRequest`` in MessagePack."""


class ExplainRequest(Question, frozen=True, kw_only=True, tag="explain_request"):
    """Ask what a request that started lately could reuse then."""

    request_id: str


class ResetCache(Question, frozen=True, kw_only=True, tag="reset_cache"):
    """Forget everything kept for reuse, in every tier."""


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    """Ask for a sign of life."""


# From the engine to the API process.


class LoadProgress(Message, frozen=True, kw_only=True, tag="load_progress"):
    """How far loading is."""

    stage: str
    fraction: float
    """Between 0 and 1."""


class EngineReady(Message, frozen=True, kw_only=True, tag="engine_ready"):
    """The engine takes requests from now on."""

    facts: EngineFacts


class StepDone(Message, frozen=True, kw_only=True, tag="step_done"):
    """What happened since the last message, in this order."""

    accepted: list[str] = []
    """Ids that are queued now."""
    rejected: list[tuple[str, ErrorInfo]] = []
    """Ids that can never run, with the reason."""
    outputs: list[RequestOutput] = []
    stats: EngineStats | None = None


class Answer(Message, frozen=True, kw_only=True):
    """Base of the answers to questions."""

    call_id: int


class Explained(Answer, frozen=True, kw_only=True, tag="explained"):
    """Answers both kinds of explaining."""

    report: ReuseReport | None
    """``None``: nothing is known of the request."""


class CacheReset(Answer, frozen=True, kw_only=True, tag="cache_reset"):
    """Everything kept for reuse is gone."""

    num_pages: int
    """Pages that went, each tier's by themselves."""


STORAGE_CODE = "storage_error"
"""Code of a question that a store failed."""


class Refused(Answer, frozen=True, kw_only=True, tag="refused"):
    """A question that asked for something impossible."""

    error: ErrorInfo


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    """A sign of life."""


# Both ways.


class LoadFailed(Message, frozen=True, kw_only=True, tag="load_failed"):
    """The process cannot start and ends."""

    error: str
    is_users_error: bool
    """True where trying again would fail in the same way."""


class Shutdown(Message, frozen=True, kw_only=True, tag="shutdown"):
    """End, after the message in hand."""

    grace: float = 0.0
    """Time for putting away what is to outlive the process, in seconds."""


ToWorker = Configure | Prepare | Shutdown
FromWorker = WorkerReady | Prepared | PrepareFailed | LoadFailed
ToEngine = (
    AddRequests | AbortRequests | ExplainPrompt | ExplainRequest | ResetCache | Ping | Shutdown
)
FromEngine = (
    LoadProgress | EngineReady | StepDone | Explained | CacheReset | Refused | Pong | LoadFailed
)
