"""How KV events look on a terminal: a line each, for people or for programs."""

from collections.abc import Iterator
from datetime import datetime

import msgspec

from mstar.engine.resources.kv.events import AllBlocksCleared, BlockRemoved, Event
from mstar.transport.event_order import Arrival, Reset, ResetReason


def lines_of(arrival: Arrival, *, as_json: bool) -> Iterator[tuple[str, bool]]:
    """Yield a line for each event or reset, and whether it is an event."""
    if isinstance(arrival, Reset):
        yield _reset_json(arrival) if as_json else _reset_line(arrival), False
        return
    ts = arrival.events.ts
    head = f"{arrival.seq:>8}  {datetime.fromtimestamp(ts).strftime('%H:%M:%S.%f')[:-3]}  "
    for event in arrival.events.events:
        yield _event_json(arrival.seq, ts, event) if as_json else head + _event_line(event), True


def _event_line(event: Event) -> str:
    if isinstance(event, AllBlocksCleared):
        return "cleared"
    keys = event.block_hashes
    count = f"{len(keys)} page{'s' * (len(keys) != 1)}"
    ends = _short(keys[0]) if len(keys) == 1 else f"{_short(keys[0])}..{_short(keys[-1])}"
    if isinstance(event, BlockRemoved):
        return f"removed  {event.medium}  {count}  {ends}"
    tokens = f"{len(event.token_ids)} token{'s' * (len(event.token_ids) != 1)}"
    items = sum(page is not None for page in event.extra_keys or ())
    parent = event.parent_block_hash
    after = "at the root" if parent is None else f"after {_short(parent)}"
    with_items = f"  {items} with items" if items else ""
    return f"stored   {event.medium}  {count}  {ends}  {tokens}  {after}{with_items}"


def _short(key: bytes) -> str:
    return key.hex()[:12]


def _event_json(seq: int, ts: float, event: Event) -> str:
    fields = {"seq": seq, "ts": ts, **msgspec.to_builtins(event, builtin_types=(bytes,))}
    return msgspec.json.encode(_hex(fields)).decode()


def _hex(value: object) -> object:
    """Return a value with its bytes as hex, as keys are written everywhere."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _hex(field) for name, field in value.items()}
    if isinstance(value, list | tuple):
        return [_hex(element) for element in value]
    return value


def _reset_line(reset: Reset) -> str:
    if reset.reason is ResetReason.RESTARTED:
        return f"-------- the publisher began anew after batch {reset.last_seq}: all pages are void"
    before = "the first batches" if reset.last_seq is None else f"what follows {reset.last_seq}"
    return (
        f"-------- {before} up to {reset.next_seq} cannot be had: pages known so far are void, and "
        "those stored in between stay unknown"
    )


def _reset_json(reset: Reset) -> str:
    return msgspec.json.encode({"type": "Reset", **reset._asdict()}).decode()
