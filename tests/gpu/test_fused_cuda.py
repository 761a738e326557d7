"""The Triton kernels of a layer's element-wise steps against float64."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from mstar.engine.resources.kv.layout import KVLayout, KVPlan
from mstar.engine.resources.position.manager import PositionPlan
from mstar.engine.resources.position.rope import Rotation
from mstar.models.fused import LayerNorm, RMSNorm, gated, rotate_and_store
from mstar.models.linear import Linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Half a unit in the last place of what is stored, plus float32 arithmetic on numbers up to 16.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-18}


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def assert_rounded(actual: torch.Tensor, expected: torch.Tensor) -> None:
    step = ROUNDING[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=step, atol=step / 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 4096), (33, 576), (7, 128), (3, 9, 80), (0, 64)], ids=str)
def test_norm_adds_and_normalises_what_was_stored(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight = randn(shape[-1], dtype=dtype, seed=1)
    norm = RMSNorm(weight, 1e-5)
    x, added = randn(*shape, dtype=dtype, seed=2), randn(*shape, dtype=dtype, seed=3)
    total = (x.float() + added.float()).to(dtype)
    out = norm.add(x, added)
    assert torch.equal(x, total)
    wide = total.double()
    scale = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert_rounded(out, wide * scale * weight.double())
    assert torch.equal(norm(total), out)
    assert torch.equal(x, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1280), (33, 576), (7, 128), (3, 9, 80), (0, 64)], ids=str)
def test_layer_norm_adds_and_normalises_what_was_stored(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weight, bias = (randn(shape[-1], dtype=dtype, seed=seed) for seed in (1, 4))
    norm = LayerNorm(weight, bias, 1e-5)
    # Far from 0, so that squares less the mean's would lose what matters.
    x, added = 9 + randn(*shape, dtype=dtype, seed=2), randn(*shape, dtype=dtype, seed=3)
    total = (x.float() + added.float()).to(dtype)
    out = norm.add(x, added)
    assert torch.equal(x, total)
    wide = total.double()
    apart = wide - wide.mean(-1, keepdim=True)
    scale = (apart.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    # The mean of numbers up to 16 is a rounding of theirs off, times weights up to 4.
    expected = apart * scale * weight.double() + bias.double()
    step = ROUNDING[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=step, atol=max(step / 8, 2**-17))
    assert torch.equal(norm(total), out)
    assert torch.equal(x, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "shape",
    # Programs of every size.
    [
        (9000, 4096),
        (4096, 14336),
        (300, 576),
        (5, 7),
        (1, 1500),
        (2050, 1280),
        (2051, 999),
        (3, 2000),
    ],
)
def test_one_row_times_a_weight_is_the_formula(
    shape: tuple[int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    # The sum spreads over a few units, and float32 adds it up in another order.
    weight = (randn(*shape, dtype=torch.float32) * shape[1] ** -0.5).to(dtype)
    bias = randn(shape[0], dtype=dtype, seed=1) if has_bias else None
    x = randn(1, shape[1], dtype=dtype, seed=2)
    expected = x.double() @ weight.double().t()
    if bias is not None:
        expected += bias.double()
    out = Linear(weight, bias)(x)
    step = 2 * ROUNDING[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=step, atol=step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ("silu", functional.silu),
        ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
        ("gelu", functional.gelu),
    ],
)
def test_gate_gives_the_formula(
    activation: str, formula: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    for num_tokens, width in ((1, 14336), (5, 96), (300, 1000), (0, 64)):
        merged = 3 * randn(num_tokens, 2 * width, dtype=dtype)
        gate, up = merged.double().chunk(2, -1)
        out = gated(merged, activation)
        if activation == "gelu":
            step = 4 * ROUNDING[dtype]
            torch.testing.assert_close(out.double(), formula(gate) * up, rtol=step, atol=step)
        else:
            assert_rounded(out, formula(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleave", [False, True, None], ids=["halves", "pairs", "not"])
@pytest.mark.parametrize("shape", [(1, 32, 8, 128), (70, 9, 3, 64), (5, 3, 1, 80)], ids=str)
def test_heads_are_rotated_or_not_and_stored(
    shape: tuple[int, int, int, int], interleave: bool | None, dtype: torch.dtype
) -> None:
    num_tokens, num_heads, num_kv_heads, dim = shape
    qkv = randn(num_tokens, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    before = qkv.clone()
    angles = 100 * randn(num_tokens, dim // 2, dtype=torch.float64, seed=4)
    rows = torch.cat((angles.cos(), angles.sin()), 1).float()
    page_size, num_pages = 4, num_tokens + 2
    layout = KVLayout(2, num_pages, page_size, num_kv_heads, dim, dtype, torch.device("cuda"))
    keys, values = (
        [torch.full((num_pages, page_size, num_kv_heads, dim), 7, dtype=dtype, device="cuda")] * 2
        for _ in range(2)
    )
    slots = torch.randperm(num_pages * page_size, device="cuda")[:num_tokens]
    kv = KVPlan(
        layout=layout,
        keys=keys,
        values=values,
        slots=slots,
        **dict.fromkeys(("qo_lens", "qo_indptr", "kv_lens", "page_table")),  # type: ignore[arg-type]
    )
    rotations = () if interleave is None else (Rotation(rows, interleave=interleave, dtype=None),)
    layers = (None, None) if interleave is None else None
    position = PositionPlan(torch.arange(num_tokens, device="cuda"), rotations, layers)
    query = rotate_and_store(qkv, num_heads, position, kv, 1)
    assert query.is_contiguous()

    wide = before[:, : num_heads + num_kv_heads].double()
    pairs = wide.unflatten(-1, (-1, 2)) if interleave else wide.unflatten(-1, (2, -1)).mT
    cos, sin = rows.double()[:, None].chunk(2, -1)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)
    parts = torch.view_as_real(turned)
    expected = wide if interleave is None else (parts if interleave else parts.mT).flatten(-2)
    assert_rounded(query, expected[:, :num_heads])
    stored = keys[1].view(-1, num_kv_heads, dim)
    assert_rounded(stored[slots], expected[:, num_heads:])
    kept = values[1].view(-1, num_kv_heads, dim)
    assert torch.equal(kept[slots], before[:, num_heads + num_kv_heads :])
    others = torch.ones(num_pages * page_size, dtype=torch.bool, device="cuda")
    others[slots] = False
    assert (stored[others] == 7).all()
    assert (kept[others] == 7).all()
    assert torch.equal(qkv, before)
