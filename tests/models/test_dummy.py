"""Drawn weights follow from names and seed, and need no file but a config."""

import json
from pathlib import Path

import pytest
import torch

from mstar.errors import ConfigError, WeightsError
from mstar.models import load_model
from mstar.models.dummy import DummyCheckpoint, open_dummy
from mstar.models.toy import toy_model
from mstar.models.whisper.model import WhisperModel
from tests.models import whisper_folder

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model, dtype = load_model(str(tmp_path), load_format="dummy", dtype="float32")
    assert dtype == "float32"
    assert model.vocab_size == 48
    assert model.root_constants is not None
    other, _ = load_model(str(tmp_path), load_format="dummy", dtype="float32")
    assert other.root_constants == model.root_constants


def test_ids_come_from_a_generation_config_where_there_is_one(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    whisper_folder.save(checkpoint)
    folder = tmp_path / "configs"
    folder.mkdir()
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((checkpoint / name).read_bytes())
    model, _ = load_model(str(folder), load_format="dummy", dtype="float32")
    known, _ = load_model(str(checkpoint), dtype="float32")
    assert isinstance(model, WhisperModel)
    assert isinstance(known, WhisperModel)
    assert model.tokens == known.tokens


def test_without_a_config_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"config\.json"):
        load_model(str(tmp_path), load_format="dummy")


def test_unknown_load_format_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'random'.*auto, dummy"):
        load_model(str(tmp_path), load_format="random")


def test_tensors_differ_by_name_and_seed_and_keep_the_scale(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    first = open_dummy(str(tmp_path), torch.device("cpu"))
    again = DummyCheckpoint(tmp_path, first.config)
    other = DummyCheckpoint(tmp_path, first.config, seed=1)
    shape = (400, 100)
    drawn = first.tensor("a.weight", shape)
    assert torch.equal(drawn, again.tensor("a.weight", shape))
    assert not torch.equal(drawn, first.tensor("b.weight", shape))
    assert not torch.equal(drawn, other.tensor("a.weight", shape))
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    # A product with a normalised vector has twice its size, an embedding is of size 1.
    assert drawn.std().item() == pytest.approx(0.2, rel=0.02)
    assert first.tensor("embed", shape).std().item() == pytest.approx(1, rel=0.02)
    assert first.tensor("norm", (1000,)).mean().item() == pytest.approx(1, abs=0.02)


def test_the_toy_depends_on_its_seed() -> None:
    assert toy_model(0).root_constants != toy_model(1).root_constants
