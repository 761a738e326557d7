"""SigLIP's vision transformer, and the node that makes slots of pictures with it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.request import Request, RequestItem
from mstar.engine.resources.encoder.config import EncoderStep
from mstar.engine.resources.encoder.manager import EncoderPlan
from mstar.engine.resources.step import NodeStep
from mstar.errors import UnsupportedError
from mstar.models.fields import Fields
from mstar.models.fused import LayerNorm
from mstar.models.items import item_of, tensor_of
from mstar.models.linear import Linear
from mstar.models.parts import ENCODER
from mstar.models.weight_taking import Weights

KIND = "image"
"""Kind of the items that the node takes."""
IGNORED = r"embeddings\.position_ids|head\..*"
"""Tensors of a tower that what it says of each patch does not depend on."""
_MAX_BATCH = 16
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Shape of a tower."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    """Height and width of the picture that its positions were learned for, in pixels."""
    patch_size: int
    norm_eps: float
    activation: str

    @property
    def side(self) -> int:
        """Patches in a row of that picture, and rows."""
        return self.image_size // self.patch_size


def vision_config(fields: Fields) -> VisionConfig:
    """Return the shape that a ``vision_config`` states.

    Raises:
        WeightsError: If a field is missing or of a wrong type.
        UnsupportedError: If it asks for something that is not built.
    """
    activation = fields.text("hidden_act", "gelu_pytorch_tanh")
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"vision activation {activation!r} is not built; known are {', '.join(_ACTIVATIONS)}"
        )
    config = VisionConfig(
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=fields.integer("num_attention_heads"),
        image_size=fields.integer("image_size"),
        patch_size=fields.integer("patch_size"),
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        activation=activation,
    )
    if fields.integer("num_channels", 3) != 3 or config.hidden_size % config.num_heads:
        raise UnsupportedError(
            f"a vision tower of {config.num_heads} heads over {config.hidden_size} elements and "
            f"{fields.integer('num_channels', 3)} channels is not built; channels must be 3, and "
            "the elements a multiple of the heads"
        )
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer's weights."""

    attention_norm: LayerNorm
    qkv: Linear
    output: Linear
    mlp_norm: LayerNorm
    up: Linear
    down: Linear


class Tower:
    """Patches of pictures, each seeing all of its picture.

    Args:
        config: Its shape.
        weights: Its tensors, named as in transformers' own vision model.

    Raises:
        WeightsError: If a tensor is missing or of a wrong shape.
    """

    def __init__(self, config: VisionConfig, weights: Weights) -> None:
        self.config = config
        width, size = config.hidden_size, config.patch_size
        kernel = weights.take("embeddings.patch_embedding.weight", width, 3, size, size)
        self.dtype, self.device = kernel.dtype, kernel.device
        self._patches = Linear(
            kernel.flatten(1), weights.take("embeddings.patch_embedding.bias", width)
        )
        self._positions = weights.take(
            "embeddings.position_embedding.weight", config.side**2, width
        )
        self._layers = [self._layer(index, weights) for index in range(config.num_layers)]
        self._norm = self._take_norm("post_layernorm", weights)
        self._activation = _ACTIVATIONS[config.activation]

    def _take_norm(self, name: str, weights: Weights) -> LayerNorm:
        width = self.config.hidden_size
        return LayerNorm(
            weights.take(f"{name}.weight", width),
            weights.take(f"{name}.bias", width),
            self.config.norm_eps,
        )

    def _layer(self, index: int, weights: Weights) -> _Layer:
        prefix = f"encoder.layers.{index}."
        width, inner = self.config.hidden_size, self.config.intermediate_size
        heads = [f"{prefix}self_attn.{part}_proj" for part in ("q", "k", "v")]
        return _Layer(
            attention_norm=self._take_norm(prefix + "layer_norm1", weights),
            qkv=weights.linear(heads, width, width),
            output=weights.linear([prefix + "self_attn.out_proj"], width, width),
            mlp_norm=self._take_norm(prefix + "layer_norm2", weights),
            up=weights.linear([prefix + "mlp.fc1"], inner, width),
            down=weights.linear([prefix + "mlp.fc2"], width, inner),
        )

    def __call__(self, pixels: Tensor, position_ids: Tensor) -> Tensor:
        """Return what it makes of each patch, ``[n, num_patches, hidden_size]``.

        Args:
            pixels: ``[n, 3, height, width]``, multiples of the patches' size, in its dtype.
            position_ids: int64 ``[num_patches]``, the learned positions of the patches, row by row.
        """
        size, width = self.config.patch_size, self.config.hidden_size
        n = len(pixels)
        patches = pixels.unflatten(3, (-1, size)).unflatten(2, (-1, size))
        flat = patches.permute(0, 2, 4, 1, 3, 5).reshape(-1, 3 * size * size)
        x = self._patches(flat).view(n, -1, width) + self._positions[position_ids]
        for layer in self._layers:
            x = x + self._attend(layer, layer.attention_norm(x))
            inner = self._activation(layer.up(layer.mlp_norm(x).flatten(0, 1)))
            x = x + layer.down(inner).view(x.shape)
        return self._norm(x)

    def _attend(self, layer: _Layer, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, self.config.num_heads, -1)
        query, key, value = layer.qkv(x.flatten(0, 1)).view(shape).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(query, key, value)
        return layer.output(out.transpose(1, 2).reshape(-1, x.shape[-1])).view(x.shape)


