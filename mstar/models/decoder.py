"""Decoder-only transformers: Llama, Mistral, Qwen and Gemma 3 (text), and what is akin to them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from mstar.engine.batch import Batch, NodeOutput
from mstar.engine.capture import SelectingNode
from mstar.engine.overlap import Pending
from mstar.engine.resources.attention.base import AttentionPlan
from mstar.engine.resources.attention.config import (
    AttentionConfig,
    AttentionSpec,
    AttentionStep,
    LayerAttention,
)
from mstar.engine.resources.kv.config import KVConfig, KVSpec, KVStep
from mstar.engine.resources.kv.layout import KVPlan
from mstar.engine.resources.mirror import send
from mstar.engine.resources.position.config import PositionConfig, PositionSpec, PositionStep
from mstar.engine.resources.position.manager import PositionPlan
from mstar.engine.resources.sampler.config import SamplerConfig, SamplerSpec, SampleStep
from mstar.engine.resources.sampler.manager import Sampled, SamplerPlan, Sampling
from mstar.engine.resources.step import NodeStep
from mstar.models.base import Description, TextModel, text_graph
from mstar.models.checkpoint import Checkpoint
from mstar.models.decoder_config import DecoderConfig, Read, decoder_config
from mstar.models.fused import RMSNorm, gated, rotate_and_store
from mstar.models.linear import ADDED_FROM, Linear, choose_kernels
from mstar.models.parallel.shard import WHOLE, JoinedLinear, Shard, SummedLinear, SummingNorm
from mstar.models.weight_taking import Weights

Progress = Callable[[int, int], None]
"""Called with layers loaded and layers in all."""

_NODE = "decoder"
# Buffers that old checkpoints carry along; the frequencies follow from the config.
_IGNORED = r".*rotary_emb\.inv_freq"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer's weights; norms that a family lacks are ``None``."""

    input_norm: RMSNorm
    qkv: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: Linear
    attention_out_norm: RMSNorm | None
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear
    mlp_out_norm: RMSNorm | None


class Rows(NamedTuple):
    """Tokens of a step whose output is wanted, each the last of its segment."""

    tensor: Tensor
    """int64 ``[num_rows]``, on the device: their numbers among all tokens."""
    array: npt.NDArray[np.int64]
    """The same on the CPU; a recording, of which they are no part, has none."""

    @classmethod
    def of(cls, array: npt.NDArray[np.int64], device: torch.device) -> Self:
        """Return rows by their numbers."""
        return cls(send(array, device), array)


def _output(sampled: Sampled) -> NodeOutput:
    return NodeOutput(
        token_ids=sampled.token_ids.tolist(),
        logprobs=sampled.logprobs,
        failures=sampled.failed,
    )


class _PendingTokens(Pending):
    """Tokens that are being sampled."""

    def __init__(self, sampling: Sampling) -> None:
        self.tokens = sampling.tokens
        self._sampling = sampling

    def fetch(self) -> NodeOutput:
        return _output(self._sampling.fetch())


def _added(total: Tensor, linear: Linear, x: Tensor, norm: RMSNorm | None) -> Tensor | None:
    """Return what a projection gives that is still to be added to ``total``, if anything is."""
    return linear.add_to(total, x) if norm is None else norm(linear(x))


