"""Models of the bug classes: plain, windowed, and one that reads pictures."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mstar.models.decoder import DecoderModel
from mstar.models.toy import toy_model
from mstar.models.toy_items import ToyEncoder, toy_item_model
from tests.laws.harness import Bench
from tests.reuse.bench import CASES, TIERS, OpenBench


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest) -> DecoderModel:
    architecture, changes = CASES[request.param]
    return toy_model(7, architecture, **changes)


@pytest.fixture(scope="module")
def reader() -> DecoderModel:
    """A model that reads pictures."""
    return toy_item_model()


@pytest.fixture
def encoder(reader: DecoderModel) -> ToyEncoder:
    found = reader.nodes["encoder"]
    assert isinstance(found, ToyEncoder)
    return found


@pytest.fixture(params=TIERS)
def tiers(request: pytest.FixtureRequest) -> dict[str, int]:
    """Numbers of a deployment that has these tiers."""
    return TIERS[request.param]


@pytest.fixture
def open_bench(tmp_path: Path) -> Iterator[OpenBench]:
    """Open benches whose pages on disk lie in one folder; they are closed with the test."""
    opened: list[Bench] = []

    def open_one(model: DecoderModel, **numbers: Any) -> Bench:
        if numbers.get("disk_cache_bytes"):
            numbers = {"disk_cache_dir": str(tmp_path / "pages")} | numbers
        opened.append(Bench(model, **numbers))
        return opened[-1]

    yield open_one
    for bench in opened:
        bench.engine.close()
