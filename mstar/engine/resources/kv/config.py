"""What a model declares about one paged KV cache."""

from dataclasses import dataclass

from mstar.engine.resources.base import Resource
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ResourceStep
from mstar.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class KVConfig:
    """Shape of a KV cache; its page size and number of pages belong to the deployment.

    Raises:
        ConfigError: If a size is not positive.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    root_constants: tuple[str, ...] = ()
    """Everything the KV depends on beyond the deployment's own numbers; enters the root key."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def page_nbytes(self, page_size: int, itemsize: int) -> int:
        """Return the bytes of one page over all layers, keys and values together.

        Args:
            page_size: Slots of a page, in tokens.
            itemsize: Bytes of one element.
        """
        return 2 * self.num_layers * page_size * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True)
class KVSpec(NodeResourceSpec):
    """A node's need of a paged KV cache."""

    config: KVConfig

    @property
    def resource_class(self) -> type[Resource]:
        """The KV manager."""
        from mstar.engine.resources.kv.manager import KVManager

        return KVManager


@dataclass(frozen=True)
class KVStep(ResourceStep):
    """Write every segment's new tokens behind what its stream has stored."""
