"""The bodies of the routes whose requests or answers are sound and pictures."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from mstar.engine.request import PreparedRequest
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.preprocess.media.content import Source, sound_source
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.media.types import AudioMedia, Media
from mstar.preprocess.processors.base import ImageTask, SpeechTask, TranscriptionTask
from mstar.preprocess.prompt import PromptRequest, item_tokens
from mstar.server.failures import ApiError, clip
from mstar.server.multipart import FormPart, read_form
from mstar.server.protocol import (
    SOUND_FORMATS,
    STREAMED_FORMATS,
    ProtocolRules,
    check_model,
    choice_of,
    json_fields,
    unknown_of,
    unserved,
    voice_of,
    wrong_type,
)
from mstar.transport.messages import AnswerOptions, MediaOptions, Prepare, Route

MEDIA_ROUTES: frozenset[Route] = frozenset({"transcription", "translation", "speech", "image"})
MAX_PICTURES = 10
"""Pictures of one request."""
TRANSCRIPT_FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
_TIMED_FORMATS = ("verbose_json", "srt", "vtt")
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
_TRUE, _FALSE = ("true", "1"), ("false", "0", "")


@dataclass(frozen=True, kw_only=True)
class MediaJob:
    """A body that was read: the prompt, and how the answer is to be shaped."""

    route: Route
    request: PromptRequest
    media: MediaOptions
    stream: bool = False
    num_choices: int = 1
    unknown_fields: Sequence[str] = ()
    seconds: list[float] = field(default_factory=list)
    """Length of the recording, once it was decoded."""

    def options(self, prompt: PreparedRequest, model: str) -> AnswerOptions:
        """Return how the answer is to be shaped.

        Args:
            prompt: What the request became.
            model: Name that the answer carries.
        """
        media = msgspec.structs.replace(
            self.media, seconds=sum(self.seconds), num_tokens=prompt.params.max_tokens or 0
        )
        return AnswerOptions(
            route=self.route,
            model=model,
            stream=self.stream,
            include_usage=False,
            continuous_usage=False,
            num_choices=self.num_choices,
            num_prompt_tokens=[len(prompt.token_ids)],
            num_top_logprobs=None,
            stop=[],
            include_stop=False,
            skip_special_tokens=True,
            return_token_ids=False,
            prompt_token_ids=None,
            num_item_tokens=[item_tokens(prompt)],
            media=media,
        )


def read_job(job: Prepare, rules: ProtocolRules) -> MediaJob:
    """Return what the body of one of ``MEDIA_ROUTES`` asks for.

    Raises:
        ApiError: If a field is missing, of the wrong type or not served, or the model is unknown.
        RequestError: If a sampling value is out of its range.
    """
    if job.route == "speech":
        return _speech(job, rules)
    if job.route == "image":
        return _image(job, rules)
    return _transcription(job, rules)


class SpeechBody(msgspec.Struct, kw_only=True):
    """Body of ``/v1/audio/speech``; ``None`` means left out."""

    input: str
    model: str | None = None
    voice: str | dict[str, Any] | None = None
    instructions: str | None = None
    response_format: str | None = None
    speed: float | None = None
    stream_format: str | None = None
    stream: bool | None = None
    user: str | None = None


class ImageBody(msgspec.Struct, kw_only=True):
    """Body of ``/v1/images/generations``; ``None`` means left out."""

    prompt: str
    model: str | None = None
    n: int | None = None
    size: str | None = None
    response_format: str | None = None
    output_format: str | None = None
    user: str | None = None
    guidance_scale: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    cache_salt: str | None = None


_UNSERVED_OF_IMAGES: dict[str, tuple[object, ...]] = {
    "background": ("auto", "standard"),
    "logit_bias": ({},),
    "max_tokens": (),
    "moderation": ("auto", "standard"),
    "negative_prompt": ("",),
    "num_inference_steps": (),
    "output_compression": (100,),
    "partial_images": (0,),
    "quality": ("auto", "standard"),
    "stream": (False,),
    "style": ("auto", "standard"),
}


def _speech(job: Prepare, rules: ProtocolRules) -> MediaJob:
    fields = json_fields(job.body)
    body = _convert(fields, SpeechBody)
    check_model(body.model, rules.model_names)
    if not body.input.strip():
        raise ApiError(
            400, "input is empty; it must be a text with something to say", param="input"
        )
    kind = choice_of(body.response_format or "wav", SOUND_FORMATS, "response_format")
    stream_format = choice_of(body.stream_format or "audio", ("audio", "sse"), "stream_format")
    # What can be heard before its end goes out piece by piece, unless somebody wants it whole.
    can_stream = kind in STREAMED_FORMATS
    wants_stream = body.stream or stream_format == "sse"
    if wants_stream and not can_stream:
        raise ApiError(
            400,
            f"response_format {kind!r} is not streamed; ask for {' or '.join(STREAMED_FORMATS)}",
            param="response_format",
        )
    task = SpeechTask(
        voice=voice_of(body.voice, "voice"),
        speed=1.0 if body.speed is None else body.speed,
        instructions=body.instructions or "",
    )
    return MediaJob(
        route="speech",
        request=PromptRequest(
            request_id=job.request_id, params=SamplingParams(), text=body.input, task=task
        ),
        media=MediaOptions(format=kind, is_event_stream=stream_format == "sse"),
        stream=can_stream and body.stream is not False,
        unknown_fields=unknown_of(fields, SpeechBody.__struct_fields__),
    )


def _image(job: Prepare, rules: ProtocolRules) -> MediaJob:
    fields = json_fields(job.body)
    unserved(fields, _UNSERVED_OF_IMAGES)
    body = _convert(fields, ImageBody)
    check_model(body.model, rules.model_names)
    if not body.prompt.strip():
        raise ApiError(400, "prompt is empty; say what is to be seen", param="prompt")
    choice_of(body.response_format or "b64_json", ("b64_json",), "response_format")
    choice_of(body.output_format or "png", ("png",), "output_format")
    num_pictures = 1 if body.n is None else body.n
    if not 1 <= num_pictures <= MAX_PICTURES:
        raise ApiError(400, f"n is {num_pictures}; it must be 1 to {MAX_PICTURES}", param="n")
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k", "seed")
        if (value := getattr(body, name)) is not None
    }
    return MediaJob(
        route="image",
        request=PromptRequest(
            request_id=job.request_id,
            params=SamplingParams(**given),
            text=body.prompt,
            task=ImageTask(size=_size(body.size), guidance=body.guidance_scale),
            cache_salt=body.cache_salt,
        ),
        media=MediaOptions(format="png"),
        num_choices=num_pictures,
        unknown_fields=unknown_of(fields, {*ImageBody.__struct_fields__, *_UNSERVED_OF_IMAGES}),
    )


def _size(size: str | None) -> tuple[int, int] | None:
    if size is None or size == "auto":
        return None
    found = _SIZE.fullmatch(size)
    if found is None:
        raise ApiError(
            400,
            f"size is {clip(repr(size), 60)}; write width and height as in '384x384', or 'auto'",
            param="size",
        )
    return int(found[1]), int(found[2])


def _transcription(job: Prepare, rules: ProtocolRules) -> MediaJob:
    form = _Form(read_form(job.body, job.content_type))
    check_model(form.text("model"), rules.model_names)
    kind = choice_of(form.text("response_format") or "json", TRANSCRIPT_FORMATS, "response_format")
    granularities = form.granularities(kind)
    stream = form.flag("stream")
    if stream and kind not in ("json", "text"):
        raise ApiError(
            400, f"response_format {kind!r} is not streamed; ask for json", param="stream"
        )
    seconds: list[float] = []
    task = TranscriptionTask(
        language=form.text("language"),
        prompt=form.text("prompt") or "",
        translate=job.route == "translation",
        timestamps=frozenset(granularities),
    )
    temperature = form.number("temperature")
    return MediaJob(
        route="transcription" if job.route is None else job.route,
        request=PromptRequest(
            request_id=job.request_id,
            params=SamplingParams(temperature=0.0 if temperature is None else temperature),
            audio=_measured(sound_source(form.file(), None, "file"), seconds.append),
            task=task,
            cache_salt=form.text("cache_salt"),
        ),
        media=MediaOptions(format=kind, granularities=granularities),
        stream=stream,
        unknown_fields=form.unknown(),
        seconds=seconds,
    )


def form_schema() -> dict[str, Any]:
    """Return the schema of a transcription's form."""
    text, many = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
    fields = {
        "file": {"type": "string", "format": "binary"},
        "response_format": {"type": "string", "enum": list(TRANSCRIPT_FORMATS)},
        "temperature": {"type": "number"},
        "stream": {"type": "boolean"},
        "timestamp_granularities[]": many,
    }
    fields |= dict.fromkeys(("model", "language", "prompt", "cache_salt"), text)
    return {"type": "object", "required": ["file"], "properties": fields}


