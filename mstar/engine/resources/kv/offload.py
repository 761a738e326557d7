"""Offload: evicted pages go to slower tiers, and come back into the pool when a stream asks."""

import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.cache import PagedKVCache
from mstar.engine.resources.kv.pages import PagePool
from mstar.engine.resources.kv.prefix import Names, PrefixIndex
from mstar.engine.resources.kv.stream import StreamKeys
from mstar.engine.resources.kv.tiers.base import Name, Source, Tier
from mstar.engine.resources.kv.tiers.disk import DiskTier
from mstar.engine.resources.kv.tiers.host import HostTier
from mstar.engine.resources.kv.tiers.stack import TierStack
from mstar.engine.resources.kv.transfer import open_transfer
from mstar.errors import ConfigError, StorageError


def open_tiers(
    deployment: Deployment, resource_key: str, root: bytes, page_nbytes: int
) -> list[Tier]:
    """Return the tiers that a deployment has, the fastest first.

    Args:
        deployment: Sizes and folder.
        resource_key: Of the cache, which has a folder of its own.
        root: Names the deployment's content.
        page_nbytes: Bytes of one page.

    Raises:
        ConfigError: If the folder cannot be used, or a tier holds not one page.
    """
    tiers: list[Tier] = []
    is_pinned = deployment.device.startswith("cuda")
    if deployment.host_cache_bytes:
        tiers.append(
            HostTier(
                deployment.host_cache_bytes,
                page_nbytes,
                pin_memory=is_pinned,
                has_twins=deployment.tensor_parallel_size > 1,
            )
        )
    if deployment.disk_cache_bytes:
        if deployment.disk_cache_dir is None:
            raise ConfigError(
                f"{deployment.disk_cache_bytes} bytes of disk are asked for and no folder; give "
                "disk_cache_dir"
            )
        folder = Path(deployment.disk_cache_dir) / resource_key
        # Only the first tier takes pages from the device itself.
        is_pinned = is_pinned and not tiers
        tiers.append(
            DiskTier(folder, root, deployment.disk_cache_bytes, page_nbytes, pin_memory=is_pinned)
        )
    return tiers


Restored = Callable[[bytes, StreamKeys, int], object]
"""Told of a full page that came back: its key, the stream's keys, and its place there."""


class Offload:
    """Moves pages between the pool and the tiers beneath it.

    Args:
        tiers: Where evicted pages go.
        cache: Memory of the pool's pages.
        pool: Gives the pages that restored ones are put into.
        index: Learns of what came back.
        on_restored: Told of every full page that came back; ``None``: nobody asks.
    """

    def __init__(
        self,
        tiers: TierStack,
        cache: PagedKVCache,
        pool: PagePool,
        index: PrefixIndex,
        on_restored: Restored | None = None,
    ) -> None:
        self.tiers = tiers
        self._transfer = open_transfer(cache)
        self._pool = pool
        self._index = index
        self._on_restored = on_restored
        self._page_size = cache.layout.page_size
        self.origin: dict[int, str] = {}
        """Medium of pages that came back and were not used since."""

    def evict(self, pages: Sequence[int]) -> list[Names]:
        """Take pages out of the index and hand them to the tiers; returns what named them."""
        gone = []
        # One by one: what a tier gives up for a page may be the image of one that is next.
        for page, image in zip(pages, self._transfer.read(pages), strict=True):
            names = self._index.remove(page)
            self._put(page, names, image)
            gone.append(names)
        return gone

    def _put(self, page: int, names: Names, image: Source) -> None:
        self.origin.pop(page, None)
        named = [Name(key, end) for key, end in names.ends]
        if names.key is not None:
            named.insert(0, Name(names.key, self._page_size))
        self.tiers.put(named, image)

    def restore(self, keys: StreamKeys, limit: int) -> None:
        """Bring back what a stream can reuse of its first ``limit`` slots.

        Stops at the first page that is not there or not sound; what it would need beyond the pool
        stays where it is.
        """
        names = keys.first(limit // self._page_size)
        pages = self._index.match(names)
        self._pool.retain(pages)
        while len(pages) < len(names) and self._load_pages(keys, pages, names):
            pass
        if not self._has_cut(keys, len(pages), limit):
            self._load_cut(keys, pages, limit)
        self._transfer.settle()
        self._pool.release(pages)

    def _load_pages(self, keys: StreamKeys, pages: list[int], names: Sequence[bytes]) -> bool:
        """Bring back a few of those named behind ``pages``; False: there are no more to be had."""
        number = len(pages)
        ahead = names[number : number + self._transfer.num_together]
        found = list(takewhile(self._is_stored, ahead))
        room = self._pool.try_allocate(min(len(found), self._pool.num_available)) or []
        for place, page in enumerate(room):
            if not self._load(found[place], self._page_size, page):
                self._pool.release(room[place:])
                return False
            self._index.add(found[place], page, pages[-1] if pages else None)
            pages.append(page)
            if self._on_restored is not None:
                self._on_restored(found[place], keys, number + place)
        return bool(room)

    def _is_stored(self, key: bytes) -> bool:
        return self.tiers.find(key) is not None

    def _has_cut(self, keys: StreamKeys, number: int, limit: int) -> bool:
        ends = self._ends(keys, number, limit)
        return bool(ends) and self._index.cut(keys.end_key(number, ends[0])) is not None

    def _load_cut(self, keys: StreamKeys, pages: list[int], limit: int) -> None:
        number = len(pages)
        for end in self._ends(keys, number, limit):
            name = keys.end_key(number, end)
            if self._index.cut(name) is not None:
                return
            room = self._pool.try_allocate(1) if self._is_stored(name) else None
            if room is None:
                continue
            (page,) = room
            if self._load(name, end, page):
                self._index.add_end(name, page, end, pages[-1] if pages else None)
                pages.append(page)
                return
            self._pool.release(room)

    def _ends(self, keys: StreamKeys, number: int, limit: int) -> Sequence[int]:
        """Return where items end on a page within the limit, the last first."""
        room = limit - number * self._page_size
        return [end for end in reversed(keys.ends(number)) if end <= room]

    def _load(self, key: bytes, num_slots: int, page: int) -> bool:
        """Put the content of ``key`` into a held page, to be kept for reuse."""
        # Making room may have pushed it out of the slowest tier.
        stored = self.tiers.get(key)
        if stored is None or stored.num_slots != num_slots:
            return False
        self._transfer.write(page, stored.image)
        self._pool.keep(page)
        self.origin[page] = stored.medium
        return True

    def clear(self) -> int:
        """Empty all tiers; returns how many pages went.

        Raises:
            StorageError: If a tier could not be emptied; the others are.
        """
        self.origin.clear()
        count = self.tiers.clear()
        for tier in self.tiers.tiers:
            if tier.refusal is not None:
                raise StorageError(tier.refusal)
        return count

    def flush(self, timeout: float) -> None:
        """Hand all that is indexed to the tiers and end their work.

        Args:
            timeout: For the slow ones, in seconds.
        """
        deadline = time.monotonic() + timeout
        for page, names in self._index.items():
            if not self.tiers.wait_room(deadline - time.monotonic()):
                break
            self._put(page, names, next(self._transfer.read([page])))
        self.tiers.close(timeout=max(0.0, deadline - time.monotonic()))
        self._transfer.close()
