"""Decode steps of composite models on a CUDA device, recorded and not, drawn weights.

A Whisper in the shape of large-v3 writes down windows of silence; a Janus in that of Pro-1B paints.
"""

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import JanusConfig, LlamaConfig, PretrainedConfig, WhisperConfig

from mstar.catalog import open_engine
from mstar.engine.engine import EngineCore
from mstar.engine.request import Companion, PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.models.janus.config import GUIDANCE, IMAGE, OUTPUT, UNGUIDED

NUM_STEPS = 40
NUM_IDS = 24
"""Of a prompt that is painted."""
NUM_CODES = 576
"""Of a picture."""


class Case(NamedTuple):
    """A model and what is asked of it."""

    name: str
    files: dict[str, dict[str, Any]]
    """Of the checkpoint's folder."""
    ask: Callable[[EngineCore, str], PreparedRequest]
    """Makes a request of a name."""
    step_bytes: int
    """Of weights that a step reads."""
    request_bytes: int
    """Of what a step reads for each request."""


def _window(core: EngineCore, name: str) -> PreparedRequest:
    params = SamplingParams(max_tokens=10 * NUM_STEPS, temperature=0.0, ignore_eos=True)
    return core.model.trial(name, 1, params)


def _picture(core: EngineCore, name: str) -> PreparedRequest:
    ids = torch.randint(100, 1000, (NUM_IDS,), generator=torch.Generator().manual_seed(0)).tolist()
    return PreparedRequest(
        request_id=name,
        token_ids=ids,
        params=SamplingParams(max_tokens=NUM_CODES, seed=0),
        companions=[Companion(UNGUIDED, [1] * NUM_IDS)],
        options={OUTPUT: IMAGE, GUIDANCE: 5.0},
    )


def _named(config: PretrainedConfig, architecture: str) -> dict[str, Any]:
    return config.to_dict() | {"architectures": [architecture]}


def _whisper() -> Case:
    sides: dict[str, Any] = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 32), ("attention_heads", 20), ("ffn_dim", 5120))
    }
    config = WhisperConfig(vocab_size=51866, d_model=1280, num_mel_bins=128, **sides)
    generation = {
        "no_timestamps_token_id": 50364,
        "prev_sot_token_id": 50362,
        "lang_to_id": {"<|en|>": 50259, "<|de|>": 50261},
        "task_to_id": {"transcribe": 50360, "translate": 50359},
        "suppress_tokens": list(range(1, 90)),
        "begin_suppress_tokens": [220, 50257],
        "max_initial_timestamp_index": 50,
    }
    layer = 6 * 1280**2 + 2 * 1280 * 5120
    return Case(
        "Whisper large-v3",
        {
            "config.json": _named(config, "WhisperForConditionalGeneration"),
            "generation_config.json": generation,
            # What is written down says nothing.
            "tokenizer.json": json.loads(Tokenizer(BPE()).to_str()),
        },
        _window,
        step_bytes=2 * (32 * layer + 51866 * 1280),
        request_bytes=2 * 32 * 2 * 1500 * 1280,
    )


def _janus() -> Case:
    text = LlamaConfig(
        vocab_size=102400,
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=5632,
        max_position_embeddings=16384,
    )
    config = JanusConfig(text_config=text.to_dict())
    layer = 4 * 2048**2 + 3 * 2048 * 5632
    return Case(
        "Janus Pro 1B, painting",
        {"config.json": _named(config, "JanusForConditionalGeneration")},
        _picture,
        step_bytes=2 * 24 * layer,
        request_bytes=2 * 2 * 24 * 2 * 2048 * (NUM_IDS + NUM_STEPS),
    )


CASES = (_whisper, _janus)


def tables(batches: Sequence[int], bandwidth: float) -> Iterator[list[dict[str, object]]]:
    """Give a table for each model: sizes of batch, with recorded steps and without.

    Args:
        batches: Requests that run together.
        bandwidth: Of the card, in bytes a second.
    """
    for make in CASES:
        case, rows = make(), []
        for cuda_graphs in (True, False):
            core = engine(case, max(batches), device="cuda", cuda_graphs=cuda_graphs)
            rows += [_row(core, case, batch, bandwidth) for batch in batches]
            core.close()
            del core
            gc.collect()
            torch.cuda.empty_cache()
        yield rows


def engine(case: Case, max_num_seqs: int, **numbers: Any) -> EngineCore:
    """Return an engine on a case's model; ``numbers`` are the deployment's."""
    deployment = Deployment(
        max_num_seqs=max_num_seqs,
        kv_cache_bytes=8 << 30,
        encoder_cache_tokens=1500 * 2 * max_num_seqs,
        **numbers,
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, content in case.files.items():
            (Path(folder) / name).write_text(json.dumps(content))
        return open_engine(folder, deployment, dtype="bfloat16", load_format="dummy")


def _row(core: EngineCore, case: Case, batch: int, bandwidth: float) -> dict[str, object]:
    _begin(core, [case.ask(core, f"{batch}.warm.{place}") for place in range(batch)])
    names = [f"{batch}.{place}" for place in range(batch)]
    first = _begin(core, [case.ask(core, name) for name in names], keep=True)
    for _ in range(3):
        core.step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(NUM_STEPS):
        core.step()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - started) / NUM_STEPS * 1e3
    lens = {len(core._walker.requests[name].tokens) for name in names}
    assert min(lens) > NUM_STEPS, lens
    for name in names:
        core.abort(name)
    floor = (case.step_bytes + batch * case.request_bytes) / bandwidth * 1e3
    return {
        "what": f"{case.name}, {batch} requests",
        "recorded": "yes" if core._runner._recorders else "no",
        "ms a step": f"{wall:.2f}",
        "floor ms": f"{floor:.2f}",
        "ratio": f"{wall / floor:.2f}",
        "first tokens ms": f"{first:.1f}",
    }


def _begin(core: EngineCore, asked: Sequence[PreparedRequest], *, keep: bool = False) -> float:
    """Have requests begin together; returns after how many ms all have their first token."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for prepared in asked:
        core.add_request(prepared)
    requests = [core._walker.requests[prepared.request_id] for prepared in asked]
    while any(len(request.tokens) == request.num_prompt_tokens for request in requests):
        core.step()
    elapsed = (time.perf_counter() - started) * 1e3
    for prepared in () if keep else asked:
        core.abort(prepared.request_id)
    return elapsed
