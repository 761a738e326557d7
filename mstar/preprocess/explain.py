"""How far a prompt can reuse what another left behind, and the first thing that stops it.

Pure: it compares prepared requests. The answers of a live server about its own pages have the same
form.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mstar.engine.request import PreparedRequest
from mstar.engine.resources.kv.explain import ReuseReport
from mstar.engine.resources.kv.keys import PageItem
from mstar.preprocess.pages import layout, pages_of

Reason = Literal["end", "other_ends", "differs", "never_seen", "evicted", "shut"]
"""Why reuse stops: all that may be reused is (``end``; one token is always computed), the other
request ends (``other_ends``), the two differ, no request has filled the page, the page was
forgotten, or nothing is shared at all."""
Field = Literal["root_constant", "cache_salt", "token", "item", "layout"]

_NUM_BEFORE, _NUM_AFTER = 12, 6


class Difference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first field in which two requests differ; ``a`` was there before."""

    field: Field
    name: str = ""
    """Of the root's constant, or of the item's field."""
    a: str | None = None
    """Value in the first request; ``None``: it has none."""
    b: str | None = None
    a_text: str = ""
    """Token and layout: text from the difference on in the first request."""
    b_text: str = ""
    before: str = ""
    """Token and layout: the text that both have before it."""
    a_where: str = ""
    """Chats: the part of the conversation that the difference lies in."""
    b_where: str = ""
    others: list[str] = []
    """Further constants of the root, or fields of the item, that differ."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where reuse ends, and why."""

    page: int
    """Number of the first page that is not reused whole."""
    slot: int
    """First slot that stops it: the first that differs, or the first that is not there."""
    reason: Reason
    evicted_at: float | None = None
    """Where a page was forgotten: how long ago, in seconds."""
    differs: Difference | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """How far a prompt matches, in tokens, and why not further."""

    num_prompt_tokens: int
    num_matched_tokens: int
    """Prompt tokens that need no computation."""
    by_tier: dict[str, int]
    """The same by where their pages lie: ``device``, ``host``, ``disk``."""
    pages: int
    """Pages that are reused whole."""
    page_size: int
    """Slots of a page, in tokens."""
    num_common_tokens: int
    """Leading slots with the same content, whatever else keeps the two apart."""
    stopped: Stop


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One request as it is compared."""

    prepared: PreparedRequest
    page_size: int
    """Slots of a page, in tokens."""
    root_constants: Mapping[str, str]
    """What the deployment's KV depends on, by name."""
    cache_salt: str | None = None

    @property
    def num_tokens(self) -> int:
        """Slots of the prompt."""
        return len(self.prepared.token_ids)


def explain(
    a: Subject, b: Subject, text_of: Callable[[Sequence[int]], str] = lambda _: ""
) -> Explanation:
    """Return what ``b`` can reuse once ``a`` is wholly computed and nothing is forgotten.

    Args:
        a: The request that comes first.
        b: The request that may reuse.
        text_of: Text of ids, for the places around a difference.
    """
    common = num_common(_cells(a), _cells(b))
    apart = _apart(a, b)
    if apart is not None:
        num_full, num_matched = 0, 0
        stopped = apart
    else:
        num_full, num_matched = _matched(a, b)
        stopped = _stop(a, b, common, num_matched, text_of)
    return Explanation(
        num_prompt_tokens=b.num_tokens,
        num_matched_tokens=num_matched,
        by_tier={"device": num_matched, "host": 0, "disk": 0},
        pages=num_full,
        page_size=b.page_size,
        num_common_tokens=common,
        stopped=stopped,
    )


def from_report(
    report: ReuseReport, text_of: Callable[[Sequence[int]], str] = lambda _: ""
) -> Explanation:
    """Return what a live engine reports of a prompt; ``a`` of a difference is what it has.

    It knows pages of the prompt's own root only: that another salt has the same text is not told.

    Args:
        report: The engine's.
        text_of: Text of ids, for the places around a difference.
    """
    differs = _reported(report, text_of) if report.reason == "differs" else None
    return Explanation(
        num_prompt_tokens=report.num_prompt_tokens,
        num_matched_tokens=report.num_matched_tokens,
        by_tier=report.by_tier,
        pages=report.num_matched_tokens // report.page_size,
        page_size=report.page_size,
        num_common_tokens=report.slot,
        stopped=Stop(
            page=report.slot // report.page_size,
            slot=report.slot,
            reason=report.reason,
            evicted_at=report.evicted_seconds,
            differs=differs,
        ),
    )


