"""PageFiles: page images as files of one folder; knows no capacity and no order of use.

::

    <folder>/<root hex>/<first 2 hex of key>/<key hex>.kv     one file, a hard link for each name
    file = head + names + image                               numbers little-endian
    head = "mstar-kv" + u32(version) + u32(names) + u64(bytes of image) + root + u32(checksum)
    name = key + u32(valid slots)

The checksum is the CRC-32 of everything else. It guards against torn and rotten files, for which 32
bits are plenty; it runs at twice the speed of SHA-256 where the processor has instructions for the
latter. Since it finds torn files, a write is not synced: power loss costs pages, never their truth.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mstar.engine.resources.kv.tiers.base import KEY_NBYTES, Image, Name

_MAGIC = b"mstar-kv"
_VERSION = 1
_FIELDS = struct.Struct(f"<8sIIQ{KEY_NBYTES}s")
_CHECKSUM = struct.Struct("<I")
_NAME = struct.Struct(f"<{KEY_NBYTES}sI")
_HEAD_NBYTES = _FIELDS.size + _CHECKSUM.size
_HEX = re.compile(rf"[0-9a-f]{{{2 * KEY_NBYTES}}}")
_SUFFIX = ".kv"
_TEMP_SUFFIX = ".tmp"
_AWAY_SUFFIX = ".away"
_AWAY = re.compile(rf"{_HEX.pattern}\.[0-9a-f]{{16}}{re.escape(_AWAY_SUFFIX)}")
# A write takes milliseconds: a temporary file this old, in seconds, has lost its writer. Age also
# tells where process ids do not, between containers and machines that share a folder.
_STALE_S = 60.0


@dataclass(slots=True)
class Found:
    """A page on the disk, by all the names that lead to it."""

    nbytes: int
    """Its size, counted once however many names it has."""
    used_ns: int
    """When it was last used, in nanoseconds since the epoch."""
    paths: list[str] = field(default_factory=list)
    """Its files."""
    keys: list[bytes] = field(default_factory=list)
    """The keys of ``paths``, in the same order."""


class PageFiles:
    """The page files of one root, and what else of ours is in the folder.

    Every method but ``scan`` may raise OSError.

    Args:
        folder: Where the roots' folders are.
        root: What the keys are built on, 32 bytes.
        page_nbytes: Size of every image, in bytes.
    """

    def __init__(self, folder: Path, root: bytes, page_nbytes: int) -> None:
        assert len(root) == KEY_NBYTES, f"the root has {len(root)} bytes"
        self.folder = folder
        self.page_nbytes = page_nbytes
        self._root = root
        self._root_folder = f"{folder}/{root.hex()}"

    @staticmethod
    def nbytes(page_nbytes: int, num_names: int) -> int:
        """Return the size of a file, in bytes."""
        return _HEAD_NBYTES + num_names * _NAME.size + page_nbytes

    def path(self, key: bytes) -> str:
        """Return where the page of ``key`` is."""
        name = key.hex()
        return f"{self._root_folder}/{name[:2]}/{name}{_SUFFIX}"

    def _temp(self, key: bytes) -> str:
        return f"{self._root_folder}/{key.hex()[:2]}/{secrets.token_hex(8)}{_TEMP_SUFFIX}"

    def prepare(self) -> None:
        """Make the root's folder, and make sure that files can be written there."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        probe = self._temp(bytes(KEY_NBYTES))
        os.close(_create(probe))
        discard([probe])

    def stat(self, key: bytes) -> tuple[int, int]:
        """Return the inode and the size in bytes of the file of ``key``."""
        found = os.lstat(self.path(key))
        return found.st_ino, found.st_size

    def touch(self, key: bytes, used_ns: int) -> None:
        """Record a use, so that all processes that share the folder see it."""
        os.utime(self.path(key), ns=(used_ns, used_ns))

    def write(self, names: Sequence[Name], image: Image, used_ns: int) -> tuple[int, list[str]]:
        """Write a page into temporary files; ``publish`` makes them visible.

        Args:
            names: At least one; each gets a file, all of them one inode where links are allowed.
            image: ``[page_nbytes]``, uint8.
            used_ns: When it was last used, in nanoseconds since the epoch.

        Returns:
            The inode of the first file, and the file of each name.
        """
        fields = _FIELDS.pack(_MAGIC, _VERSION, len(names), len(image), self._root)
        listed = b"".join(_NAME.pack(*name) for name in names)
        checksum = _CHECKSUM.pack(_checksum(fields, listed, image))
        content = (fields + checksum + listed, image.data)
        temps: list[str] = []
        try:
            for key, _ in names:
                temp = self._temp(key)
                temps.append(temp)
                if temp == temps[0] or not _try_link(temps[0], temp):
                    _write_file(temp, content, used_ns)
            return os.lstat(temps[0]).st_ino, temps
        except OSError:
            discard(temps)
            raise

    def publish(self, temps: Sequence[str], names: Sequence[Name]) -> None:
        """Give written files their names, each in one step."""
        for temp, (key, _) in zip(temps, names, strict=True):
            os.replace(temp, self.path(key))

    def read(self, key: bytes, image: Image) -> int | None:
        """Fill ``image`` with the page of ``key``.

        Returns:
            The valid slots, or ``None`` if the file is broken and ``image`` is worth nothing.
        """
        # A pipe under a page's name must not make the reader wait for a writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        handle = os.open(self.path(key), flags)
        with open(handle, "rb", buffering=0) as file:
            nbytes = os.fstat(handle).st_size
            head = file.read(_HEAD_NBYTES)
            if len(head) < _HEAD_NBYTES:
                return None
            fields, checksum = head[: _FIELDS.size], head[_FIELDS.size :]
            magic, version, num_names, page_nbytes, root = _FIELDS.unpack(fields)
            if (magic, version, page_nbytes, root) != (
                _MAGIC,
                _VERSION,
                self.page_nbytes,
                self._root,
            ) or nbytes != self.nbytes(page_nbytes, num_names):
                return None
            listed = file.read(num_names * _NAME.size)
            if not _fill(file.fileno(), image) or len(listed) != num_names * _NAME.size:
                return None
        if _CHECKSUM.pack(_checksum(fields, listed, image)) != checksum:
            return None
        return dict(_NAME.iter_unpack(listed)).get(key)

    def scan(self) -> tuple[dict[int, Found], list[Found]]:
        """Return the pages of this root by inode, and those of other roots.

        Removes temporary files without a writer, and the empty folders of other roots.
        """
        own: dict[int, Found] = {}
        others: list[Found] = []
        for root in _list(str(self.folder)):
            if not _HEX.fullmatch(root.name):
                continue
            pages: dict[int, Found] = {}
            for shard in _list(root.path):
                _scan_shard(shard, pages)
                if not pages and root.path != self._root_folder:
                    _remove_folder(shard.path)
            if root.path == self._root_folder:
                own = pages
            else:
                others.extend(pages.values())
                if not pages:
                    _remove_folder(root.path)
        return own, others

    def put_away(self) -> tuple[str | None, int]:
        """Take all pages of this root out of sight in one step, for all processes.

        Returns:
            The folder that has them now, for ``remove_put_away``, and how many they are.
        """
        away = f"{self._root_folder}.{secrets.token_hex(8)}{_AWAY_SUFFIX}"
        try:
            os.rename(self._root_folder, away)
        except FileNotFoundError:
            return None, 0
        inodes = set()
        for shard in _list(away):
            # No more than names: an inode comes with them, a size would cost a call each.
            with contextlib.suppress(OSError), os.scandir(shard.path) as entries:
                inodes |= {entry.inode() for entry in entries if _key(entry.name, shard.name)}
        return away, len(inodes)

    def find_put_away(self) -> list[str]:
        """Return the folders of earlier resets whose files are still to be removed."""
        return [folder.path for folder in _list(str(self.folder)) if _AWAY.fullmatch(folder.name)]


