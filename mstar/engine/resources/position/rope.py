"""Rotary frequencies, their cosine and sine tables, and the rotation itself."""

import math

import torch
from torch import Tensor

from mstar.engine.resources.position.config import RopeParams
from mstar.errors import ConfigError


def inv_freq(rotary_dim: int, params: RopeParams) -> Tensor:
    """Return the angle per position of every pair.

    Args:
        rotary_dim: Rotated elements of a head; even and positive.
        params: Base, scale and scaling rule.

    Returns:
        float64 ``[rotary_dim // 2]`` on the CPU.

    Raises:
        ConfigError: If ``params.freq_factors`` does not have one entry a pair.

    Source:
        RoFormer, arXiv:2104.09864, section 3.2.2; position interpolation, arXiv:2306.15595; the
        llama-3.1 rule as in Llama 3.1's reference code, with the blend written as one clamp and
        equal factors as a step.

    >>> inv_freq(4, RopeParams(rope_scale=2.0)).tolist()
    [0.5, 0.005]
    """
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    base = torch.tensor(params.rope_theta, dtype=torch.float64) ** -exponent
    if params.freq_factors is not None:
        if len(params.freq_factors) != rotary_dim // 2:
            raise ConfigError(
                f"freq_factors has {len(params.freq_factors)} entries; rotary_dim {rotary_dim} "
                f"has {rotary_dim // 2} pairs"
            )
        base = base / torch.tensor(params.freq_factors, dtype=torch.float64)
    if params.old_context_len is None:
        return base / params.rope_scale
    assert params.low_freq_factor is not None
    assert params.high_freq_factor is not None
    turns = params.old_context_len * base / (2 * math.pi)
    low, high = params.low_freq_factor, params.high_freq_factor
    if low == high:
        kept = (turns > high).to(torch.float64)
    else:
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * base / params.rope_scale + kept * base


class CosSinTable:
    """Cosines and sines of every position below a limit, for one parameter set.

    A row holds the cosines of all pairs, then their sines. Rows are made when first needed, from
    float64 angles.

    Args:
        rotary_dim: Rotated elements of a head.
        params: Base, scale and scaling rule.
        num_rows: Rows to make at once.
        limit: Rows there may ever be.
        dtype: float32, or float64 for arithmetic in float64.
        device: Where the rows lie.
    """

    def __init__(
        self,
        rotary_dim: int,
        params: RopeParams,
        *,
        num_rows: int,
        limit: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._inv_freq = inv_freq(rotary_dim, params)
        self._scaling = params.attention_scaling
        self._limit = limit
        self.rows = torch.empty(0, rotary_dim, dtype=dtype, device=device)
        """``[num_rows, rotary_dim]``."""
        self.reserve(num_rows)

    def reserve(self, num_rows: int) -> None:
        """Have at least ``num_rows`` rows, which must not exceed the limit."""
        have = len(self.rows)
        if num_rows <= have:
            return
        assert num_rows <= self._limit, (num_rows, self._limit)
        end = min(self._limit, max(num_rows, 2 * have))
        angles = torch.arange(have, end, dtype=torch.float64)[:, None] * self._inv_freq
        rows = torch.cat((angles.cos(), angles.sin()), 1) * self._scaling
        self.rows = torch.cat((self.rows, rows.to(self.rows)))


class Rotation:
    """One step's angles, gathered once and applied by every layer that shares them.

    Args:
        rows: ``[num_tokens, rotary_dim]``, a table's rows at the step's ids.
        interleave: Pair ``i`` is elements ``2i, 2i + 1``, else ``i, i + rotary_dim / 2``.
        dtype: What q and k are brought to before they rotate; ``None`` keeps theirs.
    """

    __slots__ = ("_angles", "_cos", "_dtype", "_half", "_rotary_dim", "_sin", "interleave", "rows")

    def __init__(self, rows: Tensor, *, interleave: bool, dtype: torch.dtype | None) -> None:
        self.rows = rows
        self.interleave = interleave
        self._rotary_dim = rows.shape[1]
        self._half = self._rotary_dim // 2
        self._dtype = dtype
        self._angles: Tensor | None = None
        self._cos: Tensor | None = None
        self._sin: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is float32 arithmetic on q and k as they are, so that a kernel may do it."""
        return self._dtype is None and self.rows.dtype == torch.float32

    def __call__(self, heads: Tensor) -> Tensor:
        """Return ``heads`` rotated, in a new tensor of its dtype.

        Args:
            heads: ``[num_tokens, num_heads, head_dim]``; only the last axis must be dense.
        """
        width = heads.shape[-1]
        if width == self._rotary_dim:
            return self._rotate(heads)
        head, tail = heads.tensor_split((self._rotary_dim,), -1)
        return torch.cat((self._rotate(head), tail), -1)

    def _rotate(self, heads: Tensor) -> Tensor:
        dtype = heads.dtype
        if self._dtype is not None:
            heads = heads.to(self._dtype)
        if self.interleave:
            wide = heads if heads.dtype == torch.float64 else heads.float()
            pairs = torch.view_as_complex(wide.view(*wide.shape[:2], self._half, 2))
            out = torch.view_as_real(pairs * self._complex()).flatten(-2)
        else:
            cos, sin = self._halves()
            out = heads * cos
            # A half-turn of the head puts each element's partner in its place.
            out.addcmul_(heads.roll(self._half, -1), sin)
        return out if out.dtype == dtype else out.to(dtype)

    def _complex(self) -> Tensor:
        """Return the angles as unit numbers ``[num_tokens, 1, rotary_dim // 2]``."""
        if self._angles is None:
            self._angles = torch.complex(*self.rows.unsqueeze(1).chunk(2, -1))
        return self._angles

    def _halves(self) -> tuple[Tensor, Tensor]:
        """Return factors of the elements and of their partners, ``[num_tokens, 1, rotary_dim]``."""
        if self._cos is None or self._sin is None:
            cos, sin = self.rows.unsqueeze(1).chunk(2, -1)
            self._cos = torch.cat((cos, cos), -1)
            self._sin = torch.cat((-sin, sin), -1)
        return self._cos, self._sin