def _reported(report: ReuseReport, text_of: Callable[[Sequence[int]], str]) -> Difference:
    before = text_of(report.before)
    around: dict[str, Any] = {
        "before": before,
        "a_text": text_of(report.other),
        "b_text": text_of(report.own),
    }
    a, b = (
        (ids[0] if ids else None) if item is None else _item_facts(item, report)
        for item, ids in ((report.other_item, report.other), (report.own_item, report.own))
    )
    if isinstance(a, dict) and isinstance(b, dict):
        return _item_difference(a, b, before)
    if isinstance(a, dict) or isinstance(b, dict):
        shown = [None if facts is None else _in_words(facts) for facts in (a, b)]
        return Difference(field="layout", a=shown[0], b=shown[1], **around)
    ids = [None if token is None else str(token) for token in (a, b)]
    return Difference(field="token", a=ids[0], b=ids[1], **around)


def _item_facts(item: PageItem, report: ReuseReport) -> dict[str, str]:
    page = report.slot // report.page_size
    begin = page * report.page_size + item.start - item.offset
    return {
        "kind": "item",
        "length": str(item.length),
        "start": str(begin),
        "digest": item.digest.hex(),
    }


def _apart(a: Subject, b: Subject) -> Stop | None:
    """Return what keeps two requests apart before the first slot, if anything does."""
    names = list(dict.fromkeys([*a.root_constants, *b.root_constants]))
    unequal = [n for n in names if a.root_constants.get(n) != b.root_constants.get(n)]
    if unequal:
        differs = Difference(
            field="root_constant",
            name=unequal[0],
            a=a.root_constants.get(unequal[0]),
            b=b.root_constants.get(unequal[0]),
            others=unequal[1:],
        )
        return Stop(page=0, slot=0, reason="differs", differs=differs)
    if a.prepared.root is None or b.prepared.root is None:
        return Stop(page=0, slot=0, reason="shut")
    if a.cache_salt != b.cache_salt:
        differs = Difference(field="cache_salt", a=a.cache_salt, b=b.cache_salt)
        return Stop(page=0, slot=0, reason="differs", differs=differs)
    assert a.prepared.root == b.prepared.root, "the same constants and salt gave two roots"
    contexts = [_context(subject) for subject in (a, b)]
    if contexts[0] != contexts[1]:
        differs = Difference(field="item", name="context", a=contexts[0], b=contexts[1])
        return Stop(page=0, slot=0, reason="differs", differs=differs)
    return None


def _context(subject: Subject) -> str | None:
    """Return what a prompt attends to from outside; ``None``: nothing."""
    items = subject.prepared.context
    return ", ".join(f"{i.kind} of {i.length} slots, {i.digest.hex()}" for i in items) or None


def _matched(a: Subject, b: Subject) -> tuple[int, int]:
    """Return the pages that ``b`` reuses whole, and the tokens that it reuses in all."""
    size, limit = b.page_size, b.num_tokens - 1
    most = min(a.num_tokens, limit) // size
    keys_a, keys_b = a.prepared.page_keys, b.prepared.page_keys
    num_full = next((i for i in range(most) if keys_a[i] != keys_b[i]), most)
    pages_a, pages_b = pages_of(a.prepared, size), pages_of(b.prepared, size)
    cut = 0
    if num_full < min(len(pages_a), len(pages_b)):
        known = {key for _, key in pages_a[num_full].end_keys}
        cut = max(
            (
                end
                for end, key in pages_b[num_full].end_keys
                if key in known and num_full * size + end <= limit
            ),
            default=0,
        )
    return num_full, num_full * size + cut


