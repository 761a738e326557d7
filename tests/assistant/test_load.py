"""What can be said of the voice assistant before its weights are loaded."""

from typing import NoReturn

import pytest

from mstar.catalog import describe_model, load_model, writer_of
from mstar.cli.answerers import abilities_here
from mstar.cli.chat import sampling_defaults
from mstar.engine.graph_checks import check_graph
from mstar.errors import ConfigError, ModelNotFoundError, UnsupportedError
from mstar.models.base import Description

for package in ("soxr", "onnxruntime", "piper"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def described() -> Description:
    try:
        return describe_model("voice")[0]
    except (ModelNotFoundError, UnsupportedError) as error:
        pytest.skip(str(error))


def test_its_graph_is_one_that_would_be_loaded(described: Description) -> None:
    check_graph(described.graph, {"audio": "listen.encoder"})
    names = {key for spec in described.specs for key in spec.nodes}
    assert names < set(described.graph.nodes)


def test_its_dtype_is_that_of_the_language_model_or_what_is_asked_for(
    described: Description,
) -> None:
    assert describe_model("voice")[1] == describe_model("smollm2-135m")[1]
    assert describe_model("voice", dtype="float32")[1] == "float32"


def test_its_kv_depends_on_the_weights_of_listener_and_language_model(
    described: Description,
) -> None:
    assert described.root_constants is not None
    parts = [describe_model(name)[0].root_constants for name in ("whisper-base", "smollm2-135m")]
    weights = [part["weights"] for part in parts if part is not None]
    assert described.root_constants["weights"].split() == weights
    assert len(weights) == 2


def test_it_chats_as_its_language_model_does(described: Description) -> None:
    assert writer_of("voice") == "smollm2-135m"
    assert writer_of("piper") == "piper"
    assert sampling_defaults("voice") == sampling_defaults("smollm2-135m")
    assert abilities_here("voice") == (("text", "audio"), ("text", "audio"))
    with pytest.raises(UnsupportedError, match="piper does not chat; what it does is speech"):
        abilities_here("piper")


def test_weights_that_are_drawn_are_refused() -> None:
    for make in (describe_model, load_model):
        with pytest.raises(ConfigError, match="load_format is 'dummy'; voice is put together"):
            make("voice", load_format="dummy")


def test_a_speaker_that_cannot_run_is_missed_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def refuse(name: str, **_: object) -> NoReturn:
        asked.append(name)
        raise UnsupportedError("onnxruntime is missing")

    monkeypatch.setattr("mstar.assistant.load.load_model", refuse)
    with pytest.raises(UnsupportedError, match="onnxruntime is missing"):
        load_model("voice")
    assert asked == ["piper"]


@pytest.mark.slow
def test_what_is_described_is_what_is_loaded(described: Description) -> None:
    told: list[tuple[int, int]] = []
    model, _ = load_model("voice", progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert {(100, 300), (200, 300), (300, 300)} < set(told)
    assert described.graph == model.graph
    assert tuple(model.nodes) == model.graph.nodes
    assert list(described.specs) == list(model.specs)
    assert described.root_constants == model.root_constants
    assert described.vocab_size == model.vocab_size
    assert described.max_model_len == model.max_model_len
