"""Files of a model on the local disk: their digests, remembered, and the cache folder."""

import fcntl
import hashlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

_LOG = logging.getLogger(__name__)
_MAX_THREADS = 4


def default_cache_dir() -> Path:
    """Return ``$MSTAR_CACHE``, or ``~/.cache/mstar`` where it is not set."""
    return Path(os.environ.get("MSTAR_CACHE") or Path.home() / ".cache" / "mstar")


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that takes ``path``'s place when the block ends without an error.

    Readers see the whole file or none of it, whatever happens in between.

    Raises:
        OSError: If the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def file_sha256(path: Path, cache_dir: Path | None = None) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes.

    The digest is remembered in the cache folder for as long as the file's path, size, times (of
    its content and of its entry) and inode stay the same, since weights are large and read by
    several processes; of several that want it at the same time, one reads the file.

    Args:
        path: The file.
        cache_dir: Where digests are remembered; ``None``: :func:`default_cache_dir`.

    Raises:
        OSError: If the file cannot be read; a cache that cannot be read or written is no error.
    """
    path = path.resolve()
    name = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()
    record = (cache_dir or default_cache_dir()) / "sha256" / f"{name}.json"
    if known := _remembered(record, _identity(path)):
        return known
    with alone(record.parents[1] / "locks" / name):
        identity = _identity(path)
        if known := _remembered(record, identity):
            return known
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        # A file that changed meanwhile has a digest that nobody should be told again.
        if _identity(path) == identity:
            try:
                with atomic_write(record) as out:
                    out.write(json.dumps({"identity": identity, "sha256": digest}).encode())
            except OSError as error:
                _LOG.debug("digest of %s is not remembered: %s", path, error)
    return digest


def _identity(path: Path) -> list[str | int]:
    stat = path.stat()
    # The change time cannot be set back, so a file replaced by one of equal size and mtime is seen.
    return [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _remembered(record: Path, identity: list[str | int]) -> str | None:
    with suppress(OSError, ValueError, TypeError, KeyError):
        known = json.loads(record.read_bytes())
        if known["identity"] == identity and len(bytes.fromhex(known["sha256"])) == 32:
            return str(known["sha256"])
    return None


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Keep other threads and processes out of the block, where the folder can be written."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        # The system lets go of a lock with its last handle, also where a process is killed.
        os.close(handle)


def digest_in_background(paths: Iterable[Path], cache_dir: Path | None = None) -> list[Future[str]]:
    """Begin to digest files in threads of their own; returns what will hold each digest.

    Hashing and reading let other threads run, so weights can be loaded meanwhile. The threads do
    not keep a process from ending.

    Args:
        paths: The files.
        cache_dir: Where digests are remembered; ``None``: :func:`default_cache_dir`.
    """
    jobs: SimpleQueue[tuple[Path, Future[str]]] = SimpleQueue()
    futures = []
    for path in paths:
        future: Future[str] = Future()
        futures.append(future)
        jobs.put((path, future))

    def work() -> None:
        while True:
            try:
                path, future = jobs.get_nowait()
            except Empty:
                return
            try:
                future.set_result(file_sha256(path, cache_dir))
            except OSError as error:
                future.set_exception(error)

    for _ in range(min(len(futures), _MAX_THREADS, os.cpu_count() or 1)):
        threading.Thread(target=work, name="mstar-digest", daemon=True).start()
    return futures
