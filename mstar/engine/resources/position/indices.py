"""Position ids of one step from counters and segments, and where the counters go."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mstar.engine.resources.position.config import PositionConfig, PositionStep, PosScheme
from mstar.engine.resources.step import Segment
from mstar.errors import ConfigError

Ints = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Runs:
    """The segments of one step as arrays, made once and used while the segments stay the same.

    With ``B`` segments and ``T`` new slots in all.
    """

    segments: tuple[Segment, ...]
    rows: Ints
    """``[B]``: row of each segment's counter."""
    spans: Ints
    """``[B]``: new slots of each segment."""
    owners: Ints | None
    """``[T]``: segment of each slot; ``None``: every segment has one slot."""
    offsets: Ints
    """``[T]``: how far behind its segment's start each slot's id lies."""
    moves: Ints
    """``[B]``: how far the scheme moves each counter."""
    twins: tuple[tuple[int, int], ...]
    """Pairs of a segment and the one of the same stream before it; usually none."""

    def starts(self, counters: Ints, moves: Ints) -> Ints:
        """Return ``[B]``: the counter that each segment begins at.

        Args:
            counters: All counters, by row.
            moves: ``[B]``, how far each segment moves its counter.
        """
        starts = counters[self.rows]
        for later, earlier in self.twins:
            starts[later] = starts[earlier] + moves[earlier]
        return starts

    def offset(self, index: int) -> int:
        """Return the place of a segment's first slot among all ``T``."""
        return int(self.spans[:index].sum())

    def ids(self, starts: Ints) -> Ints:
        """Return ``[T]``: the scheme's id of every new slot."""
        if self.owners is None:
            return starts
        return starts[self.owners] + self.offsets


def _sequential_offsets(spans: Ints) -> Ints:
    ends = np.cumsum(spans)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - spans, spans)


def _block_offsets(spans: Ints) -> Ints:
    return np.zeros(int(spans.sum()), np.int64)


def _sequential_moves(spans: Ints, config: PositionConfig) -> Ints:
    return spans


def _block_moves(spans: Ints, config: PositionConfig) -> Ints:
    return np.where(spans > 0, config.block_step, 0)


_OFFSETS: Mapping[PosScheme, Callable[[Ints], Ints]] = {
    PosScheme.SEQUENTIAL: _sequential_offsets,
    PosScheme.BLOCK: _block_offsets,
}
_MOVES: Mapping[PosScheme, Callable[[Ints, PositionConfig], Ints]] = {
    PosScheme.SEQUENTIAL: _sequential_moves,
    PosScheme.BLOCK: _block_moves,
}


def make_runs(
    segments: tuple[Segment, ...], row_of: Mapping[tuple[str, str], int], config: PositionConfig
) -> Runs:
    """Return the arrays that describe ``segments`` under the config's scheme.

    Args:
        segments: In the step's order.
        row_of: Counter row of each open stream, by request and label.
        config: Names the scheme.

    Raises:
        KeyError: If a segment's stream is not open.
    """
    count = len(segments)
    rows = np.fromiter((row_of[s.request_id, s.label] for s in segments), np.int64, count)
    spans = np.fromiter((s.span for s in segments), np.int64, count)
    twins: list[tuple[int, int]] = []
    last: dict[int, int] = {}
    for index, row in enumerate(rows.tolist()):
        if row in last:
            twins.append((index, last[row]))
        last[row] = index
    is_decode = bool((spans == 1).all())
    return Runs(
        segments=segments,
        rows=rows,
        spans=spans,
        owners=None if is_decode else np.repeat(np.arange(count), spans),
        offsets=_OFFSETS[config.scheme](spans),
        moves=_MOVES[config.scheme](spans, config),
        twins=tuple(twins),
    )


def replace_ids(ids: Ints, runs: Runs, step: PositionStep) -> Ints:
    """Return ``ids`` with those that the step gives itself put in.

    Args:
        ids: ``[T]`` or ``[axes, T]``, what the scheme says.
        runs: The step's segments.
        step: Its ``pos_ids`` is not ``None``.

    Raises:
        ConfigError: If ``pos_ids`` names a label that the step lacks, is one tensor for several
            labels, is not made of integers, is too short or too long, or has other axes.
    """
    given = step.pos_ids
    labels = list(dict.fromkeys(segment.label for segment in runs.segments))
    if isinstance(given, Tensor):
        if len(labels) > 1:
            raise ConfigError(
                f"pos_ids is one tensor and the step has the labels {labels}; give a dict by label"
            )
        given = dict.fromkeys(labels, given)
    assert given is not None
    out = ids.copy()
    spans = [segment.span for segment in runs.segments]
    for label, tensor in given.items():
        if label not in labels:
            raise ConfigError(f"pos_ids names the label {label!r}; the step has {labels}")
        own = np.repeat([segment.label == label for segment in runs.segments], spans)
        values = _as_ids(tensor, label, ids.shape[:-1])
        if values.shape[-1] != int(own.sum()):
            raise ConfigError(
                f"pos_ids of label {label!r} has {values.shape[-1]} ids; "
                f"its segments have {int(own.sum())} new slots"
            )
        out[..., own] = values
    return out


def _as_ids(tensor: Tensor, label: str, axes: tuple[int, ...]) -> Ints:
    """Return ids as an array; ``axes`` is what its shape is to have before the slots."""
    if tensor.dim() != len(axes) + 1 or tensor.shape[:-1] != axes:
        wanted = ", ".join([*map(str, axes), "num_slots"])
        raise ConfigError(
            f"pos_ids of label {label!r} has the shape {list(tensor.shape)}; positions of "
            f"{axes[0] if axes else 1} axes need [{wanted}]"
        )
    if tensor.is_floating_point() or tensor.is_complex():
        raise ConfigError(f"pos_ids of label {label!r} is {tensor.dtype}; ids are integers")
    values: Ints = tensor.detach().cpu().numpy().astype(np.int64)
    return values
