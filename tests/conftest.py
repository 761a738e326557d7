"""What all tests share: one torch thread, models that cost milliseconds, and no GPU by surprise."""

import importlib.util
import signal
from collections.abc import Iterator

import pytest
import torch

from mstar.models.decoder import DecoderModel
from mstar.models.toy import toy_model


def pytest_configure() -> None:
    # A shell starts what runs in the background with this signal ignored, and so would be the
    # programs under test, which are to end by it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("mstar.engine.resources.attention._paged") is None:
        for item in items:
            if isinstance(item, pytest.Function) and _asks_for_paged(item):
                item.add_marker(pytest.mark.skip(reason="the kernel _paged is not built"))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


def _asks_for_paged(item: pytest.Function) -> bool:
    given = getattr(item, "callspec", None)
    return given is not None and given.params.get("backend") == "paged"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products lose more to a second thread than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def toy() -> DecoderModel:
    """The toy model, fresh for each test, so that a test may replace its node."""
    return toy_model()
