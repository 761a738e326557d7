"""Every family computes what transformers computes on the same weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mstar.engine.model import Model
from mstar.models import load_model
from tests.models.families import (
    CASES,
    FAMILIES,
    random_prompts,
    reference_logits,
    saved,
    tiny_model,
)
from tests.models.harness import all_logits, greedy, small_deployment

BACKENDS = ("eager", "sdpa", "paged")
# Logits are of size 1 to 10; float32 sums of a few hundred terms agree to some 1e-6 of that.
FLOAT32 = 1e-4
PROMPTS = random_prompts(1, 2, 17, 40)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Pair:
    """The same weights here and there."""

    ours: Model
    theirs: PreTrainedModel
    logits: list[Tensor]
    """Theirs, of ``PROMPTS``."""


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = saved(request.param, tmp_path_factory.mktemp("case"))
    theirs = tiny_model(request.param)
    ours, dtype = load_model(str(folder))
    assert dtype == "float32"
    return Pair(ours, theirs, reference_logits(theirs, PROMPTS))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [None, 5, 1])
def test_logits_of_every_position_are_the_references(
    pair: Pair, chunk: int | None, backend: str
) -> None:
    found = all_logits(
        pair.ours, PROMPTS, chunk=chunk, deployment=small_deployment(backend=backend)
    )
    for own, theirs in zip(found, pair.logits, strict=True):
        torch.testing.assert_close(own, theirs, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_tokens_are_the_references(pair: Pair, backend: str) -> None:
    # So few tokens a step that prompts are cut and mixed with tokens that are generated.
    deployment = small_deployment(backend=backend, max_num_batched_tokens=12)
    answers = greedy(pair.ours, PROMPTS, 24, deployment=deployment)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        (logits,) = reference_logits(pair.theirs, [prompt + answer])
        assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert len(answer) == 24


@pytest.mark.parametrize("backend", ["sdpa", "paged"])
@pytest.mark.parametrize("case", FAMILIES)
def test_bfloat16_errs_no_more_than_the_reference_does(
    tmp_path: Path, case: str, backend: str
) -> None:
    """Against float32 arithmetic on the same rounded weights.

    Rounding to 8 bits after each of some 20 operations moves logits of standard deviation 1 by a
    few hundredths; transformers does the same, so its error is the measure, and a quarter more
    is allowed for luck.
    """
    folder = saved(case, tmp_path, torch.bfloat16)
    ours, dtype = load_model(str(folder))
    assert dtype == "bfloat16"
    rounded = tiny_model(case, torch.bfloat16)
    theirs = torch.cat(reference_logits(rounded, PROMPTS)).float()
    exact = torch.cat(reference_logits(rounded.float(), PROMPTS))
    found = torch.cat(
        all_logits(ours, PROMPTS, deployment=small_deployment(dtype="bfloat16", backend=backend))
    )
    assert found.dtype == torch.bfloat16
    own_error, their_error = found.float() - exact, theirs - exact
    assert own_error.square().mean().sqrt() < 0.05 * exact.std()
    assert own_error.square().mean() < (1.25 * their_error).square().mean()
