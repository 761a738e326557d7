"""The parser of arguments: short complaints that say what was perhaps meant."""

import argparse
import difflib
import sys
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that takes ``_`` for ``-`` in flags, and words wherever they stand.

    Args:
        rest: Attribute, declared as a list of words, that also takes the words behind flags; they
            are refused where it is ``None``.
    """

    def __init__(self, *args: Any, rest: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rest = rest

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, with flags spelt as they are declared; nothing is left over."""
        given = sys.argv[1:] if args is None else list(args)
        found, extra = super().parse_known_args([_dashes(arg) for arg in given], namespace)
        end = extra.index("--") if "--" in extra else len(extra)
        for word in extra[:end]:
            if word.startswith("-") and word != "-":
                self.error(self._unknown_flag(word.partition("=")[0]))
        extra = extra[:end] + extra[end + 1 :]
        if extra and self._rest is None:
            self.error(f"{extra[0]!r} is one argument too many")
        if extra:
            # argparse fills a list from the first run of words alone, which may be empty.
            setattr(found, str(self._rest), getattr(found, str(self._rest)) + extra)
        return found, []

    def error(self, message: str) -> NoReturn:
        """End with one line instead of the usage, which has dozens of flags."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def _unknown_flag(self, flag: str) -> str:
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
        return f"there is no flag {flag}" + (f", did you mean {near[0]}?" if near else "")


def _dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def at_least(low: int) -> Callable[[str], int]:
    """Return a reader of integers that are not below a bound."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        return value

    return read
