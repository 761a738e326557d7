"""Speech in and out over a real socket, with the real voice assistant."""

import base64
import http.client
import io
import json
import wave
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from openai import OpenAI

from mstar.catalog import locate
from mstar.errors import MstarError
from tests.preprocess.media.contained import contained
from tests.server.processes import ServerProcess, call, connect, error_of, user, wait_until

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"
CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    for name in ("smollm2-135m", "whisper-base", "piper"):
        try:
            locate(name)
        except MstarError as error:
            pytest.skip(str(error))
    flags = ("--kv-cache-memory", "128MiB", "--dtype", "float32", "--max-audio-seconds", "60")
    running = ServerProcess(Path("voice"), *flags)
    try:
        yield running.wait_ready()
    finally:
        status = running.end()
    assert status == 0, running.log


@pytest.fixture(scope="module")
def question(server: ServerProcess) -> bytes:
    """The question as the assistant itself says it: a WAV."""
    status, headers, data = call(server, "POST", SPEECH, {"input": QUESTION, "stream": False})
    assert (status, headers["content-type"]) == (200, "audio/wav")
    return data


def transcribe(client: OpenAI, content: bytes, **options: Any) -> Any:
    return client.audio.transcriptions.create(
        model="tiny", file=("question.wav", content, "audio/wav"), **options
    )


def asking(content: bytes) -> list[Any]:
    audio = {"data": base64.b64encode(content).decode(), "format": "wav"}
    part = {"type": "input_audio", "input_audio": audio}
    return [{"role": "user", "content": [part]}]


def test_speech_says_what_is_written(client: OpenAI, question: bytes) -> None:
    assert transcribe(client, question).text == QUESTION
    assert transcribe(client, question, response_format="text").strip() == QUESTION


def test_streamed_speech_is_one_wav_with_the_samples_of_the_whole_one(
    client: OpenAI, question: bytes
) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="tiny", input=QUESTION, voice="joe"
    ) as response:
        assert response.headers["content-type"] == "audio/wav"
        assert "content-length" not in response.headers
        streamed = b"".join(response.iter_bytes())
    assert streamed[44:] == question[44:]
    with wave.open(io.BytesIO(question)) as file:
        num_frames, rate = file.getnframes(), file.getframerate()
    decoded, decoded_rate = soundfile.read(io.BytesIO(streamed))
    assert (len(decoded), decoded_rate) == (num_frames, rate)


@contextmanager
def speaking(server: ServerProcess, text: str) -> Iterator[http.client.HTTPResponse]:
    """Return the answer that begins to speak a text."""
    body = json.dumps({"input": text, "response_format": "pcm"})
    with closing(connect(server)) as connection:
        connection.request("POST", SPEECH, body, {"content-type": "application/json"})
        with connection.getresponse() as response:
            yield response


def test_first_sentence_is_heard_before_the_rest_is_made(server: ServerProcess) -> None:
    with speaking(server, "This is the first sentence of many. " * 12) as response:
        first = response.read1()
        rest = response.read()
    assert 0 < len(first) < len(rest)


@pytest.mark.parametrize("kind", ["mp3", "flac", "opus", "pcm"])
def test_other_formats_sound_the_same_long(client: OpenAI, question: bytes, kind: Any) -> None:
    data = client.audio.speech.create(
        model="tiny", input=QUESTION, voice="joe", response_format=kind
    ).read()
    expected, rate = soundfile.read(io.BytesIO(question))
    if kind == "pcm":
        assert len(data) / 2 / 24_000 == pytest.approx(len(expected) / rate, abs=0.01)
        return
    decoded, own_rate = soundfile.read(io.BytesIO(data))
    assert len(decoded) / own_rate == pytest.approx(len(expected) / rate, abs=0.1)


def test_transcripts_come_in_every_format(client: OpenAI, question: bytes) -> None:
    subtitles = transcribe(client, question, response_format="srt")
    assert subtitles.startswith("1\n00:00:00,000 --> 00:00:0")
    assert QUESTION in subtitles
    assert transcribe(client, question, response_format="vtt").startswith("WEBVTT\n\n")
    verbose = transcribe(client, question, response_format="verbose_json")
    assert (verbose.text, verbose.language) == (QUESTION, "english")
    (segment,) = verbose.segments
    assert 0 < segment.end <= verbose.duration + 0.1
    assert (segment.seek, segment.temperature) == (0, 0.0)
    assert -1 < segment.avg_logprob < 0
    assert 0 < segment.no_speech_prob < 0.5
    assert segment.compression_ratio > 0.5
    events = list(transcribe(client, question, stream=True))
    assert "".join(e.delta for e in events if e.type == "transcript.text.delta") == QUESTION
    assert events[-1].text == QUESTION


