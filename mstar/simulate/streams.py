"""Makes streams with ids and page keys of a trace's requests.

A trace names blocks, not ids. The ids of a block follow from the SHA-256 of its name, so that they
are the same in every process, and equal for equal names only::

    digest = SHA-256("block <name>")  = eight ids of four bytes, little-endian
    ids    = those eight, again and again to the block's length
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import overload

import numpy as np
import numpy.typing as npt

from mstar.engine.resources.base import Opening
from mstar.engine.resources.kv.keys import chain, fingerprint
from mstar.simulate.outcome import Reading, Setup
from mstar.simulate.trace import BLOCK_LEN, TracedRequest

ROOT = fingerprint("mstar-simulate-v1")
"""The key of the empty prefix."""
# Ids that one SHA-256 makes.
_DIGEST_LEN = 8

_IdArray = npt.NDArray[np.uint32]


class Ids(Sequence[int]):
    """Ids of a stream up to a length that grows, without a Python integer for each.

    Args:
        ids: ``[max_len]``: the prompt, then what is generated.
        length: Ids that are known at first.
    """

    def __init__(self, ids: _IdArray, length: int) -> None:
        self._ids = ids
        self.length = length

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        known = self._ids[: self.length]
        if isinstance(at, slice):
            part: Sequence[int] = known[at]  # type: ignore[assignment]
            return part
        return int(known[at])


@dataclass(slots=True)
class Stream:
    """One request on its way through the cache."""

    opening: Opening
    ids: Ids
    """The opening's tokens."""
    limit: int
    """Slots that it may reuse at most, in tokens."""
    num_generated: int
    """Slots that what it generates fills, in tokens."""
    was_started: bool = False


class Streams:
    """Makes streams, as a reading has them.

    By the prefix rule a prompt is filled up to whole pages with its last block's ids, and all of it
    may be reused. As served, a prompt is as long as it was, and its last token is computed.

    Args:
        setup: Page size, and whether generated tokens are stored.
        reading: What counts as reused.
    """

    def __init__(self, setup: Setup, reading: Reading) -> None:
        self._page_size = setup.page_size
        self._has_outputs = setup.outputs
        self._is_whole = reading is Reading.PREFIX_RULE
        self._digests = _Digests()

    def prompt_len(self, request: TracedRequest) -> int:
        """Return the slots of the prompt, in tokens."""
        if self._is_whole:
            return -(-request.input_length // self._page_size) * self._page_size
        return request.input_length

    def max_len(self, request: TracedRequest) -> int:
        """Return the slots that the stream may ever hold, in tokens."""
        return self.prompt_len(request) + (request.output_length if self._has_outputs else 0)

    def stream(self, number: int, request: TracedRequest) -> Stream:
        """Return the stream of the request at ``number`` of the trace."""
        prompt_len, max_len = self.prompt_len(request), self.max_len(request)
        digests = b"".join(map(self._digests.__getitem__, request.hash_ids))
        ids = _spread(digests, BLOCK_LEN)[:prompt_len]
        if max_len > prompt_len:
            own = sha256(b"generated %d" % number).digest()
            ids = np.concatenate([ids, _spread(own, max_len - prompt_len)])
        num_full = prompt_len // self._page_size
        pages = ids[: num_full * self._page_size].reshape(num_full, self._page_size)
        tokens = Ids(ids, prompt_len)
        opening = Opening(
            request_id=str(number),
            tokens=tokens,
            num_prompt_tokens=prompt_len,
            max_len=max_len,
            page_keys=chain(pages, root=ROOT),  # type: ignore[arg-type]
            root=ROOT,
        )
        return Stream(
            opening,
            tokens,
            limit=prompt_len if self._is_whole else prompt_len - 1,
            # The last token of an answer is never an input.
            num_generated=max(max_len - prompt_len - 1, 0),
        )


class _Digests(dict[int, bytes]):
    """SHA-256 of every block's name that was asked for."""

    def __missing__(self, name: int) -> bytes:
        digest = self[name] = sha256(b"block %d" % name).digest()
        return digest


def _spread(digests: bytes, length: int) -> _IdArray:
    """Return ``length`` ids for each digest, one after the other, ``[num_digests * length]``."""
    rows = np.frombuffer(digests, "<u4").reshape(-1, _DIGEST_LEN)
    return np.tile(rows, (1, -(-length // _DIGEST_LEN)))[:, :length].ravel()
