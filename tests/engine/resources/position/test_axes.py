"""Positions of several axes: time, row and column."""

import importlib.util
import random
import sys
from collections.abc import Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from mstar.engine.resources.base import Deployment, Opening
from mstar.engine.resources.position.config import PositionConfig, PositionStep, PosScheme
from mstar.engine.resources.position.counters import SpanCounters, grid_places
from mstar.engine.resources.position.manager import PositionManager
from mstar.engine.resources.spans import Grid, Span
from mstar.engine.resources.step import Segment
from mstar.errors import ConfigError, ContextLengthError, RequestError

TESTS = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("oracle_rope", TESTS / "oracles" / "rope.py")
assert _spec is not None
assert _spec.loader is not None
oracle: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

LIMIT = 10_000
ITEM = b"x" * 32
AXES: dict[str, Any] = {"axes": 3, "axis_sections": (2, 3, 3), "head_dim": 16}


def manager(**config: Any) -> PositionManager:
    deployment = Deployment(max_num_seqs=2, max_model_len=LIMIT)
    return PositionManager("position", PositionConfig("kv", **(AXES | config)), deployment)


def stream(request_id: str, spans: Sequence[Span] = (), label: str = "main") -> Opening:
    length = sum(span.length for span in spans)
    return Opening(
        request_id=request_id,
        label=label,
        tokens=[1] * length,
        num_prompt_tokens=length,
        max_len=200,
        spans=spans,
    )


def run(made: PositionManager, parts: Sequence[tuple[str, int]], **step: Any) -> list[list[int]]:
    """Return the ids ``[axes][slot]`` of one step, planned and committed."""
    segments = tuple(Segment(name, "main", span) for name, span in parts)
    ids: list[list[int]] = made.plan(segments, PositionStep(**step), {}).ids.tolist()
    made.commit(segments, PositionStep(**step))
    made.check()
    return ids


def item(times: Sequence[int], rows: int, columns: int, advance: int | None = None) -> Span:
    grid = Grid(tuple(times), rows, columns)
    return Span(len(times) * rows * columns, ITEM, advance, False, "video", grid)


def walk(spans: Sequence[Span], num_behind: int) -> list[tuple[int, int, int]]:
    """Walk over the slots one by one; those behind the layout are generated ids."""
    found: list[tuple[int, int, int]] = []
    counter = 0
    for span in spans:
        if span.grid is None:
            found += [(counter + slot,) * 3 for slot in range(span.length)]
            own = span.length
        else:
            places = [
                (counter + time, counter + row, counter + column)
                for time in span.grid.times
                for row in range(span.grid.rows)
                for column in range(span.grid.columns)
            ]
            found += places
            own = max(max(place) for place in places) + 1 - counter
        counter += own if span.advance is None else span.advance
    return found + [(counter + slot,) * 3 for slot in range(num_behind)]


def columns_of(ids: list[list[int]]) -> list[tuple[int, ...]]:
    return list(zip(*ids, strict=True))


GRIDS = st.builds(
    item,
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(sorted),
    st.integers(1, 3),
    st.integers(1, 4),
    st.none() | st.integers(0, 9),
)
LAYOUTS = st.lists(
    st.builds(Span, st.integers(1, 6)) | GRIDS | st.just(Span(3, ITEM)), min_size=1, max_size=5
)


@given(LAYOUTS, st.data())
@settings(max_examples=200, deadline=None)
def test_every_slot_has_the_place_that_a_walk_over_the_slots_gives(
    spans: list[Span], data: st.DataObject
) -> None:
    counters = SpanCounters(spans, PositionConfig("kv", **AXES))
    expected = walk(spans, 4)
    cuts = sorted({0, len(expected), *data.draw(st.sets(st.integers(0, len(expected))))})
    for start, stop in pairwise(cuts):
        ids = counters.ids(start, stop)
        assert ids.dtype == np.int64
        assert columns_of(ids.tolist()) == expected[start:stop]


def test_published_positions_of_a_video_between_texts() -> None:
    """Three frames of two rows and two columns, two positions a frame, behind two ids."""
    spans = [Span(2), item((0, 2, 4), 2, 2), Span(2)]
    ids = SpanCounters(spans, PositionConfig("kv", **AXES)).ids(0, 17)
    assert ids.tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6, 7, 8, 9],
        [0, 1, 2, 2, 3, 3, 2, 2, 3, 3, 2, 2, 3, 3, 7, 8, 9],
        [0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 7, 8, 9],
    ]


