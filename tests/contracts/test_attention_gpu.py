"""The backends that run on a CUDA device give what the formula gives, recorded or not."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mstar.engine.resources.attention.base import AttentionBackend
from mstar.engine.resources.attention.config import AttentionConfig, LayerAttention
from mstar.engine.resources.attention.flashinfer import Backend, FlashInferPlan, _groups
from mstar.engine.resources.attention.manager import pick_backend
from mstar.engine.resources.kv.layout import SINK_PAGE, KVLayout, KVPlan
from mstar.errors import UnsupportedError
from tests.contracts.test_attention import RAGGED, RULES, Step, shuffled
from tests.oracles.tolerances import ATTENTION

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLAIN = (LayerAttention(),)
# Dtype, shape as in test_attention, rules; every kernel of a kind compiles anew for each.
CASES = (
    (torch.bfloat16, (8, 2, 128, 16), RULES),
    (torch.float16, (14, 2, 64, 64), PLAIN),
    (torch.float16, (2, 2, 64, 16), PLAIN),
)


def build(name: str, step: Step) -> AttentionBackend:
    layout = replace(step.plan.layout, device=torch.device("cuda"))
    try:
        _, backend = pick_backend(step.config, layout, name)
    except UnsupportedError as error:
        pytest.skip(str(error))
    return backend


def on_device(plan: KVPlan) -> KVPlan:
    return replace(
        plan,
        layout=replace(plan.layout, device=torch.device("cuda")),
        keys=[keys.cuda() for keys in plan.keys],
        values=[values.cuda() for values in plan.values],
    )


def check(name: str, step: Step, is_causal: tuple[bool, ...]) -> None:
    backend = build(name, step)
    everything = np.arange(len(step.query))
    halves = (range(0, len(is_causal), 2), ())
    for rows in (everything, *map(step.last_rows, halves)):
        plan = backend.plan(on_device(step.plan), is_causal)
        if rows is not everything:
            plan = plan.of_last(rows)
        for layer, rules in enumerate(step.config.layers):
            out = plan.run(layer, step.query[rows].cuda())
            assert out.dtype == step.query.dtype
            error = out.cpu().double() - step.expected(layer, is_causal)[rows]
            limit = ATTENTION[out.dtype]
            assert (error.abs() < limit).all(), f"{name} {rules} {is_causal} {rows}: {error}"


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("name", ["flashinfer", "sdpa", "eager"])
@pytest.mark.parametrize(("dtype", "shape", "rules"), CASES, ids=lambda x: str(x)[:30])
def test_backend_on_a_device_gives_what_the_formula_gives(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    rules: tuple[LayerAttention, ...],
) -> None:
    step = Step(shuffled(sum(shape)), shape, dtype, seed=sum(shape), rules=rules)
    check(name, step, (True,) * len(RAGGED))
    check(name, step, (True, False, False) * 3)
    ones = tuple((1, kv_len) for kv_len in (1, 5, 16, 17, 500, 64, 3, 128))
    check(name, Step(ones, shape, dtype, seed=1, rules=rules), (True,) * len(ones))


LONG = ((1100, 1100), (1, 40), (1030, 1337), (1025, 1040))


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
def test_long_prompts_whose_keys_are_copied_give_what_the_formula_gives(
    dtype: torch.dtype, is_causal: bool
) -> None:
    head_dim = 128 if dtype == torch.bfloat16 else 64
    step = Step(LONG, (4, 2, head_dim, 64), dtype, seed=5, rules=PLAIN)
    check("flashinfer", step, (is_causal,) * len(LONG))


@pytest.mark.gpu
@needs_device
def test_steps_that_are_planned_while_the_device_lags_do_not_mix() -> None:
    shape = (8, 2, 128, 16)
    lens = [((30, 60), (1, 17)), ((90, 300), (1, 5)), ((3, 3), (1, 200), (50, 51)), ((1, 9),)]
    steps = [Step(own, shape, torch.bfloat16, seed=place) for place, own in enumerate(lens)]
    given = [(on_device(step.plan), step.query.cuda()) for step in steps]
    backend = build("flashinfer", steps[0])
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def run_all() -> list[tuple[Step, npt.NDArray[np.int64], int, torch.Tensor]]:
        results = []
        for step, (kv_plan, query) in zip(steps, given, strict=True):
            is_causal = (True,) * len(kv_plan.qo_lens)
            plan, everything = backend.plan(kv_plan, is_causal), np.arange(len(query))
            last = step.last_rows(range(len(is_causal)))
            results.append((step, everything, 0, plan.run(0, query)))
            results.append((step, everything, 1, plan.run(1, query)))
            chosen = query[torch.from_numpy(last).pin_memory().to("cuda", non_blocking=True)]
            results.append((step, last, 1, plan.of_last(last).run(1, chosen)))
        return results

    run_all()
    torch.cuda.synchronize()
    for _ in range(30):
        busy @ busy
    for step, rows, layer, out in run_all():
        expected = step.expected(layer, (True,) * len(step.plan.qo_lens))[rows]
        error = (out.cpu().double() - expected).abs().max().item()
        assert error < ATTENTION[torch.bfloat16], (step.plan.qo_lens, layer, len(rows), error)


def test_slots_of_a_group_are_those_of_its_pages_in_order() -> None:
    step = Step(LONG, (2, 1, 8, 16), torch.float32, seed=6, rules=PLAIN)
    plan = step.plan
    (group,) = (g for g in _groups(plan, (True,) * len(LONG)) if g.kind == "causal")
    expected = [
        int(plan.page_table[segment, at // 16]) * 16 + at % 16
        for segment in (0, 2, 3)
        for at in range(LONG[segment][1])
    ]
    assert group.pages.slots(16).tolist() == expected
    assert group.pages.kv_lens(16).tolist() == [1100, 1337, 1040]


def filled_up(plan: KVPlan, size: int) -> KVPlan:
    """The plan with segments of one slot of the sink page behind its own."""
    count = len(plan.qo_lens)
    table = np.full((size, plan.page_table.shape[1]), SINK_PAGE, np.int32)
    table[:count] = plan.page_table
    return replace(
        plan,
        qo_lens=np.ones(size, np.int32),
        qo_indptr=np.arange(size + 1, dtype=np.int32),
        kv_lens=np.append(plan.kv_lens, np.ones(size - count, np.int32)),
        page_table=table,
    )


@pytest.mark.gpu
@needs_device
def test_recorded_decode_computes_the_step_that_was_planned_last() -> None:
    size = 8
    steps = [
        Step(lens, (8, 2, 128, 16), torch.bfloat16, seed, RULES[:2])
        for seed, lens in enumerate(
            [((1, 9), (1, 200)), ((1, 700), (1, 1), (1, 33), (1, 64)), ((1, 16),) * 8]
        )
    ]
    num_pages = max(step.plan.layout.num_pages for step in steps)
    layout = replace(steps[0].plan.layout, num_pages=num_pages, device=torch.device("cuda"))
    config = steps[0].config
    if Backend.unsupported(config, layout):
        pytest.skip(", ".join(Backend.unsupported(config, layout)))
    backend = Backend(config, layout)
    shape = (num_pages, *steps[0].plan.keys[0].shape[1:])
    keys, values = (
        [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in RULES[:2]]
        for _ in range(2)
    )
    query = torch.zeros(size, 8, 128, dtype=torch.bfloat16, device="cuda")

    def plan(step: Step) -> KVPlan:
        for layer in range(2):
            own = step.plan.keys[layer]
            keys[layer][: len(own)] = own.nan_to_num().cuda()
            values[layer][: len(own)] = step.plan.values[layer].nan_to_num().cuda()
        query[: len(step.query)] = step.query.cuda()
        return replace(filled_up(step.plan, size), layout=layout, keys=keys, values=values)

    for _ in range(2):
        fixed = backend.plan_fixed(plan(steps[0]), (True,) * size)
        assert fixed is not None
        fixed.run(0, query), fixed.run(1, query)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    assert fixed is not None
    with torch.cuda.graph(graph):
        outs = [fixed.run(layer, query) for layer in range(2)]
    for step in (*steps, *reversed(steps)):
        assert backend.plan_fixed(plan(step), (True,) * size) is fixed
        graph.replay()
        for layer, out in enumerate(outs):
            own = out[: len(step.query)].cpu().double()
            expected = step.expected(layer, (True,) * len(step.query))
            assert (own - expected).abs().max().item() < ATTENTION[torch.bfloat16]
    flags = (False, *(True,) * (size - 1))
    assert backend.plan_fixed(plan(steps[0]), flags) is None


def test_flashinfer_says_what_it_cannot_do_on_a_cpu() -> None:
    config = AttentionConfig(
        kv_cache="kv", num_qo_heads=4, num_kv_heads=2, head_dim=80, scale=1.0, layers=PLAIN
    )
    layout = KVLayout(1, 2, 16, 2, 80, torch.float32, torch.device("cpu"))
    reasons = Backend.unsupported(config, layout)
    assert [reason.split()[0] for reason in reasons] == ["the", "the", "head_dim"]
    assert "cpu" in reasons[0]
    assert "float32" in reasons[1]
    assert "64, 128, 256" in reasons[2]


@pytest.mark.parametrize("seed", range(3))
def test_segments_that_flashinfer_has_no_kernel_for_are_left_to_torch(seed: int) -> None:
    """Those that are not causal, where a window cuts what is before them."""
    step = Step(shuffled(seed), (6, 2, 32, 4), torch.float32, seed=seed)
    is_causal = (True, False, False) * 3

    class Library:
        """What is left to the library."""

        config = step.config
        kinds: list[str] = []  # noqa: RUF012

        def plan_group(self, group: Any, rules: LayerAttention) -> None:
            self.kinds.append(group.kind)

    library = Library()
    plan = FlashInferPlan(cast("Backend", library), step.plan, is_causal)
    for layer, rules in enumerate(RULES):
        library.kinds.clear()
        kernels = [(group, plan._plan_group(group, rules)) for group in plan._groups]
        assert ("full" in library.kinds) == (rules.window is None)
        expected = step.expected(layer, is_causal)
        for group, kernel in kernels:
            if kernel is not None:
                out = kernel.run(layer, step.query[group.rows]).double()
                error = (out - expected[group.rows]).abs().max().item()
                assert error < ATTENTION[torch.float32]
