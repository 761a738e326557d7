"""`mstar cache keys | root | explain` on the tiny model's folder."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mstar.cli import main
from mstar.cli.cache_explain import explanation_lines
from mstar.cli.served import Body, Served
from mstar.engine.resources.kv.keys import fingerprint
from mstar.preprocess.explain import Difference, Explanation, Stop
from mstar.preprocess.prompt import PromptPreparer, PromptRequest
from mstar.preprocess.tokenizer import TextTokenizer
from mstar.server.config import EngineOptions
from mstar.server.engine_process import facts_of, load_engine
from tests.cli.fake_server import fake_server
from tests.oracles import keys as oracle

Run = tuple[int, str, str]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Run:
    capsys.readouterr()
    status = main(["cache", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def write(path: Path, **body: Any) -> str:
    path.write_text(json.dumps(body))
    return str(path)


def talk(*texts: str) -> list[dict[str, str]]:
    roles = ("system", "user", "assistant")
    return [
        {"role": roles[min(n, 1 + (n + 1) % 2)], "content": text} for n, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ((), {}),
        (("--page-size", "32", "--dtype", "bfloat16"), {"page_size": 32, "dtype": "bfloat16"}),
    ],
)
def test_root_is_what_a_served_engine_reports(
    tiny_folder: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    numbers: dict[str, Any],
) -> None:
    options = EngineOptions(model=str(tiny_folder), num_pages=64, **numbers)
    facts = facts_of(load_engine(options, lambda *_: None), 0.0)
    status, out, _ = run(capsys, "root", str(tiny_folder), "--json", *flags)
    report = json.loads(out)
    assert status == 0
    assert facts.deployment_root is not None
    assert report["root"] == facts.deployment_root.hex()
    assert report["constants"] == facts.root_constants
    assert report["missing"] == []
    assert report["constants"]["page_size"] == str(numbers.get("page_size", 16))


def test_root_lists_constants_for_people(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, "root", str(tiny_folder))
    lines = out.splitlines()
    assert lines[0].startswith("root  ")
    names = [line.split()[0] for line in lines[1:]]
    assert {"weights", "dtype", "page_size", "adapter", "resource.kv"} <= set(names)
    assert "2 x RopeParams(" in out


@pytest.mark.parametrize("arguments", [("root",), ("root", "m", "--url", "http://x")])
def test_root_wants_a_model_or_a_server(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert "either a MODEL or" in err


def test_keys_are_those_of_the_encoding(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = write(tmp_path / "a.json", model=str(tiny_folder), messages=talk("x" * 20, "y" * 30))
    status, out, _ = run(capsys, "keys", body, "--json")
    assert status == 0
    report = json.loads(out)
    (prompt,) = report["prompts"]
    text = f"<system>{'x' * 20}<user>{'y' * 30}"
    assert prompt["num_tokens"] == len(text)
    assert "".join(page["text"] for page in prompt["pages"]) == text
    assert prompt["layout"][0] | {"start": 0, "length": len(text)} == prompt["layout"][0]
    ids = TextTokenizer.load(tiny_folder).encode(text, False)
    key = bytes.fromhex(prompt["root"])
    for number, page in enumerate(prompt["pages"]):
        assert page["token_ids"] == ids[16 * number : 16 * number + 16]
        key = oracle.page_key(key, page["token_ids"])
        assert page["key"] == key.hex()
        assert page["is_full"] is (len(page["token_ids"]) == 16)


def test_keys_are_those_that_a_preparer_of_the_deployment_makes(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Whoever keys a prompt for people must not have a way of its own."""
    path = write(tmp_path / "a.json", prompt=["one", "two " * 9], n=2, cache_salt="s")
    served = Served(EngineOptions(model=str(tiny_folder)))
    prompts = served.prepare(Body.read(path))
    preparer = PromptPreparer(
        served.tokenizer, 4096, 16, served.root.root, served.tokenizer.vocab_size
    )
    assert len(prompts) == 2
    for prompt, text in zip(prompts, ("one", "two " * 9), strict=True):
        own = prompt.subject.prepared
        expected = preparer.prepare(
            PromptRequest(request_id="x", params=own.params, cache_salt="s", text=text)
        )
        assert (own.page_keys, own.root) == (expected.page_keys, expected.root)
        assert prompt.subject.cache_salt == "s"


