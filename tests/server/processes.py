"""A model whose every answer is known beforehand, and servers that run it in real processes.

The model is a Llama whose layers add nothing, so its next token depends on the last token alone, by
a table: answers are exact, and characters and stop strings split over tokens as a test wants it.
"""

import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil
from numpy.typing import NDArray
from openai import OpenAI
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EMOJI_TEXT = "😀ď漢abcdefghijklmnopqrstuvwxyz"
"""What follows ``A``, one byte a token; then the model ends."""

START_SECONDS = 60.0
_POLL_SECONDS = 0.05


@dataclass
class TinyModel:
    """The folder of the model, and what the table says."""

    folder: Path
    eos_id: int
    ids: dict[int, int]
    """Token id of each byte."""


class ServerProcess:
    """One `mstar serve` with its log, started and waited for within bounds.

    Args:
        model: Its model.
        flags: Further flags.
        folder: Where it keeps its socket files; ``None``: wherever it likes.
    """

    def __init__(self, model: Path, *flags: str, folder: Path | None = None) -> None:
        command = [sys.executable, "-m", "mstar", "serve", str(model), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--served-model-name", "tiny", *flags],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            # A tiny model gains nothing from threads, and loses much where cores are shared.
            env=os.environ
            | {"OMP_NUM_THREADS": "1"}
            | ({} if folder is None else {"TMPDIR": str(folder)}),
        )
        self.lines: list[str] = []
        self._fresh: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            self._fresh.put(line)
        self._fresh.put(None)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = START_SECONDS) -> re.Match[str]:
        """Return the first match in the log from where the last wait ended."""
        num_waits = 0
        # Counted in short waits, so that a machine that stood still for a while is no failure.
        while num_waits * _POLL_SECONDS < seconds:
            try:
                line = self._fresh.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                num_waits += 1
                continue
            assert line is not None, f"the server ended before {pattern!r}:\n{self.log}"
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no {pattern!r} in {seconds} s:\n{self.log}")

    def wait_bound(self) -> "ServerProcess":
        self.url = self.wait_for(r"listening at (http://\S+), not ready yet")[1]
        return self

    def wait_ready(self) -> "ServerProcess":
        self.url = self.wait_for(r"mstar is ready at (http://\S+)")[1]
        return self

    def client(self, **options: object) -> OpenAI:
        settings = {"api_key": "none", "max_retries": 0, "timeout": 60.0} | options
        return OpenAI(base_url=f"{self.url}/v1", **settings)  # type: ignore[arg-type]

    def child(self, name: str) -> psutil.Process:
        """Return the child process that runs the module ``mstar.server.<name>``."""
        for child in psutil.Process(self.process.pid).children():
            if f"mstar.server.{name}" in child.cmdline():
                return child
        raise AssertionError(f"no child {name}")

    def end(self) -> int:
        """Ask the server to end and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the server did not end:\n{self.log}") from None
        finally:
            self.close()

    def close(self) -> None:
        """End whatever is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=10)
        self._reader.join(timeout=10)
        assert self.process.stderr is not None
        self.process.stderr.close()


StartServer = Callable[..., ServerProcess]


def write_tiny_model(folder: Path) -> TinyModel:
    """Write the model's files into ``folder``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    eos_id = backend.token_to_id("<end>")
    assert eos_id is not None
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<end>",
                "chat_template": template,
            }
        )
    )
    ids = {byte: backend.encode(bytes([byte]).decode("latin-1")).ids[-1] for byte in range(128)}
    encoded = backend.encode(EMOJI_TEXT).ids
    ids |= dict(zip(EMOJI_TEXT.encode(), encoded, strict=True))
    _write_weights(folder, _successors(ids, encoded, eos_id))
    return TinyModel(folder, eos_id, ids)


def _successors(ids: dict[int, int], text: list[int], eos_id: int) -> NDArray[np.int64]:
    """Return each token's successor: ``A`` begins the text, digits go round for ever."""
    after = np.full(eos_id + 1, ids[ord("0")])
    for digit in range(10):
        after[ids[ord("0") + digit]] = ids[ord("0") + (digit + 1) % 10]
    after[ids[ord("A")]] = text[0]
    after[text] = [*text[1:], eos_id]
    return after


def _write_weights(folder: Path, after: NDArray[np.int64]) -> None:
    vocab_size, head_dim, num_heads, width = len(after), 16, 2, 288
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": vocab_size - 1,
        "bos_token_id": None,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)

    def noise(*shape: int) -> NDArray[np.float32]:
        return rng.normal(size=shape, scale=0.1).astype(np.float32)

    embedding = np.zeros((vocab_size, width), np.float32)
    embedding[np.arange(vocab_size), np.arange(vocab_size)] = 1.0
    # The norm makes sqrt(width) = 17 of the one, so the successor is 25 above the rest.
    head = np.zeros((vocab_size, width), np.float32)
    head[after, np.arange(vocab_size)] = 1.5
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(width, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(width, np.float32)
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors[f"{prefix}self_attn.{name}.weight"] = noise(num_heads * head_dim, width)
        zeros = np.zeros((width, num_heads * head_dim), np.float32)
        tensors[f"{prefix}self_attn.o_proj.weight"] = zeros
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}mlp.{name}.weight"] = noise(32, width)
        tensors[f"{prefix}mlp.down_proj.weight"] = np.zeros((width, 32), np.float32)
    save_file(tensors, folder / "model.safetensors")


Answer = tuple[int, dict[str, str], bytes]
"""Status, headers in lower case, body."""


def connect(server: ServerProcess) -> http.client.HTTPConnection:
    """Return a connection to a server."""
    where = urlsplit(server.url)
    return http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)


def call(
    server: ServerProcess,
    method: str,
    path: str,
    body: object = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """Return one request's answer as it came over the wire."""
    connection = connect(server)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    sent = ({"content-type": "application/json"} if data is not None else {}) | (headers or {})
    try:
        connection.request(method, path, data, sent)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return response.status, found, response.read()
    finally:
        connection.close()


def error_of(answer: Answer) -> tuple[int, dict[str, Any]]:
    """Return status and error object; there is nothing else in the body."""
    body = json.loads(answer[2])
    assert list(body) == ["error"], body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["code"], str)
    return answer[0], body["error"]


def wait_until(check: Callable[[], bool], seconds: float = 10.0) -> None:
    """Return once ``check`` holds; fails after ``seconds``."""
    for _ in range(int(seconds / _POLL_SECONDS)):
        if check():
            return
        time.sleep(_POLL_SECONDS)
    raise AssertionError(f"it did not happen in {seconds} s")


def user(text: str) -> list[Any]:
    """Return a conversation of one message."""
    return [{"role": "user", "content": text}]
