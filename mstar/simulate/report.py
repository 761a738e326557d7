"""Shows what replays counted: a table, JSON, a plot."""

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from mstar.errors import ConfigError, UnsupportedError
from mstar.simulate.outcome import Outcome, Reading
from mstar.simulate.trace import BLOCK_LEN

_PLOT_SUFFIXES = (".svg", ".png")
_LINES = {Reading.AS_SERVED: "-o", Reading.PREFIX_RULE: ":o"}
_HEADS = (
    "page size",
    "pool pages",
    "reading",
    "requests",
    "refused",
    "waited",
    "preempted",
    "hit",
    "of",
    "",
    "hit rate",
    "evictions",
    "seconds",
)
_TEXT_COLUMNS = {2, 9}


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a line of text an outcome, below a head."""
    cells = [_HEADS, *map(_cells, outcomes)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if index in _TEXT_COLUMNS else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded))
    return "\n".join(lines)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    return (
        str(outcome.setup.page_size),
        _pool(outcome),
        outcome.reading.value,
        f"{outcome.num_requests:,}",
        f"{outcome.num_refused:,}",
        f"{outcome.num_waits:,}",
        f"{outcome.num_preempted:,}",
        f"{outcome.num_hits:,}",
        f"{outcome.num_possible:,}",
        outcome.reading.unit,
        f"{outcome.hit_rate:.1%}",
        f"{outcome.num_evictions:,}",
        f"{outcome.seconds:.2f}",
    )


def _pool(outcome: Outcome) -> str:
    num_pages = outcome.setup.num_pages
    return "unlimited" if num_pages is None else f"{num_pages:,}"


def as_json(trace: str, outcomes: Sequence[Outcome]) -> bytes:
    """Return the outcomes as indented JSON.

    Args:
        trace: Name of the trace.
        outcomes: What was counted; an unlimited pool has ``null`` pages.
    """
    results = []
    for outcome in outcomes:
        counts = asdict(outcome)
        shared = {**counts.pop("setup"), "reading": outcome.reading, "unit": outcome.reading.unit}
        results.append({**shared, **counts, "hit_rate": outcome.hit_rate})
    data = msgspec.json.encode({"trace": trace, "block_size": BLOCK_LEN, "results": results})
    return msgspec.json.format(data) + b"\n"


def check_plot(path: Path) -> None:
    """Refuse a plot that cannot be made, before work is spent on its data.

    Raises:
        ConfigError: If the file's name ends in neither ``.svg`` nor ``.png``.
        UnsupportedError: If matplotlib is not installed.
    """
    if path.suffix.lower() not in _PLOT_SUFFIXES:
        raise ConfigError(f"the plot is {str(path)!r}; its name must end in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            "a plot needs matplotlib, which is not installed",
            ["pip install 'mstar-engine[plot]'"],
        )


def plot(trace: str, outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw the hit rate by pool size, a colour a page size and a style a reading.

    Pools are compared by their tokens; an unlimited one is a level line.

    Args:
        trace: Name of the trace.
        outcomes: What was counted.
        path: Where the plot is written; the suffix is the format.

    Raises:
        ConfigError: As ``check_plot``.
        UnsupportedError: As ``check_plot``.
    """
    check_plot(path)
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import PercentFormatter  # noqa: PLC0415

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    page_sizes = sorted({outcome.setup.page_size for outcome in outcomes})
    for number, page_size in enumerate(page_sizes):
        for reading, style in _LINES.items():
            chosen = [o for o in outcomes if (o.setup.page_size, o.reading) == (page_size, reading)]
            limited = sorted(
                (o.setup.num_pages * page_size, o.hit_rate) for o in chosen if o.setup.num_pages
            )
            name = f"page size {page_size}, {reading.value}"
            if limited:
                axes.plot(*zip(*limited, strict=True), style, color=f"C{number}", label=name)
            for outcome in chosen:
                if outcome.setup.num_pages is None:
                    axes.axhline(
                        outcome.hit_rate,
                        linestyle="-." if reading is Reading.AS_SERVED else ":",
                        linewidth=1,
                        color=f"C{number}",
                        label=f"{name}, unlimited",
                    )
    axes.set(title=trace, xlabel="pool (tokens)", ylabel="hit rate", ylim=(0, 1))
    if any(outcome.setup.num_pages for outcome in outcomes):
        axes.set_xscale("log")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path)
