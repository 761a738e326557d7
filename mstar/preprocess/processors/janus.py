"""Janus: images that are looked at, and prompts of images that are made."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image

from mstar.engine.resources.kv.keys import fingerprint
from mstar.engine.resources.spans import Span
from mstar.errors import RequestError, WeightsError
from mstar.models.fields import Fields
from mstar.models.janus.config import (
    GUIDANCE,
    IMAGE,
    KIND,
    OUTPUT,
    PIXELS,
    UNGUIDED,
    ImageSettings,
    check_guidance,
    image_settings,
    janus_config,
)
from mstar.models.weights import read_json
from mstar.preprocess.items import PromptItem, array_of, item_digest
from mstar.preprocess.media.types import ImageMedia, Media, Pixels
from mstar.preprocess.processors.base import TEXT_TASKS, Draft, ImageTask, Task
from mstar.preprocess.tokenizer import TextTokenizer

_TOKENS = {
    "image_token": "<image_placeholder>",
    "boi_token": "<begin_of_image>",
    "eoi_token": "<end_of_image>",
}
_SYSTEM_PROMPT = (
    "You are a helpful language and vision assistant. "
    "You are able to understand the visual content that the user provides, "
    "and assist the user with a variety of tasks using natural language.\n\n"
)
_GUIDANCE = 5.0


class JanusProcessor:
    """Formats and pixel values of a checkpoint.

    Args:
        folder: The checkpoint's.
        config: Its ``config.json``.
        tokenizer: Its tokenizer.

    Raises:
        WeightsError: If a file is broken, or the tokenizer lacks what stands around images.
        UnsupportedError: If the checkpoint asks for something that is not built.
    """

    kinds = frozenset({KIND})
    max_items: int | None = None
    tasks: frozenset[Task] = TEXT_TASKS | {"image"}

    def __init__(self, folder: Path, config: Mapping[str, Any], tokenizer: TextTokenizer) -> None:
        shape = janus_config(config)
        self._settings = image_settings(folder)
        if self._settings.size != shape.vision.image_size:
            raise WeightsError(
                f"{folder}: the image processor makes images of {self._settings.size} pixels a "
                f"side, the vision model takes {shape.vision.image_size}"
            )
        self._length = shape.vision.num_patches
        self._made = shape.vq
        self._tokenizer = tokenizer
        texts = _texts(folder)
        self.placeholder = {KIND: texts["image_token"]}
        self.reserved = frozenset(texts.values())
        self._begin, self._end = (
            _only_id(folder, tokenizer, texts[name], Fields(shape.text).integer("vocab_size"))
            for name in ("boi_token", "eoi_token")
        )
        self._generation = _generation(folder, config, tokenizer, self._begin)
        has_system_prompt = _optional(folder / "processor_config.json").flag(
            "use_default_system_prompt", False
        )
        self._system_prompt = _SYSTEM_PROMPT if has_system_prompt else ""
        self.fingerprint = fingerprint(
            "mstar-janus-v1", PIL.__version__, repr(self._settings), self._length
        )

    # Images that are looked at.

    def expand(self, media: Media) -> list[list[int] | PromptItem]:
        """Return an image between the tokens that begin and end it.

        Raises:
            RequestError: If it is no image.
        """
        if not isinstance(media, ImageMedia):
            raise RequestError(f"this model takes images, not {media.kind}")
        pixels = np.ascontiguousarray(media.pixels)
        digest = item_digest(
            pixels, kind=KIND, processor=self.fingerprint, parameters={}, length=self._length
        )
        inputs = {PIXELS: array_of(pixel_values(pixels, self._settings))}
        item = PromptItem(Span(self._length, digest, kind=KIND), inputs)
        return [[self._begin], item, [self._end]]

    def frame(self, text: str) -> str:
        """Return a rendered chat with what the family puts before it."""
        return self._opened(self._system_prompt + text)

    def _opened(self, text: str) -> str:
        """Return a text that begins as the tokenizer begins texts."""
        start = self._tokenizer.bos_id
        if start is None or self._tokenizer.encode("")[:1] != [start]:
            return text
        opening = self._tokenizer.decode([start], skip_special_tokens=False)
        return text if text.startswith(opening) else opening + text

    # Images that are made.

    def picture(self, prompt: str, task: ImageTask) -> Draft:
        """Return the prompt of an image: the user's words as a chat, then the image's beginning.

        The stream beside it keeps only the tokens that begin texts and images.

        Raises:
            RequestError: If the model does not make this size, or has no such guidance.
        """
        side = self._made.image_size
        if task.size is not None and task.size != (side, side):
            raise RequestError(
                f"size is {'x'.join(map(str, task.size))}; this model makes images of "
                f"{side}x{side} pixels: ask for that, or leave it out",
                param="size",
            )
        guidance = self._generation.guidance if task.guidance is None else task.guidance
        check_guidance(guidance)
        if self._tokenizer.chat_template is not None:
            parts = [{"type": "text", "text": prompt}]
            prompt = self._tokenizer.render_chat([{"role": "user", "content": parts}])
        ids = self._tokenizer.encode(self._opened(prompt), add_special_tokens=False)
        return Draft(
            parts=[[*ids, self._begin]],
            companions={UNGUIDED: self._generation.unguided([*ids, self._begin])},
            options={OUTPUT: IMAGE, GUIDANCE: float(guidance)},
            max_tokens=self._made.num_tokens,
        )


def build(folder: Path, config: dict[str, Any], tokenizer: TextTokenizer) -> JanusProcessor:
    """Return the processor of a checkpoint.

    Raises:
        WeightsError: If a file is broken, or the tokenizer lacks what stands around images.
        UnsupportedError: If the checkpoint asks for something that is not built.
    """
    return JanusProcessor(folder, config, tokenizer)


def pixel_values(pixels: Pixels, settings: ImageSettings) -> npt.NDArray[np.float32]:
    """Return what the encoder is given for an image, ``[3, size, size]``.

    The longer side is brought to ``size``, and the rest filled up with the mean color.

    Args:
        pixels: RGB, ``[height, width, 3]``.
        settings: The checkpoint's.
    """
    height, width = pixels.shape[:2]
    scale = settings.size / max(height, width)
    new_height, new_width = (
        max(round(side * scale), settings.min_size) for side in (height, width)
    )
    resized = np.asarray(
        Image.fromarray(pixels).resize((new_width, new_height), Image.Resampling.BICUBIC)
    )
    side = max(new_height, new_width)
    square = np.empty((side, side, 3), np.uint8)
    square[:] = [int(part * 255) for part in settings.mean]
    top, left = (side - new_height) // 2, (side - new_width) // 2
    square[top : top + new_height, left : left + new_width] = resized
    values = (square.astype(np.float64) * settings.factor).astype(np.float32)
    mean, std = np.array(settings.mean, np.float32), np.array(settings.std, np.float32)
    return np.ascontiguousarray(((values - mean) / std).transpose(2, 0, 1))


@dataclass(frozen=True)
class _Generation:
    """What a checkpoint says of making images."""

    kept: frozenset[int]
    """Ids that the stream without a prompt keeps."""
    pad: int
    """What stands there for all others."""
    guidance: float

    def unguided(self, ids: list[int]) -> list[int]:
        """Return a prompt without its content, as long as it was."""
        return [token if token in self.kept else self.pad for token in ids]


def _generation(
    folder: Path, config: Mapping[str, Any], tokenizer: TextTokenizer, begin: int
) -> _Generation:
    fields = _optional(folder / "generation_config.json")
    text = Fields(config).mapping("text_config")
    pad = fields.integer("pad_token_id", text.integer("pad_token_id", -1, minimum=-1), minimum=-1)
    if pad < 0:
        raise WeightsError(f"{folder}: neither config has a pad_token_id, which guidance needs")
    first = tokenizer.bos_id
    kept = {
        fields.integer("bos_token_id", begin if first is None else first, minimum=0),
        fields.mapping("generation_kwargs").integer("boi_token_id", begin, minimum=0),
    }
    return _Generation(frozenset(kept), pad, fields.positive("guidance_scale", _GUIDANCE))


def _optional(file: Path) -> Fields:
    return Fields(read_json(file) if file.is_file() else {}, str(file))


def _texts(folder: Path) -> dict[str, str]:
    """Return what stands for and around images, by name."""
    config = _optional(folder / "tokenizer_config.json").config
    extra = config.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, Mapping) else {}), **config}
    found = {name: named.get(name, default) for name, default in _TOKENS.items()}
    return {
        name: str(token.get("content") if isinstance(token, Mapping) else token)
        for name, token in found.items()
    }


def _only_id(folder: Path, tokenizer: TextTokenizer, text: str, vocab_size: int) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    # What the vocabulary lacks may have been added to it behind the model's last id.
    if len(ids) != 1 or ids[0] >= vocab_size:
        raise WeightsError(
            f"{folder}: {text!r} is no token of the model, whose ids lie below {vocab_size}; it "
            f"becomes {ids}"
        )
    return ids[0]
