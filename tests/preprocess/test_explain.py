from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from mstar.engine.engine import EngineCore
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.explain import ReuseReport, shut
from mstar.engine.resources.kv.keys import PageItem, chain, page_items
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spans import Span, pairs
from mstar.models.toy import toy_model
from mstar.preprocess.explain import (
    Difference,
    Explanation,
    Stop,
    Subject,
    explain,
    find_in_chat,
    from_report,
)
from mstar.preprocess.pages import pages_of
from mstar.preprocess.prompt import request_root
from tests.oracles import keys as oracle

PAGE = 4
CONSTANTS = {"weights": "w", "dtype": "float32", "page_size": str(PAGE)}

Part = list[int] | Span


def prepared(
    parts: list[Part], root: bytes | None = b"root", name: str = "r", page: int = PAGE
) -> PreparedRequest:
    """Return a prompt of ids and items, keyed as a worker does it."""
    ids: list[int] = []
    spans: list[Span] = []
    for part in parts:
        span = part if isinstance(part, Span) else Span(len(part))
        ids += [0] * part.length if isinstance(part, Span) else part
        if span.length:
            spans.append(span)
    has_items = any(span.digest is not None for span in spans)
    items = page_items(pairs(spans), page) if has_items else {}
    bodies = []
    for number in range(-(-len(ids) // page)):
        covered = {
            slot
            for item in items.get(number, ())
            for slot in range(item.start, item.start + item.length - item.offset)
        }
        own = ids[number * page : (number + 1) * page]
        bodies.append([token for slot, token in enumerate(own) if slot not in covered])
    return PreparedRequest(
        request_id=name,
        token_ids=ids,
        params=SamplingParams(max_tokens=1),
        page_keys=[] if root is None else chain(bodies, items, root),
        root=root,
        spans=spans if has_items else [],
    )


def subject(*parts: Part, salt: str | None = None, **constants: str) -> Subject:
    return Subject(
        prepared=prepared(list(parts), request_root(b"deployment", salt)),
        page_size=PAGE,
        root_constants=CONSTANTS | constants,
        cache_salt=salt,
    )


def image(digest: str, length: int, **changes: object) -> Span:
    return Span(length, digest.encode(), kind="image", **changes)  # type: ignore[arg-type]


def cells(request: PreparedRequest) -> list[object]:
    found: list[object] = []
    for span in request.spans or [Span(len(request.token_ids))]:
        at = len(found)
        if span.digest is None:
            found += request.token_ids[at : at + span.length]
        else:
            found += [(span.digest, span.length, offset) for offset in range(span.length)]
    return found


def item_ends(request: PreparedRequest) -> set[int]:
    ends, end = set(), 0
    for span in request.spans:
        end += span.length
        if span.digest is not None:
            ends.add(end)
    return ends


def by_content(a: PreparedRequest, b: PreparedRequest) -> int:
    """Return what ``b`` may reuse of ``a``: the longest cut that pages or items allow."""
    mine, other = cells(a), cells(b)
    limit = min(len(mine), len(other) - 1)
    whole = max(n for n in range(0, limit + 1, PAGE) if mine[:n] == other[:n])
    ends = [
        n
        for n in item_ends(b) & item_ends(a)
        if whole < n < whole + PAGE and n <= limit and mine[:n] == other[:n]
    ]
    return max(ends, default=whole)


PARTS = st.lists(
    st.one_of(
        st.lists(st.integers(1, 2), max_size=5),
        st.builds(image, st.sampled_from("xy"), st.integers(1, 6)),
    ),
    min_size=1,
    max_size=4,
).filter(lambda parts: any(isinstance(part, Span) or part for part in parts))


@settings(max_examples=250)
@given(PARTS, PARTS, PARTS, st.booleans())
def test_what_is_matched_is_what_the_contents_have_in_common(
    head: list[Part], tail_a: list[Part], tail_b: list[Part], is_headed: bool
) -> None:
    parts_a, parts_b = (head + tail_a, head + tail_b) if is_headed else (tail_a, tail_b)
    a, b = subject(*parts_a), subject(*parts_b)
    found = explain(a, b)
    assert found.num_matched_tokens == by_content(a.prepared, b.prepared)
    assert found.pages == found.num_matched_tokens // PAGE
    mine, other = cells(a.prepared), cells(b.prepared)
    common = next(
        (n for n, (x, y) in enumerate(zip(mine, other, strict=False)) if x != y),
        min(len(mine), len(other)),
    )
    assert found.num_common_tokens == common
    assert found.num_matched_tokens <= min(common, len(other) - 1)
    stop = found.stopped
    if stop.reason == "differs":
        assert stop.differs is not None
        assert (stop.slot, stop.page) == (common, common // PAGE)
        assert mine[common] != other[common]
        # The page that holds the difference is the first one whose key is another.
        keys = zip(a.prepared.page_keys, b.prepared.page_keys, strict=False)
        first = next(n for n, (x, y) in enumerate(keys) if x != y)
        assert first <= stop.page
    elif stop.reason == "end":
        assert mine[: len(other)] == other
    else:
        assert stop.reason == "other_ends"
        assert other[: len(mine)] == mine


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(2, 5), min_size=1, max_size=20),
    st.lists(st.integers(2, 5), min_size=0, max_size=12),
    st.lists(st.integers(2, 5), min_size=1, max_size=12),
)
def test_the_engine_reuses_what_is_explained(
    head: list[int], tail_a: list[int], tail_b: list[int]
) -> None:
    numbers = Deployment(page_size=PAGE, num_pages=64, max_num_seqs=2, max_num_batched_tokens=64)
    engine = EngineCore(_TOY, numbers)
    root = request_root(engine.root, None)
    a, b = (prepared([head + tail], root, name) for name, tail in (("a", tail_a), ("b", tail_b)))
    for request in (a, b):
        engine.add_request(request)
        while engine.has_work:
            outputs = engine.step()
    one, two = (
        Subject(prepared=p, page_size=PAGE, root_constants=engine.root_constants) for p in (a, b)
    )
    assert outputs[-1].num_cached_tokens == explain(one, two).num_matched_tokens


_TOY = toy_model()


def _differs(a: Subject, b: Subject) -> tuple[str, str, str | None, str | None]:
    found = explain(a, b)
    assert found.stopped.reason == "differs"
    assert found.stopped.differs is not None
    differs = found.stopped.differs
    return differs.field, differs.name, differs.a, differs.b


def test_another_token_is_named_with_its_place_and_the_texts_around() -> None:
    a = subject([1, 2, 3, 4, 5, 6, 7, 8, 9])
    b = subject([1, 2, 3, 4, 5, 9, 7, 8, 9])
    found = explain(a, b, lambda ids: "-".join(map(str, ids)))
    assert (found.num_matched_tokens, found.pages) == (4, 1)
    assert (found.stopped.page, found.stopped.slot) == (1, 5)
    differs = found.stopped.differs
    assert differs is not None
    assert (differs.field, differs.a, differs.b) == ("token", "6", "9")
    assert (differs.before, differs.a_text, differs.b_text) == ("1-2-3-4-5", "6-7-8-9", "9-7-8-9")


@pytest.mark.parametrize(
    ("a", "b", "expected", "others"),
    [
        (image("x", 5), image("y", 5), ("digest", "78", "79"), []),
        (image("x", 5), image("z", 6), ("length", "5", "6"), ["digest"]),
        (
            image("x", 5, advance=2),
            image("y", 5, advance=3),
            ("advance", "2", "3"),
            ["digest"],
        ),
        (
            image("x", 5),
            Span(5, b"y", kind="audio"),
            ("kind", "image", "audio"),
            ["digest"],
        ),
    ],
)
def test_another_item_is_named_by_the_field_that_makes_it_another(
    a: Span, b: Span, expected: tuple[str, str, str], others: list[str]
) -> None:
    found = explain(subject([1, 2, 3], a, [4, 5]), subject([1, 2, 3], b, [4, 5]))
    assert found.num_matched_tokens == 0
    assert found.stopped.slot == 3
    differs = found.stopped.differs
    assert differs is not None
    assert (differs.field, differs.name, differs.a, differs.b) == ("item", *expected)
    assert differs.others == others


def test_the_same_parts_in_another_order_differ_in_their_layout() -> None:
    one = subject([1, 2], image("x", 1), [3, 4])
    other = subject([1], image("x", 1), [2, 3, 4])
    assert _differs(one, other) == ("layout", "", "token 2", "image of 1 slots")


def test_a_shared_item_is_reused_up_to_its_last_slot_though_words_after_it_differ() -> None:
    a = subject([1, 2, 3], image("x", 7), [4, 5, 6])
    b = subject([1, 2, 3], image("x", 7), [9, 5, 6])
    found = explain(a, b)
    assert (found.pages, found.num_matched_tokens) == (2, 10)
    assert (found.stopped.page, found.stopped.slot) == (2, 10)


def test_of_one_constant_the_name_and_both_values_are_told() -> None:
    a, b = subject([1] * 9), subject([1] * 9, dtype="bfloat16")
    assert _differs(a, b) == ("root_constant", "dtype", "float32", "bfloat16")
    found = explain(a, b)
    assert (found.num_matched_tokens, found.num_common_tokens) == (0, 9)


def test_a_constant_that_only_one_has_is_a_difference() -> None:
    assert _differs(subject([1] * 9), subject([1] * 9, lora="l")) == (
        "root_constant", "lora", None, "l",
    )  # fmt: skip


def test_salts_keep_equal_prompts_apart() -> None:
    prompt = [1] * 9
    a, b = subject(prompt, salt="a"), subject(prompt, salt="b")
    assert _differs(a, b) == ("cache_salt", "", "a", "b")
    assert _differs(subject(prompt), b) == ("cache_salt", "", None, "b")
    assert explain(a, subject(prompt, salt="a")).num_matched_tokens == 8


def test_a_shut_cache_is_the_reason_where_there_is_no_root() -> None:
    shut = Subject(prepared=prepared([[1] * 9], None), page_size=PAGE, root_constants=CONSTANTS)
    found = explain(shut, shut)
    assert (found.stopped.reason, found.num_matched_tokens) == ("shut", 0)


@pytest.mark.parametrize(
    ("len_a", "len_b", "matched", "reason"),
    [
        (8, 8, 4, "end"),
        (9, 9, 8, "end"),
        (9, 8, 4, "end"),
        (8, 9, 8, "other_ends"),
        (7, 9, 4, "other_ends"),
        (1, 1, 0, "end"),
    ],
)
def test_at_least_one_token_is_computed_and_pages_are_shared_once_full(
    len_a: int, len_b: int, matched: int, reason: str
) -> None:
    found = explain(subject([1] * len_a), subject([1] * len_b))
    assert (found.num_matched_tokens, found.stopped.reason) == (matched, reason)
    assert found.by_tier == {"device": matched, "host": 0, "disk": 0}


def test_an_explanation_comes_back_from_json_as_it_was() -> None:
    found = explain(subject([1, 2, 3, 4, 5]), subject([1, 2, 9, 4, 5]))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Explanation) == found


