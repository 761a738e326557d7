"""Torch's scaled dot product attention over gathered slots, for any device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mstar.engine.resources.attention.base import (
    AttentionBackend,
    AttentionPlan,
    BackendPlan,
    first_slots,
    slots_of,
)
from mstar.engine.resources.attention.config import AttentionConfig, LayerAttention
from mstar.engine.resources.kv.layout import KVLayout, KVPlan
from mstar.engine.resources.mirror import send


@dataclass(frozen=True, slots=True)
class _Piece:
    """Segments that one call of the kernel covers: one of any span, or several of span 1."""

    rows: slice | Tensor
    """Their new tokens among all ``T``."""
    slots: Tensor
    """int64 ``[b * L]``: what each sees, filled up by repeating its last slot."""
    num_segments: int
    """``b``; above 1 only where every segment has one new token."""
    mask: Tensor | None
    """Added to the scores: ``[n, L]`` of one segment, ``[b, 1, 1, L]`` of several."""
    is_causal: bool
    """The mask is the plain triangle, which the kernel makes itself."""


class SdpaPlan(BackendPlan):
    """A step's segments, cut into kernel calls once for each distinct rule.

    Args:
        backend: Has heads, scale and per-layer rules.
        kv_plan: The step.
        is_causal: One a segment.
    """

    def __init__(
        self, backend: AttentionBackend, kv_plan: KVPlan, is_causal: Sequence[bool]
    ) -> None:
        super().__init__(backend, kv_plan)
        self._config = backend.config
        self._is_causal = is_causal
        self._max_kv_len = int(kv_plan.kv_lens.max(initial=0))
        self._pieces: dict[tuple[int | None, bool], list[_Piece]] = {}

    def run(self, layer: int, query: Tensor) -> Tensor:
        """Gather the slots and attend, piece after piece."""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        rules = self._config.layers[layer]
        flat = (-1, self._config.num_kv_heads * self._config.head_dim)
        keys, values = self._kv_plan.keys[layer].view(flat), self._kv_plan.values[layer].view(flat)
        for piece in self._pieces_for(rules):
            found = keys.index_select(0, piece.slots), values.index_select(0, piece.slots)
            out[piece.rows] = self._attend(piece, query[piece.rows], *found, rules.soft_cap)
        return out

    def _attend(
        self, piece: _Piece, query: Tensor, keys: Tensor, values: Tensor, soft_cap: float | None
    ) -> Tensor:
        """Return the piece's rows, ``[n, num_qo_heads, head_dim]``.

        Several segments are a batch of ``num_kv_heads`` heads with the group as its queries; of a
        single segment the kv heads are the batch and the group its heads, so that no key is copied.
        """
        num_kv_heads, head_dim = self._config.num_kv_heads, self._config.head_dim
        shape = (len(query), num_kv_heads, -1, head_dim)
        query = query.reshape(shape)
        if len(query) == piece.num_segments:
            keys = keys.view(len(query), -1, num_kv_heads, head_dim).transpose(1, 2)
            values = values.view(len(query), -1, num_kv_heads, head_dim).transpose(1, 2)
            rows = self._product(piece, query, keys, values, soft_cap)
            return rows.reshape(len(query), -1, head_dim)
        query = query.permute(1, 2, 0, 3)
        heads = (-1, query.shape[1], -1, -1)
        keys = keys.view(-1, num_kv_heads, head_dim).transpose(0, 1)[:, None].expand(heads)
        values = values.view(-1, num_kv_heads, head_dim).transpose(0, 1)[:, None].expand(heads)
        rows = self._product(piece, query, keys, values, soft_cap).permute(2, 0, 1, 3)
        return rows.reshape(rows.shape[0], -1, head_dim)

    def _product(
        self, piece: _Piece, query: Tensor, keys: Tensor, values: Tensor, soft_cap: float | None
    ) -> Tensor:
        scale = self._config.scale
        if soft_cap is None:
            return scaled_dot_product_attention(
                query, keys, values, piece.mask, is_causal=piece.is_causal, scale=scale
            )
        dtype = torch.promote_types(query.dtype, torch.float32)
        scores = query.to(dtype) @ keys.to(dtype).transpose(-1, -2)
        scores = scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap)
        if piece.mask is not None:
            scores += piece.mask
        return (scores.softmax(-1) @ values.to(dtype)).to(query.dtype)

    def _pieces_for(self, rules: LayerAttention) -> list[_Piece]:
        """Return the kernel calls of a rule, made when it is first met."""
        # A window that reaches every slot is none, so that it shares the other layers' pieces.
        window = rules.window if rules.window and rules.window < self._max_kv_len else None
        key = (window, rules.soft_cap is not None)
        if key not in self._pieces:
            self._pieces[key] = self._cut(window, needs_mask=rules.soft_cap is not None)
        return self._pieces[key]

    def _cut(self, window: int | None, *, needs_mask: bool) -> list[_Piece]:
        plan = self._kv_plan
        first = first_slots(plan, window)
        singles: dict[int, list[int]] = {}
        pieces = []
        for i in np.flatnonzero(plan.qo_lens).tolist():
            if plan.qo_lens[i] == 1:
                # Lengths within a factor of two share a call: padding never doubles the work.
                singles.setdefault(int(plan.kv_lens[i] - first[i]).bit_length(), []).append(i)
            else:
                pieces.append(self._long_piece(i, int(first[i]), window, needs_mask=needs_mask))
        pieces += [self._single_piece(np.array(some), first[some]) for some in singles.values()]
        return pieces

    def _single_piece(
        self, segments: npt.NDArray[np.int64], first: npt.NDArray[np.int64]
    ) -> _Piece:
        plan = self._kv_plan
        lens = plan.kv_lens[segments] - first
        offset = np.arange(int(lens.max()))
        within = np.minimum(offset, lens[:, None] - 1)
        slots = slots_of(plan, segments[:, None], first[:, None] + within)
        rows = plan.qo_indptr[segments].astype(np.int64)
        is_run = int(rows[-1] - rows[0]) == len(rows) - 1
        mask = None
        if lens.min() < lens.max():
            mask = self._mask(offset >= lens[:, None])[:, None, None]
        return _Piece(
            rows=slice(int(rows[0]), int(rows[-1]) + 1) if is_run else self._move(rows),
            slots=self._move(slots.reshape(-1)),
            num_segments=len(segments),
            mask=mask,
            is_causal=False,
        )

    def _long_piece(self, i: int, first: int, window: int | None, *, needs_mask: bool) -> _Piece:
        plan = self._kv_plan
        qo_len, kv_len = int(plan.qo_lens[i]), int(plan.kv_lens[i])
        seen = np.arange(first, kv_len)
        is_causal, is_cut = self._is_causal[i], window is not None and window < kv_len
        mask = None
        if is_cut or (is_causal and (needs_mask or qo_len < kv_len)):
            own = np.arange(kv_len - qo_len, kv_len)[:, None]
            hidden = (seen > own) & is_causal
            if window is not None:
                hidden |= seen <= own - window
            mask = self._mask(hidden)
        return _Piece(
            rows=slice(int(plan.qo_indptr[i]), int(plan.qo_indptr[i + 1])),
            slots=self._move(slots_of(plan, np.asarray(i), seen)),
            num_segments=1,
            mask=mask,
            is_causal=is_causal and mask is None,
        )

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> Tensor:
        layout = self._kv_plan.layout
        mask = torch.zeros(hidden.shape, dtype=layout.dtype, device=layout.device)
        return mask.masked_fill_(send(hidden, layout.device), -torch.inf)

    def _move(self, index: npt.NDArray[np.int64]) -> Tensor:
        return send(index, self._kv_plan.layout.device)


class Backend(AttentionBackend):
    """Gathers what each segment sees; single tokens in batches, longer segments one by one."""

    @classmethod
    def unsupported(cls, config: AttentionConfig, layout: KVLayout) -> list[str]:
        """Refuse what is not floating point."""
        if layout.dtype.is_floating_point:
            return []
        return [f"the cache's dtype is {layout.dtype}; it must be a floating one"]

    def plan(self, kv_plan: KVPlan, is_causal: Sequence[bool]) -> AttentionPlan:
        """Plan all segments; index tensors and masks are made when a layer first needs them."""
        return SdpaPlan(self, kv_plan, is_causal)
