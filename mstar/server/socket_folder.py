"""Where a server's socket files lie while it runs; what killed servers left is cleared away."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX, _LOCK = "mstar-", "lock"
"""A server's folder has a file that is locked as long as its process lives, however it ends."""


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Give a fresh folder, whose path is short as the system wants it; it goes in the end."""
    place = tempfile.gettempdir()
    place = place if len(place) < 70 else "/tmp"
    _clear_abandoned(Path(place))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    try:
        with (folder / "unlocked").open("x") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Nobody sees it under its name before it is locked.
            os.rename(lock.name, folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clear_abandoned(place: Path) -> None:
    """Remove this user's folders of servers that are gone."""
    for folder in place.glob(f"{_PREFIX}*"):
        # A folder of others, without a lock or with one that is held is left as it is.
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
