"""Folders that last as long as a process of ours; what killed ones left is cleared away."""

import fcntl
import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

_PREFIX, _LOCK = "mstar-", "lock"
"""A folder has a file that is locked as long as its process lives, however it ends."""


class ScratchFolder:
    """A fresh folder for sockets and the like, which goes when it is closed.

    Those of this user's processes that are gone are removed when one is made and when one is
    closed.
    """

    path: Path
    """Short, as the system wants the paths of sockets."""

    def __init__(self) -> None:
        place = tempfile.gettempdir()
        self._place = Path(place if len(place) < 70 else "/tmp")
        _clear_abandoned(self._place)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._place))
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self.path, ignore_errors=True)
            self._lock = (self.path / "unlocked").open("x")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # Nobody sees it under its name before it is locked.
            os.rename(self._lock.name, self.path / _LOCK)
            stack.pop_all()

    def close(self) -> None:
        """Remove the folder; once more does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        _clear_abandoned(self._place)

    def __enter__(self) -> Path:
        """Return the path."""
        return self.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()


def _clear_abandoned(place: Path) -> None:
    """Remove this user's folders of processes that are gone."""
    for folder in place.glob(f"{_PREFIX}*"):
        # A folder of others, without a lock or with one that is held is left as it is.
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
