"""The layer's element-wise steps against float64 formulas, compiled and by torch.

An input with gaps between its rows takes torch's path, so both paths are run without a switch.
"""

import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.engine.resources.kv.cache import PagedKVCache
from mstar.engine.resources.kv.layout import KVLayout, KVPlan
from mstar.engine.resources.position.config import RopeParams
from mstar.engine.resources.position.manager import PositionPlan
from mstar.engine.resources.position.rope import CosSinTable, Rotation
from mstar.models.fused import LayerNorm, RMSNorm, gated, rotate_and_store

DTYPES = (torch.float32, torch.bfloat16)
ROWS = (0, 1, 2, 33)
WIDTHS = (1, 2, 7, 16, 33, 577)
# Relative; a few float32 operations. One rounding to bfloat16 is 2**-9, torch's path has three.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
needs_kernel = pytest.mark.skipif(
    find_spec("mstar.models._fused") is None,
    reason="the kernel _fused is not built; torch's gelu_tanh keeps no such promise",
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator)).to(dtype)


def gapped(x: Tensor) -> Tensor:
    """Return the same values with a gap between rows, filled with NaN."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 4), torch.nan, dtype=x.dtype)
    view = wide[..., : x.shape[-1]]
    view.copy_(x)
    return view


def plain(x: Tensor) -> Tensor:
    return x.clone()


LAYOUTS = pytest.mark.parametrize("lay", [plain, gapped])
Lay = Callable[[Tensor], Tensor]


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Compare with float64, relative to the value or to 1e-3, whichever is larger."""
    assert expected.dtype == torch.float64
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * 1e-3)


def norm_formula(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * factor


@LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [*WIDTHS, 16_384, 16_385])
@pytest.mark.parametrize("is_offset", [False, True])
def test_norm_is_the_formula(
    lay: Lay, dtype: torch.dtype, rows: int, width: int, is_offset: bool
) -> None:
    weight = values(width, dtype=dtype, seed=1)
    x = values(rows, width, dtype=dtype)
    given = lay(x)
    found = RMSNorm(weight, 1e-2, is_offset=is_offset)(given)
    assert found.shape == x.shape
    assert found.dtype == dtype
    assert torch.equal(given, x)
    assert_near(found, norm_formula(x.double(), weight.double() + is_offset, 1e-2))


@LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_residual_sum_is_left_in_its_place(
    lay: Lay, dtype: torch.dtype, rows: int, width: int
) -> None:
    weight = values(width, dtype=dtype, seed=1)
    x, added = (values(rows, width, dtype=dtype, seed=seed) for seed in (2, 3))
    given, given_added = lay(x), lay(added)
    found = RMSNorm(weight, 1e-5).add(given, given_added)
    assert torch.equal(given, x + added)
    assert torch.equal(given_added, added)
    # From the sum as it is stored: the next layer must see what this one normalised.
    assert_near(found, norm_formula((x + added).double(), weight.double(), 1e-5))


@LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [2, 33, 577])
def test_layer_norm_is_the_formula_of_the_sum_as_it_is_stored(
    lay: Lay, dtype: torch.dtype, rows: int, width: int
) -> None:
    weight, bias = (values(width, dtype=dtype, seed=seed) for seed in (1, 4))
    x, added = (values(rows, width, dtype=dtype, seed=seed) for seed in (2, 3))
    given, given_added = lay(x), lay(added)
    norm = LayerNorm(weight, bias, 1e-2)
    found = norm.add(given, given_added)
    total = x + added
    assert torch.equal(given, total)
    assert torch.equal(given_added, added)
    assert torch.equal(norm(given), found)
    assert torch.equal(given, total)
    apart = total.double() - total.double().mean(-1, keepdim=True)
    scale = (apart.square().mean(-1, keepdim=True) + 1e-2).rsqrt()
    expected = apart * scale * weight.double() + bias.double()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_added_may_have_gaps_where_the_residual_has_none(dtype: torch.dtype) -> None:
    norm = RMSNorm(values(33, dtype=dtype, seed=1), 1e-5)
    x, added = values(5, 33, dtype=dtype), values(5, 33, dtype=dtype, seed=3)
    first, second = x.clone(), x.clone()
    assert torch.equal(norm.add(first, added), norm.add(second, gapped(added)))
    assert torch.equal(first, second)