@settings(max_examples=200)
@given(PARTS)
def test_pages_show_the_keys_that_the_encoding_gives(parts: list[Part]) -> None:
    request = prepared(parts)
    prev = b"root"
    pages = pages_of(request, PAGE)
    assert sum(page.num_slots for page in pages) == len(request.token_ids)
    ends = {end for end in item_ends(request) if end % PAGE}
    for page in pages:
        items = [(i.start, i.offset, i.length, i.digest) for i in page.items]
        assert page.key == oracle.page_key(prev, list(page.token_ids), items)
        assert len(page.token_ids) == page.num_slots - sum(
            min(item.length - item.offset, PAGE - item.start) for item in page.items
        )
        for end, key in page.end_keys:
            ends.remove(page.start + end)
            kept = [item for item in items if item[0] < end]
            filled = sum(min(length - offset, end - start) for start, offset, length, _ in kept)
            assert key == oracle.page_key(prev, list(page.token_ids)[: end - filled], kept)
        prev = page.key
    assert not ends


TALK: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None},
    {"role": "user", "content": "Hi"},
]
RENDERED = "<date 1><system>Be brief.<user>Hi<assistant><user>Hi<assistant>"


@pytest.mark.parametrize(
    ("at", "place"),
    [
        (RENDERED.index("1"), "the template's own text before messages[0] (system)"),
        (RENDERED.index("brief"), "character 3 of messages[0] (system)"),
        (RENDERED.index("Hi"), "character 0 of messages[1] (user)"),
        (RENDERED.rindex("Hi") + 1, "character 1 of messages[3] (user)"),
        (RENDERED.rindex("<user>"), "the template's own text before messages[3] (user)"),
        (len(RENDERED), "the template's own text after messages[3] (user)"),
    ],
)
def test_a_character_of_a_chat_is_found_in_its_message(at: int, place: str) -> None:
    assert find_in_chat(RENDERED, TALK, at) == place


