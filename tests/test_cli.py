"""The command line, in process where no server is needed."""

import argparse
import io
import subprocess
import sys
from pathlib import Path

import pytest

from mstar.cli import main, parse_size
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
        ["generate", "m"],
    ],
)
def test_wrong_arguments_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "mstar" in capsys.readouterr().err


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


def test_a_bad_sampling_value_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "./nowhere", "-p", "hi", "--temperature", "-1"]) == 2
    assert "temperature" in capsys.readouterr().err


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


def test_generate_takes_several_prompts_and_stops(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--temperature", "0", "-n", "4", "--stop", "7", "--num-pages", "64"]
    assert main(["generate", model, "-p", "3", "-p", "8", *flags]) == 0
    assert capsys.readouterr().out == "--- 3\n456\n--- 8\n9012\n"


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


def test_env_lists_versions_and_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MSTAR_API_KEY", "sesame")
    monkeypatch.setenv("MSTAR_TYPO", "1")
    monkeypatch.setenv("MSTAR_CACHE", str(tmp_path))
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    for part in ("python", "torch", "model smollm2-135m", "MSTAR_TYPO", str(tmp_path)):
        assert part in text
    assert "sesame" not in text
