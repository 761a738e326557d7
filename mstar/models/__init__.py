"""Model families, found by a checkpoint's architecture and imported on first use."""

import difflib
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from mstar.engine.model import Model
from mstar.errors import ConfigError, UnsupportedError
from mstar.models.memory import use_huge_pages

if TYPE_CHECKING:
    import torch

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "mstar.models.decoder",
    "MistralForCausalLM": "mstar.models.decoder",
    "Qwen2ForCausalLM": "mstar.models.decoder",
    "Qwen3ForCausalLM": "mstar.models.decoder",
    "Gemma3ForCausalLM": "mstar.models.decoder",
}
"""Architecture to the module whose ``load`` builds it."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Model, str]:
    """Load a model and return it with the name of the dtype it is in.

    Args:
        name: A folder, a GGUF file, a built-in name or a Hugging Face id.
        dtype: One of ``DTYPES``; ``auto`` is the checkpoint's own, bfloat16 for packed weights.
        device: Name of a torch device.
        load_format: One of ``LOAD_FORMATS``; ``dummy`` reads the config only and draws weights,
            for measurements.
        progress: Called with layers loaded and layers in all.

    Raises:
        ConfigError: If there is no such dtype, load format or device.
        ModelNotFoundError: If the name leads nowhere.
        WeightsError: If the checkpoint is broken.
        UnsupportedError: If the architecture is not built; names the nearest that is.
    """
    import torch  # noqa: PLC0415 - naming architectures must not load torch

    from mstar.models.checkpoint import open_checkpoint  # noqa: PLC0415
    from mstar.models.dummy import open_dummy  # noqa: PLC0415

    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format is {load_format!r}; it must be one of {', '.join(LOAD_FORMATS)}"
        )
    is_dummy = load_format == "dummy"
    target = _usable_device(device)
    checkpoint = open_dummy(name, target) if is_dummy else open_checkpoint(name)
    architecture = checkpoint.architecture
    module = ARCHITECTURES.get(architecture)
    if module is None:
        nearest = difflib.get_close_matches(architecture, ARCHITECTURES, 1, 0.0)
        raise UnsupportedError(
            f"{name}: architecture {architecture!r} is not built; the nearest that is: "
            f"{nearest[0]} (all: {', '.join(ARCHITECTURES)})"
        )
    if dtype == "auto":
        dtype = checkpoint.own_dtype
    model: Model = importlib.import_module(module).load(
        checkpoint,
        name=name,
        dtype=getattr(torch, dtype),
        device=target,
        progress=progress,
    )
    if target.type == "cpu":
        use_huge_pages()
    return model, dtype


def _usable_device(name: str) -> "torch.device":
    import torch  # noqa: PLC0415

    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device is {name!r}; models run on cpu and cuda")
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"device is {name!r}, which is not usable here; choose cpu, or cuda where torch finds "
            f"a GPU ({reason:.200})"
        ) from error
    return device
