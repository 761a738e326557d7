"""`mstar cache root`: what the keys of a deployment commit to."""

import argparse
import json
import re
from collections.abc import Mapping
from typing import Any

from mstar.cli.cache_arguments import (
    add_deployment,
    add_json,
    add_server,
    client_of,
    options_of,
)
from mstar.errors import ConfigError

ROUTE = "/v1/cache/root"
# A name, or a call without calls inside, and the same again.
_REPEATED = re.compile(r"\b(\w+(?:\([^()]*\))?)(?:, \1(?![\w(=]))+")


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `root`."""
    text = "List what page keys commit to: weights, shape, dtype, page size and the rest."
    parser = commands.add_parser("root", help=text, description=text, allow_abbrev=False)
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a model as for serve; or give --url"
    )
    add_deployment(parser)
    add_server(parser, default=None)
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if (arguments.model is None) == (arguments.url is None):
        raise ConfigError("name either a MODEL or, with --url, a running server")
    if arguments.url is not None:
        report: Mapping[str, Any] = client_of(arguments).get(ROUTE)
    else:
        from mstar.cli.served import root_of  # noqa: PLC0415 - loads torch

        report = root_of(options_of(arguments, arguments.model)).report()
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(root_lines(report)))
    return 0


def root_lines(report: Mapping[str, Any], most: int | None = None) -> list[str]:
    """Return a root's report as lines for a person.

    Args:
        report: ``root`` in hexadecimal or ``None``, ``constants`` by name, ``missing`` in words.
        most: Characters of a value to show; ``None``: all.
    """
    constants: Mapping[str, str] = report.get("constants") or {}
    missing = report.get("missing") or ()
    root = report.get("root")
    width = max((len(name) for name in constants), default=0)
    lines = [f"root  {root}" if root else "root  none: the cache is shut, nothing is reused"]
    lines += [f"  because {reason}" for reason in missing]
    for name, value in constants.items():
        text = folded(value)
        shown = text if most is None or len(text) <= most else f"{text[:most]}…"
        lines.append(f"  {name:<{width}}  {shown}")
    return lines


def folded(value: str) -> str:
    """Return a constant's text with repetitions counted instead of written out.

    >>> folded("windows=(None, None, None), rope=(A(x=1), A(x=1), A(x=2))")
    'windows=(3 x None), rope=(2 x A(x=1), A(x=2))'
    """
    return _REPEATED.sub(lambda m: f"{m[0].count(m[1])} x {m[1]}", value)