def test_keys_for_people_show_pages_texts_and_which_is_never_shared(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = write(tmp_path / "a.json", prompt="abcdefghijklmnopqrstuvwxyz")
    status, out, _ = run(capsys, "keys", body, "--model", str(tiny_folder), "--short")
    assert status == 0
    assert "26 tokens on 2 pages of 16, no cache_salt" in out
    assert '"abcdefghijklmnop"' in out
    assert out.count("never shared") == 1
    key = next(line for line in out.splitlines() if line.startswith("page 0")).split()[-1]
    assert len(key) == 12
    _, long, _ = run(capsys, "keys", body, "--model", str(tiny_folder))
    assert fingerprint().hex() not in long
    assert any(line.split()[-1].startswith(key) for line in long.splitlines() if line)


def test_a_body_is_read_from_standard_input(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(b'{"prompt": "abc"}'))
    monkeypatch.setattr(sys, "stdin", stream)
    status, out, _ = run(capsys, "keys", "-", "--model", str(tiny_folder))
    assert status == 0
    assert "3 tokens" in out


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "no JSON"),
        ("[]", "holds list"),
        ('{"model": "m"}', "neither of messages and prompt"),
        ('{"prompt": "a", "messages": []}', "both of messages and prompt"),
        ('{"prompt": ""}', "empty"),
        ('{"prompt": "a", "cache_salt": "a/b"}', "cache_salt"),
        ('{"prompt": [9999]}', "9999"),
        ('{"messages": [{"role": "user", "content": 5}]}', "messages"),
    ],
)
def test_a_wrong_body_is_one_clear_line(
    body: str,
    words: str,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "a.json"
    path.write_text(body)
    status, _, err = run(capsys, "keys", str(path), "--model", str(tiny_folder))
    assert status == 2
    (line,) = err.strip().splitlines()
    assert words in line


def test_without_a_model_or_a_file_it_says_what_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "keys", write(tmp_path / "a.json", prompt="a"))
    assert (status, "--model" in err) == (2, True)
    status, _, err = run(capsys, "keys", str(tmp_path / "none.json"))
    assert (status, "none.json" in err) == (2, True)


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Explanation, str]:
    """Return what is said for programs and for people."""
    status, out, err = run(capsys, "explain", *arguments, "--json")
    assert status == 0, err
    found = msgspec.json.decode(out, type=Explanation)
    _, text, _ = run(capsys, "explain", *arguments)
    return found, text


