"""Serves a small model that ships in a Python package, and asks it questions."""

import argparse
import re
import signal
import subprocess
import sys
import threading
import time

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


def start_server(model: str) -> tuple[subprocess.Popen[str], str]:
    """Start the server on a free port; returns it and its address once it is ready."""
    command = [sys.executable, "-m", "mstar.cli", "serve", model, "--port", "0"]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    assert server.stdout is not None
    watchdog = threading.Timer(START_SECONDS, server.kill)
    watchdog.start()
    for line in server.stdout:
        print(f"   | {line.rstrip()}", flush=True)
        if found := READY.search(line):
            watchdog.cancel()
            threading.Thread(target=server.stdout.read, daemon=True).start()
            return server, found.group(1)
    raise SystemExit(f"the server ended with exit code {server.wait()} before it was ready")


def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    model = parser.parse_args().model
    start = time.perf_counter()
    server, address = start_server(model)
    print(f"\nready after {time.perf_counter() - start:.1f} s")
    try:
        client = OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60)
        for question in (QUESTIONS[0], *QUESTIONS):
            ask(client, model, question)
        print("\nThe first question was asked twice: what it shares with itself, and what all")
        print("questions share with each other, was computed once.")
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
    print(f"\nthe server ended with exit code {server.returncode}")
    sys.exit(server.returncode)


if __name__ == "__main__":
    main()
