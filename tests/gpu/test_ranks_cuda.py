"""Two GPUs with a half of the model each choose the tokens that one GPU finds likely."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mstar.engine.engine import EngineCore
from tests.gpu.ranks_program import engine, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    # No multiple of two, so that one rank's part of the head is padded.
    "vocab_size": 191,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 320,
    "max_position_embeddings": 4096,
    "rope_theta": 5e5,
    "eos_token_id": 1,
}
# Error of a log-probability: the dtype's rounding, grown by two layers.
TOLERANCE = {"bfloat16": 0.5, "float32": 2e-3}
LENS = (5, 200, 1, 64, 17, 333, 48, 700)


@pytest.mark.parametrize(
    ("dtype", "cuda_graphs", "budget"),
    [
        ("bfloat16", True, 48),
        ("bfloat16", True, 1024),
        ("bfloat16", False, 48),
        ("float32", True, 48),
        ("float32", False, 48),
    ],
)
def test_two_gpus_choose_what_one_finds_likely(
    tmp_path: Path, dtype: str, cuda_graphs: bool, budget: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    asked = [torch.randint(2, 191, (n,), generator=generator).tolist() for n in LENS]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    program = [sys.executable, "-m", "tests.gpu.ranks_program", str(tmp_path), dtype]
    done = subprocess.run(
        [*program, "2", str(cuda_graphs), str(budget)],
        input=json.dumps(asked).encode(),
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    told = json.loads(done.stdout)
    assert told["cached"] >= 200 // 16 * 16
    reference = engine(str(tmp_path), "float32", 1)
    for got in told["rounds"]:
        assert_likely(reference, asked, got, TOLERANCE[dtype])


def assert_likely(
    reference: EngineCore,
    asked: list[list[int]],
    got: list[list[tuple[int, float]]],
    tolerance: float,
) -> None:
    """Compare the tokens of answers, each with its log-probability, to another engine's."""
    contexts = [
        ids + [token for token, _ in result[:n]]
        for ids, result in zip(asked, got, strict=True)
        for n in range(len(result))
    ]
    chosen = [entry for result in got for entry in result]
    expected = run(reference, contexts, 1)
    for (token, logprob), (known,) in zip(chosen, expected, strict=True):
        logprobs = dict(known.top)
        assert abs(logprob - logprobs[token]) < tolerance
        assert known.top[0][1] - logprobs[token] < 2 * tolerance


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_engine_on_the_second_gpu_is_used_by_threads_whose_current_one_is_the_first(
    tmp_path: Path, dtype: str, cuda_graphs: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    asked = [torch.randint(2, 191, (n,), generator=generator).tolist() for n in LENS]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert torch.cuda.current_device() == 0
    core = engine(str(tmp_path), dtype, 1, cuda_graphs=cuda_graphs, budget=1024, device="cuda:1")
    reference = engine(str(tmp_path), "float32", 1)
    with ThreadPoolExecutor(1) as pool:
        for results in (run(core, asked), pool.submit(run, core, asked).result()):
            got = [[(entry.token_id, entry.logprob) for entry in result] for result in results]
            assert_likely(reference, asked, got, TOLERANCE[dtype])
    assert torch.cuda.current_device() == 0


def test_sums_and_gathers_of_any_size_are_right_and_the_same(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.gpu.sums_program"]
    logs = [(tmp_path / str(rank)).open("w") for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [*program, str(rank), "2", str(tmp_path / "meeting")],
            stderr=log,
            cwd=Path(__file__).parents[2],
        )
        for rank, log in enumerate(logs)
    ]
    try:
        deadline = time.monotonic() + 200
        # Who has failed leaves the other waiting for ever.
        while time.monotonic() < deadline and {rank.poll() for rank in ranks} == {None}:
            time.sleep(0.1)
        grace = time.monotonic() + 20
        while time.monotonic() < grace and None in {rank.poll() for rank in ranks}:
            time.sleep(0.1)
        codes = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        for log in logs:
            log.close()
    assert codes == [0, 0], [Path(log.name).read_text() for log in logs]
