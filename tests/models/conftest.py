"""Tiny checkpoints, written by the packages that define the formats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quantize

WriteGGUF = Callable[..., Path]

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, LAYERS = 64, 4, 2, 96, 40, 2
# transformers does not read these two's widths from the file: it takes the classes' defaults.
HEAD_DIMS = {"llama": 16, "qwen2": 16, "qwen3": 128, "gemma3": 256}


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """Writes a two-layer model of an architecture with random weights."""

    def write(
        architecture: str = "llama",
        *,
        name: str = "tiny.gguf",
        metadata: dict[str, Any] | None = None,
        extra: dict[str, np.ndarray[Any, Any]] | None = None,
        tied: bool = True,
        packed: GGMLQuantizationType | None = None,
        drop: tuple[str, ...] = (),
    ) -> Path:
        path = tmp_path / name
        writer = GGUFWriter(path, architecture)
        _add_metadata(writer, architecture, metadata or {})
        _add_tokens(writer)
        rng = np.random.default_rng(0)
        shapes = _shapes(architecture) | ({} if tied else {"output.weight": (VOCAB, HIDDEN)})
        tensors = {key: rng.standard_normal(shape, np.float32) for key, shape in shapes.items()}
        for key, data in (tensors | (extra or {})).items():
            if key in drop:
                continue
            if packed is not None and data.ndim == 2 and data.shape[1] % 32 == 0:
                writer.add_tensor(key, quantize(data, packed), raw_dtype=packed)
            else:
                writer.add_tensor(key, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add_metadata(writer: GGUFWriter, architecture: str, changes: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "block_count": LAYERS,
        "context_length": 128,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 50_000.0,
    }
    head_dim = HEAD_DIMS.get(architecture, 16)
    if architecture == "llama":
        values["rope.dimension_count"] = head_dim
    else:
        values["attention.key_length"] = values["attention.value_length"] = head_dim
    if architecture == "gemma3":
        values["attention.sliding_window"] = 32
    for key, value in (values | changes).items():
        full = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif value is not None:
            writer.add_uint32(full, value)


def _add_tokens(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{n}" for n in range(VOCAB - 2)] + ["<|im_end|>", "<end_of_turn>"])
    writer.add_token_types([1] * (VOCAB - 2) + [3, 1])
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    head_dim = HEAD_DIMS.get(architecture, 16)
    block: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (HEADS * head_dim, HIDDEN),
        "attn_k.weight": (KV_HEADS * head_dim, HIDDEN),
        "attn_v.weight": (KV_HEADS * head_dim, HIDDEN),
        "attn_output.weight": (HIDDEN, HEADS * head_dim),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (FFN, HIDDEN),
        "ffn_up.weight": (FFN, HIDDEN),
        "ffn_down.weight": (HIDDEN, FFN),
    }
    if architecture == "qwen2":
        block |= {f"{leaf}.bias": block[f"{leaf}.weight"][:1] for leaf in ("attn_q", "attn_k")}
        block["attn_v.bias"] = block["attn_v.weight"][:1]
    if architecture in ("qwen3", "gemma3"):
        block |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    if architecture == "gemma3":
        block |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{leaf}": shape for leaf, shape in block.items()}
    return shapes
