"""Draws the graphs that the documentation shows: ``python docs/draw_graphs.py``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mstar.catalog import describe_model
from mstar.cli.graph_svg import graph_svg
from mstar.engine.chunks import Sentences, Sized
from mstar.engine.graph import Edge, ForEach, Graph, Loop, Parallel, Run

FOLDER = Path(__file__).parent / "graphs"
MODELS = ("smollm2-135m", "gemma3-270m", "whisper-base", "piper", "voice")

# begin example
EXAMPLE = Graph(
    nodes=("listener", "writer", "speaker", "vocoder"),
    edges=(
        Edge("listener", "writer", "audio"),
        Edge("writer", "speaker", "text", chunks=Sentences()),
        Edge("speaker", "vocoder", "codes", chunks=Sized(50, first=10)),
        Edge("listener", "vocoder", "timbre"),
    ),
    walks=(
        ("prefill", Run("writer")),
        (
            "answer",
            Parallel(
                Loop(Run("writer"), until="finished"),
                ForEach(Run("speaker"), "text"),
                ForEach(Run("vocoder"), "codes"),
            ),
        ),
    ),
    predicates=("finished",),
)
# end example


def pictures() -> dict[str, Callable[[], str]]:
    """Return what draws each picture, by the name of its file."""
    found: dict[str, Callable[[], str]] = {
        f"{name}.svg": partial(_picture_of, name) for name in MODELS
    }
    found["example.svg"] = partial(graph_svg, "example", EXAMPLE, ())
    return found


def _picture_of(name: str) -> str:
    described, _ = describe_model(name)
    return graph_svg(name, described.graph, described.specs)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, draw in pictures().items():
        (FOLDER / file).write_text(draw(), "utf-8")
