"""Softmax attention of one segment over contiguous keys, in float64, one query at a time."""

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


def attend(
    query: Float64,
    keys: Float64,
    values: Float64,
    scale: float,
    *,
    is_causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Float64:
    """Return ``[n, num_qo_heads, head_dim]``; the queries are the last ``n`` of the slots.

    ``query`` is ``[n, num_qo_heads, head_dim]``, ``keys`` and ``values`` are
    ``[kv_len, num_kv_heads, head_dim]``.
    """
    out = np.zeros_like(query)
    num_new, num_qo_heads, _ = query.shape
    kv_len, num_kv_heads, _ = keys.shape
    group = num_qo_heads // num_kv_heads
    for j in range(num_new):
        own = kv_len - num_new + j
        seen = list(range(kv_len))
        if is_causal:
            seen = [slot for slot in seen if slot <= own]
        if window:
            seen = [slot for slot in seen if slot > own - window]
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            scores = scale * query[j, heads] @ keys[seen, kv_head].T
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[j, heads] = weights @ values[seen, kv_head] / weights.sum(axis=1, keepdims=True)
    return out
