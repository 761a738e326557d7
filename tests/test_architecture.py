"""What importing a module loads, the exported names, and the shape of every resource's folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mstar

PACKAGE = Path(mstar.__file__).parent
RESOURCES = "mstar.engine.resources"
LIGHT = [
    "mstar",
    "mstar.errors",
    "mstar.engine.graph",
    "mstar.engine.request",
    "mstar.engine.output",
    "mstar.engine.batch",
    "mstar.engine.model",
    "mstar.engine.scheduler",
    "mstar.engine.root",
    "mstar.models",
    "mstar.cli",
    f"{RESOURCES}.base",
    f"{RESOURCES}.spec",
    f"{RESOURCES}.step",
    f"{RESOURCES}.kv.keys",
    f"{RESOURCES}.kv.config",
    f"{RESOURCES}.spans",
    f"{RESOURCES}.encoder.config",
    f"{RESOURCES}.kv.events",
    f"{RESOURCES}.kv.history",
    f"{RESOURCES}.kv.pages",
    f"{RESOURCES}.kv.prefix",
    f"{RESOURCES}.attention.config",
    f"{RESOURCES}.sampler.config",
]


def loaded_by(module: str) -> set[str]:
    """Return the modules that a fresh interpreter holds after one import."""
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("module", LIGHT)
def test_declarations_and_counting_do_not_load_torch(module: str) -> None:
    loaded = loaded_by(module)
    heavy = {name.partition(".")[0] for name in loaded} & {"torch", "transformers", "flashinfer"}
    assert not heavy, f"import {module} loads {heavy}"


def test_declaring_positions_loads_neither_their_manager_nor_kernels() -> None:
    loaded = loaded_by(f"{RESOURCES}.position.config")
    assert f"{RESOURCES}.position.manager" not in loaded
    assert not any(name.partition(".")[0] == "flashinfer" for name in loaded)


def test_engine_loads_no_model_and_no_web_library() -> None:
    loaded = loaded_by("mstar.engine.engine")
    assert not any(name.startswith("mstar.models") for name in loaded)
    assert not loaded & {"fastapi", "starlette", "uvicorn", "pydantic"}


def test_exported_names_are_these() -> None:
    assert mstar.__all__ == [
        "ChatTask",
        "Completion",
        "Deployment",
        "Engine",
        "ImageTask",
        "SamplingParams",
        "SpeechTask",
        "TranscriptionTask",
        "__version__",
    ]
    for name in mstar.__all__:
        assert getattr(mstar, name) is not None
    with pytest.raises(AttributeError, match="'nothing'"):
        mstar.nothing  # noqa: B018


def test_every_resource_is_a_folder_with_a_config_and_a_manager() -> None:
    folders = [path for path in (PACKAGE / "engine" / "resources").iterdir() if path.is_dir()]
    names = {path.name for path in folders} - {"__pycache__"}
    assert names == {"kv", "position", "attention", "encoder", "cross_attention", "sampler"}
    for name in names:
        files = {path.name for path in (PACKAGE / "engine" / "resources" / name).iterdir()}
        assert {"__init__.py", "config.py", "manager.py"} <= files, name


def test_folders_of_resources_import_nothing_by_themselves() -> None:
    for path in (PACKAGE / "engine" / "resources").glob("*/__init__.py"):
        assert "import" not in path.read_text().replace("imported", ""), path
