"""`mstar chat`: a talk in the terminal, in writing or by voice."""

import base64
import importlib.util
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mstar.cli.answerers import Answerer, Ending, Piece
from mstar.cli.sound_file import SoundFile, SoundFiles
from mstar.errors import ConfigError, MstarError, RequestError

MAX_TOKENS = 512
"""Of one answer, where nobody says otherwise: a small model may never end by itself."""
TEMPERATURE = 0.7
"""Where neither the user nor the checkpoint has one."""
_COMMANDS = {
    "/help": "shows these commands",
    "/audio FILE": "asks with a recording",
    "/reset": "forgets the talk",
    "/exit": "ends it, as Ctrl-D does; Ctrl-C ends an answer",
}
_CHECK_RATE = 16_000
"""At which a recording is decoded to see that it is one."""


def sampling_defaults(model: str) -> dict[str, float]:
    """Return how a model's makers want it sampled.

    Args:
        model: Its name; a folder may have a ``generation_config.json``.

    Raises:
        ModelNotFoundError: If there is no such model.
        WeightsError: If that file is broken.
    """
    from mstar.catalog import writer_of  # noqa: PLC0415
    from mstar.models.locate import resolve  # noqa: PLC0415
    from mstar.models.weights import read_json  # noqa: PLC0415

    file = resolve(writer_of(model)) / "generation_config.json"
    stored = read_json(file) if file.exists() else {}
    numbers = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if isinstance(value := stored.get(name), (int, float))
    }
    return {"temperature": TEMPERATURE} | numbers


