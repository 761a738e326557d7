"""The laws over models with pictures: batch, chunk, reuse, preemption and copies change nothing."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from mstar.models.decoder import DecoderModel
from mstar.models.siglip import PictureEncoder
from mstar.preprocess.items import PromptItem
from mstar.preprocess.media.types import ImageMedia
from tests.laws.harness import PAGE_SIZE, Answer, Bench, Picture, Prompt, ask, assert_same, prompt
from tests.models import vision_families as vision
from tests.models.vision_families import FAMILIES, LENGTH, Family, computed, picture


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return vision.load(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def model(family: Family) -> DecoderModel:
    assert isinstance(family.ours, DecoderModel)
    return family.ours


@dataclass(frozen=True)
class Photo(Picture):
    """A picture as a family's processor makes an item of it."""

    family: Family | None = None

    def item(self) -> PromptItem:
        assert self.family is not None
        media = ImageMedia(np.asarray(picture(self.seed)), "low")
        (item,) = (p for p in self.family.processor.expand(media) if isinstance(p, PromptItem))
        assert item.span.length == self.length
        return item


def photo(family: Family, seed: int) -> Photo:
    return Photo(seed, LENGTH, family=family)


def num_encoded(model: DecoderModel) -> int:
    encoder = model.nodes["encoder"]
    assert isinstance(encoder, PictureEncoder)
    return encoder.num_encoded


def turn(bench: Bench, parts: Prompt, **options: Any) -> Answer:
    bench.add("turn", parts, **options)
    return bench.drain()["turn"]


@pytest.mark.parametrize("before", range(PAGE_SIZE + 1))
def test_second_question_computes_and_encodes_nothing_of_the_picture(
    family: Family, model: DecoderModel, before: int
) -> None:
    """The picture ends at every offset of a page."""
    first: Prompt = [*prompt(1, before), photo(family, 1), *prompt(2, 5)]
    second: Prompt = [*prompt(1, before), photo(family, 1), *prompt(3, 6)]
    bench = Bench(model)
    assert_same(turn(bench, first), ask(model, first))
    encoded = num_encoded(model)
    answer = turn(bench, second)
    assert answer.num_cached_tokens == before + LENGTH
    assert num_encoded(model) == encoded
    assert_same(answer, ask(model, second))


def test_other_picture_shares_nothing(family: Family, model: DecoderModel) -> None:
    bench = Bench(model)
    turn(bench, [*prompt(1, 5), photo(family, 1), *prompt(2, 3)])
    parts: Prompt = [*prompt(1, 5), photo(family, 2), *prompt(2, 3)]
    answer = turn(bench, parts)
    assert answer.num_cached_tokens == 4
    assert_same(answer, ask(model, parts))


@pytest.mark.parametrize("budget", [LENGTH, 16, 64])
def test_chunks_never_change_an_answer(family: Family, model: DecoderModel, budget: int) -> None:
    for before in range(3):
        pictures = [photo(family, seed) for seed in (3, 4)]
        parts: Prompt = [*prompt(4, before), *pictures, *prompt(5, 3), photo(family, 5), 7]
        bench = Bench(model, max_num_batched_tokens=budget)
        assert_same(turn(bench, parts), ask(model, parts))


@pytest.mark.parametrize("reuse", [True, False])
def test_batch_gives_what_each_gets_alone(family: Family, model: DecoderModel, reuse: bool) -> None:
    prompts: list[Prompt] = [
        [*prompt(n, n), photo(family, n % 3), *prompt(n, 2), photo(family, 7), n + 2]
        for n in range(5)
    ]
    expected = [ask(model, parts) for parts in prompts]
    before = num_encoded(model)
    bench = Bench(model, enable_prefix_caching=reuse)
    for number, parts in enumerate(prompts):
        bench.add(str(number), parts)
    answers = bench.drain()
    for number, alone in enumerate(expected):
        assert_same(answers[str(number)], alone)
    if reuse:
        assert num_encoded(model) - before == 4


@pytest.mark.parametrize("reuse", [True, False])
def test_preempted_requests_are_answered_as_if_uninterrupted(
    family: Family, model: DecoderModel, reuse: bool
) -> None:
    prompts: list[Prompt] = [[*prompt(n, 2 + n), photo(family, n), 9, n + 3] for n in range(4)]
    expected = [ask(model, parts, max_tokens=24) for parts in prompts]
    bench = Bench(model, num_pages=20, max_num_seqs=4, enable_prefix_caching=reuse)
    for number, parts in enumerate(prompts):
        bench.add(str(number), parts, max_tokens=24)
    answers = bench.drain()
    assert bench.engine.stats().num_preemptions > 0
    for number, alone in enumerate(expected):
        assert_same(answers[str(number)], alone)


def test_copies_of_a_prompt_go_different_ways(family: Family, model: DecoderModel) -> None:
    """Several choices of one prompt share its pages, the last one up to where they part."""
    parts: Prompt = [*prompt(6, 3), photo(family, 6), *prompt(7, 2)]
    options: list[dict[str, Any]] = [{"temperature": 1.5, "seed": seed} for seed in range(4)]
    expected = [ask(model, parts, **one) for one in options]
    bench = Bench(model)
    for number, one in enumerate(options):
        bench.add(str(number), parts, **one)
    answers = bench.drain()
    for number, alone in enumerate(expected):
        assert_same(answers[str(number)], alone)
    assert len({tuple(answer.token_ids) for answer in answers.values()}) > 1


def test_conversation_about_pictures_reuses_all_that_was_said(
    family: Family, model: DecoderModel
) -> None:
    bench = Bench(model)
    history: Prompt = []
    for number in range(3):
        history = [*history, *prompt(number, 3), photo(family, number), *prompt(number, 2)]
        answer = turn(bench, history, max_tokens=7)
        assert_same(answer, ask(model, history, max_tokens=7))
        history = [*history, *answer.token_ids]


def test_pictures_of_one_size_are_encoded_together(family: Family, model: DecoderModel) -> None:
    layouts = [family.layout(family.mark, [picture(seed)], "low") for seed in range(3)]
    sizes: list[int] = []
    encoder = model.nodes["encoder"]
    assert isinstance(encoder, PictureEncoder)
    encode = encoder.encode

    def noted(pixels: torch.Tensor) -> torch.Tensor:
        sizes.append(len(pixels))
        return encode(pixels)

    encoder.encode = noted  # type: ignore[method-assign]
    try:
        together = computed(model, layouts)
    finally:
        encoder.encode = encode  # type: ignore[method-assign]
    assert max(sizes) > 1
    for made, (_, logits) in zip(layouts, together, strict=True):
        ((_, alone),) = computed(model, [made])
        torch.testing.assert_close(logits, alone, rtol=0, atol=2e-4)
