import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from mstar.engine.resources.base import Deployment, Opening
from mstar.engine.resources.position.config import (
    PositionConfig,
    PositionSpec,
    PositionStep,
    PosScheme,
    RopeParams,
)
from mstar.engine.resources.position.manager import PositionManager
from mstar.engine.resources.spans import Span
from mstar.engine.resources.step import ResourceStep, Segment
from mstar.errors import ConfigError, ContextLengthError, RequestError

TESTS = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("oracle_rope", TESTS / "oracles" / "rope.py")
assert _spec is not None
assert _spec.loader is not None
oracle: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

LIMIT = 10_000


def manager(max_num_seqs: int = 4, **config: Any) -> PositionManager:
    spec = PositionSpec("position", {"decoder"}, PositionConfig("kv", **config))
    deployment = Deployment(max_num_seqs=max_num_seqs, max_model_len=LIMIT)
    assert spec.resource_class is PositionManager
    return PositionManager.build(spec, deployment, {})


def opening(
    request_id: str, label: str = "main", spans: Sequence[Span] = (), num_prompt_tokens: int = 0
) -> Opening:
    """A stream without a prompt, unless a layout or a length gives it one."""
    length = num_prompt_tokens or sum(span.length for span in spans)
    return Opening(
        request_id=request_id,
        label=label,
        tokens=[1] * length,
        num_prompt_tokens=length,
        max_len=100,
        spans=spans,
    )


def opened(*streams: tuple[str, str], num_reused: int = 0, **config: Any) -> PositionManager:
    made = manager(**config)
    for request_id, label in streams:
        assert made.open(opening(request_id, label), num_reused) is None
    return made


def segments(*triples: tuple[str, str, int]) -> tuple[Segment, ...]:
    return tuple(Segment(*triple) for triple in triples)


def ids(
    made: PositionManager, step_segments: tuple[Segment, ...], step: ResourceStep | None = None
) -> list[int]:
    step = step or PositionStep()
    return made.plan(step_segments, step, {}).ids.tolist()


def run(
    made: PositionManager, step_segments: tuple[Segment, ...], step: ResourceStep | None = None
) -> list[int]:
    step = step or PositionStep()
    out = ids(made, step_segments, step)
    made.commit(step_segments, step)
    made.check()
    return out


def test_sequential_ids_count_up_over_steps_of_any_size() -> None:
    made = opened(("a", "main"), ("b", "main"))
    assert run(made, segments(("a", "main", 3), ("b", "main", 2))) == [0, 1, 2, 0, 1]
    assert run(made, segments(("b", "main", 1), ("a", "main", 1))) == [2, 3]
    assert run(made, segments(("a", "main", 2), ("b", "main", 0))) == [4, 5]
    assert (made.counter("a"), made.counter("b")) == (6, 3)


def test_planning_moves_nothing_and_planning_again_gives_the_same() -> None:
    made = opened(("a", "main"))
    step = segments(("a", "main", 4))
    assert ids(made, step) == ids(made, step) == [0, 1, 2, 3]
    made.rollback(step, PositionStep())
    assert made.counter("a") == 0


def test_the_same_segments_object_serves_many_steps() -> None:
    made = opened(("a", "main"), ("b", "main"), num_reused=3)
    step = segments(("a", "main", 1), ("b", "main", 1))
    assert [run(made, step) for _ in range(3)] == [[3, 3], [4, 4], [5, 5]]


def test_the_same_segments_object_finds_a_reopened_stream() -> None:
    made = opened(("a", "main"), ("b", "main"))
    step = segments(("a", "main", 1))
    assert run(made, step) == [0]
    made.close("a")
    made.close("b")
    made.open(opening("b"), 7)
    made.open(opening("a"), 5)
    assert run(made, step) == [5]


def test_a_plain_resource_step_is_enough() -> None:
    made = opened(("a", "main"))
    assert run(made, segments(("a", "main", 2)), ResourceStep()) == [0, 1]


