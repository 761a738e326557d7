"""Bodies of the routes about sound and pictures, without processes."""

import json
from typing import Any

import pytest

from mstar.engine.request import PreparedRequest
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import RequestError
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.media.types import AudioMedia
from mstar.preprocess.processors.base import ImageTask, SpeechTask, TranscriptionTask
from mstar.server.failures import ApiError
from mstar.server.media_jobs import MediaJob, read_job
from mstar.server.protocol import ProtocolRules
from mstar.transport.messages import Prepare, Route
from tests.preprocess.media.test_audio import encode, tone
from tests.server.test_multipart import TYPE, form, named

RULES = ProtocolRules(model_names=("tiny",))
PREPARED = PreparedRequest(request_id="r", token_ids=[1, 2], params=SamplingParams(max_tokens=7))


def job(route: Route, **fields: Any) -> MediaJob:
    body = json.dumps(fields).encode()
    return read_job(Prepare(job_id=0, request_id="r", route=route, body=body), RULES)


def transcription(*fields: tuple[str, str | bytes], route: Route = "transcription") -> MediaJob:
    parts = [(named("file", "x.wav"), encode(tone(8_000), 8_000, "WAV"))]
    parts += [(named(n), v if isinstance(v, bytes) else v.encode()) for n, v in fields]
    body = form(*parts)
    return read_job(
        Prepare(job_id=0, request_id="r", route=route, body=body, content_type=TYPE), RULES
    )


def refused(work: Any) -> ApiError | RequestError:
    with pytest.raises((ApiError, RequestError)) as caught:
        work()
    assert isinstance(caught.value, (ApiError, RequestError))
    return caught.value


def test_speech_is_streamed_as_one_wav_unless_asked_otherwise() -> None:
    found = job("speech", input="Hello.", voice={"id": "joe"}, speed=1.5, model="tiny")
    assert found.request.text == "Hello."
    assert found.request.task == SpeechTask(voice="joe", speed=1.5)
    assert found.stream
    assert (found.media.format, found.media.is_event_stream) == ("wav", False)
    assert not job("speech", input="x", stream=False).stream
    assert not job("speech", input="x", response_format="mp3").stream
    events = job("speech", input="x", response_format="pcm", stream_format="sse")
    assert events.stream
    assert events.media.is_event_stream
    assert job("speech", input="x", voice="").request.task == SpeechTask()
    assert job("speech", input="x", colour=1).unknown_fields == ["colour"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": " \n"}, "input"),
        ({"input": "x", "response_format": "aac"}, "response_format"),
        ({"input": "x", "response_format": "flac", "stream": True}, "response_format"),
        ({"input": "x", "response_format": "opus", "stream_format": "sse"}, "response_format"),
        ({"input": "x", "stream_format": "video"}, "stream_format"),
        ({"input": "x", "voice": {}}, "voice"),
        ({"input": "x", "speed": "fast"}, "speed"),
        ({"input": "x", "model": "other"}, "model"),
    ],
)
def test_wrong_wishes_for_speech_name_the_field(fields: dict[str, Any], param: str) -> None:
    error = refused(lambda: job("speech", **fields))
    assert isinstance(error, ApiError)
    assert error.error.param == param


def test_image_wishes_reach_the_model() -> None:
    found = job("image", prompt="x", size="384x256", n=3, seed=4, guidance_scale=2, cache_salt="s")
    assert found.request.task == ImageTask(size=(384, 256), guidance=2)
    assert found.request.params.seed == 4
    assert found.request.cache_salt == "s"
    assert found.num_choices == 3
    assert job("image", prompt="x", size="auto").request.task == ImageTask()
    options = found.options(PREPARED, "m")
    assert options.media is not None
    assert options.media.num_tokens == 7
    assert (options.num_choices, options.num_prompt_tokens, options.stream) == (3, [2], False)


def test_transcriptions_are_greedy_and_tell_the_length() -> None:
    found = transcription(("model", "tiny"), ("language", "de"), ("prompt", "before"))
    assert found.request.params.temperature == 0
    assert found.request.task == TranscriptionTask(language="de", prompt="before")
    assert found.request.audio is not None
    media = found.request.audio.decode(16_000, MediaLimits())
    assert isinstance(media, AudioMedia)
    assert media.rate == 16_000
    options = found.options(PREPARED, "m")
    assert options.media is not None
    assert options.media.seconds == pytest.approx(0.25)
    assert transcription(("temperature", "0.5")).request.params.temperature == 0.5
    translated = transcription(route="translation").request.task
    assert translated == TranscriptionTask(translate=True)


@pytest.mark.parametrize("kind", ["verbose_json", "srt", "vtt"])
def test_formats_with_times_ask_for_them(kind: str) -> None:
    task = transcription(("response_format", kind)).request.task
    assert task == TranscriptionTask(timestamps=frozenset({"segment"}))


def test_granularities_are_a_list() -> None:
    found = transcription(
        ("response_format", "verbose_json"),
        ("timestamp_granularities[]", "word"),
        ("timestamp_granularities[]", "segment"),
    )
    assert found.media.granularities == ["word", "segment"]
    assert found.request.task == TranscriptionTask(timestamps=frozenset({"word", "segment"}))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ([("response_format", "xml")], "response_format"),
        ([("temperature", "warm")], "temperature"),
        ([("temperature", "nan")], "temperature"),
        ([("temperature", "-1")], "temperature"),
        ([("stream", "perhaps")], "stream"),
        ([("stream", "true"), ("response_format", "srt")], "stream"),
        ([("timestamp_granularities[]", "word")], "timestamp_granularities"),
        (
            [("timestamp_granularities[]", "line"), ("response_format", "verbose_json")],
            "timestamp_granularities",
        ),
        ([("language", "de"), ("language", "en")], "language"),
        ([("prompt", b"\xff")], "prompt"),
        ([("file", "again")], "file"),
        ([("model", "other")], "model"),
    ],
)
def test_wrong_wishes_for_transcripts_name_the_field(
    fields: list[tuple[str, str | bytes]], param: str
) -> None:
    error = refused(lambda: transcription(*fields))
    found = error.error.param if isinstance(error, ApiError) else error.param
    assert found == param


def test_a_form_without_a_recording_is_refused() -> None:
    body = form((named("model"), b"tiny"))
    message = Prepare(job_id=0, request_id="r", route="transcription", body=body, content_type=TYPE)
    with pytest.raises(ApiError, match="has no file") as caught:
        read_job(message, RULES)
    assert caught.value.error.param == "file"


def test_unknown_fields_of_forms_are_told_and_harmless_ones_are_not() -> None:
    found = transcription(("colour", "1"), ("chunking_strategy", "auto"), ("include[]", "logprobs"))
    assert found.unknown_fields == ["colour"]
