"""A GGUF file's model in Hugging Face's words: configuration, tensor names and values.

llama.cpp's converter changes some tensors on the way in. Gemma's norm weights are undone here.
The rows of llama's query and key projections stay in the file's order, where the two halves of a
rotated pair are neighbours: dot products do not care, as long as the rotation pairs them so too.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from mstar.errors import UnsupportedError, WeightsError
from mstar.models.gguf import GGUFFile
from mstar.models.weights import StoredTensor

FREQ_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, how GGUF spells llama 3's scaling."""

_GEMMA_SLIDING_PATTERN = 6
_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_27B_LAYERS = 62
_DEFAULT_THETA = 10_000.0
_CONTROL_TYPES = (3, 4)
_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}
# Tokens that end a turn or a document. A GGUF file names one end token; chat models have several.
_END_TOKENS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<|end|>")
)
_LEAVES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LEAVES = _LEAVES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
# Written by old converters; the frequencies follow from the configuration.
_IGNORED = re.compile(r"(blk\.\d+\.attn_rot_embd|rope_freqs)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFModel:
    """What a GGUF file says about its model."""

    config: dict[str, Any]
    """In the spelling of config.json."""
    generation_config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    """By Hugging Face's names."""
    rope_interleaved: bool
    """Rows of the query and key projections pair ``(2i, 2i + 1)`` instead of the two halves."""
    freq_factors: Tensor | None
    """float32 ``[rotary_dim // 2]``; the rotary frequencies are divided by it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that lists what is known, the name most like ``name`` first."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, 1, 0.4)
    return (f"nearest is {close[0]!r}; " if close else "") + f"known are {', '.join(names)}"


def read_gguf_model(path: Path) -> GGUFModel:
    """Return the model that a GGUF file holds, its tensors not read yet.

    Raises:
        WeightsError: If the file is broken, or lacks a value that its architecture needs.
        UnsupportedError: If the architecture or a feature it uses is not known here.
        OSError: If the file cannot be read.
    """
    file = GGUFFile(path)
    architecture = file.text("general.architecture")
    if architecture is None:
        raise WeightsError(f"{path}: metadata has no general.architecture")
    if architecture not in _FAMILIES:
        raise UnsupportedError(
            f"{path}: GGUF architecture {architecture!r} is not supported",
            [nearest(architecture, _FAMILIES)],
        )
    if (file.number("split.count") or 1) > 1:
        raise UnsupportedError(
            f"{path} is one part of a split GGUF; join them first (llama-gguf-split --merge)"
        )
    metadata = _Metadata(file, architecture)
    if metadata.get("expert_count"):
        raise UnsupportedError(f"{path}: mixture of experts in GGUF is not supported")
    config = _common_config(metadata)
    _FAMILIES[architecture](metadata, config)
    ends = _end_ids(file, architecture)
    config |= {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    return GGUFModel(
        config=config,
        generation_config={"eos_token_id": ends, "bos_token_id": config["bos_token_id"]},
        tensors=_tensors(file, architecture, config["num_hidden_layers"]),
        rope_interleaved=architecture == "llama",
        freq_factors=torch.from_numpy(file.floats(FREQ_FACTORS).copy())
        if FREQ_FACTORS in file.tensors
        else None,
    )


class _Metadata:
    """The metadata of one architecture, which stands before each key."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, key: str) -> int | float | None:
        return self.file.number(f"{self.architecture}.{key}")

    def text(self, key: str) -> str | None:
        return self.file.text(f"{self.architecture}.{key}")

    def need(self, key: str) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise WeightsError(
                f"{self.file.path}: metadata {self.architecture}.{key} should be a positive "
                f"integer, found {value}"
            )
        return value


def _common_config(metadata: _Metadata) -> dict[str, Any]:
    file = metadata.file
    hidden_size, num_heads = (
        metadata.need("embedding_length"),
        metadata.need("attention.head_count"),
    )
    epsilon = metadata.get("attention.layer_norm_rms_epsilon")
    if epsilon is None:
        raise WeightsError(f"{file.path}: metadata has no attention.layer_norm_rms_epsilon")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise WeightsError(f"{file.path}: tensor 'token_embd.weight' is missing or not a matrix")
    head_dim = metadata.get("attention.key_length") or hidden_size // num_heads
    if metadata.get("attention.value_length") not in (None, head_dim):
        raise UnsupportedError(f"{file.path}: values and keys of different width are not supported")
    theta = metadata.get("rope.freq_base")
    config: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": metadata.need("feed_forward_length"),
        "num_hidden_layers": metadata.need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(metadata.get("attention.head_count_kv") or num_heads),
        "head_dim": int(head_dim),
        "max_position_embeddings": metadata.need("context_length"),
        "rms_norm_eps": epsilon,
        # The table is the truth: some files state a vocabulary without the padding rows.
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": float(_DEFAULT_THETA if theta is None else theta),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": file.number("tokenizer.ggml.bos_token_id"),
        "pad_token_id": file.number("tokenizer.ggml.padding_token_id"),
    }
    config["rope_parameters"] = _rope_parameters(metadata, config)
    rotary_dim = metadata.get("rope.dimension_count")
    if rotary_dim and rotary_dim != head_dim:
        factor = rotary_dim / head_dim
        config["partial_rotary_factor"] = factor
        config["rope_parameters"]["partial_rotary_factor"] = factor
    return config


