import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.engine.resources.kv.keys import chain
from mstar.engine.resources.kv.prefix import PrefixIndex

KEYS = chain([[n] for n in range(6)])


def test_match_is_the_longest_indexed_beginning() -> None:
    index = PrefixIndex()
    for page, key in enumerate(KEYS[:4], 1):
        index.add(key, page, page - 1 or None)
    assert index.match(KEYS) == [1, 2, 3, 4]
    assert index.match(KEYS[:2]) == [1, 2]
    assert index.match(chain([[n] for n in range(6)], None, b"elsewhere")) == []
    assert index.match([]) == []


def test_page_cannot_go_before_those_that_build_on_it() -> None:
    index = PrefixIndex()
    index.add(KEYS[0], 7, None)
    index.add(KEYS[1], 8, 7)
    with pytest.raises(AssertionError, match="page 7 goes before 1 pages"):
        index.remove(7)
    assert index.remove(8) == KEYS[1]
    assert index.remove(7) == KEYS[0]
    assert len(index) == 0


def test_key_or_page_is_indexed_once() -> None:
    index = PrefixIndex()
    index.add(KEYS[0], 7, None)
    with pytest.raises(AssertionError, match="key"):
        index.add(KEYS[0], 8, None)
    with pytest.raises(AssertionError, match="page 7"):
        index.add(KEYS[1], 7, None)


class IndexMachine(RuleBasedStateMachine):
    """A tree of token tuples beside the index."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.pages: dict[tuple[int, ...], int] = {}
        self.next_page = 1

    def keys(self, tokens: tuple[int, ...]) -> list[bytes]:
        return chain([[token] for token in tokens])

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple))
    def add(self, tokens: tuple[int, ...]) -> None:
        for end, key in enumerate(self.keys(tokens), 1):
            if tokens[:end] not in self.pages:
                assert self.index.get(key) is None
                self.index.add(key, self.next_page, self.pages.get(tokens[: end - 1]))
                self.pages[tokens[:end]] = self.next_page
                self.next_page += 1

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def remove_leaf(self, data: st.DataObject) -> None:
        parents = {tokens[:-1] for tokens in self.pages}
        leaf = data.draw(st.sampled_from(sorted(set(self.pages) - parents)))
        assert self.index.remove(self.pages.pop(leaf)) == self.keys(leaf)[-1]

    @rule(tokens=st.lists(st.integers(0, 2), max_size=6).map(tuple))
    def match(self, tokens: tuple[int, ...]) -> None:
        expected: list[int] = []
        while len(expected) < len(tokens) and tokens[: len(expected) + 1] in self.pages:
            expected.append(self.pages[tokens[: len(expected) + 1]])
        assert self.index.match(self.keys(tokens)) == expected

    @rule()
    def clear(self) -> None:
        assert self.index.clear() == len(self.pages)
        self.pages.clear()

    @invariant()
    def both_directions_agree(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.pages)
        for tokens, page in self.pages.items():
            key = self.keys(tokens)[-1]
            assert (self.index.get(key), self.index.key(page)) == (page, key)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
