"""Files of a model on the local disk: their digests, remembered, and the cache folder."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_LOG = logging.getLogger(__name__)


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

    The digest is remembered in the cache folder for as long as the file's size and times stay the
    same, since weights are large and read by several processes.

    Args:
        path: The file.
        cache_dir: Where digests are remembered; ``None``: :func:`default_cache_dir`.

    Raises:
        OSError: If the file cannot be read; a cache that cannot be read or written is no error.
    """
    path = path.resolve()
    stat = path.stat()
    # The change time cannot be set back, so a file replaced by one of equal size and mtime is seen.
    identity = [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    name = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()
    record = (cache_dir or default_cache_dir()) / "sha256" / f"{name}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        known = json.loads(record.read_bytes())
        if known["identity"] == identity and len(bytes.fromhex(known["sha256"])) == 32:
            return str(known["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        with atomic_write(record) as out:
            out.write(json.dumps({"identity": identity, "sha256": digest}).encode())
    except OSError as error:
        _LOG.debug("digest of %s is not remembered: %s", path, error)
    return digest
