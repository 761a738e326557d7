import hashlib
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from mstar.engine.array import Array
from mstar.engine.resources.spans import Grid, Span, check_spans
from mstar.preprocess.items import (
    Layout,
    PromptItem,
    array_of,
    item_digest,
    lay_out,
    named,
    prompt_keys,
)
from tests.oracles import keys as oracle

ROOT = bytes(range(32))


def test_digest_is_the_written_encoding() -> None:
    """Anyone who has content and parameters can make the name by hand."""
    content = np.array([[1, 2, 3]], np.int16)
    found = item_digest(
        content,
        kind="picture",
        processor=b"v1",
        parameters={"b": [1, None], "a": "x"},
        length=7,
        advance=3,
        is_whole=True,
    )
    pixels = hashlib.sha256(b"\x01\x00\x02\x00\x03\x00").digest()
    # MessagePack, keys in order: {"a": "x", "b": [1, null]}.
    parameters = b"\x82\xa1a\xa1x\xa1b\x92\x01\xc0"
    assert found == oracle.fingerprint(
        "mstar-item-digest-v1", pixels, "<i2", "1,3", "picture", b"v1", parameters, 7, True, 3
    )
    by_scheme = item_digest(content, kind="", processor=b"", parameters={}, length=1)
    assert by_scheme == oracle.fingerprint(
        "mstar-item-digest-v1", pixels, "<i2", "1,3", "", b"", b"\x80", 1, False, "scheme"
    )


class Described(NamedTuple):
    """All that an item's name commits to."""

    shape: tuple[int, ...]
    dtype: str
    fill: int
    kind: str
    processor: bytes
    parameters: tuple[tuple[str, int], ...]
    length: int
    advance: int | None
    is_whole: bool

    def digest(self) -> bytes:
        return item_digest(
            np.full(self.shape, self.fill, self.dtype),
            kind=self.kind,
            processor=self.processor,
            parameters={"outer": dict(self.parameters)},
            length=self.length,
            advance=self.advance,
            is_whole=self.is_whole,
        )


DESCRIBED = st.builds(
    Described,
    st.sampled_from([(), (1,), (2,), (1, 2), (2, 1), (12,), (1, 12), (1, 1, 2)]),
    st.sampled_from(["u1", "i1", "u2", "f2", "u4", "i4", "f4", "f8", "?"]),
    st.integers(0, 1),
    st.sampled_from(["", "a", "b", "ab"]),
    st.sampled_from([b"", b"a", b"b", b"ab"]),
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 1)).map(
        lambda parameters: tuple(sorted(parameters.items()))
    ),
    st.sampled_from([1, 2, 11, 12]),
    st.sampled_from([None, 0, 1, 2]),
    st.booleans(),
)


@given(DESCRIBED, DESCRIBED)
@settings(max_examples=300)
def test_items_share_a_name_only_if_nothing_about_them_differs(
    one: Described, other: Described
) -> None:
    assert (one.digest() == other.digest()) == (one == other)


@given(DESCRIBED, st.data())
@settings(max_examples=300)
def test_any_one_field_that_differs_makes_another_name(one: Described, data: st.DataObject) -> None:
    other = data.draw(DESCRIBED)
    name = data.draw(st.sampled_from(Described._fields))
    changed = one._replace(**{name: getattr(other, name)})
    assert (changed.digest() == one.digest()) == (changed == one)
    assert len(one.digest()) == 32


GRIDS = st.none() | st.builds(
    Grid,
    st.lists(st.integers(0, 2), min_size=1, max_size=2).map(tuple),
    st.integers(1, 2),
    st.integers(1, 2),
)
ITEM_SPANS = st.builds(
    Span,
    st.integers(1, 2),
    st.none(),
    st.none() | st.integers(0, 1),
    st.booleans(),
    st.sampled_from(["image", "video"]),
    GRIDS,
)


@given(ITEM_SPANS, ITEM_SPANS)
@settings(max_examples=300)
def test_name_of_an_items_span_commits_to_all_its_fields(one: Span, other: Span) -> None:
    """Two layouts of the same pixels share a key only if positions agree too."""
    content = np.zeros(3)
    spans = [named(span, content, processor=b"p", parameters={"a": 1}) for span in (one, other)]
    assert (spans[0].digest == spans[1].digest) == (one == other)
    assert [msgspec.structs.replace(span, digest=None) for span in spans] == [one, other]
    keys = [prompt_keys([0] * span.length, [span], 2, ROOT) for span in spans]
    assert (keys[0] == keys[1]) == (one == other)


def test_name_of_a_span_without_a_grid_is_the_items_digest() -> None:
    span = Span(7, None, 3, True, "picture")
    content = np.arange(4)
    found = named(span, content, processor=b"v1", parameters={"b": 2})
    assert found.digest == item_digest(
        content,
        kind="picture",
        processor=b"v1",
        parameters={"b": 2},
        length=7,
        advance=3,
        is_whole=True,
    )


def digest_of(content: NDArray[Any]) -> bytes:
    return item_digest(content, kind="picture", processor=b"p", parameters={}, length=1)


