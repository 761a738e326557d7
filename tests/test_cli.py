"""The command line, in process where no server is needed."""

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mstar.cli import main, parse_size
from mstar.cli.chat import sampling_defaults
from tests.server.processes import EMOJI_TEXT, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return str(folder)


def test_version_and_help_answer_without_torch() -> None:
    program = (
        "import sys\nfrom mstar.cli import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n    print('torch' in sys.modules)"
    )
    for arguments in (["--version"], ["--help"], ["serve", "--help"], ["generate", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.rstrip().endswith("False")
        assert "mstar" in done.stdout


def test_help_groups_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for part in ("HTTP:", "engine:", "limits and KV cache:", "--max-model-len", "--port"):
        assert part in text


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["serve"],
        ["serve", "m", "--port", "x"],
        ["serve", "m", "--max-num-seqs", "0"],
        ["serve", "m", "--kv-cache-memory", "lots"],
        ["serve", "m", "--prot", "1"],
        ["serve", "m", "n"],
        ["chat", "m", "--", "n"],
    ],
)
def test_wrong_arguments_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mstar")
    assert line.endswith("--help")


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--temprature", "--temperature"),
        ("--max_token=3", "--max-tokens"),
        ("--promt", "--prompt"),
        ("--num-pagse", "--num-pages"),
    ],
)
def test_a_mistyped_flag_is_told_the_one_that_was_meant(
    flag: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "m", "hi", flag, "0"])
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_a_flag_like_no_other_is_guessed_at_no_further(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "m", "--xylophone"])
    assert "there is no flag --xylophone;" in capsys.readouterr().err


def test_a_missing_prompt_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "./nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no prompt" in line


def test_a_port_out_of_range_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--port", "99999"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "99999" in line