class DecoderNode(SelectingNode):
    """Embedding, layers and output head of a decoder-only transformer."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: list[_Layer],
        embedding: Tensor,
        norm: RMSNorm,
        head: Linear,
    ) -> None:
        self._config = config
        self._layers = layers
        self._embedding = embedding
        self._embedding_scale: Tensor | None = None
        if config.embedding_scale != 1.0:
            # Rounded to the model's dtype, as the family's reference does it.
            self._embedding_scale = torch.tensor(
                config.embedding_scale, dtype=embedding.dtype, device=embedding.device
            )
        self._norm = norm
        self._head = head

    def prepare(self, sizes: Sequence[int], num_tokens: int) -> None:
        """Choose the kernels of products."""
        read = [own for layer in self._layers for own in (layer.qkv, layer.gate_up)]
        choose_kernels(read, sizes, num_tokens)
        written = [own for layer in self._layers for own in (layer.output, layer.down)]
        # Of more rows they are added at once, but where something comes in between.
        are_added = written[0].is_whole and not self._config.has_sandwich_norms
        choose_kernels(written, sizes, min(num_tokens, ADDED_FROM) if are_added else num_tokens)
        choose_kernels([self._head], sizes)

    def declare(self, batch: Batch) -> NodeStep:
        """Ask for causal attention over the whole stream and a token where one is due."""
        sampled = (
            batch.segments
            if len(batch.yielding) == len(batch.segments)
            else tuple(batch.segments[i] for i in batch.yielding)
        )
        return NodeStep(
            batch.segments,
            {
                "kv": KVStep(),
                "position": PositionStep(),
                "attention": AttentionStep(),
                "sampler": SampleStep(sampled),
            },
        )

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        """Compute the step and sample."""
        kv: KVPlan = plans["kv"]
        ids = send(batch.token_ids(), self._embedding.device)
        rows = None
        if len(batch.yielding) != len(ids):
            rows = Rows.of(batch.last_rows(), ids.device)
        x = self.embed(ids, batch, plans)
        hidden = self.hidden(x, kv, plans["position"], plans["attention"], rows)
        if not batch.yielding:
            return NodeOutput(token_ids=())
        sampler: SamplerPlan = plans["sampler"]
        return _output(sampler.sample(self.logits(hidden)))

    def compute(self, ids: Tensor, plans: Mapping[str, Any]) -> Tensor:
        """Return the logits behind every token."""
        x = self.embed_ids(ids)
        return self.logits(self.hidden(x, plans["kv"], plans["position"], plans["attention"]))

    def compute_rows(self, ids: Tensor, plans: Mapping[str, Any], rows: Tensor) -> Tensor:
        """Return the logits behind some tokens."""
        x = self.embed_ids(ids)
        wanted = Rows(rows, np.empty(0, np.int64))
        kv, position, attention = (plans[key] for key in ("kv", "position", "attention"))
        return self.logits(self.hidden(x, kv, position, attention, wanted))

    def embed_ids(self, ids: Tensor) -> Tensor:
        """Return ``[num_tokens, hidden_size]``: the rows of ids, scaled as the family has it."""
        x = functional.embedding(ids, self._embedding)
        return x if self._embedding_scale is None else x * self._embedding_scale

    def embed(self, ids: Tensor, batch: Batch, plans: Mapping[str, Any]) -> Tensor:
        """Return what the first layer is given for a batch, ``[num_tokens, hidden_size]``."""
        return self.embed_ids(ids)

    def launch(
        self, batch: Batch, rows: Tensor, plans: Mapping[str, Any], before: Tensor | None = None
    ) -> Pending:
        """Sample from logits."""
        sampler: SamplerPlan = plans["sampler"]
        return _PendingTokens(sampler.launch(rows, before))

    def hidden(
        self,
        x: Tensor,
        kv: KVPlan,
        position: PositionPlan,
        attention: AttentionPlan,
        rows: Rows | None = None,
    ) -> Tensor:
        """Write the KV of all tokens and return the last layer's output.

        Args:
            x: ``[num_tokens, hidden_size]``, embedded.
            kv: Where the tokens are written.
            position: Their positions.
            attention: What they attend to.
            rows: The tokens whose output is wanted; ``None``: all. The rest need no more of the
                last layer than their KV.

        Returns:
            ``[num_rows, hidden_size]``.
        """
        num_heads = self._config.num_heads
        num_rotated = num_heads + self._config.num_kv_heads
        shape = (len(x), num_rotated + self._config.num_kv_heads, self._config.head_dim)
        activation = self._config.activation
        out: Tensor | None = None
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.input_norm.add(x, out)).view(shape)
            if layer.q_norm is not None and layer.k_norm is not None:
                qkv[:, :num_heads] = layer.q_norm(qkv[:, :num_heads].contiguous())
                qkv[:, num_heads:num_rotated] = layer.k_norm(
                    qkv[:, num_heads:num_rotated].contiguous()
                )
            query = rotate_and_store(qkv, num_heads, position, kv, index)
            if rows is not None and layer is self._layers[-1]:
                x, query = x[rows.tensor], query[rows.tensor]
                if not len(x):
                    return x
                attention = attention.of_last(rows.array)
            attended = attention.run(index, query).flatten(1)
            out = _added(x, layer.output, attended, layer.attention_out_norm)
            inner = gated(layer.gate_up(layer.mlp_norm.add(x, out)), activation)
            out = _added(x, layer.down, inner, layer.mlp_out_norm)
        return x if out is None else x + out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[num_rows, vocab_size]`` for ``[num_rows, hidden_size]``."""
        logits = self._head(self._norm(hidden))
        cap = self._config.logit_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class DecoderModel(TextModel):
    """A loaded decoder-only model.

    Args:
        name: What it is called.
        config: Its shape.
        node: Its one node.
        stop_token_ids: Ids that end a request.
        rope_interleaved: Rotated pairs are neighbours instead of halves.
        weights_key: Content name of the weights; ``None``: unknown, and so never reused.
    """

    def __init__(
        self,
        name: str,
        config: DecoderConfig,
        node: DecoderNode,
        *,
        stop_token_ids: frozenset[int],
        rope_interleaved: bool,
        weights_key: bytes | None,
    ) -> None:
        described = _describe(config, stop_token_ids, rope_interleaved, weights_key)
        self.name = name
        self.config = config
        self.graph = described.graph
        self.nodes = {_NODE: node}
        self.vocab_size = described.vocab_size
        self.max_model_len = described.max_model_len
        self.stop_token_ids = stop_token_ids
        self.root_constants = described.root_constants
        self.specs = described.specs


