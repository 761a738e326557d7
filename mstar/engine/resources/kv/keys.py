"""Content-addressed keys of KV pages.

A page's key commits to everything beneath it: the root, and every id and item up to the page's last
slot. Equal bytes on every machine, Python version and run, since one process makes keys and another
matches them. With ``u32(n)`` four bytes little-endian and ``field(b) = u32(len(b)) + b``::

    page_key = SHA-256( field(prev) + field(u32(id) of every id) + field(every item) )
                        └ parent ─┘   └────────────────── body ─────────────────────┘
    item     = u32(start) + u32(offset) + u32(length) + field(digest)

Bad input raises ``TypeError`` (wrong type) or ``ValueError`` (wrong value) that names the value and
where it stands; it never gets a key.
"""

import operator
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

try:
    from mstar.engine.resources.kv import _chain  # type: ignore[attr-defined]
except ImportError:  # not built, or the processor lacks the instructions
    _chain = None

_LIMIT = 1 << 32
_KEY_NBYTES = 32
# Pages encoded at once: enough to spread NumPy's overhead over, few enough to stay in the cache.
_GROUP_LEN = 1024
# Fewer pages than this are encoded sooner one by one.
_MIN_GROUP_LEN = 12
# Longer pages are left to Python.
_MAX_COMPILED_IDS = 4096
_U32 = struct.Struct("<I").pack
_ITEM_HEAD = struct.Struct("<4I").pack


class PageItem(NamedTuple):
    """An input that is not a token, as one page sees it."""

    start: int
    """Its first slot on this page."""
    offset: int
    """Its slots that lie on earlier pages."""
    length: int
    """All of its slots, on whatever page."""
    digest: bytes
    """What it holds, by content."""


def fingerprint(*fields: object) -> bytes:
    """Return the SHA-256 over fields, for constants of a process or deployment.

    Args:
        fields: bytes as they are, str as UTF-8, int, float, bool and None as their ``str()``. The
            split into fields counts; the type does not: ``1`` and ``"1"`` agree.

    Raises:
        TypeError: If a field is anything else, subclasses included: their text may hold an address
            or change between Python versions.
        ValueError: If a str has no UTF-8 form.

    >>> fingerprint("page_size", 16) == fingerprint("page_size", "16")
    True
    """
    parts = []
    for index, value in enumerate(fields):
        if type(value) is bytes:
            parts.append(_field(value))
        elif value is None or type(value) in (str, int, float, bool):
            try:
                parts.append(_field(str(value).encode()))
            except UnicodeEncodeError as error:
                raise ValueError(f"field {index} is {value!r}, which is not UTF-8") from error
        else:
            raise TypeError(
                f"field {index} is {value!r} ({type(value).__name__}); a fingerprint takes bytes, "
                "str, int, float, bool and None"
            )
    return sha256(b"".join(parts)).digest()


def page_key(prev: bytes, tokens: Sequence[int], items: Sequence[PageItem] = ()) -> bytes:
    """Return the key of a page.

    Args:
        prev: Key of the page before it, or the root.
        tokens: The ids, each in ``[0, 2**32)``, that fill the slots which ``items`` leave; also a
            NumPy or torch integer array ``[num_tokens]`` on any device.
        items: What touches the page, in layout order.

    Raises:
        TypeError: If an id or a number of an item is not an integer (a bool is none), an array has
            another dtype, or ``prev`` or a digest is not bytes.
        ValueError: If an id or a number of an item is out of range, an array is not 1-D, an item
            has no slot on the page, or items overlap or are out of order.
    """
    if not len(items) and type(tokens) is list and type(prev) is bytes and len(prev) == _KEY_NBYTES:
        if made := _fold_compiled(prev, [tokens]):
            return made[0]
        count = len(tokens)
        if set(map(type, tokens)) == {int}:
            try:
                preimage = _text_page(count).pack(_KEY_NBYTES, prev, 4 * count, *tokens, 0)
            except struct.error:
                pass  # Out of range: below, the value is found and named.
            else:
                return sha256(preimage).digest()
    return sha256(_field(_bytes(prev, "prev")) + _body(tokens, items, "")).digest()


@lru_cache(maxsize=128)
def _text_page(num_tokens: int) -> struct.Struct:
    """Return the layout of what the key of a page without items is made from."""
    return struct.Struct(f"<I{_KEY_NBYTES}sI{num_tokens}II")


