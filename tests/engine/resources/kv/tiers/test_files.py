import os
import struct
import zlib
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mstar.engine.resources.kv.tiers.base import Name
from mstar.engine.resources.kv.tiers.files import PageFiles, remove_put_away

ROOT = sha256(b"root").digest()
KEY, END = sha256(b"key").digest(), sha256(b"end").digest()
NAMES = [Name(KEY, 16), Name(END, 5)]
IMAGE = np.arange(200, dtype=np.uint8)


@pytest.fixture
def files(tmp_path: Path) -> PageFiles:
    made = PageFiles(tmp_path / "kv", ROOT, len(IMAGE))
    made.prepare()
    return made


def has(files: PageFiles, key: bytes, num_slots: int) -> bool:
    """Return whether ``key`` can be read; what is read must be right."""
    image = np.zeros_like(IMAGE)
    found = files.read(key, image)
    if found is None:
        return False
    assert (image == IMAGE).all()
    return found == num_slots


def store(files: PageFiles) -> None:
    _, temps = files.write(NAMES, IMAGE, 10**18)
    files.publish(temps, NAMES)


def test_file_has_the_documented_bytes(files: PageFiles) -> None:
    store(files)
    fields = b"mstar-kv" + struct.pack("<IIQ", 1, 2, 200) + ROOT
    names = KEY + struct.pack("<I", 16) + END + struct.pack("<I", 5)
    checksum = struct.pack("<I", zlib.crc32(fields + names + IMAGE.tobytes()))
    path = files.folder / ROOT.hex() / KEY.hex()[:2] / f"{KEY.hex()}.kv"
    assert path.read_bytes() == fields + checksum + names + IMAGE.tobytes()
    assert path.stat().st_size == PageFiles.nbytes(200, 2)


def test_every_name_is_a_link_to_one_file(files: PageFiles) -> None:
    store(files)
    first, second = (os.stat(files.path(key)) for key in (KEY, END))
    assert first.st_ino == second.st_ino
    assert all(has(files, key, num_slots) for key, num_slots in NAMES)
    own, others = files.scan()
    assert [sorted(page.keys) for page in own.values()] == [sorted([KEY, END])]
    assert next(iter(own.values())).used_ns == 10**18
    assert others == []


def test_every_name_is_a_copy_where_links_are_not_allowed(
    files: PageFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(1, "links are not allowed")

    monkeypatch.setattr(os, "link", refuse)
    store(files)
    assert os.stat(files.path(KEY)).st_ino != os.stat(files.path(END)).st_ino
    assert all(has(files, key, num_slots) for key, num_slots in NAMES)


def test_only_the_user_may_read_what_is_stored(files: PageFiles) -> None:
    store(files)
    for folder, _, names in os.walk(files.folder):
        assert os.stat(folder).st_mode & 0o777 == 0o700
        for name in names:
            assert os.stat(f"{folder}/{name}").st_mode & 0o777 == 0o600


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_changed_bit_or_length_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    files = PageFiles(tmp_path_factory.getbasetemp() / "bits", ROOT, len(IMAGE))
    files.prepare()
    store(files)
    path = Path(files.path(KEY))
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), "cut"):
        del content[data.draw(st.integers(0, len(content) - 1), "length") :]
    elif data.draw(st.booleans(), "longer"):
        content += data.draw(st.binary(min_size=1, max_size=300), "more")
    else:
        bit = data.draw(st.integers(0, 8 * len(content) - 1), "bit")
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    assert files.read(KEY, np.zeros_like(IMAGE)) is None


def test_file_under_the_name_of_another_key_is_broken(files: PageFiles) -> None:
    store(files)
    other = sha256(b"other").digest()
    os.makedirs(os.path.dirname(files.path(other)), exist_ok=True)
    os.replace(files.path(KEY), files.path(other))
    assert files.read(other, np.zeros_like(IMAGE)) is None


def test_temporary_files_go_only_when_their_writer_must_be_gone(
    files: PageFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, temps = files.write(NAMES, IMAGE, 10**18)
    assert files.scan() == ({}, [])
    assert all(os.path.exists(temp) for temp in temps)
    monkeypatch.setattr("mstar.engine.resources.kv.tiers.files._STALE_S", -1.0)
    files.scan()
    assert not any(os.path.exists(temp) for temp in temps)


def test_files_that_are_not_ours_are_neither_seen_nor_touched(files: PageFiles) -> None:
    store(files)
    root = files.folder / ROOT.hex()
    strangers = [
        files.folder / "readme.kv",
        files.folder / "old" / "00" / f"{KEY.hex()}.kv",
        root / f"{KEY.hex()}.kv",
        root / KEY.hex()[:2] / "notes.kv",
        root / KEY.hex()[:2] / f"{KEY.hex()}.txt",
        root / "zz" / f"{KEY.hex()}.kv",
    ]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    linked = root / END.hex()[:2] / "linked.kv"
    linked.symlink_to(strangers[0])
    own, others = files.scan()
    assert [sorted(page.keys) for page in own.values()] == [sorted([KEY, END])]
    assert others == []
    away, count = files.put_away()
    assert away is not None
    assert count == 1
    assert files.find_put_away() == [away]
    remove_put_away(away)
    left = [path for path in files.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sorted(path.name for path in left) == sorted(path.name for path in strangers)
    assert all(path.read_text() == "mine" for path in left)


def test_empty_folders_of_other_roots_go(files: PageFiles) -> None:
    other = PageFiles(files.folder, sha256(b"old root").digest(), len(IMAGE))
    other.prepare()
    store(other)
    own, others = files.scan()
    assert own == {}
    assert [sorted(page.keys) for page in others] == [sorted([KEY, END])]
    os.unlink(other.path(KEY))
    os.unlink(other.path(END))
    files.scan()
    assert os.listdir(files.folder) == [ROOT.hex()]
    store(other)
    assert has(other, KEY, 16)


def test_reset_takes_all_pages_out_of_sight_in_one_step(files: PageFiles) -> None:
    store(files)
    _, temps = files.write([Name(END, 5)], IMAGE, 10**18)
    away, count = files.put_away()
    assert count == 1
    with pytest.raises(FileNotFoundError):
        files.read(KEY, np.zeros_like(IMAGE))
    with pytest.raises(FileNotFoundError):
        files.publish(temps, [Name(END, 5)])
    store(files)
    assert away is not None
    remove_put_away(away)
    assert os.listdir(files.folder) == [ROOT.hex()]
    assert has(files, END, 5)
