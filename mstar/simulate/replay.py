"""Replays a trace through the production pool, index, keys and admission, without a model.

What the engine does to its KV cache for a request is done here too, in the same order, on a cache
whose tensors have no memory: ``ever_fits`` → ``match`` → ``open`` → ``admit`` → ``commit`` →
``close``. A request is one step for its prompt and, with outputs, one for all that it generates.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.config import KVConfig, KVStep
from mstar.engine.resources.kv.manager import KVManager
from mstar.engine.resources.step import Segment
from mstar.simulate.outcome import Outcome, Reading, Setup
from mstar.simulate.streams import Stream, Streams
from mstar.simulate.trace import TracedRequest

_STEP = KVStep()
_CONFIG = KVConfig(num_layers=1, num_kv_heads=1, head_dim=1)
# Requests between two reports of progress.
_REPORT_EVERY = 64


def replay(
    requests: Sequence[TracedRequest],
    setup: Setup,
    reading: Reading,
    progress: Callable[[int], object] = lambda _: None,
) -> Outcome:
    """Return what requests, arriving in their order, find in the cache.

    Args:
        requests: At least one.
        setup: The cache and the load.
        reading: What counts as reused.
        progress: Called now and then with the number of requests that have arrived since.
    """
    begin = time.perf_counter()
    streams = Streams(setup, reading)
    cache = _Cache(setup, [streams.max_len(request) for request in requests])
    queue = _Queue(cache, setup.concurrency)
    num_refused = 0
    for number, request in enumerate(requests):
        stream = streams.stream(number, request)
        if cache.ever_fits(stream):
            queue.add(stream)
        else:
            num_refused += 1
        if (number + 1) % _REPORT_EVERY == 0:
            progress(_REPORT_EVERY)
    queue.finish_all()
    progress(len(requests) % _REPORT_EVERY)
    unit = setup.page_size if reading is Reading.PREFIX_RULE else 1
    return Outcome(
        setup=setup,
        reading=reading,
        num_requests=len(requests),
        num_refused=num_refused,
        num_waits=queue.num_waits,
        num_preempted=queue.num_preempted,
        num_hits=queue.num_reused_tokens // unit,
        num_possible=sum(streams.prompt_len(request) for request in requests) // unit,
        num_evictions=cache.num_evictions,
        seconds=time.perf_counter() - begin,
    )


class _Cache:
    """The production manager on a cache without memory, called as the runner calls it.

    Args:
        setup: The cache.
        max_lens: Slots that each stream may ever hold, in tokens.
    """

    def __init__(self, setup: Setup, max_lens: Sequence[int]) -> None:
        # Every stream's pages, and those that admission sets aside: a larger pool is no different.
        num_pages = sum(-(-max_len // setup.page_size) for max_len in max_lens) + setup.concurrency
        if setup.num_pages is not None:
            num_pages = min(num_pages, setup.num_pages)
        self._manager = KVManager(
            "kv",
            _CONFIG,
            Deployment(
                device="meta",
                num_pages=num_pages,
                page_size=setup.page_size,
                max_num_seqs=min(setup.concurrency, len(max_lens)),
                max_model_len=min(max(max_lens), num_pages * setup.page_size),
            ),
        )

    @property
    def num_evictions(self) -> int:
        """Pages whose content was given up for another."""
        return self._manager.pool.num_evictions

    def ever_fits(self, stream: Stream) -> bool:
        """Whether the stream could be served if it were alone."""
        return self._manager.ever_fits(stream.opening) is None

    def try_open(self, stream: Stream) -> int | None:
        """Open a stream behind what it can reuse; returns how much that is, in tokens."""
        opening = stream.opening
        num_reused = self._manager.match(opening, stream.limit)
        return None if self._manager.open(opening, num_reused) else num_reused

    def try_write(self, stream: Stream, span: int) -> bool:
        """Store ``span`` more tokens of a stream."""
        segments = (Segment(stream.opening.request_id, stream.opening.label, span),)
        if self._manager.admit(segments, _STEP):
            return False
        self._manager.commit(segments, _STEP)
        return True

    def close(self, stream: Stream) -> None:
        """Give back what a stream holds."""
        self._manager.close(stream.opening.request_id)


class _Queue:
    """First come, first served: who waits, who is open, and who ends next.

    The oldest ends when a request waits and there is no place or no room for it. To end, it stores
    what it generated; where the pool has no pages for that, the youngest starts again later.

    Args:
        cache: Where streams are opened.
        max_open: Streams that may be open at once.
    """

    def __init__(self, cache: _Cache, max_open: int) -> None:
        self._cache = cache
        self._max_open = max_open
        self._waiting: deque[Stream] = deque()
        self._open: deque[Stream] = deque()
        self.num_waits = 0
        self.num_preempted = 0
        self.num_reused_tokens = 0

    def add(self, stream: Stream) -> None:
        """Put a stream at the end of the queue and start it, whoever has to end for that."""
        self._waiting.append(stream)
        has_waited = False
        while self._waiting:
            if len(self._open) == self._max_open:
                self._finish_oldest()
            elif self._try_start(self._waiting[0]):
                self._open.append(self._waiting.popleft())
            else:
                has_waited = True
                self._finish_oldest()
        self.num_waits += has_waited

    def finish_all(self) -> None:
        """End every stream."""
        while self._open:
            self._finish_oldest()
            while self._waiting and self._try_start(self._waiting[0]):
                self._open.append(self._waiting.popleft())

    def _try_start(self, stream: Stream) -> bool:
        num_reused = self._cache.try_open(stream)
        if num_reused is None:
            assert self._open, f"request {stream.opening.request_id} fits, but not if it is alone"
            return False
        if not stream.was_started:
            self.num_reused_tokens += num_reused
            stream.was_started = True
        missing = stream.opening.num_prompt_tokens - num_reused
        if missing:
            is_written = self._cache.try_write(stream, missing)
            assert is_written, f"request {stream.opening.request_id} was opened without its pages"
        return True

    def _finish_oldest(self) -> None:
        stream = self._open.popleft()
        if stream.num_generated:
            stream.ids.length += stream.num_generated
            while not self._cache.try_write(stream, stream.num_generated):
                youngest = self._open.pop()
                self._cache.close(youngest)
                self._waiting.appendleft(youngest)
                self.num_preempted += 1
        self._cache.close(stream)
