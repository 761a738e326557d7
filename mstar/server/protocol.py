"""The bodies of OpenAI-style requests: their fields, and what is wrong with them.

Numbers are checked where they are used (``SamplingParams``); a field that would change the answer
and is not served is refused, never ignored.
"""

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import RequestError
from mstar.server.failures import ApiError, clip
from mstar.transport.messages import Route

MAX_CHOICES = 128
"""Choices of one HTTP request: prompts times ``n``."""
MAX_TOKEN_ENTRIES = 2**18
"""Entries of ``logit_bias`` and ``stop_token_ids``, times choices: each choice carries its own."""
DEFAULT_COMPLETION_TOKENS = 16
DEFAULT_TTL = "5m"
"""How long an ephemeral prompt stays that does not say so."""
_MAX_SLIPS, _MAX_SLIP_LEN = 16, 48
"""Unknown fields that may be slips, and characters of one."""
_TTL = re.compile(r"([0-9]{1,9})([smh])")
_TTL_UNITS = {"s": 1, "m": 60, "h": 3600}
_MAX_TTL = 365 * 24 * 3600

STREAMED_FORMATS = ("pcm16", "pcm", "wav")
"""Formats of sound that go out piece by piece."""
SOUND_FORMATS = ("wav", "pcm16", "pcm", "flac", "mp3", "opus")

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation; what a template may want beside is passed on."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CacheControl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How long a prompt's pages should stay."""

    type: str
    ttl: str | float | None = None


class _CommonRequest(msgspec.Struct, kw_only=True):
    """The fields that both routes have; ``None`` means left out."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    cache_control: CacheControl | None = None
    return_token_ids: bool | None = None


class ChatAudio(msgspec.Struct, kw_only=True):
    """How an answer is to be spoken."""

    voice: str | dict[str, Any] | None = None
    format: str = "wav"


class ChatRequest(_CommonRequest, kw_only=True):
    """Body of ``/v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: ChatAudio | None = None


class CompletionRequest(_CommonRequest, kw_only=True):
    """Body of ``/v1/completions``."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A body whose fields are all of the right type and, by themselves, in range."""

    conversation: list[dict[str, Any]] | None
    """Messages as chat templates want them; ``None`` for completions."""
    prompts: list[str | list[int]]
    """Texts or ids; empty for chat."""
    params: SamplingParams
    num_choices: int
    stream: bool
    stream_options: StreamOptions
    cache_salt: str | None
    retain_seconds: float
    """How long the prompt's pages are protected from eviction; ``inf``: until a reset."""
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: Mapping[str, Any]
    add_special_tokens: bool
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool
    modalities: frozenset[str]
    """What the answer is to consist of: ``text``, ``audio``."""
    voice: str | None
    sound_format: str | None
    """Of the answer's sound; ``None``: it is not spoken."""
    names: Mapping[str, str]
    """Fields that the user wrote under another name, by the engine's name."""
    unknown_fields: list[str]
    """Fields that nobody here knows; they changed nothing."""


@dataclass(frozen=True, kw_only=True)
class ProtocolRules:
    """What a server lets requests do."""

    model_names: tuple[str, ...]
    trust_chat_template_kwargs: bool = False


# Harmless without an effect: they are about accounts, telemetry or things that are off anyway.
_IGNORED = frozenset(
    {"store", "metadata", "service_tier", "parallel_tool_calls", "session_id", "request_id"}
    | {
        "prompt_cache_key",
        "safety_identifier",
        "user_id",
        "detokenize",
        "spaces_between_special_tokens",
    }
)
# Fields that change the answer and are not served, with the values that ask for nothing.
_UNSERVED: dict[str, tuple[object, ...]] = {
    "tools": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prediction": (),
    "prompt_logprobs": (0, False),
    "truncate_prompt_tokens": (),
    "mm_processor_kwargs": ({},),
    "chat_template": (),
    "documents": ([],),
    "priority": (0,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    # Other servers' words.
    "allowed_token_ids": (),
    "bad_words_ids": ([],),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "ebnf": (),
    "grammar": ("",),
    "json_schema": (),
    "lora_path": (),
    "mirostat": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "regex": (),
    "stop_regex": (),
    "structural_tag": (),
    "typical_p": (1, 1.0),
    "vllm_xargs": ({},),
    "xtc_probability": (0, 0.0),
}
# What other servers call fields that are served.
_OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}


