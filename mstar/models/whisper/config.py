"""What a Whisper checkpoint says of its shape and of its special tokens; loads no torch."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.errors import UnsupportedError, WeightsError
from mstar.models.ctranslate2_file import is_ctranslate2, read_configs
from mstar.models.fields import Fields

FRAMES_PER_SLOT = 2
"""Frames of features that one slot of the encoder's output stands for."""
SECONDS_PER_FRAME = 0.01
SECONDS_PER_SLOT = 0.02
"""Also the step from one timestamp to the next."""

ENGLISH = "en"
"""The language of a model that knows one only."""

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_MAX_INITIAL_TIMESTAMP = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Shape of the encoder, or of the decoder."""

    num_layers: int
    num_heads: int
    ffn_size: int
    max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperConfig:
    """Shape of a Whisper."""

    vocab_size: int
    width: int
    num_mel_bins: int
    encoder: Stack
    decoder: Stack
    embedding_scale: float

    @property
    def num_frames(self) -> int:
        """Frames of features of one window."""
        return self.encoder.max_positions * FRAMES_PER_SLOT


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperTokens:
    """Ids with a meaning of their own."""

    start: int
    """Begins every transcript."""
    end: int
    no_timestamps: int
    start_of_previous: int
    """Begins what was said before."""
    languages: Mapping[str, int]
    """By code; empty where the model knows English only."""
    transcribe: int | None
    translate: int | None
    suppressed: tuple[int, ...]
    """Never generated."""
    begin_suppressed: tuple[int, ...]
    """Never generated first."""
    max_initial_timestamp: int | None
    """Last timestamp that may come first, counted from the first one; ``None``: any."""

    @property
    def first_timestamp(self) -> int:
        """The id of 0.00 seconds; those of later times follow."""
        return self.no_timestamps + 1

    @property
    def no_speech(self) -> int:
        """Says that nobody speaks; no config names it, all checkpoints there are have it here."""
        return self.no_timestamps - 1

    def language_of(self, token: int) -> str | None:
        """Return the code of a language's id."""
        return next((code for code, own in self.languages.items() if own == token), None)


def whisper_config(config: Mapping[str, Any]) -> WhisperConfig:
    """Return the shape that a ``config.json`` gives.

    Raises:
        WeightsError: If a field is missing or no number.
        UnsupportedError: If the activation is another than Whisper's.
    """
    number = Fields(config).integer
    activation = config.get("activation_function", "gelu")
    if activation != "gelu":
        raise UnsupportedError(f"Whisper with activation {activation!r} is not supported")
    width = number("d_model")
    stacks = {
        side: Stack(
            num_layers=number(f"{side}_layers"),
            num_heads=number(f"{side}_attention_heads"),
            ffn_size=number(f"{side}_ffn_dim"),
            max_positions=number(f"max_{positions}_positions"),
        )
        for side, positions in (("encoder", "source"), ("decoder", "target"))
    }
    return WhisperConfig(
        vocab_size=number("vocab_size"),
        width=width,
        num_mel_bins=number("num_mel_bins"),
        encoder=stacks["encoder"],
        decoder=stacks["decoder"],
        embedding_scale=width**0.5 if config.get("scale_embedding") else 1.0,
    )


def whisper_tokens(
    config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> WhisperTokens:
    """Return the special ids of a checkpoint.

    Args:
        config: The ``config.json``.
        generation_config: The ``generation_config.json``, which names most of them.

    Raises:
        WeightsError: If one is missing.
    """

    def token(name: str) -> int:
        return fields.integer(name, minimum=0)

    fields = Fields({**config, **generation_config}, "generation_config.json")
    languages = generation_config.get("lang_to_id") or {}
    tasks = generation_config.get("task_to_id") or {}
    suppressed = generation_config.get("suppress_tokens", config.get("suppress_tokens")) or ()
    begin = generation_config.get("begin_suppress_tokens", config.get("begin_suppress_tokens"))
    no_timestamps = token("no_timestamps_token_id")
    return WhisperTokens(
        start=token("decoder_start_token_id"),
        end=token("eos_token_id"),
        no_timestamps=no_timestamps,
        # Where nothing names it, it is the third id before, as in all checkpoints there are.
        start_of_previous=int(generation_config.get("prev_sot_token_id") or no_timestamps - 2),
        languages={
            match[1]: int(own)
            for text, own in languages.items()
            if (match := _LANGUAGE.match(text))
        },
        transcribe=tasks.get("transcribe"),
        translate=tasks.get("translate"),
        suppressed=tuple(suppressed),
        begin_suppressed=tuple(begin or ()),
        max_initial_timestamp=generation_config.get(
            "max_initial_timestamp_index", _MAX_INITIAL_TIMESTAMP
        ),
    )


def read_whisper(folder: Path) -> tuple[WhisperConfig, WhisperTokens]:
    """Return shape and special ids of the checkpoint in a folder; reads no weights.

    Raises:
        WeightsError: If a file is missing, broken, or lacks a field.
        UnsupportedError: If the checkpoint asks for something that is not built.
    """
    if is_ctranslate2(folder):
        config, generation_config = read_configs(folder)
    else:
        config, generation_config = (
            _read_json(folder / name) for name in ("config.json", "generation_config.json")
        )
    return whisper_config(config), whisper_tokens(config, generation_config)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: cannot be read as JSON: {error}") from error
    return value