def _stop(
    a: Subject,
    b: Subject,
    common: int,
    num_matched: int,
    text_of: Callable[[Sequence[int]], str],
) -> Stop:
    size = b.page_size
    if common == b.num_tokens:
        return Stop(page=num_matched // size, slot=num_matched, reason="end")
    page = common // size
    if common == a.num_tokens:
        return Stop(page=page, slot=common, reason="other_ends")
    return Stop(
        page=page,
        slot=common,
        reason="differs",
        differs=_difference(a, b, common, text_of),
    )


_Cell = int | tuple[bytes, int, int]
"""What fills a slot: an id, or an item's digest and length and the slot's place in it."""


def _cells(subject: Subject) -> list[_Cell]:
    cells: list[_Cell] = list(subject.prepared.token_ids)
    begin = 0
    for span in layout(subject.prepared):
        if span.digest is not None:
            end = begin + span.length
            cells[begin:end] = [(span.digest, span.length, i) for i in range(span.length)]
        begin += span.length
    return cells


def num_common(a: Sequence[object], b: Sequence[object]) -> int:
    """Return how many leading elements two sequences have in common.

    >>> num_common("weather", "wealth")
    3
    """
    most = min(len(a), len(b))
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), most)


def _difference(
    a: Subject, b: Subject, slot: int, text_of: Callable[[Sequence[int]], str]
) -> Difference:
    facts = [_facts(subject, slot) for subject in (a, b)]
    before = text_of(b.prepared.token_ids[max(0, slot - _NUM_BEFORE) : slot])
    texts = [text_of(s.prepared.token_ids[slot : slot + _NUM_AFTER]) for s in (a, b)]
    around: dict[str, Any] = {"before": before, "a_text": texts[0], "b_text": texts[1]}
    own, other = facts
    if isinstance(own, int) and isinstance(other, int):
        return Difference(field="token", a=str(own), b=str(other), **around)
    if isinstance(own, int) or isinstance(other, int):
        return Difference(field="layout", a=_in_words(own), b=_in_words(other), **around)
    return _item_difference(own, other, before)


def _item_difference(a: Mapping[str, str], b: Mapping[str, str], before: str) -> Difference:
    unequal = [name for name in a if a[name] != b[name]]
    return Difference(
        field="item",
        name=unequal[0],
        a=a[unequal[0]],
        b=b[unequal[0]],
        others=unequal[1:],
        before=before,
    )


def _facts(subject: Subject, slot: int) -> int | dict[str, str]:
    """Return the id of a slot, or the fields of the item that begins there."""
    begin = 0
    for span in layout(subject.prepared):
        if begin <= slot < begin + span.length:
            if span.digest is None:
                break
            return {
                "kind": span.kind or "item",
                "length": str(span.length),
                "advance": "by the scheme" if span.advance is None else str(span.advance),
                "start": str(begin),
                "digest": span.digest.hex(),
            }
        begin += span.length
    return subject.prepared.token_ids[slot]


def _in_words(facts: int | dict[str, str]) -> str:
    if isinstance(facts, int):
        return f"token {facts}"
    return f"{facts['kind']} of {facts['length']} slots"


def find_in_chat(rendered: str, messages: Sequence[Mapping[str, Any]], at: int) -> str:
    """Return the part of a conversation that a character of its rendered text belongs to.

    A content that the template changed is passed over: its text counts as the template's.

    Args:
        rendered: What the template wrote.
        messages: What it was given, contents as strings.
        at: Index of the character.

    >>> talk = [{"role": "user", "content": "hello"}]
    >>> find_in_chat("<user>hello</user>", talk, 8)
    'character 2 of messages[0] (user)'
    >>> find_in_chat("<user>hello</user>", talk, 1)
    "the template's own text before messages[0] (user)"
    """
    end, last = 0, ""
    for index, message in enumerate(messages):
        content = str(message.get("content") or "").strip()
        begin = rendered.find(content, end) if content else -1
        if begin < 0:
            continue
        name = f"messages[{index}] ({message.get('role')})"
        if at < begin:
            return f"the template's own text before {name}"
        end, last = begin + len(content), name
        if at < end:
            return f"character {at - begin} of {name}"
    return f"the template's own text after {last}" if last else "the template's own text"
