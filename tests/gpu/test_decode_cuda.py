"""The kernel of recorded decode steps against the formula in float64."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracles.tolerances import ATTENTION

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCALE = 0.11


@pytest.fixture
def kernels() -> Any:
    pytest.importorskip("triton")
    return importlib.import_module("mstar.engine.resources.attention.decode_cuda")


def expected(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, soft_cap: float | None
) -> Tensor:
    """One segment's output: ``[num_heads, dim]`` for its slots ``[length, kv_heads, dim]``."""
    if window is not None:
        key, value = key[-window:], value[-window:]
    group = len(query) // key.shape[1]
    wide_key, wide_value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("hd,shd->hs", query.double(), wide_key) * SCALE
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    return torch.einsum("hs,shd->hd", scores.softmax(1), wide_value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_segments", "heads", "dim", "page_size", "window", "soft_cap"),
    [
        (1, (32, 8), 128, 64, None, None),
        (3, (8, 1), 64, 16, None, None),
        (9, (14, 2), 128, 48, 100, None),
        (40, (4, 4), 256, 32, 70, 20.0),
        (80, (32, 8), 128, 64, None, 5.0),
        (130, (4, 4), 64, 1, 33, None),
    ],
)
def test_every_segment_gets_what_the_formula_gives(
    kernels: Any,
    dtype: torch.dtype,
    num_segments: int,
    heads: tuple[int, int],
    dim: int,
    page_size: int,
    window: int | None,
    soft_cap: float | None,
) -> None:
    generator = torch.Generator().manual_seed(num_segments)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).cuda()

    lens = torch.randint(1, 400, (num_segments,), generator=generator)
    lens[-1] = 1
    lens[0] = 1000
    counts = -(-lens // page_size)
    indices = torch.randperm(int(counts.sum()), generator=generator) + 1
    shape = (len(indices) + 1, page_size, heads[1], dim)
    # What nobody wrote must not count, whatever it is.
    keys, values = (torch.full(shape, torch.nan, dtype=dtype, device="cuda") for _ in range(2))
    query = drawn(num_segments, heads[0], dim)
    begins = counts.cumsum(0) - counts
    wanted = []
    for row, (begin, count, length) in enumerate(
        zip(begins.tolist(), counts.tolist(), lens.tolist(), strict=True)
    ):
        own = indices[begin : begin + count]
        key, value = drawn(length, heads[1], dim), drawn(length, heads[1], dim)
        places = (own[:, None] * page_size + torch.arange(page_size)).flatten()[:length].cuda()
        keys.flatten(0, 1)[places], values.flatten(0, 1)[places] = key, value
        wanted.append(expected(query[row], key, value, window, soft_cap))
    arrivals = torch.zeros(num_segments * heads[1])
    given = (begins, lens, indices, arrivals)
    pages = kernels.Pages(*(x.to(torch.int32).cuda() for x in given))
    rules = {"scale": SCALE, "window": window, "soft_cap": soft_cap}
    out = kernels.decode(query, keys, values, pages, **rules)
    assert out.dtype == dtype
    error = (out.double() - torch.stack(wanted)).abs().max().item()
    assert error < ATTENTION[dtype]
    # Whichever of a segment's programs is done last, they are put together in the same order.
    for _ in range(20):
        assert torch.equal(kernels.decode(query, keys, values, pages, **rules), out)
    assert not pages.arrivals.any()


def test_slots_are_dealt_out_only_while_that_fills_the_device(kernels: Any) -> None:
    assert [kernels.num_splits(size, 8, 128) for size in (1, 2, 4, 8, 16, 32, 40, 64, 256)] == [
        32, 32, 16, 8, 4, 2, 1, 1, 1,
    ]  # fmt: skip
    assert [kernels.num_splits(size, 20, 64) for size in (1, 8, 16, 32)] == [32, 4, 2, 1]