def remove_put_away(away: str) -> None:
    """Remove our files from a folder that was put away, and the folder once it is empty."""
    for shard in _list(away):
        for name, path, _ in _files(shard.path):
            if _key(name, shard.name) is not None or name.endswith(_TEMP_SUFFIX):
                discard([path])
        _remove_folder(shard.path)
    _remove_folder(away)


def _scan_shard(shard: os.DirEntry[str], pages: dict[int, Found]) -> None:
    """Add the pages of one folder by inode; remove its stale temporary files."""
    stale_ns = time.time_ns() - int(_STALE_S * 1e9)
    for name, path, status in _files(shard.path):
        key = _key(name, shard.name)
        if key is not None:
            page = pages.setdefault(status.st_ino, Found(status.st_size, status.st_mtime_ns))
            page.paths.append(path)
            page.keys.append(key)
        elif name.endswith(_TEMP_SUFFIX) and status.st_ctime_ns < stale_ns:
            discard([path])


def discard(paths: Sequence[str]) -> list[OSError]:
    """Remove files as far as possible; returns why some are still there."""
    errors = []
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass  # Another process was faster.
        except OSError as error:
            errors.append(error)
    return errors


def _checksum(fields: bytes, listed: bytes, image: Image) -> int:
    return zlib.crc32(image.data, zlib.crc32(listed, zlib.crc32(fields)))


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    # Other processes' resets may take the folders away at any moment: not always in vain.
    for _ in range(4):
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags, 0o600)
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            _make_parents(path)
    return os.open(path, flags, 0o600)


def _make_parents(path: str) -> None:
    """Make a file's folder and the root's above it, if another process removed them."""
    shard = os.path.dirname(path)
    # One by one: makedirs gives the mode to the last one only.
    for folder in (os.path.dirname(shard), shard):
        os.makedirs(folder, mode=0o700, exist_ok=True)


def _write_file(path: str, content: tuple[bytes, memoryview], used_ns: int) -> None:
    handle = _create(path)
    try:
        for part in content:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(handle, rest) :]
        os.utime(handle, ns=(used_ns, used_ns))
    finally:
        os.close(handle)


def _try_link(source: str, target: str) -> bool:
    """Make ``target`` a second name of ``source``; a copy has to do where that is not allowed."""
    try:
        try:
            os.link(source, target)
        except FileNotFoundError:
            _make_parents(target)
            os.link(source, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


def _fill(handle: int, image: Image) -> bool:
    """Read until ``image`` is full; one call returns at most 2 GiB."""
    rest = image.data
    while rest:
        count = os.readv(handle, [rest])
        if not count:
            return False
        rest = rest[count:]
    return True


def _list(path: str) -> list[os.DirEntry[str]]:
    """Return the real folders in ``path``; a folder that cannot be read has none."""
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _files(path: str) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield name, path and status of the regular files in ``path``."""
    try:
        with os.scandir(path) as entries:
            listed = list(entries)
    except OSError:
        return
    for entry in listed:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            yield entry.name, entry.path, status


def _key(name: str, shard: str) -> bytes | None:
    """Return the key of a page file's name; ``None`` for a file that is not ours."""
    stem = name.removesuffix(_SUFFIX)
    if stem == name or not _HEX.fullmatch(stem) or stem[:2] != shard:
        return None
    return bytes.fromhex(stem)


def _remove_folder(path: str) -> None:
    # It may be in use again.
    with contextlib.suppress(OSError):
        os.rmdir(path)
