import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar.engine.resources.position.config import RopeParams
from mstar.engine.resources.position.rope import CosSinTable, Rotation, inv_freq
from mstar.errors import ConfigError

TESTS = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("oracle_rope", TESTS / "oracles" / "rope.py")
assert _spec is not None
assert _spec.loader is not None
oracle: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)

LLAMA_31 = RopeParams(
    rope_theta=5e5, rope_scale=8.0, low_freq_factor=1.0, high_freq_factor=4.0, old_context_len=8192
)
LLAMA_32 = RopeParams(
    rope_theta=5e5, rope_scale=32.0, low_freq_factor=1.0, high_freq_factor=4.0, old_context_len=8192
)
STEP = RopeParams(
    rope_theta=5e5, rope_scale=16.0, low_freq_factor=1.0, high_freq_factor=1.0, old_context_len=8192
)


def rotation(
    ids: Sequence[int],
    dim: int,
    params: RopeParams | None = None,
    *,
    interleave: bool = False,
    dtype: torch.dtype | None = None,
    limit: int | None = None,
) -> Rotation:
    params = params or RopeParams()
    table = CosSinTable(
        dim,
        params,
        num_rows=max(ids, default=0) + 1,
        limit=limit or max(ids, default=0) + 1,
        dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        device=torch.device("cpu"),
    )
    rows = table.rows[torch.tensor(ids, dtype=torch.int64)]
    return Rotation(rows, interleave=interleave, dtype=dtype)


def at(position: int, dim: int, params: RopeParams, **kwargs: Any) -> Rotation:
    """A rotation at one far position, without the rows below it."""
    angles = position * inv_freq(dim, params)
    rows = (torch.cat((angles.cos(), angles.sin())) * params.attention_scaling)[None].float()
    return Rotation(rows, **{"interleave": False, "dtype": None, **kwargs})


def expected(
    heads: Tensor,
    ids: Sequence[int],
    freqs: list[float],
    *,
    interleave: bool = False,
    scaling: float = 1.0,
) -> Tensor:
    rows = [
        [
            oracle.rotate(head, p, freqs, interleave=interleave, scaling=scaling)
            for head in token.tolist()
        ]
        for token, p in zip(heads.double(), ids, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("dim", "params", "golden"),
    [
        (
            128,
            LLAMA_31,
            {
                0: 1.0,
                1: 0.81461722,
                16: 0.037606031,
                32: 5.2484602e-4,
                48: 6.6478697e-6,
                63: 3.0689259e-7,
            },
        ),
        (64, LLAMA_32, {1: 0.66360128, 16: 4.2955671e-4, 24: 1.6619674e-6, 31: 9.4183065e-8}),
        (128, STEP, {32: 1.4142134e-3, 48: 3.3239348e-6, 63: 1.5344629e-7}),
    ],
)
def test_frequencies_are_the_published_golden_ones(
    dim: int, params: RopeParams, golden: dict[int, float]
) -> None:
    freqs = inv_freq(dim, params)
    assert freqs.dtype == torch.float64
    for pair, value in golden.items():
        assert freqs[pair].item() == pytest.approx(value, rel=5e-7)


@pytest.mark.parametrize(
    ("dim", "params", "counts"),
    [(128, LLAMA_31, (29, 6, 29)), (64, LLAMA_32, (15, 3, 14)), (128, STEP, (35, 0, 29))],
)
def test_llama31_keeps_blends_and_divides_as_many_pairs_as_published(
    dim: int, params: RopeParams, counts: tuple[int, int, int]
) -> None:
    plain = inv_freq(dim, RopeParams(rope_theta=params.rope_theta))
    ratio = plain / inv_freq(dim, params)
    kept = int((ratio == 1).sum())
    divided = int((ratio - params.rope_scale).abs().lt(1e-9).sum())
    assert (kept, dim // 2 - kept - divided, divided) == counts


@pytest.mark.parametrize("params", [LLAMA_31, LLAMA_32, STEP])
def test_one_clamp_equals_the_three_published_branches(params: RopeParams) -> None:
    wanted = oracle.llama31_frequencies(128, params.rope_theta, params.rope_scale,
                                        *params.llama31_params.values())  # fmt: skip
    torch.testing.assert_close(
        inv_freq(128, params), torch.tensor(wanted, dtype=torch.float64), rtol=1e-14, atol=0
    )


def test_scale_divides_frequencies() -> None:
    assert torch.equal(inv_freq(64, RopeParams(rope_scale=8.0)), inv_freq(64, RopeParams()) / 8)
    x = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(0))
    squeezed = rotation([40], 64, RopeParams(rope_scale=8.0))(x)
    assert torch.equal(squeezed, rotation([5], 64)(x))


def test_freq_factors_divide_pair_by_pair_on_top_of_the_scale() -> None:
    factors = tuple(1.0 + i for i in range(32))
    got = inv_freq(64, RopeParams(freq_factors=factors, rope_scale=2.0))
    wanted = torch.tensor(oracle.frequencies(64, 1e4), dtype=torch.float64)
    torch.testing.assert_close(got, wanted / torch.tensor(factors, dtype=torch.float64) / 2)
    with pytest.raises(ConfigError, match="32 entries"):
        inv_freq(32, RopeParams(freq_factors=factors))


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(64, 64), (64, 16), (80, 80), (80, 32), (96, 24), (96, 96), (128, 128), (128, 64), (256, 64)],
)
def test_rotated_heads_match_complex_numbers_and_the_tail_stays_bit_for_bit(
    head_dim: int, rotary_dim: int, interleave: bool
) -> None:
    ids = [0, 1, 2, 77, 4095]
    x = torch.randn(len(ids), 3, head_dim, generator=torch.Generator().manual_seed(head_dim))
    before = x.clone()
    got = rotation(ids, rotary_dim, interleave=interleave)(x)
    freqs = oracle.frequencies(rotary_dim, 1e4)
    torch.testing.assert_close(
        got.double(), expected(x, ids, freqs, interleave=interleave), rtol=0, atol=2e-6
    )
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    assert torch.equal(x, before)
    assert torch.equal(got[0], x[0])


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("rotary_dim", [32, 64])
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float64, 2e-6)]
)
def test_results_have_the_inputs_dtype_and_one_rounding(
    dtype: torch.dtype, atol: float, rotary_dim: int, interleave: bool
) -> None:
    ids = [3, 1000]
    x = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = rotation(ids, rotary_dim, interleave=interleave)(x)
    wanted = expected(x, ids, oracle.frequencies(rotary_dim, 1e4), interleave=interleave)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=atol)
    if dtype != torch.float64:
        wide = rotation(ids, rotary_dim, interleave=interleave)(x.float())
        assert torch.equal(got, wide.to(dtype))


