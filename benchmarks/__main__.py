"""Runs benchmarks by name and prints a table each: ``python -m benchmarks keys scheduler …``."""

import argparse
import importlib
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

ALL = tuple(
    sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
)


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows as a Markdown table; columns are those of the first row that has them."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def main() -> None:
    """Run the named benchmarks, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"what to measure (default: all): {', '.join(ALL)}; a GPU: python -m benchmarks.gpu",
    )
    names = parser.parse_args().names
    unknown = sorted(set(names) - set(ALL))
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(ALL)}")
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads, Python {platform.python_version()}"
    )
    for name in names or ALL:
        module = importlib.import_module(f"benchmarks.bench_{name}")
        print(f"\n## {name}\n\n{(module.__doc__ or '').strip()}\n")
        print(table(module.run()), flush=True)


if __name__ == "__main__":
    main()
