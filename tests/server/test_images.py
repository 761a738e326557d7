"""Images in chats, and images that are made, over a real socket with a tiny Janus."""

import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import openai
import psutil
import pytest
from openai import OpenAI
from PIL import Image

from mstar.preprocess.media.sources import data_url
from tests.models import janus_folder
from tests.server.processes import ServerProcess, call, error_of, user

CHAT = "/v1/chat/completions"
GENERATIONS = "/v1/images/generations"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("janus")
    janus_folder.save(folder)
    running = ServerProcess(folder, "--num-pages", "256", "--max-image-pixels", "1000000")
    try:
        yield running.wait_ready()
    finally:
        status = running.end()
    assert status == 0, running.log


def png(seed: int, size: tuple[int, int] = (20, 30)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def image_part(content: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content, kind)}}


def asking(*parts: object) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def ask(client: OpenAI, *parts: object, **options: Any) -> Any:
    settings: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0} | options
    return client.chat.completions.create(messages=asking(*parts), **settings)


def test_image_decides_the_answer_and_counts_in_the_usage(client: OpenAI) -> None:
    answers = [ask(client, image_part(png(seed)), text_part("What?")) for seed in (1, 2)]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] != texts[1]
    usage = answers[0].usage
    details = usage.prompt_tokens_details.model_dump()
    assert details["image_tokens"] == janus_folder.SLOTS
    assert usage.prompt_tokens > janus_folder.SLOTS
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_second_question_about_an_image_reuses_it(client: OpenAI) -> None:
    picture = image_part(png(3))
    first = ask(client, picture, text_part("A" * 40))
    again = ask(client, picture, text_part("A" * 40))
    assert first.choices[0].message.content == again.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > janus_folder.SLOTS
    other = ask(client, image_part(png(4)), text_part("A" * 40))
    assert other.usage.prompt_tokens_details.cached_tokens < janus_folder.SLOTS


def test_another_salt_reuses_nothing(client: OpenAI) -> None:
    picture = image_part(png(5))
    for salt, is_reused in (("a", False), ("b", False), ("a", True)):
        answer = ask(client, picture, text_part("B" * 40), extra_body={"cache_salt": salt})
        assert (answer.usage.prompt_tokens_details.cached_tokens > 0) == is_reused


def test_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    parts = (text_part("Look: "), image_part(png(6)), text_part(" Well?"))
    whole = ask(client, *parts)
    chunks = list(ask(client, *parts, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    details = chunks[-1].usage.prompt_tokens_details.model_dump()
    assert details["image_tokens"] == janus_folder.SLOTS


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": data_url(png(7), "image/png")},
        {"type": "input_image", "image_url": data_url(png(7), "image/png"), "detail": "low"},
        {"type": "image", "image": data_url(png(7), "image/png")},
    ],
)
def test_images_may_be_written_in_every_usual_way(client: OpenAI, part: dict[str, Any]) -> None:
    usual = ask(client, image_part(png(7)), text_part("?"))
    assert ask(client, part, text_part("?")).choices[0].message.content == (
        usual.choices[0].message.content
    )


