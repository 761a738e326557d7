"""CTranslate2 files written by hand, field by field, as the format has them."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mstar.errors import UnsupportedError, WeightsError
from mstar.models.checkpoint import open_checkpoint
from mstar.models.ctranslate2_file import is_ctranslate2

WIDTH, FFN, VOCAB, MELS, SOURCE, TARGET = 64, 96, 30, 8, 10, 12
CODES = {np.dtype(np.float32): 0, np.dtype(np.int8): 1, np.dtype(np.float16): 4}
SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|notimestamps|>",
)


def tensors() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "encoder/conv1/weight": (WIDTH, MELS, 3),
        "encoder/conv1/bias": (WIDTH,),
        "encoder/conv2/weight": (WIDTH, WIDTH, 3),
        "encoder/conv2/bias": (WIDTH,),
        "encoder/position_encodings/encodings": (SOURCE, WIDTH),
        "decoder/position_encodings/encodings": (TARGET, WIDTH),
        "decoder/embeddings/weight": (VOCAB, WIDTH),
    }
    for side in ("encoder", "decoder"):
        prefix = f"{side}/layer_0/"
        norms = [f"{side}/layer_norm", prefix + "self_attention/layer_norm"]
        linears = {
            "self_attention/linear_0": (3 * WIDTH, WIDTH),
            "self_attention/linear_1": (WIDTH, WIDTH),
            "ffn/linear_0": (FFN, WIDTH),
            "ffn/linear_1": (WIDTH, FFN),
        }
        if side == "decoder":
            norms.append(prefix + "attention/layer_norm")
            for index, rows in enumerate((WIDTH, 2 * WIDTH, WIDTH)):
                linears[f"attention/linear_{index}"] = (rows, WIDTH)
        for norm in (*norms, prefix + "ffn/layer_norm"):
            shapes |= {f"{norm}/gamma": (WIDTH,), f"{norm}/beta": (WIDTH,)}
        for name, shape in linears.items():
            shapes |= {f"{prefix}{name}/weight": shape, f"{prefix}{name}/bias": shape[:1]}
    return {
        name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()
    } | {"decoder/num_heads": np.array(1, np.int8)}


def text(value: str) -> bytes:
    data = value.encode() + b"\0"
    return struct.pack("<H", len(data)) + data


def write(
    folder: Path,
    stored: dict[str, np.ndarray[Any, Any]],
    *,
    version: int = 6,
    spec: str = "WhisperSpec",
) -> Path:
    body = struct.pack("<I", version) + text(spec) + struct.pack("<II", 3, len(stored))
    for name, values in stored.items():
        body += text(name) + struct.pack("<B", values.ndim)
        body += b"".join(struct.pack("<I", size) for size in values.shape)
        body += struct.pack("<BI", CODES[values.dtype], values.nbytes) + values.tobytes()
    body += struct.pack("<I", 1)
    body += text("decoder/projection/weight") + text("decoder/embeddings/weight")
    (folder / "model.bin").write_bytes(body)
    (folder / "config.json").write_text(
        json.dumps({"suppress_ids": [1, 2], "suppress_ids_begin": [3], "lang_ids": [22]})
    )
    added = [{"content": token, "id": 20 + n} for n, token in enumerate(SPECIAL)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return folder


def test_tensors_have_the_names_and_values_of_hugging_face(tmp_path: Path) -> None:
    stored = tensors()
    checkpoint = open_checkpoint(write(tmp_path, stored))
    merged = torch.from_numpy(stored["decoder/layer_0/self_attention/linear_0/weight"])
    for index, part in enumerate("qkv"):
        own = checkpoint.tensor(f"model.decoder.layers.0.self_attn.{part}_proj.weight")
        assert torch.equal(own, merged[index * WIDTH : (index + 1) * WIDTH])
    values = torch.from_numpy(stored["decoder/layer_0/attention/linear_1/bias"])[WIDTH:]
    name = "model.decoder.layers.0.encoder_attn.v_proj.bias"
    assert torch.equal(checkpoint.tensor(name, (WIDTH,)), values)
    assert "model.decoder.layers.0.encoder_attn.k_proj.bias" not in checkpoint
    assert checkpoint.architecture == "WhisperForConditionalGeneration"
    assert checkpoint.eos_token_ids == (20,)
    assert checkpoint.config["encoder_ffn_dim"] == FFN
    assert checkpoint.config["decoder_layers"] == 1
    assert checkpoint.generation_config["suppress_tokens"] == [1, 2]
    assert checkpoint.fingerprint() is not None


def test_other_folders_are_left_to_others(tmp_path: Path) -> None:
    assert not is_ctranslate2(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.bin").write_bytes(b"PK\3\4 and so on")
    assert not is_ctranslate2(tmp_path)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.999])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, kept: float) -> None:
    path = write(tmp_path, tensors()) / "model.bin"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(WeightsError, match=r"truncated|missing"):
        open_checkpoint(tmp_path)


def test_what_is_not_built_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, tensors(), spec="TransformerSpec")
    with pytest.raises(UnsupportedError, match="TransformerSpec"):
        open_checkpoint(tmp_path)
    write(tmp_path, tensors(), version=5)
    with pytest.raises(UnsupportedError, match="version 5"):
        open_checkpoint(tmp_path)
    name = "encoder/conv1/weight"
    packed = tensors()
    packed[name] = np.zeros((WIDTH, MELS, 3), np.int8)
    packed[f"{name}_scale"] = np.ones(1, np.float32)
    write(tmp_path, packed)
    with pytest.raises(UnsupportedError, match="quantised"):
        open_checkpoint(tmp_path)


def test_a_tokenizer_without_the_tokens_is_refused(tmp_path: Path) -> None:
    write(tmp_path, tensors())
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": []}')
    with pytest.raises(WeightsError, match="endoftext"):
        open_checkpoint(tmp_path)
