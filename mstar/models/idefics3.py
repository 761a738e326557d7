"""Idefics 3 and SmolVLM: a SigLIP tower over tiles, whose patches are gathered into slots."""

from typing import Any

import torch
from torch import Tensor

from mstar.errors import UnsupportedError
from mstar.models.fields import Fields
from mstar.models.linear import Linear
from mstar.models.picture_model import PictureFamily
from mstar.models.siglip import VisionConfig
from mstar.models.weight_taking import Weights

_DECODERS = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
"""The decoder's ``model_type`` to its architecture."""
# What the published configs leave unsaid.
_DECODER_DEFAULTS = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_VISION_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}


class Connector:
    """Joins squares of neighbouring patches to slots, and maps them to the decoder's width.

    Args:
        factor: Patches in a square's row.
        weight: Maps a square's patches, row by row, to a slot.
    """

    def __init__(self, factor: int, weight: Linear) -> None:
        self._factor = factor
        self._weight = weight

    def __call__(self, patches: Tensor) -> Tensor:
        """Return ``[n, length, hidden_size]`` for ``[n, num_patches, width]`` of square tiles."""
        n, count, width = patches.shape
        factor, slots = self._factor, int(count**0.5) // self._factor
        grid = patches.view(n, slots, factor, slots, factor, width)
        squares = grid.transpose(2, 3).reshape(n * slots**2, factor**2 * width)
        return self._weight(squares).view(n, slots**2, -1)


def _connector(
    fields: Fields, shape: VisionConfig, weights: Weights, hidden_size: int
) -> Connector:
    factor = fields.integer("scale_factor", 2)
    width = factor**2 * shape.hidden_size
    return Connector(
        factor, Linear(weights.take("modality_projection.proj.weight", hidden_size, width))
    )


def bucket_ids(rows: int, columns: int, side: int) -> Tensor:
    """Return the learned positions of a tile's patches, int64 ``[rows * columns]``.

    A patch has the position that its share of the tile's height and width falls on, in the
    reference's float32 arithmetic, which decides where a share lies between two of them.

    Args:
        rows: Patches in a column of the tile.
        columns: Patches in a row.
        side: Learned positions in a row, and rows of them.
    """
    bounds = torch.arange(1 / side, 1.0, 1 / side)

    def buckets(count: int) -> Tensor:
        shares = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
        return torch.bucketize(shares.clamp(max=1.0 - 1e-6), bounds, right=True)

    return (buckets(rows)[:, None] * side + buckets(columns)).flatten()


def _decoder_config(fields: Fields) -> dict[str, Any]:
    text = fields.mapping("text_config").over(_DECODER_DEFAULTS)
    kind = text.text("model_type", "")
    if kind not in _DECODERS:
        raise UnsupportedError(
            f"a decoder of model_type {kind!r} is not built for Idefics 3; known are "
            f"{', '.join(_DECODERS)}"
        )
    return {
        **text.config,
        "architectures": [_DECODERS[kind]],
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
    }


FAMILY = PictureFamily(
    code="idefics3-v1",
    decoder_names={
        "model.text_model.": "model.",
        "text_model.": "model.",
        "model.language_model.": "model.",
        "language_model.model.": "model.",
        "lm_head.": "lm_head.",
        "language_model.lm_head.": "lm_head.",
    },
    tower_names={"model.vision_model.": "", "vision_model.": ""},
    bridge_names={"model.connector.": "", "connector.": ""},
    vision_defaults=_VISION_DEFAULTS,
    decoder_config=_decoder_config,
    bridge=_connector,
    position_ids=bucket_ids,
)
describe, load = FAMILY.describe, FAMILY.load
