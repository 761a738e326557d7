"""The contract that every resource's manager keeps.

A request's life: ``match`` (how much of its prompt is here already) → ``open`` → steps → ``close``.
A step's life: ``admit`` → ``plan`` → the node's forward calls the plan → ``commit``; a refusal in
``admit`` makes the runner call ``rollback`` on the resources that had admitted the step already.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from mstar.engine.resources.step import ResourceStep, Segment


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a resource cannot take a request or a step now; ordinary, not an error."""

    resource_key: str
    reason: str
    """A sentence with the numbers in it."""
    is_permanent: bool = False
    """True when waiting could never help: the whole resource is too small."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The numbers of one engine that resources are built with."""

    device: str = "cpu"
    dtype: str = "float32"
    """Name of the model's torch dtype."""
    max_num_seqs: int = 64
    """Streams that may be open at once, in requests."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step, at most."""
    max_model_len: int = 0
    """Tokens of prompt and output of one request, at most; 0 takes what model and pool allow."""
    page_size: int = 16
    """Slots of one KV page, in tokens."""
    kv_cache_bytes: int = 1 << 30
    """Memory for all KV pages, in bytes, where ``num_pages`` is not given."""
    num_pages: int | None = None
    """KV pages of each cache, the sink page not counted."""
    enable_prefix_caching: bool = True
    attention_backend: str | None = None
    """Name of the attention backend; ``None`` takes the first that refuses nothing."""
    cuda_graphs: bool = True
    """Record decode steps at start and replay them, where device and backend can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What resources are told when a stream of a request opens."""

    request_id: str
    label: str = "main"
    tokens: Sequence[int]
    """The stream's ids, prompt first; the engine appends generated ids to this same list."""
    num_prompt_tokens: int
    max_len: int
    """Slots the stream may ever hold, in tokens."""
    page_keys: Sequence[bytes] | None = None
    """Keys of the pages of ``tokens`` in order; ``None`` or short: the rest is not shared."""
    root: bytes | None = None
    """Key of the empty prefix; ``None`` keeps the stream out of reuse."""
    spans: Sequence[tuple[int, bytes | None]] = ()
    """Layout of the prompt: length and digest, ``None`` for token ids; empty: all token ids."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the request asks of a resource, by resource key."""


class Resource(ABC):
    """Owner of one kind of state for all requests of an engine.

    Single-threaded: only the engine's loop calls it.
    """

    resource_key: str
    depends_on: tuple[str, ...] = ()
    """Keys of resources whose plans must exist before this one plans."""
    capacity: int | None = None
    """Tokens it can hold of all streams together; ``None``: no bound."""
    revision: int = 0
    """Counts changes, commits left out, after which plans made ahead are wrong."""
    reuse_unit: int = 1
    """What is reused of it comes in multiples of so many slots, in tokens."""

    @classmethod
    @abstractmethod
    def build(cls, spec: Any, deployment: Deployment, resources: Mapping[str, "Resource"]) -> Self:
        """Return a manager for ``spec``.

        Args:
            spec: The declaration, a ``NodeResourceSpec`` of the matching class.
            deployment: Numbers of this engine.
            resources: Resources built before, by key; those of ``depends_on`` are among them.

        Raises:
            ConfigError: If the declaration and the deployment do not fit.
            UnsupportedError: If no backend can do it; with every reason.
        """

    def ever_fits(self, opening: Opening) -> Refusal | None:
        """Refuse a stream that could not be served even if it were alone; changes nothing."""
        return None

    def match(self, opening: Opening) -> int | None:
        """Return how many leading slots of the stream need not be computed.

        Changes nothing. ``None`` means that this resource has no say.
        """
        return None

    def open(self, opening: Opening, num_reused: int) -> Refusal | None:
        """Begin a stream whose first ``num_reused`` slots are reused.

        Takes all or nothing: after a refusal the resource is as it was before.
        """
        return None

    def close(self, request_id: str) -> None:
        """Give back everything the request holds, in all its streams; unknown ids are ignored."""

    def admit(self, segments: tuple[Segment, ...], step: ResourceStep) -> Refusal | None:
        """Reserve what the step needs, all or nothing."""
        return None

    def rollback(self, segments: tuple[Segment, ...], step: ResourceStep) -> None:
        """Undo an ``admit`` whose step will not run."""

    @abstractmethod
    def plan(
        self, segments: tuple[Segment, ...], step: ResourceStep, plans: Mapping[str, Any]
    ) -> Any:
        """Return the plan that the node's layers call; moves no counter.

        Args:
            segments: The segments of this resource, in the step's order.
            step: What the node asks for.
            plans: Plans of the resources in ``depends_on``, by key.
        """

    def plan_fixed(
        self,
        size: int,
        segments: tuple[Segment, ...],
        step: ResourceStep,
        plans: Mapping[str, Any],
        ahead: int = 0,
    ) -> Any | None:
        """Return a plan for a recorded forward; ``None``: this resource has none for the step.

        What was recorded with an earlier plan of the same ``size`` computes this step when it is
        replayed: the tensors it reads lie where that plan's lay.

        Args:
            size: Segments that the recording has; those beyond the step's read and write what
                belongs to nobody.
            segments: At most ``size``, of one token each.
            step: What the node asks for.
            plans: As for ``plan``, from this method.
            ahead: 1 plans the step after the next commit of these same segments; that plan holds
                while ``revision`` stays, and is ``None`` where it would raise.
        """
        return None

    def commit(self, segments: tuple[Segment, ...], step: ResourceStep) -> None:
        """Make what the step wrote visible; the forward has finished."""

    def usage(self) -> tuple[int, int, int] | None:
        """Return pages there are, pages held by streams, pages kept for reuse only."""
        return None

    def reset(self) -> int:
        """Forget all state that is kept for reuse only; returns how many entries went."""
        return 0

    def check(self) -> None:
        """Verify the invariants; raises ``AssertionError`` with the numbers."""
