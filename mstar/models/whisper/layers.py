"""The arithmetic of Whisper: the encoder's stack and the decoder's, free of any bookkeeping."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mstar.engine.resources.attention.base import AttentionPlan
from mstar.engine.resources.attention.config import AttentionConfig, LayerAttention
from mstar.engine.resources.attention.manager import pick_backend
from mstar.engine.resources.cross_attention.manager import CrossAttentionPlan
from mstar.engine.resources.kv.layout import KVLayout, KVPlan
from mstar.engine.resources.position.manager import PositionPlan
from mstar.models.fused import LayerNorm, rotate_and_store
from mstar.models.linear import Linear
from mstar.models.weight_taking import Weights
from mstar.models.whisper.config import FRAMES_PER_SLOT, Stack, WhisperConfig

_TAPS = 3
"""Frames that both convolutions look at together."""
_NORM_EPS = 1e-5
# The output head is stored twice in some files; it is the embedding.
IGNORED = r"proj_out\.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """What layers of both stacks have."""

    attention_norm: LayerNorm
    qkv: Linear
    output: Linear
    mlp_norm: LayerNorm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cross:
    """What a decoder layer attends to the encoder with."""

    norm: LayerNorm
    query: Linear
    output: Linear


class WhisperWeights(Weights):
    """Takes the tensors of a Whisper."""

    def norm(self, prefix: str, width: int) -> LayerNorm:
        """Return a normalisation."""
        weight, bias = (self.take(f"{prefix}.{name}", width) for name in ("weight", "bias"))
        return LayerNorm(weight, bias, _NORM_EPS)

    def merged(self, prefix: str, parts: str, width: int) -> Linear:
        """Return the projections of an attention that read the same input, as one.

        Args:
            prefix: Of the attention.
            parts: Some of ``q``, ``k`` and ``v``, in order; keys have no bias.
            width: Elements of input and outputs.
        """
        names = [f"{prefix}.{part}_proj" for part in parts]
        weight = torch.cat([self.take(f"{name}.weight", width, width) for name in names])
        zeros = torch.zeros(width, dtype=self._dtype, device=self._device)
        bias = [
            zeros if part == "k" else self.take(f"{name}.bias", width)
            for part, name in zip(parts, names, strict=True)
        ]
        return Linear(weight, torch.cat(bias))

    def layer(self, prefix: str, stack: Stack, width: int) -> _Layer:
        """Return one layer of a stack."""
        return _Layer(
            attention_norm=self.norm(f"{prefix}.self_attn_layer_norm", width),
            qkv=self.merged(f"{prefix}.self_attn", "qkv", width),
            output=self.linear((f"{prefix}.self_attn.out_proj",), width, width),
            mlp_norm=self.norm(f"{prefix}.final_layer_norm", width),
            up=self.linear((f"{prefix}.fc1",), stack.ffn_size, width),
            down=self.linear((f"{prefix}.fc2",), width, stack.ffn_size),
        )

    def cross(self, prefix: str, width: int) -> _Cross:
        """Return what a decoder layer has on top."""
        return _Cross(
            norm=self.norm(f"{prefix}.encoder_attn_layer_norm", width),
            query=self.linear((f"{prefix}.encoder_attn.q_proj",), width, width),
            output=self.linear((f"{prefix}.encoder_attn.out_proj",), width, width),
        )


Attend = Callable[[Tensor], Tensor]
"""From q, k and v, ``[B, length, 3, num_heads, head_dim]``, to ``[B * length, width]``."""


def _attend_plainly(qkv: Tensor) -> Tensor:
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    out = functional.scaled_dot_product_attention(query, key, value)
    return out.transpose(1, 2).flatten(2).flatten(0, 1)


class _Paged:
    """Attention inside sequences by the backend of the KV cache, each sequence one page of it.

    On CPUs with bfloat16 products it is twice as fast as torch's.
    """

    def __init__(self, length: int, num_heads: int, head_dim: int) -> None:
        self._length = length
        self._layout = KVLayout(
            num_layers=1,
            num_pages=1,
            page_size=length,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        config = AttentionConfig(
            kv_cache="",
            num_qo_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            layers=(LayerAttention(),),
        )
        self.name, self._backend = pick_backend(config, self._layout)

    def __call__(self, qkv: Tensor) -> Tensor:
        count, length = len(qkv), self._length
        lens = np.full(count, length, np.int32)
        query, key, value = (part.contiguous() for part in qkv.unbind(2))
        plan = KVPlan(
            layout=replace(self._layout, num_pages=count),
            keys=[key],
            values=[value],
            qo_lens=lens,
            qo_indptr=np.arange(count + 1, dtype=np.int32) * np.int32(length),
            kv_lens=lens,
            page_table=np.arange(count, dtype=np.int32)[:, None],
            slots=torch.empty(0, dtype=torch.int64),
        )
        return self._backend.plan(plan, (False,) * count).run(0, query.flatten(0, 1)).flatten(1)


def _attention(length: int, num_heads: int, head_dim: int, weight: Tensor) -> Attend:
    """Return the fastest attention inside a whole sequence for a weight's device and dtype."""
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16:
        paged = _Paged(length, num_heads, head_dim)
        if paged.name == "paged":
            return paged
    return _attend_plainly


