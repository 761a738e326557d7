import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from mstar.errors import ConfigError, UnsupportedError
from mstar.simulate.outcome import Outcome, Reading, Setup
from mstar.simulate.report import as_json, check_plot, plot, table


def outcome(page_size: int, num_pages: int | None, reading: Reading, hits: int) -> Outcome:
    return Outcome(
        setup=Setup(page_size=page_size, num_pages=num_pages),
        reading=reading,
        num_requests=12_031,
        num_refused=2,
        num_waits=3,
        num_preempted=4,
        num_hits=hits,
        num_possible=200_000,
        num_evictions=55_555,
        seconds=1.25,
    )


OUTCOMES = [
    outcome(page_size, num_pages, reading, hits)
    for page_size in (128, 512)
    for num_pages, hits in ((None, 73_200), (10_000, 42_400), (1_000, 9_000))
    for reading in Reading
]


def test_a_table_has_a_line_an_outcome_and_columns_below_each_other() -> None:
    lines = table(OUTCOMES).splitlines()
    assert len(lines) == len(OUTCOMES) + 1
    assert len({len(text) for text in lines}) == 1
    first = "128 unlimited prefix rule 12,031 2 3 4 73,200 200,000 pages 36.6% 55,555 1.25"
    assert " ".join(lines[1].split()) == first
    assert lines[4].split()[1:4] == ["10,000", "as", "served"]
    end = lines[0].index("evictions") + len("evictions")
    assert all(text[:end].endswith("55,555") for text in lines[1:])


def test_json_has_every_count_by_name() -> None:
    data = json.loads(as_json("some.jsonl", OUTCOMES))
    assert (data["trace"], data["block_size"]) == ("some.jsonl", 512)
    assert len(data["results"]) == len(OUTCOMES)
    assert data["results"][0] == {
        "page_size": 128,
        "num_pages": None,
        "concurrency": 1,
        "outputs": False,
        "reading": "prefix rule",
        "unit": "pages",
        "num_requests": 12_031,
        "num_refused": 2,
        "num_waits": 3,
        "num_preempted": 4,
        "num_hits": 73_200,
        "num_possible": 200_000,
        "num_evictions": 55_555,
        "seconds": 1.25,
        "hit_rate": 0.366,
    }


@pytest.mark.parametrize(
    ("suffix", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("PNG", b"\x89PNG")]
)
@pytest.mark.parametrize("chosen", [OUTCOMES, OUTCOMES[:1], OUTCOMES[2:4]])
def test_a_plot_is_drawn_in_the_format_of_its_name(
    tmp_path: Path, suffix: str, magic: bytes, chosen: list[Outcome]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"rates.{suffix}"
    plot("some.jsonl", chosen, path)
    assert path.read_bytes().startswith(magic)


def test_a_plot_names_its_lines(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    path = tmp_path / "rates.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot("some.jsonl", OUTCOMES, path)
    text = path.read_text()
    for name in ("some.jsonl", "pool (tokens)", "hit rate"):
        assert name in text
    for page_size in (128, 512):
        for reading in Reading:
            assert f"page size {page_size}, {reading.value}<" in text
            assert f"page size {page_size}, {reading.value}, unlimited<" in text


def test_a_plot_of_another_format_is_refused(tmp_path: Path) -> None:
    for name in ("rates.pdf", "rates"):
        with pytest.raises(ConfigError, match=r"\.svg or \.png"):
            check_plot(tmp_path / name)


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec

    def hide(name: str, *rest: Any) -> Any:
        return None if name == "matplotlib" else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", hide)
    with pytest.raises(UnsupportedError, match=r"mstar-engine\[plot\]"):
        plot("some.jsonl", OUTCOMES, tmp_path / "rates.svg")
