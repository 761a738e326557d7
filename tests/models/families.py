"""Tiny checkpoints of every family, made and computed by transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

VOCAB = 101
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large, so that leaving it out would show.
    "rms_norm_eps": 1e-3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _made(kind: type, **fields: Any) -> Callable[[], Any]:
    return lambda: kind(**_COMMON | fields)


def _gemma(**fields: Any) -> Callable[[], Any]:
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    return _made(
        Gemma3TextConfig,
        **{
            "num_hidden_layers": 3,
            "layer_types": layers,
            "head_dim": 32,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
            },
        }
        | fields,
    )


_LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 5_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that the prompts' positions fall in all three bands.
    "original_max_position_embeddings": 24,
}

CASES: dict[str, Callable[[], Any]] = {
    "llama": _made(LlamaConfig),
    "llama-tied": _made(LlamaConfig, tie_word_embeddings=True),
    "llama-mha": _made(LlamaConfig, num_key_value_heads=4),
    "llama-mqa": _made(LlamaConfig, num_key_value_heads=1),
    "llama-biases": _made(LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama-biases-gguf": _made(LlamaConfig, attention_bias=True),
    "llama-wide-heads": _made(LlamaConfig, head_dim=48),
    "llama-gelu": _made(LlamaConfig, hidden_act="gelu"),
    "llama-3.1-rope": _made(LlamaConfig, rope_parameters=_LLAMA31),
    "llama-linear-rope": _made(
        LlamaConfig, rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
    ),
    "mistral": _made(MistralConfig, sliding_window=None),
    "mistral-window": _made(MistralConfig, sliding_window=7, head_dim=32),
    "qwen2": _made(Qwen2Config),
    "qwen2-window": _made(
        Qwen2Config,
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        tie_word_embeddings=True,
    ),
    "qwen3": _made(Qwen3Config, head_dim=32, tie_word_embeddings=True),
    "qwen3-biases": _made(Qwen3Config, head_dim=16, attention_bias=True),
    "smollm3": _made(SmolLM3Config, num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0]),
    "smollm3-window": _made(
        SmolLM3Config, num_hidden_layers=4, use_sliding_window=True, sliding_window=6
    ),
    "gemma3": _gemma(),
    "gemma3-scaled": _gemma(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
        }
    ),
    "gemma3-capped": _gemma(final_logit_softcapping=1.5),
    "gemma3-period": _gemma(num_hidden_layers=7, layer_types=None),
    # What GGUF takes for granted: every sixth layer is full, and heads are scaled by their width.
    "gemma3-gguf": _gemma(
        num_hidden_layers=7,
        layer_types=None,
        query_pre_attn_scalar=32,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}
"""Name to a function that makes the config."""

FAMILIES = ("llama", "mistral-window", "qwen2", "qwen3", "gemma3")
"""One case a family."""


def tiny_model(case: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return transformers' model of a case, with weights that make every part matter.

    Weights keep the size of what they act on, and norms and biases differ from their neutral
    values; transformers' own initialisation would hide mistakes behind near-uniform attention.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        CASES[case](), attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(sum(case.encode()))
    neutral = 0.0 if case.startswith("gemma3") else 1.0
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith("norm.weight"):
                value.copy_(neutral + 0.2 * noise)
            elif value.ndim == 1:
                value.copy_(0.3 * noise)
            elif "embed" in name and case.startswith("gemma3"):
                value.copy_(noise / value.shape[1] ** 0.5)
            else:
                gain = 1.5 if "q_proj" in name else 1.0
                value.copy_(
                    gain * noise if "embed" in name else gain * noise * value.shape[1] ** -0.5
                )
    model.eval()
    for value in model.parameters():
        value.data = value.to(dtype)
    return model


def saved(case: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a case's checkpoint to ``folder / case`` and return that."""
    tiny_model(case, dtype).save_pretrained(folder / case)
    return folder / case


def reference_logits(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return transformers' logits, ``[len(prompt), vocab_size]`` each, one prompt at a time."""
    with torch.inference_mode():
        return [
            model(torch.tensor([list(prompt)]), use_cache=False).logits[0] for prompt in prompts
        ]


def random_prompts(*lengths: int, vocab: int = VOCAB, seed: int = 0) -> list[list[int]]:
    """Return prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]
