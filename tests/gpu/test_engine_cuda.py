"""A whole engine on a CUDA device chooses tokens that the CPU in float32 finds as likely."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mstar.engine.engine import EngineCore
from mstar.engine.output import TokenLogprobs
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.sampler.config import SamplingParams
from tests.gpu.likely import HEAD_DIM, TOLERANCE, Result, assert_likely, engine, prompts, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENS = (5, 200, 1, 64, 17, 333, 48)


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_tokens_are_those_that_the_cpu_finds_likely(dtype: str, cuda_graphs: bool) -> None:
    core = engine("cuda", dtype, HEAD_DIM[dtype], {}, cuda_graphs=cuda_graphs)
    asked = prompts(0, LENS)
    got = run(core, asked)
    assert [len(result) for result in got] == [10] * len(LENS)
    assert_likely(engine("cpu", "float32", HEAD_DIM[dtype], {}), asked, got, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Qwen3ForCausalLM", {}),
        ("MistralForCausalLM", {"sliding_window": 40}),
        ("Gemma3ForCausalLM", {"sliding_window": 40, "query_pre_attn_scalar": 128}),
    ],
)
def test_other_families_too(architecture: str, changes: dict[str, Any]) -> None:
    changes = {"architectures": [architecture], **changes}
    core = engine("cuda", "bfloat16", 128, changes)
    asked = prompts(1, LENS)
    got = run(core, asked)
    assert_likely(engine("cpu", "float32", 128, changes), asked, got, 2 * TOLERANCE["bfloat16"])


def test_chunks_and_reuse_change_nothing_but_rounding() -> None:
    core = engine("cuda", "bfloat16", 128, {}, max_num_batched_tokens=48)
    reference = engine("cpu", "float32", 128, {})
    asked = prompts(2, LENS)
    for _ in range(2):
        assert_likely(reference, asked, run(core, asked), TOLERANCE["bfloat16"])
    assert core.stats().cached_tokens >= 200 // 16 * 16


def test_batch_gives_what_each_request_gives_alone() -> None:
    core = engine("cuda", "float32", 64, {}, enable_prefix_caching=False)
    asked = prompts(3, LENS)
    together = run(core, asked)
    for ids, result in zip(asked, together, strict=True):
        (alone,) = run(core, [ids])
        assert [e.token_id for e in alone] == [e.token_id for e in result]


def test_seeds_draw_the_same_tokens_on_the_card_as_on_the_cpu() -> None:
    asked = prompts(4, (9, 30, 100))
    for params in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}, {"repetition_penalty": 1.3}):
        wanted = {"temperature": 0.9, "seed": 7, **params}
        tokens = [
            [[e.token_id for e in result] for result in run(core, asked, **wanted)]
            for core in (engine(device, "float32", 64, {}) for device in ("cuda", "cpu"))
        ]
        assert tokens[0] == tokens[1], params


def test_requests_that_come_and_go_meet_no_stale_plan() -> None:
    """Steady batches are launched ahead; arrivals, ends, adopted pages and aborts undo that."""
    asked = prompts(6, [*LENS, 100, 3, 77, 20, 9])
    asked += [asked[1][:190], asked[5][:320]]
    core = engine("cuda", "bfloat16", 128, {}, max_num_seqs=4, num_pages=110)
    for place, ids in enumerate(asked):
        params = SamplingParams(
            max_tokens=4 + 7 * place % 40, temperature=0.0, logprobs=20, ignore_eos=True
        )
        core.add_request(
            PreparedRequest(request_id=str(place), token_ids=ids, params=params, root=core.root)
        )
    core.add_request(
        PreparedRequest(request_id="gone", token_ids=asked[0], params=SamplingParams(max_tokens=50))
    )
    results: list[Result] = [[] for _ in asked]
    num_steps = 0
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            if output.request_id != "gone":
                results[int(output.request_id)] += output.logprobs or []
        num_steps += 1
        if num_steps == 40:
            core.abort("gone")
        core.check()
    (recorder,) = core._runner._recorders.values()
    assert 0 < recorder.num_ahead < recorder.num_replays
    assert [len(result) for result in results] == [4 + 7 * i % 40 for i in range(len(asked))]
    reference = engine("cpu", "float32", 128, {})
    assert_likely(reference, asked, results, TOLERANCE["bfloat16"])


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.0, "frequency_penalty": 1.5, "logprobs": 2},
    {"temperature": 1.1, "seed": 4, "repetition_penalty": 1.4, "top_k": 20},
    {"temperature": 0.7, "seed": 5, "presence_penalty": 2.0, "top_p": 0.8},
    {"temperature": 0.8, "seed": 6, "min_tokens": 9, "stop_token_ids": (3, 5)},
    {"temperature": 0.0, "logit_bias": {9: 1.0, 11: -2.0}, "logprobs": 0},
]
Told = tuple[list[int], list[TokenLogprobs]]


def told(
    core: EngineCore, asked: Sequence[list[int]], params: Sequence[dict[str, Any]]
) -> list[Told]:
    """Return what requests of these rules get."""
    for place, (ids, own) in enumerate(zip(asked, params, strict=True)):
        wanted = {"max_tokens": 40, "ignore_eos": True} | own
        core.add_request(
            PreparedRequest(
                request_id=str(place),
                token_ids=ids,
                params=SamplingParams(**wanted),
                root=core.root,
            )
        )
    results: list[Told] = [([], []) for _ in asked]
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            results[int(output.request_id)][0].extend(output.token_ids)
            results[int(output.request_id)][1].extend(output.logprobs or [])
        core.check()
    return results


def test_steps_launched_ahead_change_nothing() -> None:
    """Rules of all kinds in one batch, which nobody leaves early: the same kernels, bit for bit."""
    asked = prompts(7, LENS)
    rules = [{k: v for k, v in own.items() if k != "stop_token_ids"} for own in MIXED]
    ahead, waiting = (engine("cuda", "bfloat16", 128, {}, overlap=on) for on in (True, False))
    assert told(ahead, asked, rules) == told(waiting, asked, rules)
    (recorder,) = ahead._runner._recorders.values()
    assert (recorder.num_replays, recorder.num_ahead) == (39, 38)
    (recorder,) = waiting._runner._recorders.values()
    assert (recorder.num_replays, recorder.num_ahead) == (39, 0)


def test_stops_end_a_request_where_they_would_without_steps_ahead() -> None:
    """One request at a time, each of which may reuse the pages of those before it."""
    ids = prompts(8, (40,))[0]
    ahead, waiting = (engine("cuda", "bfloat16", 128, {}, overlap=on) for on in (True, False))
    for first in range(0, 12, 2):
        for own in MIXED:
            rules = [{"stop_token_ids": tuple(range(first, 192, 12)), **own}]
            expected = told(waiting, [ids], rules)
            assert told(ahead, [ids], rules) == expected
    assert ahead.stats().cached_tokens == waiting.stats().cached_tokens
    assert ahead.stats().num_pages_cached == waiting.stats().num_pages_cached
    (recorder,) = ahead._runner._recorders.values()
    assert recorder.num_ahead


def test_requests_that_stop_or_are_aborted_in_flight_leave_the_others_right() -> None:
    asked = prompts(9, [*LENS, 31, 90])
    core = engine("cuda", "bfloat16", 128, {}, num_pages=150)
    reference = engine("cpu", "float32", 128, {})
    for turn in range(2):
        results: list[Result] = [[] for _ in asked]
        stops = [tuple(range(place, 192, 15)) for place in range(len(asked))]
        reasons: dict[int, str | None] = {}
        for place, ids in enumerate(asked):
            params = SamplingParams(
                max_tokens=30,
                temperature=0.0,
                logprobs=20,
                ignore_eos=True,
                stop_token_ids=stops[place],
            )
            core.add_request(
                PreparedRequest(request_id=str(place), token_ids=ids, params=params, root=core.root)
            )
        num_steps = 0
        while core.has_work:
            for output in core.step():
                assert output.error is None, output.error
                results[int(output.request_id)] += output.logprobs or []
                reasons[int(output.request_id)] = output.finish_reason
            num_steps += 1
            if num_steps in {3, 6}:
                core.abort(str(num_steps + turn))
            core.check()
        assert_likely(reference, asked, results, TOLERANCE["bfloat16"])
        for place, result in enumerate(results):
            is_stop = [entry.token_id in stops[place] for entry in result]
            assert not any(is_stop[:-1])
            assert reasons[place] == {True: "stop", False: "length"}[is_stop[-1]] or (
                reasons[place] is None and place in {3 + turn, 6 + turn}
            )
    (recorder,) = core._runner._recorders.values()
    assert recorder.num_ahead > recorder.num_replays // 2


def test_steps_that_do_not_fit_a_recording_run_as_they_are() -> None:
    core = engine("cuda", "bfloat16", 128, {}, max_num_seqs=3)
    (recorder,) = core._runner._recorders.values()
    run(core, prompts(5, (20,)), max_tokens=4)
    assert recorder.num_replays == 3, "the prompt is no decode step"
    assert recorder.num_ahead == 2
    run(core, prompts(5, (20, 30, 40, 50)), max_tokens=4)
    assert recorder.num_replays >= 6


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {}),
        ("Qwen3ForCausalLM", {"sliding_window": None}),
        ("Gemma3ForCausalLM", {"sliding_window": 40, "query_pre_attn_scalar": 128}),
    ],
)
@pytest.mark.parametrize("budget", [17, 100, 1000])
def test_short_steps_replayed_in_pieces_are_those_that_run_as_they_are(
    architecture: str, changes: dict[str, Any], budget: int
) -> None:
    """Prompts, chunks of them and tokens that are generated, in steps of many lengths."""
    changes = {"architectures": [architecture], **changes}
    core = engine("cuda", "bfloat16", 128, changes, max_num_batched_tokens=budget)
    (recorder,) = core._runner._recorders.values()
    reference = engine("cpu", "float32", 128, changes)
    for seed, lens in ((10, LENS), (11, (3, 9)), (12, (130, 300, 2))):
        asked = prompts(seed, lens)
        tolerance = TOLERANCE["bfloat16"] * (1 if architecture.startswith("Llama") else 2)
        assert_likely(reference, asked, run(core, asked), tolerance)
    assert recorder.num_pieced
