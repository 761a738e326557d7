"""A decoder-only model's shape, read from a checkpoint's config in Hugging Face's spelling."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
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
    rope: tuple[RopeParams, ...]
    """One a layer."""
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
    return DecoderConfig(**shape | FAMILIES[architecture](fields, shape))


def _common(fields: "_Fields", shape: dict[str, Any]) -> dict[str, Any]:
    """Return what all but Gemma read alike."""
    return {
        "activation": _activation(fields.text("hidden_act", "silu")),
        "rope": (_rope(fields),) * shape["num_layers"],
    }


def _llama(fields: "_Fields", shape: dict[str, Any]) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return _common(fields, shape) | {
        "has_qkv_bias": bias,
        "has_output_bias": bias,
        "has_mlp_bias": fields.flag("mlp_bias", False),
    }


def _mistral(fields: "_Fields", shape: dict[str, Any]) -> dict[str, Any]:
    return _common(fields, shape) | {"windows": (fields.window(),) * shape["num_layers"]}


def _qwen2(fields: "_Fields", shape: dict[str, Any]) -> dict[str, Any]:
    return _common(fields, shape) | {
        "has_qkv_bias": True,
        "windows": _qwen_windows(fields, shape["num_layers"]),
    }


def _qwen3(fields: "_Fields", shape: dict[str, Any]) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return _common(fields, shape) | {
        "has_qkv_bias": bias,
        "has_output_bias": bias,
        "has_qk_norm": True,
        "windows": _qwen_windows(fields, shape["num_layers"]),
    }


def _qwen_windows(fields: "_Fields", num_layers: int) -> tuple[int | None, ...]:
    window = fields.window() if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28, minimum=0)
    kinds = fields.layer_types(num_layers, lambda i: _SLIDING if i >= first else _FULL)
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _gemma3(fields: "_Fields", shape: dict[str, Any]) -> dict[str, Any]:
    # The reference reads this cap and does not apply it, so nobody can say what is meant.
    for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if fields.is_set(name):
            raise UnsupportedError(f"{name} is not built for {_GEMMA3}")
    num_layers = shape["num_layers"]
    period = fields.integer("sliding_window_pattern", 6)
    kinds = fields.layer_types(num_layers, lambda i: _SLIDING if (i + 1) % period else _FULL)
    window = fields.window()
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


FAMILIES: Mapping[str, Callable[["_Fields", dict[str, Any]], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    _GEMMA3: _gemma3,
}
"""What each architecture adds to the common fields."""


def _rope(fields: "_Fields") -> RopeParams:
    """Return the rotation that all layers share, from either spelling of the config.

    Newer configs hold all of it in ``rope_parameters``, older ones ``rope_theta`` and
    ``rope_scaling`` at the top.
    """
    name = "rope_scaling" if fields.is_set("rope_scaling") else "rope_parameters"
    scaling = fields.mapping(name)
    if scaling.has_mappings:
        raise UnsupportedError(f"{name} by kind of layer is not built for this architecture")
    return _scaled_rope(scaling, fields.positive("rope_theta", 1e4))


def _gemma_rope(fields: "_Fields", kind: str) -> RopeParams:
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


def _scaled_rope(scaling: "_Fields", theta: float) -> RopeParams:
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


class _Fields:
    """Typed access to an object of a config.json; a ``null`` counts as missing.

    Args:
        config: The object.
        where: What messages call it.
    """

    def __init__(self, config: Mapping[str, Any], where: str = "the config") -> None:
        self._config = config
        self._where = where

    def _get(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = self._config.get(name)
        if value is None:
            if default is None:
                raise WeightsError(f"{self._where} lacks {name!r}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise WeightsError(f"{name!r} of {self._where} is {value!r:.60}, of a wrong type")
        return value

    def is_set(self, name: str) -> bool:
        """Tell whether the field is there and neither null, false nor an empty object."""
        value = self._config.get(name)
        return value is not None and value is not False and value != {}

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value: int = self._get(name, int, default)
        if value < minimum:
            raise WeightsError(
                f"{name!r} of {self._where} is {value}; it must be at least {minimum}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = float(self._get(name, (int, float), default))
        if not 0 <= value < inf:
            raise WeightsError(
                f"{name!r} of {self._where} is {value}; it must be finite and not negative"
            )
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value == 0:
            raise WeightsError(f"{name!r} of {self._where} is 0; it must be positive")
        return value

    def text(self, name: str, default: str) -> str:
        return str(self._get(name, str, default))

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._get(name, bool, default))

    def mapping(self, name: str) -> "_Fields":
        return _Fields(self._get(name, Mapping, {}), f"{self._where}'s {name}")

    def updated(self, other: "_Fields") -> "_Fields":
        """Return these fields with those of ``other`` over them."""
        return _Fields({**self._config, **other._config}, other._where)

    @property
    def has_mappings(self) -> bool:
        return any(isinstance(value, Mapping) for value in self._config.values())

    def has_only(self, *names: str) -> bool:
        return set(self._config) <= set(names)

    def window(self) -> int | None:
        """Return the sliding window in slots; ``None`` where the config says null.

        A config that says nothing means the classes' own default.
        """
        if "sliding_window" in self._config and self._config["sliding_window"] is None:
            return None
        return self.integer("sliding_window", _WINDOW)

    def layer_types(self, num_layers: int, rule: Callable[[int], str]) -> list[str]:
        """Return the kind of every layer, by the config's list or else by ``rule``."""
        listed = self._get("layer_types", list, [])
        if not listed:
            return [rule(i) for i in range(num_layers)]
        if len(listed) != num_layers:
            raise WeightsError(
                f"'layer_types' of {self._where} names {len(listed)} layers of {num_layers}"
            )
        unknown = [kind for kind in listed if kind not in (_FULL, _SLIDING)]
        if unknown:
            raise UnsupportedError(
                f"layer_types has {unknown[0]!r:.60}; known are {_FULL!r} and {_SLIDING!r}"
            )
        return list(listed)
