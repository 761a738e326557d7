"""The voice assistant over real sockets, out of real weights."""

import base64
import io
import sys
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI

from mstar import Engine, SamplingParams
from mstar.catalog import load_prompting
from mstar.cli import main
from mstar.errors import ModelNotFoundError, UnsupportedError
from tests.server.processes import ServerProcess, call, error_of

for package in ("soundfile", "soxr", "onnxruntime", "piper"):
    pytest.importorskip(package)
pytestmark = pytest.mark.slow

QUESTION = "What colour is the sky?"
HEARD = "What color is the sky?"
NUM_WINDOW = 1500
"""Places that a window of the listener has."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    try:
        load_prompting("voice")
    except (ModelNotFoundError, UnsupportedError) as error:
        pytest.skip(str(error))
    flags = ("--served-model-name", "voice", "--kv-cache-memory", "128MiB", "--debug-checks")
    running = ServerProcess(Path("voice"), *flags)
    try:
        yield running.wait_ready()
    finally:
        status = running.end()
    assert status == 0, running.log


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with server.client(timeout=120.0) as opened:
        yield opened


@pytest.fixture(scope="module")
def question(server: ServerProcess) -> bytes:
    """Return the question as the assistant's own voice says it."""
    with server.client() as client:
        return spoken(client, QUESTION)


def spoken(client: OpenAI, text: str) -> bytes:
    answer = client.audio.speech.create(model="voice", voice="", input=text, response_format="wav")
    return bytes(answer.content)


def recording(data: bytes) -> list[Any]:
    part = {"data": base64.b64encode(data).decode(), "format": "wav"}
    return [{"role": "user", "content": [{"type": "input_audio", "input_audio": part}]}]


def ask(client: OpenAI, messages: list[Any], max_tokens: int = 24, **more: Any) -> Any:
    return client.chat.completions.create(
        model="voice", messages=messages, temperature=0, max_tokens=max_tokens, **more
    )


SPOKEN: dict[str, Any] = {
    "modalities": ["text", "audio"],
    "audio": {"voice": "", "format": "wav"},
}


def samples_of(data: bytes) -> Any:
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels()) == (22050, 1)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def words(text: str) -> list[str]:
    return "".join(c.lower() if c.isalnum() else " " for c in text).split()


def test_it_says_what_it_takes_and_gives(client: OpenAI) -> None:
    (model,) = client.models.list().data
    about: Any = model.model_dump()["architecture"]
    assert about == {"input_modalities": ["text", "audio"], "output_modalities": ["text", "audio"]}


def test_what_is_spoken_on_one_route_is_written_down_on_another(
    client: OpenAI, question: bytes
) -> None:
    found = client.audio.transcriptions.create(model="voice", file=("question.wav", question))
    assert found.text == HEARD


def test_a_spoken_question_is_answered_as_the_written_one(client: OpenAI, question: bytes) -> None:
    written = ask(client, [{"role": "user", "content": HEARD}])
    asked = ask(client, recording(question))
    message = asked.choices[0].message
    assert message.content == written.choices[0].message.content
    assert message.model_dump()["input_transcript"] == HEARD
    assert message.audio is None
    num_text = written.usage.prompt_tokens
    assert asked.usage.prompt_tokens == num_text + NUM_WINDOW
    assert asked.usage.prompt_tokens_details.audio_tokens == NUM_WINDOW
    assert asked.usage.prompt_tokens_details.cached_tokens >= num_text // 16 * 16


def test_places_of_a_recording_are_counted_in_process_as_over_http(
    client: OpenAI, question: bytes
) -> None:
    usage = ask(client, recording(question)).usage
    with Engine("voice") as engine:
        answer = engine.chat(recording(question), SamplingParams(max_tokens=8, temperature=0.0))
    assert answer.num_prompt_tokens == usage.prompt_tokens
    assert answer.num_item_tokens == {"audio": NUM_WINDOW}


def test_every_window_of_every_recording_is_counted(client: OpenAI, question: bytes) -> None:
    samples = samples_of(question)
    long = np.concatenate([samples, np.zeros(31 * 22050 - len(samples), samples.dtype)])
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, 22050, 0, "NONE", ""))
        file.writeframes(long.tobytes())
    messages = recording(question)
    messages[0]["content"] += recording(out.getvalue())[0]["content"]
    usage = ask(client, messages, max_tokens=1).usage
    assert usage.prompt_tokens_details.audio_tokens == 3 * NUM_WINDOW
    assert 0 < usage.prompt_tokens - 3 * NUM_WINDOW < 100


