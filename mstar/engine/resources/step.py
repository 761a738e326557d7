"""Segments and steps: what one forward of a component asks of its resources."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Segment(NamedTuple):
    """A contiguous piece of one stream that a step covers."""

    request_id: str
    label: str
    """The stream of the request, ``"main"`` unless a model keeps several."""
    span: int
    """New slots, in tokens; 0 reads the stream without extending it."""


@dataclass(frozen=True)
class ResourceStep:
    """What a step asks of one resource; resources with more to say subclass it."""

    segments: tuple[Segment, ...] | None = None
    """The segments it concerns; ``None`` means those of the whole step."""


@dataclass(frozen=True)
class NodeStep:
    """A component's whole step: its segments, and a step per resource."""

    segments: tuple[Segment, ...]
    resources: Mapping[str, ResourceStep] = field(default_factory=dict)
    """Step of each resource by its key, in no particular order."""

    def segments_of(self, resource_key: str) -> tuple[Segment, ...]:
        """Return the segments that concern the resource ``resource_key``."""
        own = self.resources[resource_key].segments
        return self.segments if own is None else own
