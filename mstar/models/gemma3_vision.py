"""Gemma 3 with pictures: a SigLIP tower, pooled to slots that see each other in the decoder."""

from typing import Any

import torch
from torch import Tensor

from mstar.errors import UnsupportedError
from mstar.models.fields import Fields
from mstar.models.fused import RMSNorm
from mstar.models.linear import Linear
from mstar.models.picture_model import PictureFamily
from mstar.models.siglip import VisionConfig
from mstar.models.weight_taking import Weights

# What the published configs leave unsaid.
_DECODER_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
_VISION_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}


class Projector:
    """Averages squares of patches, and maps the averages to the decoder's width.

    Args:
        side: Patches in a row of the picture.
        length: Slots of a picture.
        norm: Normalises the averages.
        weight: Maps them.

    Raises:
        UnsupportedError: If the slots are no square grid over the patches.
    """

    def __init__(self, side: int, length: int, norm: RMSNorm, weight: Linear) -> None:
        slots = int(length**0.5)
        if slots**2 != length or side % slots:
            raise UnsupportedError(
                f"mm_tokens_per_image is {length}; it must be the square of a divisor of the "
                f"{side} patches in a picture's row"
            )
        self._slots = slots
        self._norm = norm
        self._weight = weight

    def __call__(self, patches: Tensor) -> Tensor:
        """Return ``[n, length, hidden_size]`` for ``[n, num_patches, width]``."""
        n, count, width = patches.shape
        square = int(count**0.5) // self._slots
        grid = patches.view(n, self._slots, square, self._slots, square, width)
        pooled = grid.mean((2, 4)).view(-1, width)
        return self._weight(self._norm(pooled)).view(n, self._slots**2, -1)


def _projector(
    fields: Fields, shape: VisionConfig, weights: Weights, hidden_size: int
) -> Projector:
    norm = weights.take("mm_soft_emb_norm.weight", shape.hidden_size)
    weight = weights.take("mm_input_projection_weight", shape.hidden_size, hidden_size)
    return Projector(
        shape.side,
        fields.integer("mm_tokens_per_image", 256),
        RMSNorm(norm, shape.norm_eps, is_offset=True),
        Linear(weight.t().contiguous()),
    )


def _decoder_config(fields: Fields) -> dict[str, Any]:
    text = fields.mapping("text_config").over(_DECODER_DEFAULTS)
    if text.is_set("final_logit_softcapping"):
        # The reference reads this cap and does not apply it, so nobody can say what is meant.
        raise UnsupportedError("final_logit_softcapping is not built for Gemma 3 with pictures")
    return {
        **text.config,
        "architectures": ["Gemma3ForCausalLM"],
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
    }


def _row_by_row(rows: int, columns: int, side: int) -> Tensor:
    return torch.arange(rows * columns)


FAMILY = PictureFamily(
    code="gemma3-vision-v1",
    decoder_names={
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
        "lm_head.": "lm_head.",
    },
    tower_names={
        "vision_tower.": "",
        "vision_tower.vision_model.": "",
        "model.vision_tower.": "",
        "model.vision_tower.vision_model.": "",
    },
    bridge_names={"multi_modal_projector.": "", "model.multi_modal_projector.": ""},
    vision_defaults=_VISION_DEFAULTS,
    decoder_config=_decoder_config,
    bridge=_projector,
    position_ids=_row_by_row,
)
describe, load = FAMILY.describe, FAMILY.load
