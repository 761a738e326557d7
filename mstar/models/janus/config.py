"""The shape of a Janus checkpoint, and the names that its prompts and its model share."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.errors import RequestError, UnsupportedError, WeightsError
from mstar.models.fields import Fields
from mstar.models.weights import read_json

UNGUIDED = "unguided"
"""Label of the stream that has no prompt, which guidance leads away from."""
OUTPUT, IMAGE = "output", "image"
"""The option that says what a request makes, and its value for an image."""
GUIDANCE = "guidance_scale"
"""The option that says how far guidance leads."""
MAX_GUIDANCE = 100.0
KIND = "image"
"""Kind of the items that the model takes."""
PIXELS = "pixel_values"
"""An item's input: float32 ``[3, image_size, image_size]``."""
_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
_BICUBIC = 3
"""Pillow's number of the filter."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The encoder of images that are looked at."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    image_size: int
    """Width and height, in pixels."""
    patch_size: int
    intermediate_size: int
    norm_eps: float
    has_qkv_bias: bool
    activation: str
    depth: int
    """Layers of the projection to the language model."""

    @property
    def num_patches(self) -> int:
        """Slots of an image."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, kw_only=True)
class VQConfig:
    """The codes of images that are made, and their decoder to pixels."""

    num_codes: int
    code_size: int
    """Elements of a code's embedding."""
    side: int
    """Codes along one side of an image."""
    latent_channels: int
    base_channels: int
    channel_multiplier: tuple[int, ...]
    """By level, the finest first; each level has twice the size of the one behind it."""
    num_res_blocks: int
    out_channels: int
    head_size: int
    """Inner width of the head that chooses codes."""
    depth: int
    """Layers of the projection of codes to the language model."""
    activation: str

    @property
    def num_tokens(self) -> int:
        """Codes of an image."""
        return self.side * self.side

    @property
    def image_size(self) -> int:
        """Width and height of an image, in pixels."""
        return self.side << (len(self.channel_multiplier) - 1)


@dataclass(frozen=True, kw_only=True)
class JanusConfig:
    """A whole checkpoint."""

    text: dict[str, Any]
    """Of the language model by itself, as Llama's ``config.json`` has it."""
    vision: VisionConfig
    vq: VQConfig


