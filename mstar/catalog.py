"""What goes by a name: a checkpoint, or a model that is put together out of several."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mstar import models
from mstar.errors import ConfigError
from mstar.models.locate import COMPOSITES, resolve
from mstar.preprocess.processors import load_processor, load_tokenizer, takes_text_only
from mstar.preprocess.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from mstar.engine.engine import EngineCore
    from mstar.engine.model import Model
    from mstar.engine.resources.base import Deployment
    from mstar.models.base import Description


def locate(name: str) -> str:
    """Return where a model is, for ``load_prompting`` in another process; a composite's own name.

    Raises:
        ModelNotFoundError: If nothing goes by this name; says what was tried.
        WeightsError: If a built-in model's packages are damaged.
    """
    return name if _composite(name) is not None else str(resolve(name))


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> "tuple[Model, str]":
    """Load a model and return it with the name of the dtype it is in.

    Arguments and errors are those of ``mstar.models.load_model``.
    """
    composite = _composite(name)
    if composite is None:
        return models.load_model(
            name, dtype=dtype, device=device, load_format=load_format, progress=progress
        )
    _check_format(name, load_format)
    loaded: tuple[Model, str] = composite.load(name, dtype=dtype, device=device, progress=progress)
    return loaded


def open_engine(
    name: str,
    deployment: "Deployment",
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    progress: Callable[[int, int], None] | None = None,
    on_loss: Callable[[str], object] | None = None,
) -> "EngineCore":
    """Load a model and return the engine that serves it, on as many ranks as it is to have.

    Args:
        name: As for ``load_model``.
        deployment: The engine's numbers; its dtype is set from ``dtype``.
        dtype: As for ``load_model``.
        load_format: As for ``load_model``.
        progress: As for ``load_model``.
        on_loss: Told, by a thread of its own, when one of several ranks ends unasked.

    Raises:
        MstarError: As ``load_model`` and ``EngineCore`` do, and as ranks need it.
    """
    # Not before a model is to be loaded.
    from mstar.engine import memory  # noqa: PLC0415
    from mstar.engine.engine import EngineCore  # noqa: PLC0415
    from mstar.engine.resources.attention.config import check_backend  # noqa: PLC0415
    from mstar.models.parallel.ranks import open_ranks  # noqa: PLC0415

    # Before weights are read, which takes its time.
    deployment.check()
    check_backend(deployment.attention_backend)
    if deployment.tensor_parallel_size != 1:
        if _composite(name) is not None:
            raise ConfigError(
                f"tensor_parallel_size is {deployment.tensor_parallel_size}; {name!r} is put "
                "together out of several models, which run on one device"
            )
        return open_ranks(
            name,
            deployment,
            dtype=dtype,
            load_format=load_format,
            progress=progress,
            on_loss=on_loss,
        )
    model, dtype = load_model(
        name,
        dtype=dtype,
        device=deployment.device,
        load_format=load_format,
        progress=progress,
    )
    deployment = replace(deployment, dtype=dtype)
    if deployment.device.startswith("cuda"):
        deployment = memory.fit(deployment, model, partial(EngineCore, model))
    return EngineCore(model, deployment)


def describe_model(
    name: str, *, dtype: str = "auto", device: str = "cpu", load_format: str = "auto"
) -> "tuple[Description, str]":
    """Return what a model says of itself, and the dtype it would be in; no weights are loaded.

    Arguments and errors are those of ``mstar.models.describe_model``.
    """
    composite = _composite(name)
    if composite is None:
        return models.describe_model(name, dtype=dtype, device=device, load_format=load_format)
    _check_format(name, load_format)
    described: tuple[Description, str] = composite.describe(dtype=dtype, device=device)
    return described


def writer_of(name: str) -> str:
    """Return the name of the checkpoint that writes a model's answers; mostly it is the model."""
    composite = _composite(name)
    if composite is None:
        return name
    answerer: str = composite.ANSWERER
    return answerer


def load_prompting(where: str) -> tuple[TextTokenizer, object | None]:
    """Return the tokenizer and the processor that a model's prompts are prepared with.

    Args:
        where: What ``locate`` returned.

    Returns:
        Of the processor ``None`` where the model takes text only.

    Raises:
        WeightsError: If one of them is broken.
        UnsupportedError: If it is of an unknown kind.
    """
    composite = _composite(where)
    if composite is not None:
        found: tuple[TextTokenizer, object] = composite.load_prompting()
        return found
    path = Path(where)
    tokenizer = load_tokenizer(path)
    return tokenizer, load_processor(path, tokenizer)


def load_tokenizer_of(where: str) -> TextTokenizer:
    """Return the tokenizer of ``load_prompting``; errors are the same."""
    composite = _composite(where)
    if composite is not None:
        return load_prompting(where)[0]
    return load_tokenizer(Path(where))


def load_processor_of(where: str) -> object | None:
    """Return the processor of ``load_prompting``, without a tokenizer where there is none."""
    if _composite(where) is None and takes_text_only(Path(where)):
        return None
    return load_prompting(where)[1]


def _check_format(name: str, load_format: str) -> None:
    if load_format != "auto":
        raise ConfigError(
            f"load_format is {load_format!r}; {name} is put together of built-in models, whose "
            "weights are there: leave it at auto"
        )


def _composite(name: str) -> ModuleType | None:
    module = COMPOSITES.get(name.lower())
    return None if module is None or Path(name).exists() else importlib.import_module(module)
