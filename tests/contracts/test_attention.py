"""Every attention backend gives what the formula gives, on ragged steps over a torn cache."""

import importlib
import random
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mstar.engine.resources.attention.base import AttentionBackend
from mstar.engine.resources.attention.config import BACKENDS, AttentionConfig, LayerAttention
from mstar.engine.resources.attention.manager import pick_backend
from mstar.engine.resources.kv.layout import KVLayout, KVPlan
from mstar.errors import UnsupportedError
from tests.oracles import attention as oracle
from tests.oracles.tolerances import ATTENTION

RULES = (
    LayerAttention(),
    LayerAttention(window=5),
    LayerAttention(window=130, soft_cap=3.0),
    LayerAttention(soft_cap=0.5),
)
# Query heads, key heads, head size, page size.
SHAPES = (
    (1, 1, 16, 1),
    (9, 3, 64, 16),
    (6, 3, 80, 4),
    (4, 1, 256, 16),
    (14, 2, 64, 16),
    (2, 2, 32, 4),
)
RAGGED = ((1, 1), (1, 17), (0, 9), (1, 300), (3, 140), (20, 20), (66, 200), (8, 8), (1, 128))
"""``(qo_len, kv_len)`` of the segments, shuffled for each case."""


class Step:
    """A random step: pages in random order, NaN in every slot that nobody owns."""

    def __init__(
        self,
        lens: tuple[tuple[int, int], ...],
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        seed: int = 0,
        rules: tuple[LayerAttention, ...] = RULES,
    ) -> None:
        num_qo_heads, num_kv_heads, head_dim, page_size = shape
        generator = torch.Generator().manual_seed(seed)
        order = random.Random(seed)
        self.scale = head_dim**-0.5
        pages_each = [-(-kv_len // page_size) for _, kv_len in lens]
        num_pages = sum(pages_each) + 3
        free = list(range(1, num_pages))
        order.shuffle(free)
        table = np.zeros((len(lens), max(pages_each) + 1), np.int32)
        size = (len(rules), num_pages * page_size, num_kv_heads, head_dim)
        keys, values = torch.full((2, *size), torch.nan, dtype=dtype)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for i, (_, kv_len) in enumerate(lens):
            table[i, : pages_each[i]] = [free.pop() for _ in range(pages_each[i])]
            at = [int(table[i, n // page_size]) * page_size + n % page_size for n in range(kv_len)]
            own = torch.randn(2, len(rules), kv_len, num_kv_heads, head_dim, generator=generator)
            own = own.to(dtype)
            keys[:, at], values[:, at] = own
            self.keys.append(own[0])
            self.values.append(own[1])
        qo_lens = np.array([qo_len for qo_len, _ in lens], np.int32)
        self.indptr = np.concatenate(([0], qo_lens.cumsum())).astype(np.int32)
        paged = (len(rules), num_pages, page_size, num_kv_heads, head_dim)
        layout = KVLayout(
            len(rules), num_pages, page_size, num_kv_heads, head_dim, dtype, torch.device("cpu")
        )
        self.plan = KVPlan(
            layout=layout,
            keys=list(keys.view(paged)),
            values=list(values.view(paged)),
            qo_lens=qo_lens,
            qo_indptr=self.indptr,
            kv_lens=np.array([kv_len for _, kv_len in lens], np.int32),
            page_table=table,
            slots=torch.zeros(0, dtype=torch.int64),
        )
        self.query = torch.randn(
            int(self.indptr[-1]), num_qo_heads, head_dim, generator=generator
        ).to(dtype)
        self.config = AttentionConfig(
            kv_cache="kv",
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=self.scale,
            layers=rules,
        )

    def expected(self, layer: int, is_causal: tuple[bool, ...]) -> torch.Tensor:
        rules = self.config.layers[layer]
        rows = [
            oracle.attend(
                self.query[self.indptr[i] : self.indptr[i + 1]].double().numpy(),
                self.keys[i][layer].double().numpy(),
                self.values[i][layer].double().numpy(),
                self.scale,
                is_causal=is_causal[i],
                window=rules.window,
                soft_cap=rules.soft_cap,
            )
            for i in range(len(is_causal))
        ]
        return torch.from_numpy(np.concatenate(rows))

    def last_rows(self, segments: Iterable[int]) -> npt.NDArray[np.int64]:
        """Return where the last tokens of segments stand, of those that have any."""
        lens = self.plan.qo_lens
        chosen = [i for i in sorted(segments) if lens[i]]
        return (self.plan.qo_indptr[1:][chosen] - 1).astype(np.int64)


def backends() -> list[str]:
    """The backends of this machine, the compiled one once for each level it has."""
    names = [name for name in BACKENDS if name != "flashinfer"]
    try:
        kernel = importlib.import_module("mstar.engine.resources.attention._paged")
    except ImportError:
        return names
    return names + [f"paged:{level}" for level in range(kernel.LEVEL)]


def build(name: str, step: Step) -> AttentionBackend:
    name, _, level = name.partition(":")
    try:
        _, backend = pick_backend(step.config, step.plan.layout, name)
    except UnsupportedError as error:
        pytest.skip(str(error))
    if level:
        paged = importlib.import_module(BACKENDS["paged"])
        backend = paged.Backend(step.config, step.plan.layout, int(level))
    return backend


def shuffled(seed: int) -> tuple[tuple[int, int], ...]:
    lens = list(RAGGED)
    random.Random(seed).shuffle(lens)
    return tuple(lens)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_backend_gives_what_the_formula_gives(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    step = Step(shuffled(sum(shape)), shape, dtype, seed=sum(shape))
    flags = ((True,) * len(RAGGED), (True, False, False) * 3)
    layers = [(flag, layer) for flag in flags for layer in range(len(RULES))]
    expected = {key: step.expected(key[1], key[0]) for key in layers}
    asked = 0
    for name in backends():
        if dtype == torch.float64 and name.startswith("paged"):
            continue
        backend = build(name, step)
        for flag in flags:
            plan = backend.plan(step.plan, flag)
            for layer in range(len(RULES)):
                out = plan.run(layer, step.query)
                assert out.shape == step.query.shape
                assert out.dtype == dtype
                error = (out.double() - expected[flag, layer]).abs().max().item()
                assert error < ATTENTION[dtype], f"{name} {RULES[layer]} {flag}: {error}"
                asked += 1
    assert asked >= 2 * len(layers)


@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize("seed", range(8))
def test_random_steps_agree_with_the_formula(name: str, seed: int) -> None:
    order = random.Random(seed)
    lens = []
    for _ in range(order.randrange(1, 12)):
        stored = order.choice([0, order.randrange(20), order.randrange(290)])
        qo_len = order.choice([0, 1, 1, 1, order.randrange(1, 8), order.randrange(1, 150)])
        if stored + qo_len:
            lens.append((qo_len, stored + qo_len))
    lens = lens or [(1, 1)]
    rules = (LayerAttention(window=order.choice([None, 1, 3, 16, 128, 200])),)
    shape = (6, 2, 16, order.choice([1, 4, 16]))
    step = Step(tuple(lens), shape, torch.float32, seed, rules)
    is_causal = tuple(order.random() < 0.8 for _ in lens)
    plan = build(name, step).plan(step.plan, is_causal)
    expected, atol = step.expected(0, is_causal), ATTENTION[torch.float32]
    out = plan.run(0, step.query)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    rows = step.last_rows(order.sample(range(len(lens)), order.randrange(len(lens) + 1)))
    alone = plan.of_last(rows).run(0, step.query[rows])
    torch.testing.assert_close(alone.double(), expected[rows], rtol=0, atol=atol)


def test_only_the_last_tokens_of_segments_attend_alone() -> None:
    step = Step(((2, 9), (0, 4), (3, 33)), (4, 2, 16, 4), torch.float32)
    assert step.last_rows([2, 1, 0]).tolist() == [1, 4]
    plan = build("eager", step).plan(step.plan, (True, True, True))
    with pytest.raises(AssertionError, match=r"rows \[3\] of segments that end at \[4\]"):
        plan.of_last(np.array([3]))


@pytest.mark.parametrize("name", backends())
def test_step_without_new_tokens_gives_no_rows(name: str) -> None:
    step = Step(((0, 3), (0, 40)), (4, 2, 16, 4), torch.float32)
    out = build(name, step).plan(step.plan, (True, False)).run(1, step.query)
    assert out.shape == (0, 4, 16)


@pytest.mark.parametrize("name", backends())
def test_query_that_is_a_strided_view_is_read_as_it_stands(name: str) -> None:
    step = Step(((2, 9), (1, 33)), (4, 2, 16, 4), torch.float32)
    wide = torch.zeros(3, 4, 48)
    wide[..., 16:32] = step.query
    plan = build(name, step).plan(step.plan, (True, True))
    assert torch.equal(plan.run(0, wide[..., 16:32]), plan.run(0, step.query))


@pytest.mark.parametrize("name", backends())
def test_huge_scores_do_not_overflow(name: str) -> None:
    step = Step(((1, 200), (5, 300)), (3, 1, 64, 16), torch.float32)
    step.query.mul_(1e4)
    out = build(name, step).plan(step.plan, (True, True)).run(0, step.query)
    # Nearly all weight lies on one slot, so an error of the score of 1e-3 is the result's too.
    torch.testing.assert_close(out.double(), step.expected(0, (True, True)), rtol=0, atol=1e-1)
