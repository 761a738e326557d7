"""Reads request traces in Mooncake's format and checks every line; knows no cache."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from mstar.errors import TraceError

BLOCK_LEN = 512
"""What one of ``hash_ids`` stands for, in tokens."""
MAX_LEN = 1 << 24
"""The longest prompt or output that is taken for one, in tokens."""

_Length = Annotated[int, msgspec.Meta(le=MAX_LEN)]


class TracedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One line of a trace; fields beside these are ignored.

    Source:
        The traces of "Mooncake: Trading More Storage for Less Computation", FAST 2025.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Arrival after the trace's begin, in milliseconds."""
    input_length: Annotated[_Length, msgspec.Meta(ge=1)]
    """The prompt, in tokens."""
    output_length: Annotated[_Length, msgspec.Meta(ge=0)]
    """What was generated, in tokens."""
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    """Names of the prompt's blocks in order, the unfinished last one included."""


def read_trace(path: Path, limit: int | None = None) -> list[TracedRequest]:
    """Return the requests of a trace in the file's order; empty lines are skipped.

    Args:
        path: JSON lines, compressed where the name ends in ``.gz``.
        limit: Requests to read at most; what stands behind them is not looked at.

    Raises:
        TraceError: If the file cannot be read, a line is no request or contradicts itself, or
            there is no request at all; it names file, line and field.
    """
    decoder = msgspec.json.Decoder(TracedRequest)
    requests: list[TracedRequest] = []
    for number, line in _lines(path):
        if limit is not None and len(requests) == limit:
            break
        try:
            request = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}:{number}: {error}") from error
        needed = -(-request.input_length // BLOCK_LEN)
        if len(request.hash_ids) != needed:
            raise TraceError(
                f"{path}:{number}: `hash_ids` has {len(request.hash_ids)} blocks; an "
                f"`input_length` of {request.input_length} tokens needs {needed} of {BLOCK_LEN}"
            )
        requests.append(request)
    if not requests:
        raise TraceError(f"{path}: there is no request in it")
    return requests


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers from 1 on."""
    number = 0
    try:
        file = _open(path)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    try:
        with file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}:{number + 1}: cannot be read: {error}") from error


def _open(path: Path) -> gzip.GzipFile | BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
