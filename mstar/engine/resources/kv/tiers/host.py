"""HostTier: page images in host memory."""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import torch

from mstar.engine.resources.kv.tiers.base import (
    Arrived,
    Evicted,
    Image,
    Name,
    Source,
    Tier,
    begin_copy,
    host_memory,
)
from mstar.errors import ConfigError, EngineDeadError

logger = logging.getLogger(__name__)

# Memory is taken in pieces of this size, in bytes: a tier that is never filled costs little.
_CHUNK_NBYTES = 64 << 20


class HostTier(Tier):
    """Page images in an arena that grows up to its capacity; the longest unused goes first.

    One page more than the capacity is allocated: a new image goes there, and what falls out for it
    stays readable until the next ``put``, so that nothing is copied twice.

    Args:
        capacity_bytes: Bound of the images, in bytes.
        page_nbytes: Size of every image, in bytes.
        pin_memory: Lock the memory, so that a CUDA device can copy from it directly.
        has_twins: Other ranks have this very tier: memory that cannot be had ends this one, since
            it would not find what they find.

    Raises:
        ConfigError: If not even one page fits, or memory cannot be pinned here.
    """

    medium = "CPU"

    def __init__(
        self,
        capacity_bytes: int,
        page_nbytes: int,
        pin_memory: bool = False,
        *,
        has_twins: bool = False,
    ) -> None:
        super().__init__(capacity_bytes, page_nbytes, page_nbytes)
        if pin_memory and not torch.cuda.is_available():
            raise ConfigError("pin_memory is True and there is no CUDA device; set it to False")
        self._pin_memory = pin_memory
        self._has_twins = has_twins
        self._chunk_len = max(1, _CHUNK_NBYTES // page_nbytes)
        self._chunks: list[Image] = []
        """``[up to chunk_len, page_nbytes]`` each; all but the last are full."""
        self._num_places = 0
        self._free: list[int] = []
        self._names: OrderedDict[int, tuple[Name, ...]] = OrderedDict()
        """Names of the image at each place, the longest unused first."""
        self._found: dict[bytes, tuple[int, int]] = {}
        """Place and valid slots of each key."""
        self._arriving: dict[int, Arrived] = {}
        """Places whose image may still be on its way from a device."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._found

    def __len__(self) -> int:
        return len(self._names)

    @property
    def nbytes(self) -> int:
        """What the images take, in bytes."""
        return len(self._names) * self.page_nbytes

    def keys(self) -> Iterable[bytes]:
        """Return all keys that are here."""
        return self._found.keys()

    def put(self, names: Sequence[Name], image: Source) -> list[Evicted]:
        """Keep a copy of ``image``; one image falls out for it, or itself where memory is short.

        Raises:
            EngineDeadError: If memory is short and other ranks have this tier.
        """
        self._check_page(names, image)
        fresh = []
        for name in names:
            if (found := self._found.get(name.key)) is None:
                fresh.append(name)
            else:
                self._names.move_to_end(found[0])
        if not fresh:
            return []
        fallen = []
        if not self._free and not self._grow():
            self.counts.dropped += 1
            fallen.append(Evicted(tuple(fresh), image))
        else:
            place = self._free.pop()
            arrived = begin_copy(image, self._image(place))
            if arrived is not None:
                self._arriving[place] = arrived
            self._names[place] = tuple(fresh)
            for key, num_slots in fresh:
                self._found[key] = (place, num_slots)
            self.counts.written += 1
            self._note("stored", tuple(key for key, _ in fresh))
        if len(self._names) > self.max_pages:
            fallen.append(self._evict())
        return fallen

    def get(self, key: bytes) -> tuple[int, Image] | None:
        """Return the valid slots and the image of ``key``."""
        found = self._found.get(key)
        if found is None:
            self.counts.misses += 1
            return None
        place, num_slots = found
        self._names.move_to_end(place)
        self.counts.hits += 1
        return num_slots, self._image(place)

    def clear(self) -> int:
        """Forget everything; the memory is kept for what comes."""
        count = len(self._names)
        self._free.extend(self._names)
        self._names.clear()
        self._found.clear()
        self._note("cleared", ())
        return count

    def transient(self) -> Iterator[Evicted]:
        """Yield everything, the last used first."""
        for place, names in reversed(self._names.items()):
            yield Evicted(names, self._image(place))

    def check(self) -> None:
        """Verify that every place is free or holds one image, and every name finds its own."""
        assert len(self._names) <= self.max_pages, (len(self._names), self.max_pages)
        places = sorted([*self._free, *self._names])
        assert places == list(range(self._num_places)), "a place is lost or doubled"
        named = {
            key: (place, num_slots)
            for place, names in self._names.items()
            for key, num_slots in names
        }
        assert named == self._found, "the names of the images and the keys disagree"

    def _image(self, place: int) -> Image:
        """Return the memory at a place, once what was copied there has arrived."""
        arrived = self._arriving.pop(place, None)
        if arrived is not None:
            arrived()
        chunk, index = divmod(place, self._chunk_len)
        image: Image = self._chunks[chunk][index]
        return image

    def _evict(self) -> Evicted:
        place, names = self._names.popitem(last=False)
        for key, _ in names:
            del self._found[key]
        self._free.append(place)
        self._note("removed", tuple(key for key, _ in names))
        return Evicted(names, self._image(place))

    def _grow(self) -> bool:
        """Add a chunk of free places; where there is no memory, settle for what there is."""
        count = min(self._chunk_len, self.max_pages + 1 - self._num_places)
        if count <= 0:
            return False
        shape = (count, self.page_nbytes)
        try:
            chunk = host_memory(shape, self._pin_memory)
        except (RuntimeError, MemoryError) as error:
            if self._has_twins:
                raise EngineDeadError(
                    f"the host tier of the KV cache has {self._num_places} pages of "
                    f"{self.page_nbytes} bytes and gets no more of its {self.max_pages}, as other "
                    f"ranks may: lower host_cache_bytes (--host-cache-memory); {error}"
                ) from error
            self.max_pages = max(0, self._num_places - 1)
            logger.warning(
                "the host tier of the KV cache stays at %d pages of %d bytes: %s",
                self.max_pages,
                self.page_nbytes,
                error,
            )
            return False
        self._chunks.append(chunk)
        # The lowest place is taken first.
        self._free.extend(range(self._num_places + count - 1, self._num_places - 1, -1))
        self._num_places += count
        return True
