"""Every law over every family: what else runs, and what ran before, changes no answer."""

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest
import torch

from mstar.engine.batch import Batch
from mstar.engine.output import RequestOutput
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.sampler.manager import SamplerManager
from mstar.engine.resources.step import Segment
from mstar.preprocess.prompt import request_root
from tests.laws.families import FAMILIES, SLOW, Family, extended, family_of
from tests.laws.harness import prompt
from tests.laws.watching import PAGE_SIZE, Answer, Ask, Desk, assert_nothing_is_held, assert_same

# Real weights take a second for every recording: they are held to the laws that their legs and
# edges could break, and their parts, tiny, to all of them.
_LIGHT = tuple(name for name in FAMILIES if name not in SLOW)
light = pytest.mark.parametrize("name", _LIGHT)
NAMES = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FAMILIES]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def family(name: str) -> Family:
    return family_of(name)


def desk_of(family: Family, **numbers: Any) -> Desk:
    return Desk(family.model, **{**family.numbers, **numbers})


def alone(family: Family, ask: Ask) -> Answer:
    """Return what a request gets from a fresh engine without reuse, all by itself."""
    return desk_of(family, enable_prefix_caching=False).ask(ask)


@cache
def expected(name: str) -> Sequence[Answer]:
    """Return what each of a family's requests gets alone."""
    family = family_of(name)
    return [alone(family, ask) for ask in family.asks]


def assert_all_same(name: str, desk: Desk) -> None:
    """Assert that all of a family's requests, numbered, got what each gets alone."""
    answers, family = desk.drain(), family_of(name)
    assert len(answers) == len(family.asks)
    for number, answer in enumerate(expected(name)):
        assert_same(answers[str(number)], answer, family.atol)


def test_what_is_asked_shows_something(name: str) -> None:
    answers = expected(name)
    assert all(answer.error is None for answer in answers)
    assert len({tuple(answer.chosen) for answer in answers}) == len(answers)
    assert max(len(set(answer.chosen)) for answer in answers) > 4


def test_a_batch_gives_what_each_gets_alone(name: str, family: Family) -> None:
    desk = desk_of(family, enable_prefix_caching=False)
    encoders = [desk.watchers[node] for node in family.model.encoders.values()]
    for encoder in encoders:
        # What it encodes together on a GPU, it does here.
        encoder.max_batch = None
    for number, ask in enumerate(family.asks):
        desk.add(str(number), ask)
    assert_all_same(name, desk)
    assert desk.largest_batch > 2
    assert not family.has_items or max(max(w.sizes, default=0) for w in encoders) > 1


def test_those_who_join_and_leave_a_running_batch_change_nothing(name: str, family: Family) -> None:
    desk = desk_of(family, max_num_seqs=3)
    for number, ask in enumerate(family.asks):
        desk.add(str(number), ask)
        desk.step()
        desk.step()
    assert_all_same(name, desk)


def test_chunks_change_nothing(name: str, family: Family) -> None:
    for budget in family.budgets:
        desk = desk_of(family, max_num_batched_tokens=budget)
        for number, ask in enumerate(family.asks):
            desk.add(str(number), ask)
        assert_all_same(name, desk)


def test_what_ran_before_is_neither_computed_nor_encoded_again(family: Family) -> None:
    for before in family.offsets:
        first, second = (family.at(before, tail, 1) for tail in (1, 2))
        desk = desk_of(family)
        cold = desk.ask(first)
        assert cold.num_cached_tokens == 0
        num_encoded = desk.num_encoded
        assert (num_encoded > 0) == family.has_items
        for ask in (first, second):
            answer = desk.ask(ask)
            assert answer.num_cached_tokens >= family.shared(before) > 0
            assert desk.num_encoded == num_encoded
            assert_same(answer, alone(family, ask), family.atol)


def test_another_item_of_the_same_size_shares_nothing_of_it(name: str, family: Family) -> None:
    if not family.has_items:
        pytest.skip("it has no items")
    desk, before = desk_of(family), family.offsets[-1]
    desk.ask(family.at(before, 1, 1))
    num_encoded, other = desk.num_encoded, family.at(before, 1, 4)
    answer = desk.ask(other)
    assert desk.num_encoded > num_encoded
    # The real assistant's chat is that of the words, and not of the recording.
    assert name in SLOW or answer.num_cached_tokens < family.shared(before)
    assert_same(answer, alone(family, other), family.atol)


