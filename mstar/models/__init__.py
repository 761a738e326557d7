"""Model families, found by a checkpoint's architecture and imported on first use."""

import difflib
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mstar.engine.model import Model
from mstar.errors import ConfigError, UnsupportedError
from mstar.models.memory import use_huge_pages

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from mstar.models.base import Description
    from mstar.models.checkpoint import Checkpoint
    from mstar.models.parallel.shard import Shard

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "mstar.models.decoder",
    "MistralForCausalLM": "mstar.models.decoder",
    "Qwen2ForCausalLM": "mstar.models.decoder",
    "Qwen3ForCausalLM": "mstar.models.decoder",
    "Gemma3ForCausalLM": "mstar.models.decoder",
    "SmolLM3ForCausalLM": "mstar.models.smollm3",
    "WhisperForConditionalGeneration": "mstar.models.whisper.model",
    "JanusForConditionalGeneration": "mstar.models.janus.model",
    "Gemma3ForConditionalGeneration": "mstar.models.gemma3_vision",
    "Idefics3ForConditionalGeneration": "mstar.models.idefics3",
    "SmolVLMForConditionalGeneration": "mstar.models.idefics3",
    "PiperVoice": "mstar.models.speech.model",
    "KokoroVoice": "mstar.models.speech.model",
    "Qwen2_5_VLForConditionalGeneration": "mstar.models.qwen2_5_vl",
}
"""Architecture to the module whose ``load`` builds it and whose ``describe`` needs no weights."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    progress: Callable[[int, int], None] | None = None,
    shard: "Shard | None" = None,
) -> tuple[Model, str]:
    """Load a model and return it with the name of the dtype it is in.

    Args:
        name: A folder, a GGUF file, a built-in name or a Hugging Face id.
        dtype: One of ``DTYPES``; ``auto`` is the checkpoint's own, bfloat16 for packed weights.
        device: Name of a torch device.
        load_format: One of ``LOAD_FORMATS``; ``dummy`` reads the config only and draws weights,
            for measurements.
        progress: Called with layers loaded and layers in all.
        shard: The part of the model to load; ``None``: all of it.

    Raises:
        ConfigError: If there is no such dtype, load format or device, the weights do not fit, or
            the model cannot be dealt out over ranks.
        ModelNotFoundError: If the name leads nowhere.
        WeightsError: If the checkpoint is broken.
        UnsupportedError: If the architecture is not built; names the nearest that is.
    """
    import torch  # noqa: PLC0415 - naming architectures must not load torch

    _check_choices(dtype, load_format)
    target = usable_device(device)
    checkpoint, family = _open(name, target, load_format)
    own: dict[str, Any] = {} if shard is None else {"shard": shard}
    # The content is named while the weights are read: both take their time from the same files.
    checkpoint.begin_fingerprint()
    if dtype == "auto":
        dtype = checkpoint.own_dtype
    try:
        model: Model = family.load(
            checkpoint,
            name=name,
            dtype=getattr(torch, dtype),
            device=target,
            progress=progress,
            **own,
        )
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(target)
        placed = torch.cuda.memory_allocated(target)
        raise ConfigError(
            f"the weights of {name} do not fit on {device}: it has {total / 1e9:.2f} GB, "
            f"{placed / 1e9:.2f} GB of weights are placed and {free / 1e9:.2f} GB are free; choose "
            "a smaller model or dtype, or free the GPU"
        ) from error
    if target.type == "cpu":
        use_huge_pages()
    return model, dtype


def check_ranks(name: str, size: int, *, device: str = "cpu", load_format: str = "auto") -> None:
    """Refuse a number of ranks that a model cannot be dealt out over; reads no weights.

    Raises:
        ConfigError: With the numbers that will do.
        MstarError: As ``load_model`` does.
    """
    from mstar.models.parallel.shard import Shard  # noqa: PLC0415

    checkpoint, family = _open(name, usable_device(device), load_format)
    if not hasattr(family, "deal"):
        raise ConfigError(
            f"tensor_parallel_size is {size}; {checkpoint.architecture} runs on one device only"
        )
    family.deal(checkpoint, Shard(0, size))


def describe_model(
    name: str, *, dtype: str = "auto", device: str = "cpu", load_format: str = "auto"
) -> "tuple[Description, str]":
    """Return what a model says of itself, and the dtype it would be in; no weights are loaded.

    Args:
        name: A folder, a GGUF file, a built-in name or a Hugging Face id.
        dtype: One of ``DTYPES``; ``auto`` is the checkpoint's own, bfloat16 for packed weights.
        device: Name of a torch device.
        load_format: One of ``LOAD_FORMATS``.

    Raises:
        ConfigError: If there is no such dtype, load format or device.
        ModelNotFoundError: If the name leads nowhere.
        WeightsError: If the checkpoint is broken.
        UnsupportedError: If the architecture is not built; names the nearest that is.
    """
    _check_choices(dtype, load_format)
    checkpoint, family = _open(name, usable_device(device), load_format)
    described: Description = family.describe(checkpoint)
    return described, checkpoint.own_dtype if dtype == "auto" else dtype


def _check_choices(dtype: str, load_format: str) -> None:
    for name, value, known in (
        ("dtype", dtype, DTYPES),
        ("load_format", load_format, LOAD_FORMATS),
    ):
        if value not in known:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(known)}")


def _open(name: str, device: "torch.device", load_format: str) -> "tuple[Checkpoint, ModuleType]":
    """Return a model's checkpoint and the module of its family."""
    from mstar.models.checkpoint import open_checkpoint  # noqa: PLC0415
    from mstar.models.dummy import open_dummy  # noqa: PLC0415

    checkpoint = open_dummy(name, device) if load_format == "dummy" else open_checkpoint(name)
    architecture = checkpoint.architecture
    module = ARCHITECTURES.get(architecture)
    if module is None:
        nearest = difflib.get_close_matches(architecture, ARCHITECTURES, 1, 0.0)
        raise UnsupportedError(
            f"{name}: architecture {architecture!r} is not built; the nearest that is: "
            f"{nearest[0]} (all: {', '.join(ARCHITECTURES)})"
        )
    return checkpoint, importlib.import_module(module)


def usable_device(name: str) -> "torch.device":
    """Return the device of a name.

    Raises:
        ConfigError: If there is none, or models do not run there.
    """
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
