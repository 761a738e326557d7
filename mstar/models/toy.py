"""A tiny decoder with seeded weights, made in milliseconds; for tests and documentation."""

from pathlib import Path
from typing import Any

import torch

from mstar.models.decoder import DecoderModel, load
from mstar.models.dummy import DummyCheckpoint

TOY_CONFIG: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def toy_model(
    seed: int = 0,
    architecture: str = "LlamaForCausalLM",
    *,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> DecoderModel:
    """Return a two-layer decoder with drawn weights, on the CPU.

    Args:
        seed: Decides every weight.
        architecture: One of ``mstar.models.ARCHITECTURES``.
        dtype: Of the weights.
        changes: Fields of its ``config.json`` that are to differ from the toy's own.

    Raises:
        UnsupportedError: If the changed config asks for something that is not built.

    >>> toy_model().vocab_size
    160
    """
    config = TOY_CONFIG | {"architectures": [architecture]} | changes
    checkpoint = DummyCheckpoint(Path("toy"), config, seed=seed)
    return load(checkpoint, name="toy", dtype=dtype, device=torch.device("cpu"))