def test_what_was_said_is_reused_by_the_next_turn(family: Family) -> None:
    if not family.talks:
        pytest.skip("what it says stands in no prompt")
    desk, ask, num_stored = desk_of(family), family.at(1, 1, 1), 0
    for turn in range(3):
        answer = desk.ask(ask)
        assert_same(answer, alone(family, ask), family.atol)
        assert answer.num_cached_tokens == num_stored // PAGE_SIZE * PAGE_SIZE
        # The last token that was generated is not stored.
        num_stored = len(ask("r", None).token_ids) + len(answer.tokens) - 1
        ask = extended(ask, [*answer.tokens, *prompt(turn, 3, 96)])


NUMBERS: dict[str, dict[str, Any]] = {
    # The requests' keys are those of their own pages.
    "pages of another size": {"page_size": 7, "enable_prefix_caching": False},
    "another backend": {"attention_backend": "eager"},
}


@pytest.mark.parametrize("numbers", NUMBERS)
@light
def test_numbers_of_the_deployment_change_nothing(name: str, family: Family, numbers: str) -> None:
    desk = desk_of(family, **NUMBERS[numbers])
    for number, ask in enumerate(family.asks):
        desk.add(str(number), ask)
    assert_all_same(name, desk)


@light
def test_room_for_one_item_at_a_time_changes_nothing(name: str, family: Family) -> None:
    if not family.has_items:
        pytest.skip("it has no items")
    asked = [ask("r", None) for ask in family.asks]
    lengths = [span.length for one in asked for span in one.spans if span.digest is not None]
    lengths += [item.length for one in asked for item in one.context]
    desk = desk_of(family, encoder_cache_tokens=max(lengths))
    for number, ask in enumerate(family.asks):
        desk.add(str(number), ask)
    assert_all_same(name, desk)


@light
def test_reuse_among_all_requests_changes_nothing(name: str, family: Family) -> None:
    """Each finds what the others left, twice over; a reset makes all as it was."""
    desk = desk_of(family)
    for turn in range(3):
        before = desk.engine.stats().cached_tokens, desk.num_encoded
        for number, ask in enumerate(family.asks):
            desk.add(str(number), ask)
        assert_all_same(name, desk)
        after = desk.engine.stats().cached_tokens, desk.num_encoded
        if turn == 1:
            assert after[0] > before[0]
            assert after[1] == before[1]
            desk.engine.reset_prefix_cache()


@pytest.mark.parametrize("reuse", [True, False])
def test_preemption_changes_nothing(name: str, family: Family, reuse: bool) -> None:
    num_preemptions = 0
    for num_pages in family.pools:
        numbers = {"num_pages": num_pages, "max_model_len": family.longest}
        desk = desk_of(family, **numbers, enable_prefix_caching=reuse)
        for number, ask in enumerate(family.asks):
            desk.add(str(number), ask)
        assert_all_same(name, desk)
        num_preemptions += desk.engine.stats().num_preemptions
    assert num_preemptions > 0


@light
def test_resets_in_mid_flight_change_nothing(name: str, family: Family) -> None:
    desk = desk_of(family)
    for number, ask in enumerate([*family.asks, *family.asks]):
        desk.add(str(number), ask)
        desk.engine.reset_prefix_cache()
        desk.step()
    steps = 0
    while desk.engine.has_work:
        desk.step()
        steps += 1
        if steps % 3 == 0:
            desk.engine.reset_prefix_cache()
    answers = desk.drain()
    for number in range(len(answers)):
        own = expected(name)[number % len(family.asks)]
        assert_same(answers[str(number)], own, family.atol)


def test_tenants_share_nothing(family: Family) -> None:
    desk, ask = desk_of(family), family.at(family.offsets[-1], 1, 1)
    cold = alone(family, ask)
    for salt, is_new in ((None, True), ("a", True), ("b", True), ("a", False), (None, False)):
        before = desk.num_encoded
        answer = desk.ask(ask, salt)
        assert (answer.num_cached_tokens == 0) == is_new, salt
        assert (desk.num_encoded > before) == (is_new and family.has_items), salt
        assert_same(answer, cold, family.atol)