def test_picture_of_any_size_costs_its_longer_side_only() -> None:
    for rows, columns in ((1, 1), (2, 7), (9, 3)):
        picture = item((0,), rows, columns)
        counters = SpanCounters([Span(5), picture], PositionConfig("kv", **AXES))
        assert counters.at(5 + picture.length) == 5 + max(rows, columns)


@given(LAYOUTS, st.integers(0, 50), st.integers(1, 13))
@settings(max_examples=100, deadline=None)
def test_stream_of_a_layout_has_its_places_wherever_it_begins_and_is_cut(
    spans: list[Span], reused: int, chunk: int
) -> None:
    made, opened = manager(), stream("a", spans)
    expected = walk(spans, 3)
    start = min(reused, len(expected) - 4)
    assert made.open(opened, start) is None
    found: list[tuple[int, ...]] = []
    while start + len(found) < len(expected) - 3:
        left = len(expected) - 3 - start - len(found)
        found += columns_of(run(made, [("a", min(chunk, left))]))
    found += [columns_of(run(made, [("a", 1)]))[0] for _ in range(3)]
    assert found == expected[start:]


def test_generated_ids_keep_their_places_when_a_preempted_stream_computes_them_again() -> None:
    spans = (Span(2), item((0,), 2, 5), Span(1))
    made, opened = manager(), stream("a", spans)
    made.open(opened, 0)
    run(made, [("a", 13)])
    tokens = [*opened.tokens, 5, 6, 7]
    once = [columns_of(run(made, [("a", 1)]))[0] for _ in range(3)]
    made.close("a")
    again = Opening(request_id="a", tokens=tokens, num_prompt_tokens=13, max_len=99, spans=spans)
    made.open(again, 4)
    assert columns_of(run(made, [("a", 12)]))[-3:] == once


def test_fork_and_neighbours_do_not_change_a_streams_places() -> None:
    spans = (Span(1), item((0, 1), 2, 2), Span(2))
    made = manager()
    made.open(stream("a", spans), 0)
    made.open(stream("b"), 7)
    both = columns_of(run(made, [("b", 2), ("a", 6), ("b", 1)]))
    assert both[2:8] == walk(spans, 0)[:6]
    assert both[:2] + both[8:] == [(7,) * 3, (8,) * 3, (9,) * 3]
    assert made.fork("a", "main", stream("c", spans)) is None
    assert columns_of(run(made, [("c", 5), ("a", 5)])) == 2 * walk(spans, 0)[6:]


def test_explicit_places_leave_the_counter_to_their_own_advance() -> None:
    made = manager()
    made.open(stream("a"), 4)
    given_ids = torch.tensor([[4, 4, 4], [4, 5, 6], [4, 4, 9]])
    assert run(made, [("a", 3)], pos_ids=given_ids, advance=(6,)) == given_ids.tolist()
    assert made.counter("a") == 10
    assert run(made, [("a", 1)]) == [[10]] * 3


@pytest.mark.parametrize(
    ("given_ids", "error", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), ConfigError, r"shape \[3\].* 3 axes need \[3, num_s"),
        (torch.zeros(2, 3, dtype=torch.int64), ConfigError, r"shape \[2, 3\].* 3 axes"),
        (torch.zeros(3, 2, dtype=torch.int64), ConfigError, "2 ids; its segments have 3"),
        (torch.tensor([[0, 0, 0], [0, 0, 0], [0, -3, 0]]), RequestError, "-3 of .*'a'.* negative"),
        (torch.full((3, 3), LIMIT), ContextLengthError, f"{LIMIT} .*'a'.* not below {LIMIT}"),
    ],
)
def test_explicit_places_on_other_axes_or_beyond_the_table_are_refused(
    given_ids: torch.Tensor, error: type[Exception], message: str
) -> None:
    made = manager()
    made.open(stream("a"), 0)
    step = (Segment("a", "main", 3),)
    with pytest.raises(error, match=message):
        made.plan(step, PositionStep(pos_ids=given_ids), {})


def test_other_place_of_a_token_on_any_axis_is_out_of_reuse() -> None:
    made = manager()
    spans = (Span(2), item((0,), 1, 4), Span(3))
    openings = {name: stream(name, spans) for name in "abcd"}
    for opened in openings.values():
        made.open(opened, 0)
    places = torch.from_numpy(SpanCounters(spans, PositionConfig("kv", **AXES)).ids(0, 9))
    for axis, name, slot in ((0, "a", 3), (1, "b", 1), (2, "c", 7)):
        changed = places.clone()
        changed[axis, slot] += 5
        run(made, [(name, 9)], pos_ids=changed)
    run(made, [("d", 9)], pos_ids=places)
    until = {name: opened.naming.until for name, opened in openings.items()}
    assert until == {"a": sys.maxsize, "b": 1, "c": 7, "d": sys.maxsize}


