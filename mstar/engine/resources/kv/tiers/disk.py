"""DiskTier: page images on a local disk, kept across restarts; knows no file format."""

import errno
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mstar.engine.resources.kv.tiers.base import (
    Arrived,
    Evicted,
    Image,
    Kind,
    Name,
    Source,
    Tier,
    begin_copy,
    host_memory,
)
from mstar.engine.resources.kv.tiers.files import Found, PageFiles, discard, remove_put_away
from mstar.errors import ConfigError

logger = logging.getLogger(__name__)

# The folder is looked through again once this part of the capacity was written: by so much two
# processes that share it may together exceed the capacity.
_RESCAN_PART = 1 / 8


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """A page on its way to the disk."""

    names: tuple[Name, ...]
    image: Image
    arrived: Arrived | None
    used_ns: int

    def read(self) -> Image:
        """Return the image once it is there."""
        if self.arrived is not None:
            self.arrived()
        return self.image


@dataclass(slots=True)
class _Page:
    """A page that was seen on the disk."""

    keys: list[bytes]
    nbytes: int


class DiskTier(Tier):
    """Page files of one root in a folder that other roots and other processes may share.

    A thread writes behind. A page is here from ``put`` on: until it is written, the queue serves
    it. The books are a guess of what the folder holds, since other processes add and remove files
    at any moment: content is believed only once read and verified, and a key that is not in the
    books is looked for on the disk. Files of other roots go first, then the longest unused.

    Args:
        folder: Made if it is not there; readable by its user only.
        root: What the keys are built on, 32 bytes; pages of another root are never seen.
        capacity_bytes: Bound of all page files in ``folder``, other roots' included, in bytes.
        page_nbytes: Size of every image, in bytes.
        queue_bytes: Bound of the images that wait to be written, in bytes; one always may.
        pin_memory: Lock the memory of those, so that a CUDA device copies to it by itself.

    Raises:
        ConfigError: If not even one page fits, or ``folder`` cannot be written to.
    """

    medium = "STORAGE"

    def __init__(
        self,
        folder: Path,
        root: bytes,
        capacity_bytes: int,
        page_nbytes: int,
        queue_bytes: int = 256 << 20,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(capacity_bytes, page_nbytes, PageFiles.nbytes(page_nbytes, 1))
        self._files = PageFiles(folder, root, page_nbytes)
        try:
            self._files.prepare()
        except OSError as error:
            raise ConfigError(
                f"the KV cache cannot write to {str(folder)!r}: {error.strerror or error}; name a "
                "folder that this user may create and write to, or leave the disk tier out"
            ) from error
        self._capacity_bytes = capacity_bytes
        self._queue_bytes = queue_bytes
        self._pin_memory = pin_memory
        self._lock = threading.Condition()
        """Held for the books and where a file appears, never while content moves or is freed."""
        self._queue: deque[_Write] = deque()
        """The first one is being written."""
        self._queued: dict[bytes, _Write] = {}
        self._spare: list[Image] = []
        """Images that were written: memory that is new to the process costs more than a copy."""
        self._read_image: Image = np.empty(page_nbytes, np.uint8)
        self._pages: OrderedDict[int, _Page] = OrderedDict()
        """By inode, the longest unused first."""
        self._inode: dict[bytes, int] = {}
        self._nbytes = 0
        self._others: deque[Found] = deque()
        """Pages of other roots, the longest unused first."""
        self._leaving: set[bytes] = set()
        """Keys whose files are being removed: no longer here, though still to be seen."""
        self._away: deque[str] = deque()
        """Folders that resets put away, to be removed."""
        self._num_clears = 0
        self._unscanned_nbytes = 0
        """Written since the folder was looked through."""
        self._last_use_ns = 0
        self._is_shut = False
        """Content that was to go is still there: nothing is served or stored any more."""
        self._is_closed = False
        self._complaints: set[tuple[str, int | None]] = set()
        self._away.extend(self._files.find_put_away())
        self._rescan()
        self._make_room(0)
        self._writer = threading.Thread(target=self._run, name="kv-disk-writer", daemon=True)
        self._writer.start()

    # What the engine calls.

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._queued or key in self._inode or self._discover(key)

    def __len__(self) -> int:
        return len(self._pages) + len(self._queue)

    @property
    def nbytes(self) -> int:
        """What all page files in the folder take, as far as they were seen, in bytes."""
        return self._nbytes

    def keys(self) -> Iterable[bytes]:
        """Return all keys that are queued or were seen on the disk."""
        with self._lock:
            return self._queued.keys() | self._inode.keys()

    def put(self, names: Sequence[Name], image: Source) -> list[Evicted]:
        """Queue a copy of ``image`` to be written; drop it where the queue is full."""
        self._check_page(names, image)
        with self._lock:
            fresh = tuple(
                name
                for name in names
                if name.key not in self._queued and not self._try_touch(name.key)
            )
            if not fresh:
                return []
            if self._is_closed or self._is_shut or not self._has_room():
                self.counts.dropped += 1
                return []
            copy = self._spare.pop() if self._spare else self._new_image()
            write = _Write(fresh, copy, begin_copy(image, copy), self._now_ns())
            self._queue.append(write)
            self._note_unless(self._inode, fresh, "stored")
            self._queued.update((key, write) for key, _ in fresh)
            self._lock.notify_all()
        return []

    def get(self, key: bytes) -> tuple[int, Image] | None:
        """Return the valid slots and the image of ``key``, read from the disk and verified."""
        with self._lock:
            write = self._queued.get(key)
            if write is not None:
                self.counts.hits += 1
                return dict(write.names)[key], write.read()
            is_readable = not self._is_shut
        content = self._try_read(key) if is_readable else None
        if content is None:
            self.counts.misses += 1
            return None
        with self._lock:
            if not self._try_touch(key) and self._discover(key):
                self._try_touch(key)
        self.counts.hits += 1
        return content

    def clear(self) -> int:
        """Forget everything of this root, queued writes and other processes' files included.

        What another process has queued comes after the reset. The files are out of sight at once
        and removed behind. Where that is refused, the tier says so and serves nothing any more: a
        reset must not fail in silence.
        """
        with self._lock:
            num_queued = len(self._queue)
            self._queue.clear()
            self._queued.clear()
            self._pages.clear()
            self._inode.clear()
            self._num_clears += 1
            self._nbytes = sum(page.nbytes for page in self._others)
            try:
                away, num_removed = self._files.put_away()
            except OSError as error:
                away, num_removed = None, 0
                self._is_shut = True
                self.refusal = (
                    f"the KV cache's files in {self._files.folder} could not be removed: "
                    f"{error.strerror or error}; the disk tier is shut, and what is there may come "
                    "back when the server starts again: remove the folder before"
                )
                logger.error("%s", self.refusal)
            if away is not None:
                self._away.append(away)
            self._note("cleared", ())
            self._lock.notify_all()
            return num_queued + num_removed

    def wait_room(self, timeout: float) -> bool:
        """Wait until the queue has room for one more page."""
        with self._lock:
            return self._lock.wait_for(self._has_room, timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until the queue is empty."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._queue, timeout)

    def close(self, timeout: float) -> None:
        """Drain the queue, then end the writer; what is still queued after ``timeout`` is lost."""
        self.flush(timeout)
        with self._lock:
            self._is_closed = True
            while self._queue:
                self._take_write()
            self._lock.notify_all()
        self._writer.join(timeout)

    def check(self) -> None:
        """Verify that the books agree with each other."""
        with self._lock:
            by_key = {key: inode for inode, page in self._pages.items() for key in page.keys}
            assert by_key == self._inode, "the keys of the pages and the inodes disagree"
            assert all(page.keys for page in self._pages.values()), "a page without a key"
            nbytes = sum(page.nbytes for page in self._pages.values())
            nbytes += sum(page.nbytes for page in self._others)
            assert nbytes == self._nbytes, (nbytes, self._nbytes)
            queued = {key: write for write in self._queue for key, _ in write.names}
            assert queued == self._queued, "the queue and its keys disagree"

    # The writer's thread.

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue or self._away or self._is_closed)
                away = self._away.popleft() if self._away else None
                write = self._queue[0] if self._queue else None
            if away is not None:
                remove_put_away(away)
            elif write is not None:
                self._write(write)
                with self._lock:
                    self._spare.append(write.read())
            else:
                return

    def _write(self, write: _Write) -> None:
        """Write the first page of the queue, unless it is on the disk or a reset takes it back."""
        with self._lock:
            names = [name for name in write.names if not self._discover(name.key)]
        temps: list[str] = []
        try:
            if names:
                self._make_room(PageFiles.nbytes(self.page_nbytes, len(names)))
                inode, temps = self._files.write(names, write.read(), write.used_ns)
            with self._lock:
                if self._is_first(write):
                    if names:
                        self._files.publish(temps, names)
                        self._learn_written(inode, names)
                    self._take_write()
        except OSError as error:
            # What is not found was put away by another process's reset.
            if error.errno != errno.ENOENT:
                self._complain("write to", error)
            with self._lock:
                if self._is_first(write):
                    self._take_write()
        discard(temps)

    def _is_first(self, write: _Write) -> bool:
        return bool(self._queue) and self._queue[0] is write

    def _take_write(self) -> None:
        """Take the first write off the queue; what is not on the disk now is lost."""
        write = self._queue.popleft()
        for key, _ in write.names:
            del self._queued[key]
        if any(key not in self._inode for key, _ in write.names):
            self.counts.dropped += 1
        self._note_unless(self._inode, write.names, "removed")
        self._lock.notify_all()

    def _learn_written(self, inode: int, names: Sequence[Name]) -> None:
        # An inode in the books was given up by another process, and used again for this page.
        if inode in self._pages:
            self._forget_page(inode)
        for key, _ in names:
            self._discover(key)
        self._unscanned_nbytes += PageFiles.nbytes(self.page_nbytes, len(names))
        self.counts.written += 1

    def _make_room(self, nbytes: int) -> None:
        """Evict until ``nbytes`` more fit."""
        if self._unscanned_nbytes + nbytes > _RESCAN_PART * self._capacity_bytes:
            self._rescan()
        while True:
            with self._lock:
                if self._nbytes + nbytes <= self._capacity_bytes:
                    return
                if self._others:
                    page = self._others.popleft()
                    self._nbytes -= page.nbytes
                    paths = page.paths
                elif self._pages:
                    self._leaving.update(self._forget_page(next(iter(self._pages))))
                    paths = [self._files.path(key) for key in self._leaving]
                else:
                    return
            for error in discard(paths):
                self._complain("remove files from", error)
            with self._lock:
                self._leaving.clear()

    def _rescan(self) -> None:
        """Take the folder's state for the books; uses are in the files' times."""
        num_clears = self._num_clears
        self._unscanned_nbytes = 0
        own, others = self._files.scan()
        with self._lock:
            if num_clears != self._num_clears:
                return
            ordered = sorted(own.items(), key=lambda item: item[1].used_ns)
            self._pages = OrderedDict(
                (inode, _Page(page.keys, page.nbytes)) for inode, page in ordered
            )
            old, self._inode = self._inode, {}
            for inode, page in ordered:
                self._inode.update((key, inode) for key in page.keys)
            self._others = deque(sorted(others, key=lambda page: page.used_ns))
            self._nbytes = sum(page.nbytes for page in (*own.values(), *others))
            if gone := tuple(old.keys() - self._inode.keys() - self._queued.keys()):
                self._note("removed", gone)
            if new := tuple(self._inode.keys() - old.keys() - self._queued.keys()):
                self._note("stored", new)

    # The books; all with the lock held.

    def _has_room(self) -> bool:
        return not self._queue or (len(self._queue) + 1) * self.page_nbytes <= self._queue_bytes

    def _new_image(self) -> Image:
        return host_memory((self.page_nbytes,), self._pin_memory)

    def _now_ns(self) -> int:
        """Return a time of use, later than any before."""
        self._last_use_ns = max(self._last_use_ns + 1, time.time_ns())
        return self._last_use_ns

    def _discover(self, key: bytes) -> bool:
        """Return whether the file of ``key`` is on the disk, and put the books right."""
        if self._is_shut or key in self._leaving:
            return False
        try:
            inode, nbytes = self._files.stat(key)
        except OSError:
            self._forget(key)
            return False
        if self._inode.get(key) != inode:
            self._forget(key)
            page = self._pages.get(inode)
            if page is None:
                page = self._pages[inode] = _Page([], nbytes)
                self._nbytes += nbytes
            page.keys.append(key)
            self._inode[key] = inode
            if key not in self._queued:
                self._note("stored", (key,))
        return True

    def _try_touch(self, key: bytes) -> bool:
        """Count a use of ``key``; returns ``False`` if it is not in the books or has vanished."""
        inode = self._inode.get(key)
        if inode is None:
            return False
        try:
            self._files.touch(key, self._now_ns())
        except FileNotFoundError:
            self._forget(key)
            return False
        except OSError as error:
            self._complain("record uses in", error)
        self._pages.move_to_end(inode)
        return True

    def _forget(self, key: bytes) -> None:
        """Take ``key`` out of the books, with its page if it was the last name."""
        inode = self._inode.pop(key, None)
        if inode is None:
            return
        page = self._pages[inode]
        page.keys.remove(key)
        if not page.keys:
            del self._pages[inode]
            self._nbytes -= page.nbytes
        if key not in self._queued:
            self._note("removed", (key,))

    def _forget_page(self, inode: int) -> list[bytes]:
        """Take a page out of the books; returns its keys."""
        keys = self._pages[inode].keys.copy()
        for key in keys:
            self._forget(key)
        return keys

    def _note_unless(self, present: dict[bytes, int], names: Sequence[Name], kind: Kind) -> None:
        if keys := tuple(key for key, _ in names if key not in present):
            self._note(kind, keys)

    # Reading.

    def _try_read(self, key: bytes) -> tuple[int, Image] | None:
        """Return the verified content of ``key``; drop its file if it is broken."""
        try:
            num_slots = self._files.read(key, self._read_image)
        except FileNotFoundError:
            with self._lock:
                self._forget(key)
            return None
        except OSError as error:
            self._complain("read from", error)
            if error.errno != errno.EIO:
                # The file may be sound: too many open files, or another user's.
                with self._lock:
                    self._forget(key)
                return None
            num_slots = None
        if num_slots is None:
            with self._lock:
                self.counts.corrupt += 1
                inode = self._inode.get(key)
                keys = {key} if inode is None else {key, *self._forget_page(inode)}
                discard([self._files.path(each) for each in keys])
            return None
        return num_slots, self._read_image

    def _complain(self, what: str, error: OSError) -> None:
        """Log a failure, once for each kind."""
        if (what, error.errno) not in self._complaints:
            self._complaints.add((what, error.errno))
            logger.warning(
                "the KV cache cannot %s %s: %s; this is logged once",
                what,
                self._files.folder,
                error.strerror or error,
            )