def test_rope_dtype_float64_computes_in_float64_and_bfloat16_rounds_first() -> None:
    x = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    exact = rotation([4000], 32, dtype=torch.float64)(x)
    wanted = expected(x, [4000], oracle.frequencies(32, 1e4))
    torch.testing.assert_close(exact, wanted, rtol=0, atol=1e-12)
    rounded = rotation([4000], 32, dtype=torch.bfloat16)(x.float())
    assert torch.equal(rounded, rotation([4000], 32)(x.bfloat16().float()))


@pytest.mark.parametrize("position", [65_537, 131_071, 1_048_576, 16_777_216])
@pytest.mark.parametrize("params", [RopeParams(rope_theta=1e6), LLAMA_31])
def test_far_positions_are_as_exact_as_near_ones(position: int, params: RopeParams) -> None:
    x = torch.randn(1, 2, 128, generator=torch.Generator().manual_seed(3))
    freqs = inv_freq(128, params).tolist()
    got = at(position, 128, params)(x)
    torch.testing.assert_close(
        got.double(), expected(x, [position], freqs), rtol=0, atol=2e-6 + position * 1e-15
    )


@pytest.mark.parametrize("base", [0, 65_536, 131_072, 1_048_576])
def test_scores_depend_on_the_distance_only(base: int) -> None:
    params = RopeParams(rope_theta=1e6)
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(1, 1, 128, generator=generator) for _ in range(2))
    near = (at(37, 128, params)(q) * at(5, 128, params)(k)).sum()
    far = (at(base + 37, 128, params)(q) * at(base + 5, 128, params)(k)).sum()
    assert far.item() == pytest.approx(near.item(), abs=2e-5)


