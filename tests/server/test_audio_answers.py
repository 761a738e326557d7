"""Sound and transcripts as answers, from the engine's outputs, without processes."""

import base64
import io
import json
import wave
from typing import Any

import numpy as np
import pytest
import soundfile

from mstar.engine.array import from_numpy
from mstar.engine.output import Emitted, FinishReason, RequestOutput
from mstar.preprocess.media.audio import decode_audio
from mstar.preprocess.processors.base import AUDIO, TRANSCRIPT
from mstar.preprocess.tokenizer import TextTokenizer
from mstar.server.audio_answers import SpeechAnswer, TranscriptAnswer
from mstar.server.failures import ApiError
from mstar.server.rendering import DONE, Rendering
from mstar.server.stream import Answer
from mstar.transport.messages import AnswerOptions, MediaOptions
from tests.server.processes import TinyModel
from tests.server.test_stream import options

RATE = 16_000
PIECES = [
    np.random.default_rng(n).uniform(-0.9, 0.9, 2_000 + n).astype(np.float32) for n in range(3)
]
JOINED = np.concatenate(PIECES)


def shape(route: str, media: MediaOptions, *, stream: bool) -> AnswerOptions:
    return options(route=route, media=media, stream=stream, num_prompt_tokens=[0])


def output(
    *emitted: Emitted, reason: FinishReason | None = None, ids: tuple[int, ...] = ()
) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        token_ids=list(ids),
        finish_reason=reason,
        num_prompt_tokens=0,
        num_cached_tokens=0,
        emitted=list(emitted),
    )


def spoken(samples: np.ndarray[Any, Any], text: str = "") -> Emitted:
    return Emitted(name=AUDIO, array=from_numpy(samples), info={"rate": RATE, "text": text})


def heard(text: str, start: float, end: float, **info: Any) -> Emitted:
    return Emitted(name=TRANSCRIPT, text=text, info={"start": start, "end": end} | info)


def fed(answer: Rendering, *outputs: RequestOutput) -> bytes:
    """All bytes of a stream."""
    data = answer.opening() + b"".join(answer.take(0, one) for one in outputs)
    assert answer.num_open == 0
    assert not answer.is_open(0)
    return data + answer.closing()


def events(data: bytes) -> list[Any]:
    assert data.endswith(DONE)
    return [json.loads(line[6:]) for line in data[: -len(DONE)].decode().split("\n\n") if line]


def speak(kind: str, *, stream: bool, as_events: bool = False) -> tuple[SpeechAnswer, bytes]:
    media = MediaOptions(format=kind, is_event_stream=as_events)
    answer = SpeechAnswer(shape("speech", media, stream=stream))
    outputs = [output(spoken(piece)) for piece in PIECES]
    data = fed(answer, *outputs, output(reason="stop")) if stream else b""
    if not stream:
        for one in (*outputs, output(reason="stop")):
            assert answer.take(0, one) == b""
        data = answer.whole()
    return answer, data


def test_streamed_wav_is_one_file_of_the_same_samples_as_the_whole_one() -> None:
    streamed, whole = (speak("wav", stream=stream)[1] for stream in (True, False))
    assert streamed.count(b"RIFF") == 1
    assert streamed[44:] == whole[44:]
    with wave.open(io.BytesIO(whole)) as file:
        assert (file.getframerate(), file.getnchannels()) == (RATE, 1)
        assert file.getnframes() == len(JOINED)
    decoded, rate = soundfile.read(io.BytesIO(streamed), dtype="float32")
    assert rate == RATE
    np.testing.assert_allclose(decoded, JOINED, atol=1 / 32767)
    np.testing.assert_array_equal(decode_audio(streamed, RATE), decode_audio(whole, RATE))


def test_pcm_has_no_head_and_the_rate_that_clients_take_it_for() -> None:
    for kind in ("pcm", "pcm16"):
        answer, data = speak(kind, stream=True)
        assert data == speak(kind, stream=False)[1]
        found = np.frombuffer(data, "<i2") / 32768
        seconds = len(JOINED) / RATE
        assert len(found) / 24_000 == pytest.approx(seconds, abs=1e-3)
        # The loudest tone of the sound is where it was.
        tone, heard = (
            np.abs(np.fft.rfft(samples)).argmax() / len(samples) * rate
            for samples, rate in ((JOINED, RATE), (found, 24_000))
        )
        assert heard == pytest.approx(tone, abs=2 / seconds)
        assert answer.content_type == "audio/pcm"
        assert answer.keep_alive == b""
        # A file has no way to say that it failed.
        assert answer.failing(b"{}") is None


@pytest.mark.parametrize(
    ("kind", "content_type", "tolerance"),
    [("flac", "audio/flac", 1e-4), ("mp3", "audio/mpeg", None), ("opus", "audio/ogg", None)],
)
def test_other_formats_are_whole_files(
    kind: str, content_type: str, tolerance: float | None
) -> None:
    answer, data = speak(kind, stream=False)
    assert answer.content_type == content_type
    decoded = decode_audio(data, RATE)
    assert len(decoded) == pytest.approx(len(JOINED), abs=1_200)
    if tolerance is not None:
        np.testing.assert_allclose(decoded, JOINED, atol=tolerance)


def test_speech_events_carry_the_file_piece_by_piece() -> None:
    answer, data = speak("wav", stream=True, as_events=True)
    *deltas, done = events(data)
    assert answer.content_type.startswith("text/event-stream")
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    joined = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    assert joined == speak("wav", stream=True)[1]
    # Nobody counted tokens.
    assert done == {"type": "speech.audio.done"}
    failing = answer.failing(b'{"error": 1}')
    assert failing == b'data: {"error": 1}\n\n' + DONE


