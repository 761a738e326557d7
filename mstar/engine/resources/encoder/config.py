"""What a model declares about encoder outputs, and what a step asks of them."""

from dataclasses import dataclass

from mstar.engine.resources.base import Item, Resource
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ResourceStep
from mstar.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape of the outputs of one encoder.

    Raises:
        ConfigError: If the size is not positive.
    """

    hidden_size: int
    """Elements of one slot's output."""

    def __post_init__(self) -> None:
        if self.hidden_size < 1:
            raise ConfigError(f"hidden_size is {self.hidden_size}; it must be at least 1")


@dataclass(frozen=True)
class EncoderSpec(NodeResourceSpec):
    """A need of encoder outputs: of the node that makes them and of the nodes that read them."""

    config: EncoderConfig

    @property
    def resource_class(self) -> type[Resource]:
        """The encoder-output manager."""
        from mstar.engine.resources.encoder.manager import EncoderManager

        return EncoderManager


@dataclass(frozen=True)
class EncoderStep(ResourceStep):
    """Which outputs a step makes, and which it reads for the last time."""

    made: tuple[Item, ...] = ()
    done: tuple[Item, ...] = ()
    num_read: int = 0
    """Items that it reads something of."""
