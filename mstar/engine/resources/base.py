"""The contract that every resource's manager keeps.

A request's life: ``restore`` → ``match`` (how much of its prompt is here already) → ``open`` →
steps, with a ``skip`` over what others computed meanwhile → ``close``.
A step's life: ``admit`` → ``plan`` → the node's forward calls the plan → ``commit``; a refusal in
``admit`` makes the runner call ``rollback`` on the resources that had admitted the step already.
"""

import random
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self

from mstar.engine.resources.spans import Span
from mstar.engine.resources.step import ResourceStep, Segment
from mstar.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a resource cannot take a request or a step now; ordinary, not an error."""

    resource_key: str
    reason: str
    """A sentence with the numbers in it."""
    remedy: str = "shorten the prompt or lower max_tokens"
    """What then helps, in words that go on from the reason."""
    param: str = "max_tokens"
    """Field of the request that is at fault then."""


DEFAULT_KV_CACHE_BYTES = 1 << 30
"""Where nothing says how much memory KV pages may take."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Numbers that suit a kind of device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int


# Tables have a row for each of ``max_num_seqs``, and token counts are 32-bit integers.
_BOUNDS = {
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**31 - 1),
    "page_size": (1, 2**31 - 1),
    "max_model_len": (0, 2**31 - 1),
    "encoder_cache_tokens": (0, 2**31 - 1),
    "host_cache_bytes": (0, 2**63 - 1),
    "disk_cache_bytes": (0, 2**63 - 1),
    "tensor_parallel_size": (1, 2**16),
}
# What memory allows bounds these.
_COUNTS = ("num_pages", "kv_cache_bytes")
_SWITCHES = ("enable_prefix_caching", "kv_events", "cuda_graphs", "overlap")
_SIZES = {"cpu": _Sizes(64, 2048, 16), "cuda": _Sizes(256, 8192, 64)}


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The numbers of one engine that resources are built with.

    Where a number is said to suit the device, 0 becomes what is measured to be fast there, first on
    a CPU and then on a GPU; it stays where a copy is given another device.
    """

    device: str = "cpu"
    dtype: str = "float32"
    """Name of the model's torch dtype."""
    max_num_seqs: int = 0
    """Streams that may be open at once, in requests; 0 suits the device: 64, 256."""
    max_num_batched_tokens: int = 0
    """Tokens of one step, at most; 0 suits the device: 2,048, 8,192."""
    max_model_len: int = 0
    """Tokens of prompt and output of one request, at most; 0 takes what model and pool allow."""
    page_size: int = 0
    """Slots of one KV page, in tokens; 0 suits the device: 16, 64."""
    kv_cache_bytes: int | None = None
    """Memory for all KV pages, in bytes, where ``num_pages`` is not given; ``None``: what is left
    of ``gpu_memory_utilization`` on a GPU, ``DEFAULT_KV_CACHE_BYTES`` elsewhere."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that everything together may take, where KV pages take the rest."""
    num_pages: int | None = None
    """KV pages of each cache, the sink page not counted."""
    enable_prefix_caching: bool = True
    attention_backend: str | None = None
    """Name of the attention backend; ``None`` takes the first that refuses nothing."""
    host_cache_bytes: int = 0
    """Host memory for pages that were evicted, of each cache, in bytes; 0: none."""
    disk_cache_bytes: int = 0
    """Disk space for pages that were evicted, of each cache, in bytes; 0: none."""
    disk_cache_dir: str | None = None
    """Folder of pages on disk; servers may share it, and it outlives them."""
    retention_share: float = 0.5
    """Share of the KV pages that requests may have protected from eviction."""
    kv_events: bool = False
    """Collect what changes in the index of pages."""
    encoder_cache_tokens: int = 0
    """Slots of encoder outputs that are kept at once; 0 takes ``max_num_batched_tokens``, and of
    those that decoder layers attend to what each resource has by default."""
    cuda_graphs: bool = True
    """Record decode steps at start and replay them, where device and backend can."""
    overlap: bool = True
    """Launch a recorded step before the tokens of the one before it are read, where that can be."""
    tensor_parallel_size: int = 1
    """Ranks that share the model, a device each."""
    seed: int | None = None
    """Decides what requests without a seed of their own are given; ``None``: chance does."""
    clock: Callable[[], float] = time.monotonic
    """Time by which pages are protected, in seconds; the same on all ranks."""

    def __post_init__(self) -> None:
        if not isinstance(self.device, str):
            raise ConfigError(f"device is {self.device!r}; it must be a name, as 'cpu' or 'cuda'")
        suited = _SIZES["cuda" if self.device.startswith("cuda") else "cpu"]
        for own in fields(suited):
            if getattr(self, own.name) == 0:
                object.__setattr__(self, own.name, getattr(suited, own.name))

    def seeds(self, purpose: str) -> random.Random:
        """Return what draws seeds for requests that name none, the same ones for a ``purpose``."""
        if self.seed is None:
            return random.SystemRandom()
        return random.Random(f"{self.seed} {purpose}")

    def check(self) -> None:
        """Refuse numbers that cannot be, or do not go together.

        Raises:
            ConfigError: With the number and its limits.
        """
        self._check_kinds()
        if not _is_number(self.gpu_memory_utilization) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization!r}; it must lie above 0 "
                "and at most at 1"
            )
        if not _is_number(self.retention_share) or not 0 <= self.retention_share <= 1:
            raise ConfigError(
                f"retention_share is {self.retention_share!r}; it must lie between 0 and 1"
            )
        for name in ("host_cache_bytes", "disk_cache_bytes"):
            if getattr(self, name) and not self.enable_prefix_caching:
                raise ConfigError(
                    f"{name} is {getattr(self, name)} and prefix caching is off: there are no "
                    "pages to keep; switch it on, or leave the tier out"
                )

    def _check_kinds(self) -> None:
        """Refuse what is no whole number, or no switch."""
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if not _is_whole(value) or not least <= value <= most:
                raise ConfigError(
                    f"{name} is {value!r}; it must be a whole number between {least} and {most}"
                )
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and not _is_whole(value):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number")
        if self.seed is not None and not _is_whole(self.seed):
            raise ConfigError(f"seed is {self.seed!r}; it must be a whole number or None")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_whole(value)


