"""A CTranslate2 file's fields, and what they tell of a Whisper; loads no torch.

``model.bin`` is a run of length-prefixed fields, little-endian: the format's version, the name and
revision of the kind of model, then every tensor with name, shape, dtype and bytes, and last the
tensors that go by a second name.
"""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mstar.errors import UnsupportedError, WeightsError

FILE_NAME = "model.bin"
"""The file that has the tensors; ``config.json`` and ``tokenizer.json`` lie beside it."""
DTYPES: dict[int, Any] = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
"""The format's codes of dtypes, as numpy has them."""
BFLOAT16 = 5
"""The code of the dtype that numpy lacks."""

_VERSION = 6
_SPEC = "WhisperSpec"
_NEEDED_TOKENS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|startofprev|>",
    "<|notimestamps|>",
    "<|transcribe|>",
    "<|translate|>",
)
_HEAD_DIM = 64
"""Of every Whisper; the file tells the number of heads by it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the file."""

    shape: tuple[int, ...]
    dtype: int
    """The format's own code."""
    start: int
    """First byte of its data."""
    nbytes: int


def is_ctranslate2(folder: Path) -> bool:
    """Tell whether a folder holds a CTranslate2 model."""
    path = folder / FILE_NAME
    if not path.is_file() or not (folder / "config.json").is_file():
        return False
    with path.open("rb") as file:
        head = file.read(8)
    return len(head) == 8 and int.from_bytes(head[:4], "little") <= _VERSION


def read_configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config and generation config of a folder's model, in Hugging Face's spelling.

    Raises:
        WeightsError: If a file is missing, broken or truncated.
        UnsupportedError: If the model is no Whisper.
        OSError: If a file cannot be read.
    """
    path = folder / FILE_NAME
    tokens = _special_tokens(folder / "tokenizer.json")
    config = _config(path, read_entries(path)) | _token_ids(folder, tokens)
    return config, _generation_config(config, _read_json(folder / "config.json"), tokens)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise WeightsError(f"{path.parent} has no {path.name}") from None
    except ValueError as error:
        raise WeightsError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class _Reader:
    """Reads the fields of one file in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0)
        self.at = 0

    def number(self, code: str) -> int:
        size = struct.calcsize("<" + code)
        found: int = struct.unpack("<" + code, self._take(size, "a number"))[0]
        return found

    def text(self) -> str:
        # The length counts the zero byte at the end.
        return self._take(self.number("H"), "a name")[:-1].decode("utf-8", "replace")

    def skip(self, count: int, what: str) -> int:
        start, self.at = self.at, self.at + count
        if self.at > len(self._bytes):
            raise WeightsError(
                f"{self._path}: truncated: {what} ends at byte {self.at}, the file has "
                f"{len(self._bytes)}"
            )
        return start

    def _take(self, count: int, what: str) -> bytes:
        start = self.skip(count, what)
        return self._bytes[start : self.at].tobytes()


def read_entries(path: Path) -> dict[str, Entry]:
    """Return every tensor of a file by its name there, settings among them.

    Raises:
        WeightsError: If the file is broken or truncated; names the tensor.
        UnsupportedError: If it is of another version, or no Whisper.
        OSError: If it cannot be read.
    """
    reader = _Reader(path)
    version, spec, _ = reader.number("I"), reader.text(), reader.number("I")
    if spec != _SPEC:
        raise UnsupportedError(f"{path}: CTranslate2 models of kind {spec!r} are not supported")
    if version != _VERSION:
        raise UnsupportedError(
            f"{path}: version {version} of the CTranslate2 format is not supported, {_VERSION} is"
        )
    entries = {}
    for _ in range(reader.number("I")):
        name, rank = reader.text(), reader.number("B")
        shape = tuple(reader.number("I") for _ in range(rank))
        dtype, nbytes = reader.number("B"), reader.number("I")
        start = reader.skip(nbytes, f"tensor {name!r}")
        size = 2 if dtype == BFLOAT16 else np.dtype(DTYPES.get(dtype, np.int8)).itemsize
        if nbytes != prod(shape) * size:
            raise WeightsError(
                f"{path}: tensor {name!r} of shape {list(shape)} takes {prod(shape) * size} bytes, "
                f"the file gives it {nbytes}"
            )
        entries[name] = Entry(shape, dtype, start, nbytes)
    return entries


def _config(path: Path, entries: dict[str, Entry]) -> dict[str, Any]:
    """Return what shapes tell of the model."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in entries:
            raise WeightsError(f"{path}: tensor {name!r} is missing")
        return entries[name].shape

    def num_layers(side: str) -> int:
        own = (name for name in entries if name.startswith(f"{side}/layer_"))
        return sum(name.endswith("/ffn/linear_0/weight") for name in own)

    vocab_size, width = shape("decoder/embeddings/weight")
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": vocab_size,
        "d_model": width,
        "num_mel_bins": shape("encoder/conv1/weight")[1],
        "max_source_positions": shape("encoder/position_encodings/encodings")[0],
        "max_target_positions": shape("decoder/position_encodings/encodings")[0],
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
    }
    for side in ("encoder", "decoder"):
        config |= {
            f"{side}_layers": num_layers(side),
            f"{side}_attention_heads": width // _HEAD_DIM,
            f"{side}_ffn_dim": shape(f"{side}/layer_0/ffn/linear_0/weight")[0],
        }
    return config


def _special_tokens(path: Path) -> dict[str, int]:
    """Return the ids of a tokenizer's added tokens, by their text."""
    try:
        added = _read_json(path)["added_tokens"]
        return {str(token["content"]): int(token["id"]) for token in added}
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{path}: its added_tokens cannot be read: {error!r}") from error


def _token_ids(folder: Path, tokens: dict[str, int]) -> dict[str, int]:
    missing = [token for token in _NEEDED_TOKENS if token not in tokens]
    if missing:
        raise WeightsError(f"{folder}/tokenizer.json has no token {missing[0]!r}")
    end = tokens["<|endoftext|>"]
    return {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": tokens["<|startoftranscript|>"],
    }


def _generation_config(
    config: dict[str, Any], own: dict[str, Any], tokens: dict[str, int]
) -> dict[str, Any]:
    """Return what Hugging Face's generation_config.json of the same model has."""
    is_multilingual = config["vocab_size"] >= 51_865
    found = {
        key: config[key]
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    }
    found |= {
        "suppress_tokens": [n for n in own.get("suppress_ids") or () if n >= 0],
        "begin_suppress_tokens": list(own.get("suppress_ids_begin") or ()),
        "alignment_heads": own.get("alignment_heads"),
        "is_multilingual": is_multilingual,
        "no_timestamps_token_id": tokens["<|notimestamps|>"],
        "prev_sot_token_id": tokens["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "max_length": config["max_target_positions"],
        "return_timestamps": False,
    }
    if is_multilingual:
        languages = set(own.get("lang_ids") or ())
        found["lang_to_id"] = {text: n for text, n in tokens.items() if n in languages}
        found["task_to_id"] = {task: tokens[f"<|{task}|>"] for task in ("transcribe", "translate")}
    return found
