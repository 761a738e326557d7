"""mstar: an engine and server for composite models, with exact reuse of what requests share."""

import importlib
from typing import TYPE_CHECKING, Any

from mstar.version import __version__

if TYPE_CHECKING:
    from mstar.engine.resources.base import Deployment
    from mstar.engine.resources.sampler.config import SamplingParams
    from mstar.library import Completion, Engine

__all__ = ["Completion", "Deployment", "Engine", "SamplingParams", "__version__"]

_MODULES = {
    "Completion": "mstar.library",
    "Deployment": "mstar.engine.resources.base",
    "Engine": "mstar.library",
    "SamplingParams": "mstar.engine.resources.sampler.config",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use, so that declarations stay light."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'mstar' has no attribute {name!r}")