def test_a_reused_prefix_is_where_the_counter_begins() -> None:
    made = opened(("a", "main"), num_reused=48)
    assert run(made, segments(("a", "main", 3))) == [48, 49, 50]


def test_block_gives_one_id_and_moves_by_the_step_unless_empty() -> None:
    made = opened(("a", "main"), scheme=PosScheme.BLOCK, block_step=2)
    assert run(made, segments(("a", "main", 256))) == [0] * 256
    assert run(made, segments(("a", "main", 0))) == []
    assert run(made, segments(("a", "main", 1))) == [2]
    assert made.counter("a") == 4


def test_two_blocks_of_one_stream_in_a_step_get_one_id_each() -> None:
    made = opened(("a", "main"), ("b", "main"), scheme=PosScheme.BLOCK)
    step = segments(("a", "main", 2), ("b", "main", 1), ("a", "main", 3))
    assert run(made, step) == [0, 0, 0, 1, 1, 1]
    assert (made.counter("a"), made.counter("b")) == (2, 1)


def test_several_segments_of_one_stream_follow_each_other() -> None:
    made = opened(("a", "main"))
    assert run(made, segments(("a", "main", 2), ("a", "main", 2))) == [0, 1, 2, 3]
    step = segments(("a", "main", 2), ("a", "main", 1))
    assert run(made, step, PositionStep(advance=(10, 0))) == [4, 5, 14]
    assert made.counter("a") == 14


def test_explicit_ids_leave_the_counter_rule_as_it_is() -> None:
    made = opened(("a", "main"))
    step = PositionStep(pos_ids=torch.tensor([7, 7, 9], dtype=torch.int32))
    assert run(made, segments(("a", "main", 3)), step) == [7, 7, 9]
    assert made.counter("a") == 3


def test_explicit_ids_by_label_fill_their_segments_in_the_steps_order() -> None:
    streams = [(r, label) for r in "ab" for label in ("main", "text", "image")]
    made = opened(*streams, max_num_seqs=2)
    step = segments(
        ("a", "main", 2), ("b", "text", 1), ("a", "image", 1), ("b", "main", 1), ("a", "text", 2)
    )
    given = {"text": torch.tensor([50, 60, 61]), "image": torch.tensor([70])}
    assert run(made, step, PositionStep(pos_ids=given)) == [0, 1, 50, 70, 0, 60, 61]
    assert [made.counter(r, label) for r, label in streams] == [2, 2, 1, 1, 1, 0]


def test_advance_stands_in_the_steps_order_over_labels() -> None:
    streams = [(r, label) for r in "ab" for label in ("main", "text", "image")]
    made = opened(*streams, max_num_seqs=8)
    order = [("b", "image"), ("a", "main"), ("b", "main"), ("a", "image"), ("a", "text")]
    step = segments(*((r, label, 2) for r, label in order))
    run(made, step, PositionStep(advance=(1, 2, 3, 0, 5)))
    assert [made.counter(r, label) for r, label in order] == [1, 2, 3, 0, 5]


def test_a_denoising_loop_reads_the_same_ids_without_moving() -> None:
    made = opened(("a", "main"), num_reused=0)
    run(made, segments(("a", "main", 52)))
    latent = segments(("a", "main", 64))
    block = PositionStep(pos_ids=torch.full((64,), 52), advance=(0,))
    for _ in range(4):
        assert set(run(made, latent, block)) == {52}
    assert made.counter("a") == 52


@pytest.mark.parametrize(
    ("image_spans", "main"), [((), 52), ((258, 258), 54)], ids=["text to image", "edit"]
)
def test_published_counters_of_alternating_text_and_images(
    image_spans: tuple[int, ...], main: int
) -> None:
    made = opened(("a", "main"))
    run(made, segments(("a", "main", 32)))
    for span in image_spans:
        at = made.counter("a")
        run(made, segments(("a", "main", span)), PositionStep(None, torch.full((span,), at), (1,)))
    run(made, segments(("a", "main", 20)))
    assert made.counter("a") == main


