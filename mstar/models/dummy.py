"""A checkpoint that is a config only: its weights are drawn when they are asked for."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mstar.engine.resources.kv.keys import fingerprint
from mstar.errors import WeightsError
from mstar.models.checkpoint import Checkpoint
from mstar.models.locate import resolve
from mstar.models.weights import read_json


class DummyCheckpoint(Checkpoint):
    """Weights that follow from a seed and their names, drawn where they are to lie.

    They depend on the kind of device too, whose generators differ.

    Args:
        path: What messages call it; a folder may hold a tokenizer.
        config: In the spelling of Hugging Face's config.json.
        generation_config: Likewise; no weight depends on it.
        seed: Decides every weight.
        device: Where they are drawn.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        *,
        generation_config: dict[str, Any] | None = None,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(path, config=config, generation_config=generation_config or {}, tensors={})
        self._seed = seed
        self._device = device or torch.device("cpu")

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Draw a float32 tensor by its name; matrices keep the scale of what they multiply."""
        assert shape is not None, f"{name}: a drawn tensor needs a shape"
        seed = self._seed ^ zlib.crc32(name.encode())
        generator = torch.Generator(self._device).manual_seed(seed)
        drawn = torch.randn(*shape, generator=generator, device=self._device)
        if len(shape) == 1:
            return drawn.mul_(0.1).add_(1)
        return drawn if "embed" in name else drawn.mul_(2 * shape[-1] ** -0.5)

    def begin_fingerprint(self, cache_dir: Path | None = None) -> None:
        """Do nothing: there is no file to read."""

    def fingerprint(self, cache_dir: Path | None = None) -> bytes:
        """Return the content name of weights that follow from a seed and a config."""
        config = repr(sorted(self.config.items()))
        return fingerprint("mstar-dummy-v1", self._seed, self._device.type, config)


def open_dummy(name: str, device: torch.device) -> DummyCheckpoint:
    """Return drawn weights for the ``config.json`` of a folder.

    A ``generation_config.json`` is read where there is one; no other file is needed.

    Raises:
        ModelNotFoundError: If the name leads nowhere.
        WeightsError: If there is no readable ``config.json``.
    """
    path = resolve(name)
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise WeightsError(
            f"{folder} has no config.json, which load_format 'dummy' draws weights for; name a "
            "folder that has one, or leave load_format out"
        )
    generation = folder / "generation_config.json"
    return DummyCheckpoint(
        folder,
        read_json(folder / "config.json"),
        generation_config=read_json(generation) if generation.exists() else {},
        device=device,
    )
