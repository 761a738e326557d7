"""Writes a checkpoint as a Hugging Face folder, so that every peer reads the same weights."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from mstar.models.checkpoint import Checkpoint, open_checkpoint


def exported_model(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Return the folder of a model in ``dtype``, written on first use."""
    target = folder / f"{name}-{str(dtype).removeprefix('torch.')}"
    if not (target / "model.safetensors").exists():
        checkpoint = open_checkpoint(name)
        target.mkdir(parents=True, exist_ok=True)
        config = checkpoint.config | {"dtype": str(dtype).removeprefix("torch.")}
        (target / "config.json").write_text(json.dumps(config))
        tensors = {
            tensor: _value(checkpoint, tensor).to(dtype).contiguous()
            for tensor in checkpoint.names()
        }
        save_file(tensors, target / "partial", metadata={"format": "pt"})
        os.replace(target / "partial", target / "model.safetensors")
    return target


def _value(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Return a tensor, with rotated pairs in two halves as Hugging Face has them."""
    value = checkpoint.tensor(name)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, count in heads.items():
        if checkpoint.rope_interleaved and part in name:
            rows = value.unflatten(0, (checkpoint.config[count], -1, 2))
            halves: torch.Tensor = rows.transpose(1, 2).reshape(value.shape)
            return halves
    return value