@given(st.integers(1, 40), st.integers(1, 40))
def test_solid_pictures_that_lie_and_that_stand_have_names_of_their_own(
    width: int, height: int
) -> None:
    lying = np.full((height, width, 3), 128, np.uint8)
    standing = np.full((width, height, 3), 128, np.uint8)
    assert lying.tobytes() == standing.tobytes()
    assert (digest_of(lying) == digest_of(standing)) == (width == height)


def test_contents_of_no_bytes_differ_by_their_shapes() -> None:
    shapes = [(0,), (0, 2), (2, 0), (0, 0)]
    assert len({digest_of(np.zeros(shape)) for shape in shapes}) == len(shapes)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"size": {"a": [1, object]}}, r"parameters\['size'\]\['a'\]\[1\] is <class 'object'>"),
        ({"size": {1: 2}}, r"parameters\['size'\] has the key 1; keys are strings"),
        ({"size": np.float32(1)}, r"parameters\['size'\] is .*float32.* no plain data"),
    ],
)
def test_parameters_that_are_no_plain_data_are_refused_by_their_place(
    parameters: dict[str, object], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        item_digest(np.zeros(1), kind="", processor=b"", parameters=parameters, length=1)


def test_content_of_objects_is_refused() -> None:
    with pytest.raises(TypeError, match="content of dtype object has no bytes of its own"):
        digest_of(np.array([None]))


@pytest.mark.parametrize(
    "content",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.arange(12, dtype=np.float32).reshape(2, 6)[:, ::2],
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.arange(6, dtype=">i2"),
        np.array(5, np.uint8),
        np.zeros((0, 3)),
    ],
    ids=["plain", "turned", "wide", "big-endian floats", "big-endian ints", "one", "none"],
)
def test_what_the_encoder_gets_is_what_the_name_was_made_of(content: NDArray[Any]) -> None:
    """Big-endian samples had the name of the others, and reached the encoder as other numbers."""
    crossed = array_of(content)
    assert isinstance(crossed, Array)
    back = np.frombuffer(crossed.data, crossed.dtype).reshape(crossed.shape)
    np.testing.assert_array_equal(back, content)
    assert digest_of(back) == digest_of(content)


ITEMS = st.builds(
    lambda length, fill, advance, is_whole: PromptItem(
        Span(length, bytes([fill]) * 32, advance, is_whole, "picture"),
        {"x": array_of(np.array([fill]))},
    ),
    st.integers(1, 7),
    st.integers(0, 2),
    st.none() | st.integers(0, 3),
    st.booleans(),
)
PARTS = st.lists(st.lists(st.integers(1, 2**32 - 1), max_size=6) | ITEMS, max_size=7)


@given(PARTS)
def test_layout_has_every_id_and_item_in_its_place(parts: list[list[int] | PromptItem]) -> None:
    found = lay_out(parts)
    check_spans(found.spans, len(found.token_ids), len(found.inputs))
    slots: list[object] = []
    for part in parts:
        slots += [part.span] * part.span.length if isinstance(part, PromptItem) else part
    assert len(found.token_ids) == len(slots)
    assert found.token_ids == [slot if isinstance(slot, int) else 0 for slot in slots]
    by_slot = [span for span in found.spans for _ in range(span.length)]
    for slot, span in zip(slots, by_slot, strict=True):
        assert span.digest is None if isinstance(slot, int) else span is slot
    items = [part for part in parts if isinstance(part, PromptItem)]
    assert found.inputs == [dict(item.inputs) for item in items]


def test_nothing_makes_an_empty_layout() -> None:
    assert lay_out([]) == lay_out([[], []]) == Layout([], [], [])


@given(PARTS, st.integers(1, 6))
@settings(max_examples=300, deadline=None)
def test_keys_of_any_layout_are_those_of_its_pages_slot_by_slot(
    parts: list[list[int] | PromptItem], page_size: int
) -> None:
    made = lay_out(parts)
    spans = [(span.length, span.digest) for span in made.spans]
    ids = [
        token
        for token, slot in zip(made.token_ids, oracle.slots(spans), strict=True)
        if slot is None
    ]
    pages = oracle.pages_of_tokens(spans, ids, page_size)
    expected = oracle.chain(pages, oracle.page_items(spans, page_size), ROOT)
    assert prompt_keys(made.token_ids, made.spans, page_size, ROOT) == expected
    # What stands in the slots of items is read by nobody.
    noise = [
        token if slot is None else 77
        for token, slot in zip(made.token_ids, oracle.slots(spans), strict=True)
    ]
    assert prompt_keys(noise, made.spans, page_size, ROOT) == expected


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(1, 6), st.data())
def test_prompt_of_ids_has_the_same_keys_however_it_is_laid_out(
    ids: list[int], page_size: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
    spans = [Span(b - a) for a, b in pairwise(cuts)]
    pages = [ids[at : at + page_size] for at in range(0, len(ids), page_size)]
    expected = oracle.chain(pages, {}, ROOT)
    assert prompt_keys(ids, [], page_size, ROOT) == expected
    assert prompt_keys(ids, spans, page_size, ROOT) == expected
