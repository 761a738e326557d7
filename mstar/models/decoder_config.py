"""A decoder-only model's shape, read from a checkpoint's config in Hugging Face's spelling."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mstar.engine.resources.position.config import RopeParams
from mstar.errors import UnsupportedError, WeightsError
from mstar.models.fields import Fields

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}
_GEMMA3 = "Gemma3ForCausalLM"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_HEAD_DIMS = {"Qwen3ForCausalLM": 128, _GEMMA3: 256}
"""What the families whose heads are no share of the hidden size take when nothing is said."""
_WINDOW = 4096


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that tells one decoder-only family from another."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    """Context the model was made for, in tokens."""
    norm_eps: float
    activation: str
    is_tied: bool
    """The output head is the embedding."""
    attention_scale: float
    rope: tuple[RopeParams | None, ...]
    """One a layer; ``None``: it rotates nothing."""
    windows: tuple[int | None, ...]
    """One a layer: slots a query sees, itself included; ``None``: all."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_sandwich_norms: bool = False
    """Attention and MLP are normalised on the way out, too."""
    has_norm_offset: bool = False
    """Norm weights are stored as the factor minus one."""
    embedding_scale: float = 1.0
    logit_soft_cap: float | None = None


Read = Callable[[Fields, dict[str, Any]], dict[str, Any]]
"""From a config.json, and the fields of ``DecoderConfig`` that are read of every family, to those
that are the family's own."""


