"""Transcripts on a CUDA device: steps of a Whisper in the shape of large-v3, recorded and not."""

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mstar.engine.engine import EngineCore
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.models.parallel.ranks import open_engine

LARGE_V3: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "vocab_size": 51866,
    "d_model": 1280,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "eos_token_id": 50257,
    "decoder_start_token_id": 50258,
    "torch_dtype": "float16",
    **{
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 32), ("attention_heads", 20), ("ffn_dim", 5120))
    },
}
GENERATION: dict[str, Any] = {
    "no_timestamps_token_id": 50364,
    "prev_sot_token_id": 50362,
    "lang_to_id": {"<|en|>": 50259, "<|de|>": 50261},
    "task_to_id": {"transcribe": 50360, "translate": 50359},
    "suppress_tokens": list(range(1, 90)),
    "begin_suppress_tokens": [220, 50257],
    "max_initial_timestamp_index": 50,
}
WIDTH, NUM_LAYERS = 1280, 32
STEP_BYTES = 2 * (NUM_LAYERS * (6 * WIDTH**2 + 2 * WIDTH * 5120) + 51866 * WIDTH)
"""Weights of the decoder."""
WINDOW_BYTES = 2 * NUM_LAYERS * 2 * 1500 * WIDTH
"""Keys and values of one window."""
NUM_STEPS = 40


def rows(batches: Sequence[int], bandwidth: float) -> list[dict[str, object]]:
    """Return the table's rows: each size of batch, with recorded steps and without.

    Args:
        batches: Windows that are written down together.
        bandwidth: Of the card, in bytes a second.
    """
    found = []
    for cuda_graphs in (True, False):
        core = _engine(max(batches), cuda_graphs)
        found += [_row(core, batch, bandwidth) for batch in batches]
        core.close()
        del core
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _engine(max_num_seqs: int, cuda_graphs: bool) -> EngineCore:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LARGE_V3))
        (Path(folder) / "generation_config.json").write_text(json.dumps(GENERATION))
        deployment = Deployment(
            device="cuda",
            max_num_seqs=max_num_seqs,
            cuda_graphs=cuda_graphs,
            kv_cache_bytes=8 << 30,
            encoder_cache_tokens=1500 * 2 * max_num_seqs,
        )
        return open_engine(folder, deployment, dtype="float16", load_format="dummy")


def _row(core: EngineCore, batch: int, bandwidth: float) -> dict[str, object]:
    params = SamplingParams(max_tokens=4 * NUM_STEPS, temperature=0.0, ignore_eos=True)
    names = [f"{batch}.{place}" for place in range(batch)]
    first: list[float] = []
    for name in names:
        started = time.perf_counter()
        core.add_request(core.model.trial(name, 1, params))
        while not any(output.request_id == name for output in core.step()):
            pass
        first.append((time.perf_counter() - started) * 1e3)
    for _ in range(3):
        core.step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(NUM_STEPS):
        assert len(core.step()) == batch
    torch.cuda.synchronize()
    wall = (time.perf_counter() - started) / NUM_STEPS * 1e3
    # What it says is in words that no tokenizer knows: it is never told.
    for name in names:
        core.abort(name)
    floor = (STEP_BYTES + batch * WINDOW_BYTES) / bandwidth * 1e3
    is_recorded = bool(core._runner._recorders)
    return {
        "what": f"large-v3, {batch} windows, {'recorded' if is_recorded else 'not recorded'}",
        "ms a step": f"{wall:.2f}",
        "floor ms": f"{floor:.2f}",
        "ratio": f"{wall / floor:.2f}",
        "first token ms": f"{statistics.median(first):.1f}",
    }
