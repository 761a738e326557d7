"""The worker that runs cases on mstar; see ``peers``."""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from mstar.engine.engine import EngineCore
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.keys import chain, fingerprint
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.models import load_model

PAGE_SIZE = 16


def _prepare(core: EngineCore, name: str, ids: list[int], max_tokens: int) -> PreparedRequest:
    root = fingerprint("bench", core.root)
    pages = [ids[i : i + PAGE_SIZE] for i in range(0, len(ids), PAGE_SIZE)]
    return PreparedRequest(
        request_id=name,
        token_ids=ids,
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        page_keys=chain(pages, root=root),
        root=root,
    )


def main() -> None:
    """Answer cases until the input ends."""
    start = time.perf_counter()
    torch.set_num_threads(int(sys.argv[3]))
    model, dtype = load_model(sys.argv[1], dtype=sys.argv[2])
    core = EngineCore(model, Deployment(dtype=dtype, page_size=PAGE_SIZE, kv_cache_bytes=2 << 30))
    print(json.dumps({"load_seconds": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        start = time.perf_counter()
        for number, (ids, limit) in enumerate(
            zip(case["prompts"], case["max_tokens"], strict=True)
        ):
            core.add_request(_prepare(core, str(number), ids, limit))
        tokens: dict[str, list[int]] = {}
        while core.has_work:
            for output in core.step():
                assert output.error is None, output.error
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        seconds = time.perf_counter() - start
        answer: dict[str, object] = {"seconds": seconds, "tokens": sum(map(len, tokens.values()))}
        if case.get("want_ids"):
            answer["ids"] = [tokens[str(i)] for i in range(len(tokens))]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
