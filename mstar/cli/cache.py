"""Commands about prefix reuse: `mstar cache keys | root | explain | audit | simulate`."""

import argparse
from typing import Any

from mstar.cli import cache_audit, cache_explain, cache_keys, cache_root, cache_simulate


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `cache` and what stands below it."""
    text = "See what requests share, and why they do not."
    parser = commands.add_parser("cache", help=text, description=text, allow_abbrev=False)
    below = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for part in (cache_keys, cache_root, cache_explain, cache_audit, cache_simulate):
        part.add_command(below)
