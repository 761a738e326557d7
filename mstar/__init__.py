"""mstar: an engine and server for composite models, with exact reuse of what requests share."""

import importlib
from typing import TYPE_CHECKING, Any

from mstar.version import __version__

if TYPE_CHECKING:
    from mstar.engine.resources.base import Deployment
    from mstar.engine.resources.sampler.config import SamplingParams
    from mstar.library import Completion, Engine
    from mstar.preprocess.processors.base import (
        ChatTask,
        ImageTask,
        SpeechTask,
        TranscriptionTask,
    )

__all__ = [
    "ChatTask",
    "Completion",
    "Deployment",
    "Engine",
    "ImageTask",
    "SamplingParams",
    "SpeechTask",
    "TranscriptionTask",
    "__version__",
]

_TASKS = "mstar.preprocess.processors.base"
_MODULES = {
    "ChatTask": _TASKS,
    "Completion": "mstar.library",
    "Deployment": "mstar.engine.resources.base",
    "Engine": "mstar.library",
    "ImageTask": _TASKS,
    "SamplingParams": "mstar.engine.resources.sampler.config",
    "SpeechTask": _TASKS,
    "TranscriptionTask": _TASKS,
}


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use, so that declarations stay light."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'mstar' has no attribute {name!r}")
