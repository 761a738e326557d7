"""The decoder of a VQGAN: from the codes of an image to its pixels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from mstar.models.janus.config import ImageSettings, VQConfig

_GROUPS = 32
_EPS = 1e-6


class Take(Protocol):
    """Gives a tensor of the checkpoint by its name, checked against a shape."""

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return the tensor, where the model runs."""
        ...


Layer = Callable[[Tensor], Tensor]
"""From ``[B, channels, height, width]`` to the same of other sizes."""


@dataclass(frozen=True, slots=True)
class _Conv:
    """A convolution that keeps height and width."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight, self.bias, padding=self.weight.shape[-1] // 2)


@dataclass(frozen=True, slots=True)
class _Norm:
    """Normalisation by groups of channels."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return functional.group_norm(x, _GROUPS, self.weight, self.bias, _EPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Residual:
    """Two convolutions beside a shortcut."""

    norm1: _Norm
    conv1: _Conv
    norm2: _Norm
    conv2: _Conv
    shortcut: _Conv | None
    """``None``: as many channels come out as go in."""

    def __call__(self, x: Tensor) -> Tensor:
        inner = self.conv1(functional.silu(self.norm1(x), inplace=True))
        inner = self.conv2(functional.silu(self.norm2(inner), inplace=True))
        return inner + (x if self.shortcut is None else self.shortcut(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """Attention of one head from every place to every place."""

    norm: _Norm
    query: _Conv
    key: _Conv
    value: _Conv
    output: _Conv

    def __call__(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        # [B, places, channels] each.
        query, key, value = (
            part(normed).flatten(2).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value)
        return x + self.output(attended.transpose(1, 2).reshape(x.shape))


@dataclass(frozen=True, slots=True)
class _Upsample:
    """Doubles height and width."""

    conv: _Conv

    def __call__(self, x: Tensor) -> Tensor:
        return self.conv(functional.interpolate(x, scale_factor=2.0, mode="nearest"))


class VQDecoder:
    """Turns codes into pixels.

    Args:
        config: Its shape.
        take: Gives the tensors, under the names that the VQ model has by itself.
    """

    def __init__(self, config: VQConfig, take: Take) -> None:
        self.config = config
        codes = take("quantize.embedding.weight", config.num_codes, config.code_size)
        # Codes are looked up at unit length.
        self._codes = functional.normalize(codes, dim=-1)
        build = _Builder(take)
        self._layers = build.layers(config)

    def decode(self, codes: Tensor) -> Tensor:
        """Return ``[B, 3, image_size, image_size]``, around -1 to 1.

        Args:
            codes: int64 ``[B, side * side]``, row after row.
        """
        side = self.config.side
        x = functional.embedding(codes, self._codes)
        # Channels stay last in memory: convolutions are half as fast again.
        x = x.view(-1, side, side, self.config.code_size).permute(0, 3, 1, 2)
        for layer in self._layers:
            x = layer(x)
        return x


class _Builder:
    """Makes layers of a checkpoint's tensors."""

    def __init__(self, take: Take) -> None:
        self._take = take

    def layers(self, config: VQConfig) -> list[Layer]:
        """Return all layers in their order, the coarsest first."""
        coarsest = config.base_channels * config.channel_multiplier[-1]
        latent = config.latent_channels
        layers: list[Layer] = [
            self.conv("post_quant_conv", config.code_size, latent, 1),
            self.conv("decoder.conv_in", latent, coarsest, 3),
            self.residual("decoder.mid.block_1", coarsest, coarsest),
            self.attention("decoder.mid.attn_1", coarsest),
            self.residual("decoder.mid.block_2", coarsest, coarsest),
        ]
        width = coarsest
        for place, factor in enumerate(reversed(config.channel_multiplier)):
            prefix, channels = f"decoder.up.{place}.", config.base_channels * factor
            for block in range(config.num_res_blocks + 1):
                layers.append(self.residual(f"{prefix}block.{block}", width, channels))
                width = channels
                if place == 0:
                    layers.append(self.attention(f"{prefix}attn.{block}", width))
            if place < len(config.channel_multiplier) - 1:
                layers.append(_Upsample(self.conv(f"{prefix}upsample.conv", width, width, 3)))
        norm = self.norm("decoder.norm_out", width)
        last = self.conv("decoder.conv_out", width, config.out_channels, 3)
        layers += [norm, functional.silu, last]
        return layers

    def conv(self, name: str, inner: int, outer: int, size: int) -> _Conv:
        weight = self._take(f"{name}.weight", outer, inner, size, size)
        weight = weight.to(memory_format=torch.channels_last)
        return _Conv(weight, self._take(f"{name}.bias", outer))

    def norm(self, name: str, width: int) -> _Norm:
        return _Norm(self._take(f"{name}.weight", width), self._take(f"{name}.bias", width))

    def residual(self, name: str, inner: int, outer: int) -> _Residual:
        return _Residual(
            norm1=self.norm(f"{name}.norm1", inner),
            conv1=self.conv(f"{name}.conv1", inner, outer, 3),
            norm2=self.norm(f"{name}.norm2", outer),
            conv2=self.conv(f"{name}.conv2", outer, outer, 3),
            shortcut=(
                None if inner == outer else self.conv(f"{name}.nin_shortcut", inner, outer, 1)
            ),
        )

    def attention(self, name: str, width: int) -> _Attention:
        return _Attention(
            norm=self.norm(f"{name}.norm", width),
            query=self.conv(f"{name}.q", width, width, 1),
            key=self.conv(f"{name}.k", width, width, 1),
            value=self.conv(f"{name}.v", width, width, 1),
            output=self.conv(f"{name}.proj_out", width, width, 1),
        )


def to_levels(pixels: Tensor, settings: ImageSettings) -> Tensor:
    """Return uint8 ``[..., height, width, 3]`` for normalised ``[..., 3, height, width]``.

    Args:
        pixels: What the decoder made.
        settings: What normalised the pixels that it learned from.
    """
    mean, std = (
        pixels.new_tensor(part, dtype=torch.float32).view(3, 1, 1)
        for part in (settings.mean, settings.std)
    )
    levels = (pixels.float() * std + mean) / settings.factor
    # Cut, not rounded: the reference does it so.
    return levels.clamp(0, 255).to(torch.uint8).movedim(-3, -1).contiguous()