def end_key(prev: bytes, tokens: Sequence[int], items: Sequence[PageItem], end: int) -> bytes:
    """Return the key of a page's first ``end`` slots, for a cut where an item on it ends.

    Args:
        prev: Key of the page before it, or the root.
        tokens: The ids of the whole page, as ``page_key`` takes them.
        items: The items of the whole page.
        end: Slots kept, in tokens.

    Raises:
        TypeError: As ``page_key``, and if ``end`` is not an integer.
        ValueError: As ``page_key``, and if ``end`` is negative, cuts an item, or asks for more ids
            than the page has.
    """
    end = _integer(end, "end")
    ids = _ids(tokens, "")
    _encode_items(items, "")
    # Plain ints: a narrow NumPy number would wrap in the sums below.
    kept = [PageItem(int(s), int(o), int(n), digest) for s, o, n, digest in items if s < end]
    num_ids = end
    for index, (start, offset, length, _) in enumerate(kept):
        if start + length - offset > end:
            raise ValueError(
                f"end {end} cuts item {index}, which fills slots {start} to "
                f"{start + length - offset} of the page"
            )
        num_ids -= length - offset
    if not 0 <= num_ids <= len(ids) // 4:
        raise ValueError(
            f"end {end} asks for {num_ids} ids beside the items before it; "
            f"the page has {len(ids) // 4}"
        )
    body = _field(ids[: 4 * num_ids]) + _field(_encode_items(kept, ""))
    return sha256(_field(_bytes(prev, "prev")) + body).digest()


def page_items(
    spans: Iterable[tuple[int, bytes | None]], page_size: int
) -> dict[int, list[PageItem]]:
    """Return the items of every page that has any, by page number in ascending order.

    Every page that an item touches carries the item's whole length and digest: attention inside an
    item is not causal, so a page's KV depends on the item's later slots too.

    Args:
        spans: Layout of a stream from its first slot: length in tokens, and digest (``None``:
            token ids).
        page_size: Slots of a page, in tokens.

    Raises:
        TypeError: If a length or ``page_size`` is not an integer, or a digest is neither bytes nor
            ``None``.
        ValueError: If ``page_size < 1``, a length is negative, or an item's length is 0 or beyond
            32 bits.

    >>> page_items([(3, None), (2, b"image")], page_size=4)[1]
    [PageItem(start=0, offset=1, length=2, digest=b'image')]
    """
    page_size = _integer(page_size, "page_size")
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; a page has at least one slot")
    items: dict[int, list[PageItem]] = {}
    begin = 0
    for index, span in enumerate(spans):
        try:
            length, digest = span
        except (TypeError, ValueError) as error:
            raise TypeError(f"span {index} is {span!r}, not a (length, digest) pair") from error
        length = _integer(length, f"length of span {index}")
        if length < 0:
            raise ValueError(f"length of span {index} is {length}; it cannot be negative")
        if digest is not None:
            _bytes(digest, f"digest of span {index}")
            if not 0 < length < _LIMIT:
                raise ValueError(
                    f"length of span {index} is {length}; an item's length is in [1, 2**32)"
                )
            offset = 0
            while offset < length:
                page, start = divmod(begin + offset, page_size)
                items.setdefault(page, []).append(PageItem(start, offset, length, digest))
                offset += page_size - start
        begin += length
    return items


def chain(
    pages_of_tokens: Sequence[Sequence[int]],
    items_by_page: Mapping[int, Sequence[PageItem]] | None = None,
    root: bytes = b"",
) -> list[bytes]:
    """Return a key for every page of one stream, each folded into the next.

    Args:
        pages_of_tokens: The ids of every page, as ``page_key`` takes them; also one NumPy or torch
            integer array ``[num_pages, page_size]``.
        items_by_page: Items by page number; numbers beyond the last page are ignored.
        root: What the first page is folded onto.

    Raises:
        TypeError: As ``page_key``, and if a page is no sequence.
        ValueError: As ``page_key``; the message names the page too.
    """
    prev = _bytes(root, "root")
    if items_by_page is not None and not isinstance(items_by_page, Mapping):
        raise TypeError(f"items_by_page is {items_by_page!r}, not a mapping")
    keys: list[bytes] = []
    # Copying a started hash costs less than starting one.
    started = sha256(_U32(_KEY_NBYTES))
    for first, pages, items in _groups(pages_of_tokens, items_by_page or {}):
        if not keys:
            keys.append(sha256(_field(prev) + _body(pages[0], items or (), " of page 0")).digest())
            continue
        if items is not None:
            bodies = [_body(pages[0], items, f" of page {first}")]
        else:
            made = _fold_compiled(keys[-1], pages)
            keys += made
            # What is left has ids that need a closer look.
            bodies = _plain_bodies(pages[len(made) :], first + len(made))
        for body in bodies:
            state = started.copy()
            state.update(keys[-1])
            state.update(body)
            keys.append(state.digest())
    return keys


