"""Frontier: who is about to compute what a key names, so that nobody else does it too."""

from collections.abc import Sequence

StreamId = tuple[str, str]
"""A request's id and the stream's label."""


class Frontier:
    """The names that open streams have for what each computes next.

    Whoever wants one that another request computes waits for it. A request that waits in one of its
    streams is waited for in none, so that no two wait for each other.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, StreamId] = {}
        self._names: dict[StreamId, tuple[bytes, ...]] = {}
        """Of streams that hold any."""
        self._waiting: set[StreamId] = set()
        """Streams a part of which another request was about to compute when they moved last."""

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, stream: StreamId) -> bool:
        """Tell whether a stream holds a name."""
        return stream in self._names

    def is_others(self, name: bytes, request_id: str) -> bool:
        """Tell whether another request is about to compute what a key names."""
        holder = self._holders.get(name)
        return holder is not None and holder[0] != request_id

    def move(
        self, stream: StreamId, names: Sequence[bytes], siblings: Sequence[StreamId] = ()
    ) -> None:
        """Say what a stream computes next, unless its request waits for another's streams.

        Args:
            stream: Which.
            names: What it computes next; empty: nothing that others could want.
            siblings: All open streams of its request.
        """
        self._leave(stream)
        request_id = stream[0]
        self._waiting.discard(stream)
        if any(self.is_others(name, request_id) for name in names):
            self._waiting.add(stream)
        if not self._waiting.isdisjoint((stream, *siblings)):
            for sibling in siblings:
                self._leave(sibling)
            return
        # Streams of one request may compute the same side by side.
        own = tuple(name for name in names if name not in self._holders)
        if own:
            self._names[stream] = own
            self._holders.update(dict.fromkeys(own, stream))

    def _leave(self, stream: StreamId) -> None:
        for name in self._names.pop(stream, ()):
            del self._holders[name]

    def check(self) -> None:
        """Verify that both directions agree and nobody who waits is waited for."""
        held = {name: stream for stream, names in self._names.items() for name in names}
        assert held == self._holders, "what is computed next is not what the streams say"
        waiting = {request_id for request_id, _ in self._waiting}
        holding = {request_id for request_id, _ in self._names}
        assert not waiting & holding, f"{waiting & holding} wait and are waited for"
