"""Fixtures: the tiny model and servers that run it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.server.processes import ServerProcess, StartServer, TinyModel, write_tiny_model


@pytest.fixture
def anyio_backend() -> str:
    """Coroutines of tests run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start_server(tiny: TinyModel) -> Iterator[StartServer]:
    """Start servers that end with the test."""
    started: list[ServerProcess] = []

    def start(*flags: str, folder: Path | None = None) -> ServerProcess:
        started.append(ServerProcess(tiny.folder, *flags, folder=folder))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="module")
def server(tiny: TinyModel) -> Iterator[ServerProcess]:
    """One server for a module's tests; they leave it as they found it."""
    running = ServerProcess(tiny.folder, "--num-pages", "512", "--max-model-len", "2048")
    try:
        yield running.wait_ready()
    finally:
        status = running.end()
    assert status == 0, running.log


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with server.client() as opened:
        yield opened
