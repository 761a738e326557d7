"""What a model declares about positions: which ids tokens get and how they rotate q and k."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from mstar.engine.resources.base import Resource
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ResourceStep
from mstar.errors import ConfigError

_LLAMA31_FIELDS = ("low_freq_factor", "high_freq_factor", "old_context_len")


class PosBackend(Enum):
    """How a position enters the model."""

    ROPE = "rope"
    """Pairs of q and k elements are rotated by an angle proportional to the position."""


class PosScheme(Enum):
    """The rule that turns a stream's counter into position ids."""

    SEQUENTIAL = "sequential"
    """A segment of ``n`` gets ``c .. c + n - 1``; the counter moves by ``n``."""
    BLOCK = "block"
    """All of a segment gets ``c``; the counter moves by ``block_step`` unless it is empty."""


def _llama31(owner: object) -> dict[str, float]:
    values = {name: getattr(owner, name) for name in _LLAMA31_FIELDS}
    return values if None not in values.values() else {}


def _check_frequencies(owner: object) -> None:
    """Raise ``ConfigError`` unless the frequency fields of ``owner`` make sense together."""

    def value(name: str) -> float:
        return getattr(owner, name)  # type: ignore[no-any-return]

    for name in ("rope_scale", "rope_theta", "attention_scaling"):
        if not 0 < value(name) < math.inf:
            raise ConfigError(f"{name} is {value(name)}; it must be positive and finite")
    given = [name for name in _LLAMA31_FIELDS if getattr(owner, name) is not None]
    if given and len(given) < len(_LLAMA31_FIELDS):
        missing = [name for name in _LLAMA31_FIELDS if name not in given]
        raise ConfigError(
            f"llama-3.1 scaling needs {', '.join(_LLAMA31_FIELDS)} together; given are "
            f"{', '.join(given)}, set {', '.join(missing)} too or none"
        )
    if given:
        low, high, length = (value(name) for name in _LLAMA31_FIELDS)
        if not 0 <= low <= high < math.inf:
            raise ConfigError(
                f"low_freq_factor is {low} and high_freq_factor {high}; "
                "0 <= low_freq_factor <= high_freq_factor must hold"
            )
        if not length > 0:
            raise ConfigError(f"old_context_len is {length} tokens; it must be positive")
    factors: tuple[float, ...] | None = getattr(owner, "freq_factors", None)
    if factors is not None and not all(0 < factor < math.inf for factor in factors):
        raise ConfigError(f"freq_factors must be positive and finite, not {factors}")


@dataclass(frozen=True, kw_only=True)
class RopeParams:
    """Everything that decides the angles of a layer; equal ones share a table.

    The meanings are those of the fields of ``PositionConfig`` with the same names.

    Raises:
        ConfigError: If a value is out of its range or the llama-3.1 fields are not complete.
    """

    rope_theta: float = 10000.0
    rope_scale: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    old_context_len: int | None = None
    freq_factors: tuple[float, ...] | None = None
    attention_scaling: float = 1.0

    def __post_init__(self) -> None:
        _check_frequencies(self)

    @property
    def llama31_params(self) -> dict[str, float]:
        """The three llama-3.1 fields by name when set, else ``{}``."""
        return _llama31(self)


