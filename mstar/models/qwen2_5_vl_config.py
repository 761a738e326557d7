"""The shape of a Qwen2.5-VL checkpoint, and the names that its prompts and its model share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mstar.errors import UnsupportedError, WeightsError
from mstar.models.fields import Fields

KINDS = ("image", "video")
"""Kinds of the items that the model takes."""
FRAMES, LEVELS = "frames", "levels"
"""An item's inputs: uint8 ``[num_frames, height, width, 3]``, one frame for a picture, and float32
``[256, 3]``: what stands for each level of each colour."""
NUM_COLOURS = 3
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_TEXT_DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80}
"""What the format's own classes take where the config says nothing, and Qwen2's take other."""
_THETA = 1e6
_SECTIONS = (16, 24, 24)


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The encoder of pictures and videos.

    A patch is a square of pixels of a few frames; a slot is a square of patches, merged.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    output_size: int
    """Elements of a slot: the hidden size of the language model."""
    activation: str
    patch_size: int
    """Width and height of a patch, in pixels."""
    patch_frames: int
    """Frames of a patch."""
    merge_size: int
    """Width and height of a slot, in patches."""
    window_size: int
    """Width and height of an attention window, in slots."""
    full_layers: frozenset[int]
    """Layers whose patches attend to their whole frame."""
    rope_theta: float
    tokens_per_second: float
    """Positions on the time axis that a second of video takes."""


@dataclass(frozen=True, kw_only=True)
class QwenConfig:
    """A whole checkpoint."""

    text: dict[str, Any]
    """Of the language model by itself, as Qwen2's ``config.json`` has it."""
    sections: tuple[int, int, int]
    """Rotated pairs of a head that turn by time, by row and by column."""
    vision: VisionConfig


def qwen_config(config: Mapping[str, Any]) -> QwenConfig:
    """Return the shape that a ``config.json`` declares, the older flat spelling included.

    Raises:
        WeightsError: If a field is missing, of a wrong type, or does not fit another.
        UnsupportedError: If the config asks for something that is not built.
    """
    whole = Fields(config)
    nested = whole.mapping("text_config")
    # A null counts as said: without it there are as many heads of keys as of queries.
    fields = Fields({**_TEXT_DEFAULTS, **(nested.config or config)}, nested.where)
    name = "rope_scaling" if fields.is_set("rope_scaling") else "rope_parameters"
    rope = {"rope_theta": fields.positive("rope_theta", _THETA), **fields.mapping(name).config}
    found = rope.pop("mrope_section", _SECTIONS)
    if not isinstance(found, (list, tuple)) or [type(size) for size in found] != [int] * 3:
        raise WeightsError(f"mrope_section is {found!r:.60}; three numbers of pairs are needed")
    for name in ("type", "rope_type"):
        if rope.get(name) == "mrope":
            rope[name] = "default"
    text = {
        **fields.config,
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": whole.flag("tie_word_embeddings", False),
        "rope_parameters": rope,
        "rope_scaling": None,
        "rope_theta": None,
    }
    vision = _vision(whole.mapping("vision_config"))
    if vision.output_size != (width := fields.integer("hidden_size")):
        raise WeightsError(
            f"out_hidden_size of the vision_config is {vision.output_size}, the language model's "
            f"hidden_size {width}"
        )
    return QwenConfig(text=text, sections=(found[0], found[1], found[2]), vision=vision)


def _vision(fields: Fields) -> VisionConfig:
    colours = fields.integer("in_channels", fields.integer("in_chans", NUM_COLOURS))
    if colours != NUM_COLOURS:
        raise UnsupportedError(f"pictures of {colours} channels are not built; {NUM_COLOURS} are")
    activation = fields.text("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"hidden_act {activation!r:.40} of {fields.where} is not built; known are "
            f"{', '.join(_ACTIVATIONS)}"
        )
    rope = fields.mapping("rope_parameters")
    kind = rope.text("rope_type", "axial")
    if kind != "axial":
        raise UnsupportedError(f"rope_type {kind!r:.40} of {fields.where} is not built; axial is")
    hidden_size = fields.integer("hidden_size", 3584)
    num_heads = fields.integer("num_heads", 16)
    patch_size, merge_size = (
        fields.integer("patch_size", 14),
        fields.integer("spatial_merge_size", 2),
    )
    # In pixels; what is left over when it is measured in slots does not count.
    window_size = fields.integer("window_size", 112) // merge_size // patch_size
    if hidden_size % (4 * num_heads) or window_size < 1:
        raise WeightsError(
            f"{fields.where} has hidden_size {hidden_size} for {num_heads} heads, which must be "
            f"multiples of 4 wide, and a window of {window_size} slots"
        )
    full_layers = fields.get("fullatt_block_indexes", (list, tuple), (7, 15, 23, 31))
    if not all(type(layer) is int for layer in full_layers):
        raise WeightsError(f"fullatt_block_indexes is {full_layers!r:.60}; integers are needed")
    return VisionConfig(
        hidden_size=hidden_size,
        num_layers=fields.integer("depth", 32),
        num_heads=num_heads,
        intermediate_size=fields.integer("intermediate_size", 3420),
        output_size=fields.integer("out_hidden_size", 3584),
        activation=_ACTIVATIONS[activation],
        patch_size=patch_size,
        patch_frames=fields.integer("temporal_patch_size", 2),
        merge_size=merge_size,
        window_size=window_size,
        full_layers=frozenset(full_layers),
        rope_theta=rope.positive("rope_theta", 1e4),
        tokens_per_second=fields.positive("tokens_per_second", 4.0),
    )