def test_fork_takes_the_counter_along_and_parts_ways() -> None:
    made = opened(("a", "main"))
    run(made, segments(("a", "main", 5)))
    made.fork("a", "main", opening("a", "text"))
    made.fork("a", "main", opening("b"))
    run(made, segments(("a", "main", 1)))
    made.check()
    assert [made.counter("a"), made.counter("a", "text"), made.counter("b")] == [6, 5, 5]
    made.fork("a", "main", opening("a", "text"))
    assert made.counter("a", "text") == 6
    made.close("a")
    made.check()
    assert made.counter("b") == 5
    with pytest.raises(KeyError):
        made.fork("a", "main", opening("a", "image"))


def test_a_counter_may_be_set_backwards_but_not_below_zero() -> None:
    made = opened(("a", "main"), num_reused=9)
    made.set_counter("a", "main", 4)
    assert run(made, segments(("a", "main", 1))) == [4]
    with pytest.raises(ConfigError, match="-1"):
        made.set_counter("a", "main", -1)


ITEM = bytes(32)


def test_blocks_without_a_layout_are_never_reused() -> None:
    made = manager()
    assert made.match(opening("a"), 7) == 7
    blocks = manager(scheme=PosScheme.BLOCK)
    assert blocks.match(opening("a"), 7) == 0
    assert blocks.match(opening("a", spans=(Span(8),)), 7) == 7
    assert blocks.match(opening("a", num_prompt_tokens=8), 7) == 7
    with pytest.raises(ConfigError, match="'block' allow none without a layout"):
        blocks.open(opening("a"), 16)
    blocks.check()
    assert blocks.open(opening("a"), 0) is None


SPANS = (Span(2), Span(4, ITEM, advance=9), Span(3), Span(2, ITEM), Span(1))
EXPECTED = {
    # Two ids, an item that moves the counter by 9, three ids, an item of two slots, one id.
    PosScheme.SEQUENTIAL: [0, 1, 2, 3, 4, 5, 11, 12, 13, 14, 15, 16, 17, 18],
    # One position for each run; the first item moves by its own 9, the others by 2.
    PosScheme.BLOCK: [0, 0, 2, 2, 2, 2, 11, 11, 11, 13, 13, 15, 17, 19],
}


@pytest.mark.parametrize("scheme", PosScheme)
@pytest.mark.parametrize("reused", range(12))
@pytest.mark.parametrize("chunk", [1, 2, 3, 12])
def test_layout_decides_positions_wherever_a_stream_begins_and_is_cut(
    scheme: PosScheme, reused: int, chunk: int
) -> None:
    made = manager(scheme=scheme, block_step=2)
    stream = Opening(request_id="a", tokens=[1] * 12, num_prompt_tokens=12, max_len=99, spans=SPANS)
    assert made.open(stream, reused) is None
    found = []
    for start in range(reused, 12, chunk):
        found += run(made, segments(("a", "main", min(chunk, 12 - start))))
    for _ in range(2):
        found += run(made, segments(("a", "main", 1)))
    assert found == EXPECTED[scheme][reused:]


def test_prompt_of_ids_is_one_block_however_it_is_cut() -> None:
    made = manager(scheme=PosScheme.BLOCK, block_step=3)
    made.open(opening("a", num_prompt_tokens=7), 0)
    found = [run(made, segments(("a", "main", n))) for n in (3, 2, 2, 1, 1)]
    assert found == [[0, 0, 0], [0, 0], [0, 0], [3], [6]]


@pytest.mark.parametrize("scheme", PosScheme)
def test_several_segments_of_a_stream_in_one_step_follow_its_layout(scheme: PosScheme) -> None:
    made = manager(scheme=scheme, block_step=2)
    stream = Opening(request_id="a", tokens=[1] * 12, num_prompt_tokens=12, max_len=99, spans=SPANS)
    made.open(stream, 0)
    parts = (2, 4, 3, 1)
    assert run(made, segments(*(("a", "main", n) for n in parts))) == EXPECTED[scheme][:10]
    assert run(made, segments(("a", "main", 2))) == EXPECTED[scheme][10:12]


