"""A model's checkpoint, whichever way it is stored: configuration, tensors and content name."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from mstar.engine.resources.kv.keys import fingerprint
from mstar.errors import UnsupportedError, WeightsError
from mstar.models.ctranslate2 import ctranslate2_tensors
from mstar.models.ctranslate2_file import is_ctranslate2, read_configs
from mstar.models.files import digest_in_background
from mstar.models.gguf_model import nearest, read_gguf_model
from mstar.models.locate import resolve
from mstar.models.speech.voice_files import voice_architecture
from mstar.models.weights import StoredTensor, folder_tensors, read_json

__all__ = ["Checkpoint", "open_checkpoint", "resolve"]

_LOG = logging.getLogger(__name__)


class Checkpoint:
    """An open checkpoint; tensors are read when they are asked for.

    Built by :func:`open_checkpoint`.
    """

    def __init__(
        self,
        path: Path,
        *,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        tensors: Mapping[str, StoredTensor],
        rope_interleaved: bool = False,
        freq_factors: Tensor | None = None,
    ) -> None:
        self.path = path
        self.config = config
        """In the spelling of Hugging Face's config.json."""
        self.generation_config = generation_config
        self.rope_interleaved = rope_interleaved
        """Rows of the query and key projections pair ``(2i, 2i + 1)`` instead of the two halves."""
        self.freq_factors = freq_factors
        """float32 ``[rotary_dim // 2]``; the rotary frequencies are to be divided by it."""
        self._tensors = tensors
        self._digests: list[Future[str]] | None = None

    @property
    def architecture(self) -> str:
        """The first of the config's ``architectures``.

        Raises:
            WeightsError: If the config names none.
        """
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise WeightsError(f"{self.path}: the config names no architectures, found {names!r}")
        return names[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def own_dtype(self) -> str:
        """Name of the dtype to compute in: the config's, or else one that holds what is stored."""
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        if named in ("float32", "bfloat16", "float16"):
            return str(named)
        num_values = sum(prod(tensor.shape) for tensor in self._tensors.values())
        is_wide = num_values > 0 and self.nbytes >= 4 * num_values
        return "float32" if is_wide else "bfloat16"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an output, without repetition.

        From the generation config, or else the model's config; the tokenizer's own end token,
        which a chat model may need on top, is added where the folder states its id.

        Raises:
            WeightsError: If what stands there is no id.
        """
        found: list[int] = []
        text_config = self.config.get("text_config") or {}
        for config in (self.generation_config, self.config, text_config):
            ids = config.get("eos_token_id")
            many = [ids] if isinstance(ids, int) else ids or []
            if not isinstance(many, list) or not all(isinstance(n, int) for n in many):
                raise WeightsError(
                    f"{self.path}: eos_token_id is {ids!r:.40}; it must be an id, or a list of ids"
                )
            found += many
            if found:
                break
        if self.path.is_dir() and (self.path / "tokenizer_config.json").exists():
            found += _tokenizer_end_ids(read_json(self.path / "tokenizer_config.json"))
        return tuple(dict.fromkeys(found))

    def names(self) -> tuple[str, ...]:
        """Return the tensors' names, as Hugging Face has them."""
        return tuple(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def stored_as(self, name: str) -> str:
        """Return what a tensor is called in its file."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape.

        Raises:
            WeightsError: If there is no such tensor.
        """
        return self._stored(name).shape

    def tensor(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Read a tensor, on the CPU.

        Packed GGUF tensors come as float32, all others in the dtype they are stored in. Floats
        that are not packed are mapped from the file: clone before writing to them.

        Args:
            name: One of :meth:`names`.
            shape: What the model expects; ``None``: any.

        Raises:
            WeightsError: If there is no such tensor, if its file is broken or its shape another.
        """
        stored = self._stored(name)
        if shape is not None and stored.shape != tuple(shape):
            raise WeightsError(
                f"{stored.file}: tensor {name!r} should have shape {list(shape)} by the config, "
                f"found {list(stored.shape)}"
            )
        return stored.load()

    def begin_fingerprint(self, cache_dir: Path | None = None) -> None:
        """Begin to name the content in the background, for :meth:`fingerprint` to wait for.

        Args:
            cache_dir: Where digests of files are remembered; ``None``: the default one.
        """
        if self._digests is None:
            files = sorted({tensor.file for tensor in self._tensors.values()})
            own = [self.path / "config.json"] if self.path.is_dir() else []
            self._digests = digest_in_background([*own, *files], cache_dir)

    def fingerprint(self, cache_dir: Path | None = None) -> bytes | None:
        """Return the content name of weights and config: 32 bytes, the same under any file name.

        Args:
            cache_dir: Where digests of files are remembered; ``None``: the default one.

        Returns:
            ``None`` where a file cannot be read to its end: content without a name.
        """
        self.begin_fingerprint(cache_dir)
        assert self._digests is not None
        try:
            digests = [digest.result() for digest in self._digests]
        except OSError as error:
            _LOG.info("%s: the content has no name: %s", self.path, error)
            return None
        num_own = 1 if self.path.is_dir() else 0
        return fingerprint("mstar-checkpoint-v1", *digests[:num_own], *sorted(digests[num_own:]))

    def _stored(self, name: str) -> StoredTensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise WeightsError(f"{self.path}: has no tensor {name!r}; {_hint(name, self._tensors)}")
        return stored


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a Hugging Face or CTranslate2 folder, a GGUF file or a voice; reads headers only.

    Raises:
        ModelNotFoundError: If ``path`` is a name that :func:`resolve` does not find.
        WeightsError: If files are missing, unreadable, truncated or inconsistent.
        UnsupportedError: If the architecture or the way of quantisation is not known here.
    """
    path = resolve(path) if isinstance(path, str) else path
    try:
        return _open(path)
    except OSError as error:
        raise WeightsError(f"{error.filename or path}: cannot be read: {error.strerror}") from error


def _open(path: Path) -> Checkpoint:
    if not path.exists():
        raise WeightsError(f"{path} does not exist")
    if (voice := voice_architecture(path)) is not None:
        config = {"architectures": [voice], "dtype": "float32"}
        return Checkpoint(path, config=config, generation_config={}, tensors={})
    if path.is_file():
        model = read_gguf_model(path)
        return Checkpoint(
            path,
            config=model.config,
            generation_config=model.generation_config,
            tensors=model.tensors,
            rope_interleaved=model.rope_interleaved,
            freq_factors=model.freq_factors,
        )
    if is_ctranslate2(path):
        config, generation_config = read_configs(path)
        return Checkpoint(
            path,
            config=config,
            generation_config=generation_config,
            tensors=ctranslate2_tensors(path),
        )
    config = read_json(path / "config.json")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UnsupportedError(f"{path}: weights quantised by {method!r} are not supported")
    generation = path / "generation_config.json"
    return Checkpoint(
        path,
        config=config,
        generation_config=read_json(generation) if generation.exists() else {},
        tensors=folder_tensors(path),
    )


def _hint(name: str, known: Mapping[str, StoredTensor]) -> str:
    text = nearest(name, known)
    return text if len(text) < 200 else f"{text[:200]} … ({len(known)} in all)"


def _tokenizer_end_ids(config: dict[str, Any]) -> list[int]:
    """Return the id of a tokenizer_config.json's end token, if the file states it."""
    end = config.get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    added = config.get("added_tokens_decoder")
    if text is None or not isinstance(added, dict):
        return []
    return [
        int(token)
        for token, entry in added.items()
        if isinstance(entry, dict) and entry.get("content") == text
    ]