def _groups(
    pages: Sequence[Sequence[int]], items_by_page: Mapping[int, Sequence[PageItem]]
) -> Iterator[tuple[int, Sequence[Sequence[int]], Sequence[PageItem] | None]]:
    """Yield all pages in order, in groups: the number of the first, the pages, and the items.

    A page of its own has items, even if none; ``None`` is for groups of pages without.
    """
    if hasattr(pages, "__array__"):
        pages = _array(pages, 2, "")  # type: ignore[assignment]
    elif not isinstance(pages, list):
        pages = list(pages)
    last = len(pages) - 1
    # The root may have any length; the last page is often shorter; one with items is nearly always.
    alone = sorted({0, last, *(page for page in items_by_page if 0 < page < last)})
    begin = 0
    for page in alone if last >= 0 else ():
        for first in range(begin, page, _GROUP_LEN):
            yield first, pages[first : min(first + _GROUP_LEN, page)], None
        yield page, pages[page : page + 1], items_by_page.get(page, ())
        begin = page + 1


def _fold_compiled(prev: bytes, pages: Sequence[Sequence[int]]) -> list[bytes]:
    """Return the keys of pages without items, up to the first whose ids are not plain."""
    if _chain is None:
        return []
    if not isinstance(pages, np.ndarray):
        made: list[bytes] = _chain.fold_lists(prev, pages)
        return made
    num_ids = pages.shape[1]
    if num_ids > _MAX_COMPILED_IDS:
        return []
    packed: list[bytes] = _chain.fold_packed(prev, np.ascontiguousarray(pages, "<u4"), num_ids)
    return packed


def _plain_bodies(pages: Sequence[Sequence[int]], first: int) -> list[bytes]:
    """Return the bodies of pages without items, the first of them page number ``first``."""
    ids = None
    if len(pages) >= _MIN_GROUP_LEN:
        ids = pages if isinstance(pages, np.ndarray) else _matrix(pages)
    if ids is None:
        return [_body(page, (), f" of page {first + i}") for i, page in enumerate(pages)]
    num_pages, num_ids = ids.shape
    bodies = np.empty((num_pages, num_ids + 2), dtype="<u4")
    bodies[:, 0] = 4 * num_ids
    bodies[:, 1:-1] = ids
    bodies[:, -1] = 0
    rows: list[bytes] = bodies.view(f"V{4 * num_ids + 8}")[:, 0].tolist()
    return rows


def _matrix(pages: Sequence[Sequence[int]]) -> npt.NDArray[np.uintc] | None:
    """Return lists of ids as an array, or ``None`` where they need a closer look.

    That is: pages of different lengths, pages that are no lists or tuples, and whatever is wrong.
    """
    packed = array("I")
    try:
        (num_ids,) = set(map(len, pages))
        # ``fromlist`` returns None, so that any() calls it on every page; it refuses ids that are
        # no integers or do not fit 32 bits.
        is_tuples = type(pages[0]) is tuple and set(map(type, pages)) == {tuple}
        lists = map(list, pages) if is_tuples else pages
        any(map(packed.fromlist, lists))  # type: ignore[arg-type]
        ids = np.frombuffer(packed, dtype=np.uintc).reshape(-1, num_ids)
    except (TypeError, ValueError, OverflowError):
        return None
    # A bool passes for an integer; only a 0 or a 1 can have been one.
    if ids.min() <= 1:
        suspects = np.argwhere(ids <= 1).tolist()
        if any(type(pages[page][index]) is not int for page, index in suspects):
            return None
    return ids