def test_stream_that_skips_ahead_stands_where_its_layout_says() -> None:
    made = manager()
    stream = Opening(request_id="a", tokens=[1] * 12, num_prompt_tokens=12, max_len=99, spans=SPANS)
    made.open(stream, 0)
    run(made, segments(("a", "main", 1)))
    made.skip(stream, 7)
    assert run(made, segments(("a", "main", 3))) == EXPECTED[PosScheme.SEQUENTIAL][7:10]


def test_what_a_step_says_otherwise_than_the_layout_is_out_of_reuse() -> None:
    made = manager()
    streams = {
        name: Opening(
            request_id=name, tokens=[1] * 12, num_prompt_tokens=12, max_len=99, spans=SPANS
        )
        for name in "abcd"
    }
    for stream in streams.values():
        made.open(stream, 0)
    one = torch.arange(6)
    as_laid_out = PositionStep(advance=(11,))
    run(made, segments(("a", "main", 6)), as_laid_out)
    run(made, segments(("b", "main", 6)), PositionStep(advance=(7,)))
    # Other ids inside an item are the item's own affair; other ids of tokens are not.
    run(made, segments(("c", "main", 6)), PositionStep(pos_ids=one + (one > 1)))
    run(made, segments(("d", "main", 6)), PositionStep(pos_ids=one + (one == 1)))
    until = {name: stream.naming.until for name, stream in streams.items()}
    assert until == {"a": sys.maxsize, "b": 6, "c": sys.maxsize, "d": 1}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.tensor([0, 1, LIMIT]), ContextLengthError, f"{LIMIT} .*'b'.* not below {LIMIT}"),
        (torch.tensor([0, -1, 2]), RequestError, r"-1 .*'a'.* negative"),
        (torch.tensor([0, 1]), ConfigError, "2 ids; its segments have 3"),
        (torch.tensor([0.0, 1.0, 2.0]), ConfigError, "float32; ids are integers"),
        (
            torch.zeros(3, 3, dtype=torch.int64),
            ConfigError,
            r"shape \[3, 3\].* 1 axes need \[num_slots\]",
        ),
        ({"text": torch.tensor([0])}, ConfigError, r"'text'.*\['main'\]"),
    ],
)
def test_ids_that_no_table_has_or_no_segment_wants_are_refused(
    given: Tensor | dict[str, Tensor], error: type[Exception], message: str
) -> None:
    made = opened(("a", "main"), ("b", "main"), head_dim=8)
    step = segments(("a", "main", 2), ("b", "main", 1))
    with pytest.raises(error, match=message):
        made.plan(step, PositionStep(pos_ids=given), {})
    assert ids(made, step) == [0, 1, 0]


def test_one_tensor_for_several_labels_is_refused() -> None:
    made = opened(("a", "main"), ("a", "text"))
    step = segments(("a", "main", 1), ("a", "text", 1))
    with pytest.raises(ConfigError, match="dict by label"):
        made.plan(step, PositionStep(pos_ids=torch.tensor([0, 0])), {})


def test_advance_of_the_wrong_length_or_below_zero_is_refused() -> None:
    made = opened(("a", "main"), num_reused=3)
    step = segments(("a", "main", 1))
    with pytest.raises(ConfigError, match="2 entries"):
        made.plan(step, PositionStep(advance=(1, 1)), {})
    with pytest.raises(RequestError, match="from 3 by -4"):
        made.plan(step, PositionStep(advance=(-4,)), {})


