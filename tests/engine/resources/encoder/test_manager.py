from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from mstar.engine.request import Component, PreparedRequest, Request
from mstar.engine.resources.base import Deployment, Item, Opening
from mstar.engine.resources.encoder.config import EncoderConfig, EncoderStep
from mstar.engine.resources.encoder.manager import EncoderManager
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spans import Span
from mstar.errors import ConfigError
from mstar.models.base import text_graph

HIDDEN = 2
LENGTHS = {b"a": 1, b"b": 2, b"c": 3, b"d": 3, b"e": 4, b"f": 5}
REQUESTS = ["r0", "r1", "r2", "r3"]
NOTHING = EncoderStep()


def manager_of(budget: int, *, reuse: bool = True) -> EncoderManager:
    deployment = Deployment(encoder_cache_tokens=budget, enable_prefix_caching=reuse)
    return EncoderManager("encoder", EncoderConfig(hidden_size=HIDDEN), deployment)


def item(request_id: str, name: bytes) -> Item:
    return Item(request_id, name, LENGTHS[name])


def output_of(name: bytes, number: int) -> torch.Tensor:
    return torch.full((LENGTHS[name], HIDDEN), float(number))


def commit(manager: EncoderManager, made: list[Item], number: int, done: list[Item]) -> None:
    step = EncoderStep(made=tuple(made), done=tuple(done))
    plan = manager.plan((), step, {})
    for one in made:
        plan.store(one, output_of(one.name, number))
    manager.commit((), step)


def make(manager: EncoderManager, *made: Item, number: int = 1) -> None:
    """One whole step of an encoder, which must be admitted."""
    assert manager.admit((), EncoderStep(made=made)) is None
    commit(manager, list(made), number, [])


def let_go(manager: EncoderManager, *done: Item) -> None:
    assert manager.admit((), EncoderStep(done=done)) is None
    commit(manager, [], 0, list(done))


def kept(manager: EncoderManager) -> dict[bytes, int]:
    """Which outputs are there, and in which making."""
    plan, found = manager.plan((), NOTHING, {}), {}
    for name, length in LENGTHS.items():
        try:
            output = plan.read(name)
        except KeyError:
            continue
        assert output.shape == (length, HIDDEN)
        found[name] = int(output[0, 0])
    manager.commit((), NOTHING)
    return found


def opening(*lengths: int) -> Opening:
    spans = [Span(2), *(Span(n, bytes([n]) * 32, kind="picture") for n in lengths), Span(100)]
    num_slots = sum(span.length for span in spans)
    return Opening(
        request_id="r",
        tokens=[0] * num_slots,
        num_prompt_tokens=num_slots,
        max_len=num_slots + 1,
        spans=spans,
    )


def test_item_larger_than_the_budget_is_refused_for_good_with_both_numbers() -> None:
    manager = manager_of(6)
    assert manager.ever_fits(opening(6, 6, 1)) is None, "they need not be there at once"
    refusal = manager.ever_fits(opening(6, 7))
    assert refusal is not None
    assert refusal.resource_key == "encoder"
    assert "an item of 7 slots exceeds the 6 slots" in refusal.reason


def test_budget_is_that_of_a_step_where_nothing_else_is_said() -> None:
    deployment = Deployment(max_num_batched_tokens=77)
    manager = EncoderManager("encoder", EncoderConfig(hidden_size=HIDDEN), deployment)
    assert manager.budget == 77
    with pytest.raises(ConfigError, match="hidden_size is 0"):
        EncoderConfig(hidden_size=0)


def test_second_request_finds_what_the_first_is_still_using() -> None:
    manager = manager_of(5)
    make(manager, item("r0", b"f"))
    assert manager.pin(item("r1", b"f"))
    assert manager.counters() == {"num_encoder_hits": 1}
    let_go(manager, item("r0", b"f"))
    # The second one needs it still: nothing else fits.
    assert not manager.has_room(item("r2", b"a"))
    refusal = manager.admit((), EncoderStep(made=(item("r2", b"a"),)))
    assert refusal is not None
    assert "1 slots of encoder output are needed; 5 of 5 are in use" in refusal.reason
    assert kept(manager) == {b"f": 1}
    manager.close("r1")
    make(manager, item("r2", b"a"))
    assert kept(manager) == {b"a": 1}


def test_request_that_asks_again_for_what_it_has_is_no_second_hit() -> None:
    manager = manager_of(9)
    make(manager, item("r0", b"a"))
    assert manager.pin(item("r0", b"a"))
    assert manager.pin(item("r1", b"a"))
    assert manager.pin(item("r1", b"a"))
    assert manager.counters() == {"num_encoder_hits": 1}


def test_longest_unused_output_goes_first_and_no_more_than_must() -> None:
    manager = manager_of(9)
    for name in (b"b", b"c", b"e"):
        make(manager, item("r0", name))
    manager.close("r0")
    assert manager.pin(item("r1", b"b"))
    manager.close("r1")
    make(manager, item("r2", b"d"))
    # Three slots were needed, and the longest unused had just so many.
    assert kept(manager) == {b"b": 1, b"e": 1, b"d": 1}
    make(manager, item("r2", b"a"))
    assert kept(manager) == {b"b": 1, b"d": 1, b"a": 1}


