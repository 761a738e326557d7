"""Media in prompts, with a processor whose slots and ids are easy to foresee."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image
from transformers import PreTrainedTokenizerFast

from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spans import Span
from mstar.errors import ContextLengthError, RequestError
from mstar.preprocess.expansion import Expander, weave
from mstar.preprocess.items import PromptItem, array_of, item_digest, prompt_keys
from mstar.preprocess.media.content import source_of
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.media.sources import data_url
from mstar.preprocess.media.types import AudioMedia, ImageMedia, Media, VideoMedia
from mstar.preprocess.prompt import PromptPreparer, PromptRequest, item_tokens, request_root
from mstar.preprocess.tokenizer import TextTokenizer
from tests.preprocess.media.test_audio import encode, tone

ROOT = bytes(32)
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}[{{ part.type }}]{% endif %}"
    "{% endfor %}</s>{% endfor %}"
)


class Plain:
    """One slot for each row of an image, ten samples or a frame, between ids 1 and 2."""

    kinds = frozenset({"image", "audio", "video"})
    placeholder: Mapping[str, str] = {kind: f"[{kind}]" for kind in sorted(kinds)}
    fingerprint = b"plain"
    max_items: int | None = None
    rate = 100

    def __init__(self) -> None:
        self.seen: list[Media] = []

    def expand(self, media: Media) -> Sequence[str | list[int] | PromptItem]:
        self.seen.append(media)
        match media:
            case ImageMedia():
                content: npt.NDArray[Any] = media.pixels
                length = content.shape[0]
            case AudioMedia():
                content, length = media.samples, max(1, len(media.samples) // 10)
            case VideoMedia():
                content, length = np.stack(media.frames), len(media.frames)
        digest = item_digest(
            content, kind=media.kind, processor=b"plain", parameters={}, length=length
        )
        item = PromptItem(Span(length, digest, kind=media.kind), {"x": array_of(content)})
        return [[1], item, [2]]


@pytest.fixture
def tokenizer(tokenizers: dict[str, TextTokenizer]) -> TextTokenizer:
    return with_template(tokenizers["byte_level"], TEMPLATE)


def with_template(tokenizer: TextTokenizer, template: str) -> TextTokenizer:
    backend = tokenizer._backend
    renderer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template)
    return TextTokenizer(backend, renderer)


def preparer(tokenizer: TextTokenizer, processor: object, **options: Any) -> PromptPreparer:
    return PromptPreparer(
        tokenizer, 256, 4, ROOT, tokenizer.vocab_size, processor=processor, **options
    )


def asked(*content: object, **fields: Any) -> PromptRequest:
    values: dict[str, Any] = {"request_id": "r", "params": SamplingParams(max_tokens=4)}
    messages = [{"role": "user", "content": list(content)}]
    return PromptRequest(**values | {"messages": messages} | fields)


def png(rows: int, shade: int = 9, width: int = 2) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, rows), (shade, 0, 0)).save(out, "PNG")
    return out.getvalue()


def image(rows: int, shade: int = 9) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(png(rows, shade), "image/png")}}


def test_items_stand_where_their_parts_stood(tokenizer: TextTokenizer) -> None:
    prepared = preparer(tokenizer, Plain()).prepare(asked("ab", image(3), "c", image(1, 7), "d"))
    encode_text = tokenizer.encode
    before, middle, after = (encode_text(text, False) for text in ("<s>user:ab", "c", "d</s>"))
    assert [(s.length, s.kind) for s in prepared.spans] == [
        (len(before) + 1, ""),
        (3, "image"),
        (len(middle) + 2, ""),
        (1, "image"),
        (len(after) + 1, ""),
    ]
    expected = [*before, 1, 0, 0, 0, 2, *middle, 1, 0, 2, *after]
    assert prepared.token_ids == expected
    assert len(prepared.inputs) == 2
    assert prepared.inputs[0]["x"].shape == (3, 2, 3)
    root = request_root(ROOT, None)
    assert root is not None
    assert prepared.page_keys == prompt_keys(expected, prepared.spans, 4, root)
    assert item_tokens(prepared) == {"image": 4}


def test_salts_keep_images_apart(tokenizer: TextTokenizer) -> None:
    maker = preparer(tokenizer, Plain())
    keys = [maker.prepare(asked(image(3), cache_salt=salt)).page_keys for salt in ("a", "b", "a")]
    assert keys[0] == keys[2]
    assert keys[0] != keys[1]


def test_texts_of_an_item_join_the_texts_around_it(tokenizer: TextTokenizer) -> None:
    """As by themselves, "a" and "b" are two ids; together they are one."""
    item = PromptItem(Span(1, bytes(32), kind="image"), {})
    parts = weave(
        "a[image]b",
        {"image": "[image]"},
        ["image"],
        [["b", item, "a"]],
        lambda t: tokenizer.encode(t, False),
    )
    (joined,) = tokenizer.encode("ab", False)
    assert parts == [[joined], item, [joined]]


@given(
    kinds=st.lists(st.sampled_from(["image", "audio"]), max_size=6),
    texts=st.lists(st.text("abc []", max_size=4), min_size=7, max_size=7),
)
def test_every_placeholder_becomes_the_next_item_of_its_kind(
    kinds: list[str], texts: list[str]
) -> None:
    places = {"image": "<I>", "audio": "<A>"}
    rendered = "".join(
        text + (places[kinds[at]] if at < len(kinds) else "") for at, text in enumerate(texts)
    )
    expanded: list[list[list[int]]] = [[[1000 + at]] for at in range(len(kinds))]
    parts = weave(rendered, places, kinds, expanded, lambda text: [ord(c) for c in text])
    joined = [token for part in parts if isinstance(part, list) for token in part]
    expected: list[int] = []
    for at, text in enumerate(texts):
        expected += [ord(c) for c in text] + ([1000 + at] if at < len(kinds) else [])
    assert joined == expected
    assert len(parts) <= 1


@pytest.mark.parametrize(("text", "kinds"), [("a", ["image"]), ("[image][image]", ["image"])])
def test_a_template_that_drops_or_makes_up_images_is_named(text: str, kinds: list[str]) -> None:
    with pytest.raises(
        RequestError, match="1 of image, and the model's chat template has"
    ) as caught:
        weave(text, {"image": "[image]"}, kinds, [[[1]] for _ in kinds], lambda _: [0])
    assert caught.value.code == "chat_template_error"


def _called(arguments: object) -> dict[str, Any]:
    """Return a message that calls a tool."""
    return {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}


@pytest.mark.parametrize(
    "request_fields",
    [
        {"messages": [{"role": "user", "content": "what is [image]?"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "[audio]"}]}]},
        {"messages": [{"role": "user", "content": ["[im", "age]"]}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": t} for t in ("[im", "age]")]}
            ]
        },
        {
            "messages": [{"role": "user", "content": "x"}],
            "template_kwargs": {"documents": [{"title": "[video]"}]},
        },
        {
            "messages": [{"role": "user", "content": "x"}],
            "template_kwargs": {"documents": [{"[video]": "title"}]},
        },
        {"messages": [_called(r'{"a": "\u005bimage]"}')]},
        {"messages": [_called({"[image]": 1})]},
        {"messages": None, "text": "see [image]"},
    ],
)
def test_placeholders_that_were_typed_are_refused(
    tokenizer: TextTokenizer, request_fields: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match=r"'\[(image|audio|video)\]'") as caught:
        preparer(tokenizer, Plain()).prepare(asked(**request_fields))
    assert caught.value.code == "placeholder_typed"


def test_depth_of_what_was_typed_is_no_failure(tokenizer: TextTokenizer) -> None:
    maker = preparer(tokenizer, Plain())
    nested: object = "[image]"
    for _ in range(5000):
        nested = [nested]
    user = {"role": "user", "content": "x"}
    with pytest.raises(RequestError, match=r"'\[image\]'"):
        maker.prepare(asked(messages=[user], template_kwargs={"documents": nested}))
    called = _called("[" * 100_000) | {"content": "y"}
    assert maker.prepare(asked(messages=[called, user])).token_ids


def test_control_tokens_inside_placeholders_are_refused_as_text_and_as_ids(
    tokenizer: TextTokenizer,
) -> None:
    class Framed(Plain):
        placeholder: Mapping[str, str] = {"image": "<s><think>"}

    maker = preparer(tokenizer, Framed())
    think = tokenizer.control_tokens["<think>"]
    for fields in ({"text": "a<think>"}, {"token_ids": [5, think]}):
        with pytest.raises(RequestError, match="'<think>'"):
            maker.prepare(asked(messages=None, **fields))
    assert maker.prepare(asked(messages=None, token_ids=[5, think + 1])).token_ids


def test_limits_of_the_model_are_named(tokenizer: TextTokenizer) -> None:
    class Two(Plain):
        max_items = 2

    maker = preparer(tokenizer, Two())
    assert maker.prepare(asked(image(1), image(1)))
    with pytest.raises(RequestError, match=r"have 3 images.*at most 2 in one prompt") as caught:
        maker.prepare(asked(image(1), image(1), image(1)))
    assert caught.value.code == "too_many_items"


def test_a_model_without_media_refuses_them_before_reading_them(tokenizer: TextTokenizer) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}
    with pytest.raises(RequestError, match="'image_url'; this model takes text parts only"):
        preparer(tokenizer, None).prepare(asked(part))


def test_more_than_a_request_may_have_is_refused_at_the_part_that_is_too_much(
    tokenizer: TextTokenizer,
) -> None:
    maker = preparer(tokenizer, Plain(), limits=MediaLimits(request_pixels=10))
    with pytest.raises(RequestError, match="images up to here have 12 pixels") as caught:
        maker.prepare(asked(image(2, 1), image(2, 2), image(2, 3)))
    assert caught.value.param == "messages[0].content[2].image_url.url"
    sound = {"type": "audio", "audio": encode(tone(8_000, 0.4), 8_000, "WAV")}
    other = {"type": "audio", "audio": encode(tone(8_000, 0.4, 500), 8_000, "WAV")}
    maker = preparer(tokenizer, Plain(), limits=MediaLimits(request_audio_seconds=0.5))
    with pytest.raises(RequestError, match=r"recordings up to here are 0.8 s"):
        maker.prepare(asked(sound, other))


def test_images_that_leave_no_room_are_too_long(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ContextLengthError, match="tokens; the context holds 256"):
        preparer(tokenizer, Plain()).prepare(asked(image(300)))


def test_what_was_seen_lately_is_not_decoded_again(tokenizer: TextTokenizer) -> None:
    processor = Plain()
    maker = preparer(tokenizer, processor)
    first = maker.prepare(asked("a", image(3)))
    again = maker.prepare(asked("b", image(3), image(3, 8)))
    assert len(processor.seen) == 2
    assert first.inputs[0] == again.inputs[0]
    assert first.token_ids != again.token_ids


def test_what_another_tenant_sent_is_decoded_all_the_same(tokenizer: TextTokenizer) -> None:
    """Else it shows by the time that somebody else has sent it."""
    processor = Plain()
    maker = preparer(tokenizer, processor)
    for number, salt in enumerate(("victim", "spy", None), 1):
        for text in "ab":
            maker.prepare(replace(asked(text, image(3)), cache_salt=salt))
            assert len(processor.seen) == number


def test_memory_of_seen_media_is_bounded() -> None:
    processor = Plain()
    # Two images of three rows fit: 18 bytes of pixels and two runs of one id each.
    expander = Expander(processor, MediaLimits(), memory_nbytes=70)
    sources = [source_of(image(3, shade), "x") for shade in (1, 2, 3)]
    for source in sources:
        expander.expand([source])
    expander.expand([sources[2]])
    expander.expand([sources[1]])
    assert len(processor.seen) == 3
    expander.expand([sources[0]])
    assert len(processor.seen) == 4


PIXELS = np.full((3, 2, 3), (9, 0, 0), np.uint8)


@pytest.mark.parametrize(
    "part",
    [
        image(3),
        {"type": "image_url", "image_url": data_url(png(3), "image/png")},
        {"type": "input_image", "image_url": data_url(png(3), "image/png")},
        {"type": "image", "image": png(3)},
        {"type": "image", "image": PIXELS},
        {"type": "image", "image": Image.fromarray(PIXELS)},
        {"type": "image", "image": {"url": data_url(png(3), "image/png"), "detail": "high"}},
    ],
)
def test_an_image_is_the_same_item_however_it_is_written(
    tokenizer: TextTokenizer, part: dict[str, Any]
) -> None:
    usual = preparer(tokenizer, Plain()).prepare(asked(image(3)))
    assert preparer(tokenizer, Plain()).prepare(asked(part)).page_keys == usual.page_keys


def test_detail_reaches_the_processor(tokenizer: TextTokenizer) -> None:
    processor = Plain()
    url = data_url(png(3), "image/png")
    for part in (
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "input_image", "image_url": url, "detail": "high"},
        image(3),
    ):
        preparer(tokenizer, processor).prepare(asked(part))
    assert [getattr(media, "detail", "") for media in processor.seen] == ["low", "high", None]
    with pytest.raises(RequestError, match="detail is 'huge'"):
        preparer(tokenizer, processor).prepare(
            asked({"type": "image_url", "image_url": {"url": url, "detail": "huge"}})
        )


def test_recordings_come_at_the_models_rate_however_they_are_written(
    tokenizer: TextTokenizer,
) -> None:
    processor = Plain()
    samples = tone(8_000, 1.0)
    content = encode(samples, 8_000, "WAV", "FLOAT")
    audio = {"data": data_url(content, "x").partition(",")[2], "format": "wav"}
    parts = [
        {"type": "input_audio", "input_audio": audio},
        {"type": "audio_url", "audio_url": {"url": data_url(content, "audio/wav")}},
        {"type": "audio", "audio": content},
        {"type": "audio", "audio": samples, "rate": 8_000},
    ]
    prepared = preparer(tokenizer, processor).prepare(asked(*parts))
    assert {span.length for span in prepared.spans if span.digest} == {10}
    found = [media for media in processor.seen if isinstance(media, AudioMedia)]
    assert [(len(media.samples), media.rate) for media in found] == [(100, 100), (100, 100)]


def test_films_are_frames_or_animations(tokenizer: TextTokenizer) -> None:
    processor = Plain()
    out = io.BytesIO()
    shades = [Image.new("RGB", (4, 4), (shade, 0, 0)) for shade in (10, 200)]
    shades[0].save(out, "GIF", save_all=True, append_images=shades[1:], duration=250)
    frames = [png(4, shade, 4) for shade in (10, 200)]
    joined = ",".join(data_url(frame, "x").partition(",")[2] for frame in frames)
    parts = [
        {"type": "video_url", "video_url": {"url": data_url(out.getvalue(), "image/gif")}},
        {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{joined}"}},
        {"type": "video", "video": [data_url(f, "image/png") for f in frames], "fps": 8},
        {"type": "video", "video": frames},
    ]
    preparer(tokenizer, processor).prepare(asked(*parts))
    found = [media for media in processor.seen if isinstance(media, VideoMedia)]
    # The last is the second again, and not decoded.
    assert [media.fps for media in found] == [4.0, 2.0, 8.0]
    for media in found:
        assert [int(frame[0, 0, 0]) for frame in media.frames] == [10, 200]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "has no image_url"),
        ({"type": "image_url", "image_url": {"detail": "low"}}, "must be a string"),
        ({"type": "image_url", "image_url": 5}, "must be a string"),
        ({"type": "image", "image": np.zeros((2, 2), np.uint8)}, r"uint8 \[height, width, 3\]"),
        ({"type": "input_audio", "input_audio": {"data": "!!"}}, "not valid base64"),
        ({"type": "input_audio", "input_audio": {}}, "must be a string"),
        ({"type": "audio", "audio": np.zeros(5, np.float32)}, "samples a second as rate"),
        ({"type": "audio", "audio": np.zeros((5, 2), np.float32), "rate": 8000}, "shape"),
        ({"type": "audio", "audio": np.zeros(5, np.int16), "rate": 8000}, "divide integers by"),
        ({"type": "audio", "audio": np.array(["a"]), "rate": 8000}, "array of <U1"),
        ({"type": "image", "image": Image.new("I", (2, 2))}, "integers of 32 bits"),
        ({"type": "video", "video": []}, "has no frames"),
        ({"type": "video", "video": [png(1)], "fps": 0}, "fps is 0"),
        ({"type": "video", "video": [png(1)], "fps": True}, "fps is True"),
        ({"type": "video", "video": [png(1)], "fps": 1e-30}, "from 0.001 to 1000"),
        ({"type": "video", "video": [png(1)], "fps": 10**400}, "from 0.001 to 1000"),
        ({"type": "video", "video": [png(1), png(2)]}, "must have one size"),
        (
            {"type": "video", "video": b"\0\0\0\x20ftypisom" + bytes(99)},
            "bytes of MP4|is MP4",
        ),
        ({"type": "video_url", "video_url": "https://x/y.mp4"}, "fetches nothing"),
        ({"type": "smell"}, "takes text, audio, image and video parts only"),
        ({"type": ["image"]}, "parts only"),
        (7, "parts only"),
    ],
)
def test_parts_of_another_form_are_refused(
    tokenizer: TextTokenizer, part: object, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        preparer(tokenizer, Plain()).prepare(asked(part))
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages[0].content[0]")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("a:/,;=[image]data", max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
_NAMES = st.sampled_from(
    ["type", "text", "image_url", "input_audio", "video", "url", "data", "detail", "fps", "rate"]
)
_VALUES = _JSON | st.sampled_from(
    (
        *("text", "image_url", "input_audio", "audio_url", "video", "video_url", "input_image"),
        *(data_url(png(1), "image/png"), "data:video/jpeg;base64,AA==,AA==", "AAAA"),
    )
)
_PARTS = st.dictionaries(_NAMES, _VALUES | st.dictionaries(_NAMES, _VALUES, max_size=3), max_size=4)


@settings(max_examples=200, deadline=None)
@given(content=st.lists(_PARTS | _JSON, max_size=3) | _JSON)
def test_any_content_is_prepared_or_refused_with_the_field(
    tokenizers: dict[str, TextTokenizer], content: object
) -> None:
    maker = preparer(with_template(tokenizers["byte_level"], TEMPLATE), Plain())
    try:
        prepared = maker.prepare(asked(messages=[{"role": "user", "content": content}]))
    except RequestError as error:
        found = error
    else:
        assert len(prepared.token_ids) == sum(span.length for span in prepared.spans) or (
            not prepared.spans
        )
        return
    assert found.param is not None
    assert len(found.message) < 500