def _rope_parameters(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    kind = metadata.text("rope.scaling.type")
    factor = float(metadata.get("rope.scaling.factor") or metadata.get("rope.scale_linear") or 1.0)
    rope: dict[str, Any] = {"rope_theta": config["rope_theta"]}
    if kind == "none" or (factor == 1.0 and kind in (None, "linear")):
        return rope | {"rope_type": "default"}
    if kind in (None, "linear"):
        return rope | {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedError(f"{metadata.file.path}: rope scaling {kind!r} is not supported")
    original = metadata.get("rope.scaling.original_context_length")
    rope |= {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original or config["max_position_embeddings"],
    }
    attention = metadata.get("rope.scaling.attn_factor")
    if attention is None:
        attention = metadata.get("rope.scaling.yarn_attn_factor")
    if attention is not None:
        rope["attention_factor"] = attention * (1.0 + 0.1 * log(factor))
    for beta in ("beta_fast", "beta_slow"):
        if (value := metadata.get(f"rope.scaling.yarn_{beta}")) is not None:
            rope[beta] = value
    return rope


def _llama(metadata: _Metadata, config: dict[str, Any]) -> None:
    config |= {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "mlp_bias": "blk.0.ffn_gate.bias" in metadata.file.tensors,
    }
    if window := metadata.get("attention.sliding_window"):
        config |= {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": window,
        }


def _qwen2(metadata: _Metadata, config: dict[str, Any]) -> None:
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu"}
    # The class always has these three biases, and no setting for them.
    del config["attention_bias"]


def _qwen3(metadata: _Metadata, config: dict[str, Any]) -> None:
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu"}


def _gemma3(metadata: _Metadata, config: dict[str, Any]) -> None:
    num_layers = config["num_hidden_layers"]
    local_theta = metadata.get("rope.freq_base_swa")
    # The largest one scales by its width per head, all others by the head's own width.
    is_27b = num_layers == _GEMMA_27B_LAYERS
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config |= {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.need("attention.sliding_window"),
        "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "attn_logit_softcapping": None,
        "layer_types": [
            "sliding_attention" if (layer + 1) % _GEMMA_SLIDING_PATTERN else "full_attention"
            for layer in range(num_layers)
        ],
        "rope_local_base_freq": float(local_theta or _GEMMA_LOCAL_THETA),
    }
    config["rope_parameters"] = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": config["rope_local_base_freq"],
        },
    }


_FAMILIES: dict[str, Callable[[_Metadata, dict[str, Any]], None]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
}


def _end_ids(file: GGUFFile, architecture: str) -> list[int]:
    """Return the ids that end an output, the one the file names first."""
    found: list[int] = []
    for key in ("eos", "eot", "eom"):
        number = file.number(f"tokenizer.ggml.{key}_token_id")
        if number is not None and int(number) not in found:
            found.append(int(number))
    ends = _END_TOKENS | ({"<|endoftext|>"} if architecture.startswith("qwen") else set())
    types = file.metadata.get("tokenizer.ggml.token_type")
    for token, text in enumerate(file.strings("tokenizer.ggml.tokens")):
        if text not in ends or token in found:
            continue
        # A file without types is taken at its word: these spellings mean nothing else.
        if isinstance(types, np.ndarray) and not np.isin(types[token : token + 1], _CONTROL_TYPES):
            continue
        found.append(token)
    return found


def _tensors(file: GGUFFile, architecture: str, num_layers: int) -> dict[str, StoredTensor]:
    is_gemma = architecture == "gemma3"
    leaves = _GEMMA_LEAVES if is_gemma else _LEAVES
    tensors = {}
    for name, tensor in file.tensors.items():
        if _IGNORED.fullmatch(name):
            continue
        target = _TOP.get(name)
        block = _BLOCK.fullmatch(name)
        if block is not None and block[2] in leaves and int(block[1]) < num_layers:
            target = f"model.layers.{block[1]}.{leaves[block[2]]}.{block[3]}"
        if target is None:
            raise UnsupportedError(
                f"{file.path}: tensor {name!r} has no place in a {architecture} of {num_layers} "
                "layers"
            )
        is_shifted = is_gemma and target.endswith("norm.weight")
        tensors[target] = StoredTensor(
            name=target,
            shape=tensor.shape,
            nbytes=tensor.nbytes,
            file=file.path,
            load=_loader(file, name, is_shifted),
        )
    return tensors


def _loader(file: GGUFFile, name: str, is_shifted: bool) -> Callable[[], Tensor]:
    def load() -> Tensor:
        tensor = file.tensors[name]
        if tensor.type in _DTYPES:
            values = torch.from_numpy(file.raw(name)).view(_DTYPES[tensor.type])
        else:
            values = torch.from_numpy(file.floats(name))
        # llama.cpp stores a Gemma norm as 1 + weight, which Hugging Face adds when it runs.
        return (values - 1 if is_shifted else values).view(tensor.shape)

    return load
