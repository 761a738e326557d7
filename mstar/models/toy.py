"""A tiny decoder with seeded weights, made in milliseconds; for tests and documentation."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mstar.engine.resources.kv.keys import fingerprint
from mstar.models.checkpoint import Checkpoint
from mstar.models.decoder import DecoderModel, load

_CONFIG: dict[str, Any] = {
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


class _SeededCheckpoint(Checkpoint):
    """A checkpoint whose tensors are drawn when they are asked for, each by its name."""

    def __init__(self, seed: int, config: dict[str, Any]) -> None:
        super().__init__(Path("toy"), config=config, generation_config={}, tensors={})
        self._seed = seed

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Draw the tensor ``name``; matrices keep the scale of what they are applied to."""
        assert shape is not None, f"{name}: a drawn tensor needs a shape"
        generator = torch.Generator().manual_seed(self._seed ^ zlib.crc32(name.encode()))
        drawn = torch.randn(*shape, generator=generator)
        if len(shape) == 1:
            return 1 + 0.1 * drawn
        return drawn if "embed" in name else 2 * drawn * shape[-1] ** -0.5

    def fingerprint(self, cache_dir: Path | None = None) -> bytes:
        """Return the content name of weights that follow from a seed and a config."""
        return fingerprint("mstar-toy-v1", self._seed, repr(sorted(self.config.items())))


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
    config = _CONFIG | {"architectures": [architecture]} | changes
    checkpoint = _SeededCheckpoint(seed, config)
    return load(checkpoint, name="toy", dtype=dtype, device=torch.device("cpu"))
