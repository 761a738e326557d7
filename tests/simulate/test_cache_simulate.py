"""The command `mstar cache simulate`."""

import argparse
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mstar.cli import cache_simulate, main
from mstar.errors import ConfigError, MstarError, TraceError

PROGRAM = """
import argparse, sys
from mstar.cli import cache_simulate
from mstar.errors import MstarError
parser = argparse.ArgumentParser()
cache_simulate.add_command(parser.add_subparsers())
arguments = parser.parse_args(sys.argv[1:])
try:
    arguments.run(arguments)
except MstarError:
    print("torch" in sys.modules)
"""


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    cache_simulate.add_command(parser.add_subparsers())
    parsed = parser.parse_args(["simulate", *map(str, arguments)])
    status: int = parsed.run(parsed)
    return status


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Four requests: a system prompt of one block, two talks, and one that is too long for 3."""
    requests = [(900, [0, 1]), (1024, [0, 2]), (900, [0, 1]), (1900, [0, 2, 3, 4])]
    lines = [
        json.dumps({"timestamp": 0, "input_length": n, "output_length": 9, "hash_ids": ids})
        for n, ids in requests
    ]
    path = tmp_path / "talks.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_both_readings_are_printed(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace) == 0
    printed = capsys.readouterr()
    head, by_rule, as_served = printed.out.splitlines()
    assert "hit rate" in head
    # Blocks 0, then 0 and 1, then 0 and 2 were seen before, of ten in all.
    assert by_rule.split()[:4] == ["512", "unlimited", "prefix", "rule"]
    assert by_rule.split()[8:12] == ["5", "10", "pages", "50.0%"]
    # Block 1 was never full; block 2 was.
    assert as_served.split()[8:11] == ["2,048", "4,724", "tokens"]
    assert printed.err == ""


def test_the_command_stands_below_cache(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "simulate", str(trace), "--page_size", "256"]) == 0
    assert "as served" in capsys.readouterr().out
    assert main(["cache", "simulate", str(trace), "--page-size", "100"]) == 2
    assert capsys.readouterr().err.startswith("mstar: the page size is 100 tokens")


def test_every_pool_and_page_size_is_replayed(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    run(trace, "--pages", "3,unlimited", "--page-size", "512,128", "--limit", 3, "--json", path)
    results = json.loads(path.read_text())["results"]
    assert [(r["page_size"], r["num_pages"]) for r in results[::2]] == [
        (512, 3),
        (512, None),
        (128, 3),
        (128, None),
    ]
    assert {r["num_requests"] for r in results} == {3}
    assert [r["num_refused"] for r in results] == [0, 0, 0, 0, 3, 3, 0, 0]
    assert results[0]["num_evictions"] == 0
    assert results[0]["num_hits"] == 3


def test_load_is_set_by_flags(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    run(trace, "--outputs", "--concurrency", 2, "--pages", 4, "--json", path)
    first = json.loads(path.read_text())["results"][0]
    assert (first["outputs"], first["concurrency"]) == (True, 2)
    # Four pages of prompt and one of output never fit four.
    assert first["num_refused"] == 1


def test_a_plot_is_written(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(trace, "--pages", "2,4,8", "--plot", tmp_path / "rates.svg")
    assert (tmp_path / "rates.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    "flags",
    [
        ["--pages", "0"],
        ["--pages", "1,,2"],
        ["--pages", "all"],
        ["--page-size", "unlimited"],
        ["--page-size", "-1"],
        ["--concurrency", "0"],
        ["--limit", "x"],
    ],
)
def test_flags_out_of_range_are_usage_errors(
    trace: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(trace, *flags)
    assert ended.value.code == 2
    assert f"argument {flags[0]}" in capsys.readouterr().err


def test_mistakes_are_typed_errors(trace: Path, tmp_path: Path) -> None:
    cases: list[tuple[type[MstarError], list[object], str]] = [
        (ConfigError, [trace, "--page-size", "48"], "48 tokens"),
        (ConfigError, [trace, "--page-size", "1024"], "1024 tokens"),
        (ConfigError, [trace, "--plot", "rates.pdf"], "rates.pdf"),
        (ConfigError, [trace, "--json", tmp_path / "none" / "x.json"], "is no folder"),
        (ConfigError, [trace, "--json", tmp_path], "cannot be written"),
        (TraceError, [tmp_path / "none.jsonl"], "none.jsonl"),
    ]
    for kind, arguments, named in cases:
        with pytest.raises(kind, match=named):
            run(*arguments)


@pytest.mark.slow
def test_mistakes_are_answered_before_torch_loads(trace: Path) -> None:
    for arguments in ([str(trace), "--page-size", "48"], ["none.jsonl"]):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "simulate", *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_processes_with_other_string_hashes_count_the_same(trace: Path, tmp_path: Path) -> None:
    found = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        flags = ["--pages", "3,4,unlimited", "--page-size", "256,512", "--outputs"]
        subprocess.run(
            [sys.executable, "-c", PROGRAM, "simulate", str(trace), *flags, "--json", str(path)],
            env={"PYTHONHASHSEED": seed},
            check=True,
            timeout=60,
            stdout=subprocess.DEVNULL,
        )
        results = json.loads(path.read_text())["results"]
        found.append([{**result, "seconds": 0} for result in results])
    assert found[0] == found[1]