def test_attention_scaling_multiplies_cosine_and_sine() -> None:
    x = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(5))
    got = rotation([1, 9], 32, RopeParams(attention_scaling=1.25))(x)
    torch.testing.assert_close(got, rotation([1, 9], 32)(x) * 1.25)


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("dim", [24, 64, 80])
def test_a_tokens_rotation_does_not_depend_on_its_neighbours(dim: int, interleave: bool) -> None:
    ids = list(range(100, 140))
    x = torch.randn(len(ids), 3, dim, generator=torch.Generator().manual_seed(6))
    together = rotation(ids, dim, interleave=interleave)(x)
    for place, position in enumerate(ids):
        alone = rotation([position], dim, interleave=interleave)(x[place : place + 1])
        assert torch.equal(alone[0], together[place])


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 32])
def test_views_of_a_merged_tensor_and_empty_steps_rotate(rotary_dim: int, interleave: bool) -> None:
    merged = torch.randn(3, 6 * 32, generator=torch.Generator().manual_seed(7)).view(3, 6, 32)
    turn = rotation([0, 5, 6], rotary_dim, interleave=interleave)
    assert torch.equal(turn(merged[:, 2:5]), turn(merged[:, 2:5].contiguous()))
    empty = rotation([], rotary_dim, interleave=interleave)(merged[:0])
    assert empty.shape == (0, 6, 32)


def test_a_table_grown_in_pieces_equals_one_made_at_once_and_stops_at_its_limit() -> None:
    def make(num_rows: int) -> CosSinTable:
        return CosSinTable(
            16,
            LLAMA_31,
            num_rows=num_rows,
            limit=100,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )

    table = make(3)
    for num_rows in (4, 5, 40, 100):
        table.reserve(num_rows)
        assert num_rows <= len(table.rows) <= 100
    assert torch.equal(table.rows, make(100).rows)
    with pytest.raises(AssertionError):
        table.reserve(101)


def test_table_rows_are_cosines_then_sines_of_float64_angles() -> None:
    table = CosSinTable(
        4,
        RopeParams(rope_theta=100.0),
        num_rows=6,
        limit=6,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    wanted = [math.cos(5), math.cos(0.5), math.sin(5), math.sin(0.5)]
    assert table.rows[5].tolist() == torch.tensor(wanted).tolist()


@pytest.mark.parametrize("params", [RopeParams(rope_theta=5e5), LLAMA_31, LLAMA_32,
                                    RopeParams(rope_scale=8.0)])  # fmt: skip
def test_llama_in_transformers_agrees(params: RopeParams) -> None:
    transformers = pytest.importorskip("transformers")
    modeling_llama = pytest.importorskip("transformers.models.llama.modeling_llama")

    rope = {"rope_type": "default", "rope_theta": params.rope_theta}
    if params.llama31_params:
        rope |= {
            "rope_type": "llama3",
            "factor": params.rope_scale,
            "low_freq_factor": params.low_freq_factor,
            "high_freq_factor": params.high_freq_factor,
            "original_max_position_embeddings": params.old_context_len,
        }
    elif params.rope_scale != 1:
        rope |= {"rope_type": "linear", "factor": params.rope_scale}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters=rope,
        max_position_embeddings=131072,
    )  # fmt: skip
    module = modeling_llama.LlamaRotaryEmbedding(config)
    torch.testing.assert_close(module.inv_freq.double(), inv_freq(128, params), rtol=5e-7, atol=0)
    ids = [0, 1, 17, 300]
    q, k = torch.randn(2, len(ids), 2, 128, generator=torch.Generator().manual_seed(8))
    cos, sin = module(q, torch.tensor([ids]))
    wanted, _ = modeling_llama.apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin
    )
    got = rotation(ids, 128, params)(q)
    torch.testing.assert_close(got, wanted[0].transpose(0, 1), rtol=0, atol=1e-4)


def test_gemma3_in_transformers_has_the_two_sets_that_layers_share() -> None:
    transformers = pytest.importorskip("transformers")
    modeling_gemma3 = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")

    config = transformers.Gemma3TextConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=256,
        num_hidden_layers=6,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    )  # fmt: skip
    module = modeling_gemma3.Gemma3RotaryEmbedding(config)
    for kind, params in (
        ("sliding_attention", RopeParams(rope_theta=1e4)),
        ("full_attention", RopeParams(rope_theta=1e6, rope_scale=8.0)),
    ):
        theirs = getattr(module, f"{kind}_inv_freq").double()
        torch.testing.assert_close(theirs, inv_freq(256, params), rtol=3e-7, atol=0)
