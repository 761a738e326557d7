from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mstar.engine.array import from_numpy, to_numpy
from mstar.engine.batch import Batch
from mstar.engine.output import Emitted
from mstar.engine.request import Request
from mstar.errors import UnsupportedError, WeightsError
from mstar.models import onnx as onnx_module
from mstar.models.onnx import Feeds, Fetched, OnnxNode, OnnxSession, require
from tests.models.onnx_graphs import INT64, model, node, scaled, tensor

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def session() -> OnnxSession:
    return OnnxSession(scaled(), threads=1, name="scaled")


def _feeds(values: Sequence[float], factor: float) -> Feeds:
    return {"x": np.array([values], np.float32), "factor": np.array([factor], np.float32)}


def test_a_session_says_what_it_takes_and_gives(session: OnnxSession) -> None:
    x, factor = session.inputs
    assert (x.name, x.dtype.name, x.shape) == ("x", "float32", (None, None))
    assert (factor.name, factor.shape) == ("factor", (1,))
    assert [port.name for port in session.outputs] == ["y"]
    assert session.run(_feeds([1, 2], 3))["y"].tolist() == [[3, 6]]


def test_a_file_is_loaded_as_its_bytes_are(tmp_path: Path) -> None:
    path = tmp_path / "scaled.onnx"
    path.write_bytes(scaled())
    assert OnnxSession(path, threads=1).run(_feeds([1], 2))["y"].tolist() == [[2]]


def test_inputs_of_another_name_dtype_or_shape_are_refused_with_both(session: OnnxSession) -> None:
    right = dict(_feeds([1], 2))
    for wrong, words in (
        ({"x": right["x"]}, r"takes \['factor', 'x'\], not \['x'\]"),
        (right | {"x": right["x"].astype(np.float64)}, "takes float32.*not float64"),
        (right | {"x": right["x"][0]}, r"shape \(None, None\), not float32 of shape \(1,\)"),
        (right | {"factor": np.ones(2, np.float32)}, r"shape \(1,\), not float32 of shape \(2,\)"),
    ):
        with pytest.raises(AssertionError, match=words):
            session.run(wrong)


def _reshape() -> bytes:
    return model(
        [node("Reshape", ["x", "shape"], ["y"])],
        [tensor("x", 1, ["n"]), tensor("shape", INT64, ["r"])],
        [tensor("y", 1, ["m"])],
    )


def test_a_run_that_fails_says_which_graph_and_why() -> None:
    session = OnnxSession(_reshape(), threads=1, name="reshape")
    with pytest.raises(RuntimeError, match="reshape failed: "):
        session.run({"x": np.zeros(3, np.float32), "shape": np.array([7])})


@pytest.mark.parametrize("content", [b"", b"no graph", scaled()[:-20]])
def test_what_is_no_graph_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=r"broken\.onnx"):
        OnnxSession(path, threads=1)
    with pytest.raises(WeightsError, match="there is no such file"):
        OnnxSession(tmp_path / "none.onnx", threads=1)


def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(UnsupportedError, match=r"hearing needs no_such_x7.*mstar-engine\[speech\]"):
        require("no_such_x7.inside", "hearing")


def test_equal_shapes_share_a_run_and_every_result_is_as_if_alone(
    session: OnnxSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [_feeds([1, 2], 2), _feeds([5], 2), _feeds([3, 4], 2), _feeds([6, 7], 9)]
    alone = [session.run(feeds)["y"] for feeds in many]
    shapes = []
    run = OnnxSession.run

    def watched(self: OnnxSession, feeds: Feeds) -> Fetched:
        shapes.append(feeds["x"].shape)
        return run(self, feeds)

    monkeypatch.setattr(OnnxSession, "run", watched)
    together = session.run_all(many, frozenset({"x"}))
    # The factor of the last differs, so it has a run of its own.
    assert shapes == [(2, 2), (1, 1), (1, 2)]
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one, other["y"])
    shapes.clear()
    session.run_all(many, frozenset())
    assert len(shapes) == 4
    assert session.run_all([], frozenset()) == []


def test_runs_side_by_side_give_what_each_gives_alone_in_order() -> None:
    session = OnnxSession(scaled(), threads=3, side_by_side=True)
    assert session.num_at_once == 2
    many = [_feeds(list(range(n)), n) for n in range(1, 40)]
    found = session.run_all(many, frozenset())
    for feeds, fetched in zip(many, found, strict=True):
        assert np.array_equal(fetched["y"], session.run(feeds)["y"])


def test_one_thread_has_nothing_to_share() -> None:
    assert OnnxSession(scaled(), threads=1, side_by_side=True).num_at_once == 1


def test_a_run_that_fails_beside_another_says_why() -> None:
    session = OnnxSession(_reshape(), threads=2, name="reshape", side_by_side=True)
    good = {"x": np.zeros(3, np.float32), "shape": np.array([3])}
    bad = {"x": np.zeros(3, np.float32), "shape": np.array([7])}
    with pytest.raises(RuntimeError, match="reshape failed: "):
        session.run_all([good, bad], frozenset())
    assert len(session.run_all([good, good], frozenset())) == 2


class _Doubler(OnnxNode):
    """Doubles every number of a chunk by a run of its own."""

    def feeds(self, request: Request, chunk: object) -> Sequence[Feeds]:
        return [_feeds([value], 2) for value in cast("list[float]", chunk)]

    def emit(self, request: Request, chunk: object, fetched: Sequence[Fetched]) -> list[Emitted]:
        values = np.array([one["y"][0, 0] for one in fetched])
        return [Emitted(name="doubled", array=from_numpy(values))] if fetched else []


def test_a_node_gives_each_visit_its_own_runs(session: OnnxSession) -> None:
    doubler = _Doubler(session, frozenset({"x"}))
    requests: Any = [SimpleNamespace(request_id=str(n)) for n in range(3)]
    chunks: tuple[list[float], ...] = ([1.0, 2.0], [], [3.0])
    output = doubler.forward(
        Batch.of_visits("doubler", list(zip(requests, chunks, strict=True))), {}
    )
    assert list(output.token_ids) == []
    found = {
        place: [to_numpy(one.array).tolist() for one in emitted if one.array is not None]
        for place, emitted in output.emitted.items()
    }
    assert found == {0: [[2, 4]], 1: [], 2: [[6]]}


def test_inputs_to_stack_must_be_the_graphs(session: OnnxSession) -> None:
    with pytest.raises(AssertionError, match=r"scaled has no inputs \['nothing'\]"):
        _Doubler(session, frozenset({"nothing"}))


def test_a_session_takes_as_many_threads_as_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_module, "_torch_threads", lambda: 1)
    assert OnnxSession(scaled()).run(_feeds([1], 2))["y"].tolist() == [[2]]
