import itertools

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.nn.functional import scaled_dot_product_attention

from mstar.engine.resources.base import Deployment, Item
from mstar.engine.resources.cross_attention.config import (
    CrossAttentionConfig,
    CrossAttentionStep,
)
from mstar.engine.resources.cross_attention.manager import CrossAttentionManager
from mstar.engine.resources.step import Segment
from mstar.errors import ConfigError

LAYERS, HEADS, DIM, PAGE = 2, 2, 16, 4
LENGTHS = {b"a": 1, b"b": 4, b"c": 5, b"d": 8, b"e": 9, b"f": 12}
CONFIG = CrossAttentionConfig(
    num_layers=LAYERS,
    num_qo_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=DIM,
    scale=DIM**-0.5,
    max_length=12,
    page_size=PAGE,
)


def manager_of(budget: int, *, reuse: bool = True) -> CrossAttentionManager:
    deployment = Deployment(encoder_cache_tokens=budget, enable_prefix_caching=reuse)
    return CrossAttentionManager("cross", CONFIG, deployment)


def item(request_id: str, name: bytes) -> Item:
    return Item(request_id, name, LENGTHS[name])


def content(name: bytes, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all layers, ``[LAYERS, length, HEADS, DIM]``, that tell who made them."""
    generator = torch.Generator().manual_seed(number * 100 + name[0])
    shape = (LAYERS, LENGTHS[name], HEADS, DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def make(manager: CrossAttentionManager, *made: Item, number: int = 1) -> None:
    """One whole step of an encoder, which must be admitted."""
    step = CrossAttentionStep(made=made)
    assert manager.admit((), step) is None
    plan = manager.plan((), step, {})
    contents = [content(one.name, number) for one in made]
    keys, values = (torch.cat(parts, 1) for parts in zip(*contents, strict=True))
    for layer in range(LAYERS):
        plan.store(layer, keys[layer], values[layer])
    manager.commit((), step)


def attend(
    manager: CrossAttentionManager, readers: list[tuple[str, bytes, int]], layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What segments of some spans find in their outputs, and the queries they asked with."""
    segments = tuple(Segment(request_id, "main", span) for request_id, _, span in readers)
    step = CrossAttentionStep(read=tuple(name for _, name, _ in readers))
    assert manager.admit(segments, step) is None
    plan = manager.plan(segments, step, {})
    query = torch.randn(sum(span for _, _, span in readers), HEADS, DIM)
    found = plan.run(layer, query)
    manager.commit(segments, step)
    return found, query


def expected(query: torch.Tensor, name: bytes, number: int, layer: int) -> torch.Tensor:
    keys, values = (part[layer].transpose(0, 1) for part in content(name, number))
    return scaled_dot_product_attention(query.transpose(0, 1), keys, values).transpose(0, 1)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_segments_of_any_span_attend_to_all_of_their_own_output(layer: int) -> None:
    manager = manager_of(40)
    for request_id, name in (("r0", b"c"), ("r1", b"f"), ("r2", b"a")):
        make(manager, item(request_id, name))
    assert manager.pin(item("r3", b"f"))
    readers = [("r0", b"c", 3), ("r1", b"f", 1), ("r2", b"a", 2), ("r3", b"f", 1)]
    found, query = attend(manager, readers, layer)
    row = 0
    for _, name, span in readers:
        own = slice(row, row + span)
        torch.testing.assert_close(found[own], expected(query[own], name, 1, layer))
        row += span


def test_a_plan_serves_the_same_segments_until_their_pages_go() -> None:
    manager = manager_of(12)
    make(manager, item("r0", b"d"))
    segments, step = (Segment("r0", "main", 1),), CrossAttentionStep(read=(b"d",))
    plan = manager.plan(segments, step, {})
    assert manager.plan(segments, CrossAttentionStep(read=(b"d",)), {}) is plan
    manager.close("r0")
    make(manager, item("r0", b"f"), number=2)
    make_again = CrossAttentionStep(read=(b"f",))
    assert manager.plan(segments, make_again, {}) is not plan
    query = torch.randn(1, HEADS, DIM)
    found = manager.plan(segments, make_again, {}).run(0, query)
    torch.testing.assert_close(found, expected(query, b"f", 2, 0))


def test_a_layer_that_is_not_written_is_noticed() -> None:
    manager = manager_of(40)
    step = CrossAttentionStep(made=(item("r0", b"a"),))
    assert manager.admit((), step) is None
    plan = manager.plan((), step, {})
    keys, values = content(b"a", 1)
    plan.store(0, keys[0], values[0])
    with pytest.raises(AssertionError, match=r"layers \[1\]"):
        manager.commit((), step)


def test_the_pool_holds_the_longest_output_whatever_the_budget() -> None:
    manager = manager_of(1)
    make(manager, item("r0", b"f"))
    assert not manager.has_room(item("r1", b"a"))
    refusal = manager.admit((), CrossAttentionStep(made=(item("r1", b"a"),)))
    assert refusal is not None
    assert "1 pages of encoder output are needed; 3 of 3 are in use" in refusal.reason
    manager.close("r0")
    make(manager, item("r1", b"a"))
    manager.check()


def test_sizes_that_make_no_sense_are_refused() -> None:
    fields = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
    for name in ("num_layers", "num_kv_heads", "head_dim", "max_length", "page_size"):
        with pytest.raises(ConfigError, match=name):
            CrossAttentionConfig(**fields | {name: 0})
    with pytest.raises(ConfigError, match="num_qo_heads"):
        CrossAttentionConfig(**fields | {"num_qo_heads": 3})


class Books(RuleBasedStateMachine):
    """Requests make, share and leave outputs; a model of sets says what must be there."""

    @initialize(budget=st.integers(12, 30), reuse=st.booleans())
    def begin(self, budget: int, reuse: bool) -> None:
        self.manager = manager_of(budget, reuse=reuse)
        self.reuse = reuse
        self.number = itertools.count(1)
        self.made: dict[bytes, int] = {}
        """What is there for all, and which making of it."""
        self.pins: dict[str, dict[bytes, int]] = {}
        """What each request needs, and which making of it."""

    def pinned_pages(self) -> int:
        names = {name for own in self.pins.values() for name in own}
        return sum(CONFIG.num_pages(LENGTHS[name]) for name in names)

    @rule(request=st.sampled_from(["r0", "r1", "r2"]), name=st.sampled_from(sorted(LENGTHS)))
    def need(self, request: str, name: bytes) -> None:
        one = item(request, name)
        own = self.pins.setdefault(request, {})
        found = self.manager.pin(one)
        if name in own:
            assert found
            return
        if found:
            own[name] = self.made[name]
            return
        is_pinned = any(name in other for other in self.pins.values())
        needed = 0 if is_pinned else CONFIG.num_pages(LENGTHS[name])
        step = CrossAttentionStep(made=(one,))
        fits = self.pinned_pages() + needed <= self.manager.num_pages
        if not is_pinned:
            assert self.manager.has_room(one) == fits
        refusal = self.manager.admit((), step)
        assert (refusal is None) == fits
        if refusal is None:
            self.write(one)

    def write(self, one: Item) -> None:
        step, number = CrossAttentionStep(made=(one,)), next(self.number)
        plan = self.manager.plan((), step, {})
        keys, values = content(one.name, number)
        for layer in range(LAYERS):
            plan.store(layer, keys[layer], values[layer])
        self.manager.commit((), step)
        self.made[one.name] = number
        self.pins[one.request_id][one.name] = number
        for own in self.pins.values():
            if one.name in own:
                own[one.name] = number

    @rule(name=st.sampled_from(sorted(LENGTHS)))
    def give_up(self, name: bytes) -> None:
        one = item("other", name)
        if self.manager.pin(one):
            self.manager.close("other")
        elif self.manager.admit((), CrossAttentionStep(made=(one,))) is None:
            self.manager.rollback((), CrossAttentionStep(made=(one,)))

    @rule(request=st.sampled_from(["r0", "r1", "r2"]))
    def leave(self, request: str) -> None:
        self.manager.close(request)
        self.pins.pop(request, None)

    @rule()
    def forget(self) -> None:
        self.manager.reset()
        self.made.clear()

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        held = [(r, name) for r, own in sorted(self.pins.items()) for name in sorted(own)]
        chosen = data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=3))
        found, query = attend(self.manager, [(r, name, 1) for r, name in chosen], 1)
        for row, (request, name) in enumerate(chosen):
            number = self.pins[request][name]
            wanted = expected(query[row : row + 1], name, number, 1)
            torch.testing.assert_close(found[row : row + 1], wanted)

    @invariant()
    def holds(self) -> None:
        self.manager.check()

    def teardown(self) -> None:
        for request in list(getattr(self, "pins", ())):
            self.manager.close(request)
        if hasattr(self, "manager"):
            self.manager.reset()
            self.manager.check()
            assert len(self.manager._free) == self.manager.num_pages


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
