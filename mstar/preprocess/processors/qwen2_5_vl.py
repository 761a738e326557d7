"""Qwen2.5-VL's pictures and videos: their sizes in slots, their positions and their pixels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image

from mstar.engine.resources.kv.keys import fingerprint
from mstar.engine.resources.spans import Grid, Span
from mstar.errors import RequestError, UnsupportedError, WeightsError
from mstar.models.fields import Fields
from mstar.models.qwen2_5_vl_config import FRAMES, KINDS, LEVELS, VisionConfig, qwen_config
from mstar.models.weights import read_json
from mstar.preprocess.items import PromptItem, array_of, named
from mstar.preprocess.media.types import ImageMedia, Media, Pixels, VideoMedia
from mstar.preprocess.tokenizer import TextTokenizer

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_MAX_ASPECT = 200
"""A side may be so many times the other one."""
_IMAGE_PIXELS = (56 * 56, 28 * 28 * 1280)
_VIDEO_PIXELS = (128 * 28 * 28, 28 * 28 * 768)
"""Pixels of a frame, at least and at most, where a checkpoint says nothing."""


@dataclass(frozen=True, kw_only=True)
class FrameSettings:
    """What becomes of the frames of one kind of item."""

    min_pixels: int
    max_pixels: int
    """Of a frame; it is made smaller or larger to lie between."""
    resample: int
    """Pillow's number of the filter."""
    scale: float
    """Factor on levels before they are normalised."""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def levels(self) -> npt.NDArray[np.float32]:
        """Return float32 ``[256, 3]``: what stands for each level of each colour."""
        scaled = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return (scaled[:, None] - mean) / std

    def size(self, height: int, width: int, side: int) -> tuple[int, int]:
        """Return the height and width that a frame is brought to, multiples of ``side``.

        Raises:
            RequestError: If one side is more than 200 times the other.
        """
        if max(height, width) > _MAX_ASPECT * min(height, width):
            raise RequestError(
                f"a picture of {width} by {height} pixels is too long: one side may be at most "
                f"{_MAX_ASPECT} times the other; crop it",
                param="messages",
            )
        near = [round(length / side) * side for length in (height, width)]
        if math.prod(near) > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            near = [
                max(side, math.floor(length / factor / side) * side) for length in (height, width)
            ]
        elif math.prod(near) < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            near = [math.ceil(length * factor / side) * side for length in (height, width)]
        return near[0], near[1]