def test_an_overlong_stream_is_refused_on_the_host() -> None:
    made = opened(("a", "main"), num_reused=LIMIT - 1, head_dim=8)
    assert run(made, segments(("a", "main", 1))) == [LIMIT - 1]
    with pytest.raises(ContextLengthError, match=f"position {LIMIT} of request 'a'"):
        made.plan(segments(("a", "main", 1)), PositionStep(), {})


def test_max_position_bounds_ids_in_place_of_the_deployment() -> None:
    made = opened(("a", "main"), num_reused=19, max_position=20, head_dim=8)
    assert run(made, segments(("a", "main", 1))) == [19]
    with pytest.raises(ContextLengthError, match="not below 20"):
        made.plan(segments(("a", "main", 1)), PositionStep(), {})
    with pytest.raises(ConfigError, match="have no bound"):
        PositionManager("position", PositionConfig("kv"), Deployment(max_model_len=0))


def test_positions_without_rotation_are_ids_only_and_bounded_by_what_was_learned() -> None:
    """As a model has it that adds a learned row for each position."""
    made = opened(("a", "main"), num_reused=5, layer_rope=(None, None), max_position=8)
    plan = made.plan(segments(("a", "main", 3)), PositionStep(), {})
    learned = torch.arange(16.0).view(8, 2)
    assert learned[plan.ids].tolist() == [[10, 11], [12, 13], [14, 15]]
    q = torch.ones(3, 1, 4)
    assert [plan.rotation(layer) for layer in (0, 1)] == [None, None]
    assert plan.rotate_merged(q, 1) is q
    fixed = made.plan_fixed(4, segments(("a", "main", 1)), PositionStep(), {})
    assert fixed is not None
    assert fixed.ids.tolist() == [5, 0, 0, 0]
    with pytest.raises(ContextLengthError, match=r"position 8 of request 'a'.* not below 8"):
        made.plan(segments(("a", "main", 4)), PositionStep(), {})


def test_rotating_a_head_of_unknown_width_is_refused() -> None:
    plan = opened(("a", "main")).plan(segments(("a", "main", 1)), PositionStep(), {})
    q = torch.zeros(1, 1, 8)
    with pytest.raises(ConfigError, match="neither rotary_dim nor head_dim"):
        plan.rotate(q, q, 0)


@pytest.mark.parametrize("interleave", [False, True])
def test_rotate_turns_q_and_k_by_the_steps_ids_and_merged_is_the_same(interleave: bool) -> None:
    made = opened(("a", "main"), ("b", "main"), num_reused=300, head_dim=32, interleave=interleave)
    plan = made.plan(segments(("a", "main", 2), ("b", "main", 1)), PositionStep(), {})
    merged = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(0))
    q, k = plan.rotate(merged[:, :4], merged[:, 4:6], 0)
    assert torch.equal(torch.cat((q, k), 1), plan.rotate_merged(merged[:, :6], 0))
    freqs = oracle.frequencies(32, 1e4)
    for token, position in enumerate((300, 301, 300)):
        for head in range(4):
            wanted = oracle.rotate(
                merged[token, head].tolist(), position, freqs, interleave=interleave
            )
            torch.testing.assert_close(q[token, head], torch.tensor(wanted), rtol=0, atol=2e-6)


def test_layers_have_their_own_frequencies_over_one_counter() -> None:
    local, whole = RopeParams(), RopeParams(rope_theta=1e6, rope_scale=8.0)
    made = opened(("a", "main"), num_reused=2049, head_dim=16, layer_rope=(local, whole, None))
    plan = made.plan(segments(("a", "main", 1)), PositionStep(), {})
    q = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(1))
    k = q[:, :1]
    for layer, freqs in ((0, oracle.frequencies(16, 1e4)), (1, oracle.frequencies(16, 1e6, 8.0))):
        got, _ = plan.rotate(q, k, layer)
        wanted = oracle.rotate(q[0, 1].tolist(), 2049, freqs, interleave=False)
        torch.testing.assert_close(got[0, 1], torch.tensor(wanted), rtol=0, atol=2e-6)
    assert plan.rotate(q, k, 2) == (q, k)
    assert plan.rotate_merged(q, 2) is q


