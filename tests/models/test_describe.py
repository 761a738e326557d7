"""What is said of a model without its weights is what the loaded one says."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from mstar.engine.engine import EngineCore
from mstar.engine.resources.base import Deployment
from mstar.engine.root import root_constants
from mstar.errors import ConfigError, UnsupportedError
from mstar.models import describe_model, load_model
from mstar.models.checkpoint import Checkpoint, open_checkpoint
from tests.server.processes import write_tiny_model

WriteGGUF = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(path)
    return path


def _check(name: str, dtype: str = "auto") -> None:
    model, loaded_dtype = load_model(name, dtype=dtype)
    described, said_dtype = describe_model(name, dtype=dtype)
    assert said_dtype == loaded_dtype
    assert described.root_constants == model.root_constants is not None
    assert described.graph == model.graph
    assert list(described.specs) == list(model.specs)
    assert (described.vocab_size, described.max_model_len) == (
        model.vocab_size,
        model.max_model_len,
    )
    numbers = Deployment(dtype=loaded_dtype, num_pages=32, max_num_seqs=2, page_size=8)
    named = root_constants(described.root_constants, described.specs, numbers)
    engine = EngineCore(model, numbers)
    assert engine.root == named.root is not None
    assert engine.root_constants == named.constants


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_folder_is_described_as_it_is_loaded(folder: Path, dtype: str) -> None:
    _check(str(folder), dtype)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_gguf_file_is_described_as_it_is_loaded(write_gguf: WriteGGUF, architecture: str) -> None:
    _check(str(write_gguf(architecture)))


def test_describing_reads_no_tensor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "tensor", refuse)
    described, _ = describe_model(str(folder))
    assert described.root_constants is not None


def test_what_cannot_be_loaded_cannot_be_described_either(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="'int3'"):
        describe_model(str(folder), dtype="int3")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLN"]}))
    with pytest.raises(UnsupportedError, match="nearest that is: LlamaForCausalLM"):
        describe_model(str(tmp_path), load_format="dummy")


def test_the_content_is_named_while_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naming that waited for the last tensor would add its whole time to the start."""
    order: list[str] = []
    begin, read = Checkpoint.begin_fingerprint, Checkpoint.tensor

    def begin_noted(self: Checkpoint, cache_dir: Path | None = None) -> None:
        order.append("begin")
        begin(self, cache_dir)

    def read_noted(self: Checkpoint, *args: object) -> object:
        order.append("read")
        return read(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Checkpoint, "begin_fingerprint", begin_noted)
    monkeypatch.setattr(Checkpoint, "tensor", read_noted)
    load_model(str(folder))
    assert order[0] == "begin"
    assert "read" in order


def test_a_file_that_vanished_has_no_name_and_the_model_still_runs_without_reuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_model(tmp_path)
    monkeypatch.setattr(
        "mstar.models.checkpoint.digest_in_background",
        lambda paths, cache: _digests_of_missing(tmp_path),
    )
    model, dtype = load_model(str(tmp_path))
    assert model.root_constants is None
    with caplog.at_level(logging.WARNING):
        engine = EngineCore(model, Deployment(dtype=dtype, num_pages=16, max_num_seqs=2))
    assert engine.root is None
    assert sum("reused" in record.getMessage() for record in caplog.records) == 1


def _digests_of_missing(folder: Path) -> object:
    from mstar.models.files import digest_in_background  # noqa: PLC0415 - past the patched name

    return digest_in_background([folder / "vanished"], folder / "cache")


def test_renamed_weights_keep_their_name_and_changed_ones_do_not(tmp_path: Path) -> None:
    """A served name says nothing: other weights under the old name once met the old pages."""
    names = []
    for sub in ("a", "b", "c"):
        (tmp_path / sub).mkdir()
        write_tiny_model(tmp_path / sub)
    weights = tmp_path / "c" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    for sub in ("a", "b", "c"):
        names.append(open_checkpoint(tmp_path / sub).fingerprint(tmp_path / "cache"))
    assert names[0] == names[1] != names[2]
