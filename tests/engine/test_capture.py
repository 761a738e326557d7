"""What is replayed is the step: fixed plans fill the same memory with each step's numbers."""

import numpy as np
import pytest
import torch

from mstar.engine.batch import Batch
from mstar.engine.capture import RecordableNode, decode_sizes
from mstar.engine.request import PreparedRequest, Request
from mstar.engine.resources.attention.config import AttentionStep
from mstar.engine.resources.attention.sdpa import Backend
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.layout import SINK_PAGE, KVPlan
from mstar.engine.resources.kv.manager import KVManager
from mstar.engine.resources.position.manager import PositionManager, PositionPlan
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.step import NodeStep
from mstar.engine.runner import Runner
from mstar.models.decoder import DecoderModel


@pytest.mark.parametrize("limit", [*range(1, 70), 100, 255, 256, 257, 1000])
def test_sizes_hold_every_batch_up_to_the_limit_without_much_padding(limit: int) -> None:
    sizes = decode_sizes(limit)
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[0] == min(limit, 256)
    assert sizes[-1] == 1
    for batch in range(1, sizes[0] + 1):
        smallest = min(size for size in sizes if size >= batch)
        assert smallest < 2 * batch or batch == 1
        assert smallest - batch < 16


class Steps:
    """A runner with three requests, and their steps one after another."""

    def __init__(self, model: DecoderModel) -> None:
        deployment = Deployment(max_num_seqs=4, max_model_len=64, page_size=4, num_pages=40)
        self.runner = Runner(model.nodes, model.specs, deployment)
        (self.name, node), *_ = model.nodes.items()
        assert isinstance(node, RecordableNode)
        self.node = node
        self.requests = [
            Request(
                PreparedRequest(
                    request_id=name,
                    token_ids=list(range(2, 2 + length)),
                    params=SamplingParams(temperature=0.0),
                ),
                model.graph.cursor("prefill"),
                model.component_of("prefill"),
                max_len=64,
                arrival=place,
            )
            for place, (name, length) in enumerate((("a", 3), ("b", 9), ("c", 4)))
        ]
        for request in self.requests:
            assert self.runner.open(request) is None

    def batch(self, count: int) -> tuple[Batch, NodeStep]:
        spans = [(r, r.num_uncomputed_tokens) for r in self.requests[:count]]
        batch = Batch.of(self.name, spans)
        assert self.runner.admit(batch) is None
        return batch, self.node.declare(batch)

    def run(self, batch: Batch) -> list[int]:
        output = self.runner.run(batch)
        for request, segment in zip(batch.requests, batch.segments, strict=True):
            request.num_computed_tokens += segment.span
        for index, token in zip(batch.yielding, output.token_ids, strict=True):
            self.requests[index].append(token)
        return list(output.token_ids)

    def fixed(self, size: int, step: NodeStep, ahead: int = 0) -> dict[str, object] | None:
        """Plans for a recording, attention by a backend that needs none."""
        plans: dict[str, object] = {}
        for key, resource in self.runner.resources.items():
            segments, own = step.segments_of(key), step.resources[key]
            if key == "attention":
                kv = plans["kv"]
                assert isinstance(kv, KVPlan)
                backend = Backend(resource.backend.config, kv.layout)  # type: ignore[attr-defined]
                plans[key] = backend.plan(kv, (True,) * size)
                continue
            if key == "sampler":
                plans[key] = resource.plan(segments, own, plans)
                continue
            plan = resource.plan_fixed(size, segments, own, plans, ahead)
            if plan is None:
                return None
            plans[key] = plan
        return plans


