"""Processors of the families, found by a checkpoint's architecture and imported on first use."""

import importlib
import json
from pathlib import Path
from typing import Any

from mstar.errors import WeightsError
from mstar.models.ctranslate2_file import is_ctranslate2, read_configs
from mstar.models.speech.voice_files import voice_architecture
from mstar.preprocess.tokenizer import TextTokenizer

PROCESSORS: dict[str, str] = {
    "Qwen2_5_VLForConditionalGeneration": "mstar.preprocess.processors.qwen2_5_vl",
    "Gemma3ForConditionalGeneration": "mstar.preprocess.processors.gemma3",
    "Idefics3ForConditionalGeneration": "mstar.preprocess.processors.idefics3",
    "SmolVLMForConditionalGeneration": "mstar.preprocess.processors.idefics3",
    "JanusForConditionalGeneration": "mstar.preprocess.processors.janus",
    "WhisperForConditionalGeneration": "mstar.preprocess.processors.whisper",
    "PiperVoice": "mstar.preprocess.processors.speech",
    "KokoroVoice": "mstar.preprocess.processors.speech",
}
"""Architecture to the module whose ``build`` makes its processor; others take text only."""


def load_processor(path: Path, tokenizer: TextTokenizer) -> Any | None:
    """Return the processor of a checkpoint; ``None`` where its model takes text only.

    Args:
        path: The checkpoint's folder or file.
        tokenizer: Of the same checkpoint.

    Raises:
        WeightsError: If the config or the processor's own is broken.
    """
    config = _config_of(path)
    module = _module_of(config)
    return (
        None if module is None else importlib.import_module(module).build(path, config, tokenizer)
    )


def takes_text_only(path: Path) -> bool:
    """Tell whether a checkpoint has no processor.

    Raises:
        WeightsError: If the config is broken.
    """
    return _module_of(_config_of(path)) is None


def load_tokenizer(path: Path) -> TextTokenizer:
    """Return the tokenizer of a checkpoint; one without a vocabulary where its model has no tokens.

    Raises:
        WeightsError: If there is none where there should be one, or it is broken.
        UnsupportedError: If it is of an unknown kind.
    """
    if voice_architecture(path) is not None:
        return TextTokenizer.empty()
    return TextTokenizer.load(path)


def _module_of(config: dict[str, Any]) -> str | None:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return None
    return PROCESSORS.get(architectures[0])


def _config_of(path: Path) -> dict[str, Any]:
    """Return a checkpoint's config, or what stands for it; empty where none is known."""
    if (voice := voice_architecture(path)) is not None:
        return {"architectures": [voice]}
    if not path.is_dir():
        return {}
    if is_ctranslate2(path):
        return read_configs(path)[0]
    file = path / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file}: not a readable config: {error}") from error
    return config if isinstance(config, dict) else {}