def test_a_table_grows_when_a_stream_gets_there() -> None:
    made = opened(("a", "main"), num_reused=9000, head_dim=8)
    plan = made.plan(segments(("a", "main", 1)), PositionStep(), {})
    q = torch.ones(1, 1, 8)
    wanted = oracle.rotate([1.0] * 8, 9000, oracle.frequencies(8, 1e4), interleave=False)
    torch.testing.assert_close(plan.rotate(q, q, 0)[0][0, 0], torch.tensor(wanted))


def test_more_streams_than_expected_find_room() -> None:
    made = opened(*((str(i), "main") for i in range(9)), max_num_seqs=2, num_reused=3)
    made.check()
    step = segments(*((str(i), "main", 1) for i in range(9)))
    assert run(made, step) == [3] * 9


class Counters(RuleBasedStateMachine):
    """Counters against a plain dictionary."""

    @initialize(scheme=st.sampled_from(PosScheme), block_step=st.integers(0, 3))
    def begin(self, scheme: PosScheme, block_step: int) -> None:
        self.config: dict[str, Any] = {"scheme": scheme, "block_step": block_step}
        self.made = manager(max_num_seqs=2, **self.config)
        self.model: dict[tuple[str, str], int] = {}
        self.last: tuple[Segment, ...] | None = None

    def move(self, span: int) -> int:
        if self.config["scheme"] is PosScheme.SEQUENTIAL:
            return span
        return int(self.config["block_step"]) if span else 0

    @rule(request=st.sampled_from("abcd"), label=st.sampled_from(["main", "text"]),
          reused=st.integers(0, 40))  # fmt: skip
    def open(self, request: str, label: str, reused: int) -> None:
        if (request, label) not in self.model:
            reused = reused if self.config["scheme"] is PosScheme.SEQUENTIAL else 0
            assert self.made.open(opening(request, label), reused) is None
            self.model[request, label] = reused

    @rule(request=st.sampled_from("abcde"))
    def close(self, request: str) -> None:
        self.made.close(request)
        self.model = {key: c for key, c in self.model.items() if key[0] != request}
        self.last = None

    @precondition(lambda self: self.model)
    @rule(data=st.data(), request=st.sampled_from("abcd"), label=st.sampled_from(["main", "x"]))
    def fork(self, data: st.DataObject, request: str, label: str) -> None:
        source, own = data.draw(st.sampled_from(sorted(self.model)))
        self.made.fork(source, own, opening(request, label))
        self.model[request, label] = self.model[source, own]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def choose(self, data: st.DataObject) -> None:
        streams = data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=5))
        spans = data.draw(st.lists(st.integers(0, 4), min_size=5, max_size=5))
        self.last = segments(*((*key, n) for key, n in zip(streams, spans, strict=False)))

    @precondition(lambda self: self.last is not None)
    @rule(data=st.data(), is_committed=st.booleans(), has_advance=st.booleans())
    def step(self, data: st.DataObject, is_committed: bool, has_advance: bool) -> None:
        assert self.last is not None
        moves = [self.move(s.span) for s in self.last]
        advance = None
        if has_advance:
            moves = [data.draw(st.integers(0, 6)) for _ in self.last]
            advance = tuple(moves)
        after, wanted = dict(self.model), []
        for (request, label, span), move in zip(self.last, moves, strict=True):
            at = after[request, label]
            block = self.config["scheme"] is PosScheme.BLOCK
            wanted += [at if block else at + i for i in range(span)]
            after[request, label] = at + move
        step = PositionStep(advance=advance)
        assert ids(self.made, self.last, step) == wanted
        if is_committed:
            self.made.commit(self.last, step)
            self.model = after

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "made"):
            self.made.check()
            assert {key: self.made.counter(*key) for key in self.model} == self.model


TestCounters = Counters.TestCase
TestCounters.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
