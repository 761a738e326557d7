"""What a config.json means, in all the spellings that are about."""

from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from mstar.engine.resources.position.config import RopeParams
from mstar.errors import UnsupportedError, WeightsError
from mstar.models.decoder_config import FAMILIES, DecoderConfig, decoder_config

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA31 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA31_ROPE = RopeParams(
    rope_theta=500.0, rope_scale=8.0, low_freq_factor=1.0, high_freq_factor=4.0, old_context_len=64
)
PLAIN = RopeParams(rope_theta=10_000.0)
GLOBAL, LOCAL = RopeParams(rope_theta=1e6), RopeParams(rope_theta=10_000.0)
CLASSES = {
    "Llama": LlamaConfig,
    "Mistral": MistralConfig,
    "Qwen2": Qwen2Config,
    "Qwen3": Qwen3Config,
    "Gemma3": Gemma3TextConfig,
}


def parsed(family: str, *drop: str, **fields: Any) -> DecoderConfig:
    config = {key: value for key, value in (BASE | fields).items() if key not in drop}
    return decoder_config(config, f"{family}ForCausalLM")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, PLAIN),
        ({"rope_theta": 500.0}, RopeParams(rope_theta=500.0)),
        ({"rope_theta": 500}, RopeParams(rope_theta=500.0)),
        ({"rope_theta": 500.0, "rope_scaling": None}, RopeParams(rope_theta=500.0)),
        ({"rope_theta": 500.0, "rope_scaling": {}}, RopeParams(rope_theta=500.0)),
        ({"rope_theta": 500.0, "rope_parameters": None}, RopeParams(rope_theta=500.0)),
        ({"rope_theta": 500.0, "rope_parameters": {}}, RopeParams(rope_theta=500.0)),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 500.0}},
            RopeParams(rope_theta=500.0),
        ),
        ({"rope_scaling": {"rope_type": "default"}}, PLAIN),
        ({"rope_scaling": {"type": "default", "rope_type": None}}, PLAIN),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, PLAIN),
        # What is nearer wins.
        (
            {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            RopeParams(rope_theta=500.0),
        ),
        (
            {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4}},
            RopeParams(rope_theta=500.0, rope_scale=4.0),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
            RopeParams(rope_theta=500.0, rope_scale=4.0),
        ),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **LLAMA31}}, LLAMA31_ROPE),
        ({"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA31}}, LLAMA31_ROPE),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA31}},
            LLAMA31_ROPE,
        ),
        ({"rope_scaling": None, "partial_rotary_factor": 1.0}, PLAIN),
    ],
)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_rotation_is_read_in_every_spelling(
    family: str, fields: dict[str, Any], expected: RopeParams
) -> None:
    assert parsed(family, **fields).rope == (expected,) * 6


@pytest.mark.parametrize(
    ("fields", "full", "sliding"),
    [
        ({}, GLOBAL, LOCAL),
        (
            {"rope_theta": 500.0, "rope_local_base_freq": 40.0},
            RopeParams(rope_theta=500.0),
            RopeParams(rope_theta=40.0),
        ),
        (
            {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            RopeParams(rope_theta=500.0, rope_scale=8.0),
            LOCAL,
        ),
        ({"rope_scaling": None, "rope_parameters": None}, GLOBAL, LOCAL),
        ({"rope_parameters": {}}, GLOBAL, LOCAL),
        ({"rope_parameters": {"full_attention": None, "sliding_attention": {}}}, GLOBAL, LOCAL),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
                }
            },
            RopeParams(rope_theta=500.0, rope_scale=8.0),
            RopeParams(rope_theta=40.0),
        ),
        (
            {
                "rope_local_base_freq": 40.0,
                "rope_parameters": {"full_attention": {"rope_theta": 500.0}},
            },
            RopeParams(rope_theta=500.0),
            RopeParams(rope_theta=40.0),
        ),
    ],
)
def test_gemma_rotates_by_kind_of_layer(
    fields: dict[str, Any], full: RopeParams, sliding: RopeParams
) -> None:
    assert parsed("Gemma3", **fields).rope == (*(sliding,) * 5, full)


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("Llama", {"sliding_window": 8}, [None] * 6),
        ("Mistral", {"sliding_window": 8}, [8] * 6),
        ("Mistral", {"sliding_window": None}, [None] * 6),
        ("Mistral", {}, [4096] * 6),
        ("Qwen2", {"sliding_window": 8}, [None] * 6),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": False}, [None] * 6),
        (
            "Qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4},
            [None] * 4 + [8] * 2,
        ),
        (
            "Qwen2",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0},
            [8] * 6,
        ),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": True}, [None] * 6),
        (
            "Qwen3",
            {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
            [None] * 6,
        ),
        (
            "Qwen3",
            {"use_sliding_window": True, "max_window_layers": 5},
            [None] * 5 + [4096],
        ),
        (
            "Qwen3",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention"] * 3,
            },
            [None, 8] * 3,
        ),
        ("Gemma3", {"sliding_window": 8}, [8] * 5 + [None]),
        ("Gemma3", {}, [4096] * 5 + [None]),
        ("Gemma3", {"sliding_window": 8, "sliding_window_pattern": 2}, [8, None] * 3),
        ("Gemma3", {"sliding_window": 8, "layer_types": None}, [8] * 5 + [None]),
        (
            "Gemma3",
            {"sliding_window": 8, "layer_types": ["full_attention", *["sliding_attention"] * 5]},
            [None] + [8] * 5,
        ),
        ("Gemma3", {"sliding_window": None, "layer_types": ["full_attention"] * 6}, [None] * 6),
    ],
)
def test_windows_are_told_by_layer(
    family: str, fields: dict[str, Any], expected: list[int | None]
) -> None:
    assert list(parsed(family, **fields).windows) == expected
    # The classes of transformers read the same from the same.
    if family in ("Qwen2", "Qwen3", "Gemma3"):
        theirs = CLASSES[family](**BASE | fields)
        kinds = zip(theirs.layer_types, [theirs.sliding_window] * 6, strict=True)
        assert [w if kind == "sliding_attention" else None for kind, w in kinds] == expected


