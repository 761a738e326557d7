import numpy as np
import pytest

from mstar.errors import WeightsError
from mstar.models.onnx import OnnxSession
from mstar.models.speech.onnx_noise import with_noise_inputs
from tests.models.onnx_graphs import FLOAT, field, integer, model, node, noisy, scaled, tensor

pytest.importorskip("onnxruntime")
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def _session(content: bytes) -> OnnxSession:
    return OnnxSession(content, threads=1)


def test_the_noise_of_a_graph_becomes_inputs_one_for_each_draw() -> None:
    content, names = with_noise_inputs(noisy())
    assert len(names) == 2
    session = _session(content)
    assert [port.name for port in session.inputs] == ["x", *names]
    first, second = (np.random.default_rng(n).standard_normal(6, np.float32) for n in (1, 2))
    found = session.run({"x": X, names[0]: first, names[1]: second})
    assert np.array_equal(found["y"], X + first.reshape(2, 3))
    assert np.array_equal(found["z"], X + second.reshape(2, 3))
    again = session.run({"x": X, names[0]: first, names[1]: second})
    assert np.array_equal(again["y"], found["y"])


def test_noise_that_is_too_long_is_cut_and_too_short_comes_over_again() -> None:
    content, names = with_noise_inputs(noisy())
    noise = np.array([10, 20, 30, 40], np.float32)
    found = _session(content).run({"x": X, names[0]: noise, names[1]: np.zeros(99, np.float32)})
    assert np.array_equal(found["y"] - X, [[10, 20, 30], [40, 10, 20]])
    assert np.array_equal(found["z"], X)


def test_a_graph_without_noise_stays_as_it_is() -> None:
    assert with_noise_inputs(scaled()) == (scaled(), [])


def test_noise_of_another_kind_stays_in_the_graph() -> None:
    wide = node("RandomNormalLike", ["x"], ["y"], field(1, "scale") + b"\x15\x00\x00\x00\x40")
    double = node("RandomNormalLike", ["x"], ["y"], integer("dtype", 11))
    for drawn in (wide, double):
        content = model([drawn], [tensor("x", FLOAT, ["n"])], [tensor("y", FLOAT, ["n"])])
        assert with_noise_inputs(content) == (content, [])


def test_a_seed_in_the_graph_is_replaced_too() -> None:
    seeded = node("RandomNormalLike", ["x"], ["y"], field(1, "seed") + b"\x15\x00\x00\x80\x3f")
    content = model([seeded], [tensor("x", FLOAT, ["n"])], [tensor("y", FLOAT, ["n"])])
    changed, names = with_noise_inputs(content)
    noise = np.array([1, 2, 3], np.float32)
    found = _session(changed).run({"x": np.zeros(3, np.float32), names[0]: noise})
    assert found["y"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("content", [b"\x3a\x7fabc", b"\x3a", b"\x0b", b"\xff\xff", noisy()[:40]])
def test_bytes_that_are_no_model_are_refused(content: bytes) -> None:
    with pytest.raises(WeightsError, match="no ONNX model"):
        with_noise_inputs(content)
