"""A decoder-only model's shape, read from a checkpoint's config in Hugging Face's spelling."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mstar.engine.resources.position.config import RopeParams
from mstar.errors import UnsupportedError, WeightsError

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}


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
    """One a layer; ``None``: the layer does not rotate."""
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
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None


def decoder_config(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Return the shape of a decoder of a known architecture.

    Args:
        config: A config.json.
        architecture: One of ``FAMILIES``.

    Raises:
        WeightsError: If a field is missing or of a wrong type; names it.
        UnsupportedError: If the config asks for something that is not built.
    """
    fields = _Fields(config)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer("head_dim", 0) or hidden // heads
    activation = fields.text("hidden_act", fields.text("hidden_activation", "silu"))
    if architecture.startswith("Gemma3"):
        activation = fields.text("hidden_activation", "gelu_pytorch_tanh")
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"activation {activation!r} is not built; known are {', '.join(_ACTIVATIONS)}"
        )
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
        "activation": _ACTIVATIONS[activation],
        "is_tied": fields.flag("tie_word_embeddings", architecture.startswith("Gemma3")),
        "attention_scale": head_dim**-0.5,
        "windows": (None,) * num_layers,
    }
    shape["rope"] = (_rope(fields, None),) * num_layers
    return DecoderConfig(**shape | FAMILIES[architecture](fields, shape))


def _llama(fields: "_Fields", shape: dict[str, Any]) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {
        "has_qkv_bias": bias,
        "has_output_bias": bias,
        "has_mlp_bias": fields.flag("mlp_bias", False),
    }


def _mistral(fields: "_Fields", shape: dict[str, Any]) -> dict[str, Any]:
    return {"windows": (fields.integer("sliding_window", 0) or None,) * shape["num_layers"]}


def _qwen2(fields: "_Fields", shape: dict[str, Any]) -> dict[str, Any]:
    return {"has_qkv_bias": True, "windows": _qwen_windows(fields, shape["num_layers"])}


def _qwen3(fields: "_Fields", shape: dict[str, Any]) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {
        "has_qkv_bias": bias,
        "has_output_bias": bias,
        "has_qk_norm": True,
        "windows": _qwen_windows(fields, shape["num_layers"]),
    }


def _qwen_windows(fields: "_Fields", num_layers: int) -> tuple[int | None, ...]:
    window = fields.integer("sliding_window", 0) or None
    if not fields.flag("use_sliding_window", False) or window is None:
        return (None,) * num_layers
    first = fields.integer("max_window_layers", num_layers)
    kinds = fields.layer_types(
        num_layers, lambda i: "sliding_attention" if i >= first else "full_attention"
    )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _gemma3(fields: "_Fields", shape: dict[str, Any]) -> dict[str, Any]:
    num_layers = shape["num_layers"]
    period = fields.integer("sliding_window_pattern", 6)
    kinds = fields.layer_types(
        num_layers, lambda i: "sliding_attention" if (i + 1) % period else "full_attention"
    )
    rope = {kind: _rope(fields, kind) for kind in set(kinds)}
    window = fields.integer("sliding_window", 4096)
    return {
        "has_qkv_bias": fields.flag("attention_bias", False),
        "has_output_bias": fields.flag("attention_bias", False),
        "has_qk_norm": True,
        "has_sandwich_norms": True,
        "has_norm_offset": True,
        "embedding_scale": shape["hidden_size"] ** 0.5,
        "attention_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        "rope": tuple(rope[kind] for kind in kinds),
        "attention_soft_cap": fields.number("attn_logit_softcapping", 0.0) or None,
        "logit_soft_cap": fields.number("final_logit_softcapping", 0.0) or None,
    }


FAMILIES: Mapping[str, Callable[["_Fields", dict[str, Any]], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma3ForCausalLM": _gemma3,
}
"""What each architecture adds to the common fields."""


def _rope(fields: "_Fields", kind: str | None) -> RopeParams:
    """Return the rotation of a kind of layers, from either spelling of the config.

    Newer configs hold ``rope_parameters``, by kind of layer where kinds differ; older ones
    ``rope_theta`` and ``rope_scaling`` at the top, and Gemma 3 its local base beside them.
    """
    default_theta = 1e6 if kind == "full_attention" else 1e4
    nested = fields.mapping("rope_parameters")
    if kind is not None and kind in nested:
        nested = nested[kind] or {}
    if nested and not any(isinstance(value, Mapping) for value in nested.values()):
        theta = nested.get("rope_theta", fields.number("rope_theta", default_theta))
        return _scaled_rope(float(theta), nested)
    if kind == "sliding_attention":
        return RopeParams(rope_theta=fields.number("rope_local_base_freq", 1e4))
    theta = fields.number("rope_theta", default_theta)
    return _scaled_rope(theta, fields.mapping("rope_scaling"))


def _scaled_rope(theta: float, scaling: Mapping[str, Any]) -> RopeParams:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError("partial_rotary_factor is not built for these architectures")
    try:
        if kind == "default":
            return RopeParams(rope_theta=theta)
        if kind == "linear":
            return RopeParams(rope_theta=theta, rope_scale=float(scaling["factor"]))
        if kind == "llama3":
            return RopeParams(
                rope_theta=theta,
                rope_scale=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                old_context_len=int(scaling["original_max_position_embeddings"]),
            )
    except KeyError as missing:
        raise WeightsError(f"rope scaling {kind!r} of the config lacks {missing}") from None
    raise UnsupportedError(
        f"rope scaling {kind!r} is not built; known are default, linear and llama3"
    )


class _Fields:
    """Typed access to a config.json; a ``null`` counts as missing."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def _get(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = self._config.get(name)
        if value is None:
            if default is None:
                raise WeightsError(f"the config lacks {name!r}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise WeightsError(f"the config's {name!r} is {value!r:.60}, of a wrong type")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value: int = self._get(name, int, default)
        if value < 0:
            raise WeightsError(f"the config's {name!r} is {value}; it must not be negative")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._get(name, (int, float), default))

    def text(self, name: str, default: str) -> str:
        return str(self._get(name, str, default))

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._get(name, bool, default))

    def mapping(self, name: str) -> Mapping[str, Any]:
        value: Mapping[str, Any] = self._get(name, Mapping, {})
        return value

    def layer_types(self, num_layers: int, rule: Callable[[int], str]) -> list[str]:
        """Return the kind of every layer, by the config's list or else by ``rule``."""
        listed = self._config.get("layer_types")
        if listed is None:
            return [rule(i) for i in range(num_layers)]
        if len(listed) != num_layers:
            raise WeightsError(
                f"the config's layer_types names {len(listed)} layers of {num_layers}"
            )
        return list(listed)
