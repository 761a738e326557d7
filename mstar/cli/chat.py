"""`mstar chat`: a talk in the terminal."""

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from mstar.errors import ContextLengthError, MstarError

if TYPE_CHECKING:
    from mstar.engine.resources.sampler.config import SamplingParams
    from mstar.library import Completion, Engine, TextStream

MAX_TOKENS = 512
"""Of one answer, where nobody says otherwise: a small model may never end by itself."""
TEMPERATURE = 0.7
"""Where neither the user nor the checkpoint has one."""
_COMMANDS = {
    "/help": "shows these commands",
    "/reset": "forgets the talk",
    "/exit": "ends it, as Ctrl-D does; Ctrl-C ends an answer",
}


def sampling_defaults(model: str) -> dict[str, float]:
    """Return how a model's makers want it sampled.

    Args:
        model: Its name; a folder may have a ``generation_config.json``.

    Raises:
        ModelNotFoundError: If there is no such model.
        WeightsError: If that file is broken.
    """
    from mstar.models.locate import resolve  # noqa: PLC0415
    from mstar.models.weights import read_json  # noqa: PLC0415

    file = resolve(model) / "generation_config.json"
    stored = read_json(file) if file.exists() else {}
    numbers = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if isinstance(value := stored.get(name), (int, float))
    }
    return {"temperature": TEMPERATURE} | numbers


def talk(engine: "Engine", params: "SamplingParams", system: str | None) -> int:
    """Answer what is typed until the input ends; returns the exit status.

    Args:
        engine: Who answers.
        params: How; an answer gets fewer than its ``max_tokens`` where the context has no more.
        system: What the model is told beforehand.
    """
    print(f"Type a message; {_list_commands()}.", file=sys.stderr)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        word = text.split(maxsplit=1)[0] if text else ""
        if word in ("/exit", "/quit"):
            return 0
        if word == "/reset":
            messages = list(opening)
        elif word == "/help":
            print(f"{_list_commands()}.", file=sys.stderr)
        elif word[:1] == "/" and word[1:].isalpha():
            print(f"there is no {word}: {_list_commands()}.", file=sys.stderr)
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                answer = _answer(engine, messages, params)
            except MstarError as error:
                hint = " (/reset forgets the talk)" if len(messages) > len(opening) + 1 else ""
                print(f"mstar: {error}{hint}", file=sys.stderr)
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _list_commands() -> str:
    return ", ".join(f"{name} {text}" for name, text in _COMMANDS.items())


def _answer(engine: "Engine", messages: list[dict[str, str]], params: "SamplingParams") -> str:
    """Print an answer as it comes and return it; Ctrl-C ends it early."""
    pieces: list[str] = []
    started = time.monotonic()
    first: float | None = None
    with _start(engine, messages, params) as stream:
        try:
            for text in stream:
                first = first or time.monotonic()
                pieces.append(text)
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            print(" (interrupted)")
            return "".join(pieces)
        print()
        answer = stream.completion
        wait = 1000 * ((first or time.monotonic()) - started)
        print(
            f"[{answer.num_prompt_tokens} tokens in, {answer.num_cached_tokens} cached, "
            f"{len(answer.token_ids)} out; first after {wait:.0f} ms{_end(answer, params)}]",
            file=sys.stderr,
        )
    return "".join(pieces)


def _start(
    engine: "Engine", messages: list[dict[str, str]], params: "SamplingParams"
) -> "TextStream":
    try:
        return engine.stream(messages=messages, params=params)
    except ContextLengthError as error:
        if error.param != "max_tokens":
            raise
        return engine.stream(messages=messages, params=replace(params, max_tokens=None))


def _end(answer: "Completion", params: "SamplingParams") -> str:
    """Return why an answer ended, where it did not end by itself."""
    if answer.finish_reason == "stop":
        return ""
    if answer.finish_reason != "length":
        return f"; ended by {answer.finish_reason}"
    if len(answer.token_ids) == params.max_tokens:
        return "; cut by --max-tokens"
    return "; cut since the context is full, /reset forgets the talk"