@dataclass(frozen=True)
class Recording:
    """A file with a spoken question."""

    path: Path
    data: bytes

    @classmethod
    def read(cls, path: Path, *, is_checked: bool) -> "Recording":
        """Read a file.

        Args:
            path: Where it is.
            is_checked: Decode it, to see that it is a recording; a server does that itself.

        Raises:
            ConfigError: If it cannot be read.
            RequestError: If it is no recording.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        if is_checked and importlib.util.find_spec("soundfile") is not None:
            from mstar.preprocess.media.audio import decode_audio  # noqa: PLC0415

            try:
                decode_audio(data, _CHECK_RATE)
            except RequestError as error:
                raise RequestError(f"{path}: {error.message}", code=error.code) from error
        return cls(path, data)

    def content(self) -> list[dict[str, Any]]:
        """Return it as the content of a message."""
        kind = self.path.suffix.removeprefix(".").lower() or "wav"
        data = base64.b64encode(self.data).decode()
        return [{"type": "input_audio", "input_audio": {"data": data, "format": kind}}]


@dataclass
class _Heard:
    """An answer as it comes in, on standard output and in a file."""

    file: SoundFile | None
    started: float = field(default_factory=time.monotonic)
    text: str = ""
    question: str = ""
    """What the recording says."""
    first: float | None = None
    """Seconds to the first text."""
    first_sound: float | None = None

    def take(self, piece: Piece) -> None:
        """Show and write a piece."""
        now = time.monotonic() - self.started
        if piece.heard:
            heard = piece.heard if self.question else f"> {piece.heard.lstrip()}"
            self.question += piece.heard
            print(heard, end="", flush=True)
        if piece.text:
            if self.first is None:
                self.first = now
                self.end_question()
            self.text += piece.text
            print(piece.text, end="", flush=True)
        for sound in piece.sounds:
            self.first_sound = self.first_sound or now
            if self.file is not None:
                self.file.write(sound)

    def end_question(self) -> None:
        """End the line of the question."""
        if self.question:
            print()

    def summary(self, done: Ending, end: str) -> str:
        """Return what the answer took.

        Args:
            done: What was told of it.
            end: Why it ended, where it did not end by itself.
        """
        now = time.monotonic() - self.started
        first = now if self.first is None else self.first
        text = (
            f"{done.num_prompt_tokens} tokens in, {done.num_cached_tokens} cached, "
            f"{done.num_tokens} out; first after {1000 * first:.0f} ms"
        )
        if self.file is not None and self.first_sound is not None:
            text += (
                f", first sound after {1000 * self.first_sound:.0f} ms, all after {now:.2f} s; "
                f"{self.file.seconds:.1f} s of sound in {self.file.path}"
            )
        return f"[{text}{end}]"


class Talk:
    """A conversation.

    Args:
        answerer: Who answers.
        system: What the model is told beforehand.
        files: Where answers are spoken to; ``None``: they are written only.
        checks_recordings: See :meth:`Recording.read`.
    """

    def __init__(
        self,
        answerer: Answerer,
        system: str | None,
        files: SoundFiles | None = None,
        *,
        checks_recordings: bool = True,
    ) -> None:
        self._answerer = answerer
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, Any]] = list(self._opening)
        self._files = files
        self._checks_recordings = checks_recordings

    def run(self, recordings: Sequence[Recording] = ()) -> int:
        """Answer recordings, then what is typed until the input ends; returns the exit status.

        A question that fails is told of and the talk goes on, but where nobody types: then a
        recording that fails ends it.

        Raises:
            MstarError: If a recording of a talk without a terminal cannot be answered.
        """
        for recording in recordings:
            self._say(recording.content(), may_fail=sys.stdin.isatty())
        if recordings and not sys.stdin.isatty():
            return 0
        print(f"Type a message; {_list_commands()}.", file=sys.stderr)
        while True:
            try:
                text = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return 0
            if not self._obey(text):
                return 0

    def _obey(self, text: str) -> bool:
        """Do what a line says; returns whether the talk goes on."""
        word, _, rest = text.partition(" ")
        if word in ("/exit", "/quit"):
            return False
        if word == "/reset":
            self._messages = list(self._opening)
        elif word == "/help":
            print(f"{_list_commands()}.", file=sys.stderr)
        elif word == "/audio":
            self._play(rest.strip())
        elif word[:1] == "/" and word[1:].isalpha():
            print(f"there is no {word}: {_list_commands()}.", file=sys.stderr)
        elif text:
            self._say(text)
        return True

    def _play(self, name: str) -> None:
        if not name:
            print("which recording? write /audio FILE", file=sys.stderr)
            return
        try:
            path = Path(name).expanduser()
            recording = Recording.read(path, is_checked=self._checks_recordings)
        except MstarError as error:
            print(f"mstar: {error}", file=sys.stderr)
            return
        self._say(recording.content())

    def _say(self, content: str | list[dict[str, Any]], *, may_fail: bool = True) -> None:
        message = {"role": "user", "content": content}
        self._messages.append(message)
        try:
            heard = self._answer()
        except MstarError as error:
            self._messages.pop()
            if not may_fail:
                raise
            is_first = len(self._messages) == len(self._opening)
            hint = "" if is_first else " (/reset forgets the talk)"
            print(f"mstar: {error}{hint}", file=sys.stderr)
            return
        if not isinstance(content, str):
            # Its words are what the model read of it, and cost less to send again.
            message["content"] = heard.question.strip()
        self._messages.append({"role": "assistant", "content": heard.text})

    def _answer(self) -> _Heard:
        """Show an answer as it comes and return it; Ctrl-C ends it early."""
        file = None if self._files is None else self._files.take()
        heard = _Heard(file)
        reply = self._answerer.answer(self._messages, is_spoken=file is not None)
        try:
            with closing(reply):
                for part in reply:
                    if isinstance(part, Piece):
                        heard.take(part)
                        continue
                    print()
                    print(heard.summary(part, self._end(part)), file=sys.stderr)
        except KeyboardInterrupt:
            print(" (interrupted)")
        except MstarError:
            if heard.text or heard.question:
                print()
            raise
        finally:
            if self._files is not None and file is not None:
                self._files.give_back(file)
        return heard

    def _end(self, done: Ending) -> str:
        """Return why an answer ended, where it did not end by itself."""
        if done.finish_reason == "stop":
            return ""
        if done.finish_reason != "length":
            return f"; ended by {done.finish_reason}"
        if done.num_tokens == self._answerer.max_tokens:
            return "; cut by --max-tokens"
        return "; cut since the context is full, /reset forgets the talk"


def _list_commands() -> str:
    return ", ".join(f"{name} {text}" for name, text in _COMMANDS.items())
