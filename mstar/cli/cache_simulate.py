"""`mstar cache simulate`: what a request trace would find in the cache, without a model."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mstar.cli.parser import at_least
from mstar.errors import ConfigError

_UNLIMITED = "unlimited"


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `simulate`."""
    text = "Replay a request trace through the cache, without a model, and count what is reused."
    parser: argparse.ArgumentParser = commands.add_parser(
        "simulate", help=text, description=text, allow_abbrev=False
    )
    parser.set_defaults(run=_simulate)
    add = parser.add_argument
    add(
        "trace",
        type=Path,
        metavar="TRACE",
        help="requests in Mooncake's format, JSON lines (.jsonl or .jsonl.gz)",
    )
    add(
        "--pages",
        type=_list_of(_pool),
        default=[None],
        metavar="N[,N…]",
        help=f"pool sizes, in pages; {_UNLIMITED!r} is one that never fills (the default)",
    )
    add(
        "--page-size",
        type=_list_of(at_least(1)),
        default=[512],
        metavar="N[,N…]",
        help="page sizes, in tokens; each divides the trace's blocks of 512 (default: 512)",
    )
    add(
        "--outputs",
        action="store_true",
        help="store generated tokens too; nobody else has them, so they only take room",
    )
    add(
        "--concurrency",
        type=at_least(1),
        default=1,
        metavar="N",
        help="requests open at once; arrival times are not read (default: %(default)s)",
    )
    add("--limit", type=at_least(1), metavar="N", help="replay the first N requests only")
    add("--json", type=Path, metavar="FILE", help="write the counts here as JSON")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the hit rate by pool size (.svg or .png; needs the extra 'plot')",
    )


def _pool(text: str) -> int | None:
    return None if text == _UNLIMITED else at_least(1)(text)


def _list_of(parse: Callable[[str], int | None]) -> Callable[[str], list[int | None]]:
    def parse_all(text: str) -> list[int | None]:
        return [parse(part.strip()) for part in text.split(",")]

    return parse_all


def _simulate(arguments: argparse.Namespace) -> int:
    from mstar.simulate.outcome import Reading, Setup  # noqa: PLC0415
    from mstar.simulate.report import as_json, check_plot, plot, table  # noqa: PLC0415
    from mstar.simulate.trace import read_trace  # noqa: PLC0415

    if arguments.plot is not None:
        check_plot(arguments.plot)
    for path in (arguments.json, arguments.plot):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: {path.parent} is no folder")
    setups = [
        Setup(
            page_size=page_size,
            num_pages=num_pages,
            concurrency=arguments.concurrency,
            outputs=arguments.outputs,
        )
        for page_size in arguments.page_size
        for num_pages in arguments.pages
    ]
    requests = read_trace(arguments.trace, arguments.limit)
    # Torch takes seconds to load; mistakes of the user are answered before.
    from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415

    from mstar.simulate.replay import replay  # noqa: PLC0415

    outcomes = []
    with tqdm(
        total=len(requests) * len(setups) * len(Reading),
        desc=arguments.trace.name,
        unit="request",
        leave=False,
        disable=None,
        file=sys.stderr,
    ) as bar:
        for setup in setups:
            outcomes += [replay(requests, setup, reading, bar.update) for reading in Reading]
    print(table(outcomes))
    name = arguments.trace.name
    if arguments.json is not None:
        _write(arguments.json, lambda path: path.write_bytes(as_json(name, outcomes)))
    if arguments.plot is not None:
        _write(arguments.plot, lambda path: plot(name, outcomes, path))
    return 0


def _write(path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
