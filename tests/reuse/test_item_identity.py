"""Items that share a name though their KV differs, or that lose what their name stands for."""

import random
import struct
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from numpy.typing import NDArray

from mstar.engine.request import PreparedRequest, Request
from mstar.engine.resources.base import Opening
from mstar.engine.resources.kv.keys import PageItem, end_key, page_key
from mstar.engine.resources.kv.stream import StreamKeys
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spans import Span
from mstar.errors import MstarError, RequestError
from mstar.models.decoder import DecoderModel
from mstar.models.toy_items import KIND, ToyEncoder, toy_item_model
from mstar.preprocess.items import item_digest, prompt_keys
from tests.laws.harness import PAGE_SIZE, Bench, Picture, Prompt, ask, assert_same, layout, prompt
from tests.reuse.bench import Forged, evict, turn

ROOT = bytes(32)


def digest_of(content: NDArray[Any], **parameters: object) -> bytes:
    return item_digest(content, kind="image", processor=b"p", parameters=parameters, length=4)


def test_a_hundred_thousand_pictures_have_as_many_page_keys() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (100_000, 3, 4), np.uint8)
    assert len({one.tobytes() for one in pixels}) == len(pixels)
    keys = {page_key(ROOT, [1, 2], [PageItem(2, 0, 2, digest_of(one))]) for one in pixels}
    assert len(keys) == len(pixels)


def test_every_bit_of_a_digest_counts() -> None:
    """Identifiers that were cut to their last digits once let one picture answer for another."""
    digest = digest_of(np.zeros(3, np.uint8))
    flipped = [(int.from_bytes(digest) ^ 1 << bit).to_bytes(32) for bit in range(256)]
    items = [[PageItem(0, 3, 9, name)] for name in (digest, *flipped)]
    assert len({page_key(ROOT, [7], item) for item in items}) == 257
    ending = [[PageItem(0, 6, 9, name)] for name in (digest, *flipped)]
    assert len({end_key(ROOT, [7], item, 3) for item in ending}) == 257


@pytest.mark.parametrize("same", [slice(0, 31), slice(1, 32), slice(16, 32), slice(30, 32)])
def test_pictures_whose_digests_agree_in_part_share_nothing(
    reader: DecoderModel, encoder: ToyEncoder, same: slice
) -> None:
    first = random.Random(1).randbytes(32)
    second = bytearray(byte ^ 0xFF for byte in first)
    second[same] = first[same]
    bench = Bench(reader)
    turn(bench, [Forged(1, 6, digest=first), *prompt(1, 3)])
    parts: Prompt = [Forged(2, 6, digest=bytes(second)), *prompt(1, 3)]
    before = encoder.num_encoded
    answer = turn(bench, parts)
    assert (answer.num_cached_tokens, encoder.num_encoded) == (0, before + 1)
    assert_same(answer, ask(reader, parts))


@pytest.mark.parametrize("num_bytes", [0, 2, 8, 16, 31, 33])
def test_digest_of_another_length_is_refused(reader: DecoderModel, num_bytes: int) -> None:
    bench = Bench(reader)
    with pytest.raises(RequestError, match=f"a digest of {num_bytes} bytes; it must have 32"):
        bench.add("r", [Forged(1, 3, digest=bytes(num_bytes)), 5])
    assert not bench.engine.has_work


def test_each_page_of_a_picture_says_which_part_of_it_is_there() -> None:
    """Pages full of placeholders look alike wherever in a picture they are cut out."""
    digest = digest_of(np.ones(3, np.uint8))
    views = [
        PageItem(start, offset, length, digest)
        for start, offset, length in product(range(4), range(12), (12, 13))
    ]
    keys = {
        page_key(ROOT, [9] * (4 - min(4 - item.start, item.length - item.offset)), [item])
        for item in views
    }
    assert len(keys) == len(views)


@pytest.mark.parametrize("shift", range(1, 5))
def test_picture_that_moved_by_some_slots_is_computed_anew(
    reader: DecoderModel, encoder: ToyEncoder, shift: int
) -> None:
    picture = Picture(3, 3 * PAGE_SIZE)
    bench = Bench(reader)
    turn(bench, [9, picture, 9])
    parts: Prompt = [*[9] * (1 + shift), picture, 9]
    encoded = encoder.num_encoded
    answer = turn(bench, parts)
    assert answer.num_cached_tokens == 0
    assert encoder.num_encoded == encoded, "its encoding does not depend on where it stands"
    assert_same(answer, ask(reader, parts))


