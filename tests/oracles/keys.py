"""The page keys' encoding, byte by byte; slow, and independent of the package."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

Item = tuple[int, int, int, bytes]


def u32(number: int) -> bytes:
    return bytes((number >> shift) & 0xFF for shift in (0, 8, 16, 24))


def field(data: bytes) -> bytes:
    return u32(len(data)) + data


def fingerprint(*fields: object) -> bytes:
    h = hashlib.sha256()
    for value in fields:
        h.update(field(value if isinstance(value, bytes) else str(value).encode("utf-8")))
    return h.digest()


def page_key(prev: bytes, ids: Iterable[int], items: Iterable[Item] = ()) -> bytes:
    h = hashlib.sha256(field(prev))
    h.update(field(b"".join(u32(token) for token in ids)))
    h.update(field(b"".join(u32(s) + u32(o) + u32(n) + field(d) for s, o, n, d in items)))
    return h.digest()


def chain(
    pages: Sequence[Sequence[int]], items: Mapping[int, Sequence[Item]], root: bytes
) -> list[bytes]:
    keys: list[bytes] = []
    for number, ids in enumerate(pages):
        keys.append(page_key(keys[-1] if keys else root, ids, items.get(number, ())))
    return keys


def slots(spans: Iterable[tuple[int, bytes | None]]) -> list[tuple[int, int, bytes] | None]:
    """One entry a slot: ``None`` for an id, else (slot of the item, its length, its digest)."""
    out: list[tuple[int, int, bytes] | None] = []
    for length, digest in spans:
        out += [None if digest is None else (i, length, digest) for i in range(length)]
    return out


def page_items(spans: Sequence[tuple[int, bytes | None]], page_size: int) -> dict[int, list[Item]]:
    """Walk over every slot; an item appears on a page where its first slot there stands."""
    pages: dict[int, list[Item]] = {}
    for at, slot in enumerate(slots(spans)):
        if slot is not None and (slot[0] == 0 or at % page_size == 0):
            pages.setdefault(at // page_size, []).append((at % page_size, *slot))
    return pages


def pages_of_tokens(
    spans: Sequence[tuple[int, bytes | None]], ids: Iterable[int], page_size: int
) -> list[list[int]]:
    """Deal ids out to the slots that no item fills."""
    layout, left = slots(spans), iter(ids)
    return [
        [next(left) for slot in layout[i : i + page_size] if slot is None]
        for i in range(0, len(layout), page_size)
    ]