def test_an_abort_at_any_step_leaves_nothing_behind(name: str, family: Family) -> None:
    """Another of the same content runs beside it, and a third waits."""
    gone, beside = family.asks[0], family.asks[1]
    desk = desk_of(family, max_num_seqs=2, max_num_batched_tokens=max(family.budgets))
    step, is_over = 0, False
    while not is_over:
        for number, ask in enumerate((gone, gone, beside)):
            desk.add(str(number), ask)
        for _ in range(step):
            desk.step()
        is_over = desk.answers["0"].finish_reason is not None
        for number in range(3):
            if desk.answers[str(number)].finish_reason is None and number != step % 3:
                desk.abort(str(number))
        answers = desk.drain()
        assert_nothing_is_held(desk.engine)
        for key, answer in answers.items():
            assert_same(answer, expected(name)[int(key) // 2], family.atol)
        if step % 5 == 4:
            desk.engine.reset_prefix_cache()
        step += 1 if step < 12 else 4
    assert_same(desk.ask(gone), expected(name)[0], family.atol)


@pytest.mark.parametrize("seed", range(2))
@light
def test_traffic_of_all_kinds_over_a_small_pool_changes_nothing(
    name: str, family: Family, seed: int
) -> None:
    rng = random.Random(seed)
    desk = desk_of(
        family,
        num_pages=family.pools[0],
        max_model_len=family.longest,
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice(family.budgets),
        encoder_cache_tokens=max(family.budgets),
    )
    wanted: dict[str, int] = {}
    for number in range(2 * len(family.asks)):
        wanted[str(number)] = rng.randrange(len(family.asks))
        desk.add(str(number), family.asks[wanted[str(number)]], rng.choice((None, None, "a")))
        for _ in range(rng.randrange(5)):
            desk.step()
        alive = [key for key, one in desk.answers.items() if one.finish_reason is None]
        if alive and rng.random() < 0.1:
            desk.abort(rng.choice(alive))
        if rng.random() < 0.1:
            desk.engine.reset_prefix_cache()
    for key, answer in desk.drain().items():
        assert_same(answer, expected(name)[wanted[key]], family.atol)


def test_what_crosses_a_process_says_the_same(name: str, family: Family) -> None:
    desk = desk_of(family)
    root = request_root(desk.engine.root, None)
    for number, ask in enumerate(family.asks):
        packed = msgspec.msgpack.encode(ask(str(number), root))
        desk.put(msgspec.msgpack.decode(packed, type=PreparedRequest))
    told: dict[str, Answer] = {key: Answer() for key in desk.answers}
    while desk.engine.has_work:
        for output in desk.step():
            packed = msgspec.msgpack.encode(output)
            back = msgspec.msgpack.decode(packed, type=RequestOutput)
            assert back == output
            told[output.request_id].tokens += back.token_ids
            told[output.request_id].emitted += back.emitted
    for key, answer in told.items():
        assert answer.tokens == desk.answers[key].tokens
        assert answer.emitted == desk.answers[key].emitted
    assert_all_same(name, desk)


def test_a_forked_stream_goes_its_own_way(family: Family) -> None:
    """From the middle of a page, behind items; what it was forked from goes on as if alone."""
    if family.decoder is None:
        pytest.skip("its requests have several streams each, or legs")
    for before in family.offsets:
        _fork(family, family.decoder, family.at(before, 1, 1))


def _fork(family: Family, node: str, ask: Ask) -> None:
    desk = desk_of(family)
    runner = desk.engine._runner
    desk.add("r", ask)
    while len(desk.answers["r"].tokens) < 3:
        desk.step()
    last = desk.watchers[node].last
    assert last is not None
    (request,) = last.requests
    twin = copy.copy(request)
    twin.tokens = list(request.tokens)
    opening = replace(
        request.openings[0],
        label="twin",
        tokens=twin.tokens,
        naming=copy.copy(request.openings[0].naming),
    )
    for resource in runner.resources.values():
        if isinstance(resource, SamplerManager):
            assert resource.open(opening, 0) is None
        else:
            assert resource.fork("r", "main", opening) is None
    runner.check()
    others = [3, 5, 7, 3]
    logits = []
    for token in others:
        # Its last id is generated already, and computed by neither.
        batch = Batch(node, (twin,), (Segment("r", "twin", 1),), (0,), is_decode=True)
        assert runner.admit(batch) is None
        runner.run(batch)
        logits.append(desk.watchers[node].logits["r"].pop())
        desk.watchers[node].chosen["r"].pop()
        twin.num_computed_tokens += 1
        twin.tokens.append(token)
        runner.check()
        if desk.engine.has_work:
            desk.step()
    answer = desk.drain()["r"]
    whole = alone(family, ask)
    assert_same(answer, whole, family.atol)
    torch.testing.assert_close(logits[0], whole.logits[3], rtol=0, atol=family.atol)
    # The last of the others is not computed.
    said = twin.tokens[request.num_prompt_tokens : -1]
    anew = alone(family, extended(ask, said, max_tokens=1)).logits[0]
    # What may not be said at the beginning of an answer may be later.
    both = anew.isfinite() & logits[-1].isfinite()
    assert both.sum() > 1
    torch.testing.assert_close(logits[-1][both], anew[both], rtol=0, atol=family.atol)