@dataclass(frozen=True)
class PositionConfig:
    """Position rule and rotation of one model's streams.

    Raises:
        ConfigError: If a field is out of its range, if some but not all llama-3.1 fields are set,
            if ``freq_factors`` does not have one entry a pair, or if ``axis_sections`` does not
            share the pairs out among the axes; names the fields.
    """

    kv_cache: str
    """Resource key of the KV cache whose streams these positions follow."""
    backend: PosBackend = PosBackend.ROPE
    scheme: PosScheme = PosScheme.SEQUENTIAL
    block_step: int = 1
    """Positions that a non-empty segment costs under ``BLOCK``."""
    rotary_dim: int | None = None
    """Leading elements of a head that rotate; ``None``: the whole head."""
    interleave: bool = False
    """Pair ``i`` is elements ``2i, 2i + 1`` instead of ``i, i + rotary_dim / 2``."""
    rope_scale: float = 1.0
    """Divides the frequencies: 8 squeezes positions eightfold."""
    rope_theta: float = 10000.0
    rope_dtype: torch.dtype | None = None
    """Dtype that q and k are brought to before they rotate; ``None`` keeps theirs.

    The arithmetic is float32 (float64 for float64), and results are stored in q's and k's dtype.
    """
    low_freq_factor: float | None = None
    """llama-3.1: pairs with fewer turns in the old context are divided by ``rope_scale``."""
    high_freq_factor: float | None = None
    """llama-3.1: pairs with more turns in the old context stay; equal to the low one: a step."""
    old_context_len: int | None = None
    """llama-3.1: context before scaling, in tokens."""
    head_dim: int | None = None
    """Width of a head; the rotated width where ``rotary_dim`` is ``None``."""
    max_position: int | None = None
    """Ids must lie below it; ``None``: below the deployment's ``max_model_len``."""
    freq_factors: tuple[float, ...] | None = None
    """Divisor of each pair's frequency, on top of the others; ``None``: all 1."""
    attention_scaling: float = 1.0
    """Factor on cosine and sine, as yarn and longrope have it."""
    layer_rope: tuple[RopeParams | None, ...] | None = None
    """One a layer, a ``None`` in it rotates nothing; ``None``: all as this config says.

    With ``None`` for every layer a plan has its ids only, for a model with learned positions.
    """
    axes: int = 1
    """Numbers that a position consists of; those of a token id are all the same."""
    axis_sections: tuple[int, ...] | None = None
    """Pairs that each of several axes turns: the first ones the first axis, and so on."""
    interleave_axes: bool = False
    """Pairs belong to the axes in turn while these have some left, and then to the first axis."""

    def __post_init__(self) -> None:
        for name in ("rotary_dim", "head_dim"):
            width = getattr(self, name)
            if width is not None and (width < 2 or width % 2):
                raise ConfigError(f"{name} is {width}; it must be even and positive")
        if self.rotary_dim and self.head_dim and self.rotary_dim > self.head_dim:
            raise ConfigError(
                f"rotary_dim is {self.rotary_dim}; it must not exceed head_dim {self.head_dim}"
            )
        if self.block_step < 0:
            raise ConfigError(f"block_step is {self.block_step}; it must not be negative")
        if self.max_position is not None and self.max_position < 1:
            raise ConfigError(f"max_position is {self.max_position}; it must be at least 1")
        if self.rope_dtype is not None and not self.rope_dtype.is_floating_point:
            raise ConfigError(f"rope_dtype is {self.rope_dtype}; it must be a floating dtype")
        _check_frequencies(self)
        self._check_axes()
        if self.rotated_dim is not None:
            for params in self.distinct():
                factors = params.freq_factors
                if factors is not None and len(factors) != self.rotated_dim // 2:
                    raise ConfigError(
                        f"freq_factors has {len(factors)} entries; one for each of the "
                        f"{self.rotated_dim // 2} pairs of rotary_dim {self.rotated_dim} is needed"
                    )

    def _check_axes(self) -> None:
        sections, width = self.axis_sections, self.rotated_dim
        if self.axes < 1:
            raise ConfigError(f"axes is {self.axes}; it must be at least 1")
        if sections is None:
            if self.axes > 1 and width is not None and self.distinct():
                raise ConfigError(f"axes is {self.axes}; axis_sections must name their pairs")
            return
        if self.axes == 1 or len(sections) != self.axes or min(sections) < 0:
            raise ConfigError(
                f"axis_sections is {sections} and axes {self.axes}; of several axes each has a "
                "number of pairs"
            )
        if width is not None and sum(sections) != width // 2:
            raise ConfigError(
                f"axis_sections {sections} are {sum(sections)} pairs; rotary_dim {width} has "
                f"{width // 2}"
            )
        if any(self.pair_axes.count(axis) != size for axis, size in enumerate(sections)):
            raise ConfigError(f"axis_sections {sections} cannot be interleaved")

    @property
    def pair_axes(self) -> tuple[int, ...]:
        """The axis that turns each pair; empty where ``axis_sections`` is not set."""
        sections = self.axis_sections or ()
        if not self.interleave_axes:
            return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
        turns = (divmod(pair, self.axes) for pair in range(sum(sections)))
        return tuple(axis if turn < sections[axis] else 0 for turn, axis in turns)

    @property
    def llama31_params(self) -> dict[str, float]:
        """The three llama-3.1 fields by name when all are set, ``{}`` when none is."""
        return _llama31(self)

    @property
    def rotated_dim(self) -> int | None:
        """Elements of a head that rotate; ``None`` when nothing declares it."""
        return self.rotary_dim or self.head_dim

    @property
    def rope(self) -> RopeParams:
        """The config's own frequencies, which hold where ``layer_rope`` says nothing."""
        return RopeParams(
            rope_theta=self.rope_theta,
            rope_scale=self.rope_scale,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            old_context_len=self.old_context_len,
            freq_factors=self.freq_factors,
            attention_scaling=self.attention_scaling,
        )

    def distinct(self) -> tuple[RopeParams, ...]:
        """Return the different parameter sets of all layers, in order of first use."""
        layers: Iterator[RopeParams | None]
        layers = iter((self.rope,) if self.layer_rope is None else self.layer_rope)
        return tuple(dict.fromkeys(params for params in layers if params is not None))


@dataclass(frozen=True)
class PositionSpec(NodeResourceSpec):
    """A node's need of positions."""

    config: PositionConfig

    @property
    def resource_class(self) -> type[Resource]:
        """The position manager."""
        from mstar.engine.resources.position.manager import PositionManager

        return PositionManager


@dataclass(frozen=True)
class PositionStep(ResourceStep):
    """The positions of a step, where they differ from what the scheme says."""

    pos_ids: dict[str, Tensor] | Tensor | None = None
    """Ids in place of the scheme's, by label, or one tensor where one label is planned.

    Each is an integer tensor with one id for each new slot of its label, in the step's order,
    ``[num_slots]``, or ``[axes, num_slots]`` where there are several axes; on the CPU, else
    planning waits for the device. Counters move as without it.
    """
    advance: tuple[int, ...] | None = None
    """How far each segment's counter moves, in the step's order, in place of the scheme's rule."""