def parse(route: Route, body: bytes, rules: ProtocolRules) -> ParsedRequest:
    """Return the request that ``body`` holds.

    Raises:
        ApiError: If the body is no JSON, a field has the wrong type or is not served, or the model
            is unknown.
        RequestError: If a sampling value is out of its range.
    """
    fields = json_fields(body)
    unserved(fields, _UNSERVED)
    kind: type[ChatRequest | CompletionRequest]
    kind = ChatRequest if route == "chat" else CompletionRequest
    request: ChatRequest | CompletionRequest
    unknown = unknown_of(fields, {*kind.__struct_fields__, *_IGNORED, *_UNSERVED})
    try:
        request = msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise wrong_type(error) from None
    check_model(request.model, rules.model_names)
    if request.stream_options is not None and not request.stream:
        raise _bad("stream_options needs stream to be true", "stream_options")
    conversation: list[dict[str, Any]] | None = None
    prompts: list[str | list[int]] = []
    template_kwargs: Mapping[str, Any] = {}
    is_continued, is_opened = False, True
    if isinstance(request, ChatRequest):
        conversation = _conversation(request.messages)
        is_continued = bool(request.continue_final_message)
        is_opened = not is_continued
        if request.add_generation_prompt is not None:
            is_opened = request.add_generation_prompt
        if is_opened and is_continued:
            message = "add_generation_prompt and continue_final_message cannot both be true"
            raise _bad(message, "continue_final_message")
        template_kwargs = request.chat_template_kwargs or {}
        if template_kwargs and not rules.trust_chat_template_kwargs:
            raise _bad(
                "chat_template_kwargs are off; the server needs --trust-request-chat-template",
                "chat_template_kwargs",
                "unsupported_parameter",
            )
    else:
        prompts = _prompts(request.prompt)
    num_choices = 1 if request.n is None else request.n
    if not 1 <= num_choices * max(1, len(prompts)) <= MAX_CHOICES or num_choices < 1:
        raise _bad(
            f"n={num_choices} for {max(1, len(prompts))} prompt(s); n must be at least 1, and "
            f"prompts times n at most {MAX_CHOICES}",
            "n",
        )
    params = _params(request)
    _check_entries(params, num_choices * max(1, len(prompts)))
    return ParsedRequest(
        conversation=conversation,
        prompts=prompts,
        params=params,
        num_choices=num_choices,
        stream=bool(request.stream),
        stream_options=request.stream_options or StreamOptions(),
        cache_salt=request.cache_salt,
        retain_seconds=_retain_seconds(request.cache_control),
        add_generation_prompt=is_opened,
        continue_final_message=is_continued,
        template_kwargs=template_kwargs,
        add_special_tokens=request.add_special_tokens is not False,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        return_token_ids=bool(request.return_token_ids),
        **_sound(request),
        names=_names(request),
        unknown_fields=unknown,
    )


def route_of(body: bytes) -> Route:
    """Return the route that a body is for, by its fields.

    Raises:
        ApiError: If it is for none, or for both.
    """
    fields = json_fields(body)
    if ("messages" in fields) == ("prompt" in fields):
        which = "both" if "prompt" in fields else "neither"
        raise _bad(
            f"the body has {which} of messages and prompt; a chat has the one, a completion the "
            "other",
            "messages",
        )
    return "chat" if "messages" in fields else "completion"


def request_schema(route: Route) -> dict[str, Any]:
    """Return the JSON schema of a route's body."""
    return schema_of(ChatRequest if route == "chat" else CompletionRequest)


def schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of a body, with nothing that refers elsewhere."""
    (schema,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    inlined = _inline(schema, parts)
    assert isinstance(inlined, dict)
    return inlined


def _inline(node: object, parts: Mapping[str, Any]) -> object:
    """Return ``node`` with every reference replaced by what it refers to."""
    if isinstance(node, list):
        return [_inline(item, parts) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(parts[str(node["$ref"]).rsplit("/", 1)[-1]], parts)
    return {key: _inline(value, parts) for key, value in node.items()}


def _bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def json_fields(body: bytes) -> dict[str, Any]:
    """Return a body's fields.

    Raises:
        ApiError: If it is no JSON object.
    """
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise _bad(
            f"the body is not valid JSON: {clip(str(error), 200)}", None, "invalid_json"
        ) from None
    except UnicodeDecodeError:
        raise _bad("the body is not valid UTF-8", None, "invalid_json") from None
    except RecursionError:
        raise _bad("the body is nested too deeply", None, "invalid_json") from None
    if not isinstance(fields, dict):
        raise _bad("the body must be a JSON object", None, "invalid_json")
    return fields


def unserved(fields: Mapping[str, Any], table: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse fields that ask for something that is not served.

    Args:
        fields: The body.
        table: The fields, with the values that ask for nothing.

    Raises:
        ApiError: Naming the field.
    """
    for name, neutral in table.items():
        value = fields.get(name)
        if value is None or any(type(value) is type(n) and value == n for n in neutral):
            continue
        if name == "tools" and value == []:
            raise _bad("tools is an empty list; leave it out", name)
        if name in ("tool_choice", "function_call") and not fields.get("tools"):
            raise _bad(f"{name} without tools; leave it out", name)
        raise _bad(f"{name} is not supported by this server", name, "unsupported_parameter")
    for name, own in _OTHER_NAMES.items():
        if fields.get(name) is not None:
            raise _bad(f"{name} is called {own} here", name, "unsupported_parameter")


