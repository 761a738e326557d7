"""The tensors of a CTranslate2 Whisper by Hugging Face's names.

Query, key and value projections are stored as one matrix; keys have no bias of their own.
"""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mstar.errors import UnsupportedError, WeightsError
from mstar.models.ctranslate2_file import BFLOAT16, DTYPES, FILE_NAME, Entry, read_entries
from mstar.models.weights import StoredTensor


def ctranslate2_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder by name, not read yet.

    Raises:
        WeightsError: If the file is broken or truncated.
        UnsupportedError: If the model is no Whisper, or its weights are quantised.
        OSError: If the file cannot be read.
    """
    path = folder / FILE_NAME
    return {tensor.name: tensor for tensor in _tensors(path, read_entries(path))}


def _tensors(path: Path, entries: Mapping[str, Entry]) -> Iterator[StoredTensor]:
    """Yield every weight under Hugging Face's name; all that is left over is a setting."""
    quantised = [name for name in entries if name.endswith("_scale") and name[:-6] in entries]
    if quantised:
        raise UnsupportedError(
            f"{path}: its weights are quantised ({quantised[0][:-6]!r} and others); convert the "
            "model with float16 or float32 weights"
        )
    for name, entry in entries.items():
        if not entry.shape:
            continue
        for own, first, stop in _names(name, entry.shape[0]):
            yield _part(path, own, entry, first, stop)


_TOP = {
    "position_encodings/encodings": "embed_positions.weight",
    "embeddings/weight": "embed_tokens.weight",
    "layer_norm/gamma": "layer_norm.weight",
    "layer_norm/beta": "layer_norm.bias",
}
_BLOCKS = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
_MERGED = {
    "self_attention/linear_0": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "attention/linear_1": ("encoder_attn", ("k_proj", "v_proj")),
}
_LEAVES = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}


def _names(name: str, num_rows: int) -> Iterator[tuple[str, int, int]]:
    """Yield what a stored tensor is called, and which of its rows go by that name."""
    side, _, rest = name.partition("/")
    prefix = f"model.{side}."
    if rest in _TOP:
        yield prefix + _TOP[rest], 0, num_rows
        return
    if rest.startswith("conv"):
        yield prefix + rest.replace("/", "."), 0, num_rows
        return
    layer, _, inner = rest.partition("/")
    block, _, leaf = inner.rpartition("/")
    prefix += f"layers.{layer.removeprefix('layer_')}."
    if block in _MERGED:
        parent, parts = _MERGED[block]
        for index, part in enumerate(parts):
            # Keys have no bias; the merged one holds zeros there.
            if (part, leaf) != ("k_proj", "bias"):
                width = num_rows // len(parts)
                yield f"{prefix}{parent}.{part}.{leaf}", index * width, (index + 1) * width
    elif block in _BLOCKS and leaf in _LEAVES:
        yield f"{prefix}{_BLOCKS[block]}.{_LEAVES[leaf]}", 0, num_rows


def _part(path: Path, name: str, entry: Entry, first: int, stop: int) -> StoredTensor:
    row_nbytes = entry.nbytes // entry.shape[0]
    shape = (stop - first, *entry.shape[1:])
    start = entry.start + first * row_nbytes
    is_bfloat16 = entry.dtype == BFLOAT16
    dtype = np.dtype(np.int16 if is_bfloat16 else DTYPES[entry.dtype])

    def load() -> Tensor:
        count = prod(shape)
        values = np.fromfile(path, dtype, count, offset=start)
        if len(values) != count:
            raise WeightsError(f"{path}: truncated inside tensor {name!r}")
        tensor = torch.from_numpy(values).view(shape)
        return tensor.view(torch.bfloat16) if is_bfloat16 else tensor

    return StoredTensor(
        name=name, shape=shape, nbytes=(stop - first) * row_nbytes, file=path, load=load
    )