class Encoder:
    """From a window of features to the keys and values of every decoder layer.

    Args:
        weights: The checkpoint.
        config: The model's shape.
    """

    def __init__(self, weights: WhisperWeights, config: WhisperConfig) -> None:
        width, stack = config.width, config.encoder
        self._config = config
        self._head_dim = width // stack.num_heads
        self._conv1 = self._conv(weights, "model.encoder.conv1", config.num_mel_bins)
        self._conv2 = self._conv(weights, "model.encoder.conv2", width)
        self._positions = weights.take(
            "model.encoder.embed_positions.weight", stack.max_positions, width
        )
        self._layers = [
            weights.layer(f"model.encoder.layers.{index}", stack, width)
            for index in range(stack.num_layers)
        ]
        self._norm = weights.norm("model.encoder.layer_norm", width)
        self._keys_values = [
            weights.merged(f"model.decoder.layers.{index}.encoder_attn", "kv", width)
            for index in range(config.decoder.num_layers)
        ]
        self._attend = _attention(
            stack.max_positions, stack.num_heads, self._head_dim, self._positions
        )

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._positions.device

    def _conv(self, weights: WhisperWeights, prefix: str, num_in: int) -> Linear:
        """Return a convolution as a projection of three frames laid side by side."""
        width = self._config.width
        kernel = weights.take(f"{prefix}.weight", width, num_in, _TAPS)
        bias = weights.take(f"{prefix}.bias", width)
        return Linear(kernel.transpose(1, 2).reshape(width, _TAPS * num_in).contiguous(), bias)

    def encode(self, features: Tensor) -> Tensor:
        """Return ``[B * max_positions, width]``, one window after the other.

        Args:
            features: float32 ``[B, num_mel_bins, num_frames]``, whole windows, on the device.
        """
        expected = (self._config.num_mel_bins, self._config.num_frames)
        assert features.shape[1:] == expected, (tuple(features.shape), expected)
        frames = features.mT.to(self._positions.dtype)
        x = functional.gelu(self._conv1(_neighbours(frames, 1)))
        x = functional.gelu(
            self._conv2(_neighbours(x.view(*frames.shape[:2], -1), FRAMES_PER_SLOT))
        )
        shape = (len(features), len(self._positions), -1)
        x.view(shape).add_(self._positions)
        heads = (*shape[:2], 3, self._config.encoder.num_heads, self._head_dim)
        # What the last projection gave, which the next norm adds.
        share: Tensor | None = None
        for layer in self._layers:
            qkv = layer.qkv(layer.attention_norm.add(x, share)).view(heads)
            share = layer.output(self._attend(qkv))
            share = layer.down(functional.gelu(layer.up(layer.mlp_norm.add(x, share))))
        return self._norm.add(x, share)

    def keys_values(self, encoded: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return what a decoder layer attends to, ``[num_slots, num_heads, head_dim]`` each.

        Args:
            encoded: ``[num_slots, width]``, of any number of windows.
            layer: Index of the layer.
        """
        heads = self._config.decoder.num_heads
        merged = self._keys_values[layer](encoded)
        keys, values = merged.view(len(encoded), 2, heads, -1).unbind(1)
        return keys, values


def _neighbours(x: Tensor, stride: int) -> Tensor:
    """Return every ``stride``-th row beside the one before and the one behind, zeros at the edges.

    Args:
        x: ``[B, num_rows, width]``.
        stride: Step from one row to the next.

    Returns:
        ``[B * num_rows // stride, 3 * width]``.
    """
    count, num_rows, width = x.shape
    padded = functional.pad(x, (0, 0, 1, 1))
    size = (count, num_rows // stride, _TAPS * width)
    return padded.as_strided(size, (padded.stride(0), stride * width, 1)).contiguous().flatten(0, 1)


class Decoder:
    """From ids, positions and what is attended to, to logits.

    Args:
        weights: The checkpoint.
        config: The model's shape.
        progress: Called with layers loaded and layers in all.
    """

    def __init__(
        self,
        weights: WhisperWeights,
        config: WhisperConfig,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        width, stack = config.width, config.decoder
        self._config = config
        self._embedding = weights.take(
            "model.decoder.embed_tokens.weight", config.vocab_size, width
        )
        self._positions = weights.take(
            "model.decoder.embed_positions.weight", stack.max_positions, width
        )
        self._layers = []
        for index in range(stack.num_layers):
            prefix = f"model.decoder.layers.{index}"
            cross = weights.cross(prefix, width)
            self._layers.append((weights.layer(prefix, stack, width), cross))
            if progress is not None:
                progress(index + 1, stack.num_layers)
        self._norm = weights.norm("model.decoder.layer_norm", width)
        self._head = Linear(self._embedding)

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._embedding.device

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return ``[num_tokens, width]`` for int64 ids and positions, ``[num_tokens]`` each."""
        x = functional.embedding(ids, self._embedding)
        if self._config.embedding_scale != 1.0:
            x = x * self._config.embedding_scale
        return x + functional.embedding(positions, self._positions)

    def hidden(
        self,
        x: Tensor,
        position: PositionPlan,
        kv: KVPlan,
        attention: AttentionPlan,
        cross: CrossAttentionPlan,
    ) -> Tensor:
        """Write the KV of all tokens and return the last layer's output, ``[num_tokens, width]``.

        Args:
            x: ``[num_tokens, width]``, embedded; is written to.
            position: Where the tokens stand, by which no layer rotates.
            kv: Where the tokens are written.
            attention: What they attend to among themselves.
            cross: What they attend to of the encoder.
        """
        num_heads = self._config.decoder.num_heads
        own, other = (len(x), 3 * num_heads, -1), (len(x), num_heads, -1)
        # What the last projection gave, which the next norm adds.
        share: Tensor | None = None
        for index, (layer, beside) in enumerate(self._layers):
            qkv = layer.qkv(layer.attention_norm.add(x, share)).view(own)
            query = rotate_and_store(qkv, num_heads, position, kv, index)
            share = layer.output(attention.run(index, query).flatten(1))
            query = beside.query(beside.norm.add(x, share)).view(other)
            share = beside.output(cross.run(index, query).flatten(1))
            share = layer.down(functional.gelu(layer.up(layer.mlp_norm.add(x, share))))
        return x if share is None else x.add_(share)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[num_rows, vocab_size]`` for ``[num_rows, width]``."""
        return self._head(self._norm(hidden))
