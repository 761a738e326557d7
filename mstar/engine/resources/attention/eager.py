"""Attention in its plainest form, a loop over segments; the other backends are held against it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mstar.engine.resources.attention.base import (
    AttentionBackend,
    AttentionPlan,
    BackendPlan,
    slots_of,
)
from mstar.engine.resources.attention.config import AttentionConfig, LayerAttention
from mstar.engine.resources.kv.layout import KVLayout, KVPlan


class EagerPlan(BackendPlan):
    """A step's segments and the slots they see."""

    def __init__(
        self, backend: AttentionBackend, kv_plan: KVPlan, is_causal: Sequence[bool]
    ) -> None:
        super().__init__(backend, kv_plan)
        self._config = backend.config
        self._is_causal = is_causal

    def run(self, layer: int, query: Tensor) -> Tensor:
        """Attend one segment after another."""
        plan = self._kv_plan
        rules = self._config.layers[layer]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for i, kv_len in enumerate(plan.kv_lens.tolist()):
            rows = slice(int(plan.qo_indptr[i]), int(plan.qo_indptr[i + 1]))
            slots = slots_of(plan, np.asarray(i), np.arange(kv_len))
            index = torch.from_numpy(slots).to(query.device)
            keys = plan.keys[layer].flatten(0, 1)[index]
            values = plan.values[layer].flatten(0, 1)[index]
            out[rows] = self._attend(query[rows], keys, values, rules, self._is_causal[i])
        return out

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, rules: LayerAttention, is_causal: bool
    ) -> Tensor:
        """Return ``[n, num_qo_heads, head_dim]`` of one segment.

        Args:
            query: ``[n, num_qo_heads, head_dim]``.
            keys: ``[kv_len, num_kv_heads, head_dim]``.
            values: Like ``keys``.
            rules: The layer's window and soft cap.
            is_causal: Whether a query sees no slot behind its own.
        """
        dtype = torch.promote_types(query.dtype, torch.float32)
        group = query.shape[1] // keys.shape[1]
        keys = keys.to(dtype).repeat_interleave(group, dim=1)
        values = values.to(dtype).repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,khd->hnk", query.to(dtype), keys) * self._config.scale
        if rules.soft_cap is not None:
            scores = rules.soft_cap * torch.tanh(scores / rules.soft_cap)
        slot = torch.arange(len(keys), device=query.device)
        own = slot[len(keys) - len(query) :, None]
        hidden = (slot > own) & is_causal
        if rules.window is not None:
            hidden |= slot <= own - rules.window
        scores = scores.masked_fill(hidden, -torch.inf)
        return torch.einsum("hnk,khd->nhd", scores.softmax(-1), values).to(query.dtype)


class Backend(AttentionBackend):
    """The reference: any device, any floating dtype; float64 stays float64."""

    @classmethod
    def unsupported(cls, config: AttentionConfig, layout: KVLayout) -> list[str]:
        """Refuse what is not floating point."""
        if layout.dtype.is_floating_point:
            return []
        return [f"the cache's dtype is {layout.dtype}; it must be a floating one"]

    def plan(self, kv_plan: KVPlan, is_causal: Sequence[bool]) -> AttentionPlan:
        """Keep the step as it is."""
        return EagerPlan(self, kv_plan, is_causal)
