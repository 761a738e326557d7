"""Tier: storage of page images by name, one contract for host memory and disk.

A page image is the bytes of one KV page over all layers. It has one or several names: the page's
key if the page is full, and the end keys of cuts in it. Every name finds the image.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mstar.errors import ConfigError

Image = npt.NDArray[np.uint8]
"""``[page_nbytes]``: the bytes of one page over all layers."""
KEY_NBYTES = 32
Kind = Literal["stored", "removed", "cleared"]
Arrived = Callable[[], object]
"""Returns once an image is there."""


class Leaving(ABC):
    """A page in a device's memory, from which its image is copied."""

    @abstractmethod
    def copy_to(self, image: Image) -> Arrived:
        """Begin to copy; until the copy has arrived, nobody reads ``image`` or writes to it."""


Source = Image | Leaving


def begin_copy(source: Source, target: Image) -> Arrived | None:
    """Copy an image, or begin to; ``None``: it is there already."""
    if isinstance(source, Leaving):
        return source.copy_to(target)
    np.copyto(target, source)
    return None


def host_memory(shape: tuple[int, ...], is_pinned: bool) -> Image:
    """Return memory for images.

    Args:
        shape: In bytes.
        is_pinned: Lock it, so that a CUDA device copies to and from it by itself.
    """
    return torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned).numpy()


class Name(NamedTuple):
    """One name of a page image."""

    key: bytes
    """A page key or an end key, 32 bytes."""
    num_slots: int
    """Slots of the page that the key vouches for, from the first; the page size for a page key."""


class Evicted(NamedTuple):
    """A page image that a tier gives away."""

    names: tuple[Name, ...]
    """All names by which the tier knew it."""
    image: Source
    """Valid until the next ``put`` or ``clear`` of the tier; not to be written to. As it was put,
    where the tier had no room at all."""


class Change(NamedTuple):
    """What became of some keys in one tier."""

    kind: Kind
    """``cleared``: the tier holds nothing now, and ``keys`` is empty."""
    medium: str
    """The tier's."""
    keys: tuple[bytes, ...]
    """Page keys and end keys."""


@dataclass(slots=True)
class TierCounts:
    """Totals since the tier was made, in pages."""

    hits: int = 0
    """Calls of ``get`` that returned a page."""
    misses: int = 0
    """Calls of ``get`` that returned none."""
    corrupt: int = 0
    """Pages dropped since their content was not what had been written."""
    written: int = 0
    """Pages that reached the medium."""
    dropped: int = 0
    """Pages offered and not kept: no room to queue them, or the medium refused."""


class Tier(ABC):
    """Page images of one size, bounded in bytes, the longest unused given up first.

    One thread calls; none of the calls waits for a slow medium or raises for a broken one.

    Args:
        capacity_bytes: Bound of what is kept, in bytes.
        page_nbytes: Size of every image, in bytes.
        stored_nbytes: What one image takes on the medium, in bytes.

    Raises:
        ConfigError: If not even one page fits.
    """

    medium: str
    """Where the pages are, in the words of KV events."""

    def __init__(self, capacity_bytes: int, page_nbytes: int, stored_nbytes: int) -> None:
        if capacity_bytes < stored_nbytes:
            raise ConfigError(
                f"the {self.medium} tier of the KV cache may hold {capacity_bytes} bytes and one "
                f"page takes {stored_nbytes}; give it more, or leave it out"
            )
        self.page_nbytes = page_nbytes
        self.max_pages = capacity_bytes // stored_nbytes
        """Pages with one name each that fit."""
        self.counts = TierCounts()
        self.refusal: str | None = None
        """Why the last ``clear`` left something behind; ``None``: it did not."""
        self._changes: deque[Change] | None = None

    @abstractmethod
    def put(self, names: Sequence[Name], image: Source) -> list[Evicted]:
        """Keep a copy of ``image`` under those of ``names`` that are not known yet.

        The first writer of a key wins; a known key counts as used now.

        Args:
            names: At least one, with distinct keys.
            image: ``[page_nbytes]``, uint8, or a page that becomes one. Whoever reads the copy
                waits for it to arrive.

        Returns:
            What had to go for it, so that a slower tier can take it; empty for the last tier.
        """

    @abstractmethod
    def get(self, key: bytes) -> tuple[int, Image] | None:
        """Return the valid slots and the image of ``key``, verified, which counts as its use.

        The image is valid until the next ``get``, ``put`` or ``clear``, and not to be written to.
        ``None`` may come also for a key that ``in`` has just found: a broken page is dropped when
        read.
        """

    @abstractmethod
    def __contains__(self, key: bytes) -> bool:
        """Return whether the tier seems to have ``key``; reads no content."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many images the tier knows it has."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """What the tier's pages take, in bytes."""

    @abstractmethod
    def keys(self) -> Iterable[bytes]:
        """Return all keys that the tier knows it has."""

    @abstractmethod
    def clear(self) -> int:
        """Forget everything, writes under way included; returns how many images went."""

    @abstractmethod
    def check(self) -> None:
        """Verify that the tier's books agree."""

    def transient(self) -> Iterator[Evicted]:
        """Yield what would be lost when the process ends, the last used first."""
        return iter(())

    def wait_room(self, timeout: float) -> bool:
        """Wait until ``put`` would not drop a page for want of room to queue it.

        Args:
            timeout: In seconds.
        """
        return True

    def flush(self, timeout: float) -> bool:
        """Wait until all writes under way have ended, at most ``timeout`` seconds."""
        return True

    def close(self, timeout: float) -> None:
        """Finish the writes under way, at most ``timeout`` seconds, and take no more."""

    def watch(self) -> None:
        """Record changes from now on; the first one says what is here already."""
        self._changes = deque()
        if present := tuple(self.keys()):
            self._note("stored", present)

    def take_changes(self) -> list[Change]:
        """Return the changes since the last call, in order.

        Applied one after the other, they give exactly the keys that the tier knows it has.
        """
        taken = []
        while self._changes:
            taken.append(self._changes.popleft())
        return taken

    def _note(self, kind: Kind, keys: tuple[bytes, ...]) -> None:
        if self._changes is not None:
            self._changes.append(Change(kind, self.medium, keys))

    def _check_page(self, names: Sequence[Name], image: Source) -> None:
        assert names, "a page without a name"
        assert all(len(key) == KEY_NBYTES for key, _ in names), names
        if isinstance(image, Leaving):
            return
        assert image.dtype == np.uint8, image.dtype
        assert image.shape == (self.page_nbytes,), (image.shape, self.page_nbytes)
