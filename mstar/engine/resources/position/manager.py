"""PositionManager: the counter of every stream, and the positions of each step."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from mstar.engine.resources.base import Deployment, Opening, Refusal, Resource
from mstar.engine.resources.mirror import Mirror, send
from mstar.engine.resources.position.config import (
    PositionConfig,
    PositionSpec,
    PositionStep,
    PosScheme,
    RopeParams,
)
from mstar.engine.resources.position.counters import GRID_AXES, SpanCounters
from mstar.engine.resources.position.indices import Ints, Runs, make_runs, replace_ids
from mstar.engine.resources.position.rope import CosSinTable, Rotation
from mstar.engine.resources.spans import Span, is_item_slot
from mstar.engine.resources.step import ResourceStep, Segment
from mstar.errors import ConfigError, ContextLengthError, RequestError

_FIRST_ROWS = 4096
"""Rows a table begins with; it grows as longer requests come."""


class PositionPlan:
    """The positions of one step's ``T`` new slots, in the step's order.

    Args:
        ids: int64 ``[T]``, or ``[axes, T]`` where there are several axes, on the deployment's
            device.
        rotations: Each distinct parameter set's angles.
        layers: The rotation of each layer by its place in ``rotations``; ``None``: all the first.
    """

    __slots__ = ("_layers", "_only", "_rotations", "ids")

    def __init__(
        self, ids: Tensor, rotations: tuple[Rotation, ...], layers: tuple[int | None, ...] | None
    ) -> None:
        self.ids = ids
        self._rotations = rotations
        self._layers = layers
        self._only = rotations[0] if layers is None and rotations else None

    def rotation(self, layer: int) -> Rotation | None:
        """Return what rotates the heads of ``layer``; ``None``: the layer does not rotate.

        Raises:
            ConfigError: If neither ``rotary_dim`` nor ``head_dim`` was declared.
        """
        if self._only is not None:
            return self._only
        index = 0 if self._layers is None else self._layers[layer]
        if index is None:
            return None
        if not self._rotations:
            raise ConfigError(
                "nothing can rotate: PositionConfig has neither rotary_dim nor head_dim"
            )
        return self._rotations[index]

    def rotate(self, q: Tensor, k: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return q and k of one layer, rotated, in their own dtypes; the inputs stay.

        Args:
            q: ``[T, num_qo_heads, head_dim]``; a view of a larger tensor will do.
            k: ``[T, num_kv_heads, head_dim]``, likewise.
            layer: Index of the layer.
        """
        rotation = self._only or self.rotation(layer)
        if rotation is None:
            return q, k
        return rotation(q), rotation(k)

    def rotate_merged(self, qk: Tensor, layer: int) -> Tensor:
        """Return the heads of q and k together, rotated; half the launches of ``rotate``.

        Args:
            qk: ``[T, num_qo_heads + num_kv_heads, head_dim]``, q's heads before k's.
            layer: Index of the layer.
        """
        rotation = self._only or self.rotation(layer)
        return qk if rotation is None else rotation(qk)


