"""Items of a prompt: their content names, the layout they make with ids, and its page keys."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mstar.engine.array import Array, from_numpy
from mstar.engine.resources.kv.keys import chain, fingerprint, page_items
from mstar.engine.resources.spans import Span, pairs


def item_digest(
    content: npt.NDArray[Any],
    *,
    kind: str,
    processor: bytes,
    parameters: Mapping[str, object],
    length: int,
    advance: int | None = None,
    is_whole: bool = False,
) -> bytes:
    """Return the content name of an item: 32 bytes.

    Two items share it only if nothing that their KV depends on differs.

    Args:
        content: The decoded input, as the processor is given it (pixels, samples).
        kind: Its modality.
        processor: Fingerprint of what turns it into slots, its version and config.
        parameters: What the request asks of the processor; plain data of any depth.
        length: Slots it takes, in tokens.
        advance: How far it moves the position counter.
        is_whole: Attention inside it goes in both directions.

    Raises:
        TypeError: If the content has no canonical bytes, or a parameter is not plain data.
    """
    if content.dtype.kind not in "biufc":
        raise TypeError(f"content of dtype {content.dtype} has no bytes of its own")
    # Little-endian and in C order: the same on every machine.
    plain = np.ascontiguousarray(content, content.dtype.newbyteorder("<"))
    return fingerprint(
        "mstar-item-digest-v1",
        hashlib.sha256(plain.tobytes()).digest(),
        plain.dtype.str,
        ",".join(map(str, content.shape)),
        kind,
        processor,
        # MessagePack tells types apart and frames every value, so that no two parameters agree.
        msgspec.msgpack.encode(_plain(parameters, "parameters"), order="sorted"),
        length,
        is_whole,
        "scheme" if advance is None else advance,
    )


def named(
    span: Span,
    content: npt.NDArray[Any],
    *,
    processor: bytes,
    parameters: Mapping[str, object],
) -> Span:
    """Return the span of an item under the content name that commits to all its fields.

    Its grid is among them: the same pixels in other places have another KV.

    Args:
        span: The item's, whose digest is not read.
        content: As ``item_digest`` takes it, ``processor`` and ``parameters`` too.
        processor: Fingerprint of what turns it into slots.
        parameters: What the request asks of the processor.
    """
    if span.grid is not None:
        processor = fingerprint("mstar-item-grid-v1", processor, msgspec.msgpack.encode(span.grid))
    digest = item_digest(
        content,
        kind=span.kind,
        processor=processor,
        parameters=parameters,
        length=span.length,
        advance=span.advance,
        is_whole=span.is_whole,
    )
    return msgspec.structs.replace(span, digest=digest)


def _plain(value: object, where: str) -> object:
    """Return a value of plain data as it is; other types would be encoded as what they are not."""
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r}; keys are strings")
        return {key: _plain(part, f"{where}[{key!r}]") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part, f"{where}[{at}]") for at, part in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    raise TypeError(f"{where} is {value!r} ({type(value).__name__}), which is no plain data")


def array_of(content: npt.NDArray[Any]) -> Array:
    """Return an encoder's input as it crosses processes."""
    return from_numpy(content)


@dataclass(frozen=True, slots=True)
class PromptItem:
    """An item in its place among token ids."""

    span: Span
    inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt of token ids and items."""

    token_ids: list[int]
    """Every slot's id, 0 at those of items."""
    spans: list[Span]
    inputs: list[dict[str, Array]]
    """Of each item, in order."""


def lay_out(parts: Sequence[Sequence[int] | PromptItem]) -> Layout:
    """Return the layout of runs of ids and items, in their order; empty runs leave no span."""
    layout = Layout([], [], [])
    for part in parts:
        if isinstance(part, PromptItem):
            layout.spans.append(part.span)
            layout.inputs.append(dict(part.inputs))
            layout.token_ids.extend([0] * part.span.length)
        elif part:
            layout.spans.append(Span(len(part)))
            layout.token_ids.extend(part)
    return layout


def prompt_keys(
    token_ids: Sequence[int], spans: Sequence[Span], page_size: int, root: bytes
) -> list[bytes]:
    """Return the key of every page of a prompt, the unfinished last one included.

    Args:
        token_ids: The prompt's ids, placeholders at the slots of items.
        spans: Its layout; empty: all token ids.
        page_size: Slots of a page, in tokens.
        root: Key of the empty prefix.
    """
    bounds = [*range(0, len(token_ids), page_size), len(token_ids)]
    if all(span.digest is None for span in spans):
        return chain([token_ids[start:stop] for start, stop in pairwise(bounds)], root=root)
    is_id = np.repeat([span.digest is None for span in spans], [span.length for span in spans])
    ids = np.asarray(token_ids, np.int64)
    pages = [ids[start:stop][is_id[start:stop]] for start, stop in pairwise(bounds)]
    return chain(pages, page_items(pairs(spans), page_size), root)