class QwenProcessor:
    """Turns pictures and videos into items.

    Args:
        vision: Shape of the encoder.
        settings: By kind.
    """

    kinds = frozenset(KINDS)
    # The template writes the marks around them.
    placeholder: Mapping[str, str] = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    max_items: int | None = None

    def __init__(self, vision: VisionConfig, settings: Mapping[str, FrameSettings]) -> None:
        self._vision = vision
        self._settings = settings
        self._levels = {kind: array_of(own.levels()) for kind, own in settings.items()}
        self.fingerprint = fingerprint(
            "mstar-qwen2.5-vl-v1",
            repr((vision.patch_size, vision.patch_frames, vision.merge_size)),
            repr(vision.tokens_per_second),
            repr(sorted(settings.items())),
            PIL.__version__,
        )

    def expand(self, media: Media) -> list[PromptItem]:
        """Return the item of a picture or video.

        Raises:
            RequestError: If it is neither picture nor video, of a form or rate that is not taken.
        """
        if isinstance(media, ImageMedia):
            return [self._item("image", (media.pixels,), media.pixels, {}, (0,))]
        if isinstance(media, VideoMedia):
            frames = self._whole_patches(media)
            times = self._times(len(frames) // self._vision.patch_frames, media.fps)
            content = np.stack(media.frames)
            return [self._item("video", frames, content, {"fps": float(media.fps)}, times)]
        raise RequestError(
            f"the model takes {' and '.join(KINDS)}, no {media.kind}", param="messages"
        )

    def _item(
        self,
        kind: str,
        frames: tuple[Pixels, ...],
        content: npt.NDArray[Any],
        parameters: Mapping[str, object],
        times: tuple[int, ...],
    ) -> PromptItem:
        settings, side = self._settings[kind], self._vision.patch_size * self._vision.merge_size
        height, width = settings.size(frames[0].shape[0], frames[0].shape[1], side)
        resized = np.stack(
            [
                np.asarray(Image.fromarray(frame).resize((width, height), settings.resample))
                for frame in frames
            ]
        )
        grid = Grid(times, height // side, width // side)
        span = named(
            Span(grid.num_slots, kind=kind, grid=grid),
            content,
            processor=self.fingerprint,
            parameters=parameters,
        )
        return PromptItem(span, {FRAMES: array_of(resized), LEVELS: self._levels[kind]})

    def _whole_patches(self, video: VideoMedia) -> tuple[Pixels, ...]:
        """Return the frames, the last one again until they fill whole patches."""
        if not video.frames or not 0 < video.fps < math.inf:
            raise RequestError(
                f"a video has {len(video.frames)} frames at {video.fps} a second; at least one "
                "frame and a positive rate are needed",
                param="messages",
            )
        missing = -len(video.frames) % self._vision.patch_frames
        return (*video.frames, *(video.frames[-1],) * missing)

    def _times(self, num_patches: int, fps: float) -> tuple[int, ...]:
        """Return the place of each patch on the time axis, rounded down behind the product.

        The arithmetic is float32, as the family's reference has it.
        """
        seconds = np.float32(self._vision.patch_frames / fps)
        step = np.float32(self._vision.tokens_per_second) * seconds
        return tuple((np.arange(num_patches, dtype=np.float32) * step).astype(np.int64).tolist())


def build(folder: Path, config: dict[str, Any], tokenizer: TextTokenizer) -> QwenProcessor:
    """Return the processor of a checkpoint's folder.

    Raises:
        WeightsError: If a config misses a field, or those of model and processor do not fit.
        UnsupportedError: If a config asks for something that is not built.
    """
    vision = qwen_config(config).vision
    settings = {
        "image": _settings(_image_fields(folder), vision, _IMAGE_PIXELS),
        "video": _settings(_video_fields(folder), vision, _VIDEO_PIXELS),
    }
    return QwenProcessor(vision, settings)


def _image_fields(folder: Path) -> Fields:
    return _fields(folder, "image_processor", ("preprocessor_config.json",))


def _video_fields(folder: Path) -> Fields:
    files = ("video_preprocessor_config.json", "preprocessor_config.json")
    return _fields(folder, "video_processor", files)


def _fields(folder: Path, name: str, files: tuple[str, ...]) -> Fields:
    """Return a processor's config: of the one file for all processors, or of a file of its own."""
    whole = folder / "processor_config.json"
    if whole.is_file():
        fields = Fields(read_json(whole), whole.name).mapping(name)
        if fields.config:
            return fields
    for file in files:
        if (folder / file).is_file():
            return Fields(read_json(folder / file), file)
    return Fields({}, f"the missing {files[0]}")


def _settings(fields: Fields, vision: VisionConfig, pixels: tuple[int, int]) -> FrameSettings:
    for name, expected in (
        ("patch_size", vision.patch_size),
        ("temporal_patch_size", vision.patch_frames),
        ("merge_size", vision.merge_size),
    ):
        if (found := fields.integer(name, expected)) != expected:
            raise WeightsError(f"{name} of {fields.where} is {found}, the model's {expected}")
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not fields.flag(name, True):
            raise UnsupportedError(f"{name} of {fields.where} is false; that is not built")
    if fields.is_set("do_sample_frames") or fields.is_set("cap_pixels_per_frame"):
        raise UnsupportedError(f"{fields.where} asks for choosing frames, which is not built")
    size = fields.mapping("size")
    least = fields.integer("min_pixels", size.integer("shortest_edge", pixels[0]))
    most = fields.integer("max_pixels", size.integer("longest_edge", pixels[1]))
    return FrameSettings(
        min_pixels=least,
        max_pixels=most,
        resample=fields.integer("resample", int(Image.Resampling.BICUBIC), minimum=0),
        scale=fields.positive("rescale_factor", 1 / 255),
        mean=_colours(fields, "image_mean", _MEAN),
        std=_colours(fields, "image_std", _STD),
    )


def _colours(fields: Fields, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    found = fields.get(name, (list, tuple), default)
    try:
        return msgspec.convert(found, tuple[float, float, float])
    except msgspec.ValidationError as error:
        raise WeightsError(f"{name} of {fields.where} is {found!r:.60}: {error}") from error