def test_fixed_plans_give_the_tokens_that_plans_give_and_keep_their_memory(
    toy: DecoderModel,
) -> None:
    steps = Steps(toy)
    steps.run(steps.batch(3)[0])
    places = set()
    for count in (3, 2, 3, 1, 3):
        batch, step = steps.batch(count)
        with torch.inference_mode():
            plans = steps.fixed(4, step)
            assert plans is not None
            ids = torch.full((4,), 5)
            ids[:count] = torch.from_numpy(batch.token_ids())
            rows = steps.node.compute(ids, plans)
            output = steps.node.launch(batch, rows[:count], plans).fetch()
        kv, position = plans["kv"], plans["position"]
        assert isinstance(kv, KVPlan)
        places.add((kv.slots.data_ptr(), position.ids.data_ptr()))  # type: ignore[attr-defined]
        assert (kv.slots[count:] // 4 == SINK_PAGE).all()
        assert kv.kv_lens.tolist()[count:] == [1] * (4 - count)
        assert (kv.page_table[count:] == SINK_PAGE).all()
        assert kv.page_table.flags.c_contiguous
        np.testing.assert_array_equal(kv.qo_indptr, range(5))
        # The plans moved nothing: the runner computes the same step once more.
        assert list(output.token_ids) == steps.run(batch)
        steps.runner.check()
    assert len(places) == 1


def numbers(plans: dict[str, object] | None) -> dict[str, list[int]]:
    """What a recorded forward would read of the cache and the positions."""
    assert plans is not None
    kv, position = plans["kv"], plans["position"]
    assert isinstance(kv, KVPlan)
    assert isinstance(position, PositionPlan)
    pages = [row[: -(-length // 4)] for row, length in zip(kv.page_table, kv.kv_lens, strict=True)]
    return {
        "kv_lens": kv.kv_lens.tolist(),
        "pages": np.concatenate(pages).tolist(),
        "slots": kv.slots.tolist(),
        "ids": position.ids.tolist(),
    }


def test_plan_ahead_is_the_plan_once_the_step_is_committed(toy: DecoderModel) -> None:
    steps = Steps(toy)
    steps.run(steps.batch(3)[0])
    batch, step = steps.batch(3)
    for _ in range(20):
        ahead = numbers(steps.fixed(4, step, ahead=1))
        revisions = [resource.revision for resource in steps.runner.resources.values()]
        steps.run(batch)
        assert steps.runner.admit(batch) is None
        assert [resource.revision for resource in steps.runner.resources.values()] == revisions
        assert numbers(steps.fixed(4, step)) == ahead
        steps.runner.check()


def test_there_is_no_plan_beyond_a_streams_end_or_without_pages(toy: DecoderModel) -> None:
    steps = Steps(toy)
    steps.run(steps.batch(3)[0])
    kv = steps.runner.resources["kv"]
    assert isinstance(kv, KVManager)
    batch, step = steps.batch(2)
    while steps.requests[1].num_computed_tokens % 4 != 3:
        steps.run(batch)
        steps.runner.admit(batch)
    others = kv.pool.try_allocate(kv.pool.num_available)
    assert others
    assert steps.fixed(4, step, ahead=1) is None
    kv.pool.release(others)
    assert steps.fixed(4, step, ahead=1) is not None
    while steps.requests[1].num_computed_tokens < 63:
        steps.run(batch)
        assert steps.runner.admit(batch) is None
    assert steps.fixed(4, step) is not None
    assert steps.fixed(4, step, ahead=1) is None
    steps.runner.check()


def test_moving_a_stream_makes_plans_ahead_wrong_and_closing_another_does_not(
    toy: DecoderModel,
) -> None:
    steps = Steps(toy)
    steps.run(steps.batch(3)[0])
    resources = steps.runner.resources.values()
    before = sum(resource.revision for resource in resources)
    batch, step = steps.batch(2)
    ahead = numbers(steps.fixed(4, step, ahead=1))
    steps.runner.close(steps.requests[2])
    steps.run(batch)
    assert sum(resource.revision for resource in resources) == before
    assert numbers(steps.fixed(4, step)) == ahead
    position = steps.runner.resources["position"]
    assert isinstance(position, PositionManager)
    position.set_counter("a", "main", 3)
    assert sum(resource.revision for resource in resources) > before


def test_step_of_several_tokens_has_no_fixed_plan(toy: DecoderModel) -> None:
    steps = Steps(toy)
    _, step = steps.batch(3)
    assert steps.fixed(4, step) is None


def test_backends_and_steps_without_a_fixed_plan_say_so(toy: DecoderModel) -> None:
    steps = Steps(toy)
    steps.run(steps.batch(3)[0])
    _, step = steps.batch(2)
    attention, kv = steps.runner.resources["attention"], steps.runner.resources["kv"]
    plans = {"kv": kv.plan_fixed(4, step.segments, step.resources["kv"], {})}
    assert attention.plan_fixed(4, step.segments, AttentionStep(), plans) is None
    mixed = AttentionStep(is_causal=(True, False))
    assert attention.plan_fixed(4, step.segments, mixed, plans) is None
