"""Serves small models that ship in Python packages: asks one in writing, and one by voice."""

import argparse
import base64
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import OpenAI

READY = re.compile(r"mstar is ready at (http://\S+)")
START_SECONDS = 180
SYSTEM = (
    "You are a helpful assistant who answers questions about geography, history and science in one "
    "short and friendly English sentence. You never make things up, and when you do not know "
    "something, you say so. You explain difficult words in plain language, you give numbers with "
    "their units, and you name the country of a place when it is not obvious from the question."
)
QUESTIONS = (
    "What is the capital of France?",
    "Which river flows through London?",
    "What is the largest planet in our solar system?",
    "What is the chemical symbol for gold?",
)
SPOKEN_QUESTION = "What colour is the sky?"


def ask(client: OpenAI, model: str, question: str) -> None:
    """Ask one question, streaming, and print the answer with tokens and timings."""
    start = time.perf_counter()
    first = None
    text = ""
    usage = None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        temperature=0,
        max_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - start
            text += chunk.choices[0].delta.content
    total = time.perf_counter() - start
    assert usage is not None, "the server sent no usage"
    assert usage.prompt_tokens_details is not None, "the usage says nothing about cached tokens"
    print(f"\nQ  {question}\nA  {text.strip()}")
    print(
        f"   {usage.prompt_tokens} prompt tokens, {usage.prompt_tokens_details.cached_tokens} of "
        f"them cached · first token after {1e3 * (first or total):.0f} ms · "
        f"{usage.completion_tokens} tokens in {total:.2f} s",
        flush=True,
    )


def ask_by_voice(client: OpenAI, folder: Path) -> None:
    """Have a question spoken, ask with the recording, and write down how the answer sounds."""
    # Whole, so that the head of the file tells its length.
    question = client.audio.speech.create(
        model="voice",
        voice="",
        input=SPOKEN_QUESTION,
        response_format="wav",
        extra_body={"stream": False},
    ).content
    asked = folder / "question.wav"
    asked.write_bytes(question)
    print(f"\nQ  {asked}, in which the voice says {SPOKEN_QUESTION!r}")
    start = time.perf_counter()
    first = None
    sound = b""
    heard = text = ""
    stream = client.chat.completions.create(
        model="voice",
        messages=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_audio",
                        "input_audio": {
                            "data": base64.b64encode(question).decode(),
                            "format": "wav",
                        },
                    }
                ],
            },
        ],
        modalities=["text", "audio"],
        audio={"voice": "", "format": "wav"},
        temperature=0,
        max_tokens=128,
        stream=True,
    )
    for chunk in stream:
        for choice in chunk.choices:
            # What goes beyond the client's own fields comes as extras of the same names.
            delta = choice.delta.model_dump()
            heard += delta.get("input_transcript") or ""
            text += delta.get("content") or ""
            piece = base64.b64decode((delta.get("audio") or {}).get("data") or "")
            if piece:
                first = first or time.perf_counter() - start
                sound += piece
    total = time.perf_counter() - start
    answer = folder / "answer.wav"
    seconds = write_wav(answer, sound)
    print(f"   heard: {heard.strip()}\nA  {text.strip()}")
    print(f"   wrote {answer}, {seconds:.1f} s of speech")
    print(f"   first sound after {first or total:.2f} s, all of it after {total:.2f} s", flush=True)


def write_wav(path: Path, streamed: bytes) -> float:
    """Write a WAV that came as a stream, with its length in its head; returns its seconds."""
    rate = int.from_bytes(streamed[24:28], "little")
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(streamed[44:])
        return file.getnframes() / rate


class NotServed(Exception):
    """A server ended before it was ready."""


@contextmanager
def serving(model: str) -> Iterator[OpenAI]:
    """Run a server of a model on a free port; gives a client of it.

    Raises:
        NotServed: If it ends before it is ready; what it printed says why.
        SystemExit: If it ends in another way than it should.
    """
    command = [sys.executable, "-m", "mstar", "serve", model, "--port", "0"]
    start = time.perf_counter()
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    try:
        address = wait_until_ready(server)
        print(f"\nready after {time.perf_counter() - start:.1f} s")
        yield OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
    print(f"\nthe server ended with exit code {server.returncode}")
    if server.returncode:
        raise SystemExit(server.returncode)


def wait_until_ready(server: subprocess.Popen[str]) -> str:
    """Print what a server says until it is ready; returns its address."""
    assert server.stdout is not None
    watchdog = threading.Timer(START_SECONDS, server.kill)
    watchdog.start()
    try:
        for line in server.stdout:
            print(f"   | {line.rstrip()}", flush=True)
            if found := READY.search(line):
                threading.Thread(target=server.stdout.read, daemon=True).start()
                return found.group(1)
    finally:
        watchdog.cancel()
    raise NotServed(f"the server ended with exit code {server.wait()} before it was ready")


def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    model = parser.parse_args().model
    try:
        with serving(model) as client:
            for question in (QUESTIONS[0], *QUESTIONS):
                ask(client, model, question)
            print("\nThe first question was asked twice: what it shares with itself, and what all")
            print("questions share with each other, was computed once.")
    except NotServed as error:
        raise SystemExit(str(error)) from None
    # The first server has given its memory back.
    print("\nNow by voice: one engine hears, answers and speaks.", flush=True)
    try:
        with serving("voice") as client:
            ask_by_voice(client, Path(tempfile.mkdtemp(prefix="mstar-demo-")))
    except NotServed:
        print("\nIt could not be served, as said above: the demonstration ends without it.")


if __name__ == "__main__":
    main()
