"""The families that the laws are held to, with heads as wide as the kernels of a GPU take them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import WhisperConfig

from tests.laws import families
from tests.laws.families import FAMILIES, Family
from tests.models import (
    families as texts,
    janus_folder,
    qwen_folder,
    vision_families,
    whisper_folder,
)

NUM_HEADS, NUM_KV_HEADS = 8, 2
"""Of decoders but Whisper's: a group of four shares a key head."""


def _widened(text: Any, head_dim: int) -> None:
    text.head_dim = head_dim
    text.num_attention_heads, text.num_key_value_heads = NUM_HEADS, NUM_KV_HEADS


def _with_text(make: Callable[..., Any], head_dim: int) -> Callable[..., Any]:
    """Return what makes a config, the heads of its text model widened."""

    def wide(*args: Any) -> Any:
        made = make(*args)
        _widened(made.text_config, head_dim)
        return made

    return wide


def _text(make: Callable[[], Any], head_dim: int) -> Callable[[], Any]:
    def wide() -> Any:
        made = make()
        _widened(made, head_dim)
        return made

    return wide


@contextmanager
def _wide_folders(head_dim: int) -> Iterator[None]:
    """Have all tiny checkpoints made with heads of this width."""
    hidden = NUM_HEADS * head_dim
    # The family's head is as wide as its hidden size and number of heads say.
    qwen = {
        "hidden_size": hidden,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "rope_parameters": qwen_folder.TEXT["rope_parameters"]
        | {"mrope_section": [head_dim // 8, 3 * head_dim // 16, 3 * head_dim // 16]},
    }
    janus = families._janus.__wrapped__
    with ExitStack() as stack:
        for module in (vision_families, janus_folder):
            wide = _with_text(module._config, head_dim)
            stack.enter_context(patch.object(module, "_config", wide))
        stack.enter_context(patch.dict(qwen_folder.TEXT, qwen))
        stack.enter_context(patch.dict(qwen_folder.VISION, {"out_hidden_size": hidden}))
        cases = {case: _text(texts.CASES[case], head_dim) for case in families.TEXTS}
        stack.enter_context(patch.dict(texts.CASES, cases))
        stack.enter_context(
            patch.object(
                whisper_folder,
                "WhisperConfig",
                lambda **fields: WhisperConfig(**fields | {"d_model": 2 * head_dim}),
            )
        )
        stack.enter_context(patch.object(families, "_janus", cache(janus)))
        yield


@cache
def wide_family(name: str, head_dim: int) -> tuple[Family, Path]:
    """Return a family whose model is on the CPU in float32, and its checkpoint."""
    with _wide_folders(head_dim):
        family = FAMILIES[name]()
        folder = family.folder or families._janus()[0]
    return family, folder