def test_norm_of_heads_takes_the_last_axis() -> None:
    norm = RMSNorm(values(16, seed=1), 1e-5)
    heads = values(3, 4, 16)
    assert torch.equal(norm(heads), norm(heads.view(12, 16)).view(3, 4, 16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_weight_may_be_strided(dtype: torch.dtype) -> None:
    weight, x = values(33, dtype=dtype, seed=1), values(2, 33, dtype=dtype)
    assert torch.equal(RMSNorm(weight, 1e-5)(x), RMSNorm(weight.repeat_interleave(2)[::2], 1e-5)(x))


def test_shapes_that_do_not_fit_are_refused() -> None:
    norm = RMSNorm(torch.ones(8), 1e-5)
    for x, added in (
        (torch.ones(2, 4), None),
        (torch.ones(2, 8), torch.ones(1, 8)),
        (torch.ones(2, 8), torch.ones(2, 8, dtype=torch.bfloat16)),
        (gapped(torch.ones(2, 8)), torch.ones(1, 8)),
    ):
        with pytest.raises(AssertionError):
            norm.add(x, added)
    with pytest.raises((AssertionError, KeyError), match="relu"):
        gated(torch.ones(2, 8), "relu")


def activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return x / (1 + torch.exp(-x))
    if activation == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * (1 + torch.tanh(inner)) / 2


@LAYOUTS
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_gate_is_the_formula(
    lay: Lay, activation: str, dtype: torch.dtype, rows: int, width: int
) -> None:
    merged = values(rows, 2 * width, dtype=dtype)
    given = lay(merged)
    found = gated(given, activation)
    assert found.shape == (rows, width)
    assert found.dtype == dtype
    assert torch.equal(given, merged)
    gate, up = merged.double().chunk(2, -1)
    # Relative to the gate: torch's gelu cancels in its left tail.
    error = (found.double() - activated(gate, activation) * up).abs()
    assert (error <= TOLERANCE[dtype] * (gate * up).abs()).all()


@needs_kernel
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_is_accurate_over_the_whole_range(activation: str) -> None:
    gate = torch.cat((torch.linspace(-110, 110, 100_001), torch.tensor([-1e30, -1e4, 1e4, 1e30])))
    merged = torch.stack((gate, torch.ones_like(gate)), 1)
    found = gated(merged.contiguous(), activation)[:, 0].double()
    expected = activated(gate.double(), activation)
    # gelu's tail is a difference of nearly equal numbers in float64, too.
    expected[(gate < -5) & (expected.abs() < 1e-12)] = 0
    torch.testing.assert_close(found, expected, rtol=3e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_not_a_number_and_infinity_are_not_hidden(activation: str, dtype: torch.dtype) -> None:
    merged = torch.ones(4, 14, dtype=dtype)
    merged[0, 3] = torch.nan
    merged[1, 10] = torch.nan
    merged[2, 3] = torch.inf
    found = gated(merged, activation)
    broken = torch.zeros(4, 7, dtype=torch.bool)
    broken[0, 3] = broken[1, 3] = broken[2, 3] = True
    assert torch.equal(~found.isfinite(), broken)
    assert found[2, 3] == torch.inf

    x = torch.ones(4, 7, dtype=dtype)
    x[0, 2] = torch.nan
    x[1, 2] = torch.inf
    normed = RMSNorm(torch.ones(7, dtype=dtype), 1e-5)(x)
    assert normed[0].isnan().all()
    assert normed[1, 2].isnan()
    assert normed[2:].isfinite().all()


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 577, 1536])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, width: int, threads: int) -> None:
    torch.set_num_threads(threads)
    norm = RMSNorm(values(width, dtype=dtype, seed=1), 1e-5)
    x, added = (values(33, width, dtype=dtype, seed=seed) for seed in (2, 3))
    merged = values(33, 2 * width, dtype=dtype, seed=4)
    summed = x.clone()
    normed = norm.add(summed, added)
    for i in range(33):
        alone = x[i : i + 1].clone()
        assert torch.equal(norm.add(alone, added[i : i + 1]), normed[i : i + 1])
        assert torch.equal(alone, summed[i : i + 1])
    for activation in ("silu", "gelu_tanh"):
        whole = gated(merged, activation)
        for i in range(33):
            assert torch.equal(gated(merged[i : i + 1], activation), whole[i : i + 1])


