import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from mstar.engine.resources.kv import keys
from mstar.engine.resources.kv.keys import (
    PageItem,
    chain,
    end_key,
    fingerprint,
    page_items,
    page_key,
)

TESTS = Path(__file__).parents[3]
REPOSITORY = TESTS.parent
GOLDEN = TESTS / "golden" / "page_keys.json"
SHARED = REPOSITORY / "../shared/conformance/page_keys.json"

_spec = importlib.util.spec_from_file_location("oracle_keys", TESTS / "oracles" / "keys.py")
assert _spec is not None
assert _spec.loader is not None
oracle: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

DIGEST = bytes(range(32))
ROOT = b"r" * 32
IDS = st.integers(0, 2**32 - 1) | st.integers(0, 3)
SPANS = st.lists(
    st.tuples(st.integers(0, 20), st.none())
    | st.tuples(st.integers(1, 20), st.binary(max_size=40)),
    max_size=12,
)


@pytest.fixture(scope="module", params=["compiled", "plain"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs with the compiled part and without it."""
    if request.param == "compiled":
        if getattr(keys, "_chain") is None:  # noqa: B009 - private to mypy too
            pytest.skip("the compiled part is not here")
        yield request.param
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "_chain", None)
        yield request.param


@pytest.fixture(scope="module", params=[GOLDEN, SHARED], ids=["golden", "shared"])
def vectors(request: pytest.FixtureRequest) -> Any:
    if not request.param.exists():
        pytest.skip(f"{request.param} is not here")
    return json.loads(request.param.read_text())


def _field_of(kind: str, value: Any) -> object:
    return bytes.fromhex(value) if kind == "bytes" else value


def _digest_of(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def test_fingerprints_agree_with_the_vectors(vectors: Any) -> None:
    assert vectors["fingerprints"]
    for vector in vectors["fingerprints"]:
        fields = [_field_of(kind, value) for kind, value in vector["fields"]]
        assert fingerprint(*fields).hex() == vector["digest"], vector


def test_layouts_agree_with_the_vectors(vectors: Any) -> None:
    num_end_keys = 0
    for layout in vectors["layouts"]:
        spans = [(length, _digest_of(digest)) for length, digest in layout["spans"]]
        pages, root = layout["pages_of_tokens"], bytes.fromhex(layout["root"])
        items = page_items(spans, layout["page_size"])
        assert items == {
            int(page): [(s, o, n, bytes.fromhex(d)) for s, o, n, d in listed]
            for page, listed in layout["page_items"].items()
        }
        made = chain(pages, items, root)
        assert [key.hex() for key in made] == layout["keys"]
        for cut in layout["end_keys"]:
            page = cut["page"]
            prev = made[page - 1] if page else root
            key = end_key(prev, pages[page], items.get(page, ()), cut["end"])
            assert key.hex() == cut["key"]
            num_end_keys += 1
    assert num_end_keys > 0


@given(
    st.lists(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.binary()
        | st.text(st.characters(exclude_categories=["Cs"]))
    )
)
def test_fingerprint_is_the_written_encoding(fields: list[object]) -> None:
    assert fingerprint(*fields) == oracle.fingerprint(*fields)


def test_fingerprint_keeps_fields_apart_and_types_together() -> None:
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint("a") != fingerprint("a", "")
    assert fingerprint(1, True, None) == fingerprint(b"1", "True", "None")


@given(SPANS, st.integers(1, 24), st.data())
@settings(max_examples=150)
def test_any_layout_is_keyed_as_the_slot_by_slot_oracle_keys_it(
    spans: list[tuple[int, bytes | None]], page_size: int, data: st.DataObject
) -> None:
    num_ids = sum(length for length, digest in spans if digest is None)
    ids = data.draw(st.lists(IDS, min_size=num_ids, max_size=num_ids))
    root = data.draw(st.binary(max_size=40))
    pages = oracle.pages_of_tokens(spans, ids, page_size)
    items = page_items(spans, page_size)
    assert items == oracle.page_items(spans, page_size)
    assert list(items) == sorted(items)
    expected = oracle.chain(pages, items, root)
    assert chain(pages, items, root) == expected
    arrays: list[Any] = [np.array(page, np.int64) for page in pages]
    assert chain(arrays, items, root) == expected


@given(SPANS, st.integers(1, 24))
def test_an_end_key_is_the_key_of_the_page_that_ends_there(
    spans: list[tuple[int, bytes | None]], page_size: int
) -> None:
    """Cutting the layout behind an item leaves a last page whose key is the end key."""
    num_ids = sum(length for length, digest in spans if digest is None)
    ids = range(7, 7 + num_ids)
    pages = oracle.pages_of_tokens(spans, ids, page_size)
    items = page_items(spans, page_size)
    keys_of_pages = chain(pages, items, ROOT)
    end = 0
    for index, (length, digest) in enumerate(spans):
        end += length
        page, slot = divmod(end, page_size)
        if digest is None or slot == 0:
            continue
        cut = spans[: index + 1]
        cut_pages = oracle.pages_of_tokens(cut, ids, page_size)
        prev = keys_of_pages[page - 1] if page else ROOT
        expected = oracle.page_key(prev, cut_pages[page], oracle.page_items(cut, page_size)[page])
        assert end_key(prev, pages[page], items[page], slot) == expected


@given(
    st.integers(1, 40),
    st.integers(1, 20),
    st.sets(st.integers(0, 40), max_size=3),
    st.integers(0, 20),
    st.integers(0, 2**32 - 1),
)
def test_long_runs_of_pages_take_the_fast_path_to_the_same_keys(
    num_pages: int, page_size: int, with_items: set[int], last_len: int, seed: int
) -> None:
    ids: Any = np.random.default_rng(seed).integers(0, 2**32, (num_pages, page_size))
    ids.flat[:: page_size + 1] %= 2
    items = {page: [PageItem(0, 0, 3, DIGEST)] for page in with_items}
    pages = ids.tolist()
    expected = oracle.chain(pages, items, ROOT)
    forms: list[Any] = [
        pages,
        tuple(map(tuple, pages)),
        ids,
        ids.astype(np.uint32),
        torch.from_numpy(ids),
    ]
    for form in forms:
        assert chain(form, items, ROOT) == expected
    pages.append(list(range(last_len)))
    assert chain(pages, items, ROOT) == oracle.chain(pages, items, ROOT)


def test_more_pages_than_one_group_are_keyed_in_order() -> None:
    pages = [[page, page + 1, 2**32 - 1 - page] for page in range(2500)]
    expected = oracle.chain(pages, {}, b"short")
    assert chain(pages, None, b"short") == expected
    assert chain(np.array(pages), None, b"short") == expected  # type: ignore[arg-type]
    ragged = [ids[: 1 + number % 3] for number, ids in enumerate(pages)]
    assert chain(ragged, None, ROOT) == oracle.chain(ragged, {}, ROOT)


def test_no_pages_have_no_keys_and_an_empty_page_has_one() -> None:
    assert chain([]) == []
    assert chain(np.empty((0, 16), np.int64)) == []  # type: ignore[arg-type]
    assert chain([[]]) == [page_key(b"", [])] == [oracle.page_key(b"", [])]
    assert chain([[]] * 40) == oracle.chain([[]] * 40, {}, b"")
    assert chain(np.empty((40, 0), np.int64)) == chain([[]] * 40)  # type: ignore[arg-type]


def test_a_key_depends_on_root_ids_items_and_where_an_item_stands() -> None:
    pages = [[1, 2], [3, 4]]
    made = [
        chain(pages),
        chain(pages, None, ROOT),
        chain([[9, 2], [3, 4]]),
        chain(pages, {0: [PageItem(2, 0, 1, DIGEST)]}),
        chain(pages, {0: [PageItem(1, 0, 1, DIGEST)]}),
        chain(pages, {0: [PageItem(2, 0, 2, DIGEST)]}),
        chain(pages, {0: [PageItem(2, 0, 1, DIGEST[:-1])]}),
    ]
    assert len({keys_of[1] for keys_of in made}) == len(made)


DTYPES = ["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i4", ">u8"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_arrays_of_any_integer_dtype_have_the_keys_of_their_lists(dtype: str) -> None:
    ids = np.arange(120).reshape(30, 4).astype(dtype)
    expected = oracle.chain(ids.tolist(), {}, ROOT)
    assert chain(ids, None, ROOT) == expected  # type: ignore[arg-type]
    assert chain(list(ids), None, ROOT) == expected
    assert chain(np.asfortranarray(ids), None, ROOT) == expected  # type: ignore[arg-type]
    strided: Any = np.repeat(ids, 2, axis=1)[:, ::2]
    assert chain(strided, None, ROOT) == expected
    assert chain([list(row) for row in ids], None, ROOT) == expected
    row: Any = ids[0]
    assert page_key(ROOT, row) == expected[0]
    item = PageItem(2, 0, 3, DIGEST)
    assert end_key(ROOT, row, [item], 5) == oracle.page_key(ROOT, ids[0, :2].tolist(), [item])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_torch_tensors_of_integer_dtypes_have_the_keys_of_their_lists(dtype: torch.dtype) -> None:
    ids: Any = torch.arange(120).reshape(30, 4).to(dtype)
    expected = oracle.chain(ids.tolist(), {}, ROOT)
    assert chain(ids, None, ROOT) == expected
    assert chain(list(ids), None, ROOT) == expected
    assert chain(ids.T.contiguous().T, None, ROOT) == expected
    assert page_key(ROOT, ids[0]) == expected[0]
    assert page_key(ROOT, list(ids[0])) == expected[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_on_the_gpu_have_the_keys_of_their_lists() -> None:
    ids: Any = torch.arange(120, device="cuda").reshape(30, 4)
    assert chain(ids, None, ROOT) == oracle.chain(ids.tolist(), {}, ROOT)


def test_other_sequences_of_ids_are_taken() -> None:
    expected = oracle.page_key(ROOT, [5, 6, 7])
    for tokens in (range(5, 8), (5, 6, 7), memoryview(bytes([5, 6, 7]))):
        assert page_key(ROOT, tokens) == expected
    assert chain([range(3)] * 20) == oracle.chain([range(3)] * 20, {}, b"")


def test_whole_number_types_of_other_libraries_serve_in_items_and_spans() -> None:
    item: Any = (np.int64(1), np.uint8(0), torch.tensor(2), DIGEST)
    assert page_key(ROOT, [1], [item]) == oracle.page_key(ROOT, [1], [(1, 0, 2, DIGEST)])
    narrow: Any = PageItem(np.uint8(200), np.uint8(0), np.uint8(100), DIGEST)  # type: ignore[arg-type]
    expected = oracle.page_key(ROOT, range(200), [(200, 0, 100, DIGEST)])
    assert end_key(ROOT, range(250), [narrow], 300) == expected
    span: Any = (np.int32(3), DIGEST)
    assert page_items([span], np.int64(2)) == {  # type: ignore[arg-type]
        0: [(0, 0, 3, DIGEST)],
        1: [(0, 2, 3, DIGEST)],
    }


def test_long_spans_of_ids_cost_nothing() -> None:
    spans: list[tuple[int, bytes | None]] = [(10**15, None), (1, DIGEST)]
    assert page_items(spans, 10) == {10**14: [PageItem(0, 0, 1, DIGEST)]}


BAD_IDS: list[tuple[Any, type[Exception], str]] = [
    (-1, ValueError, "-1"),
    (2**32, ValueError, "4294967296"),
    (2**64, ValueError, "18446744073709551616"),
    (-(2**70), ValueError, str(-(2**70))),
    (1.0, TypeError, r"1\.0"),
    ("7", TypeError, "'7'"),
    (None, TypeError, "None"),
    (True, TypeError, "True"),
    (False, TypeError, "False"),
    (np.bool_(True), TypeError, "True"),
    (np.float32(1), TypeError, "1"),
    (np.int64(-5), ValueError, "-5"),
    (torch.tensor(True), TypeError, "True"),
    (torch.tensor(1.5), TypeError, "1.5"),
    ([1], TypeError, r"\[1\]"),
]


@pytest.mark.parametrize(("bad", "error", "said"), BAD_IDS, ids=lambda value: repr(value)[:20])
def test_a_bad_id_is_named_with_its_place(bad: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"index 2 .*{said}"):
        page_key(ROOT, [4, 5, bad, 6])
    with pytest.raises(error, match=f"index 2 .*{said}"):
        page_key(ROOT, (4, 5, bad, 6))
    with pytest.raises(error, match=f"index 2 .*{said}"):
        end_key(ROOT, [4, 5, bad, 6], [], 1)
    for num_pages, number in ((1, 0), (3, 2), (40, 0), (40, 17), (40, 39), (1500, 1300)):
        for kind in (list, tuple):
            pages: list[Any] = [kind([1, 2, 0, 3]) for _ in range(num_pages)]
            pages[number] = kind([4, 5, bad, 6])
            with pytest.raises(error, match=f"index 2 of page {number} .*{said}"):
                chain(pages, None, ROOT)


@pytest.mark.parametrize("bad", [-1, 2**32, 2**40, -(2**63), 2**63 - 1])
def test_a_bad_id_in_an_array_is_named_and_never_wraps(bad: int) -> None:
    ids: Any = np.ones((40, 4), np.int64)
    ids[17, 2] = bad
    forms: list[Any] = [ids, torch.from_numpy(ids)]
    for form in forms:
        with pytest.raises(ValueError, match=f"index 2 of page 17 is {bad}, outside"):
            chain(form, None, ROOT)
        with pytest.raises(ValueError, match=f"index 2 of page 17 is {bad}, outside"):
            chain(list(form), None, ROOT)
        with pytest.raises(ValueError, match=f"index 2 is {bad}, outside"):
            page_key(ROOT, form[17])


def test_negative_ids_of_narrow_arrays_and_uint64_beyond_the_limit_are_refused() -> None:
    row: Any = np.array([1, -1], np.int8)
    with pytest.raises(ValueError, match="index 1 is -1"):
        page_key(ROOT, row)
    row = np.array([2**64 - 1, 1], np.uint64)
    with pytest.raises(ValueError, match="index 0 is 18446744073709551615"):
        page_key(ROOT, row)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bool", "complex64", "O", "U1"])
def test_numpy_arrays_that_hold_no_integers_are_refused(dtype: str) -> None:
    ids: Any = np.ones((3, 4)).astype(dtype)
    for refused in (ids, list(ids)):
        with pytest.raises(TypeError, match="ids are integers"):
            chain(refused)
    with pytest.raises(TypeError, match="ids are integers"):
        page_key(ROOT, ids[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.bool])
def test_torch_tensors_that_hold_no_integers_are_refused(dtype: torch.dtype) -> None:
    ids: Any = torch.ones(3, 4).to(dtype)
    for refused in (ids, list(ids)):
        with pytest.raises(TypeError, match=f"{dtype}; ids are integers"):
            chain(refused)
    with pytest.raises(TypeError, match="ids are integers"):
        page_key(ROOT, ids[0])
    with pytest.raises(TypeError, match="ids are integers"):
        page_key(ROOT, torch.ones(3, requires_grad=True))  # type: ignore[arg-type]


def test_arrays_of_the_wrong_shape_are_refused_with_the_shape() -> None:
    flat: Any = np.arange(6)
    with pytest.raises(ValueError, match=r"shape \(6,\); they must be 2-D"):
        chain(flat)
    with pytest.raises(ValueError, match=r"shape \(2, 3\); they must be 1-D"):
        page_key(ROOT, flat.reshape(2, 3))
    with pytest.raises(ValueError, match=r"page 1 have shape \(\)"):
        chain([[1], flat[0]])


@pytest.mark.parametrize("page", [5, None, 1.5])
def test_a_page_that_is_no_sequence_is_named(page: Any) -> None:
    for num_pages in (2, 40):
        pages: list[Any] = [[1]] * num_pages
        pages[1] = page
        with pytest.raises(TypeError, match=re.escape(f"page 1 are {page!r}")):
            chain(pages)


BAD_ITEMS: list[tuple[Any, type[Exception], str]] = [
    ((-1, 0, 1, DIGEST), ValueError, "start of item 0.* is -1"),
    ((2**32, 0, 1, DIGEST), ValueError, "start of item 0.* is 4294967296"),
    ((0, -1, 1, DIGEST), ValueError, "offset of item 0.* is -1"),
    ((0, 2**32, 2**33, DIGEST), ValueError, "offset of item 0.* is 4294967296"),
    ((0, 0, -1, DIGEST), ValueError, "length of item 0.* is -1"),
    ((0, 0, 2**32, DIGEST), ValueError, "length of item 0.* is 4294967296"),
    ((0, 0, 0, DIGEST), ValueError, "item 0.* offset 0 and length 0"),
    ((0, 3, 3, DIGEST), ValueError, "item 0.* offset 3 and length 3"),
    ((0, 4, 3, DIGEST), ValueError, "item 0.* offset 4 and length 3"),
    ((0.0, 0, 1, DIGEST), TypeError, r"start of item 0.* is 0\.0"),
    ((0, "0", 1, DIGEST), TypeError, "offset of item 0.* is '0'"),
    ((0, 0, True, DIGEST), TypeError, "length of item 0.* is True"),
    ((0, 0, 1, "digest"), TypeError, "digest of item 0.* is 'digest'"),
    ((0, 0, 1, None), TypeError, "digest of item 0.* is None"),
    ((0, 0, 1, bytearray(2)), TypeError, "digest of item 0.* is bytearray"),
    ((0, 0, 1), TypeError, "item 0.* not a PageItem"),
    (7, TypeError, "item 0.* is 7"),
]


@pytest.mark.parametrize(("item", "error", "said"), BAD_ITEMS)
def test_a_bad_item_is_named_with_its_place(item: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        page_key(ROOT, [1], [item])
    with pytest.raises(error, match=said):
        end_key(ROOT, [1], [item], 1)
    with pytest.raises(error, match=said) as caught:
        chain([[1]] * 30, {12: [item]}, ROOT)
    assert "of page 12" in str(caught.value)


@pytest.mark.parametrize(
    "second", [PageItem(0, 0, 1, b"b"), PageItem(2, 0, 1, b"b"), PageItem(4, 0, 1, b"b")]
)
def test_items_out_of_order_or_overlapping_are_refused(second: PageItem) -> None:
    items = [PageItem(2, 0, 3, b"a"), second]
    said = f"item 1.* starts at slot {second.start}, but the item before it ends at 5"
    with pytest.raises(ValueError, match=said):
        page_key(ROOT, [1, 2], items)
    with pytest.raises(ValueError, match=said):
        end_key(ROOT, [1, 2], items, 1)
    with pytest.raises(ValueError, match="item 1 of page 0 starts"):
        chain([[1, 2]], {0: items})


def test_only_an_items_slots_on_the_page_count_for_what_follows_it() -> None:
    items = [PageItem(0, 7, 9, b"a"), PageItem(2, 0, 1, b"b")]
    assert page_key(ROOT, [1], items) == oracle.page_key(ROOT, [1], items)
    with pytest.raises(ValueError, match="ends at 2"):
        page_key(ROOT, [1], [items[0], PageItem(1, 0, 1, b"b")])


def test_an_end_that_cuts_an_item_or_asks_for_too_many_ids_is_refused() -> None:
    items = [PageItem(1, 0, 2, b"a"), PageItem(5, 0, 30, b"b")]
    tokens = [1, 2, 3]
    for end, kept, num_ids in ((0, 0, 0), (1, 0, 1), (3, 1, 1), (4, 1, 2), (5, 1, 3)):
        expected = oracle.page_key(ROOT, tokens[:num_ids], items[:kept])
        assert end_key(ROOT, tokens, items, end) == expected
    with pytest.raises(ValueError, match="end 2 cuts item 0, which fills slots 1 to 3"):
        end_key(ROOT, tokens, items, 2)
    with pytest.raises(ValueError, match="end 8 cuts item 1"):
        end_key(ROOT, tokens, items, 8)
    with pytest.raises(ValueError, match=r"end 6 asks for 4 ids .*; the page has 3"):
        end_key(ROOT, tokens, items[:1], 6)
    with pytest.raises(ValueError, match="end -1 asks"):
        end_key(ROOT, tokens, items, -1)
    for end_value in (1.0, "1", None, True):
        with pytest.raises(TypeError, match=re.escape(f"end is {end_value!r}")):
            end_key(ROOT, tokens, items, end_value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("span", "error", "said"),
    [
        ((-1, None), ValueError, "length of span 1 is -1"),
        ((-1, DIGEST), ValueError, "length of span 1 is -1"),
        ((0, DIGEST), ValueError, "length of span 1 is 0"),
        ((2**32, DIGEST), ValueError, "length of span 1 is 4294967296"),
        ((1.5, None), TypeError, "length of span 1 is 1.5"),
        ((True, None), TypeError, "length of span 1 is True"),
        (("3", DIGEST), TypeError, "length of span 1 is '3'"),
        ((3, "digest"), TypeError, "digest of span 1 is 'digest'"),
        ((3, 0), TypeError, "digest of span 1 is 0"),
        ((3,), TypeError, r"span 1 is \(3,\)"),
        (3, TypeError, "span 1 is 3"),
    ],
)
def test_a_bad_span_is_named_with_its_index(span: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        page_items([(2, None), span], 4)


@pytest.mark.parametrize(
    ("page_size", "error"),
    [(0, ValueError), (-3, ValueError), (1.0, TypeError), (None, TypeError), (True, TypeError)],
)
def test_a_bad_page_size_is_named(page_size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=re.escape(f"page_size is {page_size!r}")):
        page_items([(2, None)], page_size)


@pytest.mark.parametrize("bad", ["root", None, 5, bytearray(32), memoryview(b"")])
def test_prev_and_root_must_be_bytes(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"prev is .*not bytes"):
        page_key(bad, [1])
    with pytest.raises(TypeError, match=r"prev is .*not bytes"):
        end_key(bad, [1], [], 1)
    for pages in ([], [[1]], [[1]] * 40):
        with pytest.raises(TypeError, match=r"root is .*not bytes"):
            chain(pages, None, bad)


def test_items_by_page_must_be_a_mapping() -> None:
    with pytest.raises(TypeError, match="not a mapping"):
        chain([[1]], [[PageItem(0, 0, 1, b"")]])  # type: ignore[arg-type]


class _Text(str):
    pass


@pytest.mark.parametrize(
    "bad", [object(), [1], (1,), {}, bytearray(b"a"), np.int64(1), np.float64(1), _Text("a"), 1j]
)
def test_fingerprint_refuses_other_objects_and_names_the_field(bad: object) -> None:
    with pytest.raises(TypeError, match="field 1 is "):
        fingerprint("a", bad)


def test_fingerprint_refuses_text_without_a_utf8_form() -> None:
    with pytest.raises(ValueError, match=r"field 2 is .*not UTF-8"):
        fingerprint("a", 1, "\ud800")


def test_keys_are_equal_in_fresh_processes_of_any_hash_seed() -> None:
    program = """
import sys
from mstar.engine.resources.kv.keys import chain, end_key, fingerprint, page_items
spans = [(20, None), (30, b"image"), (100, None), (5, b"sound"), (400, None)]
root = fingerprint("v1", 16, 0.1, None, True, b"salt")
items = page_items(spans, 16)
ids = iter(range(600))
pages = [[next(ids) for _ in range(4)] for _ in range(40)]
keys = chain(pages, items, root)
print(b"".join([root, *keys, end_key(keys[0], pages[3], items[3], 2)]).hex())
print("torch" in sys.modules)
"""
    answers = set()
    for seed in range(8):
        env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        answers.add(done.stdout)
    assert len(answers) == 1
    hexed, has_torch = answers.pop().split()
    assert has_torch == "False"
    assert hexed.startswith(oracle.fingerprint("v1", 16, 0.1, None, True, b"salt").hex())


def test_the_module_exports_the_fixed_names_only() -> None:
    own = {n for n, v in vars(keys).items() if getattr(v, "__module__", "") == keys.__name__}
    public = {name for name in own if not name.startswith("_")}
    assert public == {"PageItem", "fingerprint", "page_key", "end_key", "page_items", "chain"}
    assert PageItem._fields == ("start", "offset", "length", "digest")


@pytest.mark.parametrize("num_ids", [*range(70), 255, 256, 257, 4095, 4096, 4097])
def test_pages_of_every_length_are_keyed_as_written(num_ids: int) -> None:
    rng = np.random.default_rng(num_ids)
    pages = rng.integers(0, 2**32, (4, num_ids)).tolist()
    expected = oracle.chain(pages, {}, ROOT)
    same_pages: list[Any] = [pages, [tuple(page) for page in pages], np.array(pages, np.uint32)]
    for same in same_pages:
        assert chain(same, None, ROOT) == expected
    assert page_key(ROOT, pages[0]) == expected[0]


def test_wrong_id_far_down_is_named_and_what_stands_before_it_does_not_hide_it() -> None:
    pages: list[list[Any]] = [[7, 8]] * 3000
    for wrong in (-1, 2**32, 1.0, True, None, "1"):
        bad = [*pages, [7, wrong], *pages]
        with pytest.raises((TypeError, ValueError), match=r"page 3000 is") as error:
            chain(bad, None, ROOT)
        assert repr(wrong) in str(error.value)
