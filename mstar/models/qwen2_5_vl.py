"""Qwen2.5-VL: pictures and videos beside text, at positions of time, row and column.

The encoder takes pictures of any size, several at once: their patches stand one behind the other,
ordered so that each attention window is a run of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.resources.encoder.config import EncoderStep
from mstar.engine.resources.encoder.manager import EncoderPlan
from mstar.engine.resources.position.config import PositionSpec, RopeParams
from mstar.engine.resources.position.rope import Rotation, inv_freq
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import NodeStep
from mstar.models import decoder
from mstar.models.base import Description
from mstar.models.checkpoint import Checkpoint
from mstar.models.decoder import DecoderModel, Progress
from mstar.models.fused import RMSNorm, gated
from mstar.models.items import ItemDecoderNode, item_of, tensor_of
from mstar.models.linear import Linear
from mstar.models.parts import (
    ENCODER,
    PartCheckpoint,
    check_parts,
    described_with_encoder,
    with_encoder,
)
from mstar.models.qwen2_5_vl_config import (
    FRAMES,
    KINDS,
    LEVELS,
    NUM_COLOURS,
    QwenConfig,
    VisionConfig,
    qwen_config,
)
from mstar.models.weight_taking import Weights

_NORM_EPS = 1e-6
_POSITIONS_PER_SLOT = 4
"""Positions that there are for each slot of the context: a slow video's run ahead of its slots."""

