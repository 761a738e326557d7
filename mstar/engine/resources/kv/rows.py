"""Rows: the segments of one step as arrays, made once and used while the segments stay the same."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mstar.engine.resources.kv.table import PageTable
from mstar.engine.resources.step import Segment


@dataclass(slots=True)
class Rows:
    """The arrays of one tuple of segments, ``[B]`` unless they say otherwise."""

    segments: tuple[Segment, ...]
    rows: npt.NDArray[np.int64]
    spans: npt.NDArray[np.int64]
    qo_lens: npt.NDArray[np.int32]
    """The spans as plans have them."""
    indptr: npt.NDArray[np.int32]
    stored: npt.NDArray[np.int64]
    """The table's, which no other segments may move while this is kept."""
    is_decode: bool
    """Every segment is one token."""
    has_twins: bool
    """Several segments belong to one stream."""


def make_rows(segments: tuple[Segment, ...], owners: Sequence[int], table: PageTable) -> Rows:
    """Return the arrays of a step.

    Args:
        segments: In the step's order.
        owners: The table's row of each segment's stream.
        table: Knows what is stored.
    """
    rows = np.array(owners, np.int64)
    spans = np.fromiter((segment.span for segment in segments), np.int64, len(segments))
    indptr = np.zeros(len(segments) + 1, np.int32)
    np.cumsum(spans, out=indptr[1:])
    stored = table.stored[rows]
    has_twins = len(set(owners)) < len(owners)
    if has_twins:
        ends: dict[int, int] = {}
        for i, row in enumerate(owners):
            stored[i] = ends.get(row, stored[i])
            ends[row] = int(stored[i] + spans[i])
    is_decode = bool((spans == 1).all())
    return Rows(segments, rows, spans, spans.astype(np.int32), indptr, stored, is_decode, has_twins)