def _body(tokens: Sequence[int], items: Sequence[PageItem], where: str) -> bytes:
    """Return what a page's key holds beside its parent; ``where`` is for messages."""
    ids = _ids(tokens, where)
    if not len(items):
        return _U32(len(ids)) + ids + bytes(4)
    return _U32(len(ids)) + ids + _field(_encode_items(items, where))


def _ids(tokens: Sequence[int], where: str) -> bytes:
    """Return the ids of one page, four bytes each."""
    if type(tokens) is not list:
        if hasattr(tokens, "__array__"):
            return _array(tokens, 1, where).astype("<u4").tobytes()
        try:
            tokens = list(tokens)
        except TypeError as error:
            raise TypeError(f"tokens{where} are {tokens!r}, not a sequence of ids") from error
    packed = array("I")
    if set(map(type, tokens)) != {int}:
        tokens = [_u32(token, "token at index", i, where) for i, token in enumerate(tokens)]
    try:
        packed.fromlist(tokens)
    except OverflowError:
        for i, token in enumerate(tokens):
            _u32(token, "token at index", i, where)
        raise
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _array(tokens: Any, num_dims: int, where: str) -> npt.NDArray[np.integer[Any]]:
    """Return a NumPy or torch array of ids as a checked NumPy array on the CPU."""
    try:
        ids = np.asarray(tokens.detach().cpu() if hasattr(tokens, "detach") else tokens)
        is_integer = ids.dtype.kind in "iu"
    except (TypeError, RuntimeError):  # a torch dtype that NumPy lacks
        is_integer = False
    if not is_integer:
        dtype = getattr(tokens, "dtype", None)
        raise TypeError(f"tokens{where} are {tokens!r} of dtype {dtype}; ids are integers")
    if ids.ndim != num_dims:
        raise ValueError(f"tokens{where} have shape {ids.shape}; they must be {num_dims}-D")
    # A bit above the lowest 32, the sign among them, survives the union of all ids.
    if int(np.bitwise_or.reduce(ids, axis=None)) >> 32:
        *page, index = np.argwhere((ids < 0) | (ids >= _LIMIT))[0].tolist()
        where = f" of page {page[0]}" if page else where
        _u32(int(ids[*page, index]), "token at index", index, where)
    return ids


def _encode_items(items: Sequence[PageItem], where: str) -> bytes:
    """Return the checked items of one page, one after the other."""
    parts = []
    free = 0
    for index, item in enumerate(items):
        try:
            start, offset, length, digest = item
        except (TypeError, ValueError) as error:
            raise TypeError(f"item {index}{where} is {item!r}, not a PageItem") from error
        start = _u32(start, "start of item", index, where)
        offset = _u32(offset, "offset of item", index, where)
        length = _u32(length, "length of item", index, where)
        if not isinstance(digest, bytes):
            _bytes(digest, f"digest of item {index}{where}")
        if offset >= length:
            raise ValueError(
                f"item {index}{where} has offset {offset} and length {length}: no slot on the page"
            )
        if start < free:
            raise ValueError(
                f"item {index}{where} starts at slot {start}, but the item before it ends at "
                f"{free}; items stand in layout order and do not overlap"
            )
        free = start + length - offset
        parts.append(_ITEM_HEAD(start, offset, length, len(digest)) + digest)
    return b"".join(parts)


def _field(data: bytes) -> bytes:
    return _U32(len(data)) + data


def _bytes(value: Any, name: str) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), not bytes")
    return value


def _integer(value: Any, name: str) -> int:
    """Return an integer of any library as an int; a bool is none."""
    if type(value) is int:
        return value
    # A torch bool has ``__index__`` as well, and tells by its dtype only.
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    try:
        if not is_bool:
            return int(operator.index(value))
    except TypeError:
        pass
    raise TypeError(f"{name} is {value!r} ({type(value).__name__}), not an integer")


def _u32(value: Any, what: str, index: int, where: str) -> int:
    """Return ``value`` as an int in ``[0, 2**32)``; the rest names it in messages."""
    if type(value) is not int:
        value = _integer(value, f"{what} {index}{where}")
    if not 0 <= value < _LIMIT:
        raise ValueError(f"{what} {index}{where} is {value}, outside [0, 2**32)")
    return int(value)