Ints = npt.NDArray[np.int64]
Runs = list[tuple[int, int]]
"""Sequences that attend inside themselves, one behind the other: a length and how many there are,
over and over; in patches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """How the slots of some films stand while they are encoded."""

    slots: Ints
    """``[num_slots]``: which slot stands at each place."""
    places: Ints
    """``[num_slots, 2]``: row and column of each slot in its frame, in their order."""
    windows: Runs
    frames: Runs


def _order_of(grids: Sequence[tuple[int, int, int]], window: int, unit: int) -> _Order:
    """Return the order in which windows are runs, those of one size side by side in each frame.

    Args:
        grids: Frames, rows and columns of each film, in slots.
        window: Width and height of a window, in slots.
        unit: Patches of a slot.
    """
    columns: list[Ints] = []
    num_frames = 0
    for frames, height, width in grids:
        frame, row, column = np.indices((frames, height, width)).reshape(3, -1)
        top, left = row // window * window, column // window * window
        size = np.minimum(window, height - top) * np.minimum(window, width - left)
        columns.append(np.stack((num_frames + frame, -size, top, left, row, column)))
        num_frames += frames
    keys = np.concatenate(columns, 1)
    slots = np.lexsort(keys[3::-1])
    frame, minus_size, top, left = keys[:4, slots]
    starts = np.diff(np.stack((frame, top, left)), prepend=-1).any(0)
    return _Order(
        slots=slots,
        places=keys[4:, slots].T,
        windows=_runs((-minus_size[starts] * unit).tolist()),
        frames=_runs(
            [unit * height * width for count, height, width in grids for _ in range(count)]
        ),
    )


def _runs(lengths: Sequence[int]) -> Runs:
    return [(length, len(list(group))) for length, group in groupby(lengths)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    attention_norm: RMSNorm
    qkv: Linear
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


def _norm(weights: Weights, name: str, width: int) -> RMSNorm:
    return RMSNorm(weights.take(f"{name}.weight", width), _NORM_EPS)


class VisionEncoder(Node):
    """Turns frames into one embedding a slot.

    Args:
        config: Its shape.
        weights: Where its tensors are taken from.
    """

    def __init__(self, config: VisionConfig, weights: Weights) -> None:
        self._config = config
        width, inner = config.hidden_size, config.intermediate_size
        patch = (NUM_COLOURS, config.patch_frames, config.patch_size, config.patch_size)
        # No pixel is in two patches, so that the convolution is a projection of a patch's values.
        embedding = weights.take("patch_embed.proj.weight", width, *patch).flatten(1)
        self._device, self._dtype = embedding.device, embedding.dtype
        self._embed = Linear(embedding)
        self._layers = [
            _Layer(
                attention_norm=_norm(weights, f"{name}.norm1", width),
                qkv=weights.linear([f"{name}.attn.qkv"], 3 * width, width),
                output=weights.linear([f"{name}.attn.proj"], width, width),
                mlp_norm=_norm(weights, f"{name}.norm2", width),
                gate_up=weights.linear(
                    [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"], inner, width
                ),
                down=weights.linear([f"{name}.mlp.down_proj"], width, inner),
            )
            for name in (f"blocks.{index}" for index in range(config.num_layers))
        ]
        merged = width * config.merge_size**2
        self._merge_norm = _norm(weights, "merger.ln_q", width)
        self._merge = weights.linear(["merger.mlp.0"], merged, merged)
        self._output = weights.linear(["merger.mlp.2"], config.output_size, merged)
        # Half of a head's pairs turn by the row, the others by the column, alike.
        half = width // config.num_heads // 2
        self._inv_freq = inv_freq(half, RopeParams(rope_theta=config.rope_theta))

    def declare(self, batch: Batch) -> NodeStep:
        """Ask for room for the outputs."""
        made = tuple(map(item_of, batch.requests, batch.items))
        return NodeStep(batch.segments, {ENCODER: EncoderStep(made=made)})

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        """Encode the batch's items, all in one go."""
        plan: EncoderPlan = plans[ENCODER]
        films = [
            _valued(*(tensor_of(item.inputs[name], self._device) for name in (FRAMES, LEVELS)))
            for item in batch.items
        ]
        for request, item, output in zip(
            batch.requests, batch.items, self.encode(films), strict=True
        ):
            # A copy of its own: a part of the batch's tensor would keep all of it in memory.
            plan.store(item_of(request, item), output.clone())
        return NodeOutput(token_ids=())

    def encode(self, films: Sequence[Tensor]) -> list[Tensor]:
        """Return ``[num_slots, output_size]`` of each film.

        Args:
            films: float32 ``[num_frames, height, width, 3]``, a single frame for a picture, else
                whole patches of frames.
        """
        config = self._config
        unit = config.merge_size**2
        patches, grids = zip(*map(self._patches, films), strict=True)
        order = _order_of(grids, config.window_size, unit)
        slots = torch.from_numpy(order.slots).to(self._device)
        x = self._embed(torch.cat(patches).to(self._dtype))
        x = x.view(len(slots), unit, -1)[slots].flatten(0, 1)
        rotation = self._rotation(order.places)
        out: Tensor | None = None
        for index, layer in enumerate(self._layers):
            heads = layer.qkv(layer.attention_norm.add(x, out))
            heads = heads.view(len(x), 3, config.num_heads, -1)
            runs = order.frames if index in config.full_layers else order.windows
            query, key = rotation(heads[:, 0]), rotation(heads[:, 1])
            out = layer.output(_attend(query, key, heads[:, 2], runs))
            inner = layer.gate_up(layer.mlp_norm.add(x, out))
            out = layer.down(gated(inner, config.activation))
        x = self._merge_norm.add(x, out).view(len(slots), -1)
        merged = self._output(functional.gelu(self._merge(x)))
        outputs = torch.empty_like(merged)
        outputs[slots] = merged
        return list(outputs.split([frames * height * width for frames, height, width in grids]))

    def _patches(self, film: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Return ``[num_patches, values]``, slot after slot, and frames, rows, columns of slots."""
        config = self._config
        if len(film) == 1:
            film = film.expand(config.patch_frames, -1, -1, -1)
        side = config.merge_size * config.patch_size
        grid = (len(film) // config.patch_frames, film.shape[1] // side, film.shape[2] // side)
        frames, height, width = grid
        inside = (config.merge_size, config.patch_size)
        cut = film.view(frames, config.patch_frames, height, *inside, width, *inside, NUM_COLOURS)
        # Frame, row and column of the slot, those of the patch in it, then its values.
        values = NUM_COLOURS * config.patch_frames * config.patch_size**2
        return cut.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, values), grid

    def _rotation(self, places: Ints) -> Rotation:
        """Return what turns the heads of every patch by its row and column."""
        size = self._config.merge_size
        inside = np.indices((size, size)).reshape(2, -1).T
        patches = (places[:, None] * size + inside).reshape(-1, 2)
        angles = torch.from_numpy(patches)[:, :, None] * self._inv_freq
        angles = angles.flatten(1)
        rows = torch.cat((angles.cos(), angles.sin()), 1).float()
        return Rotation(rows.to(self._device), interleave=False, dtype=None)


def _valued(frames: Tensor, levels: Tensor) -> Tensor:
    """Return float32 of the shape of ``frames``: what stands for each level of each colour."""
    colours = torch.arange(NUM_COLOURS, device=frames.device)
    return levels[frames.int(), colours]


def _attend(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> Tensor:
    """Return ``[num_patches, hidden_size]``: attention inside every sequence, both ways.

    Args:
        query: ``[num_patches, num_heads, head_dim]``.
        key: Likewise.
        value: Likewise.
        runs: The sequences; those of one length are computed side by side.
    """
    out = torch.empty_like(query)
    start = 0
    for length, count in runs:
        own = slice(start, start + length * count)
        q, k, v = (
            x[own].view(count, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)
        )
        attended = functional.scaled_dot_product_attention(q, k, v)
        out[own] = attended.transpose(1, 2).reshape(length * count, *out.shape[1:])
        start = own.stop
    return out.flatten(1)


def _parts(checkpoint: Checkpoint, config: QwenConfig) -> tuple[PartCheckpoint, PartCheckpoint]:
    """Return the language model's part and the encoder's, both under ``model.`` or side by side."""
    is_nested = any(name.startswith("model.language_model.") for name in checkpoint.names())
    text, vision = (
        ("model.language_model.", "model.visual.") if is_nested else ("model.", "visual.")
    )
    return (
        PartCheckpoint(checkpoint, {text: "model.", "lm_head.": "lm_head."}, config.text),
        PartCheckpoint(checkpoint, {vision: ""}, {}),
    )


def describe(checkpoint: Checkpoint) -> Description:
    """Return what the model of a checkpoint says of itself; reads no weights but to name them.

    Raises:
        WeightsError: If the config misses a field.
        UnsupportedError: If the config asks for something that is not built.
    """
    config = qwen_config(checkpoint.config)
    text = decoder.describe(_parts(checkpoint, config)[0])
    described = described_with_encoder(text, KINDS, config.vision.output_size)
    constants = text.root_constants
    if constants is not None:
        constants = {**constants, "vision": repr(config.vision), "vision_code": "qwen2.5-vl-v1"}
    specs = [_positioned(spec, config, text.max_model_len) for spec in described.specs]
    return replace(described, root_constants=constants, specs=tuple(specs))


def _positioned(spec: NodeResourceSpec, config: QwenConfig, max_len: int) -> NodeResourceSpec:
    """Return the declaration of positions with its axes, and any other as it is."""
    if not isinstance(spec, PositionSpec):
        return spec
    positions = replace(
        spec.config,
        axes=len(config.sections),
        axis_sections=config.sections,
        max_position=_POSITIONS_PER_SLOT * max_len,
    )
    return replace(spec, config=positions)


def load(
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
    config = qwen_config(checkpoint.config)
    described = describe(checkpoint)
    text, vision = _parts(checkpoint, config)
    check_parts(checkpoint, (text, vision))
    model = decoder.load(
        text,
        name=name,
        dtype=dtype,
        device=device,
        progress=progress,
        node_class=ItemDecoderNode,
    )
    weights = Weights(vision, dtype, device)
    encoder = VisionEncoder(config.vision, weights)
    weights.finish()
    model = with_encoder(model, encoder, KINDS, config.vision.output_size)
    model.specs, model.root_constants = described.specs, described.root_constants
    return model