def test_layout_that_positions_cannot_have_is_refused_for_good() -> None:
    picture = (Span(2), item((0,), 2, 2))
    refusal = manager(axes=1, axis_sections=None).ever_fits(stream("a", picture))
    assert refusal is not None
    assert refusal.reason == "the layout has a grid of 3 axes; positions have 1"
    made = manager(max_position=12)
    assert made.ever_fits(stream("a", (Span(8), item((0, 3), 2, 2)))) is None
    refusal = made.ever_fits(stream("a", (Span(8), item((0, 4), 2, 2))))
    assert refusal is not None
    assert refusal.reason == "the layout ends at position 13; positions are below 12"
    assert made.ever_fits(stream("a")) is None


# What turns by which axis.

CHUNKED = "T" * 16 + "H" * 24 + "W" * 24
INTERLEAVED = "THW" * 20 + "TTTT"


@pytest.mark.parametrize(
    ("sections", "is_interleaved", "expected"),
    [
        ((16, 24, 24), False, CHUNKED),
        ((24, 20, 20), True, INTERLEAVED),
        ((11, 11, 10), True, "THW" * 10 + "TH"),
        ((1, 1), True, "TH"),
        ((3, 0, 1), True, "TTWT"),
    ],
)
def test_pairs_belong_to_the_axes_as_the_families_publish_it(
    sections: tuple[int, ...], is_interleaved: bool, expected: str
) -> None:
    config = PositionConfig(
        "kv", axes=len(sections), axis_sections=sections, interleave_axes=is_interleaved
    )
    assert "".join("THW"[axis] for axis in config.pair_axes) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axes": 0}, "axes is 0; it must be at least 1"),
        ({"axes": 3, "head_dim": 8}, "axes is 3; axis_sections must name their pairs"),
        ({"axes": 1, "axis_sections": (4,)}, r"axis_sections is \(4,\) and axes 1"),
        ({"axes": 3, "axis_sections": (2, 2)}, r"axis_sections is \(2, 2\) and axes 3"),
        ({"axes": 2, "axis_sections": (5, -1)}, r"axis_sections is \(5, -1\)"),
        ({"axes": 2, "axis_sections": (2, 3), "head_dim": 8}, "are 5 pairs; rotary_dim 8 has 4"),
        ({"axes": 2, "axis_sections": (1, 3), "interleave_axes": True}, "cannot be interleaved"),
    ],
)
def test_sections_that_do_not_share_out_the_pairs_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PositionConfig("kv", **fields)


def test_positions_without_rotation_may_have_axes_without_sections() -> None:
    made = manager(axis_sections=None, layer_rope=(None, None))
    made.open(stream("a", (item((0,), 2, 2),)), 0)
    plan = made.plan((Segment("a", "main", 4),), PositionStep(), {})
    assert plan.ids.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]]
    assert plan.rotation(1) is None


