"""The table of bug classes in the docs names the tests that there are, and all that are here."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reuse-bugs.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| what went wrong")
]


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the tests of a file: functions, and the cases of state machines."""
    found = set()
    for node in ast.parse((TESTS / path).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return frozenset(name for name in found if name.lower().startswith("test"))


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_every_test_that_the_table_names_is_there(path: str, name: str) -> None:
    assert name in names_in(path)


def test_every_test_of_this_folder_stands_in_the_table() -> None:
    here = {
        (f"reuse/{file.name}", name)
        for file in TESTS.joinpath("reuse").glob("test_*.py")
        if file != Path(__file__)
        for name in names_in(f"reuse/{file.name}")
    }
    assert here - set(NAMED) == set()


def test_every_class_has_tests_or_says_that_it_cannot_occur_yet() -> None:
    assert len(ROWS) == 55
    for what, tests, closed_by in ROWS:
        assert "`" in tests or "**not built**" in closed_by, what
        assert len(closed_by) > 3, what
    assert len({what for what, _, _ in ROWS}) == len(ROWS)
