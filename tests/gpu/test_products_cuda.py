"""Products by chosen kernels of cuBLASLt are those of torch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mstar.models import products
from mstar.models.cublaslt import Library, Product
from mstar.models.linear import Linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
SHAPES = [(3072, 1024), (1024, 4096), (200, 72)]


def drawn(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(size, dtype=dtype, device=DEVICE, generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [16, 200, 1000])
def test_every_kernel_on_offer_multiplies(
    dtype: torch.dtype, shape: tuple[int, int], num_rows: int
) -> None:
    product = Product(Library(DEVICE), *shape, dtype)
    weight, x = drawn(*shape, dtype=dtype), drawn(num_rows, shape[1], dtype=dtype, seed=1)
    expected = x.double() @ weight.double().t()
    offers = product.offers(num_rows)
    assert len(offers) > 3
    assert len(set(offers)) == len(offers)
    for algo in offers:
        out = torch.full_like(expected, torch.nan, dtype=dtype)
        assert product.kernel(algo)(x, weight, out)
        # Sums are float32 and rounded once.
        error = (out.double() - expected).norm() / expected.norm()
        assert error < (3e-3 if dtype == torch.bfloat16 else 4e-4), algo.hex()


def test_a_kernel_serves_other_numbers_of_rows_in_turn_and_recorded() -> None:
    product = Product(Library(DEVICE), 512, 256, torch.bfloat16)
    weight = drawn(512, 256, dtype=torch.bfloat16)
    kernel = product.kernel(product.offers(64)[0])
    for num_rows in (64, 33, 50, 64):
        x = drawn(num_rows, 256, dtype=torch.bfloat16, seed=num_rows)
        out = x.new_empty((num_rows, 512))
        assert kernel(x, weight, out)
        torch.testing.assert_close(out, functional.linear(x, weight))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert kernel(x, weight, out)
    assert kernel(x[:40], weight, out[:40])
    x.copy_(drawn(64, 256, dtype=torch.bfloat16, seed=99))
    graph.replay()
    torch.testing.assert_close(out, functional.linear(x, weight))


def test_projections_use_what_was_chosen_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [drawn(4096, 2048, dtype=torch.bfloat16, seed=n) for n in range(3)]
    rows = [16, 64, 512]
    (kernels,) = products.choose([weights], rows, tmp_path)
    assert kernels is not None
    (memory,) = (tmp_path / "products").glob("*.json")
    known = memory.read_bytes()
    chosen = products.Choices(memory)
    assert all(chosen[f"{n} x 2048 x 4096 torch.bfloat16"] is not None for n in rows)

    def never(*_: object) -> None:
        raise AssertionError("it was tried before")

    with monkeypatch.context() as patch:
        patch.setattr(products._Contest, "__init__", never)
        products.choose([weights], rows, tmp_path)
    # What this version of the library does not know is tried anew.
    chosen["64 x 2048 x 4096 torch.bfloat16"] = bytes(64)
    assert chosen.write(["64 x 2048 x 4096 torch.bfloat16"])
    (kernels,) = products.choose([weights], rows, tmp_path)
    assert kernels is not None
    assert products.Choices(memory)["64 x 2048 x 4096 torch.bfloat16"] != bytes(64)
    assert len(memory.read_bytes()) <= len(known) + 128
    linear = Linear(weights[0])
    linear._kernels = kernels
    for num_rows in (1, 2, 16, 17, 33, 64, 65, 300, 512, 600):
        x = drawn(num_rows, 2048, dtype=torch.bfloat16, seed=num_rows)
        expected = x.double() @ weights[0].double().t()
        error = (linear(x).double() - expected).norm() / expected.norm()
        assert error < 3e-3, num_rows
        assert linear(x[:, :]).shape == (num_rows, 4096)


@pytest.mark.parametrize("num_rows", [1, 100, 1024, 1500])
def test_a_product_is_added_at_once_or_left_to_be(num_rows: int) -> None:
    linear = Linear(weight := drawn(512, 256, dtype=torch.bfloat16))
    x = drawn(num_rows, 256, dtype=torch.bfloat16, seed=1)
    total = drawn(num_rows, 512, dtype=torch.bfloat16, seed=2)
    expected = total.double() + x.double() @ weight.double().t()
    left = linear.add_to(total, x)
    assert (left is None) == (num_rows >= 1024)
    found = total if left is None else total + left
    assert (found.double() - expected).norm() / expected.norm() < 5e-3


def test_other_dtypes_and_small_weights_are_left_to_torch(tmp_path: Path) -> None:
    groups = [[drawn(4096, 1024, dtype=torch.float32)], [drawn(512, 512, dtype=torch.bfloat16)]]
    assert products.choose(groups, [16], tmp_path) == [None, None]
