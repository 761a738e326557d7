"""Sums and gathers over ranks that are all on one device, each on a stream of its own."""

import gc
import importlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NUM_SLOTS, SLOT = 64, 1024
EPS = 1e-5
PATIENCE = 20.0
"""Seconds that ranks are waited for."""
# Of a sum of few numbers, rounded once, relative to the largest.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-21}


@pytest.fixture
def kernels() -> Any:
    pytest.importorskip("triton")
    return importlib.import_module("mstar.models.parallel.sums_cuda")


class Ranks:
    """Ranks that write to each other's inboxes.

    While one waits for the others nothing may be asked of the device but to start them: loading a
    kernel, and memory that is taken or given back, can wait for all that runs. So each rank's
    launch is recorded first. Shares have few rows, so that all ranks run at the same time.
    """

    def __init__(self, kernels: Any, size: int, dtype: torch.dtype) -> None:
        self._kernels = kernels
        shape = (size, 2, size, NUM_SLOTS, SLOT)
        self._inboxes = torch.zeros(shape, dtype=dtype, device="cuda")
        begins = [inbox.data_ptr() for inbox in self._inboxes]
        self._boxes = [
            kernels.Boxes(
                torch.tensor(begins, device="cuda"),
                torch.zeros(NUM_SLOTS, dtype=torch.int32, device="cuda"),
                rank,
                size,
                SLOT,
            )
            for rank in range(size)
        ]
        self._streams = [torch.cuda.Stream() for _ in range(size)]
        self._rescue = torch.cuda.Stream()
        self._known: set[object] = set()

    def run(self, kind: object, launch: Callable[[int, Any], Any]) -> list[Any]:
        """Return each rank's result.

        Args:
            kind: Of the kernel that is launched.
            launch: Is given the rank and its boxes; the kernel comes last.
        """
        if kind not in self._known:
            # A kernel that is not loaded yet cannot be recorded.
            self._known.add(kind)
            self._inboxes.zero_()
            for rank, boxes in enumerate(self._boxes):
                launch(rank, boxes)
        torch.cuda.synchronize()
        graphs, found = [], []
        for rank, (boxes, stream) in enumerate(zip(self._boxes, self._streams, strict=True)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                graph.capture_begin()
                found.append(launch(rank, boxes))
                graph.capture_end()
            graphs.append(graph)
        # With full inboxes none waits, and the graphs are brought to the device.
        self._inboxes.zero_()
        self._replay(graphs)
        self._inboxes.view(torch.int16).fill_(self._kernels.EMPTY)
        self._replay(graphs)
        left = self._inboxes.view(torch.int16)
        assert (left == self._kernels.EMPTY).all(), "what was taken is not emptied"
        return found

    def _replay(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
        torch.cuda.synchronize()
        gc.disable()
        try:
            for graph, stream in zip(graphs, self._streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            deadline = time.monotonic() + PATIENCE
            while not (are_done := all(stream.query() for stream in self._streams)):
                if time.monotonic() > deadline:
                    # Full inboxes end what waits.
                    with torch.cuda.stream(self._rescue):
                        self._inboxes.zero_()
                    break
            torch.cuda.synchronize()
        finally:
            gc.enable()
        assert are_done, f"ranks still waited for each other after {PATIENCE} s"


def drawn(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype).cuda()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_have_the_same_sum_and_norm(kernels: Any, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    ranks = Ranks(kernels, size, dtype)

    def total(shares: list[Tensor], rank: int, boxes: Any) -> Tensor:
        found: Tensor = kernels.total(shares[rank], boxes)
        return found

    def add_norm(
        base: Tensor, shares: list[Tensor], weight: Tensor, rank: int, boxes: Any
    ) -> tuple[Tensor, Tensor]:
        kept = base.clone()
        return kept, kernels.add_norm(kept, shares[rank], weight, EPS, boxes)

    for turn in range(30):
        rows = int(torch.randint(1, 25, (1,), generator=generator))
        width = (1024, 200, 7)[turn % 3]
        shares = [drawn(generator, rows, width, dtype=dtype) for _ in range(size)]
        exact = torch.stack(shares).double().sum(0)
        sums = ranks.run(("total", width), partial(total, shares))
        assert all(torch.equal(found, sums[0]) for found in sums)
        assert (sums[0].double() - exact).abs().max() < TOLERANCE[dtype] * exact.abs().max()

        weight = torch.rand(width, generator=generator).cuda()
        base = drawn(generator, rows, width, dtype=dtype)
        both = ranks.run(("norm", width), partial(add_norm, base, shares, weight))
        assert all(torch.equal(found, both[0][0]) for found, _ in both)
        assert all(torch.equal(found, both[0][1]) for _, found in both)
        exact += base.double()
        largest = exact.abs().max()
        assert (both[0][0].double() - exact).abs().max() < TOLERANCE[dtype] * largest
        kept = both[0][0].double()
        wanted = kept * (kept.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double()
        error = (both[0][1].double() - wanted).abs().max()
        assert error < TOLERANCE[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_have_all_shares_side_by_side(
    kernels: Any, size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(size)
    ranks = Ranks(kernels, size, dtype)

    def join(shares: list[Tensor], rank: int, boxes: Any) -> Tensor:
        found: Tensor = kernels.join(shares[rank], boxes)
        return found

    for turn in range(30):
        rows = int(torch.randint(1, 9, (1,), generator=generator))
        width = (2500, 1024, 3)[turn % 3]
        shares = [drawn(generator, rows, width, dtype=dtype) for _ in range(size)]
        for found in ranks.run(("join", width), partial(join, shares)):
            assert torch.equal(found, torch.cat(shares, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_looks_like_nothing_comes_as_zero(kernels: Any, dtype: torch.dtype) -> None:
    ranks = Ranks(kernels, 2, dtype)
    odd = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, torch.finfo(dtype).tiny]
    share = torch.tensor([odd], dtype=dtype, device="cuda")
    share = torch.cat([share, torch.full_like(share[:, :1], 0)], 1)
    share.view(torch.int16)[0, -share.element_size() // 2 :] = kernels.EMPTY
    joined = ranks.run("join", lambda _, boxes: kernels.join(share, boxes))
    sums = ranks.run("total", lambda _, boxes: kernels.total(share, boxes))
    expected = share.clone()
    expected[:, -1] = 0
    for ranks_found, wanted in ((joined, torch.cat([expected, expected], 1)), (sums, 2 * expected)):
        for found in ranks_found:
            assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(found.view(torch.int16), ranks_found[0].view(torch.int16))


def test_shares_that_do_not_fit_are_none_for_the_kernels(kernels: Any) -> None:
    boxes = Ranks(kernels, 2, torch.float32)._boxes[0]
    shares = {
        shape: torch.empty(*shape, device="cuda") for shape in ((64, 1024), (65, 8), (1, 1025))
    }
    assert [kernels.can_sum(share, boxes) for share in shares.values()] == [True, False, False]
    assert [kernels.can_join(share, boxes) for share in shares.values()] == [True, False, True]
    assert not kernels.can_join(torch.empty(0, 8), boxes)
    assert not kernels.can_sum(torch.empty(0, 8), boxes)
    assert not kernels.can_join(torch.empty(33, 1025), boxes)
