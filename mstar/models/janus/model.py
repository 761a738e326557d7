"""Janus: looks at images and writes, and reads a prompt and paints.

One language model does both. Text comes from its own head. An image comes code by code from
another head, each code embedded by a table of its own; two streams of the request, one with the
prompt and one without, are computed in one forward, and the codes follow what the prompt changes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from mstar.engine.array import from_numpy
from mstar.engine.batch import Batch, Node, NodeKind, NodeOutput
from mstar.engine.capture import RecordableNode
from mstar.engine.graph import Cursor, Edge, Graph, Loop, Run
from mstar.engine.output import Emitted
from mstar.engine.overlap import Pending
from mstar.engine.request import Component, PreparedRequest, Request
from mstar.engine.resources.attention.config import AttentionSpec, AttentionStep
from mstar.engine.resources.encoder.config import EncoderConfig, EncoderSpec, EncoderStep
from mstar.engine.resources.encoder.manager import EncoderPlan
from mstar.engine.resources.kv.config import KVSpec, KVStep
from mstar.engine.resources.mirror import send
from mstar.engine.resources.position.config import PositionSpec, PositionStep
from mstar.engine.resources.sampler.config import (
    SamplerConfig,
    SamplerSpec,
    SampleStep,
    SamplingParams,
)
from mstar.engine.resources.sampler.manager import SamplerPlan, Sampling
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import NodeStep, Segment
from mstar.errors import RequestError
from mstar.models import decoder
from mstar.models.base import Description, TextModel
from mstar.models.checkpoint import Checkpoint
from mstar.models.decoder import DecoderModel, Progress, Rows
from mstar.models.fused import LayerNorm
from mstar.models.items import ItemDecoderNode, item_of, tensor_of
from mstar.models.janus.config import (
    GUIDANCE,
    IMAGE,
    KIND,
    OUTPUT,
    PIXELS,
    UNGUIDED,
    ImageSettings,
    JanusConfig,
    VisionConfig,
    check_guidance,
    image_settings,
    janus_config,
)
from mstar.models.janus.vq import Take, VQDecoder, to_levels
from mstar.models.linear import Linear
from mstar.models.parts import ENCODER, PartCheckpoint, check_parts
from mstar.models.weight_taking import Weights

_PAINTER, _PIXELS = "painter", "pixels"
_SAMPLER = "image_sampler"
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}
# The way from pixels to codes, which nothing here goes.
_UNUSED = r"vqmodel\.(encoder|quant_conv)\..*"
_TEXT = {"model.language_model.": "model.", "lm_head.": "lm_head."}
_PICTURES = {"model.": "", "model.language_model.": None}


class _Projection:
    """Linear layers with an activation between them.

    Args:
        take: Gives the tensors.
        prefix: Of their names.
        widths: Of the input and of every layer's output.
        activation: A name in ``_ACTIVATIONS``.
    """

    def __init__(self, take: Take, prefix: str, widths: Sequence[int], activation: str) -> None:
        names = ["fc1", *(f"hidden_layers.{i}" for i in range(len(widths) - 2))]
        self._layers = [
            _linear(take, f"{prefix}.{name}", inner, outer)
            for name, inner, outer in zip(names, widths[:-1], widths[1:], strict=True)
        ]
        self._activation = _ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[num_rows, widths[-1]]`` for ``[num_rows, widths[0]]``."""
        first, *others = self._layers
        x = first(x)
        for layer in others:
            x = layer(self._activation(x))
        return x


def _linear(take: Take, name: str, inner: int, outer: int) -> Linear:
    return Linear(take(f"{name}.weight", outer, inner), take(f"{name}.bias", outer))


