"""The routes about reuse, on a real server with every tier, events and a key."""

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mstar.cli.main import main
from mstar.cli.served import root_of
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.preprocess.prompt import PromptPreparer, PromptRequest
from mstar.preprocess.tokenizer import TextTokenizer
from mstar.server.config import EngineOptions
from mstar.transport.event_order import IndexMirror, Reset
from mstar.transport.kv_events import EventSubscriber
from tests.server.processes import (
    Answer,
    ServerProcess,
    TinyModel,
    call,
    error_of,
    user,
    wait_until,
)

pytestmark = pytest.mark.slow
KEY = {"authorization": "Bearer sesame"}
PAGE = 16
NUM_PAGES = 40
# A page of the tiny model is 16 slots of K and V, two heads of 16 floats, two layers: 8 KiB.
HOST_PAGES = 12
FREE_PORT = "tcp://127.0.0.1:*"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


def flags(disk: Path, disk_pages: int) -> tuple[str, ...]:
    """Return the flags of a server whose pool and host memory overflow within a few prompts."""
    return (
        *("--api-key", "sesame", "--num-pages", str(NUM_PAGES), "--max-model-len", "512"),
        *("--host-cache-memory", f"{HOST_PAGES * 8}KiB", "--disk-cache-dir", str(disk)),
        *("--disk-cache-space", f"{disk_pages * 9}KiB", "--debug-checks"),
        *("--kv-events-endpoint", FREE_PORT, "--kv-events-replay-endpoint", FREE_PORT),
    )


def running_server(model: Path, *given: str) -> Iterator[ServerProcess]:
    running = ServerProcess(model, *given)
    try:
        yield running.wait_ready()
    finally:
        status = running.end()
    assert status == 0, running.log
    assert "Traceback" not in running.log


@pytest.fixture(scope="module")
def server(tiny: TinyModel, disk: Path) -> Iterator[ServerProcess]:
    """A server whose disk has room for all that falls out of its memory."""
    yield from running_server(tiny.folder, *flags(disk, 4000))


