"""The tiny model's folder, and a server of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.processes import ServerProcess, write_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_server(tiny_folder: Path) -> Iterator[ServerProcess]:
    running = ServerProcess(tiny_folder, "--num-pages", "2048")
    try:
        yield running.wait_ready()
    finally:
        status = running.end()
    assert status == 0, running.log
