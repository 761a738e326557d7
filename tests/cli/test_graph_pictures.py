"""The pictures that the documentation stores are what would be drawn today."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import mstar
from mstar.engine.graph_checks import check_graph
from mstar.errors import ModelNotFoundError

DOCS = Path(mstar.__file__).parents[1] / "docs"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_graphs", DOCS / "draw_graphs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DRAW = loaded()


@pytest.mark.parametrize("file", DRAW.pictures())
def test_stored_picture_is_what_is_drawn(file: str) -> None:
    try:
        drawn = DRAW.pictures()[file]()
    except ModelNotFoundError as error:
        pytest.skip(f"the package with the weights is not installed: {error}")
    assert (DOCS / "graphs" / file).read_text("utf-8") == drawn, "run python docs/draw_graphs.py"


def test_every_picture_is_shown() -> None:
    page = (DOCS / "graphs.md").read_text("utf-8")
    stored = {path.name for path in (DOCS / "graphs").iterdir()}
    assert stored == set(DRAW.pictures())
    assert all(f"](graphs/{file})" in page for file in stored)


def test_example_is_a_graph_that_would_be_loaded() -> None:
    check_graph(DRAW.EXAMPLE, {"audio": "listener"})
