"""The arithmetic of Whisper: the encoder's stack and the decoder's, free of any bookkeeping."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mstar.engine.resources.attention.base import AttentionPlan
from mstar.engine.resources.attention.config import AttentionConfig, LayerAttention
from mstar.engine.resources.attention.manager import pick_backend
from mstar.engine.resources.cross_attention.manager import CrossAttentionPlan
from mstar.engine.resources.kv.layout import KVLayout, KVPlan
from mstar.models.linear import Linear
from mstar.models.weight_taking import Weights
from mstar.models.whisper.config import FRAMES_PER_SLOT, Stack, WhisperConfig

_TAPS = 3
"""Frames that both convolutions look at together."""
# The output head is stored twice in some files; it is the embedding.
IGNORED = r"proj_out\.weight"


class Norm:
    """Layer normalisation over the last axis.

    Args:
        weight: ``[width]``.
        bias: ``[width]``.
    """

    __slots__ = ("_bias", "_shape", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self._weight, self._bias = weight, bias
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x`` normalised, in a new tensor."""
        return functional.layer_norm(x, self._shape, self._weight, self._bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """What layers of both stacks have."""

    attention_norm: Norm
    qkv: Linear
    output: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cross:
    """What a decoder layer attends to the encoder with."""

    norm: Norm
    query: Linear
    output: Linear


class WhisperWeights(Weights):
    """Takes the tensors of a Whisper."""

    def norm(self, prefix: str, width: int) -> Norm:
        """Return a normalisation."""
        return Norm(self.take(f"{prefix}.weight", width), self.take(f"{prefix}.bias", width))

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
"""From q, k and v, ``[length, 3, num_heads, head_dim]``, to ``[length, width]``."""


def _attend_plainly(qkv: Tensor) -> Tensor:
    query, key, value = qkv.permute(1, 2, 0, 3)[:, None]
    out = functional.scaled_dot_product_attention(query, key, value)
    return out[0].transpose(0, 1).flatten(1)


class _Paged:
    """Attention inside a sequence by the backend of the KV cache, the sequence one page of it.

    On CPUs with bfloat16 products it is twice as fast as torch's.
    """

    def __init__(self, length: int, num_heads: int, head_dim: int) -> None:
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
        self._lens = np.array([length], np.int32)
        self._indptr = np.array([0, length], np.int32)
        self._table = np.zeros((1, 1), np.int32)

    def __call__(self, qkv: Tensor) -> Tensor:
        query, key, value = (part.contiguous() for part in qkv.unbind(1))
        plan = KVPlan(
            layout=self._layout,
            keys=[key[None]],
            values=[value[None]],
            qo_lens=self._lens,
            qo_indptr=self._indptr,
            kv_lens=self._lens,
            page_table=self._table,
            slots=torch.empty(0, dtype=torch.int64),
        )
        return self._backend.plan(plan, (False,)).run(0, query).flatten(1)


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

    def _conv(self, weights: WhisperWeights, prefix: str, num_in: int) -> Linear:
        """Return a convolution as a projection of three frames laid side by side."""
        width = self._config.width
        kernel = weights.take(f"{prefix}.weight", width, num_in, _TAPS)
        bias = weights.take(f"{prefix}.bias", width)
        return Linear(kernel.transpose(1, 2).reshape(width, _TAPS * num_in).contiguous(), bias)

    def encode(self, features: Tensor) -> Tensor:
        """Return ``[max_positions, width]``.

        Args:
            features: ``[num_mel_bins, num_frames]``, a whole window.
        """
        expected = (self._config.num_mel_bins, self._config.num_frames)
        assert features.shape == expected, (tuple(features.shape), expected)
        frames = features.T.to(self._positions.device, self._positions.dtype)
        x = functional.gelu(self._conv1(_neighbours(frames, 1)))
        x = functional.gelu(self._conv2(_neighbours(x, FRAMES_PER_SLOT)))
        x += self._positions
        shape = (len(x), 3, self._config.encoder.num_heads, self._head_dim)
        for layer in self._layers:
            qkv = layer.qkv(layer.attention_norm(x)).view(shape)
            x += layer.output(self._attend(qkv))
            x += layer.down(functional.gelu(layer.up(layer.mlp_norm(x))))
        return self._norm(x)

    def keys_values(self, encoded: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return what a decoder layer attends to, ``[max_positions, num_heads, head_dim]`` each."""
        heads = self._config.decoder.num_heads
        merged = self._keys_values[layer](encoded)
        keys, values = merged.view(len(encoded), 2, heads, -1).unbind(1)
        return keys, values


def _neighbours(x: Tensor, stride: int) -> Tensor:
    """Return every ``stride``-th row beside the one before and the one behind, zeros at the edges.

    Args:
        x: ``[num_rows, width]``.
        stride: Step from one row to the next.

    Returns:
        ``[num_rows // stride, 3 * width]``.
    """
    num_rows, width = x.shape
    padded = functional.pad(x, (0, 0, 1, 1))
    size, step = (num_rows // stride, _TAPS * width), (stride * width, 1)
    return padded.as_strided(size, step).contiguous()


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
        self, x: Tensor, kv: KVPlan, attention: AttentionPlan, cross: CrossAttentionPlan
    ) -> Tensor:
        """Write the KV of all tokens and return the last layer's output, ``[num_tokens, width]``.

        Args:
            x: ``[num_tokens, width]``, embedded; is written to.
            kv: Where the tokens are written.
            attention: What they attend to among themselves.
            cross: What they attend to of the encoder.
        """
        num_heads = self._config.decoder.num_heads
        own, other = (len(x), 3, num_heads, -1), (len(x), num_heads, -1)
        for index, (layer, beside) in enumerate(self._layers):
            query, key, value = layer.qkv(layer.attention_norm(x)).view(own).unbind(1)
            kv.write(index, key, value)
            x += layer.output(attention.run(index, query).flatten(1))
            query = beside.query(beside.norm(x)).view(other)
            x += beside.output(cross.run(index, query).flatten(1))
            x += layer.down(functional.gelu(layer.up(layer.mlp_norm(x))))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[num_rows, vocab_size]`` for ``[num_rows, width]``."""
        return self._head(self._norm(hidden))
