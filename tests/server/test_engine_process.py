"""How the engine process ends when its loop fails."""

import subprocess
import sys
from pathlib import Path

import pytest

_FAILS = """
import atexit, sys
from mstar.errors import EngineDeadError
from mstar.server import engine_process

atexit.register(print, "destroyed", flush=True)

class Loop:
    def run(self):
        raise {error}

engine_process._serve(Loop())
"""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("EngineDeadError('rank 1 is gone')", "the engine ends: rank 1 is gone"),
        ("RuntimeError('a bug')", "RuntimeError: a bug"),
    ],
)
def test_what_the_loop_fails_of_ends_the_process_at_once(error: str, told: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _FAILS.format(error=error)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert told in ended.stderr
    assert "destroyed" not in ended.stdout
