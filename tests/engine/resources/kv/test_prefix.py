import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.engine.resources.kv.keys import chain
from mstar.engine.resources.kv.prefix import Cut, Names, PrefixIndex

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
    assert index.remove(8) == Names(KEYS[1], ())
    assert index.remove(7) == Names(KEYS[0], ())
    assert len(index) == 0


def test_page_known_by_its_cuts_only_keeps_its_parent() -> None:
    index = PrefixIndex()
    index.add(KEYS[0], 7, None)
    index.add_end(b"short", 8, 2, 7)
    index.add_end(b"long", 8, 3, 7)
    assert (index.cut(b"long"), index.cut(b"short")) == (Cut(8, 3), Cut(8, 2))
    assert index.match(KEYS) == [7]
    with pytest.raises(AssertionError, match="page 7 goes before 1 pages"):
        index.remove(7)
    index.add(KEYS[1], 8, 7)
    assert index.remove(8) == Names(KEYS[1], ((b"short", 2), (b"long", 3)))
    assert index.cut(b"long") is None
    index.check()


def test_cut_of_two_pages_outlives_either() -> None:
    index = PrefixIndex()
    for page in (3, 4):
        index.add_end(b"cut", page, 1, None)
        index.add_end(b"cut", page, 1, None)
    assert index.cut(b"cut") == Cut(3, 1)
    index.remove(3)
    assert index.cut(b"cut") == Cut(4, 1)
    index.remove(4)
    assert index.cut(b"cut") is None
    index.check()


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
        self.ends: dict[int, list[tuple[bytes, int]]] = {}
        self.loose: dict[int, tuple[int, ...]] = {}
        """Pages that have cuts only, and what stands before them."""
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
        parents = {tokens[:-1] for tokens in self.pages} | set(self.loose.values())
        leaves = sorted(set(self.pages) - parents)
        is_loose = bool(self.loose) and data.draw(st.booleans())
        if not leaves or is_loose:
            page = data.draw(st.sampled_from(sorted(self.loose)))
            del self.loose[page]
            assert self.index.remove(page) == Names(None, tuple(self.ends.pop(page)))
            return
        leaf = data.draw(st.sampled_from(leaves))
        page = self.pages.pop(leaf)
        names = Names(self.keys(leaf)[-1], tuple(self.ends.pop(page, ())))
        assert self.index.remove(page) == names

    @rule(data=st.data(), name=st.sampled_from([b"x", b"y"]), end=st.integers(1, 2))
    def add_end(self, data: st.DataObject, name: bytes, end: int) -> None:
        before = data.draw(st.sampled_from([(), *sorted(self.pages)]))
        of_its_own = [t for t in self.pages if t[:-1] == before]
        is_own: bool = data.draw(st.booleans())
        if of_its_own and is_own:
            page = self.pages[of_its_own[0]]
        else:
            page, self.next_page = self.next_page, self.next_page + 1
            self.loose[page] = before
        key = repr((name, before, end)).encode()
        self.index.add_end(key, page, end, self.pages.get(before))
        if (key, end) not in self.ends.setdefault(page, []):
            self.ends[page].append((key, end))

    @rule(tokens=st.lists(st.integers(0, 2), max_size=6).map(tuple))
    def match(self, tokens: tuple[int, ...]) -> None:
        expected: list[int] = []
        while len(expected) < len(tokens) and tokens[: len(expected) + 1] in self.pages:
            expected.append(self.pages[tokens[: len(expected) + 1]])
        assert self.index.match(self.keys(tokens)) == expected

    @rule()
    def clear(self) -> None:
        assert self.index.clear() == len(self.pages) + len(self.loose)
        for known in (self.pages, self.ends, self.loose):
            known.clear()

    @invariant()
    def both_directions_agree(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.pages) + len(self.loose)
        cuts: dict[bytes, set[Cut]] = {}
        for page, ends in self.ends.items():
            for key, end in ends:
                cuts.setdefault(key, set()).add(Cut(page, end))
        for key, known in cuts.items():
            assert self.index.cut(key) in known
        for tokens, page in self.pages.items():
            key = self.keys(tokens)[-1]
            assert (self.index.get(key), self.index.key(page)) == (page, key)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