def test_pictures_that_change_places_within_a_page_are_another_page(reader: DecoderModel) -> None:
    """Names that were sorted within a page once made both orders one."""
    one, two = Picture(1, 2), Picture(2, 2)
    bench = Bench(reader)
    # A first picture seen before is a page cut at its end, which the later ones begin with.
    for first, second, expected in ((one, two, 0), (two, one, 0), (one, one, 2), (two, two, 2)):
        parts: Prompt = [first, second, 5]
        answer = turn(bench, parts)
        assert answer.num_cached_tokens == expected
        assert_same(answer, ask(reader, parts))
    assert turn(bench, [one, two, 5]).num_cached_tokens == PAGE_SIZE


SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 300) | st.text("ab.0", max_size=3)
    | st.binary(max_size=2) | st.floats(width=16)
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.01", max_size=3), inner)
    ),
    max_leaves=6,
)


def written(value: object) -> object:
    """A value with its type at every depth, which tells apart what ``==`` does not."""
    if isinstance(value, dict):
        return "dict", {name: written(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return "list", [written(inner) for inner in value]
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    return type(value).__name__, value


@given(VALUES, VALUES)
@example({"a": {"b": 1}}, {"a.b": 1})
@example(["x", "y"], {"0": "x", "1": "y"})
@example(None, "")
@example(None, "None")
@example([], {})
@example({}, {"a": None})
@example([], [[]])
@example([[1], [2]], [[1, 2], []])
@example(True, 1)
@example(1, 1.0)
@example(0.0, -0.0)
@example(1, "1")
@example(b"ab", "ab")
@example(["ab", "c"], ["a", "bc"])
@example({"a": 1, "b": 2}, {"b": 2, "a": 1})
def test_parameters_that_differ_at_any_depth_name_another_item(one: Any, other: Any) -> None:
    content = np.zeros(2, np.uint8)
    is_same = digest_of(content, value=one) == digest_of(content, value=other)
    assert is_same is (written(one) == written(other))


def test_equal_bytes_of_another_shape_or_type_name_another_item() -> None:
    grey = np.full((30, 100), 7, np.uint8)
    views: list[NDArray[Any]] = [
        grey,
        grey.reshape(100, 30),
        grey.T.copy(),
        grey.reshape(1, 30, 100),
        grey.reshape(30, 100, 1),
        grey.reshape(-1),
        grey.view(np.int8),
        grey.view(np.uint16),
        grey.view(np.float16),
        grey.view(np.uint32),
        grey.view(np.float32),
    ]
    digests = [digest_of(view) for view in views]
    # A transposed plain area is the reshaped one: same shape, same bytes, same picture.
    assert digests[1] == digests[2]
    assert len(set(digests)) == len(views) - 1
    bits = np.zeros(16, np.uint8)
    assert digest_of(bits) != digest_of(bits.view(np.bool_))
    assert digest_of(np.array([5], np.uint8)) != digest_of(np.array(5, np.uint8))


def test_where_the_bytes_of_a_picture_lie_makes_no_difference() -> None:
    plain = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    turned = np.ascontiguousarray(plain.transpose(2, 0, 1)).transpose(1, 2, 0)
    wide = np.repeat(plain, 2, 2)[:, :, ::2]
    others = [np.asfortranarray(plain), plain.astype(">f4"), turned, wide]
    assert {digest_of(other) for other in others} == {digest_of(plain)}


@pytest.mark.parametrize(
    "content",
    [np.array([object()]), np.array(["a"]), np.zeros(1, [("a", "u1")]), np.zeros(1, "M8[s]")],
    ids=["objects", "texts", "records", "times"],
)
def test_content_that_is_no_numbers_has_no_name(content: NDArray[Any]) -> None:
    """Two records with their fields exchanged have the same bytes and the same short type."""
    with pytest.raises(TypeError, match="no bytes of its own"):
        digest_of(content)


def test_kind_processor_slots_and_advance_are_part_of_the_name() -> None:
    content = np.zeros(3, np.uint8)
    plain: dict[str, Any] = {
        "kind": "image", "processor": b"p", "parameters": {}, "length": 4, "advance": None
    }  # fmt: skip
    changes: list[dict[str, Any]] = [
        {}, {"kind": "audio"}, {"processor": b"q"}, {"parameters": {"a": None}}, {"length": 5},
        {"advance": 4}, {"advance": 0},
    ]  # fmt: skip
    digests = {item_digest(content, **(plain | change)) for change in changes}
    assert len(digests) == len(changes)


def test_way_of_decoding_counts_only_where_it_changes_what_is_decoded() -> None:
    """Flattening on white or on black: one picture is half transparent, the other is not."""

    def flattened(pixels: NDArray[np.uint8], ground: int) -> bytes:
        alpha = pixels[..., 3:].astype(np.uint16)
        mixed = (pixels[..., :3] * alpha + ground * (255 - alpha)) // 255
        return digest_of(mixed.astype(np.uint8))

    pixels = np.random.default_rng(1).integers(0, 255, (5, 6, 4), np.uint8)
    assert flattened(pixels, 0) != flattened(pixels, 255)
    pixels[..., 3] = 255
    assert flattened(pixels, 0) == flattened(pixels, 255)


def test_ids_in_the_place_of_a_picture_are_not_the_picture(reader: DecoderModel) -> None:
    """A placeholder's id is an id of the vocabulary too."""
    picture = Picture(1, 6)
    with_picture: Prompt = [4, picture, 5, 6]
    made = layout(with_picture)
    as_ids: Prompt = made.token_ids
    assert len(as_ids) == 9
    bench = Bench(reader)
    for first, second in ((with_picture, as_ids), (as_ids, with_picture)):
        bench.engine.reset_prefix_cache()
        turn(bench, first)
        answer = turn(bench, second)
        assert answer.num_cached_tokens == 0
        assert_same(answer, ask(reader, second))


@pytest.mark.parametrize(
    ("spans", "num_inputs", "words"),
    [
        ([Span(2), Span(3, kind=KIND), Span(1)], 1, "is token ids and has an item's fields"),
        ([Span(2), Span(3, is_whole=True), Span(1)], 1, "is token ids and has an item's fields"),
        ([Span(6)], 1, "0 items and 1 inputs"),
        ([], 1, "the layout has 0 slots"),
        ([Span(2), Span(3, bytes(32), kind=KIND), Span(1)], 0, "1 items and 0 inputs"),
        ([Span(2), Span(3, bytes(32), kind="sound"), Span(1)], 1, "item of kind 'sound'"),
    ],
)
def test_item_without_its_identity_is_refused_and_not_keyed_as_text(
    reader: DecoderModel, spans: list[Span], num_inputs: int, words: str
) -> None:
    bench = Bench(reader)
    inputs = layout([Picture(1, 3)]).inputs * num_inputs
    root = bench.engine.root
    assert root is not None
    ids = prompt(1, 6)
    with pytest.raises(MstarError, match=words):
        bench.engine.add_request(
            PreparedRequest(
                request_id="r", token_ids=ids, params=SamplingParams(), root=root,
                page_keys=prompt_keys(ids, (), PAGE_SIZE, root), spans=spans, inputs=inputs,
            )
        )  # fmt: skip
    assert not bench.engine.has_work
    # The next request is served, and finds nothing of the refused one.
    answer = turn(bench, ids)
    assert (answer.num_cached_tokens, answer.error) == (0, None)


def test_keys_that_are_stored_are_those_that_are_looked_up() -> None:
    """One side made the keys of the prompt, the engine makes those of what it fills."""
    one, two = bytes(31) + b"1", bytes(31) + b"2"
    for before, length, between in product(range(5), (1, 3, 4, 13), (0, 1, 5)):
        spans = [Span(before), Span(length, one), Span(between), Span(2, two), Span(3)]
        spans = [span for span in spans if span.length]
        ids = list(range(2, 2 + sum(span.length for span in spans)))
        given_keys = prompt_keys(ids, spans, PAGE_SIZE, ROOT)
        opening = Opening(
            request_id="r", tokens=ids, num_prompt_tokens=len(ids), max_len=99, root=ROOT,
            spans=spans,
        )  # fmt: skip
        own = StreamKeys(opening, PAGE_SIZE)
        assert own.first(len(ids) // PAGE_SIZE) == given_keys[: len(ids) // PAGE_SIZE]
        # A cut's name, made from the page's content, is that of a prompt which ends there.
        for page in range(len(given_keys)):
            for end in own.ends(page):
                stop = page * PAGE_SIZE + end
                ended = prompt_keys(ids[:stop], cut(spans, stop), PAGE_SIZE, ROOT)
                assert own.end_key(page, end) == ended[page]


def cut(spans: Sequence[Span], stop: int) -> list[Span]:
    kept = []
    for span in spans:
        if stop > 0:
            kept.append(span if span.length <= stop else Span(stop))
        stop -= span.length
    return kept


@pytest.mark.parametrize("is_whole", [False, True], ids=["causal", "whole"])
def test_hit_inside_a_picture_gets_on_while_others_fill_the_encoder_cache(
    reader: DecoderModel, is_whole: bool
) -> None:
    """Whoever waits in the queue must not keep the room that the first in it needs."""
    picture = Picture(5, 11, is_whole)
    first: Prompt = [*prompt(6, 2), picture, *prompt(7, 2)]
    others: list[Prompt] = [[Picture(20 + n, 11, is_whole), 9, n] for n in range(3)]
    asked: Prompt = [*prompt(6, 2), picture, *prompt(8, 2)]
    bench = Bench(reader, encoder_cache_tokens=11, max_num_batched_tokens=16)
    turn(bench, first, max_tokens=1)
    # Of the picture's pages only the full ones are left, and its encoding is gone.
    evict(bench, 1)
    turn(bench, others[0], max_tokens=1)
    for number, parts in enumerate(others):
        bench.add(f"before {number}", [*parts, 7], max_tokens=4)
    bench.add("asked", asked)
    for number, parts in enumerate(others):
        bench.add(f"after {number}", [*parts, 8], max_tokens=4)
    answers = bench.drain(max_steps=100)
    assert answers["asked"].num_cached_tokens == 12
    assert_same(answers["asked"], ask(reader, asked))
    for number, parts in enumerate(others):
        assert_same(answers[f"after {number}"], ask(reader, [*parts, 8], max_tokens=4))


def test_picture_that_comes_again_keeps_its_encoding_until_the_last_time(
    reader: DecoderModel,
) -> None:
    """Of two places with one name the first took the encoding along when it was computed."""
    one, two = Picture(4, 8, True), Picture(2, 8, True)
    prompts: list[Prompt] = [
        [*prompt(0, 4), one, one, *prompt(1, 3), two, 5],
        [*prompt(2, 4), one, two, one, *prompt(1, 3), two, one, 5],
    ]
    for parts in prompts:
        bench = Bench(reader, encoder_cache_tokens=9, max_num_batched_tokens=16)
        answer = turn(bench, parts)
        assert answer.error is None
        assert_same(answer, ask(reader, parts))


def test_sixty_four_pictures_side_by_side_get_their_own_answers(reader: DecoderModel) -> None:
    prompts: list[Prompt] = [[*prompt(1, 4), Picture(n, 5), *prompt(2, 3)] for n in range(64)]
    expected = [ask(reader, parts, max_tokens=3) for parts in prompts]
    assert len({tuple(answer.logits[0].tolist()) for answer in expected}) == 64
    bench = Bench(reader, max_num_seqs=64, num_pages=400, max_num_batched_tokens=96)
    for number, parts in enumerate(prompts):
        bench.add(str(number), parts, max_tokens=3)
    answers = bench.drain()
    for number, alone in enumerate(expected):
        assert_same(answers[str(number)], alone)
    # The words before the pictures were computed once.
    assert sum(answer.num_cached_tokens for answer in answers.values()) == 63 * 4


def test_output_of_an_encoder_is_named_by_weights_tenant_kind_and_digest() -> None:
    """Encoder weights that were loaded anew once met outputs of the old ones."""
    models = [toy_item_model(seed) for seed in (0, 1)]
    roots = [Bench(model).engine.root for model in models]
    assert roots[0] != roots[1]

    def name(root: bytes | None, kind: str, digest: bytes) -> bytes:
        prepared = PreparedRequest(
            request_id="r", token_ids=[0] * 3, params=SamplingParams(), root=root,
            spans=[Span(3, digest, kind=kind)], inputs=[{}],
        )  # fmt: skip
        cursor = models[0].first_walk(prepared)
        component = models[0].component_of(cursor.name)
        made = Request(prepared, cursor, component, max_len=9, arrival=0)
        return made.items[0].name

    kinds, digests = ("image", "audio"), (bytes(32), bytes(31) + b"1")
    names = [name(*fields) for fields in product(roots, kinds, digests)]
    assert all(one != other for one, other in combinations(names, 2))
