"""Following a stream of KV events exactly, over a transport that may lose, repeat and mix it up.

Batches carry sequence numbers from 0, and a publisher replays the newest of them on request.
:class:`EventOrder` decides what may count; it knows no sockets.

A batch is known by its number *and* its time, since a publisher that starts again numbers from 0
again. Whatever is not plainly the next one, or known already, is a doubt; a replay that begins with
the newest batch that counted resolves it, for it shows whether that batch is still the same.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

from mstar.engine.resources.kv.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Medium,
)

# Batches remembered, so that late repeats are known; more than sockets hold by default.
_MAX_REMEMBERED = 1 << 16


class Batch(NamedTuple):
    """One batch of events, in its turn."""

    seq: int
    """Its sequence number."""
    events: EventBatch
    """What it holds."""


class ResetReason(StrEnum):
    """Why an index must be forgotten."""

    LOST = "lost"
    """Batches are missing, and no replay has them."""
    RESTARTED = "restarted"
    """The publisher began anew: what it told before is void."""


class Reset(NamedTuple):
    """The index built so far is void; only batches after this count."""

    reason: ResetReason
    """Why."""
    last_seq: int | None
    """The newest batch that had counted, if any."""
    next_seq: int
    """The first batch that may count from now on; above 0, pages stored before it stay unknown."""


Arrival = Batch | Reset


class EventOrder:
    """What has counted of one publisher's batches, and what counts next.

    Args:
        from_start: Begin with everything the publisher can replay; else with what comes first.
    """

    def __init__(self, *, from_start: bool) -> None:
        self._last: int | None = None
        self._last_ts = 0.0
        self._times: dict[int, float] = {}
        self._begins_anywhere = not from_start
        self.is_in_doubt = from_start
        """Nothing counts before a replay from ``replay_seq`` has."""

    @property
    def replay_seq(self) -> int:
        """Number to ask a replay from: the newest batch that counted, again."""
        return self._last or 0

    def doubt(self) -> None:
        """Note that batches may be missing or the publisher be another one."""
        self.is_in_doubt = self.is_in_doubt or not self._begins_anywhere

    def follow(
        self, batch: Batch | None, fetch: Callable[[int], Sequence[Batch] | None]
    ) -> list[Arrival]:
        """Return what counts now, with doubts resolved by replays where they can be had.

        Args:
            batch: What has come; ``None`` resolves a doubt without it.
            fetch: Returns all batches that the publisher has from a number on, in order; ``None``
                if it has no answer.
        """
        arrivals = [] if batch is None else self.receive(batch)
        while self.is_in_doubt:
            batches = fetch(self.replay_seq)
            if batches is None:
                return arrivals if batch is None else [*arrivals, *self.unreplayed(batch)]
            arrivals += self.replayed(batches)
        return arrivals

    def receive(self, batch: Batch) -> list[Arrival]:
        """Return what counts now that ``batch`` has come; nothing, and a doubt, if that is unclear.

        A batch that raises or meets a doubt may be dropped: a replay has it if it ever counts.
        """
        if self._is_known(batch) or self.is_in_doubt:
            return []
        is_next = batch.seq == self._next and batch.events.ts >= self._last_ts
        if is_next or self._begins_anywhere:
            return [self._count(batch)]
        self.is_in_doubt = True
        return []

    def replayed(self, batches: Sequence[Batch]) -> list[Arrival]:
        """Return what counts by a whole replay from ``replay_seq``.

        A publisher that began anew leaves a doubt, for one more replay.

        Args:
            batches: All that the publisher had from that number on, in order.
        """
        arrivals: list[Arrival] = []
        is_linked = self._last is None
        if self._last is not None:
            if not batches or (batches[0].seq == self._last and not self._is_known(batches[0])):
                return [self._reset(ResetReason.RESTARTED, 0)]
            if batches[0].seq == self._last:
                batches, is_linked = batches[1:], True
        for batch in batches:
            # Without the newest batch that counted, what follows it may be another publisher's.
            if not is_linked or batch.seq != self._next:
                arrivals.append(self._reset(ResetReason.LOST, batch.seq))
                is_linked = True
            arrivals.append(self._count(batch))
        self.is_in_doubt = False
        return arrivals

    def unreplayed(self, batch: Batch) -> list[Arrival]:
        """Return what counts if ``batch`` met a doubt and there is no replay to resolve it."""
        if self._is_known(batch):
            return []
        is_first = self._last is None and batch.seq == 0
        arrivals: list[Arrival] = [] if is_first else [self._reset(ResetReason.LOST, batch.seq)]
        self.is_in_doubt = False
        return [*arrivals, self._count(batch)]

    @property
    def _next(self) -> int:
        return 0 if self._last is None else self._last + 1

    def _is_known(self, batch: Batch) -> bool:
        return self._times.get(batch.seq) == batch.events.ts

    def _count(self, batch: Batch) -> Batch:
        self._begins_anywhere = False
        self._last, self._last_ts = batch.seq, batch.events.ts
        self._times[batch.seq] = batch.events.ts
        if len(self._times) > _MAX_REMEMBERED:
            del self._times[next(iter(self._times))]
        return batch

    def _reset(self, reason: ResetReason, next_seq: int) -> Reset:
        reset = Reset(reason, self._last, next_seq)
        self._last, self._last_ts = None, 0.0
        self._times.clear()
        return reset


class IndexMirror:
    """A consumer's copy of an engine's index, kept by its events."""

    def __init__(self) -> None:
        self._parents: dict[tuple[bytes, str], bytes | None] = {}

    def __len__(self) -> int:
        return len(self._parents)

    @property
    def pages(self) -> dict[tuple[bytes, str], bytes | None]:
        """Parent key of every page that can be reused, by its key and medium."""
        return dict(self._parents)

    def apply(self, arrival: Arrival) -> None:
        """Change what the arrival changes."""
        if isinstance(arrival, Reset):
            self._parents.clear()
            return
        for event in arrival.events.events:
            if isinstance(event, AllBlocksCleared):
                self._parents.clear()
                continue
            medium = event.medium or Medium.DEVICE.value
            if isinstance(event, BlockRemoved):
                for key in event.block_hashes:
                    self._parents.pop((key, medium), None)
            elif isinstance(event, BlockStored):
                parent = event.parent_block_hash
                for key in event.block_hashes:
                    self._parents[key, medium] = parent
                    parent = key

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many pages a chain of keys begins with that lie on any medium."""
        for count, key in enumerate(keys):
            if not any((key, medium) in self._parents for medium in Medium):
                return count
        return len(keys)