class PictureEncoder(Node):
    """Encodes items of kind ``image``, several at a time.

    An item's inputs are ``pixels``, uint8 ``[3, height, width]``, and ``values``, float32
    ``[3, 256]``: what each of them is worth in its channel.

    Args:
        tower: Makes patches of pictures.
        position_ids: Gives the patches' positions, int64 ``[rows * columns]``, for the rows and
            columns of a picture.
        project: Makes slots of patches: ``[n, num_patches, tower's hidden size]`` to
            ``[n, length, decoder's hidden size]``.
    """

    max_batch = _MAX_BATCH

    def __init__(
        self,
        tower: Tower,
        position_ids: Callable[[int, int], Tensor],
        project: Callable[[Tensor], Tensor],
    ) -> None:
        self._tower = tower
        self._position_ids = position_ids
        self._project = project
        self.num_encoded = 0
        """Items that it was run on."""

    def shape(self, request: Request, part: object) -> tuple[int, ...]:
        """Return the shape of a picture; one batch has pictures of one shape."""
        assert isinstance(part, RequestItem), type(part).__name__
        return part.inputs["pixels"].shape

    def declare(self, batch: Batch) -> NodeStep:
        """Ask for room for the outputs."""
        made = tuple(map(item_of, batch.requests, batch.items))
        return NodeStep(batch.segments, {ENCODER: EncoderStep(made=made)})

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        """Encode the batch's pictures."""
        plan: EncoderPlan = plans[ENCODER]
        outputs = self.encode(torch.stack([self._pixels(item.inputs) for item in batch.items]))
        for request, item, output in zip(batch.requests, batch.items, outputs, strict=True):
            # A copy of its own: a part of the batch's tensor would keep all of it in memory.
            plan.store(item_of(request, item), output.clone())
        self.num_encoded += len(batch.items)
        return NodeOutput(token_ids=())

    def encode(self, pixels: Tensor) -> Tensor:
        """Return the slots of pictures, ``[n, length, hidden_size]``.

        Args:
            pixels: ``[n, 3, height, width]``, in the tower's dtype, on its device.
        """
        rows, columns = (n // self._tower.config.patch_size for n in pixels.shape[2:])
        ids = self._position_ids(rows, columns).to(pixels.device)
        return self._project(self._tower(pixels, ids))

    def _pixels(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return a picture as the tower is given it, ``[3, height, width]``."""
        pixels = tensor_of(inputs["pixels"], self._tower.device).long()
        values = tensor_of(inputs["values"], self._tower.device)
        channels = [table[own] for table, own in zip(values, pixels, strict=True)]
        return torch.stack(channels).to(self._tower.dtype)