@pytest.mark.parametrize("command", [["serve"], ["generate", "-p", "hi"]])
def test_a_seed_out_of_range_is_one_clear_line(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "./nowhere", "--seed", str(2**64)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(2**64) in line


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ("generate", ["--kv-events-endpoint", "tcp://127.0.0.1:5557"], "published by a server"),
        ("generate", ["--disk-cache-dir", "/tmp"], "give disk_cache_bytes"),
        ("serve", ["--disk-cache-dir", "/tmp"], "give disk_cache_bytes"),
    ],
)
def test_a_flag_that_would_do_nothing_is_one_clear_line(
    command: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["-p", "hi"] if command == "generate" else []
    assert main([command, "./nowhere", *prompt, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_device_that_is_not_there_is_one_clear_line(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", model, "-p", "hi", "--device", "abacus"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "'abacus'" in line


def test_a_missing_model_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "./nowhere", "-p", "hi"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "./nowhere" in line


@pytest.mark.slow
def test_serve_gives_no_address_of_a_model_that_is_not_there() -> None:
    command = [sys.executable, "-m", "mstar", "serve", "./nowhere", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "is loading ./nowhere" in done.stderr
    assert "http://" not in done.stderr
    assert "non-default settings: {'port': 0}" in done.stderr


def test_a_bad_sampling_value_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "./nowhere", "-p", "hi", "--temperature", "-1"]) == 2
    assert "temperature" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["-p", ""], "empty"),
        (["hello", ""], "empty"),
        (["hello", "--max-model-len", "10"], "max_tokens to 5"),
        (["hello", "--chat", "--max-model-len", "70"], "max_tokens to 59"),
        (["hello" * 9, "--max-model-len", "10"], "shorten the prompt"),
    ],
)
def test_a_prompt_that_cannot_run_is_told_before_weights_are_loaded(
    flags: list[str],
    word: str,
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mstar.library.open_engine", pytest.fail)
    assert main(["generate", model, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line


def test_an_empty_message_is_no_empty_prompt(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--chat", "-n", "2", "--num-pages", "64", "--temperature", "0"]
    assert main(["generate", model, "", *flags]) == 0
    assert capsys.readouterr().out == "01\n"


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("2k", 2000), ("2KiB", 2048), ("1.5GiB", 3 * 2**29), (" 3 M ", 3_000_000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "1 parsec", "inf", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_size(text)


def test_generate_prints_the_answer(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", model, "-p", "A", "--temperature", "0", "--num_pages", "64"]) == 0
    captured = capsys.readouterr()
    assert captured.out == EMOJI_TEXT + "\n"
    assert "1 tokens in" in captured.err


def test_generate_prints_as_it_goes_and_keeps_what_is_there_when_interrupted(model: str) -> None:
    command = [sys.executable, "-m", "mstar", "generate", model, "-p", "3", "--ignore-eos"]
    command += ["--temperature", "0", "--num-pages", "64", "-n", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        begin = run.stdout.read(40)
        run.send_signal(signal.SIGINT)
        rest, _ = run.communicate(timeout=60)
    assert run.returncode == 130
    text = (begin + rest).decode()
    assert text.startswith("4567890123")
    assert text.endswith("\n")
    assert len(text) < 1000


def test_the_seed_decides_what_prompts_without_one_are_answered(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for seed in ("5", "5", "6"):
        flags = ["--temperature", "30", "-n", "16", "--num-pages", "64", "--seed", seed]
        assert main(["generate", model, "-p", "3", "-p", "3", *flags]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]
    _, first, second = answers[0].split("--- 3\n")
    assert first != second


def test_generate_refuses_what_the_model_cannot_do_before_its_weights_are_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = SimpleNamespace(tasks=frozenset({"transcription"}))
    monkeypatch.setattr("mstar.catalog.locate", lambda name: name)
    monkeypatch.setattr("mstar.catalog.load_processor_of", lambda where: processor)
    for flags, message in (([], "continues no texts"), (["--chat"], "answers no chats")):
        assert main(["generate", "ears", "Hi", *flags]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "serve one that does, such as smollm2-135m" in error


@pytest.mark.parametrize("given", [None, "7"])
def test_threads_wait_briefly_unless_the_user_says_otherwise(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", given or "")
    if given is None:
        monkeypatch.delenv("GOMP_SPINCOUNT")
    with pytest.raises(SystemExit):
        main(["--version"])
    assert os.environ["GOMP_SPINCOUNT"] == (given or "3000")


def test_generate_takes_several_prompts_and_stops(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--temperature", "0", "-n", "4", "--stop", "7", "--num-pages", "64"]
    assert main(["generate", model, "-p", "3", "-p", "8", *flags]) == 0
    assert capsys.readouterr().out == "--- 3\n456\n--- 8\n9012\n"


@pytest.mark.parametrize(
    "words", [["3", "8"], ["3", "-p", "8"], ["-p", "8", "3"], ["-p", "8", "--", "3"]]
)
def test_prompts_stand_behind_the_model_or_behind_flags(
    words: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--temperature", "0", "-n", "2", "--num-pages", "64"]
    assert main(["generate", model, *flags, *words]) == 0
    assert capsys.readouterr().out == "--- 3\n45\n--- 8\n90\n"


def _talk(model: str, typed: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert main(["chat", model, "--num-pages", "64", *flags]) == 0


def test_chat_says_that_an_answer_was_cut_and_goes_on(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _talk(model, "3\nA\n", monkeypatch, "--temperature", "0", "-n", "4")
    captured = capsys.readouterr()
    assert captured.out == f"4567\n{EMOJI_TEXT[:1]}\n"
    first, second = (line for line in captured.err.splitlines() if line.startswith("["))
    assert "4 out" in first
    assert first.endswith("; cut by --max-tokens]")
    assert second.endswith("; cut by --max-tokens]")


def test_chat_has_a_cap_of_its_own(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _talk(model, "3\n", monkeypatch, "--temperature", "0")
    assert "512 out" in capsys.readouterr().err


def test_chat_fills_what_is_left_of_the_context_and_says_so(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _talk(model, "3\n", monkeypatch, "--temperature", "0", "--max-model-len", "40")
    captured = capsys.readouterr()
    num_left = 40 - len("<user>3")
    assert captured.out.startswith("4567890")
    assert f"{num_left} out" in captured.err
    assert "context is full" in captured.err


def test_chat_says_nothing_of_an_answer_that_ended_by_itself(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _talk(model, "A\n", monkeypatch, "--temperature", "0")
    err = capsys.readouterr().err
    assert " ms]" in err
    assert "cut" not in err


def test_chat_takes_no_command_for_a_message(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _talk(model, "/help\n/hlep me\n/exit\n", monkeypatch)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "[" not in captured.err
    assert captured.err.count("/reset forgets the talk") == 3
    assert "there is no /hlep" in captured.err


def test_chat_takes_a_path_for_a_message(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _talk(model, "/etc/hosts A\n", monkeypatch, "--temperature", "0")
    assert capsys.readouterr().out == f"{EMOJI_TEXT}\n"


def test_chat_samples_as_the_checkpoint_says(tmp_path: Path) -> None:
    assert sampling_defaults(str(tmp_path)) == {"temperature": 0.7}
    stored = {"temperature": 0.6, "top_p": 0.95, "eos_token_id": 3, "top_k": "many"}
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    assert sampling_defaults(str(tmp_path)) == {"temperature": 0.6, "top_p": 0.95}


def test_chat_keeps_the_talk_and_forgets_it_on_reset(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("A\n\nxA\n/reset\nA\n/exit\nnever\n"))
    assert main(["chat", model, "--temperature", "0", "--num-pages", "64"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{EMOJI_TEXT}\n" * 3
    counts = [line for line in captured.err.splitlines() if line.startswith("[")]
    lengths = [int(line[1:].split()[0]) for line in counts]
    assert len(lengths) == 3
    assert lengths[0] == lengths[2] == len("<user>A")
    assert lengths[1] > lengths[0]


def test_chat_that_has_outgrown_the_context_says_how_to_go_on(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("A\n" + "x" * 300 + "\nA\n"))
    flags = ["--temperature", "0", "--num-pages", "64", "--max-model-len", "256"]
    assert main(["chat", model, *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{EMOJI_TEXT}\n" * 2
    assert "/reset forgets the talk)" in captured.err


def test_an_answer_that_the_terminal_cannot_show_is_no_error(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["generate", model, "-p", "A", "--temperature", "0", "--num-pages", "64"]) == 0
    sys.stdout.flush()
    assert shown.getvalue() == EMOJI_TEXT.encode("ascii", "replace") + b"\n"


def test_env_lists_every_kernel_that_is_built_at_installation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = Path(__file__).parents[1] / "setup.py"
    built = re.findall(r'extension\("([\w.]+)"\)', script.read_text())
    assert built
    assert main(["env"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = [words[1] for words in rows if words[0] == "kernel"]
    assert sorted(shown) == sorted(module.rpartition(".")[2] for module in built)


def test_env_lists_versions_and_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MSTAR_API_KEY", "sesame")
    monkeypatch.setenv("MSTAR_TYPO", "1")
    monkeypatch.setenv("MSTAR_CACHE", str(tmp_path))
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    parts = ("python", "torch", "kernel _paged", "kernel _flash", "kernel _fused", "onnxruntime")
    for part in (
        *parts,
        "model smollm2-135m",
        "model voice",
        "models by id",
        "MSTAR_TYPO",
        str(tmp_path),
    ):
        assert part in text
    assert "sesame" not in text


def test_generate_leaves_its_pages_on_disk_for_the_next(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--disk-cache-space", "16MiB", "--disk-cache-dir", str(tmp_path), "-n", "2"]
    for cached in (0, 48):
        assert main(["generate", model, "-p", "34" * 25, "--num-pages", "16", *flags]) == 0
        assert f"50 tokens in ({cached} cached)" in capsys.readouterr().err
