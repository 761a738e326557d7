"""The contract of attention backends: refuse beforehand, plan once a step, run once a layer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mstar.engine.resources.attention.config import AttentionConfig
from mstar.engine.resources.kv.layout import KVLayout, KVPlan


class AttentionPlan(ABC):
    """One step's attention, ready to run layer after layer."""

    @abstractmethod
    def run(self, layer: int, query: Tensor) -> Tensor:
        """Return what each new token attends to in one layer.

        The layer's keys and values of the step stand in the cache already (``KVPlan.write``).

        Args:
            layer: Index of the layer, in the cache and in ``AttentionConfig.layers``.
            query: ``[T, num_qo_heads, head_dim]`` in the cache's dtype, on its device.

        Returns:
            A new tensor of the query's shape and dtype.
        """

    @abstractmethod
    def of_last(self, rows: npt.NDArray[np.int64]) -> "AttentionPlan":
        """Return the plan in which some tokens attend alone; this one runs no more.

        Args:
            rows: ``[num_rows]``, ascending: tokens among all ``T``, each the last of its segment.
        """


class AttentionBackend(ABC):
    """One implementation of attention over a paged cache.

    Segment ``i`` brings ``qo_lens[i]`` new tokens, the last of ``kv_lens[i]`` stored slots, so its
    query ``j`` sits at slot ``kv_len - qo_len + j``::

        slots     0 ─────────────── kv_len - qo_len ─── kv_len
                  │  stored before  │    the new ones    │
        causal    a query sees the slots up to its own
        otherwise every query sees all ``kv_len`` slots
        window    of the slots up to its own, a query sees the last ``window`` only

    Scores are ``scale * q·k``, then soft-capped, then masked; their softmax weighs the values.
    Query heads share key heads in groups of ``num_qo_heads / num_kv_heads`` neighbours. A segment
    of span 0 has no rows. Slots that no query sees may hold anything, NaN included.

    Args:
        config: Heads, scale and per-layer rules.
        layout: Shape and dtype of the cache.
    """

    def __init__(self, config: AttentionConfig, layout: KVLayout) -> None:
        self.config = config
        self.layout = layout

    @classmethod
    @abstractmethod
    def unsupported(cls, config: AttentionConfig, layout: KVLayout) -> list[str]:
        """Return why this backend cannot do it, a reason a line; empty where it can."""

    @abstractmethod
    def plan(self, kv_plan: KVPlan, is_causal: Sequence[bool]) -> AttentionPlan:
        """Return the step's plan; computes on the CPU and moves index tensors once.

        Args:
            kv_plan: Where the step's segments lie in the cache.
            is_causal: One a segment.
        """

    def plan_fixed(self, kv_plan: KVPlan, is_causal: Sequence[bool]) -> AttentionPlan | None:
        """Return a plan of the step for a recorded forward, as ``Resource.plan_fixed`` does.

        Args:
            kv_plan: The step, filled up to the recording's number of segments.
            is_causal: One a segment.
        """
        return None


class BackendPlan(AttentionPlan):
    """The plan of a backend.

    Args:
        backend: What planned it.
        kv_plan: The step.
    """

    def __init__(self, backend: AttentionBackend, kv_plan: KVPlan) -> None:
        self._backend = backend
        self._kv_plan = kv_plan

    def of_last(self, rows: npt.NDArray[np.int64]) -> AttentionPlan:
        """Plan anew: a token that stands last sees all slots, causal or not."""
        return self._backend.plan(self._kv_plan.of_last(rows), (True,) * len(rows))


def first_slots(kv_plan: KVPlan, window: int | None) -> npt.NDArray[np.int64]:
    """Return per segment the first slot that any of its queries sees, int64 ``[B]``."""
    if window is None:
        return np.zeros(len(kv_plan.kv_lens), np.int64)
    own = kv_plan.kv_lens.astype(np.int64) - kv_plan.qo_lens
    first: npt.NDArray[np.int64] = np.maximum(own + 1 - window, 0)
    return first


def slots_of(
    kv_plan: KVPlan, segments: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return where slots of streams lie in the cache, as ``page * page_size + offset``.

    Args:
        kv_plan: The step.
        segments: Segment numbers, broadcast against ``positions``.
        positions: Slots of the segments' streams, in tokens from the stream's beginning.
    """
    page_size = kv_plan.layout.page_size
    pages = kv_plan.page_table[segments, positions // page_size].astype(np.int64)
    return pages * page_size + positions % page_size