class _VisionLayer:
    """One layer of the vision model."""

    def __init__(self, take: Take, prefix: str, config: VisionConfig) -> None:
        width = config.hidden_size
        self._num_heads = config.num_heads
        self._norm1 = _norm(take, f"{prefix}.layer_norm1", config)
        names = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        bias = None
        if config.has_qkv_bias:
            bias = torch.cat([take(f"{name}.bias", width) for name in names])
        weight = torch.cat([take(f"{name}.weight", width, width) for name in names])
        self._qkv = Linear(weight, bias)
        self._output = _linear(take, f"{prefix}.self_attn.projection_layer", width, width)
        self._norm2 = _norm(take, f"{prefix}.layer_norm2", config)
        self._fc1 = _linear(take, f"{prefix}.mlp.fc1", width, config.intermediate_size)
        self._fc2 = _linear(take, f"{prefix}.mlp.fc2", config.intermediate_size, width)
        self._activation = _ACTIVATIONS[config.activation]

    def __call__(self, x: Tensor, num_images: int) -> Tensor:
        """Return ``[num_images * num_patches, hidden_size]`` for the same."""
        # By part, image, head, patch and element of the head.
        shape = (num_images, -1, 3, self._num_heads, x.shape[1] // self._num_heads)
        query, key, value = self._qkv(self._norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self._output(attended.transpose(1, 2).reshape(x.shape))
        return x + self._fc2(self._activation(self._fc1(self._norm2(x))))


def _norm(take: Take, name: str, config: VisionConfig) -> LayerNorm:
    weight = take(f"{name}.weight", config.hidden_size)
    return LayerNorm(weight, take(f"{name}.bias", config.hidden_size), config.norm_eps)


class JanusEncoder(Node):
    """From the pixels of an image to what stands in its slots.

    Args:
        config: Shape of the vision model.
        hidden_size: Of the language model.
        take: Gives the tensors.
    """

    kind = NodeKind.ITEMS

    def __init__(self, config: VisionConfig, hidden_size: int, take: Take) -> None:
        self._config = config
        width, patch = config.hidden_size, config.patch_size
        prefix = "vision_model.embeddings"
        shape = (width, config.num_channels, patch, patch)
        self._patches = (
            take(f"{prefix}.patch_embedding.weight", *shape),
            take(f"{prefix}.patch_embedding.bias", width),
        )
        self._positions = take(f"{prefix}.position_embedding.weight", config.num_patches, width)
        self._layers = [
            _VisionLayer(take, f"vision_model.encoder.layers.{index}", config)
            for index in range(config.num_layers)
        ]
        self._norm = _norm(take, "vision_model.post_layernorm", config)
        widths = (width, *(hidden_size,) * config.depth)
        self._aligner = _Projection(take, "aligner", widths, config.activation)

    def declare(self, batch: Batch) -> NodeStep:
        """Ask for room for the outputs."""
        made = tuple(map(item_of, batch.requests, batch.items))
        return NodeStep(batch.segments, {ENCODER: EncoderStep(made=made)})

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        """Encode the batch's images."""
        plan: EncoderPlan = plans[ENCODER]
        weight = self._positions
        pixels = torch.stack(
            [tensor_of(item.inputs[PIXELS], weight.device) for item in batch.items]
        )
        outputs = self.encode(pixels.to(weight.dtype))
        for request, item, output in zip(batch.requests, batch.items, outputs, strict=True):
            # Copied, so that no output keeps those of its neighbours.
            plan.store(item_of(request, item), output.clone())
        return NodeOutput(token_ids=())

    def encode(self, pixels: Tensor) -> Tensor:
        """Return ``[B, num_patches, hidden_size of the language model]``.

        Args:
            pixels: ``[B, 3, image_size, image_size]``, normalised, in the model's dtype.
        """
        patches = functional.conv2d(pixels, *self._patches, stride=self._config.patch_size)
        x = (patches.flatten(2).transpose(1, 2) + self._positions).flatten(0, 1)
        for layer in self._layers:
            x = layer(x, len(pixels))
        return self._aligner(self._norm(x)).view(len(pixels), self._config.num_patches, -1)


class JanusDecoder(ItemDecoderNode):
    """The language model with its own head."""

    def normed(self, hidden: Tensor) -> Tensor:
        """Return what a head is given for the last layer's output."""
        return self._norm(hidden)


class _PendingCodes(Pending):
    """Codes that are being sampled.

    Args:
        sampling: Of them, counted from the first.
        first_code: The id of that.
    """

    def __init__(self, sampling: Sampling, first_code: int) -> None:
        codes = sampling.tokens
        self.tokens = torch.where(codes < 0, codes, codes + first_code)
        self._sampling = sampling
        self._first_code = first_code

    def fetch(self) -> NodeOutput:
        sampled = self._sampling.fetch()
        tokens = [self._first_code + code for code in sampled.token_ids.tolist()]
        return NodeOutput(token_ids=tokens, failures=sampled.failed)


class JanusPainter(RecordableNode):
    """The language model with the head and the embedding of codes.

    Ids from ``first_code`` on are codes, so that no page of codes has the key of one of text.

    Args:
        backbone: The language model.
        config: Shape of the checkpoint.
        first_code: Ids of text.
        hidden_size: Of the language model.
        take: Gives the tensors.
    """

    num_streams = 2

    def __init__(
        self,
        backbone: JanusDecoder,
        config: JanusConfig,
        *,
        first_code: int,
        hidden_size: int,
        take: Take,
    ) -> None:
        vq = config.vq
        self._backbone = backbone
        self._first_code = first_code
        self._codes = take("generation_embeddings.weight", vq.num_codes, vq.code_size)
        widths = (vq.code_size, *(hidden_size,) * vq.depth)
        self._aligner = _Projection(take, "generation_aligner", widths, vq.activation)
        self._inner = _linear(take, "generation_head.proj_out", hidden_size, vq.head_size)
        self._head = _linear(take, "generation_head.vision_head", vq.head_size, vq.num_codes)
        self._activation = _ACTIVATIONS[vq.activation]

    def declare(self, batch: Batch) -> NodeStep:
        """Ask for both streams of every request, the main ones first, and codes where due."""
        free = tuple(Segment(rid, UNGUIDED, span) for rid, _, span in batch.segments)
        sampled = tuple(batch.segments[index] for index in batch.yielding)
        return NodeStep(
            (*batch.segments, *free),
            {
                "kv": KVStep(),
                "position": PositionStep(),
                "attention": AttentionStep(),
                _SAMPLER: SampleStep(sampled),
            },
        )

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        """Compute both streams and sample."""
        ids, last = self.ids(batch), batch.last_rows()
        device = self._codes.device
        rows = Rows.of(np.concatenate((last, last + len(ids) // self.num_streams)), device)
        hidden = self._hidden(send(ids, device), plans, rows)
        if not batch.yielding:
            return NodeOutput(token_ids=())
        return self.launch(batch, self.code_logits(hidden), plans).fetch()

    def ids(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Return the ids of both streams, the main ones first."""
        return np.concatenate((batch.token_ids(), batch.token_ids(UNGUIDED)))

    def compute(self, ids: Tensor, plans: Mapping[str, Any]) -> Tensor:
        """Return the logits of codes behind every token."""
        return self.code_logits(self._hidden(ids, plans))

    def _hidden(self, ids: Tensor, plans: Mapping[str, Any], rows: Rows | None = None) -> Tensor:
        kv, position, attention = (plans[key] for key in ("kv", "position", "attention"))
        return self._backbone.hidden(self.embed(ids), kv, position, attention, rows)

    def launch(
        self, batch: Batch, rows: Tensor, plans: Mapping[str, Any], before: Tensor | None = None
    ) -> Pending:
        """Lead the logits away from the stream without a prompt, and sample."""
        guided, unguided = rows.float().chunk(self.num_streams)
        scales = [float(batch.requests[i].prepared.options[GUIDANCE]) for i in batch.yielding]
        scale = send(np.array(scales, np.float32)[:, None], rows.device)
        sampler: SamplerPlan = plans[_SAMPLER]
        sampling = sampler.launch(unguided + (guided - unguided) * scale, before)
        return _PendingCodes(sampling, self._first_code)

    def embed(self, ids: Tensor) -> Tensor:
        """Return ``[num_tokens, hidden_size]`` for ids of text and of codes."""
        codes = functional.embedding((ids - self._first_code).clamp(min=0), self._codes)
        is_code = ids >= self._first_code
        text = self._backbone.embed_ids(ids.masked_fill(is_code, 0))
        return torch.where(is_code[:, None], self._aligner(codes), text)

    def code_logits(self, hidden: Tensor) -> Tensor:
        """Return ``[num_rows, num_codes]`` for the last layer's output."""
        return self._head(self._activation(self._inner(self._backbone.normed(hidden))))


class JanusPixels(Node):
    """From the codes of a whole image to its pixels.

    Args:
        decoder: Does it.
        settings: What normalised the pixels that it learned from.
        first_code: Id of the first code.
        device: Where the decoder is.
    """

    kind = NodeKind.VISIT

    def __init__(
        self, decoder: VQDecoder, settings: ImageSettings, first_code: int, device: torch.device
    ) -> None:
        self.decoder = decoder
        self._settings = settings
        self._first_code = first_code
        self._device = device
        # A CPU gains nothing by several at once, and all other nodes wait meanwhile.
        self.max_batch = 1 if device.type == "cpu" else 4

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        """Emit an image of each request."""
        ids = [list(request.generated()) for request in batch.requests]
        codes = torch.tensor(ids, device=self._device) - self._first_code
        pixels = self.decoder.decode(codes)
        levels = to_levels(pixels, self._settings).cpu().numpy()
        emitted = {
            place: [Emitted(name=IMAGE, array=from_numpy(image), info={"num_tokens": len(own)})]
            for place, (image, own) in enumerate(zip(levels, ids, strict=True))
        }
        return NodeOutput(token_ids=(), emitted=emitted)


class JanusModel(TextModel):
    """A loaded Janus.

    Args:
        text: The language model.
        config: Shape of the checkpoint.
        encoder: Node that encodes images.
        painter: Node that chooses codes.
        pixels: Node that decodes them.
    """

    def __init__(
        self,
        text: DecoderModel,
        config: JanusConfig,
        *,
        encoder: JanusEncoder,
        painter: JanusPainter,
        pixels: JanusPixels,
    ) -> None:
        ((writer, node),) = text.nodes.items()
        described = _described(text, config, text.config.hidden_size)
        self.name = text.name
        self.config = config
        self.nodes = {writer: node, ENCODER: encoder, _PAINTER: painter, _PIXELS: pixels}
        self.encoders = {KIND: ENCODER}
        self.graph = described.graph
        self.specs = described.specs
        self.vocab_size = described.vocab_size
        self.max_model_len = described.max_model_len
        self.stop_token_ids = text.stop_token_ids
        self.root_constants = described.root_constants
        own = {spec.resource_key for spec in self.specs}
        self._writing = Component(
            vocab_size=text.vocab_size,
            max_model_len=self.max_model_len,
            stop_token_ids=self.stop_token_ids,
            sampler_key=self.sampler_key,
            resources=frozenset(own - {_SAMPLER}),
        )
        self._painting = replace(
            self._writing,
            stop_token_ids=frozenset(),
            sampler_key=_SAMPLER,
            resources=frozenset(own - {self.sampler_key, ENCODER}),
            is_silent=True,
        )

    def first_walk(self, prepared: PreparedRequest) -> Cursor:
        """Return the walk over the prompt, for text or for an image.

        Raises:
            RequestError: If an image is asked for in a way that the model has not.
        """
        if prepared.options.get(OUTPUT) != IMAGE:
            return super().first_walk(prepared)
        _check_image_request(prepared, self.config.vq.num_tokens)
        return self.graph.cursor("image_prefill")

    def next_walk(self, request: Request) -> Cursor | None:
        """Return the walk that goes on with a text or an image."""
        follower = {"image_prefill": "image_decode", "image_decode": "image"}
        name = request.cursor.name
        return self.graph.cursor(follower[name]) if name in follower else super().next_walk(request)

    def component_of(self, walk: str) -> Component:
        """Return the vocabulary and the sampler that a walk's tokens are for."""
        return self._painting if walk == "image_prefill" else self._writing


def _check_image_request(prepared: PreparedRequest, num_tokens: int) -> None:
    params, plain = prepared.params, SamplingParams()
    check_guidance(prepared.options.get(GUIDANCE))
    if [companion.label for companion in prepared.companions] != [UNGUIDED]:
        raise RequestError(f"an image needs one stream {UNGUIDED!r} beside its prompt")
    if prepared.inputs:
        raise RequestError("an image is made of text only; leave out the images", param="prompt")
    if params.max_tokens != num_tokens:
        raise RequestError(
            f"max_tokens is {params.max_tokens}; an image has {num_tokens}", param="max_tokens"
        )
    # Their ids are those of text, which codes have nothing to do with.
    for name in (
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "stop_token_ids",
    ):
        if getattr(params, name) != getattr(plain, name):
            raise RequestError(f"{name} is for text; an image does not take it", param=name)


def _graph(writer: str, config: JanusConfig) -> Graph:
    return Graph(
        nodes=(writer, ENCODER, _PAINTER, _PIXELS),
        walks=(
            ("prefill", Run(writer)),
            ("decode", Loop(Run(writer), until="finished")),
            ("image_prefill", Run(_PAINTER)),
            # The prompt's last token gave the first code.
            ("image_decode", Loop(Run(_PAINTER), times=config.vq.num_tokens - 1)),
            ("image", Run(_PIXELS)),
        ),
        edges=(Edge(ENCODER, writer, KIND), Edge(_PAINTER, _PIXELS, "codes")),
        predicates=("finished",),
    )


def _described(
    text: Description | DecoderModel, config: JanusConfig, hidden_size: int
) -> Description:
    """Return what the whole says of itself, by what its language model does."""
    (writer,) = text.graph.nodes
    specs: list[NodeResourceSpec] = []
    for spec in text.specs:
        if isinstance(spec, (KVSpec, PositionSpec, AttentionSpec)):
            specs.append(replace(spec, nodes={*spec.nodes, _PAINTER}))
        else:
            specs.append(spec)
    codes = SamplerConfig(vocab_size=config.vq.num_codes)
    specs.append(SamplerSpec(_SAMPLER, {_PAINTER}, codes))
    specs.append(EncoderSpec(ENCODER, {writer, ENCODER}, EncoderConfig(hidden_size=hidden_size)))
    constants = text.root_constants
    if constants is not None:
        constants = {
            **constants,
            "janus": repr((config.vision, config.vq)),
            "janus_code": "janus-v1",
        }
    return Description(
        root_constants=constants,
        graph=_graph(writer, config),
        specs=tuple(specs),
        vocab_size=text.vocab_size + config.vq.num_codes,
        max_model_len=text.max_model_len,
    )


def describe(checkpoint: Checkpoint) -> Description:
    """Return what the model of a checkpoint says of itself; reads no weights but to name them.

    Raises:
        WeightsError: If the config misses a field.
        UnsupportedError: If the config asks for something that is not built.
    """
    config = janus_config(checkpoint.config)
    text = decoder.describe(PartCheckpoint(checkpoint, _TEXT, config.text))
    return _described(text, config, int(config.text["hidden_size"]))


def load(
    checkpoint: Checkpoint,
    *,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> JanusModel:
    """Return the model of a checkpoint, its weights on ``device`` in ``dtype``.

    Raises:
        WeightsError: If a tensor is missing, of a wrong shape, or one that nothing uses.
        UnsupportedError: If the config asks for something that is not built.
    """
    config = janus_config(checkpoint.config)
    own, rest = (
        PartCheckpoint(checkpoint, names, part)
        for names, part in ((_TEXT, config.text), (_PICTURES, {}))
    )
    check_parts(checkpoint, (own, rest))
    text = decoder.load(
        own,
        name=name,
        dtype=dtype,
        device=device,
        progress=progress,
        node_class=JanusDecoder,
    )
    (backbone,) = text.nodes.values()
    assert isinstance(backbone, JanusDecoder), type(backbone).__name__
    weights = Weights(rest, dtype, device)
    hidden_size, first_code = text.config.hidden_size, text.vocab_size
    encoder = JanusEncoder(config.vision, hidden_size, weights.take)
    painter = JanusPainter(
        backbone, config, first_code=first_code, hidden_size=hidden_size, take=weights.take
    )
    vq = VQDecoder(config.vq, lambda key, *shape: weights.take(f"vqmodel.{key}", *shape))
    weights.finish(_UNUSED, "a Janus")
    pixels = JanusPixels(vq, image_settings(checkpoint.path), first_code, device)
    return JanusModel(text, config, encoder=encoder, painter=painter, pixels=pixels)
