import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from mstar.engine.request import PreparedRequest
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import ContextLengthError, RequestError
from mstar.preprocess.conversation import plain_messages, read_messages
from mstar.preprocess.prompt import PromptPreparer, PromptRequest, request_root
from mstar.preprocess.tokenizer import TextTokenizer

ROOT = bytes(32)
PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture
def tokenizer(tokenizers: dict[str, TextTokenizer]) -> TextTokenizer:
    return tokenizers["byte_level"]


@pytest.fixture
def preparer(tokenizer: TextTokenizer) -> PromptPreparer:
    return PromptPreparer(tokenizer, 64, 4, ROOT, tokenizer.vocab_size)


def _request(**fields: Any) -> PromptRequest:
    values: dict[str, Any] = {"request_id": "r", "params": PARAMS}
    return PromptRequest(**values | fields)


def _field(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def _keys(root: bytes, ids: Sequence[int], size: int) -> list[bytes]:
    """Keys by the documented encoding, written out."""
    keys, key = [], root
    for start in range(0, len(ids), size):
        packed = b"".join(i.to_bytes(4, "little") for i in ids[start : start + size])
        key = hashlib.sha256(_field(key) + _field(packed) + _field(b"")).digest()
        keys.append(key)
    return keys


def _root(salt: str | None) -> bytes:
    parts = [b"mstar-request-root-v1", ROOT, b"cache_salt"]
    parts += [] if salt is None else [salt.encode()]
    return hashlib.sha256(b"".join(map(_field, parts))).digest()


@pytest.mark.parametrize("salt", [None, "tenant-1"])
def test_ids_are_keyed_page_by_page_from_the_requests_root(
    preparer: PromptPreparer, salt: str | None
) -> None:
    ids = list(range(10))
    prepared = preparer.prepare(_request(token_ids=tuple(ids), cache_salt=salt))
    assert prepared.token_ids == ids
    assert prepared.root == _root(salt) == request_root(ROOT, salt)
    assert prepared.page_keys == _keys(_root(salt), ids, 4)
    assert len(prepared.page_keys) == 3
    assert prepared.params is PARAMS
    assert prepared.request_id == "r"
    packed = msgspec.msgpack.encode(prepared)
    assert msgspec.msgpack.decode(packed, type=PreparedRequest) == prepared


def test_without_a_root_there_are_no_keys(tokenizer: TextTokenizer) -> None:
    preparer = PromptPreparer(tokenizer, 64, 4, None, tokenizer.vocab_size)
    prepared = preparer.prepare(_request(text="abc"))
    assert (prepared.root, prepared.page_keys) == (None, [])
    assert request_root(None, "salt") is None


def test_texts_and_chats_become_ids(preparer: PromptPreparer, tokenizer: TextTokenizer) -> None:
    assert preparer.prepare(_request(text="ab c")).token_ids == tokenizer.encode("ab c")
    chat = [{"role": "user", "content": "ab"}]
    expected = "<s>user:ab</s><s>assistant:"
    prepared = preparer.prepare(_request(messages=chat))
    assert tokenizer.decode(prepared.token_ids, skip_special_tokens=False) == expected
    prepared = preparer.prepare(_request(messages=chat, add_generation_prompt=False))
    assert tokenizer.decode(prepared.token_ids, skip_special_tokens=False) == "<s>user:ab</s>"
    prepared = preparer.prepare(
        _request(messages=chat, add_generation_prompt=False, continue_final_message=True)
    )
    assert tokenizer.decode(prepared.token_ids, skip_special_tokens=False) == "<s>user:ab"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "prompt", "found none"),
        ({"text": "a", "token_ids": [1]}, "prompt", "found text and token_ids"),
        ({"text": ""}, "prompt", "the prompt is empty"),
        ({"token_ids": []}, "prompt", "the prompt is empty"),
        ({"text": 5}, "prompt", "not a string"),
        ({"token_ids": [1, -1]}, "prompt", r"token id -1; the model's ids are 0 to \d+"),
        ({"token_ids": [9_999]}, "prompt", "token id 9999"),
        ({"token_ids": [True]}, "prompt", "True, which is not a token id"),
        ({"token_ids": ["1"]}, "prompt", "'1', which is not a token id"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hi"}, "messages", "at least one message"),
        ({"messages": [{"content": "x"}]}, "messages[0]", "not an object with a role"),
        ({"messages": ["x"]}, "messages[0]", "not an object with a role"),
        ({"messages": [{"role": "bad", "content": "x"}]}, "messages", "no bad roles"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
            "a string or a list of parts",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "'image_url'; this model takes text parts only",
        ),
        (
            {
                "messages": [{"role": "user", "content": "x"}],
                "template_kwargs": {"chat_template": "{{ 1 }}"},
            },
            "chat_template_kwargs",
            "may not set 'chat_template'",
        ),
        (
            {"text": "a", "params": SamplingParams(logit_bias={10_000: 1.0})},
            "logit_bias",
            "token id 10000",
        ),
        (
            {"text": "a", "params": SamplingParams(stop_token_ids=(10_000,))},
            "stop_token_ids",
            "token id 10000",
        ),
    ],
)
def test_wrong_prompts_name_the_field_at_fault(
    preparer: PromptPreparer, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        preparer.prepare(_request(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "salt", ["", "x" * 129, "a@b", "a/b", "a\\b", "a\0b", "a\ud800", 5, b"salt", ["s"]]
)
def test_wrong_salts_are_refused(preparer: PromptPreparer, salt: object) -> None:
    with pytest.raises(RequestError, match="cache_salt") as caught:
        preparer.prepare(_request(text="a", cache_salt=salt))
    assert caught.value.param == "cache_salt"


def test_longest_salt_is_taken(preparer: PromptPreparer) -> None:
    assert preparer.prepare(_request(text="a", cache_salt="é" * 128)).root is not None


def test_context_must_hold_prompt_and_output(preparer: PromptPreparer) -> None:
    assert len(preparer.prepare(_request(token_ids=[1] * 60)).token_ids) == 60
    with pytest.raises(ContextLengthError, match=r"61 tokens and max_tokens is 4, 65.*64.*to 3 "):
        preparer.prepare(_request(token_ids=[1] * 61))
    free = SamplingParams()
    assert len(preparer.prepare(_request(token_ids=[1] * 63, params=free)).token_ids) == 63
    with pytest.raises(ContextLengthError, match="the prompt has 64 tokens; the context holds 64"):
        preparer.prepare(_request(token_ids=[1] * 64, params=free))


class _Unencodable(TextTokenizer):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("encoded")


def test_text_that_is_surely_too_long_is_never_encoded(tokenizer: TextTokenizer) -> None:
    strict = _Unencodable(tokenizer._backend, tokenizer._template)
    preparer = PromptPreparer(strict, 64, 4, ROOT, tokenizer.vocab_size)
    huge = "a " * 10_000
    with pytest.raises(ContextLengthError, match=r"at least \d+ tokens; the context holds 64"):
        preparer.prepare(_request(text=huge))
    with pytest.raises(ContextLengthError) as caught:
        preparer.prepare(_request(messages=[{"role": "user", "content": huge}]))
    assert caught.value.param == "messages"


def test_text_parts_and_tool_calls_take_the_form_templates_know() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}
    broken = {"function": {"name": "f", "arguments": "{"}}
    given: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "assistant", "content": None, "tool_calls": [call, broken, 7]},
        {"role": "tool", "tool_call_id": "c"},
    ]
    assert plain_messages(read_messages(given)) == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "function": {"name": "f", "arguments": {"x": 1}}},
                broken,
                7,
            ],
        },
        {"role": "tool", "tool_call_id": "c"},
    ]
    assert given[0]["content"] == [{"type": "text", "text": "a"}, "b"]
