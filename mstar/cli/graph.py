"""`mstar graph MODEL`: what a model is made of, and the ways that requests take through it."""

import argparse
from pathlib import Path
from typing import Any

from mstar.errors import StorageError


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `graph`."""
    text = "Draw a model's nodes, edges and walks; no weights are loaded."
    parser = commands.add_parser("graph", help=text, description=text, allow_abbrev=False)
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a GGUF file, a built-in name or a Hugging Face id"
    )
    parser.add_argument("--svg", metavar="FILE", help="write a picture instead of text")
    parser.add_argument(
        "--load-format",
        default="auto",
        metavar="FORMAT",
        help="auto, or dummy: needs nothing of the model but its config.json",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from mstar.catalog import describe_model  # noqa: PLC0415 - loads torch

    described, _ = describe_model(arguments.model, load_format=arguments.load_format)
    name, graph, specs = arguments.model, described.graph, described.specs
    if arguments.svg is None:
        from mstar.cli.graph_text import graph_text  # noqa: PLC0415

        print(graph_text(name, graph, specs))
        return 0
    from mstar.cli.graph_svg import graph_svg  # noqa: PLC0415

    try:
        Path(arguments.svg).expanduser().write_text(graph_svg(name, graph, specs), "utf-8")
    except OSError as error:
        raise StorageError(f"{arguments.svg} cannot be written: {error.strerror}") from error
    print(f"wrote {arguments.svg}")
    return 0
