import hashlib
import json
import multiprocessing
import multiprocessing.synchronize
import os
import threading
import time
from pathlib import Path

import pytest

from mstar.models.files import (
    atomic_write,
    default_cache_dir,
    digest_in_background,
    file_sha256,
)


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


def test_a_file_that_took_anothers_place_is_read_again(tmp_path: Path) -> None:
    """Weights replaced at the same path, size and mtime once went on under the old name."""
    file, cache = tmp_path / "a", tmp_path / "cache"
    file.write_bytes(b"one")
    before = file.stat()
    file_sha256(file, cache)
    other = tmp_path / "b"
    other.write_bytes(b"two")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, file)
    assert file_sha256(file, cache) == hashlib.sha256(b"two").hexdigest()


def test_a_renamed_or_linked_file_has_the_same_digest(tmp_path: Path) -> None:
    file, cache = tmp_path / "a", tmp_path / "cache"
    file.write_bytes(b"weights")
    expected = file_sha256(file, cache)
    (tmp_path / "link").symlink_to(file)
    assert file_sha256(tmp_path / "link", cache) == expected
    file.rename(tmp_path / "renamed")
    assert file_sha256(tmp_path / "renamed", cache) == expected
    # What a link leads to is what is remembered: one record for the file, one for its new name.
    assert len(list((cache / "sha256").iterdir())) == 2


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = tmp_path / "a", tmp_path / "cache"
    file.write_bytes(b"one")
    whole = hashlib.file_digest

    def slowly(opened: object, name: str) -> object:
        digest = whole(opened, name)  # type: ignore[arg-type]
        file.write_bytes(b"longer")
        return digest

    monkeypatch.setattr(hashlib, "file_digest", slowly)
    file_sha256(file, cache)
    monkeypatch.setattr(hashlib, "file_digest", whole)
    assert file_sha256(file, cache) == hashlib.sha256(b"longer").hexdigest()


def test_of_several_that_want_a_digest_at_once_one_reads_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = tmp_path / "a", tmp_path / "cache"
    file.write_bytes(b"weights")
    reads: list[int] = []
    whole = hashlib.file_digest

    def counted(opened: object, name: str) -> object:
        reads.append(1)
        time.sleep(0.05)
        return whole(opened, name)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", counted)
    found = [future.result(10) for future in digest_in_background([file] * 4, cache)]
    assert set(found) == {hashlib.sha256(b"weights").hexdigest()}
    assert len(reads) == 1


def _hold(lock: str, is_held: "multiprocessing.synchronize.Event") -> None:
    import fcntl  # noqa: PLC0415 - in the child

    handle = os.open(lock, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    is_held.set()
    time.sleep(60)


def test_the_lock_of_a_killed_process_holds_nobody_up(tmp_path: Path) -> None:
    file, cache = tmp_path / "a", tmp_path / "cache"
    file.write_bytes(b"one")
    file_sha256(file, cache)
    (lock,) = (cache / "locks").iterdir()
    file.write_bytes(b"two!")
    context = multiprocessing.get_context("spawn")
    is_held = context.Event()
    child = context.Process(target=_hold, args=(str(lock), is_held))
    child.start()
    try:
        assert is_held.wait(30)
        (waiting,) = digest_in_background([file], cache)
        time.sleep(0.1)
        assert not waiting.done()
        child.kill()
        assert waiting.result(10) == hashlib.sha256(b"two!").hexdigest()
    finally:
        child.kill()
        child.join()


def test_background_digests_keep_their_order_and_their_errors(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode())
    paths = [tmp_path / name for name in ("c", "missing", "a", "b")]
    before = threading.active_count()
    futures = digest_in_background(paths, tmp_path / "cache")
    assert [futures[i].result(10) for i in (0, 2, 3)] == [
        hashlib.sha256(name).hexdigest() for name in (b"c", b"a", b"b")
    ]
    assert isinstance(futures[1].exception(10), FileNotFoundError)
    assert digest_in_background([]) == []
    for _ in range(100):
        if threading.active_count() <= before:
            break
        time.sleep(0.05)
    assert threading.active_count() <= before


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