def janus_config(config: Mapping[str, Any]) -> JanusConfig:
    """Return the shape that a ``config.json`` declares.

    Raises:
        WeightsError: If a field is missing, of a wrong type, or does not fit another.
        UnsupportedError: If the config asks for something that is not built.
    """
    fields = Fields(config)
    text, vision, vq = (fields.mapping(f"{name}_config") for name in ("text", "vision", "vq"))
    seen = _vision(vision)
    made = _vq(vq, seen.image_size // seen.patch_size)
    num_tokens = vision.integer("num_image_tokens", 576, minimum=2)
    if num_tokens != made.num_tokens:
        raise WeightsError(
            f"num_image_tokens is {num_tokens}; images of {made.side} by {made.side} codes have "
            f"{made.num_tokens}"
        )
    own = {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
    }
    return JanusConfig(text={**text.config, **own}, vision=seen, vq=made)


def _vision(fields: Fields) -> VisionConfig:
    hidden_size = fields.integer("hidden_size", 1024)
    num_heads = fields.integer("num_attention_heads", 16)
    image_size, patch_size = fields.integer("image_size", 384), fields.integer("patch_size", 16)
    # The reference normalises heads by weights as wide as all of them together, and fails.
    if fields.flag("use_qk_norm", False):
        raise UnsupportedError("use_qk_norm is not built for Janus' vision model")
    if hidden_size % num_heads or image_size % patch_size:
        raise WeightsError(
            f"{fields.where} has hidden_size {hidden_size} for {num_heads} heads and image_size "
            f"{image_size} for patches of {patch_size}; both must divide"
        )
    return VisionConfig(
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers", 24),
        num_heads=num_heads,
        num_channels=fields.integer("num_channels", 3),
        image_size=image_size,
        patch_size=patch_size,
        intermediate_size=int(hidden_size * fields.positive("mlp_ratio", 4.0)),
        norm_eps=fields.positive("layer_norm_eps", 1e-6),
        has_qkv_bias=fields.flag("attention_bias", True),
        activation=_activation(fields),
        depth=fields.integer("depth", 2),
    )


def _vq(fields: Fields, side: int) -> VQConfig:
    multiplier = fields.get("channel_multiplier", list, [1, 1, 2, 2, 4])
    if not multiplier or not all(type(n) is int and n > 0 for n in multiplier):
        raise WeightsError(
            f"'channel_multiplier' of {fields.where} is {multiplier!r:.60}; positive integers"
        )
    out_channels = fields.integer("out_channels", 3)
    if out_channels != 3:
        raise UnsupportedError(f"images of {out_channels} channels are not built; 3 are")
    return VQConfig(
        num_codes=fields.integer("num_embeddings", 16384),
        code_size=fields.integer("embed_dim", 8),
        side=side,
        latent_channels=fields.integer("latent_channels", 256),
        base_channels=fields.integer("base_channels", 128),
        channel_multiplier=tuple(multiplier),
        num_res_blocks=fields.integer("num_res_blocks", 2),
        out_channels=out_channels,
        head_size=fields.integer("projection_dim", 2048),
        depth=fields.integer("num_hidden_layers", 2),
        activation=_activation(fields),
    )


def _activation(fields: Fields) -> str:
    name = fields.text("hidden_act", "gelu")
    if name not in _ACTIVATIONS:
        raise UnsupportedError(
            f"activation {name!r} of {fields.where} is not built; known are "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """How pixels become what the encoder is given, and what the decoder made pixels again."""

    mean: tuple[float, ...]
    """By channel, taken off values between 0 and 1."""
    std: tuple[float, ...]
    """By channel, what the rest is divided by."""
    factor: float
    """What levels from 0 to 255 are multiplied by before that."""
    size: int
    """Width and height, in pixels."""
    min_size: int
    """Of the shorter side before it is filled up, in pixels."""


def image_settings(folder: Path) -> ImageSettings:
    """Return the settings of a checkpoint's image processor; its class's own where it has none.

    Raises:
        WeightsError: If the file is broken or a field of a wrong type.
        UnsupportedError: If it leaves out a part of the processing.
    """
    own: Mapping[str, Any] = {}
    if (folder / "processor_config.json").is_file():
        own = Fields(read_json(folder / "processor_config.json")).mapping("image_processor").config
    if not own and (folder / "preprocessor_config.json").is_file():
        own = read_json(folder / "preprocessor_config.json")
    fields = Fields(own, "the image processor's config")
    for name in ("do_resize", "do_pad", "do_rescale", "do_normalize"):
        if not fields.flag(name, True):
            raise UnsupportedError(f"an image processor of Janus with {name} off is not built")
    if fields.integer("resample", _BICUBIC, minimum=0) != _BICUBIC:
        raise UnsupportedError("an image processor of Janus that is not bicubic is not built")
    size = fields.mapping("size")
    height, width = size.integer("height", 384), size.integer("width", 384)
    if height != width:
        raise WeightsError(f"{size.where} is {width} by {height}; it must be a square")
    return ImageSettings(
        mean=_channels(fields, "image_mean", [0.48145466, 0.4578275, 0.40821073]),
        std=_channels(fields, "image_std", [0.26862954, 0.26130258, 0.27577711]),
        factor=fields.positive("rescale_factor", 1 / 255),
        size=height,
        min_size=fields.integer("min_size", 14),
    )


def _channels(fields: Fields, name: str, default: list[float]) -> tuple[float, ...]:
    value = fields.get(name, list, default)
    if len(value) != 3 or not all(isinstance(part, (int, float)) for part in value):
        raise WeightsError(f"{name!r} of {fields.where} is {value!r:.60}; three numbers are needed")
    return tuple(map(float, value))


def check_guidance(scale: object) -> None:
    """Refuse a scale that leads nowhere.

    Raises:
        RequestError: Naming the range.
    """
    if not isinstance(scale, (int, float)) or not 1 <= scale <= MAX_GUIDANCE:
        raise RequestError(
            f"{GUIDANCE} is {scale!r:.40}; it must lie between 1 and {MAX_GUIDANCE:g}",
            param=GUIDANCE,
        )
