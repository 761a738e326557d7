"""A component's declaration that it needs a resource."""

from dataclasses import dataclass
from typing import Any

from mstar.engine.resources.base import Resource


@dataclass(frozen=True)
class NodeResourceSpec:
    """One resource of a model, and the nodes that use it."""

    resource_key: str
    nodes: set[str]
    config: Any
    """What the resource's folder declares in its ``config`` module."""

    @property
    def resource_class(self) -> type[Resource]:
        """Class whose ``build`` makes the manager; it may build a subclass."""
        raise NotImplementedError(f"{type(self).__name__} names no resource class")