def test_a_chat_that_the_template_rewrote_is_all_the_templates() -> None:
    assert find_in_chat("NOTHING", TALK, 3) == "the template's own text"


def test_no_salt_is_another_tenant_than_any_salt() -> None:
    """A salt that is spelled like the absence of one once shared its pages with everybody."""
    salts = (None, "None", "null", "none", " ", "0", "False")
    assert len({request_root(b"deployment", salt) for salt in salts}) == len(salts)


def report(**fields: Any) -> ReuseReport:
    """Return a live engine's report; pages of 4."""
    numbers = {"num_prompt_tokens": 20, "num_matched_tokens": 8, "page_size": PAGE, "slot": 8}
    tiers = {"device": 4, "host": 4, "disk": 0}
    return ReuseReport(**({"by_tier": tiers, "reason": "never_seen"} | numbers | fields))


def test_a_live_report_keeps_its_numbers_tiers_and_reason() -> None:
    found = from_report(report())
    assert (found.num_prompt_tokens, found.num_matched_tokens, found.pages) == (20, 8, 2)
    assert found.by_tier == {"device": 4, "host": 4, "disk": 0}
    assert found.stopped == Stop(page=2, slot=8, reason="never_seen")
    evicted = from_report(report(reason="evicted", evicted_seconds=1.5)).stopped
    assert (evicted.reason, evicted.evicted_at, evicted.differs) == ("evicted", 1.5, None)
    closed = from_report(shut(20, PAGE))
    assert (closed.stopped.reason, closed.num_matched_tokens, closed.pages) == ("shut", 0, 0)