def test_output_made_anew_after_a_reset_counts_as_used_then() -> None:
    manager = manager_of(6)
    make(manager, item("r0", b"b"))
    make(manager, item("r1", b"c"))
    manager.reset()
    make(manager, item("r2", b"c"), number=2)
    make(manager, item("r3", b"b"), number=2)
    for request_id in REQUESTS:
        manager.close(request_id)
    assert kept(manager) == {b"b": 2, b"c": 2}
    make(manager, item("r0", b"d"))
    assert kept(manager) == {b"b": 2, b"d": 1}


def test_step_that_is_rolled_back_leaves_its_room_to_others() -> None:
    manager = manager_of(5)
    step = EncoderStep(made=(item("r0", b"b"), item("r1", b"c")))
    assert manager.admit((), step) is None
    assert not manager.has_room(item("r2", b"a"))
    manager.rollback((), step)
    assert manager.has_room(item("r2", b"f"))
    assert not manager.pin(item("r2", b"b")), "it was never made"
    manager.check()


def test_request_whose_step_failed_gives_its_room_back_when_it_is_closed() -> None:
    """A batch that fails runs again one by one: some are committed and some are closed."""
    manager = manager_of(5)
    good, bad = item("r0", b"b"), item("r1", b"c")
    assert manager.admit((), EncoderStep(made=(good, bad))) is None
    commit(manager, [good], 1, [])
    manager.close("r1")
    manager.check()
    assert kept(manager) == {b"b": 1}
    make(manager, item("r2", b"d"))
    assert kept(manager) == {b"b": 1, b"d": 1}


def test_closing_twice_or_what_is_not_there_does_nothing() -> None:
    manager = manager_of(5)
    make(manager, item("r0", b"b"))
    for _ in range(2):
        manager.close("r0")
        manager.close("nobody")
        manager.check()
    assert manager.pin(item("r1", b"b"))


def test_without_reuse_an_output_goes_with_the_last_request_that_needs_it() -> None:
    manager = manager_of(9, reuse=False)
    make(manager, item("r0", b"b"), item("r1", b"c"))
    let_go(manager, item("r0", b"b"))
    assert kept(manager) == {b"c": 1}
    assert not manager.pin(item("r2", b"b"))
    manager.close("r1")
    assert kept(manager) == {}


def test_reset_leaves_outputs_to_those_who_had_them_and_to_nobody_else() -> None:
    manager = manager_of(9)
    make(manager, item("r0", b"b"), item("r1", b"c"))
    let_go(manager, item("r1", b"c"))
    assert manager.reset() == 1
    assert kept(manager) == {b"b": 1}
    assert manager.pin(item("r0", b"b"))
    assert not manager.pin(item("r1", b"b"))
    manager.close("r0")
    assert kept(manager) == {}


def test_output_of_another_shape_than_its_item_is_not_taken() -> None:
    manager = manager_of(9)
    step = EncoderStep(made=(item("r0", b"b"),))
    assert manager.admit((), step) is None
    plan = manager.plan((), step, {})
    with pytest.raises(AssertionError, match=r"\(3, 2\), \(2, 2\)"):
        plan.store(item("r0", b"b"), torch.zeros(3, HIDDEN))


def name_of(root: bytes | None, kind: str, digest: bytes, request_id: str = "r") -> bytes:
    prepared = PreparedRequest(
        request_id=request_id,
        token_ids=[0, 0],
        params=SamplingParams(),
        root=root,
        spans=[Span(2, digest, kind=kind)],
        inputs=[{}],
    )
    cursor = text_graph("node").cursor("prefill")
    component = Component(vocab_size=9, stop_token_ids=frozenset())
    request = Request(prepared, cursor, component, max_len=9, arrival=0)
    return request.items[0].name


def test_tenants_have_outputs_of_their_own_since_the_name_says_whose_it_is() -> None:
    digests = [bytes(32), bytes(31) + b"1"]
    names = {
        (root, kind, digest): name_of(root, kind, digest)
        for root, kind, digest in product((b"salt a" * 5, b"salt b" * 5), ("x", "y"), digests)
    }
    assert len(set(names.values())) == len(names)
    assert name_of(b"salt a" * 5, "x", digests[0], "other") == names[b"salt a" * 5, "x", digests[0]]
    # Without a root each request is a tenant.
    assert name_of(None, "x", digests[0], "one") != name_of(None, "x", digests[0], "two")


