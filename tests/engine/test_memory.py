from collections.abc import Sequence
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mstar.engine.engine import EngineCore
from mstar.engine.memory import count_pages, fit, is_open
from mstar.engine.output import ErrorInfo, RequestOutput
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.config import KVConfig, KVSpec
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.errors import ConfigError
from mstar.models.decoder import DecoderModel

KV = KVConfig(num_layers=2, num_kv_heads=3, head_dim=8)
SPECS = [KVSpec("kv", {"decoder"}, KV)]
PAGE = 2 * 2 * 16 * 3 * 8 * 4
"""Bytes of 16 slots in float32."""
GIVEN = Deployment(max_model_len=100, max_num_seqs=4, max_num_batched_tokens=64)


class Fake:
    """Runs whatever is asked at once, and counts."""

    def __init__(self, deployment: Deployment, message: str | None = None) -> None:
        self.deployment = deployment
        self.lens: list[int] = []
        self._num_new = 0
        self._message = message

    @property
    def has_work(self) -> bool:
        return self._num_new > 0

    def add_request(self, prepared: PreparedRequest) -> None:
        self.lens.append(len(prepared.token_ids))
        self._num_new += 1

    def step(self) -> Sequence[RequestOutput]:
        self._num_new -= 1
        error = None if self._message is None else ErrorInfo(self._message, "internal_error")
        return [
            RequestOutput(
                request_id="0", token_ids=[], finish_reason=None, num_prompt_tokens=1,
                num_cached_tokens=0, error=error,
            )
        ]  # fmt: skip


@dataclass(frozen=True)
class Modelled:
    """What of a model a trial needs."""

    specs: Sequence[NodeResourceSpec]
    max_model_len: int = 5000

    def trial(self, request_id: str, num_tokens: int, params: SamplingParams) -> PreparedRequest:
        return PreparedRequest(request_id=request_id, token_ids=[0] * num_tokens, params=params)


MODEL = Modelled(SPECS)


def fitted(
    deployment: Deployment, in_use: int, total: int, message: str | None = None
) -> tuple[Deployment, Fake]:
    """Fit to a device that has ``in_use`` bytes taken beside the trial's pages."""
    trials: list[Fake] = []

    def start(trial: Deployment) -> Fake:
        trials.append(Fake(trial, message))
        return trials[-1]

    def measure() -> tuple[int, int]:
        pages = trials[-1].deployment.num_pages
        assert pages is not None
        return total - in_use - (pages + 1) * PAGE, total

    out = fit(deployment, MODEL, start, measure)
    (trial,) = trials
    return out, trial


@settings(max_examples=100, deadline=None)
@given(
    in_use=st.integers(0, 10**6),
    room=st.integers(2 * PAGE, 10**7),
    share=st.floats(0.1, 1.0),
)
def test_pages_and_all_else_take_the_share_but_for_less_than_a_page(
    in_use: int, room: int, share: float
) -> None:
    total = int((in_use + room) / share) + 1
    out, _ = fitted(replace(GIVEN, gpu_memory_utilization=share), in_use, total)
    assert out.num_pages is not None
    taken = in_use + (out.num_pages + 1) * PAGE
    assert total * share - PAGE - 1 < taken <= total * share
    assert replace(out, num_pages=None) == replace(GIVEN, gpu_memory_utilization=share)


def test_the_trial_runs_the_longest_prompt_and_the_most_prompts() -> None:
    _, trial = fitted(GIVEN, 0, 10**8)
    assert trial.lens == [99, 16, 16, 16, 16]
    assert not trial.deployment.cuda_graphs
    assert trial.deployment.max_model_len == 100


def test_the_trial_leaves_nothing_in_the_tiers_that_the_engine_gets() -> None:
    wanted = replace(GIVEN, host_cache_bytes=1 << 20, disk_cache_bytes=1 << 20, disk_cache_dir="x")
    out, trial = fitted(wanted, 0, 10**8)
    assert (trial.deployment.host_cache_bytes, trial.deployment.disk_cache_bytes) == (0, 0)
    assert (out.host_cache_bytes, out.disk_cache_bytes) == (1 << 20, 1 << 20)


def test_a_small_model_gets_no_more_pages_than_are_worth_it() -> None:
    out, _ = fitted(GIVEN, 0, 10**13)
    assert out.num_pages == 2**20


def test_no_room_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"has 5\.00 GB, of which 90% .* take 4\.60 GB") as caught:
        fitted(GIVEN, 4_600_000_000, 5_000_000_000)
    assert "gpu_memory_utilization" in str(caught.value)


