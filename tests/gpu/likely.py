"""Holds what a CUDA device computes against the CPU in float32, behind the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mstar.engine.engine import EngineCore
from mstar.engine.output import Emitted, TokenLogprobs
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.models.decoder import load
from mstar.models.dummy import DummyCheckpoint

DEVICE = "cuda"
"""What is held against the CPU."""
# Error of a log-probability whose logits spread over a few units: the dtype's rounding, grown
# by two layers.
TOLERANCE = {"bfloat16": 0.5, "float16": 0.04, "float32": 2e-3}
# A size of heads for each dtype: every one of both compiles kernels.
HEAD_DIM = {"bfloat16": 128, "float16": 64, "float32": 64}
Result = list[TokenLogprobs]


def config(head_dim: int, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 192,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "intermediate_size": 320,
        "max_position_embeddings": 4096,
        "rope_theta": 5e5,
        "eos_token_id": 1,
        **changes,
    }


def engine(
    device: str, dtype: str, head_dim: int, changes: dict[str, Any], **kw: Any
) -> EngineCore:
    checkpoint = DummyCheckpoint(Path("tiny"), config(head_dim, **changes))
    model = load(checkpoint, name="tiny", dtype=getattr(torch, dtype), device=torch.device(device))
    numbers = {"page_size": 16, "num_pages": 400, "max_num_seqs": 8, "max_model_len": 1024} | kw
    return EngineCore(model, Deployment(device=device, dtype=dtype, **numbers))


def prompts(seed: int, lens: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 192, (n,), generator=generator).tolist() for n in lens]


def run(core: EngineCore, asked: Sequence[list[int]], **params: Any) -> list[Result]:
    wanted = {"max_tokens": 10, "temperature": 0.0, "logprobs": 20, "ignore_eos": True} | params
    for place, ids in enumerate(asked):
        core.add_request(
            PreparedRequest(
                request_id=str(place),
                token_ids=ids,
                params=SamplingParams(**wanted),
                root=core.root,
            )
        )
    return [told.logprobs for told in drain(core, len(asked))]


def assert_likely(
    reference: EngineCore, asked: Sequence[list[int]], got: Sequence[Result], tolerance: float
) -> None:
    """Every token chosen is the best but for the tolerance, behind the same tokens."""
    contexts = [
        ids + [entry.token_id for entry in result[:n]]
        for ids, result in zip(asked, got, strict=True)
        for n in range(len(result))
    ]
    chosen = [entry for result in got for entry in result]
    expected = run(reference, contexts, max_tokens=1)
    for entry, (known,) in zip(chosen, expected, strict=True):
        logprobs = dict(known.top)
        assert entry.token_id in logprobs, (entry.token_id, known.top[:3])
        assert abs(entry.logprob - logprobs[entry.token_id]) < tolerance
        assert known.top[0][1] - logprobs[entry.token_id] < 2 * tolerance


@dataclass
class Told:
    """What a request is told by an engine whose nodes nobody watches."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    emitted: list[Emitted] = field(default_factory=list)
    num_cached_tokens: int = 0


def drain(core: EngineCore, count: int) -> list[Told]:
    """Run requests named by their numbers to their ends, the engine's books checked."""
    results = [Told() for _ in range(count)]
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            told = results[int(output.request_id)]
            told.tokens += output.token_ids
            told.logprobs += output.logprobs or []
            told.emitted += output.emitted
            told.num_cached_tokens = output.num_cached_tokens
    core.check()
    return results