class Step:
    """A step of ``rows`` tokens at scattered positions, written to scattered slots."""

    def __init__(
        self,
        rows: int,
        dim: int,
        dtype: torch.dtype,
        *,
        num_kv_heads: int = 2,
        interleave: bool = False,
        rotary_dim: int | None = None,
        is_rotated: bool = True,
        rope_dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(rows)
        self.layout = KVLayout(
            num_layers=2,
            num_pages=17,
            page_size=4,
            num_kv_heads=num_kv_heads,
            head_dim=dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        self.cache = PagedKVCache(self.layout)
        self.slots = 4 + torch.randperm(64, generator=generator)[:rows]
        self.ids = torch.randint(1000, (rows,), generator=generator)
        width = rotary_dim or dim
        table = CosSinTable(
            width,
            RopeParams(rope_theta=100.0),
            num_rows=1000,
            limit=1000,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        rotation = Rotation(table.rows[self.ids], interleave=interleave, dtype=rope_dtype)
        layers = None if is_rotated else (None, None)
        self.position = PositionPlan(self.ids, (rotation,), layers)
        self.kv = KVPlan(
            layout=self.layout,
            keys=self.cache.keys,
            values=self.cache.values,
            qo_lens=np.full(1, rows, np.int32),
            qo_indptr=np.array([0, rows], np.int32),
            kv_lens=np.full(1, rows, np.int32),
            page_table=np.zeros((1, 17), np.int32),
            slots=self.slots,
        )

    def written(self, memory: list[Tensor], layer: int) -> Tensor:
        """Return what the step wrote, and assert that it wrote nothing else."""
        flat = memory[layer].flatten(0, 1)
        rest = torch.ones(len(flat), dtype=torch.bool)
        rest[self.slots] = False
        assert not flat[rest].any()
        assert not memory[1 - layer].any()
        return flat[self.slots]


def rotated(heads: Tensor, ids: Tensor, rotary_dim: int, interleave: bool) -> Tensor:
    """Return heads as complex numbers turned by their angles, float64."""
    angles = ids[:, None, None] * 100.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    turning, rest = heads.double().split((rotary_dim, heads.shape[-1] - rotary_dim), -1)
    if interleave:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    parts = (turned.real, turned.imag)
    turning = torch.stack(parts, -1).flatten(-2) if interleave else torch.cat(parts, -1)
    return torch.cat((turning, rest), -1)


def assert_rotated(found: Tensor, expected: Tensor) -> None:
    # Absolute: a rotated pair may cancel to nearly nothing. Angles of some 1000 turns are exact
    # to float32's rounding of their cosine.
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-6}[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@LAYOUTS
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(2, 2), (6, 6), (64, 64), (16, 8)])
def test_heads_are_rotated_and_stored(
    lay: Lay, interleave: bool, dtype: torch.dtype, rows: int, dim: int, rotary_dim: int
) -> None:
    step = Step(rows, dim, dtype, interleave=interleave, rotary_dim=rotary_dim)
    qkv = values(rows, 3 + 2 + 2, dim, dtype=dtype)
    query = rotate_and_store(lay(qkv), 3, step.position, step.kv, 1)
    assert query.shape == (rows, 3, dim)
    assert query.dtype == dtype
    assert_rotated(query, rotated(qkv[:, :3], step.ids, rotary_dim, interleave))
    keys = step.written(step.cache.keys, 1)
    assert_rotated(keys, rotated(qkv[:, 3:5], step.ids, rotary_dim, interleave))
    assert torch.equal(step.written(step.cache.values, 1), qkv[:, 5:])


@LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_without_rotation_stores_keys_as_they_are(lay: Lay, dtype: torch.dtype) -> None:
    step = Step(5, 16, dtype, is_rotated=False)
    qkv = values(5, 3 + 2 + 2, 16, dtype=dtype)
    assert torch.equal(rotate_and_store(lay(qkv), 3, step.position, step.kv, 0), qkv[:, :3])
    assert torch.equal(step.written(step.cache.keys, 0), qkv[:, 3:5])
    assert torch.equal(step.written(step.cache.values, 0), qkv[:, 5:])


def test_a_dtype_asked_for_the_rotation_is_kept_to() -> None:
    """Rounding to bfloat16 first must not be skipped by the compiled path."""
    step = Step(5, 16, torch.float32, rope_dtype=torch.bfloat16)
    qkv = values(5, 3 + 2 + 2, 16)
    query = rotate_and_store(qkv, 3, step.position, step.kv, 0)
    expected = rotated(qkv[:, :3].bfloat16(), step.ids, 16, False)
    torch.testing.assert_close(query.double(), expected, rtol=2e-2, atol=2e-2)
    assert (query.double() - rotated(qkv[:, :3], step.ids, 16, False)).abs().max() > 1e-3


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_heads_do_not_depend_on_its_batch(dtype: torch.dtype, interleave: bool) -> None:
    torch.set_num_threads(2)
    whole = Step(33, 64, dtype, interleave=interleave)
    qkv = values(33, 12 + 2 + 2, 64, dtype=dtype)
    query = rotate_and_store(qkv, 12, whole.position, whole.kv, 0)
    keys = whole.written(whole.cache.keys, 0)
    for i in (0, 7, 32):
        alone = Step(1, 64, dtype, interleave=interleave)
        rows = whole.position.rotation(0)
        assert rows is not None
        position = PositionPlan(
            whole.ids[i : i + 1],
            (Rotation(rows.rows[i : i + 1], interleave=interleave, dtype=None),),
            None,
        )
        own = rotate_and_store(qkv[i : i + 1], 12, position, alone.kv, 0)
        assert torch.equal(own, query[i : i + 1])
        assert torch.equal(alone.written(alone.cache.keys, 0), keys[i : i + 1])


def test_step_of_another_length_is_refused() -> None:
    step = Step(5, 16, torch.float32)
    with pytest.raises((AssertionError, RuntimeError)):
        rotate_and_store(values(6, 7, 16), 3, step.position, step.kv, 0)
