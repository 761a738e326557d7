"""A list of prompts known in advance, and how fast it is answered, beside transformers."""

import random
import time
from dataclasses import dataclass
from typing import Any

import torch

SEED = 0


@dataclass(frozen=True)
class Case:
    """Prompts and how many tokens each is answered with."""

    prompts: list[list[int]]
    max_tokens: list[int]


def case(num_requests: int, vocab_size: int) -> Case:
    """Return prompts of 128 to 2,048 random ids with answers of 64 to 512 tokens."""
    rng = random.Random(SEED)
    lens = [(rng.randint(128, 2048), rng.randint(64, 512)) for _ in range(num_requests)]
    return Case(
        [[rng.randrange(vocab_size) for _ in range(length)] for length, _ in lens],
        [limit for _, limit in lens],
    )


def row(name: str, asked: Case, seconds: float) -> dict[str, object]:
    """Return a row of the table."""
    num_tokens = sum(asked.max_tokens)
    return {
        "what": f"{name}, {len(asked.prompts)} requests",
        "prompt tokens": sum(map(len, asked.prompts)),
        "generated": num_tokens,
        "s": f"{seconds:.2f}",
        "generated a second": f"{num_tokens / seconds:,.0f}",
    }


def transformers_row(
    config: dict[str, Any], asked: Case, device: str = "cuda"
) -> dict[str, object]:
    """Answer with transformers' continuous batching, over random weights of the same shape."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    torch.set_default_dtype(before)
    print("transformers: the model is built", flush=True)
    wanted = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=512)
    manager = model.init_continuous_batching(generation_config=wanted)
    manager.start()
    for ids in asked.prompts[:2]:
        manager.add_request(ids, max_new_tokens=8)
    for _ in range(2):
        _result(manager)
    started = time.perf_counter()
    for ids, limit in zip(asked.prompts, asked.max_tokens, strict=True):
        manager.add_request(ids, max_new_tokens=limit)
    num_tokens = sum(len(_result(manager).generated_tokens) for _ in asked.prompts)
    seconds = time.perf_counter() - started
    manager.stop(block=True, timeout=5)
    assert num_tokens == sum(asked.max_tokens), (num_tokens, sum(asked.max_tokens))
    return row("transformers", asked, seconds)


def _result(manager: Any) -> Any:
    while True:
        result = manager.get_result(timeout=5)
        if result is not None and result.is_finished():
            assert result.error is None, result.error
            return result
        assert manager.is_running(), "transformers' batching thread ended"
