"""Two processes with a half of the model each answer as one process does."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mstar.catalog import open_engine
from mstar.engine.engine import EngineCore
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.kv.keys import chain
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import ConfigError, RequestError
from tests.models.families import saved
from tests.models.ranks import NUMBERS, PROMPTS, add, assert_same, drain

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama-biases", tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[EngineCore]:
    engine = open_engine(str(folder), replace(NUMBERS, tensor_parallel_size=2))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def single(folder: Path) -> EngineCore:
    return open_engine(str(folder), NUMBERS)


def test_chunks_decodes_and_preemptions_give_what_one_process_gives(
    pair: EngineCore, single: EngineCore
) -> None:
    """Prompts longer than a step's budget, in a pool too small for four requests."""
    told = []
    for engine in (pair, single):
        for place, ids in enumerate(PROMPTS):
            add(engine, f"mixed {place}", ids, max_tokens=40)
        told.append(drain(engine))
        assert engine.stats().num_preemptions
    assert_same(*told)
    assert pair.stats() == single.stats()


def test_reuse_works_and_a_reset_reaches_all_ranks(pair: EngineCore, single: EngineCore) -> None:
    told = []
    for engine in (pair, single):
        engine.reset_prefix_cache()
        before = engine.stats().cached_tokens
        for turn in range(2):
            add(engine, f"cold and warm {turn}", PROMPTS[5])
            told.append(drain(engine))
        assert engine.stats().cached_tokens - before == len(PROMPTS[5]) // 4 * 4 - 4 * (
            len(PROMPTS[5]) % 4 == 0
        )
        assert engine.reset_prefix_cache() > 0
        assert engine.stats().num_pages_cached == 0
        engine.check()
    assert_same(told[0], told[2])
    assert_same(told[1], told[3])


def test_roots_differ_since_pages_hold_other_heads(pair: EngineCore, single: EngineCore) -> None:
    assert pair.root != single.root


def test_requests_without_a_seed_and_with_one_are_drawn_alike_on_all_ranks(
    pair: EngineCore, single: EngineCore
) -> None:
    told = []
    for engine in (pair, single):
        add(engine, "drawn", PROMPTS[1], temperature=1.0, seed=7, top_p=0.9)
        told.append(drain(engine))
    assert_same(*told)
    # Ranks that drew other tokens would say so with the next call.
    for turn in range(3):
        add(pair, f"unseeded {turn}", PROMPTS[1], temperature=1.0)
        drain(pair)
    pair.check()


def test_aborts_and_refusals_leave_all_ranks_alike(pair: EngineCore) -> None:
    for place, ids in enumerate(PROMPTS):
        add(pair, f"gone {place}", ids)
    for number in range(12):
        pair.step()
        if number % 2:
            assert pair.abort(f"gone {number // 2}")
    with pytest.raises(RequestError, match="the context holds 128"):
        add(pair, "long", [5] * 200)
    with pytest.raises(RequestError):
        add(pair, "strange", [5000])
    assert not pair.abort("unknown")
    drain(pair)
    add(pair, "after", PROMPTS[0])
    assert len(drain(pair)["after"]) == 20


def test_pages_are_protected_by_one_clock(pair: EngineCore) -> None:
    pair.reset_prefix_cache()
    size = pair.deployment.page_size
    assert pair.root is not None
    ids = PROMPTS[4]
    keys = chain([ids[i : i + size] for i in range(0, len(ids), size)], None, pair.root)
    pair.add_request(
        PreparedRequest(
            request_id="kept",
            token_ids=ids,
            params=SamplingParams(max_tokens=2, temperature=0.0),
            root=pair.root,
            page_keys=list(keys),
            retain_seconds=0.05,
        )
    )
    drain(pair)
    for turn in range(4):
        # Protection ends between two of these, on all ranks between the same two.
        time.sleep(0.02)
        add(pair, f"other {turn}", [(j * 11 + turn) % 90 + 3 for j in range(90)], max_tokens=8)
        drain(pair)


def test_process_has_one_engine_of_several_ranks_at_a_time(pair: EngineCore, folder: Path) -> None:
    assert pair.deployment.tensor_parallel_size == 2
    with pytest.raises(ConfigError, match="one of several ranks already; close that engine first"):
        open_engine(str(folder), replace(NUMBERS, tensor_parallel_size=2))
