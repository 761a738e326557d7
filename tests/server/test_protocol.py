"""Bodies to requests, and everything that is wrong with bodies, without a server."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mstar.errors import RequestError
from mstar.server.failures import ApiError
from mstar.server.protocol import (
    MAX_TOKEN_ENTRIES,
    ChatRequest,
    CompletionRequest,
    ParsedRequest,
    ProtocolRules,
    parse,
    route_of,
)
from mstar.transport.messages import Route

RULES = ProtocolRules(model_names=("tiny", "alias"))
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def chat(**fields: Any) -> ParsedRequest:
    return parse("chat", json.dumps(HELLO | fields).encode(), RULES)


def complete(**fields: Any) -> ParsedRequest:
    return parse("completion", json.dumps({"prompt": "a"} | fields).encode(), RULES)


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    return caught.value


def test_every_sampling_field_arrives_under_its_name() -> None:
    numbers = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 11,
        "min_tokens": 2,
        "ignore_eos": True,
    }
    params = chat(**numbers, max_tokens=9, stop="x", stop_token_ids=[1], logit_bias={"3": 2}).params
    for name, value in numbers.items():
        assert getattr(params, name) == value, name
    assert (params.max_tokens, params.stop, params.stop_token_ids) == (9, ("x",), (1,))
    assert params.logit_bias == {3: 2.0}


def test_null_means_left_out() -> None:
    nulls = dict.fromkeys(("temperature", "stop", "n", "tools", "response_format", "stream"))
    assert chat(**nulls) == chat()


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).params.max_tokens == 7
    assert chat().params.max_tokens is None
    assert complete().params.max_tokens == 16


def test_logprobs_are_a_flag_and_a_number_in_chats_and_a_number_in_completions() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params.logprobs == 4
    assert chat(logprobs=False).params.logprobs is None
    assert complete(logprobs=2).params.logprobs == 2
    assert refusal(top_logprobs=2).error.param == "top_logprobs"


def test_a_developer_is_a_system() -> None:
    messages = [{"role": "developer", "content": "be brief"}, HELLO["messages"][0]]
    conversation = chat(messages=messages).conversation
    assert conversation is not None
    assert conversation[0] == {"role": "system", "content": "be brief"}


def test_an_assistants_message_may_be_without_content() -> None:
    messages = [HELLO["messages"][0], {"role": "assistant", "tool_calls": [{"id": "1"}]}]
    conversation = chat(messages=messages).conversation
    assert conversation is not None
    assert conversation[1] == {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}


def test_continuing_a_message_opens_no_new_one() -> None:
    assert chat().add_generation_prompt
    continued = chat(continue_final_message=True)
    assert (continued.continue_final_message, continued.add_generation_prompt) == (True, False)
    both = refusal(continue_final_message=True, add_generation_prompt=True)
    assert both.error.param == "continue_final_message"


def test_template_variables_need_trust() -> None:
    assert refusal(chat_template_kwargs={"a": 1}).error.code == "unsupported_parameter"
    trusting = ProtocolRules(model_names=("tiny",), trust_chat_template_kwargs=True)
    body = json.dumps(HELLO | {"chat_template_kwargs": {"a": 1}}).encode()
    assert parse("chat", body, trusting).template_kwargs == {"a": 1}


def test_every_served_name_is_known_and_no_other() -> None:
    for name in ("tiny", "alias", "", None):
        chat(model=name)
    error = refusal(model="gpt")
    assert (error.status, error.error.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"structured_outputs": {"regex": "a"}},
        {"guided_regex": "a"},
        {"modalities": ["audio"]},
        {"prompt_logprobs": 1},
        {"echo": True},
        {"best_of": 3},
        {"priority": 1},
    ],
)
def test_what_would_change_the_answer_is_never_ignored(fields: dict[str, Any]) -> None:
    error = refusal(**fields)
    assert error.status == 400
    assert error.error.code == "unsupported_parameter"
    assert error.error.param == next(iter(fields))


def test_what_asks_for_nothing_is_let_through() -> None:
    asked = chat(
        response_format={"type": "text"}, modalities=["text"], echo=False, best_of=1, user="me"
    )
    assert asked.unknown_fields == []


def test_unknown_fields_are_named_and_cut() -> None:
    assert chat(fancy=1, **{"x" * 500: 2}).unknown_fields == ["fancy", "x" * 63 + "…"]


def test_slips_are_looked_for_among_few_fields_and_short_ones() -> None:
    """Each is compared with all known ones, which thousands would keep a worker busy with."""
    assert refusal(max_token=1).error.code == "unknown_parameter"
    many: dict[str, Any] = {f"zz{number}": 1 for number in range(16)}
    assert "max_token" in chat(**many, max_token=1).unknown_fields
    assert len(chat(**{f"{number:0100}": 1 for number in range(5000)}).unknown_fields) == 5000


def test_a_bad_number_is_the_samplers_error() -> None:
    with pytest.raises(RequestError) as caught:
        chat(temperature=-1)
    assert caught.value.param == "temperature"


def test_complaints_name_the_field_that_the_user_wrote() -> None:
    with pytest.raises(RequestError, match=r"^max_completion_tokens is 0;") as caught:
        chat(max_completion_tokens=0, max_tokens=5)
    assert caught.value.param == "max_completion_tokens"
    with pytest.raises(RequestError, match=r"^top_logprobs is 21;"):
        chat(logprobs=True, top_logprobs=21)
    with pytest.raises(RequestError, match=r"^logprobs is 21;"):
        complete(logprobs=21)
    with pytest.raises(RequestError, match=r"^max_tokens is -1;"):
        chat(max_tokens=-1)
    with pytest.raises(RequestError, match=r"^min_tokens is 20; .* 16"):
        complete(min_tokens=20)


def test_a_stop_token_given_twice_counts_once() -> None:
    assert chat(stop_token_ids=[3, 1, 3, 3]).params.stop_token_ids == (3, 1)


def test_entries_that_every_choice_carries_are_bounded() -> None:
    """A body of 12 MB once kept the engine from everybody else for a minute."""
    bias = {str(token): 1 for token in range(MAX_TOKEN_ENTRIES // 128 + 1)}
    assert len(chat(logit_bias=bias).params.logit_bias) == len(bias)
    error = refusal(logit_bias=bias, n=128).error
    assert error.param == "logit_bias"
    assert str(MAX_TOKEN_ENTRIES) in error.message
    assert refusal(stop_token_ids=[*map(int, bias)], n=128).error.param == "stop_token_ids"


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(
    {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, "tools", "echo"}
)


@given(
    route=st.sampled_from(["chat", "completion"]),
    fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    is_sound=st.booleans(),
)
def test_no_json_at_all_gives_another_error_than_a_clear_one(
    route: Route, fields: dict[str, Any], is_sound: bool
) -> None:
    body = (HELLO | {"prompt": "a"} if is_sound else {}) | fields
    complaint = ""
    try:
        parsed = parse(route, json.dumps(body).encode(), RULES)
    except (ApiError, RequestError) as error:
        complaint = str(error)
    else:
        assert parsed.conversation or parsed.prompts
        return
    assert 0 < len(complaint) < 1000


@given(st.binary(max_size=60))
def test_no_bytes_at_all_give_another_error_than_a_clear_one(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse("chat", body, RULES)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("control", "seconds"),
    [
        (None, 0.0),
        ({"type": "ephemeral"}, 300.0),
        ({"type": "ephemeral", "ttl": None}, 300.0),
        ({"type": "ephemeral", "ttl": "30s"}, 30.0),
        ({"type": "ephemeral", "ttl": "5m"}, 300.0),
        ({"type": "ephemeral", "ttl": "1h"}, 3600.0),
        ({"type": "ephemeral", "ttl": 90}, 90.0),
        ({"type": "ephemeral", "ttl": 0.5}, 0.5),
        ({"type": "persistent"}, math.inf),
    ],
)
def test_a_retention_hint_is_a_number_of_seconds(control: Any, seconds: float) -> None:
    assert chat(cache_control=control).retain_seconds == seconds
    assert complete(cache_control=control).retain_seconds == seconds


@pytest.mark.parametrize(
    ("control", "named"),
    [
        ({"type": "forever"}, "'forever'"),
        ({"type": "ephemeral", "ttl": "5 minutes"}, "'5 minutes'"),
        ({"type": "ephemeral", "ttl": "m"}, "'m'"),
        ({"type": "ephemeral", "ttl": "0s"}, "'0s'"),
        ({"type": "ephemeral", "ttl": "999999999h"}, "'999999999h'"),
        ({"type": "ephemeral", "ttl": 0}, "0"),
        ({"type": "ephemeral", "ttl": -1}, "-1"),
        ({"type": "ephemeral", "ttl": 1e300}, "1e+300"),
        ({"type": "persistent", "ttl": "5m"}, "ttl"),
        ({"type": "ephemeral", "ttl": True}, "ttl"),
        ({"type": "ephemeral", "scope": "all"}, "scope"),
        ({"ttl": "5m"}, "type"),
        ("ephemeral", "cache_control"),
    ],
)
def test_a_bad_retention_hint_is_named(control: Any, named: str) -> None:
    error = refusal(cache_control=control)
    assert (error.status, error.error.param) == (400, "cache_control")
    assert named in error.error.message


def test_the_route_of_a_body_shows_in_its_fields() -> None:
    assert route_of(b'{"messages": []}') == "chat"
    assert route_of(b'{"prompt": "a"}') == "completion"
    for body, word in ((b"{}", "neither"), (b'{"prompt": "a", "messages": []}', "both")):
        with pytest.raises(ApiError, match=word) as caught:
            route_of(body)
        assert caught.value.status == 400
    with pytest.raises(ApiError, match="JSON"):
        route_of(b"[")
