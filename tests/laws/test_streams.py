"""Streamed = not streamed, and several processes = one, for whole checkpoints of families."""

import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from PIL import Image

from mstar import Engine, SamplingParams
from mstar.engine.resources.base import Deployment
from mstar.library import Completion
from mstar.preprocess.media.sources import data_url
from tests.laws.families import PICTURES, TEXTS, family_of
from tests.models.vision_families import picture
from tests.server.processes import ServerProcess

SERVED = ("smolvlm", "qwen2.5-vl")
"""Two families whose pictures are of one size, and of any."""
NUM_TOKENS = 16
Part = str | Image.Image
CHATS: tuple[tuple[Part, ...], ...] = (
    ("Say it",),
    (picture(1, 42, 42), "What is it"),
    ("First ", picture(2, 30, 50), " then ", picture(1, 42, 42), " and now?"),
    (picture(1, 42, 42), "What else"),
)


def engine_of(name: str) -> Engine:
    folder = family_of(name).folder
    assert folder is not None
    return Engine(str(folder), dtype="float32", deployment=Deployment(num_pages=256))


def params_of(number: int) -> SamplingParams:
    """Return how a chat is answered: every second one is sampled."""
    temperature = 0.0 if number % 2 else 1.0
    return SamplingParams(
        temperature=temperature, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True
    )


def messages_of(parts: Sequence[Part], *, is_text: bool = False) -> list[dict[str, Any]]:
    if is_text:
        return [{"role": "user", "content": "".join(p for p in parts if isinstance(p, str))}]
    content: list[dict[str, Any]] = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": np.asarray(part)}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("name", [*TEXTS, *PICTURES])
def test_pieces_of_a_stream_are_the_whole_answer(name: str) -> None:
    with engine_of(name) as engine:
        for number, parts in enumerate(CHATS):
            messages = messages_of(parts, is_text=name in TEXTS)
            whole = engine.chat(messages, params_of(number))
            engine.reset_prefix_cache()
            with engine.stream(messages=messages, params=params_of(number)) as stream:
                pieces = list(stream)
                streamed = stream.completion
            assert "".join(pieces) == streamed.text == whole.text
            assert streamed.token_ids == whole.token_ids
            assert streamed.finish_reason == whole.finish_reason
            assert len(whole.token_ids) == NUM_TOKENS
            assert bool(whole.num_item_tokens) == (name not in TEXTS and number > 0)


@pytest.fixture(scope="module", params=SERVED)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[ServerProcess, list[Completion]]]:
    """A server of a family's checkpoint, and what each chat is answered in process."""
    engine = engine_of(request.param)
    expected = []
    for number, parts in enumerate(CHATS):
        expected.append(engine.chat(messages_of(parts), params_of(number)))
        engine.reset_prefix_cache()
    engine.close()
    folder = family_of(request.param).folder
    assert folder is not None
    running = ServerProcess(folder, "--dtype", "float32", "--num-pages", "256")
    try:
        yield running.wait_ready(), expected
    finally:
        status = running.end()
    assert status == 0, running.log


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    out = io.BytesIO()
    part.save(out, "PNG")
    return {"type": "image_url", "image_url": {"url": data_url(out.getvalue(), "image/png")}}


def ask(client: OpenAI, number: int, **options: Any) -> Any:
    params = params_of(number)
    messages: list[Any] = [{"role": "user", "content": [_part(p) for p in CHATS[number]]}]
    return client.chat.completions.create(
        model="tiny",
        messages=messages,
        temperature=params.temperature,
        seed=number,
        max_tokens=NUM_TOKENS,
        extra_body={"ignore_eos": True, "return_token_ids": True},
        **options,
    )


def test_a_server_answers_as_the_engine_does_in_process(
    served: tuple[ServerProcess, list[Completion]],
) -> None:
    """All at once, streamed and not, the second time out of what the first left behind."""
    server, expected = served

    def whole(number: int) -> tuple[str, tuple[int, ...], dict[str, int]]:
        with server.client() as client:
            answer = ask(client, number)
        (choice,) = answer.choices
        details = answer.usage.prompt_tokens_details.model_dump()
        counted = {"image": details["image_tokens"]} if details.get("image_tokens") else {}
        return choice.message.content, tuple(choice.model_extra["token_ids"]), counted

    def streamed(number: int) -> tuple[str, tuple[int, ...]]:
        text = ""
        ids: list[int] = []
        with server.client() as client:
            for chunk in ask(client, number, stream=True):
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    ids += (choice.model_extra or {}).get("token_ids") or []
        return text, tuple(ids)

    numbers = list(range(len(CHATS)))
    with ThreadPoolExecutor(2 * len(numbers)) as pool:
        for _ in range(2):
            wholes, streams = pool.map(whole, numbers), pool.map(streamed, numbers)
            for one, in_process in zip(wholes, expected, strict=True):
                wanted = (in_process.text, in_process.token_ids, in_process.num_item_tokens)
                assert one == wanted
            for pieces, in_process in zip(streams, expected, strict=True):
                assert pieces == (in_process.text, in_process.token_ids)


def test_a_second_question_about_a_picture_reuses_it_behind_the_socket(
    served: tuple[ServerProcess, list[Completion]],
) -> None:
    server, _ = served
    with server.client() as client:
        ask(client, 1)
        usage = ask(client, 3).usage
    details = usage.prompt_tokens_details.model_dump()
    assert details["cached_tokens"] >= details["image_tokens"] > 0
