"""A packed projection is the plain product."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mstar.models.linear import Linear

# Relative to the length of a row times that of a column: float32 sums in any order; bfloat16 sums
# in float32 and rounds once, some kernels twice.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
SHAPES = ((1, 1), (3, 5), (64, 96), (577, 33), (101, 130), (512, 1536))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def values(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def assert_product(linear: Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    found = linear(x)
    assert found.dtype == weight.dtype
    expected = x.double() @ weight.double().T
    sizes = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    if bias is not None:
        expected += bias.double()
        sizes += bias.double().abs()
    assert found.shape == expected.shape
    assert ((found.double() - expected).abs() <= TOLERANCE[weight.dtype] * sizes).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_product_is_exact_for_any_number_of_rows(
    width: int, out: int, dtype: torch.dtype, has_bias: bool
) -> None:
    weight = values(out, width, dtype=dtype, seed=1)
    bias = values(out, dtype=dtype, seed=2) if has_bias else None
    linear = Linear(weight.clone(), bias)
    assert linear.out_features == out
    for rows in (*range(1, 41), 300):
        assert_product(linear, values(rows, width, dtype=dtype, seed=rows), weight, bias)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    linear = Linear(values(5, 3, dtype=dtype, seed=1), values(5, dtype=dtype, seed=2))
    assert linear(torch.empty(0, 3, dtype=dtype)).shape == (0, 5)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_and_weights_may_have_gaps(dtype: torch.dtype) -> None:
    weight = values(20, 33, dtype=dtype, seed=1)
    x = values(7, 50, dtype=dtype, seed=2)[:, 5:38]
    assert_product(Linear(weight[::2]), x, weight[::2], None)
    turned = values(33, 20, dtype=dtype, seed=3).T
    assert_product(Linear(turned), x, turned, None)


def test_weight_is_not_changed_and_not_needed_afterwards() -> None:
    weight = values(20, 33, dtype=torch.float32, seed=1)
    before = weight.clone()
    linear = Linear(weight)
    x = values(7, 33, dtype=torch.float32, seed=2)
    assert_product(linear, x, before, None)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_multiplied_as_they_are(dtype: torch.dtype) -> None:
    weight, bias = values(20, 33, dtype=dtype, seed=1), values(20, dtype=dtype, seed=2)
    x = values(7, 33, dtype=dtype, seed=3)
    torch.testing.assert_close(Linear(weight, bias)(x), torch.nn.functional.linear(x, weight, bias))
