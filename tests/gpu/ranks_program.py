"""Asks an engine of so many GPUs, as a program: what GPUs share, torch shares once a process.

``python -m tests.gpu.ranks_program FOLDER DTYPE SIZE CUDA_GRAPHS BUDGET`` reads prompts as JSON
from its input, asks each twice, and writes the log-probabilities of every answer.
"""

import json
import sys
from collections.abc import Sequence

from mstar.catalog import open_engine
from mstar.engine.engine import EngineCore
from mstar.engine.output import TokenLogprobs
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.keys import chain
from mstar.engine.resources.sampler.config import SamplingParams


def engine(
    folder: str,
    dtype: str,
    size: int,
    *,
    cuda_graphs: bool = True,
    budget: int = 48,
    device: str = "cuda",
) -> EngineCore:
    deployment = Deployment(
        device=device,
        tensor_parallel_size=size,
        num_pages=400,
        max_num_seqs=8,
        max_model_len=1024,
        max_num_batched_tokens=budget,
        cuda_graphs=cuda_graphs,
    )
    return open_engine(folder, deployment, dtype=dtype, load_format="dummy")


def run(
    core: EngineCore, asked: Sequence[list[int]], max_tokens: int = 10
) -> list[list[TokenLogprobs]]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=20, ignore_eos=True)
    size = core.deployment.page_size
    for place, ids in enumerate(asked):
        pages = [ids[i : i + size] for i in range(0, len(ids), size)]
        keys = [] if core.root is None else chain(pages, None, core.root)
        core.add_request(
            PreparedRequest(
                request_id=str(place),
                token_ids=ids,
                params=params,
                root=core.root,
                page_keys=keys,
            )
        )
    results: list[list[TokenLogprobs]] = [[] for _ in asked]
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            results[int(output.request_id)] += output.logprobs or []
    core.check()
    return results


def main() -> None:
    folder, dtype, size, cuda_graphs, budget = sys.argv[1:]
    with_graphs = cuda_graphs == "True"
    core = engine(folder, dtype, int(size), cuda_graphs=with_graphs, budget=int(budget))
    asked = json.load(sys.stdin)
    rounds = [run(core, asked), run(core, asked)]
    cached = core.stats().cached_tokens
    core.close()
    told = [[[(e.token_id, e.logprob) for e in own] for own in results] for results in rounds]
    json.dump({"rounds": told, "cached": cached}, sys.stdout)


if __name__ == "__main__":
    main()
