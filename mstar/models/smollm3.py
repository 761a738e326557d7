"""SmolLM3: Llama in which every fourth layer rotates nothing."""

from functools import partial
from typing import Any

from mstar.models import decoder
from mstar.models.decoder_config import common, layer_types, sliding_window
from mstar.models.fields import Fields


def read(fields: Fields, shape: dict[str, Any]) -> dict[str, Any]:
    """Return what this family has of its own, as fields of ``DecoderConfig``."""
    num_layers, llama = shape["num_layers"], common(fields, shape)
    interval = fields.integer("no_rope_layer_interval", 4)
    default = [int((layer + 1) % interval > 0) for layer in range(num_layers)]
    rotates = fields.get("no_rope_layers", list, default)
    kinds = layer_types(
        fields, num_layers, lambda i: "full_attention" if rotates[i] else "sliding_attention"
    )
    window = sliding_window(fields) if fields.flag("use_sliding_window", False) else None
    bias = fields.flag("attention_bias", False)
    return llama | {
        "rope": tuple(rope if rotates[i] else None for i, rope in enumerate(llama["rope"])),
        "windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        "is_tied": fields.flag("tie_word_embeddings", True),
        "has_qkv_bias": bias,
        "has_output_bias": bias,
        "has_mlp_bias": fields.flag("mlp_bias", False),
    }


describe = partial(decoder.describe, read=read)
load = partial(decoder.load, read=read)
deal = partial(decoder.deal, read=read)
