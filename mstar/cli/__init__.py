"""The command line; each module has one family of commands.

What a command needs is imported when it runs, so that help and mistakes answer at once.
"""

from mstar.cli.arguments import parse_size
from mstar.cli.main import main

__all__ = ["main", "parse_size"]
