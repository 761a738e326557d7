"""What a model declares about attention, and the backends there are."""

from dataclasses import dataclass, field

from mstar.engine.resources.base import Resource
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ResourceStep
from mstar.errors import ConfigError

BACKENDS: dict[str, str] = {
    "paged": "mstar.engine.resources.attention.paged",
    "flashinfer": "mstar.engine.resources.attention.flashinfer",
    "sdpa": "mstar.engine.resources.attention.sdpa",
    "eager": "mstar.engine.resources.attention.eager",
}
"""Backend name to module, in the order in which they are asked; each has a class ``Backend``."""


def check_backend(name: str | None) -> None:
    """Refuse a name of no backend; ``None`` leaves it open.

    Raises:
        ConfigError: With those there are.
    """
    if name is not None and name not in BACKENDS:
        raise ConfigError(
            f"attention_backend is {name!r}; there are {', '.join(BACKENDS)}, "
            "or leave it out to take the first that works"
        )


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """What one layer asks of attention beyond the shapes.

    Raises:
        ConfigError: If ``window`` or ``soft_cap`` is not positive.
    """

    window: int | None = None
    """A query sees itself and the ``window - 1`` slots before it; ``None``: all before it. What it
    sees behind itself, in a segment that is not causal, no window bounds."""
    soft_cap: float | None = None
    """Scores become ``soft_cap * tanh(scores / soft_cap)`` before the mask."""

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window is {self.window} tokens; it must be at least 1 or None")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ConfigError(f"soft_cap is {self.soft_cap}; it must be above 0 or None")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Heads, scale and per-layer rules of a node's attention."""

    kv_cache: str
    """Resource key of the KV cache that is attended to."""
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the scores, usually ``head_dim ** -0.5``."""
    layers: tuple[LayerAttention, ...] = field(default_factory=tuple)
    """One a layer."""

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_qo_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_qo_heads ({self.num_qo_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )


@dataclass(frozen=True)
class AttentionSpec(NodeResourceSpec):
    """A node's need of attention over a KV cache."""

    config: AttentionConfig

    @property
    def resource_class(self) -> type[Resource]:
        """The attention manager, whose ``build`` picks the backend."""
        from mstar.engine.resources.attention.manager import AttentionManager

        return AttentionManager


@dataclass(frozen=True)
class AttentionStep(ResourceStep):
    """How the step's segments attend."""

    is_causal: tuple[bool, ...] | None = None
    """Per segment; ``None``: all causal. In a segment that is not, queries see the slots behind
    their own, too."""
