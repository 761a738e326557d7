"""The names that log lines carry."""

import importlib.util
from pathlib import Path

import pytest

import mstar.server


@pytest.mark.parametrize("name", ["engine_process", "worker"])
def test_a_module_that_runs_as_a_program_logs_under_its_own_name(name: str) -> None:
    (folder,) = mstar.server.__path__
    spec = importlib.util.spec_from_file_location("as_a_program", Path(folder) / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.logger.name == f"mstar.server.{name}"