def describe(checkpoint: Checkpoint, *, read: Read | None = None) -> Description:
    """Return what the model of a checkpoint says of itself; reads no weights but to name them.

    Args:
        checkpoint: The model's.
        read: What a family has of its own that ``decoder_config`` does not know by itself.
        shard: The rank.

    Raises:
        ConfigError: If heads cannot be dealt out evenly over the ranks.
        WeightsError: If the config misses a field.
        UnsupportedError: If the config asks for something that is not built.
    """
    return _describe(
        _config_of(checkpoint, read),
        frozenset(checkpoint.eos_token_ids),
        checkpoint.rope_interleaved,
        checkpoint.fingerprint(),
    )


def _describe(
    config: DecoderConfig,
    stop_token_ids: frozenset[int],
    rope_interleaved: bool,
    weights_key: bytes | None,
) -> Description:
    constants = None
    if weights_key is not None:
        constants = {"weights": weights_key.hex(), "model": repr(config), "code": "decoder-v1"}
    return Description(
        root_constants=constants,
        graph=text_graph(_NODE),
        specs=_specs(config, stop_token_ids, rope_interleaved),
        vocab_size=config.vocab_size,
        max_model_len=config.max_position,
    )


def _config_of(checkpoint: Checkpoint, read: Read | None) -> DecoderConfig:
    config = decoder_config(checkpoint.config, checkpoint.architecture, read)
    if checkpoint.freq_factors is not None:
        factors = tuple(checkpoint.freq_factors.tolist())
        rope = tuple(own and replace(own, freq_factors=factors) for own in config.rope)
        config = replace(config, rope=rope)
    return config


def _specs(
    config: DecoderConfig, stop_token_ids: frozenset[int], rope_interleaved: bool
) -> tuple[KVSpec, PositionSpec, AttentionSpec, SamplerSpec]:
    nodes = {_NODE}
    return (
        KVSpec(
            "kv",
            nodes,
            KVConfig(
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
            ),
        ),
        PositionSpec(
            "position",
            nodes,
            PositionConfig(
                kv_cache="kv",
                interleave=rope_interleaved,
                head_dim=config.head_dim,
                layer_rope=config.rope,
            ),
        ),
        AttentionSpec(
            "attention",
            nodes,
            AttentionConfig(
                kv_cache="kv",
                num_qo_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.attention_scale,
                layers=tuple(LayerAttention(window=window) for window in config.windows),
            ),
        ),
        SamplerSpec(
            "sampler",
            nodes,
            SamplerConfig(
                vocab_size=config.vocab_size, stop_token_ids=tuple(sorted(stop_token_ids))
            ),
        ),
    )


def load(  # noqa: PLR0913 - all that a model is made of, each by its name
    checkpoint: Checkpoint,
    *,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    node_class: type[DecoderNode] = DecoderNode,
    read: Read | None = None,
    shard: Shard = WHOLE,
) -> DecoderModel:
    """Return the model of a checkpoint, its weights on ``device`` in ``dtype``.

    Of several ranks each has a part of the heads, of the MLP and of the output head.

    Args:
        checkpoint: The model's.
        name: What it is called.
        dtype: Of the weights.
        device: Where they are to lie.
        progress: Told of every layer.
        node_class: What computes.
        read: What a family has of its own that ``decoder_config`` does not know by itself.
        shard: The rank.

    Raises:
        ConfigError: If heads cannot be dealt out evenly over the ranks.
        WeightsError: If a tensor is missing, of a wrong shape, or one that nothing uses.
        UnsupportedError: If the config asks for something that is not built.
    """
    config = _config_of(checkpoint, read)
    own = _dealt(config, shard)
    weights = _Weights(checkpoint, config, dtype, device, shard)
    embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = []
    for index in range(config.num_layers):
        layers.append(weights.layer(index))
        if progress is not None:
            progress(index + 1, config.num_layers)
    norm = weights.norm("model.norm.weight", config.hidden_size)
    # A head that is stored counts even where the config ties it: the reference does it so too.
    if config.is_tied and "lm_head.weight" not in checkpoint:
        head_weight = embedding
    else:
        head_weight = weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
    head = Linear(head_weight) if shard is WHOLE else JoinedLinear(head_weight, shard)
    weights.finish(_IGNORED, config.architecture)
    return DecoderModel(
        name,
        own,
        node_class(own, layers, embedding, norm, head),
        stop_token_ids=frozenset(checkpoint.eos_token_ids),
        rope_interleaved=checkpoint.rope_interleaved,
        weights_key=checkpoint.fingerprint(),
    )


