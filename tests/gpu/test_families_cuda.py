"""Every family on a CUDA device gets logits that are those of the CPU behind the same tokens.

What a device chooses among near ties is its own; so the CPU is made to choose the same, and what
both computed is compared.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mstar.catalog import load_model
from mstar.engine.array import to_numpy
from mstar.engine.engine import EngineCore
from mstar.engine.model import Model
from mstar.engine.output import Emitted
from mstar.engine.resources.attention.manager import AttentionManager
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from tests.gpu import likely
from tests.gpu.likely import HEAD_DIM
from tests.gpu.replay import SHARE, ask_all, assert_near, assert_told, replayed
from tests.gpu.wide import wide_family
from tests.laws.families import PICTURES, TEXTS, Family
from tests.laws.watching import PAGE_SIZE, Answer, Desk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WRITERS = (*TEXTS, *PICTURES)
"""Their answers are tokens with log-probabilities, and their decode steps are recorded."""
OTHERS = ("whisper", "janus-paints")
HALVES = ("qwen2.5-vl", "smolvlm", "janus-looks", *OTHERS)
"""Families that are run in float16 too: a window takes kernels of its own."""
CASES = [
    *product(WRITERS, ["bfloat16"], [True, False]),
    *product([name for name in HALVES if name in WRITERS], ["float16"], [True]),
    # Nothing is recorded in float32.
    *product(WRITERS, ["float32"], [True]),
]
"""Family, dtype, and whether steps are recorded that can be."""
WATCHED = [
    *product(OTHERS, ["bfloat16", "float16", "float32"], [True]),
    ("whisper", "bfloat16", False),
]
NUM_RECORDED = {"whisper": 1, "janus-paints": 2}
"""Nodes; what paints shares its resources with what writes."""
SENSITIVE = frozenset({"qwen2.5-vl", "janus-looks", "janus-paints"})
"""What these get wrong is three times as large: their attention is sharper, and convolutions of
float32 round to eleven bits on a card."""
# Of 255 levels, where all codes are equal: four times what it is on a CPU.
LEVELS = {"bfloat16": 16, "float16": 3, "float32": 2}


@cache
def loaded(name: str, dtype: str) -> tuple[Family, Model]:
    """Return a family, whose model is on the CPU, and the same model on the device."""
    family, folder = wide_family(name, HEAD_DIM[dtype])
    model, own = load_model(str(folder), dtype=dtype, device=likely.DEVICE)
    assert own == dtype
    return family, model


def share_of(name: str, dtype: str) -> float:
    return SHARE[dtype] * (3 if name in SENSITIVE else 1)


def desk_of(name: str, dtype: str, **numbers: Any) -> Desk:
    _, model = loaded(name, dtype)
    return Desk(model, device=likely.DEVICE, dtype=dtype, **numbers)


def levels(piece: Emitted) -> npt.NDArray[np.int64]:
    assert piece.array is not None
    return to_numpy(piece.array).astype(np.int64)


def assert_same_pieces(got: Sequence[Emitted], known: Sequence[Emitted], dtype: str) -> None:
    """Assert that what follows from tokens is the same, and pictures nearly."""
    assert [(piece.name, piece.text) for piece in got] == [(p.name, p.text) for p in known]
    for ours, theirs in zip(got, known, strict=True):
        assert ours.info.keys() == theirs.info.keys()
        assert all(np.isfinite(v) for v in ours.info.values() if isinstance(v, float))
        assert (ours.array is None) == (theirs.array is None)
        if ours.array is not None:
            assert np.abs(levels(ours) - levels(theirs)).max() <= LEVELS[dtype]
        for key in ("start", "end", "tokens", "language", "num_tokens"):
            assert ours.info.get(key) == theirs.info.get(key)
        heard, known_heard = (piece.info.get("no_speech_prob", 0.0) for piece in (ours, theirs))
        assert heard == pytest.approx(known_heard, rel=40 * SHARE[dtype])


def assert_all_near(name: str, dtype: str, answers: Mapping[str, Answer]) -> None:
    """Assert that a family's requests, numbered, got what they get on the CPU."""
    family, _ = loaded(name, dtype)
    got = [answers[str(place)] for place in range(len(family.asks))]
    known = replayed(family.model, family.asks, [answer.chosen for answer in got])
    for ours, theirs in zip(got, known, strict=True):
        assert ours.error is None, ours.error
        assert_near(ours.logits, theirs.logits, share_of(name, dtype))
        assert ours.tokens == theirs.tokens
        assert ours.finish_reason == theirs.finish_reason
        assert_same_pieces(ours.emitted, theirs.emitted, dtype)


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0 and params.repetition_penalty == 1