def bomb() -> bytes:
    """A PNG of 64 million pixels in a few kilobytes."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    head = struct.pack(">IIBBBBB", 8_000, 8_000, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1001 * 8_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


BAD_IMAGES = {
    "undecodable": (image_part(b"no image at all"), "invalid_image", "none of PNG"),
    "empty": (image_part(b""), "invalid_image", "empty"),
    "truncated": (image_part(png(1)[:-200]), "invalid_image", "broken or cut off"),
    "huge": (image_part(png(1, (1, 1_000_001))), "media_too_large", "at most 65536"),
    "bomb": (image_part(bomb()), "media_too_large", "64000000 pixels"),
    "address": (
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
        "unsupported_url",
        "fetches nothing",
    ),
    "path": (
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        "unsupported_url",
        "opens no files",
    ),
    "base64": (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@@"}},
        "invalid_base64",
        "not valid base64",
    ),
    "missing": ({"type": "image_url"}, "invalid_value", "has no image_url"),
    "audio": (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        "unsupported_content",
        "takes text and image parts only",
    ),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_bad_images_are_named_with_their_part(server: ServerProcess, name: str) -> None:
    part, code, message = BAD_IMAGES[name]
    body = {"messages": asking(text_part("Look:"), part)}
    status, error = error_of(call(server, "POST", CHAT, body))
    assert (status, error["code"]) == (400, code)
    assert error["param"].startswith("messages[0].content[1]")
    assert message in error["message"]
    assert len(json.dumps(error)) < 1000


def test_a_bomb_leaves_the_worker_as_small_as_it_was(server: ServerProcess) -> None:
    worker = server.child("worker")
    body = {"messages": asking(image_part(bomb()))}
    call(server, "POST", CHAT, body)
    before = worker.memory_info().rss
    for _ in range(3):
        assert call(server, "POST", CHAT, body)[0] == 400
    assert worker.memory_info().rss - before < 8 * 2**20
    assert psutil.pid_exists(worker.pid)


@pytest.mark.parametrize(
    "messages",
    [
        user("What is <image_placeholder>?"),
        asking(text_part("<image_"), text_part("placeholder>")),
        [{"role": "user", "name": "<image_placeholder>", "content": "x"}],
    ],
)
def test_placeholders_that_somebody_typed_are_refused_by_name(
    server: ServerProcess, messages: list[Any]
) -> None:
    status, error = error_of(call(server, "POST", CHAT, {"messages": messages}))
    assert (status, error["code"]) == (400, "placeholder_typed")
    assert "'<image_placeholder>'" in error["message"]
    prompt = {"prompt": "a <image_placeholder>"}
    status, error = error_of(call(server, "POST", "/v1/completions", prompt))
    assert (status, error["code"]) == (400, "placeholder_typed")
    ids = {"prompt": [7, janus_folder.HOLE]}
    status, error = error_of(call(server, "POST", "/v1/completions", ids))
    assert (status, error["code"]) == (400, "placeholder_typed")


def test_log_has_no_image(server: ServerProcess, client: OpenAI) -> None:
    content = png(8, (64, 64))
    ask(client, image_part(content))
    encoded = base64.b64encode(content).decode()
    assert encoded[100:200] not in server.log


def test_models_say_what_they_take_and_make(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.model_dump()["architecture"] == {
        "input_modalities": ["text", "image"],
        "output_modalities": ["text", "image"],
    }


def pixels_of(encoded: str | None) -> npt.NDArray[np.uint8]:
    assert encoded is not None
    image = Image.open(io.BytesIO(base64.b64decode(encoded, validate=True)))
    assert image.format == "PNG"
    return np.asarray(image)


def generate(client: OpenAI, **options: Any) -> Any:
    settings: dict[str, Any] = {"model": "tiny", "prompt": "a house", "extra_body": {"seed": 1}}
    return client.images.generate(**settings | options)


def test_images_are_made_in_openais_shape(client: OpenAI) -> None:
    answer = generate(client, n=2)
    images = [pixels_of(one.b64_json) for one in answer.data]
    assert [image.shape for image in images] == [(8, 8, 3), (8, 8, 3)]
    assert (images[0] != images[1]).any()
    usage = answer.usage
    assert usage.output_tokens == 2 * len(images[0].reshape(-1, 3)) // 4
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    again = generate(client, n=1)
    np.testing.assert_array_equal(pixels_of(again.data[0].b64_json), images[0])


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"size": "512x512"}, "size", "size is 512x512; this model makes images of 8x8 pixels"),
        ({"size": "big"}, "size", "write width and height"),
        ({"n": 0}, "n", "it must be 1 to 10"),
        ({"n": 11}, "n", "it must be 1 to 10"),
        ({"response_format": "url"}, "response_format", "must be one of b64_json"),
        ({"output_format": "webp"}, "output_format", "must be one of png"),
        ({"quality": "hd"}, "quality", "not supported"),
        ({"stream": True}, "stream", "not supported"),
        ({"negative_prompt": "blue"}, "negative_prompt", "not supported"),
        ({"sizes": "8x8"}, "sizes", "did you mean 'size'"),
        ({"prompt": " "}, "prompt", "say what is to be seen"),
        ({"prompt": "<image_placeholder>"}, "prompt", "cannot be typed"),
        ({"prompt": 5}, "prompt", "Expected `str`"),
        ({"temperature": -1}, "temperature", "temperature"),
    ],
)
def test_wrong_wishes_for_images_are_refused(
    server: ServerProcess, fields: dict[str, Any], param: str, message: str
) -> None:
    status, error = error_of(call(server, "POST", GENERATIONS, {"prompt": "x"} | fields))
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


def test_unknown_models_are_a_404_here_too(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        generate(client, model="other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body", "ability"),
    [
        ("/v1/audio/speech", {"input": "hi", "voice": "x"}, "does not speak"),
        (CHAT, {"messages": user("x"), "modalities": ["text", "audio"]}, "that speaks"),
    ],
)
def test_what_the_model_cannot_do_is_said_with_what_can(
    server: ServerProcess, path: str, body: dict[str, Any], ability: str
) -> None:
    status, error = error_of(call(server, "POST", path, body))
    assert (status, error["code"]) == (400, "capability_missing")
    assert ability in error["message"]


def test_transcriptions_need_a_model_that_listens(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="writes down no speech") as caught:
        client.audio.transcriptions.create(model="tiny", file=("x.wav", b"RIFF", "audio/wav"))
    assert caught.value.code == "capability_missing"