@dataclass
class Model:
    """The rules as plain sentences over lists."""

    budget: int
    reuse: bool
    order: list[bytes] = field(default_factory=list)
    """Outputs, the longest unused first."""
    made_in: dict[bytes, int] = field(default_factory=dict)
    owners: dict[bytes, set[str]] = field(default_factory=dict)
    old: set[bytes] = field(default_factory=set)
    """Names whose output is from before a reset."""
    hits: int = 0

    @property
    def num_pinned(self) -> int:
        return sum(LENGTHS[name] for name, owners in self.owners.items() if owners)

    def is_found(self, request_id: str, name: bytes) -> bool:
        is_own = request_id in self.owners.get(name, ())
        return name in self.order and (is_own or name not in self.old)

    def use(self, name: bytes) -> None:
        if name in self.order:
            self.order.remove(name)
        self.order.append(name)

    def own(self, request_id: str, name: bytes) -> None:
        self.owners.setdefault(name, set()).add(request_id)

    def make_room(self, needed: int) -> None:
        for name in list(self.order):
            if sum(LENGTHS[other] for other in self.order) + needed <= self.budget:
                return
            if not self.owners.get(name):
                self.drop(name)

    def store(self, request_id: str, name: bytes, number: int) -> None:
        self.use(name)
        self.made_in[name] = number
        self.old.discard(name)
        self.own(request_id, name)

    def disown(self, request_id: str, name: bytes) -> None:
        owners = self.owners.get(name, set())
        if request_id not in owners:
            return
        owners.remove(request_id)
        if not owners and (name in self.old or not self.reuse):
            self.drop(name)

    def drop(self, name: bytes) -> None:
        self.order.remove(name)
        del self.made_in[name]
        self.old.discard(name)


class EncoderMachine(RuleBasedStateMachine):
    """Requests that find, make, read and leave outputs, with steps that end in every way."""

    @initialize(budget=st.integers(5, 13), reuse=st.sampled_from([True] * 4 + [False]))
    def start(self, budget: int, reuse: bool) -> None:
        self.manager = manager_of(budget, reuse=reuse)
        self.model = Model(budget, reuse)
        self.number = 0

    @rule(request_id=st.sampled_from(REQUESTS), name=st.sampled_from(list(LENGTHS)))
    def find(self, request_id: str, name: bytes) -> None:
        model = self.model
        expected = model.is_found(request_id, name)
        is_hit = expected and request_id not in model.owners.get(name, ())
        assert self.manager.pin(item(request_id, name)) == expected
        room = self.manager.has_room(item(request_id, name))
        if expected:
            model.use(name)
            model.own(request_id, name)
            model.hits += is_hit
        else:
            assert room == (model.num_pinned + LENGTHS[name] <= model.budget)

    @rule(
        wanted=st.dictionaries(
            st.sampled_from(list(LENGTHS)), st.sampled_from(REQUESTS), min_size=1, max_size=3
        ),
        fate=st.sampled_from(["commit"] * 4 + ["roll back", "one by one"]),
        failing=st.sets(st.sampled_from(REQUESTS), min_size=1),
    )
    def encode(self, wanted: dict[bytes, str], fate: str, failing: set[str]) -> None:
        model, manager = self.model, self.manager
        made = [item(r, name) for name, r in wanted.items() if not model.is_found(r, name)]
        needed = sum(one.length for one in made if one.name not in model.old)
        step = EncoderStep(made=tuple(made))
        refusal = manager.admit((), step)
        if model.num_pinned + needed > model.budget:
            assert refusal is not None
            assert f"{needed} slots" in refusal.reason
            assert f"{model.num_pinned} of {model.budget} are in use" in refusal.reason
            return
        assert refusal is None
        model.make_room(needed)
        manager.check()
        self.number += 1
        if fate == "roll back":
            manager.rollback((), step)
            return
        if fate == "commit":
            commit(manager, made, self.number, [])
            for one in made:
                model.store(one.request_id, one.name, self.number)
            return
        for one in made:
            if one.request_id in failing:
                manager.close(one.request_id)
                self.forget(one.request_id)
            else:
                commit(manager, [one], self.number, [])
                model.store(one.request_id, one.name, self.number)

    @precondition(lambda self: any(self.model.owners.values()))
    @rule(data=st.data())
    def read_for_the_last_time(self, data: st.DataObject) -> None:
        pinned = sorted(
            (name, r) for name, owners in self.model.owners.items() for r in sorted(owners)
        )
        done = data.draw(st.lists(st.sampled_from(pinned), unique=True, min_size=1, max_size=4))
        let_go(self.manager, *(item(r, name) for name, r in done))
        for name, r in done:
            self.model.disown(r, name)

    @rule(request_id=st.sampled_from(REQUESTS))
    def close(self, request_id: str) -> None:
        self.manager.close(request_id)
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        for name in LENGTHS:
            self.model.disown(request_id, name)

    @rule()
    def reset(self) -> None:
        model = self.model
        idle = [name for name in model.order if not model.owners.get(name)]
        assert self.manager.reset() == len(idle)
        for name in idle:
            model.drop(name)
        model.old.update(model.order)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        self.manager.check()
        assert kept(self.manager) == self.model.made_in
        assert sum(LENGTHS[name] for name in self.model.order) <= self.model.budget
        assert self.manager.counters() == {"num_encoder_hits": self.model.hits}

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        for request_id in REQUESTS:
            self.manager.close(request_id)
        self.manager.reset()
        assert kept(self.manager) == {}
        assert self.manager.has_room(Item("r", b"", self.model.budget))
        self.manager.check()


TestEncoderMachine = EncoderMachine.TestCase
TestEncoderMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