@pytest.mark.parametrize("interleave", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("interleave_axes", [False, True], ids=["chunked", "in turn"])
@pytest.mark.parametrize("rotary_dim", [16, 24])
def test_each_pair_turns_by_its_own_axis(
    interleave: bool, interleave_axes: bool, rotary_dim: int
) -> None:
    """The layout of pairs and that of axes are two things, and so is a tail that stays."""
    sections = (3, 3, 2) if rotary_dim == 16 else (4, 4, 4)
    made = manager(
        head_dim=24,
        rotary_dim=rotary_dim,
        axis_sections=sections,
        interleave=interleave,
        interleave_axes=interleave_axes,
    )
    spans = (Span(3), item((0, 7), 2, 3), Span(2))
    made.open(stream("a", spans), 0)
    plan = made.plan((Segment("a", "main", 17),), PositionStep(), {})
    q = torch.randn(17, 2, 24, generator=torch.Generator().manual_seed(0))
    got, _ = plan.rotate(q, q[:, :1], 0)
    freqs = oracle.frequencies(rotary_dim, 1e4)
    pairs = made.config.pair_axes
    for slot, places in enumerate(walk(spans, 0)):
        own = [freq * places[axis] for freq, axis in zip(freqs, pairs, strict=True)]
        wanted = oracle.rotate(q[slot, 1].tolist(), 1, own, interleave=interleave)
        torch.testing.assert_close(got[slot, 1], torch.tensor(wanted), rtol=0, atol=2e-6)
        assert torch.equal(got[slot, 1, rotary_dim:], q[slot, 1, rotary_dim:])


def test_text_turns_bit_by_bit_as_with_one_axis() -> None:
    q = torch.randn(300, 4, 16, generator=torch.Generator().manual_seed(1))
    step = (Segment("a", "main", 300),)
    rotated = []
    for fields in ({}, {"axes": 1, "axis_sections": None}):
        made = manager(**fields)
        made.open(stream("a"), 700)
        rotated.append(made.plan(step, PositionStep(), {}).rotate_merged(q, 0))
    assert torch.equal(*rotated)


def test_plan_of_a_recorded_step_is_that_of_the_step_filled_up_with_position_0() -> None:
    made = manager()
    for name, at in (("a", 9), ("b", 4), ("c", 70), ("d", 80)):
        made.open(stream(name), at)
    larger = tuple(Segment(name, "main", 1) for name in "abcd")
    fixed = made.plan_fixed(4, larger, PositionStep(), {})
    assert fixed is not None
    assert fixed.ids.tolist() == [[9, 4, 70, 80]] * 3
    # The memory is the same, and of the larger step nothing stays.
    step = larger[:2]
    eager = made.plan(step, PositionStep(), {})
    fixed = made.plan_fixed(4, step, PositionStep(), {})
    assert fixed is not None
    assert fixed.ids.tolist() == [[9, 4, 0, 0]] * 3
    q = torch.randn(4, 2, 16)
    assert torch.equal(fixed.rotate_merged(q, 0)[:2], eager.rotate_merged(q[:2], 0))
    assert torch.equal(fixed.rotate_merged(q, 0)[2:], q[2:])
    ahead = made.plan_fixed(4, step, PositionStep(), {}, 1)
    assert ahead is not None
    assert ahead.ids.tolist() == [[10, 5, 0, 0]] * 3


class Streams(RuleBasedStateMachine):
    """Streams of any layouts, in any steps, against a walk over their slots."""

    @initialize(interleave_axes=st.booleans())
    def begin(self, interleave_axes: bool) -> None:
        self.made = manager(axis_sections=(3, 3, 2), interleave_axes=interleave_axes)
        self.openings: dict[str, Opening] = {}
        self.places: dict[str, list[tuple[int, int, int]]] = {}
        self.stored: dict[str, int] = {}

    @rule(name=st.sampled_from("abc"), spans=LAYOUTS, share=st.floats(0, 1))
    def open(self, name: str, spans: list[Span], share: float) -> None:
        if name not in self.openings:
            opened = stream(name, spans)
            self.openings[name], self.places[name] = opened, walk(spans, 60)
            self.stored[name] = int(share * (opened.num_prompt_tokens - 1))
            assert self.made.open(opened, self.stored[name]) is None

    @precondition(lambda self: self.openings)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.openings)))
        self.made.close(name)
        for known in (self.openings, self.places, self.stored):
            del known[name]

    @precondition(lambda self: self.openings)
    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.openings)))
        opened = self.openings[name]
        if self.stored[name] < opened.num_prompt_tokens:
            self.stored[name] = data.draw(
                st.integers(self.stored[name], opened.num_prompt_tokens - 1)
            )
            self.made.skip(opened, self.stored[name])

    @precondition(lambda self: self.openings)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.openings)))
        copy = "f" + name
        if copy not in self.openings and len(name) == 1:
            source = self.openings[name]
            opened = stream(copy, source.spans)
            assert self.made.fork(name, "main", opened) is None
            self.openings[copy], self.places[copy] = opened, self.places[name]
            self.stored[copy] = self.stored[name]

    @precondition(lambda self: self.openings)
    @rule(data=st.data(), is_committed=st.booleans())
    def step(self, data: st.DataObject, is_committed: bool) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.openings)), max_size=4))
        after, parts, wanted = dict(self.stored), [], []
        for name in names:
            left = self.openings[name].num_prompt_tokens - after[name]
            span = data.draw(st.integers(0, left)) if left > 0 else 1
            if after[name] + span > len(self.places[name]):
                continue
            parts.append(Segment(name, "main", span))
            wanted += self.places[name][after[name] : after[name] + span]
            after[name] += span
        step = PositionStep()
        ids = self.made.plan(tuple(parts), step, {}).ids
        assert ids.shape == (3, len(wanted))
        assert columns_of(ids.tolist()) == wanted
        if is_committed:
            segments = tuple(parts)
            self.made.commit(segments, step)
            self.stored = after

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "made"):
            self.made.check()


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)


# The reference: transformers' own positions of Qwen2.5-VL.

MERGE, TOKENS_PER_SECOND = 2, 2