class PositionManager(Resource):
    """Owner of one counter for each stream: the next position to use.

    A counter is not a stored length: blocks and explicit ids make the two differ.

    Args:
        resource_key: Its key among the model's resources.
        config: Position rule and rotation.
        deployment: Bound of the ids, number of streams to expect, and device.

    Raises:
        ConfigError: If neither the config nor the deployment bounds the ids.
    """

    in_pieces = "plan_fixed"

    def __init__(self, resource_key: str, config: PositionConfig, deployment: Deployment) -> None:
        self.resource_key = resource_key
        self.config = config
        self._device = torch.device(deployment.device)
        self._limit = config.max_position or deployment.max_model_len
        if self._limit < 1:
            raise ConfigError(
                f"positions of {resource_key!r} have no bound; give max_position or max_model_len"
            )
        self._counters = np.zeros(deployment.max_num_seqs, np.int64)
        self._free = list(range(deployment.max_num_seqs - 1, -1, -1))
        self._stored = np.zeros(deployment.max_num_seqs, np.int64)
        """Stored slots by row, in tokens; kept only once they and the counters are apart."""
        self._is_apart = config.scheme is PosScheme.BLOCK
        """Some counter may be another number than its stream's stored slots."""
        self._row_of: dict[tuple[str, str], int] = {}
        self._openings: dict[int, Opening] = {}
        self._layouts: dict[int, SpanCounters] = {}
        """Of the streams whose prompt has a layout, by row."""
        self._labels: dict[str, list[str]] = {}
        self._runs: Runs | None = None
        self._fixed: dict[int, tuple[Mirror, list[Tensor]]] = {}
        """Memory of ids and angles for each size of recorded steps."""
        distinct = config.distinct()
        self._layers = self._layers_of(config, distinct)
        self._columns: Tensor | None = None
        """The axis of each column of a table; ``None``: positions have one axis."""
        if config.axes > 1:
            self._columns = torch.tensor(config.pair_axes * 2, device=self._device)
        self._tables: tuple[CosSinTable, ...] = ()
        if config.rotated_dim is not None:
            is_double = config.rope_dtype == torch.float64
            self._tables = tuple(
                CosSinTable(
                    config.rotated_dim,
                    params,
                    num_rows=min(self._limit, _FIRST_ROWS),
                    limit=self._limit,
                    dtype=torch.float64 if is_double else torch.float32,
                    device=self._device,
                )
                for params in distinct
            )

    @staticmethod
    def _layers_of(
        config: PositionConfig, distinct: tuple[RopeParams, ...]
    ) -> tuple[int | None, ...] | None:
        if config.layer_rope is None:
            return None
        return tuple(None if rope is None else distinct.index(rope) for rope in config.layer_rope)

    @classmethod
    def build(
        cls, spec: PositionSpec, deployment: Deployment, resources: Mapping[str, Resource]
    ) -> Self:
        """Return a manager without streams."""
        return cls(spec.resource_key, spec.config, deployment)

    # A request's life.

    def ever_fits(self, opening: Opening) -> Refusal | None:
        """Refuse a layout that needs other axes, or that ends beyond what positions there are."""
        if not opening.spans:
            return None
        axes = self.config.axes
        if axes != GRID_AXES and any(span.grid is not None for span in opening.spans):
            reason = f"the layout has a grid of {GRID_AXES} axes; positions have {axes}"
            remedy = "leave out what has the grid"
            return Refusal(self.resource_key, reason, remedy=remedy, param="prompt")
        layout = SpanCounters(opening.spans, self.config)
        end = layout.at(layout.num_slots)
        if end <= self._limit:
            return None
        reason = f"the layout ends at position {end}; positions are below {self._limit}"
        return Refusal(self.resource_key, reason)

    def match(self, opening: Opening, limit: int) -> int:
        """Allow no reuse where nothing says what blocks a stream is made of."""
        if self.config.scheme is PosScheme.BLOCK and not self._spans(opening):
            return 0
        return limit

    def _spans(self, opening: Opening) -> Sequence[Span]:
        """Return the layout that decides a stream's positions; a prompt of ids is one block."""
        if opening.spans or self.config.scheme is PosScheme.SEQUENTIAL:
            return opening.spans
        return (Span(opening.num_prompt_tokens),) if opening.num_prompt_tokens else ()

    def open(self, opening: Opening, num_reused: int) -> Refusal | None:
        """Begin a stream at the position that its layout has at slot ``num_reused``.

        Raises:
            ConfigError: If slots are reused although ``match`` refused them.
        """
        if num_reused and self.match(opening, num_reused) == 0:
            raise ConfigError(
                f"{num_reused} slots of request {opening.request_id!r} are reused; positions of "
                f"scheme {self.config.scheme.value!r} allow none without a layout"
            )
        self._add(opening, num_reused)
        return None

    def skip(self, opening: Opening, num_reused: int) -> None:
        """Move a stream on to the position that its layout has at slot ``num_reused``."""
        row = self._row_of[opening.request_id, opening.label]
        layout = self._layouts.get(row)
        self._counters[row] = num_reused if layout is None else layout.at(num_reused)
        self._stored[row] = num_reused
        self._runs = None
        self.revision += 1

    def _add(self, opening: Opening, stored: int) -> int:
        key = (opening.request_id, opening.label)
        assert key not in self._row_of, f"stream {key} is open already"
        if not self._free:
            size = len(self._counters)
            self._counters = np.concatenate((self._counters, np.zeros(size, np.int64)))
            self._stored = np.concatenate((self._stored, np.zeros(size, np.int64)))
            self._free = list(range(2 * size - 1, size - 1, -1))
        row = self._row_of[key] = self._free.pop()
        self._labels.setdefault(opening.request_id, []).append(opening.label)
        self._openings[row] = opening
        self._stored[row] = self._counters[row] = stored
        spans = self._spans(opening)
        if spans:
            self._part()
            layout = self._layouts[row] = SpanCounters(spans, self.config)
            self._counters[row] = layout.at(stored)
        if self.config.scheme is PosScheme.BLOCK:
            # Where generated ids stand depends on the steps that made them.
            opening.naming.cut(self._layouts[row].num_slots if spans else 0)
        return row

    def _part(self) -> None:
        """Begin to keep stored slots beside the counters, which were the same until now."""
        if not self._is_apart:
            self._stored[:] = self._counters
            self._is_apart = True

    def fork(self, request_id: str, label: str, opening: Opening) -> Refusal | None:
        """Give another stream this one's counter; opens it if it is not open.

        Raises:
            KeyError: If the source stream is not open.
        """
        source = self._row_of[request_id, label]
        target = self._row_of.get((opening.request_id, opening.label))
        if target is None:
            target = self._add(opening, 0)
        self._counters[target] = self._counters[source]
        self._stored[target] = self._stored[source]
        self.revision += 1
        return None

    def counter(self, request_id: str, label: str = "main") -> int:
        """Return the next position of a stream."""
        return int(self._counters[self._row_of[request_id, label]])

    def set_counter(self, request_id: str, label: str, counter: int) -> None:
        """Move a stream to a position, also backwards: it was moved here or rolled back."""
        if counter < 0:
            raise ConfigError(f"a counter cannot be {counter}; positions begin at 0")
        self._part()
        self._counters[self._row_of[request_id, label]] = counter
        self.revision += 1

    def close(self, request_id: str) -> None:
        """Forget the counters of all streams of the request."""
        for label in self._labels.pop(request_id, ()):
            row = self._row_of.pop((request_id, label))
            self._free.append(row)
            del self._openings[row]
            self._layouts.pop(row, None)
        self._runs = None

    # A step's life.

    def plan(
        self, segments: tuple[Segment, ...], step: ResourceStep, plans: Mapping[str, Any]
    ) -> PositionPlan:
        """Return the step's ids and angles; the same again until a commit.

        Raises:
            ConfigError: If ``pos_ids`` or ``advance`` does not fit the segments or the axes.
            ContextLengthError: If an id is not below the limit; names the request.
            RequestError: If an id is negative, or a counter would become so.
        """
        ids, end = self._ids(segments, step)
        on_device = send(ids, self._device)
        angles = []
        for table in self._tables:
            table.reserve(end)
            angles.append(self._gather(table, on_device))
        return self._plan_of(on_device, angles)

    def plan_fixed(
        self,
        size: int,
        segments: tuple[Segment, ...],
        step: ResourceStep,
        plans: Mapping[str, Any],
        ahead: int = 0,
    ) -> PositionPlan | None:
        """Return the ids and angles of a step, filled up with position 0.

        Ahead only where the scheme alone decides the ids.

        Raises:
            ConfigError, ContextLengthError, RequestError: As ``plan`` does.
        """
        if ahead:
            runs = self._runs_of(segments)
            if isinstance(step, PositionStep) and (step.pos_ids is not None or step.advance):
                return None
            if runs.twins or (self._layouts and self._laid_out(runs)):
                return None
            starts = runs.starts(self._counters, runs.moves) + ahead * runs.moves
            own = self._spread(runs.ids(starts))
            end = int(own.max(initial=0)) + 1
            if end > self._limit:
                return None
        else:
            own, end = self._ids(segments, step)
        ids, angles = self._fixed.get(size, (None, []))
        if ids is None:
            ids = Mirror(size * self.config.axes, torch.int64, self._device)
            angles = [table.rows.new_zeros(size, table.rows.shape[1]) for table in self._tables]
            self._fixed[size] = (ids, angles)
        shape = (*own.shape[:-1], size)
        filled = ids.array.reshape(shape)
        filled[..., : own.shape[-1]] = own
        filled[..., own.shape[-1] :] = 0
        ids.send()
        on_device = ids.tensor.view(shape)
        for table, rows in zip(self._tables, angles, strict=True):
            table.reserve(end)
            self._gather(table, on_device, rows)
        return self._plan_of(on_device, angles)

    def _gather(self, table: CosSinTable, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Return ``[T, rotary_dim]``: each column of a table at the ids of its axis."""
        if self._columns is None:
            return torch.index_select(table.rows, 0, ids, out=out)
        return torch.gather(table.rows, 0, ids[self._columns].T, out=out)

    def _plan_of(self, ids: Tensor, angles: list[Tensor]) -> PositionPlan:
        interleave, dtype = self.config.interleave, self.config.rope_dtype
        rotations = (Rotation(rows, interleave=interleave, dtype=dtype) for rows in angles)
        return PositionPlan(ids, tuple(rotations), self._layers)

    def _ids(self, segments: tuple[Segment, ...], step: ResourceStep) -> tuple[Ints, int]:
        """Return the step's ids, checked, and one more than the largest."""
        runs = self._runs_of(segments)
        laid_out = self._laid_out(runs) if self._layouts else []
        advance = _advance_of(step, segments)
        moves = self._moves(runs, laid_out, advance)
        starts = runs.starts(self._counters, moves)
        if advance is not None:
            self._check_moves(runs, starts, moves)
        ids = self._spread(runs.ids(starts))
        for index, layout, start in laid_out:
            own = slice(runs.offset(index), runs.offset(index + 1))
            stop = start + segments[index].span
            ids[..., own] = starts[index] + layout.ids(start, stop) - layout.at(start)
        if isinstance(step, PositionStep) and step.pos_ids is not None:
            given = replace_ids(ids, runs, step)
            self._cut_named(runs, ids, given)
            ids = given
        return ids, self._check_ids(ids, runs)

    def _spread(self, ids: Ints) -> Ints:
        """Return ids that are the same on all axes."""
        return ids if self.config.axes == 1 else np.tile(ids, (self.config.axes, 1))

    def _laid_out(self, runs: Runs) -> list[tuple[int, SpanCounters, int]]:
        """Return segments whose positions their stream's layout decides: index, it, first slot."""
        found = []
        starts = self._slots(runs)
        for index, row in enumerate(runs.rows.tolist()):
            layout, start, span = self._layouts.get(row), int(starts[index]), int(runs.spans[index])
            if layout is None:
                continue
            # Generated ids had a step each, also where a resumed stream computes them at once.
            is_again = 1 < span <= len(self._openings[row].tokens) - start
            if start < layout.num_slots or is_again:
                found.append((index, layout, start))
        return found

    def _slots(self, runs: Runs) -> Ints:
        """Return the slots stored before each segment, ``[B]``."""
        return runs.starts(self._stored, runs.spans)

    def _moves(
        self,
        runs: Runs,
        laid_out: list[tuple[int, SpanCounters, int]],
        advance: tuple[int, ...] | None,
    ) -> Ints:
        """Return how far each segment moves its counter, ``[B]``.

        Where a step has its own idea of that, what stands behind is out of reuse.
        """
        moves = runs.moves
        if laid_out:
            moves = moves.copy()
            for index, layout, start in laid_out:
                moves[index] = layout.at(start + runs.segments[index].span) - layout.at(start)
        if advance is None:
            return moves
        self._part()
        given = np.asarray(advance, np.int64)
        differing = (given != moves).nonzero()[0].tolist()
        slots = self._slots(runs) if differing else moves
        for index in differing:
            stop = int(slots[index]) + runs.segments[index].span
            self._openings[int(runs.rows[index])].naming.cut(stop)
        return given

    def _cut_named(self, runs: Runs, ids: Ints, given: Ints) -> None:
        """Keep slots of token ids out of reuse whose positions no layout tells.

        An item's digest names what its positions follow from.
        """
        self._part()
        slots = self._slots(runs)
        # An id differs if it does on any axis.
        differs = np.logical_or.reduce(np.atleast_2d(ids != given))
        for index in range(len(runs.segments)):
            own = slice(runs.offset(index), runs.offset(index + 1))
            opening = self._openings[int(runs.rows[index])]
            for at in differs[own].nonzero()[0].tolist():
                slot = int(slots[index]) + at
                if not is_item_slot(opening.spans, slot):
                    opening.naming.cut(slot)
                    break

    def commit(self, segments: tuple[Segment, ...], step: ResourceStep) -> None:
        """Move the counters behind the step."""
        runs = self._runs_of(segments)
        laid_out = self._laid_out(runs) if self._layouts else []
        moves = self._moves(runs, laid_out, _advance_of(step, segments))
        if runs.twins:
            np.add.at(self._counters, runs.rows, moves)
        else:
            self._counters[runs.rows] += moves
        if self._is_apart:
            np.add.at(self._stored, runs.rows, runs.spans)

    def check(self) -> None:
        """Verify that rows are owned once and that no counter is negative."""
        rows = sorted([*self._free, *self._row_of.values()])
        assert rows == list(range(len(self._counters))), (rows, len(self._counters))
        named = {(request, label) for request, labels in self._labels.items() for label in labels}
        assert named == set(self._row_of), (named, set(self._row_of))
        for key, row in self._row_of.items():
            assert self._counters[row] >= 0, (key, int(self._counters[row]))

    def _runs_of(self, segments: tuple[Segment, ...]) -> Runs:
        if self._runs is None or self._runs.segments is not segments:
            self._runs = make_runs(segments, self._row_of, self.config)
        return self._runs

    def _check_moves(self, runs: Runs, starts: Ints, moves: Ints) -> None:
        for segment, start, move in zip(
            runs.segments, starts.tolist(), moves.tolist(), strict=True
        ):
            if start + move < 0:
                raise RequestError(
                    f"advance moves the counter of request {segment.request_id!r}, label "
                    f"{segment.label!r}, from {start} by {move}; positions begin at 0"
                )

    def _check_ids(self, ids: Ints, runs: Runs) -> int:
        """Return one more than the largest id; no table is read beyond what this allows."""
        if not ids.size:
            return 0
        # Read without sign, an id below 0 is one far beyond the limit.
        largest = int(ids.view(np.uint64).max())
        if largest < self._limit:
            return largest + 1
        flat = ids.ravel()
        at = int(np.nonzero((flat < 0) | (flat >= self._limit))[0][0])
        value, bad = int(flat[at]), at % ids.shape[-1]
        segment = runs.segments[bad if runs.owners is None else int(runs.owners[bad])]
        where = f"request {segment.request_id!r}, label {segment.label!r}"
        if value < 0:
            raise RequestError(f"position {value} of {where} is negative; positions begin at 0")
        raise ContextLengthError(
            f"position {value} of {where} is not below {self._limit}; "
            "shorten the request or raise max_position"
        )


def _advance_of(step: ResourceStep, segments: tuple[Segment, ...]) -> tuple[int, ...] | None:
    advance = step.advance if isinstance(step, PositionStep) else None
    if advance is not None and len(advance) != len(segments):
        raise ConfigError(
            f"advance has {len(advance)} entries; the step has {len(segments)} segments"
        )
    return advance