def test_a_text_too_long_beside_a_recording_is_the_requests_fault(
    client: OpenAI, question: bytes
) -> None:
    messages = recording(question)
    messages[0]["content"].insert(0, {"type": "text", "text": "word " * 9000})
    with pytest.raises(BadRequestError) as caught:
        ask(client, messages)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_what_is_not_heard_yet_cannot_be_explained(server: ServerProcess, question: bytes) -> None:
    body = {"model": "voice", "messages": recording(question)}
    status, error = error_of(call(server, "POST", "/v1/cache/explain", body))
    assert (status, error["param"]) == (400, "messages")
    assert "were heard" in error["message"]


def test_a_whole_answer_has_the_sound_of_its_text(client: OpenAI, question: bytes) -> None:
    message = ask(client, recording(question), **SPOKEN).choices[0].message
    assert message.audio.transcript == message.content
    data = base64.b64decode(message.audio.data)
    assert len(samples_of(data)) > 22050
    back = client.audio.transcriptions.create(
        model="voice", file=("answer.wav", data), language="en"
    )
    said, heard = words(message.content), words(back.text)
    assert len(set(said) & set(heard)) >= 0.8 * len(set(said))


def test_text_and_sound_come_as_they_are_made(client: OpenAI, question: bytes) -> None:
    chunks = list(
        ask(
            client,
            recording(question),
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
            **SPOKEN,
        )
    )
    deltas = [choice.delta.model_dump() for chunk in chunks for choice in chunk.choices]
    heard = [place for place, delta in enumerate(deltas) if delta.get("input_transcript")]
    texts = [place for place, delta in enumerate(deltas) if delta.get("content")]
    sounds = [place for place, delta in enumerate(deltas) if delta.get("audio")]
    assert heard[0] < texts[0] < sounds[0] < texts[-1]
    assert len(sounds) >= 2
    pieces = [deltas[place]["audio"] for place in sounds]
    assert len({piece["id"] for piece in pieces}) == 1
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert "".join(piece["transcript"] for piece in pieces) == text
    assert all(place < sounds[-1] for place in texts)
    first, *others = (base64.b64decode(piece["data"]) for piece in pieces)
    assert first[:4] == b"RIFF"
    assert all(data[:4] != b"RIFF" and len(data) % 2 == 0 for data in others)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "length"
    assert not any(reasons[:-1])
    assert chunks[-1].usage.completion_tokens == 40
    assert chunks[-1].usage.prompt_tokens_details.audio_tokens == NUM_WINDOW


def test_conversations_at_once_are_kept_apart(client: OpenAI, question: bytes) -> None:
    other = "How many legs does a spider have?"
    recordings = {QUESTION: question, other: spoken(client, other)}
    with ThreadPoolExecutor(4) as threads:
        asked = [*recordings, *recordings]
        answers = list(
            threads.map(lambda text: ask(client, recording(recordings[text]), **SPOKEN), asked)
        )
    for text, answer in zip(asked, answers, strict=True):
        heard = answer.choices[0].message.model_dump()["input_transcript"]
        assert words(heard)[-1] == words(text)[-1]
        assert len(samples_of(base64.b64decode(answer.choices[0].message.audio.data)))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"audio": {"voice": "bob", "format": "wav"}}, "voice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {"voice": "", "format": "midi"}}, "audio.format"),
        ({"messages": recording(b"no sound")}, "messages[0].content[0].input_audio.data"),
        ({"messages": recording(b"")}, "messages[0].content[0].input_audio.data"),
    ],
)
def test_what_cannot_be_answered_is_refused_and_harms_nobody(
    client: OpenAI, question: bytes, change: dict[str, Any], param: str
) -> None:
    fields: dict[str, Any] = {"messages": recording(question), **SPOKEN, **change}
    with pytest.raises(BadRequestError) as refused:
        ask(client, **fields)
    error: Any = refused.value.body
    assert error["param"] == param
    assert ask(client, [{"role": "user", "content": HEARD}], max_tokens=1).choices


def test_an_answer_that_nobody_waits_for_is_given_up(
    server: ServerProcess, client: OpenAI, question: bytes
) -> None:
    stream = ask(client, recording(question), max_tokens=400, stream=True, **SPOKEN)
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.model_dump().get("audio"):
            break
    stream.close()
    server.wait_for(r"chat 499 ")


def test_mstar_chat_asks_with_a_recording_and_writes_what_it_hears(
    server: ServerProcess,
    question: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    asked, out = tmp_path / "question.wav", tmp_path / "out.wav"
    asked.write_bytes(question)
    flags = ["--audio", str(asked), "--speak", str(out), "-n", "24", "--temperature", "0"]
    assert main(["chat", "voice", "--url", server.url, *flags]) == 0
    captured = capsys.readouterr()
    heard, answer = captured.out.splitlines()
    assert heard == f"> {HEARD}"
    assert len(words(answer)) >= 10
    assert "first sound after" in captured.err
    assert len(samples_of(out.read_bytes())) > 22050
