from pathlib import Path

import pytest

from mstar.errors import WeightsError
from mstar.models.checkpoint import open_checkpoint
from mstar.models.locate import BUILTINS, resolve
from mstar.models.speech.voice_files import (
    KOKORO,
    KOKORO_FILES,
    PIPER,
    piper_file,
    voice_architecture,
)
from tests.models.speaking import piper_path


def test_a_voice_is_known_by_its_files(tmp_path: Path) -> None:
    assert voice_architecture(tmp_path) is None
    assert voice_architecture(tmp_path / "none.onnx") is None
    graph = tmp_path / "ann.onnx"
    graph.touch()
    assert voice_architecture(graph) == PIPER
    # A folder with a graph of something else is no voice.
    assert voice_architecture(tmp_path) is None
    (tmp_path / "ann.onnx.json").touch()
    assert voice_architecture(tmp_path) == PIPER
    for name in KOKORO_FILES:
        (tmp_path / name).touch()
    assert voice_architecture(tmp_path) == KOKORO
    (tmp_path / "config.json").touch()
    assert voice_architecture(tmp_path) is None


def test_a_folder_of_several_voices_asks_for_one(tmp_path: Path) -> None:
    for name in ("ann", "bob"):
        (tmp_path / f"{name}.onnx").touch()
        (tmp_path / f"{name}.onnx.json").touch()
    assert piper_file(tmp_path / "bob.onnx") == tmp_path / "bob.onnx"
    with pytest.raises(WeightsError, match=r"this has ann\.onnx, bob\.onnx; name the file"):
        piper_file(tmp_path)
    (tmp_path / "bob.onnx.json").unlink()
    assert piper_file(tmp_path) == tmp_path / "ann.onnx"


def test_the_packaged_voice_opens_by_name_and_by_folder() -> None:
    path = piper_path()
    assert path.is_file()
    for alias in BUILTINS["piper"].aliases:
        assert resolve(alias) == path
    for way in ("piper", str(path), str(path.parent)):
        checkpoint = open_checkpoint(way)
        assert checkpoint.architecture == PIPER
        assert checkpoint.own_dtype == "float32"
        assert piper_file(checkpoint.path) == path