def test_recordings_of_any_rate_and_channels_are_understood(
    client: OpenAI, question: bytes
) -> None:
    samples, rate = soundfile.read(io.BytesIO(question), dtype="float32")
    out = io.BytesIO()
    soundfile.write(out, np.stack([samples, samples], 1), rate, format="OGG", subtype="VORBIS")
    assert transcribe(client, out.getvalue()).text == QUESTION


@pytest.mark.parametrize(("kind", "codec"), [("mp4", "aac"), ("webm", "libopus")])
def test_what_phones_and_browsers_record_is_understood(
    client: OpenAI, question: bytes, kind: str, codec: str
) -> None:
    samples, rate = soundfile.read(io.BytesIO(question), dtype="float32")
    assert transcribe(client, contained(samples[None], rate, kind, codec)).text == QUESTION


def test_questions_may_be_asked_by_voice(client: OpenAI, question: bytes) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 16}
    answer = client.chat.completions.create(messages=asking(question), **options)
    written = client.chat.completions.create(messages=user(QUESTION), **options)
    message = answer.choices[0].message
    assert message.content == written.choices[0].message.content
    assert message.model_dump()["input_transcript"] == QUESTION
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.audio_tokens == 1500
    assert usage.prompt_tokens > 1500
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_answers_may_be_spoken_and_say_what_they_write(client: OpenAI, question: bytes) -> None:
    options: dict[str, Any] = {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": 16,
        "modalities": ["text", "audio"],
    }
    whole = client.chat.completions.create(
        messages=asking(question), audio={"voice": "joe", "format": "wav"}, **options
    )
    message = whole.choices[0].message
    assert message.audio is not None
    assert message.audio.transcript == message.content
    sound = base64.b64decode(message.audio.data)
    heard = transcribe(client, sound).text.split()
    assert message.content is not None
    said = message.content.split()
    assert heard[0].strip(",.").lower() == said[0].strip(",.").lower()
    text, data = "", b""
    for chunk in client.chat.completions.create(
        messages=asking(question),
        audio={"voice": "joe", "format": "wav"},
        stream=True,
        **options,
    ):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        if audio := delta.model_dump().get("audio"):
            data += base64.b64decode(audio["data"])
    assert text == message.content
    # The heads differ: one leaves the length open.
    assert data[44:] == sound[44:]


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"", "invalid_audio", "empty"),
        (b"no audio", "invalid_audio", "cannot be decoded"),
        (
            b"\x1aE\xdf\xa3" + bytes(99),
            "invalid_audio",
            "103 bytes of WebM|is WebM",
        ),
    ],
)
def test_bad_recordings_are_refused(
    client: OpenAI, content: bytes, code: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        transcribe(client, content)
    assert (caught.value.code, caught.value.param) == (code, "file")


def test_recordings_beyond_the_limit_are_refused_and_silence_is_not(client: OpenAI) -> None:
    for seconds, is_taken in ((3_600 * 2, False), (61, False), (2, True)):
        out = io.BytesIO()
        soundfile.write(out, np.zeros(8_000 * seconds, np.int16), 8_000, format="FLAC")
        if is_taken:
            assert isinstance(transcribe(client, out.getvalue()).text, str)
            continue
        with pytest.raises(openai.BadRequestError, match="at most 60 s are taken") as caught:
            transcribe(client, out.getvalue())
        assert caught.value.code == "media_too_large"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "x", "voice": "nobody"}, "voice"),
        ({"input": "x", "speed": 99}, "speed"),
        ({"input": "x", "instructions": "loudly"}, "instructions"),
        ({"input": "x" * 200_000}, "input"),
    ],
)
def test_wishes_that_the_voice_cannot_fulfil_are_named(
    server: ServerProcess, fields: dict[str, Any], param: str
) -> None:
    status, error = error_of(call(server, "POST", SPEECH, fields))
    assert (status, error["param"]) == (400, param)


def test_forms_of_another_type_are_a_415(server: ServerProcess) -> None:
    status, error = error_of(call(server, "POST", "/v1/audio/transcriptions", {"file": "x"}))
    assert (status, error["code"]) == (415, "unsupported_media_type")


def test_an_engine_that_dies_breaks_a_streamed_file_off(server: ServerProcess) -> None:
    """Without a word for it in a file of sound, the client must see more than an end."""
    text = "This is one of very many sentences. " * 60
    with speaking(server, text) as response:
        assert response.read1()
        server.child("engine_process").kill()
        with pytest.raises(http.client.IncompleteRead):
            response.read()
    wait_until(lambda: call(server, "GET", "/ready")[0] == 200, seconds=120)
    assert call(server, "POST", SPEECH, {"input": "Hello."})[0] == 200