def decoder_config(
    config: Mapping[str, Any], architecture: str, read: Read | None = None
) -> DecoderConfig:
    """Return the shape of a decoder.

    Args:
        config: A config.json.
        architecture: One of ``FAMILIES``, or the name of another.
        read: What the other has of its own.

    Raises:
        WeightsError: If a field is missing or of a wrong type; names it.
        UnsupportedError: If the config asks for something that is not built.
    """
    fields = Fields(config)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer("head_dim", _HEAD_DIMS.get(architecture, hidden // heads))
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError("partial_rotary_factor is not built for these architectures")
    shape: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "intermediate_size": fields.integer("intermediate_size"),
        "max_position": fields.integer("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "is_tied": fields.flag("tie_word_embeddings", architecture == _GEMMA3),
        "attention_scale": head_dim**-0.5,
        "windows": (None,) * num_layers,
    }
    own = FAMILIES[architecture] if read is None else read
    return DecoderConfig(**shape | own(fields, shape))


def common(fields: Fields, shape: dict[str, Any]) -> dict[str, Any]:
    """Return what most families read alike: activation and rotation."""
    return {
        "activation": _activation(fields.text("hidden_act", "silu")),
        "rope": (_rope(fields),) * shape["num_layers"],
    }


def _llama(fields: Fields, shape: dict[str, Any]) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return common(fields, shape) | {
        "has_qkv_bias": bias,
        "has_output_bias": bias,
        "has_mlp_bias": fields.flag("mlp_bias", False),
    }


def _mistral(fields: Fields, shape: dict[str, Any]) -> dict[str, Any]:
    return common(fields, shape) | {"windows": (sliding_window(fields),) * shape["num_layers"]}


def _qwen2(fields: Fields, shape: dict[str, Any]) -> dict[str, Any]:
    return common(fields, shape) | {
        "has_qkv_bias": True,
        "windows": _qwen_windows(fields, shape["num_layers"]),
    }


def _qwen3(fields: Fields, shape: dict[str, Any]) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return common(fields, shape) | {
        "has_qkv_bias": bias,
        "has_output_bias": bias,
        "has_qk_norm": True,
        "windows": _qwen_windows(fields, shape["num_layers"]),
    }


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = sliding_window(fields) if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28, minimum=0)
    kinds = layer_types(fields, num_layers, lambda i: _SLIDING if i >= first else _FULL)
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _gemma3(fields: Fields, shape: dict[str, Any]) -> dict[str, Any]:
    # The reference reads this cap and does not apply it, so nobody can say what is meant.
    for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if fields.is_set(name):
            raise UnsupportedError(f"{name} is not built for {_GEMMA3}")
    num_layers = shape["num_layers"]
    period = fields.integer("sliding_window_pattern", 6)
    kinds = layer_types(fields, num_layers, lambda i: _SLIDING if (i + 1) % period else _FULL)
    window = sliding_window(fields)
    if window is None and _SLIDING in kinds:
        raise WeightsError("the config has sliding layers, but its 'sliding_window' is null")
    rope = {_FULL: _gemma_rope(fields, _FULL), _SLIDING: _gemma_rope(fields, _SLIDING)}
    bias = fields.flag("attention_bias", False)
    return {
        "activation": _activation(fields.text("hidden_activation", "gelu_pytorch_tanh")),
        "has_qkv_bias": bias,
        "has_output_bias": bias,
        "has_qk_norm": True,
        "has_sandwich_norms": True,
        "has_norm_offset": True,
        "embedding_scale": shape["hidden_size"] ** 0.5,
        "attention_scale": fields.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        "windows": tuple(window if kind == _SLIDING else None for kind in kinds),
        "rope": tuple(rope[kind] for kind in kinds),
        "logit_soft_cap": (
            fields.positive("final_logit_softcapping")
            if fields.is_set("final_logit_softcapping")
            else None
        ),
    }


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise UnsupportedError(
            f"activation {name!r} is not built; known are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


FAMILIES: Mapping[str, Read] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    _GEMMA3: _gemma3,
}
"""What each architecture adds to the common fields."""


def _rope(fields: Fields) -> RopeParams:
    """Return the rotation that all layers share, from either spelling of the config.

    Newer configs hold all of it in ``rope_parameters``, older ones ``rope_theta`` and
    ``rope_scaling`` at the top.
    """
    name = "rope_scaling" if fields.is_set("rope_scaling") else "rope_parameters"
    scaling = fields.mapping(name)
    if scaling.has_mappings:
        raise UnsupportedError(f"{name} by kind of layer is not built for this architecture")
    return _scaled_rope(scaling, fields.positive("rope_theta", 1e4))


def _gemma_rope(fields: Fields, kind: str) -> RopeParams:
    """Return the rotation of Gemma 3's full or sliding layers, whose bases differ.

    The older spelling has the base of sliding layers beside that of the full ones, which alone
    are scaled.
    """
    by_kind = fields.mapping("rope_parameters")
    if not by_kind.has_only(_FULL, _SLIDING):
        raise WeightsError(
            f"the config's 'rope_parameters' of {_GEMMA3} must be by kind of layer: "
            f"{_FULL!r} and {_SLIDING!r}"
        )
    scaling = by_kind.mapping(kind)
    if kind == _SLIDING:
        return _scaled_rope(scaling, fields.positive("rope_local_base_freq", 1e4))
    if fields.is_set("rope_scaling"):
        scaling = scaling.updated(fields.mapping("rope_scaling"))
    return _scaled_rope(scaling, fields.positive("rope_theta", 1e6))


def _scaled_rope(scaling: Fields, theta: float) -> RopeParams:
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError("partial_rotary_factor is not built for these architectures")
    theta = scaling.positive("rope_theta", theta)
    if kind == "default":
        return RopeParams(rope_theta=theta)
    if kind == "linear":
        return RopeParams(rope_theta=theta, rope_scale=scaling.positive("factor"))
    if kind == "llama3":
        return RopeParams(
            rope_theta=theta,
            rope_scale=scaling.positive("factor"),
            low_freq_factor=scaling.positive("low_freq_factor"),
            high_freq_factor=scaling.positive("high_freq_factor"),
            old_context_len=scaling.integer("original_max_position_embeddings"),
        )
    raise UnsupportedError(
        f"rope scaling {kind!r} is not built; known are default, linear and llama3"
    )


def sliding_window(fields: Fields) -> int | None:
    """Return the sliding window in slots; ``None`` where the config says null.

    A config that says nothing means the classes' own default.
    """
    if "sliding_window" in fields.config and fields.config["sliding_window"] is None:
        return None
    return fields.integer("sliding_window", _WINDOW)


def layer_types(fields: Fields, num_layers: int, rule: Callable[[int], str]) -> list[str]:
    """Return the kind of every layer, by the config's list or else by ``rule``."""
    listed = fields.get("layer_types", list, [])
    if not listed:
        return [rule(i) for i in range(num_layers)]
    if len(listed) != num_layers:
        raise WeightsError(
            f"'layer_types' of {fields.where} names {len(listed)} layers of {num_layers}"
        )
    unknown = [kind for kind in listed if kind not in (_FULL, _SLIDING)]
    if unknown:
        raise UnsupportedError(
            f"layer_types has {unknown[0]!r:.60}; known are {_FULL!r} and {_SLIDING!r}"
        )
    return list(listed)