class Naming:
    """How far the slots of a stream follow from its ids and layout alone, so that keys name them.

    A resource cuts it where a step makes slots depend on more than that; no page behind the cut is
    shared.
    """

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until = sys.maxsize

    def cut(self, slot: int) -> None:
        """Keep slots from ``slot`` on out of reuse."""
        self.until = min(self.until, slot)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What resources are told when a stream of a request opens.

    There is one for each stream, the same object as long as its request lives.
    """

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
    spans: Sequence[Span] = ()
    """Layout of the prompt; empty: all token ids."""
    context: Sequence[Span] = ()
    """Items that the stream attends to from outside."""
    num_streams: int = 1
    """Streams of the request that are open together, each as long as this one."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the request asks of a resource, by resource key."""
    retain_seconds: float = 0.0
    """How long its pages are protected from eviction after their last use; 0: not at all."""
    naming: Naming = field(default_factory=Naming)
    sources: Counter[str] = field(default_factory=Counter)
    """Where what it reused last was found: tokens by ``device``, ``host`` and ``disk``."""


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
    """Counts changes of open streams, commits left out, after which plans made ahead are wrong."""
    in_pieces: ClassVar[Literal["plan", "plan_fixed"] | None] = None
    """What plans a step of several tokens a segment that is recorded in pieces: ``plan_fixed`` with
    as many tokens as were recorded in place of segments; ``None``: nothing does."""

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

    def connect(self, root: bytes | None) -> None:
        """Learn the key of the deployment, under which state outlives the engine.

        Args:
            root: ``None``: nothing is shared between requests.

        Raises:
            ConfigError: If what is to outlive it has no place to go.
        """

    def disconnect(self, timeout: float) -> None:
        """Put away, in ``timeout`` seconds at most, what is to outlive the engine."""

    def take_events(self) -> list[Any]:
        """Return what changed in an index of reusable state since the last call."""
        return []

    def explain(
        self, opening: Opening, found: Mapping[str, int] | None, when: float | None = None
    ) -> Any | None:
        """Return how much of a prompt could be reused and what stops it; changes nothing.

        Args:
            opening: The stream, open or not.
            found: What it reuses, in tokens by tier, where that is known.
            when: When it was matched, monotonic, in seconds; ``None``: now.
        """
        return None

    def ever_fits(self, opening: Opening) -> Refusal | None:
        """Refuse a stream that could not be served even if it were alone; changes nothing."""
        return None

    def restore(self, opening: Opening) -> None:
        """Bring back from slower memory what the stream could reuse; may evict what is idle."""

    def match(self, opening: Opening, limit: int) -> int:
        """Return how many leading slots of the stream need not be computed, ``limit`` at most.

        Changes nothing. What it returns is a place where this resource can begin or go on; one
        without a say returns ``limit``.
        """
        return limit

    def open(self, opening: Opening, num_reused: int) -> Refusal | None:
        """Begin a stream whose first ``num_reused`` slots are reused.

        Takes all or nothing: after a refusal the resource is as it was before.
        """
        return None

    def is_pending(self, opening: Opening, start: int) -> bool:
        """Tell whether another stream is about to compute the slots from ``start`` on."""
        return False

    def skip(self, opening: Opening, num_reused: int) -> None:
        """Move an open stream on to ``num_reused`` slots, which ``match`` has just offered."""

    def fork(self, request_id: str, label: str, opening: Opening) -> Refusal | None:
        """Begin the stream of ``opening`` as a copy of what the stream ``label`` has stored."""
        return None

    def disown(self, request_id: str) -> None:
        """Offer nobody what the request's streams hold, unless others hold it or build on it."""

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
            ahead: 1 plans the step after the next commit of these same segments, and is ``None``
                where that cannot be known or would raise. The step runs before that commit, and
                counts while ``revision`` stays; streams that close meanwhile never commit it.
        """
        return None

    def commit(self, segments: tuple[Segment, ...], step: ResourceStep) -> None:
        """Make what the step wrote visible; the forward has finished."""

    def usage(self) -> tuple[int, int, int] | None:
        """Return pages there are, pages held by streams, pages kept for reuse only."""
        return None

    def counters(self) -> Mapping[str, int]:
        """Return what else it counts, by name; see ``EngineStats``."""
        return {}

    def reset(self) -> int:
        """Forget all state that is kept for reuse only; returns how many entries went."""
        return 0

    def check(self) -> None:
        """Verify the invariants; raises ``AssertionError`` with the numbers."""


class Item(NamedTuple):
    """One item of one request, as its encoder's output is kept."""

    request_id: str
    name: bytes
    """Content name; it commits to the tenant too."""
    length: int
    """Its slots, in tokens."""


class OutputStore(Resource):
    """A resource that keeps what encoders made of items."""

    @abstractmethod
    def pin(self, item: Item) -> bool:
        """Keep an item's output for its request; returns whether it is there."""

    @abstractmethod
    def has_room(self, item: Item) -> bool:
        """Tell whether an output of this size fits beside what is pinned."""