@pytest.mark.parametrize(("name", "dtype", "cuda_graphs"), CASES)
def test_answers_are_as_likely_as_on_the_cpu(name: str, dtype: str, cuda_graphs: bool) -> None:
    """Together, and once more from the cache."""
    family, model = loaded(name, dtype)
    numbers: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": 400, "max_num_seqs": 8}
    core = EngineCore(
        model,
        Deployment(device=likely.DEVICE, dtype=dtype, cuda_graphs=cuda_graphs, **numbers),
    )
    attention = core._runner.resources["attention"]
    assert isinstance(attention, AttentionManager)
    is_fast = attention.backend_name == "flashinfer"
    assert is_fast == (likely.DEVICE == "cuda" and dtype != "float32")
    asked = [ask("r", None).params for ask in family.asks]
    for _ in range(2):
        told = ask_all(core, family.asks, logprobs=20)
        known = replayed(family.model, family.asks, [one.tokens for one in told])
        for own, params, theirs in zip(told, asked, known, strict=True):
            assert len(own.tokens) == params.max_tokens
            assert_told(own, theirs.logits, share_of(name, dtype), is_best=is_greedy(params))
    assert core.stats().cached_tokens > 0
    # What paints is recorded, too, and not asked.
    used = [own for own in core._runner._recorders.values() if own.num_replays]
    assert len(used) == (is_fast and cuda_graphs)
    for recorder in used:
        assert 0 < recorder.num_ahead < recorder.num_replays


@pytest.mark.parametrize(("name", "dtype", "cuda_graphs"), WATCHED)
def test_requests_get_what_they_get_on_the_cpu(name: str, dtype: str, cuda_graphs: bool) -> None:
    """Transcripts window after window, and pictures painted beside a text."""
    family, _ = loaded(name, dtype)
    desk = desk_of(name, dtype, cuda_graphs=cuda_graphs)
    for place, ask in enumerate(family.asks):
        desk.add(str(place), ask)
    answers = desk.drain()
    assert desk.largest_batch > 2
    assert_all_near(name, dtype, answers)
    recorders = desk.engine._runner._recorders.values()
    is_recorded = cuda_graphs and dtype != "float32"
    assert len(recorders) == is_recorded * NUM_RECORDED[name]
    assert all(recorder.num_replays > 5 for recorder in recorders)


@pytest.mark.parametrize("name", [*WRITERS, *OTHERS])
def test_chunks_change_nothing_but_rounding(name: str) -> None:
    family, _ = loaded(name, "bfloat16")
    for budget in family.budgets:
        desk = desk_of(name, "bfloat16", max_num_batched_tokens=budget)
        for place, ask in enumerate(family.asks):
            desk.add(str(place), ask)
        assert_all_near(name, "bfloat16", desk.drain())


@pytest.mark.parametrize("name", [*WRITERS, *OTHERS])
def test_what_ran_before_is_neither_computed_nor_encoded_again(name: str) -> None:
    family, _ = loaded(name, "bfloat16")
    before = family.offsets[-1]
    first, second = (family.at(before, tail, 1) for tail in (1, 2))
    desk = desk_of(name, "bfloat16")
    cold = desk.ask(first)
    assert cold.num_cached_tokens == 0
    num_encoded = desk.num_encoded
    assert (num_encoded > 0) == family.has_items
    for ask in (first, second):
        answer = desk.ask(ask)
        assert answer.num_cached_tokens >= family.shared(before) > 0
        assert desk.num_encoded == num_encoded
        (known,) = replayed(family.model, [ask], [answer.chosen])
        assert_near(answer.logits, known.logits, share_of(name, "bfloat16"))
        assert_same_pieces(answer.emitted, known.emitted, "bfloat16")