@pytest.mark.parametrize("family", CLASSES)
def test_absent_fields_mean_what_the_classes_default_to(family: str) -> None:
    ours = parsed(family, num_key_value_heads=2)
    theirs = CLASSES[family](**BASE | {"num_key_value_heads": 2})
    assert ours.head_dim == (theirs.head_dim if family != "Qwen2" else 16)
    assert ours.is_tied is theirs.tie_word_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.num_kv_heads == 2
    assert ours.has_mlp_bias is False
    assert ours.has_output_bias is False
    assert ours.has_qkv_bias is (family == "Qwen2")
    parameters = theirs.rope_parameters
    for kind, rope in zip(getattr(theirs, "layer_types", [None] * 6), ours.rope, strict=True):
        own = parameters[kind] if family == "Gemma3" else parameters
        assert rope is not None
        assert rope.rope_theta == own["rope_theta"]
    if family == "Gemma3":
        assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5 == 1 / 16
        assert ours.embedding_scale == 8.0
        assert ours.activation == "gelu_tanh"
    else:
        assert ours.attention_scale == ours.head_dim**-0.5
        assert ours.embedding_scale == 1.0
        assert ours.activation == "silu"


def test_null_counts_as_absent() -> None:
    names = ("num_key_value_heads", "head_dim", "rms_norm_eps", "attention_bias", "hidden_act")
    nulls: dict[str, Any] = dict.fromkeys(names)
    assert parsed("Llama", **nulls, tie_word_embeddings=None) == parsed("Llama")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
    ],
)
def test_activations_have_several_names(name: str, expected: str) -> None:
    assert parsed("Llama", hidden_act=name).activation == expected
    assert parsed("Gemma3", hidden_activation=name).activation == expected


REQUIRED = tuple(BASE)


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("name", REQUIRED)
def test_missing_field_is_named(family: str, name: str) -> None:
    with pytest.raises(WeightsError, match=f"lacks '{name}'"):
        parsed(family, name)
    with pytest.raises(WeightsError, match=f"lacks '{name}'"):
        parsed(family, **{name: None})


@pytest.mark.parametrize("value", ["64", 64.0, True, [64], {}, 0, -1])
@pytest.mark.parametrize("name", [*REQUIRED, "head_dim", "num_key_value_heads"])
def test_field_of_a_wrong_type_or_size_is_named(name: str, value: object) -> None:
    with pytest.raises(WeightsError, match=f"'{name}'"):
        parsed("Llama", **{name: value})


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("Llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ("Llama", {"rms_norm_eps": -1e-5}, "rms_norm_eps"),
        ("Llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ("Llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ("Llama", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ("Llama", {"hidden_act": 3}, "hidden_act"),
        ("Llama", {"rope_theta": "10000"}, "rope_theta"),
        ("Llama", {"rope_theta": 0}, "rope_theta"),
        ("Llama", {"rope_theta": float("inf")}, "rope_theta"),
        ("Llama", {"rope_scaling": "linear"}, "rope_scaling"),
        ("Llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling lacks 'factor'"),
        ("Llama", {"rope_scaling": {"type": "linear", "factor": "4"}}, "factor"),
        ("Llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ("Llama", {"rope_scaling": {"type": 3}}, "type"),
        ("Llama", {"rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
        *(
            (
                "Llama",
                {"rope_scaling": {"rope_type": "llama3"} | LLAMA31 | {name: None}},
                f"rope_scaling lacks '{name}'",
            )
            for name in LLAMA31
        ),
        ("Qwen2", {"layer_types": ["full_attention"] * 5}, "'layer_types'.* 5 layers of 6"),
        ("Qwen2", {"layer_types": "full_attention"}, "layer_types"),
        ("Qwen2", {"use_sliding_window": 1}, "use_sliding_window"),
        ("Mistral", {"sliding_window": 0}, "sliding_window"),
        ("Mistral", {"sliding_window": "8"}, "sliding_window"),
        ("Gemma3", {"sliding_window": None}, "sliding_window"),
        ("Gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("Gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("Gemma3", {"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
        ("Gemma3", {"rope_parameters": {"rope_theta": 500.0}}, "rope_parameters"),
        ("Gemma3", {"rope_parameters": {"full_attention": 500.0}}, "full_attention"),
    ],
)
def test_broken_field_is_named(family: str, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(WeightsError, match=named):
        parsed(family, **fields)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("Llama", {"hidden_act": "relu2"}, "'relu2'.*silu"),
        ("Gemma3", {"hidden_activation": "relu"}, "'relu'.*gelu"),
        ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'.*llama3"),
        ("Qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn'"),
        ("Qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ("Llama", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "'longrope'"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("Llama", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "kind of layer"),
        ("Qwen3", {"layer_types": ["chunked_attention"] * 6}, "'chunked_attention'"),
        ("Gemma3", {"layer_types": ["linear_attention"] * 6}, "'linear_attention'"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_is_not_built_is_said(family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parsed(family, **fields)


def test_every_family_is_tried_here() -> None:
    assert set(FAMILIES) == {f"{family}ForCausalLM" for family in CLASSES}