def deal(checkpoint: Checkpoint, shard: Shard, read: Read | None = None) -> DecoderConfig:
    """Return the shape of a rank's part of a model.

    Args:
        checkpoint: The model's.
        shard: The rank.
        read: As for ``load``.

    Raises:
        ConfigError: If heads cannot be dealt out evenly over the ranks.
    """
    return _dealt(_config_of(checkpoint, read), shard)


def _dealt(config: DecoderConfig, shard: Shard) -> DecoderConfig:
    # What key heads are dealt out by fits the query heads, too.
    num_kv_heads = shard.part_of(config.num_kv_heads, "key heads")
    num_heads = shard.part_of(config.num_heads, "query heads")
    return replace(config, num_heads=num_heads, num_kv_heads=num_kv_heads)


class _Weights(Weights):
    """Takes the tensors of a decoder, or a rank's share of them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
    ) -> None:
        super().__init__(checkpoint, dtype, device)
        self._config = config
        self._shard = shard

    def norm(self, name: str, width: int) -> RMSNorm:
        return RMSNorm(
            self.take(name, width), self._config.norm_eps, is_offset=self._config.has_norm_offset
        )

    def residual_norm(self, name: str) -> RMSNorm:
        """Return a norm that adds a block's output first, which may be a share of a sum."""
        config = self._config
        if self._shard is WHOLE or config.has_sandwich_norms:
            return self.norm(name, config.hidden_size)
        weight = self.take(name, config.hidden_size)
        return SummingNorm(weight, config.norm_eps, self._shard, is_offset=config.has_norm_offset)

    def merged(self, prefix: str, parts: Mapping[str, int], width: int, has_bias: bool) -> Linear:
        """Return the rank's rows of several projections that read the same input, as one."""
        take = self._shard.part
        weight = torch.cat(
            [take(self.take(f"{prefix}{p}.weight", n, width), 0) for p, n in parts.items()]
        )
        bias = None
        if has_bias:
            bias = torch.cat([take(self.take(f"{prefix}{p}.bias", n), 0) for p, n in parts.items()])
        return Linear(weight, bias)

    def summed(self, name: str, inner: int, has_bias: bool, *, is_left: bool) -> Linear:
        """Return a block's last projection, whose input the ranks have a part of each.

        Args:
            name: Of its tensors.
            inner: Width of its whole input.
            has_bias: Whether it has one.
            is_left: The sum over the ranks is left to the norm behind it, where that can be.
        """
        width = self._config.hidden_size
        weight = self._shard.part(self.take(f"{name}.weight", width, inner), 1)
        bias = self.take(f"{name}.bias", width) if has_bias else None
        if self._shard is WHOLE:
            return Linear(weight, bias)
        is_left = is_left and not self._config.has_sandwich_norms
        return SummedLinear(weight, bias, self._shard, is_left=is_left)

    def layer(self, index: int) -> _Layer:
        config = self._config
        prefix = f"model.layers.{index}."
        width = config.hidden_size
        inner, kv_inner = (
            heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads)
        )
        is_sandwich = config.has_sandwich_norms
        return _Layer(
            input_norm=self.residual_norm(prefix + "input_layernorm.weight"),
            qkv=self.merged(
                prefix + "self_attn.",
                {"q_proj": inner, "k_proj": kv_inner, "v_proj": kv_inner},
                width,
                config.has_qkv_bias,
            ),
            q_norm=self._head_norm(prefix + "self_attn.q_norm.weight"),
            k_norm=self._head_norm(prefix + "self_attn.k_norm.weight"),
            output=self.summed(
                prefix + "self_attn.o_proj", inner, config.has_output_bias, is_left=True
            ),
            attention_out_norm=(
                self.norm(prefix + "post_attention_layernorm.weight", width)
                if is_sandwich
                else None
            ),
            mlp_norm=self.residual_norm(
                prefix
                + ("pre_feedforward" if is_sandwich else "post_attention")
                + "_layernorm.weight"
            ),
            gate_up=self.merged(
                prefix + "mlp.",
                {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
                width,
                config.has_mlp_bias,
            ),
            down=self.summed(
                prefix + "mlp.down_proj",
                config.intermediate_size,
                config.has_mlp_bias,
                is_left=index + 1 < config.num_layers,
            ),
            mlp_out_norm=(
                self.norm(prefix + "post_feedforward_layernorm.weight", width)
                if is_sandwich
                else None
            ),
        )

    def _head_norm(self, name: str) -> RMSNorm | None:
        return self.norm(name, self._config.head_dim) if self._config.has_qk_norm else None