def unknown_of(fields: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return the fields that nobody here knows.

    Raises:
        ApiError: If one of them is plainly meant to be another.
    """
    unknown = [name for name in fields if name not in known]
    # Whoever sends many, or long ones, makes no slips, and comparing takes its time.
    for name in [name for name in unknown[:_MAX_SLIPS] if len(name) <= _MAX_SLIP_LEN]:
        if nearest := difflib.get_close_matches(name, known, 1, 0.85):
            raise _bad(
                f"there is no field {clip(name, 60)!r}; did you mean {nearest[0]!r}?",
                clip(name, 60),
                "unknown_parameter",
            )
    return [clip(name, 64) for name in unknown]


_AT = re.compile(r"^(?P<what>.*?) - at `(?P<where>.*)`$", re.DOTALL)
_PATH = re.compile(r"\$\.?|\[\.\.\.\]|^key` in `")


def wrong_type(error: msgspec.ValidationError) -> ApiError:
    """Return msgspec's complaint (which never repeats the input's values) with its field."""
    text = str(error)
    found = _AT.match(text)
    if found is None:
        missing = re.search(r"missing required field `(\w+)`", text)
        return _bad(clip(text, 300), missing[1] if missing else None, "invalid_type")
    where = _PATH.sub("", found["where"]).strip(".")
    missing = re.search(r"missing required field `(\w+)`", found["what"])
    if missing:
        where = f"{where}.{missing[1]}".strip(".")
    message = f"{clip(found['what'], 300)} (in {clip(where, 100)})" if where else found["what"]
    if where.endswith(".role"):
        message += f"; roles are {', '.join(get_args(Role))}"
    return _bad(message, re.split(r"[.\[]", where)[0] or None, "invalid_type")


def check_model(name: str | None, known: Sequence[str]) -> None:
    """Verify the name of the model.

    Raises:
        ApiError: If it is not served here.
    """
    if name and name not in known:
        raise ApiError(
            404,
            f"the model {clip(name, 100)!r} is not served here; known: {', '.join(known)}",
            code="model_not_found",
            param="model",
        )


def _conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    if not messages:
        raise _bad("messages is empty; give at least one message", "messages")
    return [_message(message, index) for index, message in enumerate(messages)]


def _message(message: ChatMessage, index: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        name: value
        for name in ("name", "tool_calls", "tool_call_id", "reasoning_content")
        if (value := getattr(message, name)) is not None
    }
    # `developer` is the newer name of the same role, and templates know the older one.
    fields["role"] = "system" if message.role == "developer" else message.role
    where = f"messages[{index}].content"
    if message.content is None:
        if message.role != "assistant":
            raise _bad(f"{where} is missing", "messages")
        fields["content"] = ""
    elif isinstance(message.content, str):
        fields["content"] = message.content
    else:
        # Which parts the model takes is known where the prompt is made.
        fields["content"] = message.content
    return fields


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    prompts: list[str | list[int]] = []
    if isinstance(prompt, str):
        prompts = [prompt]
    elif ids := [item for item in prompt if isinstance(item, int)]:
        prompts = [ids] if len(ids) == len(prompt) else []
    else:
        prompts = [item for item in prompt if not isinstance(item, int)]
        if len({type(item) for item in prompts}) > 1:
            prompts = []
    if not prompts and prompt:
        raise _bad("prompt mixes texts and token ids; send one kind", "prompt", "invalid_type")
    if not prompts or not all(prompts):
        raise _bad("prompt is empty; give at least one token", "prompt", "empty_prompt")
    if len(prompts) > MAX_CHOICES:
        raise _bad(f"{len(prompts)} prompts; at most {MAX_CHOICES} in one request", "prompt")
    return prompts


def _retain_seconds(control: CacheControl | None) -> float:
    """Return how long the pages of a prompt are to be protected, in seconds."""
    if control is None:
        return 0.0
    if control.type == "persistent":
        if control.ttl is not None:
            raise _bad("cache_control: persistent has no ttl; leave it out", "cache_control")
        return math.inf
    if control.type != "ephemeral":
        raise _bad(
            f"cache_control.type is {clip(repr(control.type), 60)}; it must be 'ephemeral' or "
            "'persistent'",
            "cache_control",
        )
    ttl = DEFAULT_TTL if control.ttl is None else control.ttl
    seconds: float
    if isinstance(ttl, str):
        found = _TTL.fullmatch(ttl)
        seconds = int(found[1]) * _TTL_UNITS[found[2]] if found else 0
    else:
        seconds = ttl
    if not 0 < seconds <= _MAX_TTL:
        raise _bad(
            f"cache_control.ttl is {clip(repr(ttl), 60)}; write a number of seconds up to "
            f"{_MAX_TTL}, or a text such as '30s', '5m' or '1h'",
            "cache_control",
        )
    return float(seconds)


def _sound(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """Return the fields that say how an answer is to be spoken, if it is."""
    plain = {"modalities": frozenset({"text"}), "voice": None, "sound_format": None}
    if not isinstance(request, ChatRequest):
        return plain
    modalities = frozenset(request.modalities or ["text"])
    if unknown := modalities - {"text", "audio"}:
        raise _bad(
            f"modalities has {clip(repr(min(unknown)), 60)}; it may have 'text' and 'audio'",
            "modalities",
        )
    if "text" not in modalities:
        message = "modalities lacks 'text': what is spoken is written first"
        raise _bad(message, "modalities", "unsupported_parameter")
    if "audio" not in modalities:
        if request.audio is not None:
            raise _bad("audio needs modalities to have 'audio'", "audio")
        return plain
    audio = request.audio or ChatAudio()
    formats = STREAMED_FORMATS if request.stream else SOUND_FORMATS
    return {
        "modalities": modalities,
        "voice": voice_of(audio.voice, "audio"),
        "sound_format": choice_of(audio.format, formats, "audio.format"),
    }


def voice_of(voice: str | Mapping[str, Any] | None, param: str) -> str | None:
    """Return the name of a voice, which may stand in an object.

    Raises:
        ApiError: If the object has no name.
    """
    if isinstance(voice, Mapping):
        voice = voice.get("id", voice.get("name"))
        if not isinstance(voice, str):
            raise _bad("the voice has no name; give it as a string", param)
    # An empty one asks for the model's own, as no name does.
    return voice or None


def choice_of(value: str, known: Sequence[str], param: str) -> str:
    """Return one of several known values.

    Raises:
        ApiError: If it is none of them.
    """
    if value not in known:
        shown = ", ".join(known)
        raise _bad(f"{param} is {clip(repr(value), 60)}; it must be one of {shown}", param)
    return value


def _params(request: ChatRequest | CompletionRequest) -> SamplingParams:
    max_tokens = request.max_tokens
    logprobs: int | None
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            max_tokens = request.max_completion_tokens
        if request.top_logprobs is not None and not request.logprobs:
            raise _bad("top_logprobs needs logprobs to be true", "top_logprobs")
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
    else:
        if max_tokens is None:
            max_tokens = DEFAULT_COMPLETION_TOKENS
        logprobs = request.logprobs
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    given: dict[str, Any] = {
        name: value for name in _SAMPLING_FIELDS if (value := getattr(request, name)) is not None
    }
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=tuple(stop),
            stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
            **given,
        )
    except RequestError as error:
        raise in_users_words(error, _names(request)) from None


def _check_entries(params: SamplingParams, num_choices: int) -> None:
    name = "logit_bias" if params.logit_bias else "stop_token_ids"
    num_entries = len(params.logit_bias) + len(params.stop_token_ids)
    if num_entries * num_choices > MAX_TOKEN_ENTRIES:
        raise _bad(
            f"logit_bias and stop_token_ids have {num_entries} entries for {num_choices} "
            f"choice(s); entries times choices may be {MAX_TOKEN_ENTRIES} at most",
            name,
        )


def _names(request: ChatRequest | CompletionRequest) -> dict[str, str]:
    """Return the fields that the user wrote under another name than the engine has."""
    names = {}
    if isinstance(request, ChatRequest):
        names["logprobs"] = "top_logprobs"
        if request.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
    return names


def in_users_words(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return a complaint about the field that the user wrote."""
    if error.param is None or error.param not in names:
        return error
    name = names[error.param]
    return RequestError(error.message.replace(error.param, name), param=name, code=error.code)


_SAMPLING_FIELDS = (
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "ignore_eos",
)
