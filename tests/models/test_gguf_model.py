from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoConfig, AutoModelForCausalLM

from mstar.errors import UnsupportedError, WeightsError
from mstar.models.gguf_model import read_gguf_model

WriteGGUF = Callable[..., Path]

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3"]
# What the two spell differently, or only one of them says.
_OURS_ALONE = {"architectures", "rope_theta", "rope_local_base_freq", "attention_bias"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config_agrees_with_transformers(
    write_gguf: WriteGGUF, architecture: str, tied: bool
) -> None:
    path = write_gguf(architecture, tied=tied)
    ours = read_gguf_model(path).config
    theirs = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    assert ours["tie_word_embeddings"] is tied
    # transformers leaves the head width of these to the class, which has it from the same numbers.
    for key in set(ours) - _OURS_ALONE - {"head_dim", "eos_token_id", "pad_token_id"}:
        if key in theirs or key == "hidden_act":
            assert ours[key] == theirs[key], key
    assert ours["head_dim"] == {"qwen3": 128, "gemma3": 256}.get(architecture, 16)
    missing = {"hidden_size", "num_hidden_layers", "vocab_size", "rope_parameters", "rms_norm_eps"}
    assert missing <= set(ours)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tensors_agree_with_transformers(write_gguf: WriteGGUF, architecture: str) -> None:
    path = write_gguf(architecture, tied=False)
    ours = read_gguf_model(path)
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    assert set(ours.tensors) == set(theirs)
    assert ours.rope_interleaved is (architecture == "llama")
    for name, stored in ours.tensors.items():
        found = stored.load()
        assert tuple(found.shape) == stored.shape
        if ours.rope_interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            # Rows of a head: pair by pair here, first halves then second halves in transformers.
            found = found.view(-1, 8, 2, 64).transpose(1, 2).reshape(stored.shape)
        assert torch.equal(found, theirs[name]), name


def test_packed_tensors_come_as_float32_and_others_as_stored(write_gguf: WriteGGUF) -> None:
    model = read_gguf_model(write_gguf(packed=GGMLQuantizationType.Q4_1))
    assert model.tensors["model.layers.0.mlp.up_proj.weight"].load().dtype == torch.float32
    half = read_gguf_model(write_gguf(packed=GGMLQuantizationType.F16, name="half.gguf"))
    assert half.tensors["model.layers.0.mlp.up_proj.weight"].load().dtype == torch.float16
    brain = read_gguf_model(write_gguf(packed=GGMLQuantizationType.BF16, name="brain.gguf"))
    assert brain.tensors["model.layers.0.mlp.up_proj.weight"].load().dtype == torch.bfloat16
    assert brain.tensors["model.norm.weight"].load().dtype == torch.float32


def test_writing_to_a_loaded_tensor_leaves_the_file_as_it_is(write_gguf: WriteGGUF) -> None:
    path = write_gguf()
    before = path.read_bytes()
    read_gguf_model(path).tensors["model.embed_tokens.weight"].load().zero_()
    assert path.read_bytes() == before


def test_freq_factors_are_kept_apart(write_gguf: WriteGGUF) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    model = read_gguf_model(write_gguf(extra={"rope_freqs.weight": factors}))
    assert model.freq_factors is not None
    assert model.freq_factors.tolist() == factors.tolist()
    assert not any("rope" in name for name in model.tensors)
    assert read_gguf_model(write_gguf(name="plain.gguf")).freq_factors is None


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_rope_scaling_is_read(
    write_gguf: WriteGGUF, metadata: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = read_gguf_model(write_gguf("qwen2", metadata=metadata)).config
    assert config["rope_parameters"] == {"rope_theta": 50_000.0} | expected


def test_gemma_scales_its_global_layers_only(write_gguf: WriteGGUF) -> None:
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    rope = read_gguf_model(write_gguf("gemma3", metadata=scaling)).config["rope_parameters"]
    assert rope["full_attention"] == {
        "rope_theta": 50_000.0,
        "rope_type": "linear",
        "factor": 8.0,
    }
    assert rope["sliding_attention"] == {"rope_theta": 10_000.0, "rope_type": "default"}


def test_absent_theta_is_the_formats_default(write_gguf: WriteGGUF) -> None:
    config = read_gguf_model(write_gguf(metadata={"rope.freq_base": None})).config
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0


def test_partial_rotation_is_told(write_gguf: WriteGGUF) -> None:
    config = read_gguf_model(write_gguf("qwen3", metadata={"rope.dimension_count": 64})).config
    assert config["head_dim"] == 128
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.5


def test_window_makes_a_llama_file_a_mistral(write_gguf: WriteGGUF) -> None:
    config = read_gguf_model(write_gguf(metadata={"attention.sliding_window": 16})).config
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 16)


def test_turn_end_is_an_end_token_only_where_the_file_marks_it(write_gguf: WriteGGUF) -> None:
    # "<|im_end|>" (38) is a control token there, "<end_of_turn>" (39) ordinary text.
    assert read_gguf_model(write_gguf()).generation_config["eos_token_id"] == [2, 38]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"architecture": "qwen33"}, UnsupportedError, "'qwen33'.*nearest is 'qwen3'.*llama"),
        ({"metadata": {"expert_count": 8}}, UnsupportedError, "mixture of experts"),
        (
            {"metadata": {"rope.scaling.type": "longrope"}},
            UnsupportedError,
            "rope scaling 'longrope'",
        ),
        ({"metadata": {"block_count": None}}, WeightsError, "llama.block_count.*found None"),
        ({"metadata": {"block_count": 1}}, UnsupportedError, "'blk.1.* has no place in a llama"),
        ({"metadata": {"attention.layer_norm_rms_epsilon": None}}, WeightsError, "epsilon"),
        ({"drop": ("token_embd.weight",)}, WeightsError, "'token_embd.weight' is missing"),
        (
            {"extra": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}},
            UnsupportedError,
            "'blk.0.attn_sinks.weight' has no place",
        ),
    ],
)
def test_what_is_not_known_is_refused(
    write_gguf: WriteGGUF, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = write_gguf(**arguments)
    with pytest.raises(error, match=message):
        read_gguf_model(path)