@pytest.mark.parametrize("stream", [True, False])
def test_a_text_without_a_sound_is_an_error_and_no_empty_file(stream: bool) -> None:
    answer = SpeechAnswer(shape("speech", MediaOptions(format="wav"), stream=stream))
    assert answer.take(0, output(reason="stop")) == b""
    with pytest.raises(ApiError, match="nothing to be heard"):
        answer.closing() if stream else answer.whole()


STRETCHES = [
    heard(" Hello there.", 0.0, 2.5, language="en", tokens=[1, 2], avg_logprob=-0.5),
    heard(" It is --> late.", 2.5, 3723.5, words=[{"word": "It", "start": 2.5, "end": 2.6}]),
]
TEXT = "Hello there. It is --> late."


def transcript(kind: str, *, stream: bool = False, route: str = "transcription") -> bytes:
    media = MediaOptions(format=kind, seconds=12.25, granularities=["segment", "word"])
    answer = TranscriptAnswer(shape(route, media, stream=stream))
    outputs = [output(STRETCHES[0]), output(STRETCHES[1], reason="stop", ids=(1, 2))]
    if stream:
        return fed(answer, *outputs)
    for one in outputs:
        answer.take(0, one)
    return answer.whole()


def test_transcripts_have_openais_formats() -> None:
    usage = {"type": "duration", "seconds": 13}
    assert json.loads(transcript("json")) == {"text": TEXT, "usage": usage}
    assert transcript("text").decode() == TEXT + "\n"
    assert transcript("srt").decode() == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello there.\n\n"
        "2\n00:00:02,500 --> 01:02:03,500\nIt is -> late.\n\n"
    )
    assert transcript("vtt").decode() == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello there.\n\n"
        "00:00:02.500 --> 01:02:03.500\nIt is -> late.\n\n"
    )


def test_verbose_transcripts_have_segments_and_words() -> None:
    body = json.loads(transcript("verbose_json"))
    assert (body["task"], body["language"], body["duration"]) == ("transcribe", "english", 12.25)
    assert body["text"] == TEXT
    first, second = body["segments"]
    assert (first["id"], first["start"], first["end"]) == (0, 0.0, 2.5)
    assert (first["tokens"], first["avg_logprob"]) == ([1, 2], -0.5)
    assert "avg_logprob" not in second, "nothing says how sure the model was of it"
    assert body["words"] == [{"word": "It", "start": 2.5, "end": 2.6}]
    translated = json.loads(transcript("verbose_json", route="translation"))
    assert (translated["task"], translated["language"]) == ("translate", "english")


def test_streamed_transcripts_say_the_same_text() -> None:
    *deltas, done = events(transcript("json", stream=True))
    assert {delta["type"] for delta in deltas} == {"transcript.text.delta"}
    assert "".join(delta["delta"] for delta in deltas) == TEXT
    assert (done["type"], done["text"]) == ("transcript.text.done", TEXT)


def test_silence_is_an_empty_transcript() -> None:
    answer = TranscriptAnswer(shape("transcription", MediaOptions(format="json"), stream=False))
    answer.take(0, output(reason="stop"))
    assert json.loads(answer.whole())["text"] == ""


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyModel) -> TextTokenizer:
    return TextTokenizer.load(tiny.folder)


def chat(
    tokenizer: TextTokenizer, kind: str, *, stream: bool
) -> tuple[Answer, list[RequestOutput]]:
    media = MediaOptions(format=kind)
    shaped = options(media=media, stream=stream, num_prompt_tokens=[1], num_context_tokens=100)
    ids = tokenizer.encode("ab")
    outputs = [
        output(heard(" Who?", 0, 1)),
        output(ids=(ids[0],)),
        output(spoken(PIECES[0], "a")),
        output(spoken(PIECES[1], "b"), ids=(ids[1],), reason="length"),
    ]
    return Answer("id", shaped, tokenizer, "fp"), outputs


def test_spoken_chats_have_text_sound_and_what_was_heard(tokenizer: TextTokenizer) -> None:
    answer, outputs = chat(tokenizer, "wav", stream=False)
    for one in outputs:
        answer.take(0, one)
    message = json.loads(answer.whole())["choices"][0]["message"]
    assert message["content"] == message["audio"]["transcript"] == "ab"
    assert message["input_transcript"] == "Who?"
    assert message["audio"]["id"].startswith("audio_")
    sound = decode_audio(base64.b64decode(message["audio"]["data"]), RATE)
    np.testing.assert_allclose(sound, np.concatenate(PIECES[:2]), atol=1 / 32767)


def test_streamed_chats_have_deltas_of_text_and_of_sound(tokenizer: TextTokenizer) -> None:
    answer, outputs = chat(tokenizer, "pcm16", stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(fed(answer, *outputs))]
    assert "".join(delta.get("content", "") for delta in deltas) == "ab"
    sounds = [delta["audio"] for delta in deltas if "audio" in delta]
    assert len({sound["id"] for sound in sounds}) == 1
    assert "".join(sound["transcript"] for sound in sounds) == "ab"
    data = b"".join(base64.b64decode(sound["data"]) for sound in sounds)
    num_samples = sum(map(len, PIECES[:2])) * 24_000 / RATE
    assert len(data) / 2 == pytest.approx(num_samples, abs=2)
    assert [d["input_transcript"] for d in deltas if "input_transcript" in d] == ["Who?"]


def test_prompts_that_were_heard_count_with_their_audio(tokenizer: TextTokenizer) -> None:
    answer, outputs = chat(tokenizer, "wav", stream=False)
    for one in outputs:
        answer.take(0, one)
    usage = answer.usage()
    assert usage["prompt_tokens"] == 100
    assert usage["total_tokens"] == 102
