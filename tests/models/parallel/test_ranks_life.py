"""How engines of several processes begin and end, and what they refuse."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mstar.catalog import open_engine
from mstar.engine.parallel import LeadingEngine
from mstar.errors import ConfigError, EngineDeadError
from mstar.models.parallel.rank import device_of
from mstar.models.parallel.ranks import RankProcesses
from mstar.scratch import ScratchFolder
from tests.models.families import saved
from tests.models.ranks import NUMBERS, PROMPTS, add, assert_same, drain

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama-biases", tmp_path_factory.mktemp("ranks"))


def test_three_ranks_deal_a_width_out_unevenly(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 50,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "intermediate_size": 40,
        "max_position_embeddings": 128,
        "eos_token_id": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = []
    for size in (1, 3):
        numbers = replace(NUMBERS, tensor_parallel_size=size)
        engine = open_engine(str(tmp_path), numbers, dtype="float32", load_format="dummy")
        add(engine, "a", [ids % 50 for ids in PROMPTS[3]])
        told.append(drain(engine))
        engine.close()
    assert_same(*told)


def test_rank_that_dies_ends_the_engine_and_another_can_be_opened(folder: Path) -> None:
    losses: list[str] = []
    numbers = replace(NUMBERS, tensor_parallel_size=2)
    engine = open_engine(str(folder), numbers, on_loss=losses.append)
    assert isinstance(engine, LeadingEngine)
    ranks = engine._ranks
    assert isinstance(ranks, RankProcesses)
    add(engine, "a", PROMPTS[0])
    engine.step()
    os.kill(ranks._processes[0].pid, signal.SIGKILL)

    def go_on() -> None:
        for _ in range(100):
            engine.step()
            time.sleep(0.01)

    with pytest.raises(EngineDeadError, match="rank"):
        go_on()
    deadline = time.monotonic() + 10
    while not losses and time.monotonic() < deadline:
        time.sleep(0.01)
    assert losses == ["rank 1 has ended with status -9"]
    engine.close()
    again = open_engine(str(folder), numbers)
    add(again, "a", PROMPTS[0], max_tokens=3)
    assert len(drain(again)["a"]) == 3
    again.close()
    again.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensor_parallel_size": 0},
            "tensor_parallel_size is 0; it must be a whole number",
        ),
        (
            {"tensor_parallel_size": 2, "disk_cache_bytes": 1 << 20},
            "tensor_parallel_size is 2 and disk_cache_bytes .* 1048576",
        ),
        ({"tensor_parallel_size": 4}, r"is 4 and the model has 2 key heads.*it may be 1, 2"),
    ],
)
def test_what_ranks_cannot_do_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_engine(str(folder), replace(NUMBERS, **changes))


def test_families_that_run_on_one_device_say_so(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["WhisperForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"is 2; Whisper\w+ runs on one device only"):
        open_engine(str(tmp_path), replace(NUMBERS, tensor_parallel_size=2), load_format="dummy")


@pytest.mark.parametrize("device", ["cuda", "cuda:-1", "nonsense"])
def test_gpus_that_are_not_there_are_refused(folder: Path, device: str) -> None:
    message = "tensor_parallel_size is 64 and there are|which is not usable here"
    with pytest.raises(ConfigError, match=message):
        open_engine(str(folder), replace(NUMBERS, tensor_parallel_size=64, device=device))


def test_mistake_that_all_ranks_find_is_told_by_rank_0(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    losses: list[str] = []
    numbers = replace(NUMBERS, tensor_parallel_size=2, host_cache_bytes=1)
    for _ in range(3):
        with pytest.raises(ConfigError, match="one page takes 1024"):
            open_engine(str(folder), numbers, on_loss=losses.append)
    # Nobody is told of a rank that has ended of the same.
    assert losses == []
    assert list(tmp_path.iterdir()) == []


_DIES = """
import os, sys
from dataclasses import replace
from mstar.catalog import open_engine
from tests.models.ranks import NUMBERS
engine = open_engine(sys.argv[1], replace(NUMBERS, tensor_parallel_size=2))
pids = [process.pid for process in engine._ranks._processes]
print(*pids, flush=True)
os._exit(9)
"""


def test_ranks_end_with_rank_0_and_what_it_leaves_is_cleared_away(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = subprocess.run(
        [sys.executable, "-c", _DIES, str(folder)],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 9, told.stderr
    (pid,) = map(int, told.stdout.split())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ScratchFolder().close()
    assert list(tmp_path.iterdir()) == []


def test_devices_follow_that_of_rank_0() -> None:
    assert [device_of("cuda", rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert device_of("cuda:2", 1) == "cuda:3"
    assert device_of("cpu", 3) == "cpu"
