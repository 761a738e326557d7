"""The HTTP surface over a real socket, mostly through the real openai client."""

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import openai
import psutil
import pytest
from openai import OpenAI

from tests.server.processes import (
    EMOJI_TEXT,
    ServerProcess,
    TinyModel,
    call,
    connect,
    error_of,
    user,
    wait_until,
)

CHAT = "/v1/chat/completions"


def metric(server: ServerProcess, name: str) -> float:
    """Return the sum of a metric's samples."""
    text = call(server, "GET", "/metrics")[2].decode()
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(f"mstar:{name}{{")
    ]
    assert values, f"no metric {name}"
    return sum(values)


def is_idle(server: ServerProcess) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(metric(server, name) == 0 for name in names)


def test_chat_answers_in_openais_shape(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=user("A"), temperature=0)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == EMOJI_TEXT
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    num_prompt = len("<user>A")
    # The end token was generated too, and is no text.
    num_answer = len(EMOJI_TEXT.encode()) + 1
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == num_answer
    assert answer.usage.total_tokens == num_prompt + num_answer


def test_stream_carries_the_same_text_and_usage_as_the_whole_answer(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=user("A"), temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=user("A"),
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == whole.choices[0].message.content == EMOJI_TEXT
    assert "\ufffd" not in "".join(texts)
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "stop"
    assert reasons.count(None) == len(reasons) - 1
    assert chunks[-1].choices == []
    assert whole.usage is not None
    last = chunks[-1].usage
    assert last is not None
    assert last.completion_tokens == whole.usage.completion_tokens
    assert last.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_raw_stream_is_events_that_end_with_done(server: ServerProcess) -> None:
    body = {"messages": user("A"), "stream": True, "temperature": 0}
    status, headers, data = call(server, "POST", CHAT, body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    events = data.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


def test_continuous_usage_grows_monotonically(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = client.chat.completions.create(
        model="tiny", messages=user("A"), temperature=0, stream=True, stream_options=options
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == len(EMOJI_TEXT.encode()) + 1


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_second_identical_request_reports_cached_tokens(
    server: ServerProcess, client: OpenAI
) -> None:
    hits = metric(server, "prefix_cache_hits_total")
    text = "the second time costs less " * 10 + "A"
    first, second = (
        client.chat.completions.create(model="tiny", messages=user(text), temperature=0)
        for _ in range(2)
    )
    assert cached(first) == 0
    assert first.usage is not None
    num_prompt = first.usage.prompt_tokens
    assert num_prompt - 17 <= cached(second) <= num_prompt - 1
    assert first.choices[0].message.content == second.choices[0].message.content
    wait_until(lambda: metric(server, "prefix_cache_hits_total") == hits + cached(second))


def test_cache_salts_share_with_themselves_only(client: OpenAI) -> None:
    def ask(salt: str) -> int:
        return cached(
            client.chat.completions.create(
                model="tiny",
                messages=user("between tenants nothing is shared " * 5),
                max_tokens=2,
                extra_body={"cache_salt": salt},
            )
        )

    assert ask("one") == 0
    assert ask("two") == 0
    assert ask("one") > 0


def test_completions_take_texts_and_ids_one_or_many(client: OpenAI, tiny: TinyModel) -> None:
    prompt_ids = [tiny.ids[ord("x")], tiny.ids[ord("A")]]
    kinds: list[Any] = ["xA", prompt_ids, ["xA", "3"], [prompt_ids, [tiny.ids[ord("3")]]]]
    for prompt in kinds:
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=4, temperature=0, stop=[]
        )
        many = isinstance(prompt, list) and not isinstance(prompt[0], int)
        assert [choice.text for choice in answer.choices] == ["😀", "4567"][: 1 + many]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 2 + many
        assert answer.usage.completion_tokens == 4 * (1 + many)
        assert {choice.finish_reason for choice in answer.choices} == {"length"}


def test_completions_default_to_sixteen_tokens_and_stream(client: OpenAI) -> None:
    chunks = client.completions.create(model="tiny", prompt="3", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "4567890123456789"


def test_a_character_split_over_tokens_never_shows_in_part(client: OpenAI) -> None:
    chunks = client.completions.create(
        model="tiny", prompt="A", temperature=0, max_tokens=11, stream=True
    )
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == "😀ď漢ab"
    assert set("".join(texts)) == set("😀ď漢ab")


def test_a_stop_string_split_over_tokens_never_leaks(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "A", "temperature": 0, "max_tokens": 60}
    options["stop"] = ["defghij", "zzz"]
    whole = client.completions.create(**options)
    pieces = [c.choices[0].text for c in client.completions.create(**options, stream=True)]
    assert whole.choices[0].text == "".join(pieces) == "😀ď漢abc"
    assert whole.choices[0].finish_reason == "stop"
    assert not any("d" in piece for piece in pieces)
    assert whole.usage is not None
    # Nothing behind the stop string is charged for.
    assert whole.usage.completion_tokens == len("😀ď漢abcdefghij".encode())
    kept = client.completions.create(**options, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == "😀ď漢abcdefghij"


def test_a_beginning_of_a_stop_string_that_goes_on_otherwise_is_text(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="A", temperature=0, max_tokens=60, stop=["xyzA", "defX"]
    )
    assert answer.choices[0].text == EMOJI_TEXT


def test_stop_token_ids_end_the_text_before_them(client: OpenAI, tiny: TinyModel) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt="3",
        temperature=0,
        extra_body={"stop_token_ids": [tiny.ids[ord("7")]], "return_token_ids": True},
    )
    (choice,) = answer.choices
    assert choice.text == "456"
    assert choice.finish_reason == "stop"
    extra: Any = choice
    assert extra.token_ids == [tiny.ids[ord(char)] for char in "4567"]
    assert extra.prompt_token_ids == [tiny.ids[ord("3")]]


def test_min_tokens_and_ignore_eos_go_past_the_end(client: OpenAI) -> None:
    ends = client.completions.create(model="tiny", prompt="y", temperature=0, max_tokens=8)
    assert ends.choices[0].text == "z"
    for extra in ({"ignore_eos": True}, {"min_tokens": 5}):
        answer = client.completions.create(
            model="tiny", prompt="y", temperature=0, max_tokens=8, extra_body=extra
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens >= 5
        assert answer.choices[0].text.startswith("z")


def test_three_choices_come_with_one_prompt_and_their_own_seeds(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": user("hi"), "max_tokens": 12}
    options |= {"n": 3, "seed": 7, "temperature": 30}
    whole = client.chat.completions.create(**options)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len("<user>hi")
    streamed = ["", "", ""]
    reasons = 0
    for chunk in client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            reasons += choice.finish_reason is not None
    assert streamed == texts
    assert reasons == 3
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens == whole.usage.completion_tokens
    assert chunk.usage.prompt_tokens == whole.usage.prompt_tokens


def test_seeds_repeat_and_their_absence_does_not(client: OpenAI) -> None:
    def ask(seed: int | None) -> str | None:
        answer = client.chat.completions.create(
            model="tiny", messages=user("hi"), max_tokens=16, temperature=30, seed=seed
        )
        return answer.choices[0].message.content

    assert ask(3) == ask(3)
    assert len({ask(None) for _ in range(5)}) == 5


def test_logit_bias_reaches_the_sampler(client: OpenAI, tiny: TinyModel) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt="3",
        max_tokens=2,
        temperature=0,
        logit_bias={str(tiny.ids[ord("B")]): 100},
    )
    assert answer.choices[0].text == "BB"


def test_chat_logprobs_hold_the_texts_bytes_and_finite_numbers(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=user("A"), temperature=0, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    data = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert data.decode() == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert -1e-3 < entry.logprob <= 0
        assert all(-9999 <= top.logprob <= 0 for top in entry.top_logprobs)


def test_completion_logprobs_have_offsets_into_the_text(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "3", "max_tokens": 5, "temperature": 0}
    answer = client.completions.create(**options, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("45678")
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.token_logprobs is not None
    assert all(-1e-3 < (value or 0) <= 0 for value in logprobs.token_logprobs)
    assert logprobs.top_logprobs is not None
    assert all(char in top for char, top in zip("45678", logprobs.top_logprobs, strict=True))


def test_models_are_listed_and_looked_up(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    found: Any = client.models.retrieve("tiny")
    assert found.max_model_len == 2048
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("no/such")
    assert caught.value.code == "model_not_found"


def test_errors_reach_the_client_with_type_and_code(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=user("x" * 5000))
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.type == "invalid_request_error"
    assert caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=user("x"))
    assert missing.value.code == "model_not_found"


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 0.01}, "top_k"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 100_000}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"stop": ["a"] * 100}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
    ({"stop": ["a" * 2000]}, "stop"),
    ({"tools": []}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {}}, "guided_json"),
    ({"allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"stop_regex": "a"}, "stop_regex"),
    ({"max_new_tokens": 3}, "max_new_tokens"),
    ({"max_token": 3}, "max_token"),
    ({"Temperature": 3}, "Temperature"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_wrong_field_is_a_400_that_names_it_before_any_byte(
    server: ServerProcess, fields: dict[str, Any], param: str, stream: bool
) -> None:
    body: dict[str, Any] = {"messages": user("hi"), "stream": stream}
    if "stream_options" in fields:
        body["stream"] = False
    status, error = error_of(call(server, "POST", CHAT, body | fields))
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
        b'{"messages": "\xff"}',
        b'{"a":' + b"[" * 100_000,
    ],
)
def test_a_body_that_is_no_json_object_is_a_400(server: ServerProcess, body: bytes) -> None:
    status, error = error_of(call(server, "POST", CHAT, body))
    assert status == 400
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["", "a"], [1, "a"], [[-1]], [[99999]], 5, None, {"a": 1}]
)
def test_a_wrong_prompt_is_a_400(server: ServerProcess, prompt: object) -> None:
    status, error = error_of(call(server, "POST", "/v1/completions", {"prompt": prompt}))
    assert status == 400
    assert error["param"] == "prompt"


def test_image_parts_are_refused_with_what_the_model_takes(server: ServerProcess) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    status, error = error_of(call(server, "POST", CHAT, body))
    assert (status, error["code"]) == (400, "unsupported_content")
    assert error["param"] == "messages[0].content[0]"
    assert "this model takes text parts only" in error["message"]


def test_text_parts_are_one_message(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "3"}, {"type": "text", "text": "A"}]
    messages: Any = [{"role": "user", "content": parts}]
    answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
    assert answer.choices[0].message.content == EMOJI_TEXT


def test_framework_errors_have_the_same_shape(server: ServerProcess) -> None:
    status, error = error_of(call(server, "GET", "/v1/nothing"))
    assert (status, error["type"]) == (404, "invalid_request_error")
    status, error = error_of(call(server, "GET", CHAT))
    assert (status, error["code"]) == (405, "method_not_allowed")
    form = {"content-type": "application/x-www-form-urlencoded"}
    status, error = error_of(call(server, "POST", CHAT, b"{}", form))
    assert (status, error["code"]) == (415, "unsupported_media_type")


def test_a_body_over_the_limit_is_a_413(server: ServerProcess) -> None:
    body = b'{"messages": "' + b"x" * (65 * 2**20) + b'"}'
    status, error = error_of(call(server, "POST", CHAT, body))
    assert (status, error["code"]) == (413, "request_too_large")


def test_errors_echo_little_of_the_input(server: ServerProcess) -> None:
    bad = {"messages": [{"role": "x" * 500, "content": 3} for _ in range(8)], "model": "y" * 4000}
    answer = call(server, "POST", CHAT, bad)
    assert answer[0] == 400
    assert len(answer[2]) < 2000
    answer = call(server, "POST", CHAT, {"messages": user("a"), "model": "y" * 4000})
    assert answer[0] == 404
    assert len(answer[2]) < 2000


def test_a_good_request_works_right_after_bad_ones(server: ServerProcess, client: OpenAI) -> None:
    for fields, _ in BAD_FIELDS[:6]:
        assert call(server, "POST", CHAT, {"messages": user("hi")} | fields)[0] == 400
    answer = client.chat.completions.create(model="tiny", messages=user("A"), temperature=0)
    assert answer.choices[0].message.content == EMOJI_TEXT


def test_request_id_is_echoed_or_made(server: ServerProcess) -> None:
    assert call(server, "GET", "/health")[1]["x-request-id"]
    headers = call(server, "GET", "/health", headers={"x-request-id": "mine-1"})[1]
    assert headers["x-request-id"] == "mine-1"


def test_probes_and_version_answer(server: ServerProcess) -> None:
    assert call(server, "GET", "/health")[0] == 200
    assert call(server, "GET", "/ready")[0] == 200
    assert "version" in json.loads(call(server, "GET", "/version")[2])
    schema = json.loads(call(server, "GET", "/openapi.json")[2])
    assert "messages" in json.dumps(schema["paths"][CHAT])


def test_junk_model_names_add_no_metric_series(server: ServerProcess) -> None:
    def num_series() -> int:
        return len(call(server, "GET", "/metrics")[2].splitlines())

    before = num_series()
    for index in range(30):
        body = {"messages": user("a"), "model": f"junk-{index}"}
        assert call(server, "POST", CHAT, body)[0] == 404
    text = call(server, "GET", "/metrics")[2].decode()
    assert num_series() == before
    assert "junk" not in text
    assert "_created" not in text


def open_stream(server: ServerProcess, fields: dict[str, Any]) -> http.client.HTTPConnection:
    """Return a connection whose request was sent and not answered to the end."""
    connection = connect(server)
    body = {"messages": user("3"), "max_tokens": 2000, "temperature": 0} | fields
    headers = {"content-type": "application/json"}
    connection.request("POST", CHAT, json.dumps(body), headers)
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_everything(server: ServerProcess, stream: bool) -> None:
    aborted = metric(server, "request_success_total")
    connection = open_stream(server, {"stream": stream, "n": 2})
    wait_until(lambda: metric(server, "num_requests_running") == 2)
    assert metric(server, "kv_cache_usage_perc") > 0
    connection.close()
    wait_until(lambda: is_idle(server), seconds=3)
    assert metric(server, "request_success_total") == aborted + 2


def test_a_client_that_leaves_while_it_sends_is_no_error(
    server: ServerProcess, client: OpenAI
) -> None:
    with closing(connect(server)) as half:
        half.putrequest("POST", CHAT)
        half.putheader("content-length", "1000")
        half.endheaders(b'{"mess')
    client.chat.completions.create(model="tiny", messages=user("A"), max_tokens=1)
    assert "Traceback" not in server.log
    assert "ERROR" not in server.log


def test_health_answers_while_a_huge_prompt_is_prepared(
    server: ServerProcess, client: OpenAI
) -> None:
    """Once templating and tokenizing ran on the event loop, probes froze for seconds."""
    body = json.dumps({"messages": user("word " * 5_000_000)}).encode()
    stream = client.chat.completions.create(
        model="tiny", messages=user("3"), max_tokens=1500, stream=True, temperature=0
    )
    next(iter(stream))
    delays: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        huge = pool.submit(call, server, "POST", CHAT, body)
        while not huge.done() or len(delays) < 20:
            started = time.monotonic()
            assert call(server, "GET", "/health")[0] == 200
            delays.append(time.monotonic() - started)
    stream.close()
    status, error = error_of(huge.result())
    assert (status, error["code"]) == (400, "context_length_exceeded")
    # No bound on a loaded machine's scheduling; a frozen loop is off by far more than this.
    assert sorted(delays)[int(len(delays) * 0.9)] < 0.5


def test_the_processes_stay_small(server: ServerProcess) -> None:
    """The API process and the worker must not load torch."""
    api = psutil.Process(server.process.pid)
    for process in (api, server.child("worker")):
        maps = {part.path for part in process.memory_maps()}
        assert not any("libtorch" in path for path in maps), process.cmdline()


def test_prompts_are_not_in_the_log(server: ServerProcess, client: OpenAI) -> None:
    client.chat.completions.create(model="tiny", messages=user("secret words"), max_tokens=2)
    assert "tokens in" in server.log
    assert "secret" not in server.log