def test_a_step_that_does_not_run_is_an_error_with_its_reason() -> None:
    with pytest.raises(ConfigError, match=r"OutOfMemoryError.* max_num_batched_tokens"):
        fitted(GIVEN, 0, 10**8, "OutOfMemoryError: no more")


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_that_is_none_is_an_error(share: float, toy: DecoderModel) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        fitted(replace(GIVEN, gpu_memory_utilization=share), 0, 10**8)
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        EngineCore(toy, Deployment(gpu_memory_utilization=share))


def test_a_model_without_a_cache_needs_no_trial() -> None:
    def start(trial: Deployment) -> Fake:
        raise AssertionError(trial)

    assert fit(GIVEN, Modelled([]), start, lambda: (0, 0)) == GIVEN
    assert count_pages(GIVEN, []) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"device": "cpu"}, False),
        ({"num_pages": 1}, False),
        ({"kv_cache_bytes": 1}, False),
    ],
)
def test_only_what_is_left_open_on_a_gpu_is_fitted(
    changes: dict[str, object], expected: bool
) -> None:
    assert is_open(replace(Deployment(device="cuda"), **changes)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, {"max_num_batched_tokens": 7}, {"max_model_len": 5000}])
def test_a_real_engine_runs_the_trial(toy: DecoderModel, changes: dict[str, int]) -> None:
    deployment = replace(GIVEN, **changes)  # type: ignore[arg-type]
    started: list[EngineCore] = []

    def start(trial: Deployment) -> EngineCore:
        started.append(EngineCore(toy, trial))
        return started[-1]

    def measure() -> tuple[int, int]:
        core = started[-1]
        assert not core.has_work
        assert core.stats().num_preemptions == 0
        most = deployment.max_num_seqs + 1
        assert core.stats().generation_tokens <= most
        return 10**9, 10**9

    out = fit(deployment, toy, start, measure)
    assert out.num_pages is not None
    assert out.num_pages > 100


@pytest.mark.parametrize("given", [{"num_pages": 5}, {"kv_cache_bytes": 5 * PAGE + 7}])
def test_given_pages_stay_and_their_trial_has_no_more(given: dict[str, int]) -> None:
    wanted = replace(GIVEN, gpu_memory_utilization=0.1, **given)  # type: ignore[arg-type]
    out, trial = fitted(wanted, 10**6, 10**6 + 6 * PAGE)
    assert out == replace(wanted, num_pages=5)
    assert trial.deployment.num_pages == 5
    assert trial.lens == [79, 16, 16, 16, 16]


def test_given_pages_without_room_beside_the_largest_step_are_an_error_with_the_numbers() -> None:
    wanted = replace(GIVEN, num_pages=10**6)
    with pytest.raises(ConfigError, match=r"has 7\.00 GB; 1000000 KV pages take 6\.14 GB .* 1\.00"):
        fitted(wanted, 10**9, 7 * 10**9)


def test_given_pages_are_tried_out_by_a_real_engine(toy: DecoderModel) -> None:
    started: list[EngineCore] = []

    def start(trial: Deployment) -> EngineCore:
        started.append(EngineCore(toy, trial))
        return started[-1]

    def measure() -> tuple[int, int]:
        assert not started[-1].has_work
        # Two prompts of 31 tokens share a step of 64, then four of 16.
        assert started[-1].stats().generation_tokens == 2 + 4
        return 10**9, 10**9

    wanted = replace(GIVEN, num_pages=2, max_model_len=0)
    assert fit(wanted, toy, start, measure) == wanted


def test_caches_share_the_memory_that_is_given() -> None:
    wide = KVConfig(num_layers=2, num_kv_heads=6, head_dim=8)
    specs = [*SPECS, KVSpec("wide", {"other"}, wide)]
    assert count_pages(replace(GIVEN, kv_cache_bytes=10 * PAGE), SPECS) == 10
    assert count_pages(replace(GIVEN, kv_cache_bytes=10 * PAGE), specs) == 3
    assert count_pages(replace(GIVEN, num_pages=10), specs) == 10
    assert count_pages(GIVEN, specs) == (1 << 30) // (3 * PAGE)


@pytest.mark.parametrize("given", [{"num_pages": 0}, {"kv_cache_bytes": 100}])
def test_a_cache_without_a_page_is_refused_with_its_numbers(
    given: dict[str, int], toy: DecoderModel
) -> None:
    with pytest.raises(ConfigError, match="would hold 0 pages of 16 tokens"):
        EngineCore(toy, replace(GIVEN, **given))  # type: ignore[arg-type]


def test_a_context_beyond_the_models_is_told(
    toy: DecoderModel, caplog: pytest.LogCaptureFixture
) -> None:
    EngineCore(toy, Deployment(max_model_len=toy.max_model_len))
    assert not caplog.records
    EngineCore(toy, Deployment(max_model_len=toy.max_model_len + 1))
    assert f"was made for {toy.max_model_len}" in caplog.text
