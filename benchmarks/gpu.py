"""Decode and prefill of an 8B model on a CUDA device, beside the floors of the card.

``python -m benchmarks.gpu`` draws random weights in the shape of Llama 3.1 8B, measures the card's
copy bandwidth and matrix rate, and prints every time with its ratio to the floor: decode cannot
beat reading weights and cached keys and values once a step, prefill two operations a weight and
token.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import gpu_composite, gpu_offline, gpu_sampling
from benchmarks.__main__ import table
from mstar.catalog import open_engine
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.keys import chain
from mstar.engine.resources.sampler.config import SamplingParams

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
}
NUM_WEIGHTS = 8.03e9
WAIT_US = 20
"""A pause of the device that is longer than any inside a recorded step, in microseconds."""
REST_S = 0.2
"""How long a card rests before a prompt that finds it at its highest clock."""
KV_BYTES = 2 * 32 * 8 * 128 * 2
"""Of one token."""
TIER_PROMPTS = 4
"""How many prompts host memory holds where pages come back from it."""


def device_ms(launch: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of one launch on the device, in ms."""
    for _ in range(3):
        launch()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def ceilings() -> tuple[float, float]:
    """Return copy bandwidth (read and written) in bytes a second and bf16 operations a second."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / device_ms(partial(target.copy_, source)) * 1e3
    del source, target
    torch.cuda.empty_cache()
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return bandwidth, 2 * 8192**3 / device_ms(lambda: a @ b) * 1e3


class Bench:
    """An engine with drawn weights, and the card's ceilings."""

    def __init__(self, config: dict[str, Any], deployment: Deployment) -> None:
        self.bandwidth, self.rate = ceilings()
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy "
            f"{self.bandwidth / 1e9:,.0f} GB/s, 8192³ bf16 matmul {self.rate / 1e12:,.0f} TFLOP/s"
        )
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            self.core = open_engine(folder, deployment, dtype="bfloat16", load_format="dummy")
        torch.cuda.synchronize()
        print(
            f"weights drawn and engine built in {time.perf_counter() - started:.1f} s, "
            f"{torch.cuda.memory_allocated() / 1e9:.1f} GB in use",
            flush=True,
        )
        self._vocab_size = self.core.model.vocab_size
        self._generator = torch.Generator().manual_seed(0)
        self._num_requests = 0

    def draw(self, num_tokens: int) -> list[int]:
        """Return random ids."""
        ids = torch.randint(0, self._vocab_size, (num_tokens,), generator=self._generator)
        drawn: list[int] = ids.tolist()
        return drawn

    def add(self, num_tokens: int, max_tokens: int) -> None:
        """Queue a request of random ids that does not stop by itself, and reuses nothing."""
        self._queue(self.draw(num_tokens), max_tokens)

    def _queue(
        self, ids: list[int], max_tokens: int, root: bytes | None = None, keys: Sequence[bytes] = ()
    ) -> None:
        self._num_requests += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.core.add_request(
            PreparedRequest(
                request_id=str(self._num_requests),
                token_ids=ids,
                params=params,
                root=root,
                page_keys=list(keys),
            )
        )

    def drain(self) -> None:
        """Run until there is no work."""
        while self.core.has_work:
            self.core.step()

    def decode(self, batch: int, context: int, steps: int = 40) -> dict[str, object]:
        """Return a row of the table: a step of ``batch`` requests at ``context`` tokens."""
        for _ in range(batch):
            # The first of them generate while the last are still prefilled.
            self.add(context - steps // 2, steps + 16 + batch * context // 4096)
        while len(self.core.step()) < batch:
            pass
        for _ in range(5):
            self.core.step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            assert len(self.core.step()) == batch
        torch.cuda.synchronize()
        wall = (time.perf_counter() - started) / steps * 1e3
        row = self._decode_row(batch, context, wall)
        self.drain()
        return row

    def _decode_row(self, batch: int, context: int, wall: float) -> dict[str, object]:
        floor = (2 * NUM_WEIGHTS + batch * context * KV_BYTES) / self.bandwidth * 1e3
        row: dict[str, object] = {
            "what": f"decode, batch {batch}, context {context}",
            "ms": f"{wall:.2f}",
            "floor ms": f"{floor:.2f}",
            "ratio": f"{wall / floor:.2f}",
        }
        # One of several ranks cannot run its part alone.
        is_alone = self.core.deployment.tensor_parallel_size == 1
        for recorder in self.core._runner._recorders.values() if is_alone else ():
            size = next((size for size in recorder._sizes if size >= batch), None)
            if size is not None:
                # The last step again: what the device alone takes, sampling left out.
                alone = device_ms(recorder._recordings[size].graph.replay)
                row["graph ms"] = f"{alone:.2f}"
        return row

    def prefill(self, num_tokens: int, repeats: int = 5) -> dict[str, object]:
        """Return a row of the table: time to the first token of one prompt.

        Prompts follow one another, which heats the card until its power limit lowers its clock; and
        come after a rest.
        """
        busy = [self._prompt_ms(num_tokens) for _ in range(repeats)]
        rested = [self._prompt_ms(num_tokens, REST_S) for _ in range(repeats)]
        row = self._prefill_row(num_tokens, statistics.median(busy[1:]))
        row["rested ms"] = f"{statistics.median(rested[1:]):.2f}"
        return row

    def _prompt_ms(self, num_tokens: int, rest: float = 0.0) -> float:
        """Return the time to the first token of one prompt, in ms, after a rest in seconds."""
        self.add(num_tokens, 1)
        torch.cuda.synchronize()
        time.sleep(rest)
        started = time.perf_counter()
        self.drain()
        return (time.perf_counter() - started) * 1e3

    def reuse(
        self, num_shared: int, num_own: int = 32, repeats: int = 6
    ) -> list[dict[str, object]]:
        """Return two rows of the table: the first token behind a shared prefix, cold and warm.

        The keys are made outside of what is timed, as a server's preprocessing makes them.
        """
        shared = self.draw(num_shared)
        times = [self._first_token(shared + self.draw(num_own)) for _ in range(repeats)]
        cold, warm = times[0], statistics.median(times[2:])
        what = f"first token behind {num_shared} shared tokens"
        return [
            {"what": f"{what}, cold", "ms": f"{cold:.2f}"},
            {"what": f"{what}, warm", "ms": f"{warm:.2f}", "ratio": f"{warm / cold:.3f} of cold"},
        ]

    def _first_token(self, ids: list[int]) -> float:
        """Return the time to the first token of a prompt that may reuse pages, in ms."""
        root, page_size = self.core.root, self.core.deployment.page_size
        assert root is not None, "reuse is off"
        pages = [ids[i : i + page_size] for i in range(0, len(ids), page_size)]
        keys = chain(pages, None, root)
        torch.cuda.synchronize()
        started = time.perf_counter()
        self._queue(ids, 1, root, keys)
        self.drain()
        return (time.perf_counter() - started) * 1e3

    def tiers(
        self, num_shared: int, num_own: int = 32, repeats: int = 5
    ) -> list[dict[str, object]]:
        """Return three rows of the table: the first token cold, from host memory, and warm.

        The pool holds one prompt. Two others push the shared pages out of it before they are asked
        for again, and go to host memory in turn while those come back.
        """
        for _ in range(2 * TIER_PROMPTS):
            # Host memory is taken as it fills, which takes its time.
            self._first_token(self.draw(num_shared + num_own))
        cold, back, warm = [], [], []
        for _ in range(repeats):
            shared = self.draw(num_shared)
            cold.append(self._first_token(shared + self.draw(num_own)))
            for _ in range(2):
                self._first_token(self.draw(num_shared + num_own))
            num_before = self.core.stats().cached_tokens
            back.append(self._first_token(shared + self.draw(num_own)))
            warm.append(self._first_token(shared + self.draw(num_own)))
            num_cached = self.core.stats().cached_tokens - num_before
            assert num_cached >= 2 * (num_shared - self.core.deployment.page_size), num_cached
        what = f"first token behind {num_shared} shared tokens"
        row: dict[str, object] = {"what": f"{what}, cold", "ms": f"{statistics.median(cold):.2f}"}
        rows = [row]
        for name, times in (("from host memory", back), ("warm", warm)):
            took = statistics.median(times)
            ratio = f"{took / statistics.median(cold):.3f} of cold"
            rows.append({"what": f"{what}, {name}", "ms": f"{took:.2f}", "ratio": ratio})
        extra = statistics.median(back) - statistics.median(warm)
        rows[1]["restored at"] = f"{num_shared * KV_BYTES / extra / 1e6:.1f} GB/s"
        return rows

    def offline(self, num_requests: int) -> dict[str, object]:
        """Return a row of the table: all requests known at once, greedy, ends at their limits."""
        asked = gpu_offline.case(num_requests, self._vocab_size)
        for _ in range(4):
            self.add(512, 8)
        self.drain()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for ids, limit in zip(asked.prompts, asked.max_tokens, strict=True):
            self._queue(ids, limit)
        num_before = self.core.stats().generation_tokens
        self.drain()
        seconds = time.perf_counter() - started
        num_tokens = self.core.stats().generation_tokens - num_before
        assert num_tokens == sum(asked.max_tokens), (num_tokens, sum(asked.max_tokens))
        return gpu_offline.row("mstar", asked, seconds)

    def overhead(self, batch: int, context: int, steps: int = 40) -> dict[str, object]:
        """Return a row of the table: how long a decode step leaves the device without work.

        Gaps between the kernels of a recorded step are the device's own, a few microseconds each;
        in longer ones it has no work. The profiler makes those longer, by its work on the CPU, so
        it only tells how long a step's work is; the steps that are timed run without it.
        """
        for _ in range(batch):
            self.add(context - steps // 2, 2 * steps + 30 + batch * context // 4096)
        while len(self.core.step()) < batch:
            pass
        for _ in range(5):
            self.core.step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            assert len(self.core.step()) == batch
        torch.cuda.synchronize()
        wall = (time.perf_counter() - started) / steps * 1e3
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(steps):
                self.core.step()
            torch.cuda.synchronize()
        self.drain()
        spans = sorted(
            (e.time_range.start, e.time_range.end) for e in profiled.events() if e.device_time
        )
        gaps, last = [], spans[0][0]
        for begin, end in spans:
            gaps.append(max(begin - last, 0))
            last = max(last, end)
        waits = sum(gap for gap in gaps if gap > WAIT_US)
        work = (last - spans[0][0] - waits) / steps / 1e3
        return {
            "what": f"overhead, batch {batch}, context {context}",
            "ms": f"{wall:.2f}",
            "work of the device": f"{work:.2f}",
            "waits for the CPU": f"{max(1 - work / wall, 0):.1%}",
            "under the profiler": f"{waits / (last - spans[0][0]):.1%}",
        }

    def _prefill_row(self, num_tokens: int, wall: float) -> dict[str, object]:
        floor = 2 * NUM_WEIGHTS * num_tokens / self.rate * 1e3
        return {
            "what": f"prefill, {num_tokens} tokens",
            "ms": f"{wall:.2f}",
            "floor ms": f"{floor:.2f}",
            "ratio": f"{wall / floor:.2f}",
        }


def tier_rows(num_shared: int, given: dict[str, Any]) -> list[dict[str, object]]:
    """Return the rows of pages that come back, by an engine whose pool holds one prompt.

    Args:
        num_shared: In tokens.
        given: What the deployment is given beside.
    """
    num_pages = -(-(num_shared + 256) // given["page_size"]) + 1
    nbytes = num_pages * given["page_size"] * KV_BYTES // given["tensor_parallel_size"]
    bench = Bench(
        LLAMA_8B,
        Deployment(
            **given,
            num_pages=num_pages,
            max_num_seqs=4,
            max_model_len=num_shared + 256,
            host_cache_bytes=TIER_PROMPTS * nbytes,
        ),
    )
    rows = bench.tiers(num_shared)
    bench.core.close()
    del bench
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def tables_beside(
    asked: argparse.Namespace, given: dict[str, Any]
) -> Iterator[list[dict[str, object]]]:
    """Give the tables that need engines of their own, or none.

    Args:
        asked: The command line.
        given: As for ``tier_rows``.
    """
    if asked.sampling:
        yield gpu_sampling.rows(asked.sampling)
    if asked.composite:
        yield from gpu_composite.tables(asked.composite, ceilings()[0])
    for num_requests in asked.transformers:
        peer = gpu_offline.case(num_requests, LLAMA_8B["vocab_size"])
        yield [gpu_offline.transformers_row(LLAMA_8B, peer)]
    for num_shared in asked.tiers:
        yield tier_rows(num_shared, given)


def main() -> None:
    """Print the tables."""
    suited = Deployment(device="cuda")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention-backend")
    parser.add_argument("--page-size", type=int, default=suited.page_size)
    parser.add_argument("--max-num-batched-tokens", type=int, default=suited.max_num_batched_tokens)
    parser.add_argument("--kv-cache-gib", type=int, help="default: what is left of the memory")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--no-cuda-graphs", dest="cuda_graphs", action="store_false")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048, 8192])
    parser.add_argument("--reuse", type=int, nargs="*", default=[8192])
    parser.add_argument("--tiers", type=int, nargs="*", default=[], help="shared tokens")
    parser.add_argument("--overhead", type=int, nargs="*", default=[64])
    parser.add_argument("--offline", type=int, nargs="*", default=[256], help="requests")
    parser.add_argument("--transformers", type=int, nargs="*", default=[], help="requests")
    parser.add_argument("--sampling", type=int, nargs="*", default=[], help="rows")
    parser.add_argument("--composite", type=int, nargs="*", default=[], help="requests")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs a CUDA device")
    given = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_num_batched_tokens": asked.max_num_batched_tokens,
        "page_size": asked.page_size,
        "attention_backend": asked.attention_backend,
        "cuda_graphs": asked.cuda_graphs,
        "tensor_parallel_size": asked.tensor_parallel_size,
    }
    for rows in tables_beside(asked, given):
        print(table(rows), flush=True)
    if not (asked.decode or asked.prefill or asked.reuse or asked.overhead or asked.offline):
        return
    bench = Bench(
        LLAMA_8B,
        Deployment(
            **given,
            max_num_seqs=max(*asked.decode, *asked.overhead, *asked.offline, 1),
            max_model_len=max(*asked.prefill, *asked.reuse, asked.context + 256, 2560) + 256,
            kv_cache_bytes=asked.kv_cache_gib and asked.kv_cache_gib << 30,
        ),
    )
    rows = [bench.decode(batch, asked.context) for batch in asked.decode]
    rows += [bench.prefill(num_tokens) for num_tokens in asked.prefill]
    for num_tokens in asked.reuse:
        rows += bench.reuse(num_tokens)
    if rows:
        print(table(rows), flush=True)
    if asked.overhead:
        print(table([bench.overhead(batch, asked.context) for batch in asked.overhead]), flush=True)
    if asked.offline:
        print(table([bench.offline(num_requests) for num_requests in asked.offline]), flush=True)
    bench.core.close()


if __name__ == "__main__":
    main()