class _Form:
    """The fields of a transcription.

    Raises:
        ApiError: If a field that may stand once stands twice.
    """

    _LISTS = frozenset({"timestamp_granularities", "include"})
    _IGNORED = frozenset({"chunking_strategy", "include", "user"})
    _KNOWN = frozenset(
        {"file", "model", "language", "prompt", "response_format", "temperature", "stream"}
        | {"timestamp_granularities", "cache_salt"}
    )

    def __init__(self, parts: Sequence[FormPart]) -> None:
        self._fields: dict[str, list[FormPart]] = {}
        for part in parts:
            name = part.name.removesuffix("[]")
            own = self._fields.setdefault(name, [])
            own.append(part)
            if len(own) > 1 and name not in self._LISTS:
                raise ApiError(400, f"{clip(name, 60)} is given twice", param=clip(name, 60))

    def text(self, name: str) -> str | None:
        """Return a value; ``None``: it is left out or empty."""
        found = self._fields.get(name)
        return (found[0].text() or None) if found else None

    def number(self, name: str) -> float | None:
        """Return a number."""
        text = self.text(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ApiError(400, f"{name} is {clip(repr(text), 60)}, not a number", param=name)
        return value

    def flag(self, name: str) -> bool:
        """Return a truth value."""
        text = (self.text(name) or "").lower()
        if text not in _TRUE + _FALSE:
            raise ApiError(400, f"{name} is {clip(repr(text), 60)}, not true or false", param=name)
        return text in _TRUE

    def file(self) -> bytes:
        """Return the recording."""
        found = self._fields.get("file")
        if not found:
            raise ApiError(400, "the form has no file; send the recording as file", param="file")
        return found[0].content

    def granularities(self, kind: str) -> list[str]:
        """Return what is to be timed, given the format of the answer."""
        given = [part.text() for part in self._fields.get("timestamp_granularities", [])]
        for one in given:
            choice_of(one, ("segment", "word"), "timestamp_granularities")
        if given and kind != "verbose_json":
            raise ApiError(
                400,
                "timestamp_granularities needs response_format to be verbose_json",
                param="timestamp_granularities",
            )
        return given or (["segment"] if kind in _TIMED_FORMATS else [])

    def unknown(self) -> list[str]:
        """Return the names of fields that change nothing."""
        return [clip(name, 64) for name in self._fields.keys() - self._KNOWN - self._IGNORED]


def _measured(source: Source, note: Callable[[float], None]) -> Source:
    """Return a recording that tells its length once it is decoded, in seconds."""

    def decode(rate: int, limits: MediaLimits) -> Media:
        media = source.decode(rate, limits)
        assert isinstance(media, AudioMedia)
        note(media.seconds)
        return media

    return replace(source, decode=decode)


def _convert(fields: Mapping[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise wrong_type(error) from None
