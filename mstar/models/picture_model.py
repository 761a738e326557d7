"""Models that are a SigLIP tower, a bridge and a decoder: what is the same for all of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mstar.models import decoder
from mstar.models.base import Description
from mstar.models.checkpoint import Checkpoint
from mstar.models.decoder import DecoderModel, Progress
from mstar.models.fields import Fields
from mstar.models.items import ItemDecoderNode
from mstar.models.parts import PartCheckpoint, check_parts, described_with_encoder, with_encoder
from mstar.models.siglip import (
    IGNORED,
    KIND,
    PictureEncoder,
    Tower,
    VisionConfig,
    vision_config,
)
from mstar.models.weight_taking import Weights

Bridge = Callable[[Tensor], Tensor]
"""Makes slots of patches: ``[n, num_patches, width]`` to ``[n, length, hidden_size]``."""


@dataclass(frozen=True, kw_only=True)
class PictureFamily:
    """What tells one such family from another.

    Names of tensors are told by how they begin in the checkpoint, with what stands for that in the
    part itself; several, where versions of the family differ.
    """

    code: str
    """Name of this way to compute it: another one where slots come out differently."""
    decoder_names: Mapping[str, str]
    """Of the decoder, which has them as a decoder-only family does."""
    tower_names: Mapping[str, str]
    bridge_names: Mapping[str, str]
    vision_defaults: Mapping[str, Any]
    """Fields of ``vision_config`` that published configs leave unsaid."""
    decoder_config: Callable[[Fields], dict[str, Any]]
    """From the whole config to one of a decoder-only family, ``architectures`` included."""
    bridge: Callable[[Fields, VisionConfig, Weights, int], Bridge]
    """From the whole config, the tower's shape, the bridge's tensors and the decoder's hidden size
    to the bridge."""
    position_ids: Callable[[int, int, int], Tensor]
    """From a picture's rows and columns of patches, and the side of the learned grid, to the
    learned position of each patch, int64 ``[rows * columns]``."""

    def describe(self, checkpoint: Checkpoint) -> Description:
        """Return what the model of a checkpoint says of itself; names its weights, reads none.

        Raises:
            WeightsError: If the config misses a field.
            UnsupportedError: If the config asks for something that is not built.
        """
        part, shape = self._parts(checkpoint)
        text = decoder.describe(part)
        hidden_size = Fields(part.config).integer("hidden_size")
        constants = self._constants(text.root_constants, shape)
        described = described_with_encoder(text, (KIND,), hidden_size)
        return replace(described, root_constants=constants)

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> DecoderModel:
        """Return the model of a checkpoint, its weights on ``device`` in ``dtype``.

        Raises:
            WeightsError: If a tensor is missing, of a wrong shape, or one that nothing uses.
            UnsupportedError: If the config asks for something that is not built.
        """
        part, shape = self._parts(checkpoint)
        tower_part, bridge_part = (
            PartCheckpoint(checkpoint, names, {}) for names in (self.tower_names, self.bridge_names)
        )
        check_parts(checkpoint, (part, tower_part, bridge_part))
        model = decoder.load(
            part,
            name=name,
            dtype=dtype,
            device=device,
            progress=progress,
            node_class=ItemDecoderNode,
        )
        weights = Weights(tower_part, dtype, device)
        tower = Tower(shape, weights)
        weights.finish(IGNORED)
        hidden_size = model.config.hidden_size
        weights = Weights(bridge_part, dtype, device)
        bridge = self.bridge(Fields(checkpoint.config), shape, weights, hidden_size)
        weights.finish()
        encoder = PictureEncoder(
            tower, lambda rows, columns: self.position_ids(rows, columns, shape.side), bridge
        )
        model = with_encoder(model, encoder, (KIND,), hidden_size)
        model.root_constants = self._constants(model.root_constants, shape)
        return model

    def _parts(self, checkpoint: Checkpoint) -> tuple[PartCheckpoint, VisionConfig]:
        """Return the checkpoint of the decoder, and the shape of the tower."""
        fields = Fields(checkpoint.config)
        shape = vision_config(fields.mapping("vision_config").over(self.vision_defaults))
        config = self.decoder_config(fields)
        return PartCheckpoint(checkpoint, self.decoder_names, config), shape

    def _constants(
        self, text: Mapping[str, str] | None, shape: VisionConfig
    ) -> Mapping[str, str] | None:
        if text is None:
            return None
        return {**text, "vision": repr(shape), "vision_code": self.code}
