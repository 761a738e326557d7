"""`mstar chat` by voice, against a server that plays a script."""

import base64
import io
import json
import sys
import threading
import wave
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar.cli import main
from mstar.cli.answerers import Messages, Piece, Reply
from mstar.cli.chat import Recording, Talk
from mstar.cli.sound_file import SoundFiles
from mstar.errors import RequestError
from mstar.preprocess.media.wav import pcm16, wav, wav_header
from mstar.preprocess.results import Sound

RATE = 8000
TONES = (np.full(400, 0.25, np.float32), np.full(300, -0.5, np.float32))
USAGE = {
    "prompt_tokens": 36,
    "completion_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 32, "audio_tokens": 1500},
}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def sound(data: bytes) -> dict[str, Any]:
    return delta(audio={"id": "audio_1", "data": base64.b64encode(data).decode()})


ANSWER = [
    delta(role="assistant", content=""),
    delta(input_transcript="What is"),
    delta(input_transcript=" this?"),
    delta(content="A "),
    sound(wav_header(RATE) + pcm16(TONES[0])),
    delta(content="test."),
    sound(pcm16(TONES[1])),
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": USAGE},
]


class Script:
    """What the server answers, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.modalities = ["text", "audio"]
        self.events: list[dict[str, Any]] = ANSWER
        self.refuse: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda body: None
        self.url = ""


class _Handler(BaseHTTPRequestHandler):
    script: Script

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        about = {f"{way}_modalities": self.script.modalities for way in ("input", "output")}
        self._send(200, "application/json", {"data": [{"id": "voice", "architecture": about}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.script.asked.append(body)
        error = self.script.refuse(body)
        if error is not None:
            self._send(400, "application/json", {"error": error})
            return
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in self.script.events)
        self._send(200, "text/event-stream", f"{lines}data: [DONE]\n\n")

    def _send(self, status: int, kind: str, content: object) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()
    handler = type("Handler", (_Handler,), {"script": made})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield made
    server.shutdown()
    server.server_close()
    thread.join(10)


@pytest.fixture
def question(tmp_path: Path) -> Path:
    path = tmp_path / "question.wav"
    path.write_bytes(wav(TONES[0], RATE))
    return path


@pytest.fixture(autouse=True)
def nobody_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))


def chat(script: Script, *arguments: object) -> int:
    return main(["chat", "voice", "--url", script.url, *map(str, arguments)])


def heard_in(path: Path) -> bytes:
    with wave.open(str(path)) as file:
        assert file.getframerate() == RATE
        return bytes(file.readframes(file.getnframes()))


def test_a_recording_is_asked_and_the_answer_is_shown_and_spoken(
    script: Script, question: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.wav"
    assert chat(script, "--audio", question, "--speak", out, "--system", "Be brief.") == 0
    captured = capsys.readouterr()
    assert captured.out == "> What is this?\nA test.\n"
    assert captured.err.startswith("[36 tokens in, 32 cached, 7 out; first after ")
    assert "first sound after " in captured.err
    assert captured.err.endswith(f"0.1 s of sound in {out}]\n")
    assert heard_in(out) == pcm16(np.concatenate(TONES))
    (body,) = script.asked
    system, asked = body["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    (part,) = asked["content"]
    assert part["input_audio"]["format"] == "wav"
    assert base64.b64decode(part["input_audio"]["data"]) == question.read_bytes()
    assert (body["modalities"], body["audio"]) == (["text", "audio"], {"format": "wav"})
    assert (body["model"], body["stream"], body["max_tokens"]) == ("voice", True, 512)


def test_without_speak_nothing_is_spoken(script: Script, question: Path) -> None:
    assert chat(script, "--audio", question) == 0
    (body,) = script.asked
    assert not body.keys() & {"modalities", "audio"}


def test_what_is_typed_is_spoken_too_and_flags_go_along(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    flags = ["--voice", "joe", "-n", "9", "--temperature", "0", "--stop", "x", "--ignore-eos"]
    assert chat(script, "--speak", tmp_path / "out.wav", *flags, "--sampling-seed", 3) == 0
    (body,) = script.asked
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["audio"] == {"format": "wav", "voice": "joe"}
    wanted = {"max_tokens": 9, "temperature": 0.0, "stop": ["x"], "ignore_eos": True, "seed": 3}
    assert {name: body[name] for name in wanted} == wanted


def test_the_next_turn_has_the_words_of_the_recording_and_a_file_of_its_own(
    script: Script, question: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.wav"
    assert chat(script, "--audio", question, "--audio", question, "--speak", out) == 0
    before = script.asked[1]["messages"]
    assert before[:2] == [
        {"role": "user", "content": "What is this?"},
        {"role": "assistant", "content": "A test."},
    ]
    assert before[2]["content"][0]["type"] == "input_audio"
    assert heard_in(out) == heard_in(tmp_path / "out-2.wav")


def test_a_recording_may_be_asked_between_typed_messages(
    script: Script,
    question: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed = f"hello\n/audio {question}\n/audio\n/audio {question}x\nbye\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert chat(script) == 0
    assert [len(body["messages"]) for body in script.asked] == [1, 3, 5]
    err = capsys.readouterr().err
    assert "which recording?" in err
    assert f"{question}x cannot be read: No such file" in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--audio", "no.wav"], "no.wav cannot be read: No such file"),
        (["--audio", "QUESTION", "--speak", "no/out.wav"], "no/out.wav cannot be written"),
        (["--audio", "QUESTION", "--speak", "."], "cannot be written: Is a directory"),
    ],
)
def test_files_that_are_of_no_use_are_told_of_before_anything_is_asked(
    script: Script,
    question: Path,
    arguments: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [str(question) if word == "QUESTION" else word for word in arguments]
    assert chat(script, *given) == 2
    assert reason in capsys.readouterr().err
    assert not script.asked


def test_a_model_that_has_no_ears_or_no_voice_is_told_of(
    script: Script, question: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.modalities = ["text"]
    out = tmp_path / "out.wav"
    assert chat(script, "--audio", question) == 2
    assert chat(script, "--speak", out) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "mstar: voice does not listen: it takes text only; voice does"
    assert second == "mstar: voice does not speak: it gives text only; voice does"
    assert main(["chat", "other", "--url", script.url]) == 2
    assert "has no model 'other'; it has voice" in capsys.readouterr().err
    assert not script.asked
    assert not out.exists()


def test_a_text_model_here_is_told_of_before_its_weights_are_loaded(
    tiny_folder: Path, question: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", str(tiny_folder), "--audio", str(question)]) == 2
    captured = capsys.readouterr()
    assert "does not listen: it takes text only" in captured.err
    assert "loaded" not in captured.err


def test_what_was_spoken_before_an_error_stays_a_whole_file(
    script: Script, question: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.events = [*ANSWER[:5], {"error": {"message": "the engine ended"}}]
    out = tmp_path / "out.wav"
    assert chat(script, "--audio", question, "--speak", out) == 2
    captured = capsys.readouterr()
    assert captured.out == "> What is this?\nA \n"
    assert "the engine ended" in captured.err
    assert heard_in(out) == pcm16(TONES[0])


def test_a_refused_question_leaves_the_old_file(
    script: Script, question: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.refuse = lambda body: {"message": "voice is 'bob'", "param": "voice"}
    out = tmp_path / "out.wav"
    out.write_bytes(b"before")
    assert chat(script, "--audio", question, "--speak", out, "--voice", "bob") == 2
    assert "answered 400: voice is 'bob'" in capsys.readouterr().err
    assert out.read_bytes() == b"before"
    assert len(script.asked) == 1


def test_an_answer_takes_what_the_context_has_left(script: Script, question: Path) -> None:
    full = {"message": "max_tokens is 512", "param": "max_tokens"}
    script.refuse = lambda body: full if "max_tokens" in body else None
    assert chat(script, "--audio", question) == 0
    assert ["max_tokens" in body for body in script.asked] == [True, False]


def test_sound_that_is_no_wav_is_an_error(
    script: Script, question: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.events = [sound(pcm16(TONES[0]))]
    assert chat(script, "--audio", question, "--speak", tmp_path / "out.wav") == 2
    assert "does not begin as a WAV does" in capsys.readouterr().err


def test_what_is_no_recording_is_refused_where_nobody_else_would(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    path = tmp_path / "notes.wav"
    path.write_text("no sound")
    with pytest.raises(RequestError, match=r"notes\.wav: the audio's 8 bytes cannot be decoded"):
        Recording.read(path, is_checked=True)
    assert Recording.read(path, is_checked=False).data == b"no sound"


class Terminal(io.StringIO):
    """An input where somebody types."""

    def isatty(self) -> bool:
        return True


def test_where_somebody_types_the_talk_goes_on_behind_recordings(
    script: Script,
    question: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("and now?\n"))
    script.refuse = lambda body: {"message": "no"} if len(script.asked) == 1 else None
    assert chat(script, "--audio", question, "--audio", question) == 0
    assert "answered 400: no" in capsys.readouterr().err
    assert [len(body["messages"]) for body in script.asked] == [1, 1, 3]
    assert script.asked[2]["messages"][2] == {"role": "user", "content": "and now?"}


class Interrupted:
    """An answerer at whom Ctrl-C is pressed."""

    max_tokens: int | None = 9

    def answer(self, messages: Messages, *, is_spoken: bool) -> Reply:
        assert is_spoken
        yield Piece(text="Well", sounds=[Sound(TONES[0], RATE)])
        raise KeyboardInterrupt


def test_an_interrupted_answer_keeps_what_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    out = tmp_path / "out.wav"
    assert Talk(Interrupted(), None, SoundFiles(out)).run() == 0
    assert capsys.readouterr().out == "Well (interrupted)\n"
    assert heard_in(out) == pcm16(TONES[0])