def test_explain_says_which_message_of_a_chat_differs(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a.json", messages=talk("s" * 40, "tell me of ships"))
    b = write(tmp_path / "b.json", messages=talk("s" * 40, "tell me of steam"))
    found, text = explained(capsys, a, b, "--model", str(tiny_folder))
    assert found.num_matched_tokens == found.pages * 16 == 64
    differs = found.stopped.differs
    assert differs is not None
    assert differs.field == "token"
    assert differs.a_where == differs.b_where == "character 12 of messages[1] (user)"
    assert differs.before.endswith("of s")
    assert (differs.a_text[0], differs.b_text[0]) == ("h", "t")
    assert "another token" in text
    assert "messages[1] (user)" in text


def test_explain_tells_a_template_that_writes_another_head(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that a template writes near its beginning cancels all reuse, and nobody sees it."""
    path = tmp_path / "model"
    path.mkdir()
    for file in tiny_folder.iterdir():
        (path / file.name).symlink_to(file)
    (path / "tokenizer_config.json").unlink()
    settings = json.loads((tiny_folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "<effort {{ effort }}>" + settings["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    a, b = (
        write(
            tmp_path / f"{name}.json",
            messages=talk("s" * 40, "hello"),
            chat_template_kwargs={"effort": name},
        )
        for name in ("low", "high")
    )
    found, text = explained(capsys, a, b, "--model", str(path))
    assert found.num_matched_tokens == 0
    assert (found.stopped.page, found.stopped.slot) == (0, len("<effort "))
    differs = found.stopped.differs
    assert differs is not None
    assert differs.b_where == "the template's own text before messages[0] (system)"
    assert "the chat template wrote something else" in text


def test_explain_tells_salts_and_models_apart(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    prompt = "p" * 40
    a = write(tmp_path / "a.json", model=str(tiny_folder), prompt=prompt)
    b = write(tmp_path / "b.json", model=str(tiny_folder), prompt=prompt, cache_salt="t")
    c = write(tmp_path / "c.json", model=str(other), prompt=prompt)
    found, text = explained(capsys, a, b)
    assert found.stopped.differs is not None
    assert (found.stopped.differs.field, found.stopped.differs.b) == ("cache_salt", "t")
    assert "apart from that, the first 40 tokens are the same" in text
    found, text = explained(capsys, a, c)
    assert found.stopped.differs is not None
    assert (found.stopped.differs.field, found.stopped.differs.name) == ("root_constant", "weights")
    assert "the deployments differ" in text


def test_explain_of_prefixes(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = write(tmp_path / "short.json", prompt="p" * 40)
    long = write(tmp_path / "long.json", prompt="p" * 60)
    model = ("--model", str(tiny_folder))
    found, text = explained(capsys, short, long, *model)
    assert (found.num_matched_tokens, found.stopped.reason) == (32, "other_ends")
    assert "ends there" in text
    found, text = explained(capsys, long, short, *model)
    assert (found.num_matched_tokens, found.stopped.reason) == (32, "end")
    assert "at least one token is always computed" in text


def test_explain_refuses_a_body_of_several_prompts(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = write(tmp_path / "a.json", prompt=["a", "b"])
    status, _, err = run(capsys, "explain", many, many, "--model", str(tiny_folder))
    assert status == 2
    assert "has 2 prompts" in err


def test_a_live_servers_answer_is_told_with_tiers_and_the_eviction() -> None:
    answer = {
        "num_prompt_tokens": 100,
        "num_matched_tokens": 48,
        "by_tier": {"device": 16, "host": 32, "disk": 0},
        "pages": 3,
        "page_size": 16,
        "num_common_tokens": 48,
        "stopped": {"page": 3, "slot": 48, "reason": "evicted", "evicted_at": 12.34},
    }
    lines = list(explanation_lines(msgspec.convert(answer, Explanation), "the server", "a.json"))
    assert lines == [
        "a.json reuses 48 of its 100 tokens (48 %): 3 whole pages of 16",
        "  16 from device, 32 from host",
        "it stops at page 3, slot 48: the page was forgotten 12.3 s ago; it had to make room",
    ]


@pytest.mark.parametrize(
    "reason", ["end", "other_ends", "differs", "never_seen", "evicted", "shut"]
)
def test_every_reason_has_words(reason: Any) -> None:
    stop = Stop(page=0, slot=0, reason=reason)
    found = Explanation(
        num_prompt_tokens=1, num_matched_tokens=0, by_tier={}, pages=0, page_size=16,
        num_common_tokens=0, stopped=stop,
    )  # fmt: skip
    assert len(list(explanation_lines(found, "a", "b"))) == 2


def test_a_running_server_is_asked_for_its_root_and_for_explanations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = write(tmp_path / "a.json", prompt="p" * 40)
    with fake_server("knows") as url:
        _, out, _ = run(capsys, "root", "--url", url)
        status, text, _ = run(capsys, "explain", body, "--url", url)
    assert out.splitlines() == ["root  ab", "  page_size  16"]
    assert status == 0
    assert text.startswith(f"{body} reuses 16 of its 40 tokens")
    assert "no request has filled this page" in text


def test_a_server_without_the_routes_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = write(tmp_path / "a.json", prompt="p" * 40)
    with fake_server() as url:
        status, _, err = run(capsys, "root", "--url", url)
        assert (status, "no route" in err) == (2, True)
        status, _, err = run(capsys, "explain", body, "--url", url)
    assert (status, "404" in err) == (2, True)


def test_an_item_cut_and_long_values_are_told_shortly() -> None:
    long = "x" * 300
    differs = Difference(field="root_constant", name="model", a=long + "1", b=long + "2")
    stop = Stop(page=1, slot=16, reason="differs", differs=differs)
    found = Explanation(
        num_prompt_tokens=30, num_matched_tokens=22, by_tier={"device": 22}, pages=1,
        page_size=16, num_common_tokens=22, stopped=stop,
    )  # fmt: skip
    text = "\n".join(explanation_lines(found, "a", "b"))
    assert "1 whole pages of 16 and 6 slots of the next, up to the end of an item" in text
    assert long not in text
    assert "xx1" in text
    assert "xx2" in text


def test_help_of_every_command_answers(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("keys", "root", "explain", "audit", "simulate"):
        with pytest.raises(SystemExit) as ended:
            main(["cache", name, "--help"])
        assert ended.value.code == 0
        assert f"mstar cache {name}" in capsys.readouterr().out
