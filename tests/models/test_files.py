import hashlib
import json
import os
from pathlib import Path

import pytest

from mstar.models.files import atomic_write, default_cache_dir, file_sha256


def test_cache_dir_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSTAR_CACHE", "/elsewhere")
    assert default_cache_dir() == Path("/elsewhere")
    monkeypatch.setenv("MSTAR_CACHE", "")
    assert default_cache_dir() == Path.home() / ".cache" / "mstar"


def test_digest_is_of_the_bytes_and_remembered(tmp_path: Path) -> None:
    file, cache = tmp_path / "a", tmp_path / "cache"
    file.write_bytes(b"weights")
    expected = hashlib.sha256(b"weights").hexdigest()
    assert file_sha256(file, cache) == expected
    (record,) = (cache / "sha256").iterdir()
    known = json.loads(record.read_bytes())
    assert known["sha256"] == expected
    # A planted answer comes back: the file is not read again while it stays as it is.
    record.write_text(json.dumps(known | {"sha256": "ab" * 32}))
    assert file_sha256(file, cache) == "ab" * 32


def test_changed_file_is_read_again_even_with_equal_size_and_mtime(tmp_path: Path) -> None:
    file, cache = tmp_path / "a", tmp_path / "cache"
    file.write_bytes(b"one")
    before = file.stat()
    assert file_sha256(file, cache) == hashlib.sha256(b"one").hexdigest()
    file.write_bytes(b"two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file_sha256(file, cache) == hashlib.sha256(b"two").hexdigest()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"identity": 1, "sha256": 2}'])
def test_damaged_record_is_made_again(tmp_path: Path, damage: bytes) -> None:
    file, cache = tmp_path / "a", tmp_path / "cache"
    file.write_bytes(b"x")
    expected = file_sha256(file, cache)
    (record,) = (cache / "sha256").iterdir()
    record.write_bytes(damage)
    assert file_sha256(file, cache) == expected
    assert json.loads(record.read_bytes())["sha256"] == expected


def test_digest_needs_no_cache_that_can_be_written(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"x")
    assert file_sha256(file, file / "not-a-folder") == hashlib.sha256(b"x").hexdigest()


def test_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    target = tmp_path / "t"
    target.write_bytes(b"old")

    def fail() -> None:
        with atomic_write(target) as out:
            out.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]
