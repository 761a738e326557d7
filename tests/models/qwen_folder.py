"""A tiny Qwen2.5-VL, a whole folder made by transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE, VIDEO, START, END = 150, 151, 152, 153
VOCAB = 160
PATCH, SIDE = 4, 8
"""Pixels along a side of a patch, and of a slot."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    # Large, so that leaving it out would show.
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": PATCH,
    # Two by two slots; the layer in the middle sees whole frames.
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
}
PIXELS = {"shortest_edge": 64, "longest_edge": 96 * 96}


def images() -> Qwen2VLImageProcessorPil:
    """Return the reference's own processor of pictures."""
    return Qwen2VLImageProcessorPil(patch_size=PATCH, size=PIXELS)


def reference() -> Qwen2_5_VLForConditionalGeneration:
    """Return a model of drawn weights, of such sizes that pictures and positions matter."""
    generator = torch.Generator().manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model: Qwen2_5_VLForConditionalGeneration = Qwen2_5_VLForConditionalGeneration(config)
    model.eval()
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            width = parameter[0].numel()
            drawn *= 1.0 if "embed_tokens" in name else 1.5 * width**-0.5
        else:
            drawn = 0.1 * drawn + (1.0 if name.endswith("weight") else 0.0)
        parameter.data.copy_(drawn)
    model.generation_config.eos_token_id = None
    return model


def save(folder: Path) -> Qwen2_5_VLForConditionalGeneration:
    """Write a checkpoint without a tokenizer into ``folder`` and return its model."""
    model = reference()
    model.save_pretrained(folder)
    images().save_pretrained(folder)
    return model