def test_a_live_report_of_another_token_has_both_with_their_texts() -> None:
    told = report(reason="differs", slot=10, before=[8, 9], own=[3, 4], other=[5])
    stopped = from_report(told, lambda ids: "".join(map(str, ids))).stopped
    assert (stopped.page, stopped.slot) == (2, 10)
    assert stopped.differs == Difference(
        field="token", a="5", b="3", a_text="5", b_text="34", before="89"
    )


def test_a_live_report_of_items_names_the_first_field_that_differs() -> None:
    same = PageItem(0, 2, 6, b"\xaa" * 32)
    other_start = PageItem(1, 0, 6, b"\xaa" * 32)
    other_digest = PageItem(0, 2, 6, b"\xbb" * 32)
    longer = PageItem(0, 2, 7, b"\xbb" * 32)
    expected = {
        other_start: ("start", "9", "6", []),
        other_digest: ("digest", "bb" * 32, "aa" * 32, []),
        longer: ("length", "7", "6", ["digest"]),
    }
    for other, (name, a, b, others) in expected.items():
        told = report(reason="differs", own=[0], other=[0], own_item=same, other_item=other)
        differs = from_report(told).stopped.differs
        assert differs is not None
        assert (differs.field, differs.name, differs.a, differs.b) == ("item", name, a, b)
        assert differs.others == others
    told = report(reason="differs", own=[0], other=[7], own_item=same)
    differs = from_report(told).stopped.differs
    assert differs is not None
    assert (differs.field, differs.a, differs.b) == ("layout", "token 7", "item of 6 slots")
