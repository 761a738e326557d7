"""Arguments that several cache commands have: which deployment, and which server."""

import argparse
import os
from typing import TYPE_CHECKING

from mstar.cli.client import DEFAULT_URL, Client
from mstar.cli.parser import at_least
from mstar.errors import ConfigError

if TYPE_CHECKING:
    from mstar.server.config import EngineOptions


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the flag for output that programs read."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_deployment(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `mstar serve` that keys depend on."""
    group = parser.add_argument_group("deployment")
    add = group.add_argument
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of weights and KV cache, as for serve (default: %(default)s)",
    )
    add("--device", default="cpu", help="where the model would run (default: %(default)s)")
    add(
        "--block-size",
        "--page-size",
        dest="page_size",
        type=at_least(1),
        metavar="N",
        help="tokens of one KV page, as for serve",
    )


def add_server(parser: argparse.ArgumentParser, default: str | None = DEFAULT_URL) -> None:
    """Add the flags that say where a server is."""
    group = parser.add_argument_group("server")
    shown = "" if default is None else " (default: %(default)s)"
    group.add_argument("--url", default=default, help=f"a running server{shown}")
    group.add_argument("--api-key", metavar="KEY", help="its key (default: $MSTAR_API_KEY)")


def options_of(arguments: argparse.Namespace, model: str | None) -> "EngineOptions":
    """Return what `mstar serve` would be started with.

    Raises:
        ConfigError: If no model is known.
    """
    from mstar.server.config import EngineOptions  # noqa: PLC0415

    if model is None:
        raise ConfigError("which model? give --model, or a body that names one in 'model'")
    return EngineOptions(
        model=model,
        dtype=arguments.dtype,
        device=arguments.device,
        page_size=arguments.page_size,
    )


def client_of(arguments: argparse.Namespace) -> Client:
    """Return a client of the server that the arguments name."""
    key = arguments.api_key
    return Client(arguments.url, os.environ.get("MSTAR_API_KEY") if key is None else key)
