"""What a model declares about cross attention, and what a step asks of it."""

from dataclasses import dataclass

from mstar.engine.resources.base import Item, Resource
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ResourceStep
from mstar.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CrossAttentionConfig:
    """Heads, scale and lengths of a decoder's attention to encoder outputs.

    Raises:
        ConfigError: If a size is not positive, or heads cannot be grouped.
    """

    num_layers: int
    """Layers of the decoder that attend to the outputs."""
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the scores, usually ``head_dim ** -0.5``."""
    max_length: int
    """Slots of the longest output, in tokens."""
    page_size: int
    """Slots that are handed out together; the best for outputs of one length is that length."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "max_length", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_qo_heads < 1 or self.num_qo_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_qo_heads ({self.num_qo_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )

    def num_pages(self, length: int) -> int:
        """Return the pages that an output of ``length`` slots takes."""
        return -(-length // self.page_size)


@dataclass(frozen=True)
class CrossAttentionSpec(NodeResourceSpec):
    """A need of cross attention: of the encoder that writes and the decoder that attends."""

    config: CrossAttentionConfig

    @property
    def resource_class(self) -> type[Resource]:
        """The manager of the keys and values."""
        from mstar.engine.resources.cross_attention.manager import CrossAttentionManager

        return CrossAttentionManager


@dataclass(frozen=True)
class CrossAttentionStep(ResourceStep):
    """Which outputs a step makes, or which output each of its segments attends to."""

    made: tuple[Item, ...] = ()
    read: tuple[bytes, ...] = ()
    """Name of the output of every segment, in their order; empty: the step reads nothing."""