@pytest.fixture
def small(tiny: TinyModel, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose disk overflows too."""
    yield from running_server(tiny.folder, *flags(tmp_path, 24))


@pytest.fixture(autouse=True)
def clean(server: ServerProcess) -> None:
    post(server, "/v1/cache/reset", {})


def ask(server: ServerProcess, method: str, path: str, body: object = None) -> Answer:
    return call(server, method, path, body, KEY)


def post(server: ServerProcess, path: str, body: object) -> dict[str, Any]:
    answer = ask(server, "POST", path, body)
    assert answer[0] == 200, answer
    found = json.loads(answer[2])
    assert isinstance(found, dict)
    return found


def get(server: ServerProcess, path: str) -> Any:
    answer = ask(server, "GET", path)
    assert answer[0] == 200, answer
    return json.loads(answer[2])


def text(seed: int, length: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz ", k=length))


def completion(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}


def generate(server: ServerProcess, prompt: str, **fields: Any) -> tuple[str, int]:
    """Return an answer's id and its cached tokens."""
    found = post(server, "/v1/completions", completion(prompt, **fields))
    return found["id"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def explain(server: ServerProcess, prompt: str, **fields: Any) -> dict[str, Any]:
    return post(server, "/v1/cache/explain", completion(prompt, **fields))


def series(server: ServerProcess, name: str) -> dict[str, float]:
    """Return a metric's values by tier, or by nothing."""
    lines = ask(server, "GET", "/metrics")[2].decode().splitlines()
    return {
        line.partition('tier="')[2].partition('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(f"mstar:{name}{{")
    }


def test_the_root_is_the_one_that_the_command_line_works_out_without_weights(
    server: ServerProcess, tiny: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    report = get(server, "/v1/cache/root")
    assert report == root_of(EngineOptions(model=str(tiny.folder))).report()
    assert report["missing"] == []
    assert main(["cache", "root", "--url", server.url, "--api-key", "sesame"]) == 0
    assert capsys.readouterr().out.startswith(f"root  {report['root']}")


def test_explaining_a_prompt_foretells_its_cached_tokens_and_runs_nothing(
    server: ServerProcess,
) -> None:
    rng = random.Random(7)
    stem = text(0, 300)
    seen = set()
    for number in range(24):
        prompt = stem[: rng.randrange(1, 290)] + text(number, rng.randrange(1, 90))
        before = series(server, "prompt_tokens_total")
        told = explain(server, prompt)
        assert explain(server, prompt) == told or told["stopped"]["reason"] == "evicted"
        assert series(server, "prompt_tokens_total") == before
        answer_id, cached = generate(server, prompt)
        assert told["num_prompt_tokens"] == len(prompt)
        assert told["num_matched_tokens"] == sum(told["by_tier"].values()) == cached
        assert told["pages"] == cached // PAGE
        found = get(server, f"/v1/cache/explain/{answer_id}")
        assert found["num_matched_tokens"] == cached
        assert found["by_tier"] == told["by_tier"]
        assert found["stopped"]["reason"] == told["stopped"]["reason"]
        seen.add(told["stopped"]["reason"])
    assert {"differs", "never_seen"} <= seen
    # Six pages and the one token that is always computed.
    whole = text(8, 6 * PAGE + 1)
    generate(server, whole)
    told = explain(server, whole)
    assert (told["num_matched_tokens"], told["stopped"]["reason"]) == (96, "end")


def test_the_first_token_that_differs_is_shown_with_its_text(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(server, "a" * 40 + "bcdefgh" + "x" * 40)
    told = explain(server, "a" * 40 + "bcdXfgh" + "x" * 40)
    assert told["num_matched_tokens"] == 32
    assert (told["stopped"]["slot"], told["stopped"]["reason"]) == (43, "differs")
    differs = told["stopped"]["differs"]
    assert differs["field"] == "token"
    assert (differs["a_text"], differs["b_text"]) == ("efghx", "Xfghxx")
    assert differs["before"] == "aaaaaaaaabcd"

    body = tmp_path / "a.json"
    body.write_text(json.dumps(completion("a" * 40 + "bcdXfgh" + "x" * 40)))
    assert main(["cache", "explain", str(body), "--url", server.url, "--api-key", "sesame"]) == 0
    out = capsys.readouterr().out
    assert "reuses 32 of its 87 tokens" in out
    assert "slot 43: another token" in out


def test_a_chat_is_told_from_a_completion_by_its_fields(server: ServerProcess) -> None:
    chat = {"messages": user("A" * 60), "temperature": 0, "n": 3}
    cold = post(server, "/v1/cache/explain", chat)
    assert (cold["num_prompt_tokens"], cold["stopped"]["reason"]) == (66, "never_seen")
    post(server, "/v1/chat/completions", chat)
    assert post(server, "/v1/cache/explain", chat)["num_matched_tokens"] == 64
    assert explain(server, "<user>" + "A" * 60)["num_matched_tokens"] == 64


def test_pages_under_another_salt_are_never_told(server: ServerProcess) -> None:
    prompt, other = text(1, 100), text(2, 100)
    unknown = explain(server, other, cache_salt="mine")
    for salt in ({}, {"cache_salt": "theirs"}):
        generate(server, prompt, **salt)
        told = explain(server, prompt, cache_salt="mine")
        assert told == unknown
        assert told["stopped"] == {"page": 0, "slot": 0, "reason": "never_seen"}
    assert explain(server, prompt, cache_salt="theirs")["num_matched_tokens"] == 96


def test_evicted_pages_are_found_in_the_tiers_and_then_told_as_evicted(
    small: ServerProcess,
) -> None:
    server = small
    prompt = text(3, 161)
    generate(server, prompt)
    told = explain(server, prompt)
    assert told["by_tier"] == {"device": 160, "host": 0, "disk": 0}
    tiers, number = set(), 0
    while told["num_matched_tokens"] == 160:
        generate(server, text(100 + number, 150))
        number += 1
        assert number < 60
        told = explain(server, prompt)
        tiers |= {tier for tier, count in told["by_tier"].items() if count}
    assert tiers == {"device", "host", "disk"}
    while told["stopped"]["reason"] != "evicted" or told["num_matched_tokens"]:
        generate(server, text(100 + number, 150))
        number += 1
        assert number < 90
        told = explain(server, prompt)
    assert 0 <= told["stopped"]["evicted_at"] < 300
    wait_until(lambda: series(server, "prefix_cache_evictions_total")[""] > 0)


def test_hits_are_counted_by_tier_in_tokens_once_a_request(server: ServerProcess) -> None:
    before = series(server, "prefix_cache_hits_by_tier_total")
    total = series(server, "prefix_cache_hits_total")[""]
    prompts = [text(200 + number, 97) for number in range(9)]
    expected = dict.fromkeys(before, 0.0)
    for prompt in (prompt for _ in range(3) for prompt in prompts for _ in range(2)):
        told = explain(server, prompt)
        answer_id, cached = generate(server, prompt)
        assert cached == told["num_matched_tokens"]
        found = get(server, f"/v1/cache/explain/{answer_id}")["by_tier"]
        assert sum(found.values()) == cached
        # Room for what comes back may push what comes next from host memory to the disk.
        assert found["device"] == told["by_tier"]["device"]
        for tier, count in found.items():
            expected[tier] += count
    assert all(expected.values()), expected

    after = series(server, "prefix_cache_hits_by_tier_total")
    assert {tier: after[tier] - before[tier] for tier in after} == expected
    gained = series(server, "prefix_cache_hits_total")[""] - total
    assert gained == sum(expected.values())


def test_a_reset_clears_all_tiers(server: ServerProcess, disk: Path) -> None:
    prompts = [text(300 + number, 161) for number in range(8)]
    for prompt in prompts:
        generate(server, prompt)
    wait_until(lambda: all(series(server, "prefix_cache_pages").values()))
    for path in ("/v1/cache/reset", "/reset_prefix_cache"):
        num_pages = post(server, path, {})["num_pages"]
        assert num_pages > NUM_PAGES if path == "/v1/cache/reset" else num_pages == 0
    for prompt in prompts:
        told = explain(server, prompt)
        assert (told["num_matched_tokens"], told["stopped"]["reason"]) == (0, "never_seen")
    wait_until(lambda: not any(series(server, "prefix_cache_pages").values()))
    wait_until(lambda: not [path for path in disk.rglob("*") if path.is_file()])
    assert generate(server, prompts[0])[1] == 0


def test_n_choices_compute_a_cold_prompt_once(server: ServerProcess) -> None:
    def computed() -> float:
        return (
            series(server, "prompt_tokens_total")[""]
            - series(server, "prompt_tokens_cached_total")[""]
        )

    wait_until(lambda: series(server, "num_requests_in_flight")[""] == 0)
    time.sleep(0.6)
    before, before_in = computed(), series(server, "prompt_tokens_total")[""]
    length = 10 * PAGE + 5
    body = completion(text(4, length), n=4, max_tokens=8, temperature=1, ignore_eos=True)
    found = post(server, "/v1/completions", body)
    assert len(found["choices"]) == 4
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (length, 32)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    wait_until(lambda: series(server, "prompt_tokens_total")[""] == before_in + 4 * length)
    # Ten pages once, and what is behind them for each choice.
    assert computed() - before == 10 * PAGE + 4 * 5


def test_a_retention_hint_keeps_pages_while_others_go(server: ServerProcess) -> None:
    kept, plain = text(5, 161), text(6, 161)
    generate(server, kept, cache_control={"type": "ephemeral", "ttl": "1h"})
    generate(server, plain)
    for number in range(6):
        generate(server, text(400 + number, 161))
    assert explain(server, kept)["by_tier"]["device"] == 160
    assert explain(server, plain)["by_tier"]["device"] == 0


def test_pins_beyond_the_budget_make_nothing_hang(server: ServerProcess) -> None:
    control = {"type": "persistent"}
    prompts = [text(500 + number, 161) for number in range(12)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda p: generate(server, p, cache_control=control), prompts))
    assert len(found) == 12
    status, error = error_of(
        ask(server, "POST", "/v1/completions", completion("a", cache_control={"type": "pin"}))
    )
    assert (status, error["param"]) == (400, "cache_control")
    assert "'pin'" in error["message"]


def test_a_follower_of_the_events_ends_with_what_explain_says(
    small: ServerProcess, tiny: TinyModel
) -> None:
    server = small
    (source,) = get(server, "/kv_event_sources")
    assert source["topic"] == ""
    root = bytes.fromhex(get(server, "/v1/cache/root")["root"])
    preparer = PromptPreparer(TextTokenizer.load(tiny.folder), 512, PAGE, root, 257)
    prompts = [
        text(600 + number % 7, 40 + 20 * (number % 7)) + text(number, 60) for number in range(40)
    ]
    mirror = IndexMirror()
    subscriber = EventSubscriber(
        source["endpoint"], source["replay_endpoint"], source["topic"], check_interval=0.5
    )
    try:
        with ThreadPoolExecutor(4) as pool:
            running = pool.map(lambda prompt: generate(server, prompt), prompts)
            list(running)
        # Pages reach the disk, and the engine tells of them, a little later than they leave the
        # pool: within a second, when it is pinged.
        silent_since = time.monotonic()
        while time.monotonic() - silent_since < 2.5:
            for arrival in subscriber.receive(0.2):
                assert not isinstance(arrival, Reset), arrival
                mirror.apply(arrival)
                silent_since = time.monotonic()
    finally:
        subscriber.close()
    assert {medium for _, medium in mirror.pages} == {"GPU", "CPU", "STORAGE"}
    num_whole = 0
    for prompt in prompts:
        request = PromptRequest(request_id="r", params=SamplingParams(max_tokens=1), text=prompt)
        keys = preparer.prepare(request).page_keys[: (len(prompt) - 1) // PAGE]
        told = explain(server, prompt)
        assert mirror.match(keys) == told["pages"], told
        num_whole += told["pages"] == len(keys)
    assert 0 < num_whole < len(prompts)


ROUTES = [
    ("GET", "/v1/cache/root"),
    ("POST", "/v1/cache/explain"),
    ("GET", "/v1/cache/explain/cmpl-1"),
    ("POST", "/v1/cache/reset"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/kv_event_sources"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_is_behind_the_key(server: ServerProcess, method: str, path: str) -> None:
    generate(server, text(7, 40))
    body = completion(text(7, 40)) if method == "POST" else None
    status, error = error_of(call(server, method, path, body))
    assert (status, error["code"]) == (401, "invalid_api_key")
    assert explain(server, text(7, 40))["num_matched_tokens"] == 32


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({}, 400, "messages", "neither"),
        ({"prompt": "a", "messages": user("a")}, 400, "messages", "both"),
        ({"prompt": ["a", "b"]}, 400, "prompt", "2 prompts"),
        ({"prompt": ""}, 400, "prompt", "empty"),
        ({"prompt": "a" * 600}, 400, "prompt", "600"),
        ({"prompt": "a", "model": "none"}, 404, "model", "none"),
        ({"prompt": "a", "cache_salt": ""}, 400, "cache_salt", "cache_salt"),
        (b"{", 400, None, "JSON"),
    ],
)
def test_a_bad_body_is_refused_as_by_the_route_that_it_is_for(
    server: ServerProcess, body: object, status: int, param: str | None, words: str
) -> None:
    found = error_of(ask(server, "POST", "/v1/cache/explain", body))
    assert (found[0], found[1]["param"]) == (status, param)
    assert words in found[1]["message"]


def test_an_unknown_answer_is_a_404(server: ServerProcess) -> None:
    status, error = error_of(ask(server, "GET", "/v1/cache/explain/chatcmpl-0"))
    assert (status, error["code"], error["param"]) == (404, "answer_not_found", "answer_id")
    assert "chatcmpl-0" in error["message"]
    status, error = error_of(ask(server, "GET", "/v1/cache/reset"))
    assert (status, error["code"]) == (405, "method_not_allowed")


def test_the_audit_finds_nothing_to_complain_of_with_all_tiers_on(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--rounds", "8", "--prompt-tokens", "256", "--json"]
    main(["cache", "audit", "--url", server.url, "--api-key", "sesame", *given])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert not [f for f in findings if f["verdict"] == "FAIL"]
    # Times of a model so small may be too close to tell.
    assert all(f["verdict"] == "PASS" for f in findings if not f["check"].startswith("time"))
    assert len(findings) > 15
