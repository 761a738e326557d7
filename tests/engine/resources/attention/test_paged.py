"""The compiled kernel keeps a row's bits, whatever surrounds it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mstar.engine.resources.attention.config import AttentionConfig, LayerAttention
from mstar.engine.resources.attention.paged import CALL_BYTES, Backend, Workspace
from mstar.engine.resources.attention.sdpa import Backend as SdpaBackend
from mstar.engine.resources.kv.layout import KVLayout, KVPlan

pytest.importorskip("mstar.engine.resources.attention._paged", exc_type=ImportError)

PAGE_SIZE = 4
RULES = (LayerAttention(), LayerAttention(window=37), LayerAttention(window=150, soft_cap=2.0))


def config_of(num_qo_heads: int, num_kv_heads: int, head_dim: int) -> AttentionConfig:
    return AttentionConfig(
        kv_cache="kv",
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        layers=RULES,
    )


class Streams:
    """Full streams in one cache, of which steps may take any part."""

    def __init__(self, lens: tuple[int, ...], config: AttentionConfig, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(len(lens))
        pages = [-(-n // PAGE_SIZE) for n in lens]
        num_pages = sum(pages) + 1
        order = torch.randperm(num_pages - 1, generator=generator).numpy() + 1
        self.table = np.zeros((len(lens), max(pages)), np.int32)
        for i, end in enumerate(np.cumsum(pages)):
            self.table[i, : pages[i]] = order[end - pages[i] : end]
        size = (len(RULES), num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self.keys, self.values = torch.randn(2, *size, generator=generator).to(dtype)
        self.queries = [
            torch.randn(n, config.num_qo_heads, config.head_dim, generator=generator).to(dtype)
            for n in lens
        ]
        self.layout = KVLayout(
            len(RULES),
            num_pages,
            PAGE_SIZE,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            torch.device("cpu"),
        )
        self.backend = Backend(config, self.layout)

    def run(self, parts: list[tuple[int, int, int]], layer: int = 0) -> list[torch.Tensor]:
        """Attend the tokens ``[begin, end)`` of each named stream in one step."""
        plan = self.plan(parts)
        query = torch.cat([self.queries[i][begin:end] for i, begin, end in parts])
        out = self.backend.plan(plan, (True,) * len(parts)).run(layer, query)
        return list(torch.split(out, [end - begin for _, begin, end in parts]))

    def plan(self, parts: list[tuple[int, int, int]]) -> KVPlan:
        qo_lens = np.array([end - begin for _, begin, end in parts], np.int32)
        return KVPlan(
            layout=self.layout,
            keys=list(self.keys),
            values=list(self.values),
            qo_lens=qo_lens,
            qo_indptr=np.concatenate(([0], qo_lens.cumsum())).astype(np.int32),
            kv_lens=np.array([end for _, _, end in parts], np.int32),
            page_table=np.ascontiguousarray(self.table[[i for i, _, _ in parts]]),
            slots=torch.zeros(0, dtype=torch.int64),
        )


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def streams(request: pytest.FixtureRequest) -> Streams:
    return Streams((300, 9, 130, 64), config_of(6, 2, 80), request.param)


@pytest.fixture
def num_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.mark.parametrize("layer", range(len(RULES)))
def test_neighbours_do_not_change_a_segments_bits(streams: Streams, layer: int) -> None:
    parts = [(0, 299, 300), (1, 0, 9), (2, 60, 130), (3, 63, 64)]
    together = streams.run(parts, layer)
    alone = [streams.run([part], layer)[0] for part in parts]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("layer", range(len(RULES)))
def test_any_cut_of_a_stream_gives_the_same_bits(streams: Streams, layer: int) -> None:
    whole = streams.run([(0, 0, 300)], layer)[0]
    for cuts in ([1, 2, 299], [128], [100, 164, 165], [7, 64, 130, 256]):
        ends = [*cuts, 300]
        begins = [0, *cuts]
        parts = [
            streams.run([(0, begin, end)], layer)[0]
            for begin, end in zip(begins, ends, strict=True)
        ]
        assert torch.equal(torch.cat(parts), whole)
    for token in (0, 36, 37, 127, 128, 255, 299):
        assert torch.equal(streams.run([(0, token, token + 1)], layer)[0], whole[token : token + 1])


@pytest.mark.parametrize("layer", range(len(RULES)))
def test_number_of_threads_does_not_change_bits(
    streams: Streams, layer: int, num_threads: int
) -> None:
    parts = [(0, 200, 300), (2, 129, 130)]
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(torch.cat(streams.run(parts, layer)))
    assert torch.equal(*results)


def test_large_step_is_spread_over_calls() -> None:
    streams = Streams((1000,), config_of(16, 2, 32), torch.float32)
    rows = 1000 * 16 * (1000 // 128 + 1) // 2
    assert rows * 4 * 48 > CALL_BYTES
    plan = streams.plan([(0, 0, 1000)])
    out = streams.run([(0, 0, 1000)])[0]
    expected = SdpaBackend(streams.backend.config, streams.layout).plan(plan, (True,))
    torch.testing.assert_close(out, expected.run(0, streams.queries[0]), rtol=0, atol=1e-5)


def test_workspace_grows_and_is_kept() -> None:
    workspace = Workspace()
    large = workspace.reserve(100)
    assert large.numel() >= 100
    assert workspace.reserve(10) is large
    assert workspace.reserve(200) is not large


def test_page_outside_the_cache_is_caught_before_the_kernel(streams: Streams) -> None:
    plan = streams.plan([(0, 299, 300)])
    plan.page_table[0, 3] = streams.layout.num_pages
    with pytest.raises(AssertionError, match="page"):
        streams.backend.plan(plan, (True,))


def test_query_of_another_dtype_is_caught_before_the_kernel(streams: Streams) -> None:
    plan = streams.backend.plan(streams.plan([(1, 8, 9)]), (True,))
    with pytest.raises(AssertionError, match="over"):
        plan.run(0, streams.queries[1][8:9].double())


def test_refusals_name_what_is_wrong(streams: Streams) -> None:
    layout = streams.layout
    odd = KVLayout(1, 4, 4, 2, 40, torch.float16, torch.device("meta"))
    assert Backend.unsupported(streams.backend.config, layout) == []
    reasons = Backend.unsupported(config_of(6, 2, 40), odd)
    assert [word for word in ("meta", "float16", "head_dim") if word in "\n".join(reasons)] == [
        "meta",
        "float16",
        "head_dim",
    ]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc/self/maps")
def test_kernel_shares_torchs_openmp_runtime() -> None:
    # In a process of its own: other packages bring runtimes of theirs.
    program = (
        "import torch, mstar.engine.resources.attention._paged\n"
        "print(*(l.split()[-1] for l in open('/proc/self/maps') if 'libgomp' in l))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert len(set(told.stdout.split())) <= 1, told.stdout