def reference_places(
    parts: Sequence[int | Span], seconds: Sequence[float]
) -> list[tuple[int, ...]]:
    """Return what ``get_rope_index`` says of ids (``int``: so many) and items."""
    types: list[int] = []
    grids: dict[int, list[list[int]]] = {1: [], 2: []}
    for part in parts:
        if isinstance(part, int):
            types += [0] * part
            continue
        assert part.grid is not None
        kind = 1 if part.kind == "image" else 2
        grids[kind].append(
            [len(part.grid.times), MERGE * part.grid.rows, MERGE * part.grid.columns]
        )
        types += [kind] * part.length
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=TOKENS_PER_SECOND)
    # Its methods read the config only.
    kind_of_model: Any = Qwen2_5_VLModel
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = partial(kind_of_model.get_vision_position_ids, model)
    ids, delta = kind_of_model.get_rope_index(
        model,
        torch.zeros(1, len(types), dtype=torch.int64),
        torch.tensor([types], dtype=torch.int32),
        image_grid_thw=torch.tensor(grids[1]) if grids[1] else None,
        video_grid_thw=torch.tensor(grids[2]) if grids[2] else None,
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
    )
    behind = len(types) + int(delta)
    return [*columns_of(ids[:, 0].tolist()), (behind,) * 3]


def test_places_are_those_of_transformers_for_any_mix_of_text_pictures_and_videos() -> None:
    """Items stand between ids, as every template has it.

    Videos are no longer in time than in space here, the next test has the others.
    """
    rng = random.Random(0)
    for _ in range(150):
        parts: list[int | Span] = [rng.randrange(1, 6)]
        seconds: list[float] = []
        for _ in range(rng.randrange(4)):
            rows, columns = rng.randrange(1, 6), rng.randrange(1, 6)
            if rng.random() < 0.5:
                parts.append(
                    Span(rows * columns, ITEM, kind="image", grid=Grid((0,), rows, columns))
                )
            else:
                step = rng.choice((0.25, 0.3, 0.5, 1.0, 1.5, 1 / 3))
                frames = rng.randrange(1, 5)
                interval = np.float32(TOKENS_PER_SECOND) * np.float32(step)
                times = [int(np.float32(frame) * interval) for frame in range(frames)]
                if times[-1] >= max(rows, columns):
                    continue
                seconds.append(step)
                parts.append(item(times, rows, columns))
            parts.append(rng.randrange(1, 6))
        spans = [Span(part) if isinstance(part, int) else part for part in parts]
        counters = SpanCounters(spans, PositionConfig("kv", **AXES))
        found = columns_of(counters.ids(0, counters.num_slots + 1).tolist())
        assert found == reference_places(parts, seconds), parts


def test_text_behind_a_video_longer_than_its_frames_stands_behind_its_last_time() -> None:
    """As the family was trained, and as transformers has it for the first generated id.

    transformers lets text of the prompt begin behind the frames' longer side already, where it
    shares times with the video.
    """
    parts: list[int | Span] = [2, item((0, 2, 4, 6), 2, 3), 2]
    spans = [Span(part) if isinstance(part, int) else part for part in parts]
    counters = SpanCounters(spans, PositionConfig("kv", **AXES))
    found = columns_of(counters.ids(0, 29).tolist())
    assert found == walk(spans, 1)
    expected = reference_places(parts, [1.0])
    assert found[:26] == expected[:26]
    assert (found[26], expected[26]) == ((9,) * 3, (5,) * 3)
    without_text = [Span(2), spans[1]]
    ends = SpanCounters(without_text, PositionConfig("kv", **AXES)).at(26)
    assert reference_places(parts[:2], [1.0])[-1] == (ends,) * 3


def test_blocks_have_grids_too() -> None:
    spans = [Span(2), item((0,), 1, 3), Span(2, ITEM), Span(1)]
    config = PositionConfig("kv", scheme=PosScheme.BLOCK, block_step=2, **AXES)
    ids = SpanCounters(spans, config).ids(0, 9).tolist()
    assert ids[0] == [0, 0, 2, 2, 2, 5, 5, 7, 9]
    assert ids[2] == [0, 0, 2, 3, 4, 5, 5, 7, 9]


def test_runs_of_equal_places_are_groups_of_frames() -> None:
    """Each frame's slots share a time, each row's slots a row."""
    places = grid_places(Grid((0, 3), 2, 3), 0, 12)
    assert [(time, len(list(group))) for time, group in groupby(places[0].tolist())] == [
        (0, 6),
        (3, 6),
    ]
    assert places[1].tolist() == 2 * [0, 0, 0, 1, 1, 1]
    assert places[2].tolist() == 4 * [0, 1, 2]
