"""What a step costs beside the model: scheduler, runner, the four resources, and the record.

Steady decode with prefix reuse on; the node returns the same token at once. Requests differ in
length, so that each step a sixteenth of them fills a page, which is keyed, and takes another.
"""

import time
from collections.abc import Mapping
from typing import Any

from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.engine import EngineCore
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.step import NodeStep
from mstar.models.toy import toy_model

NUM_REQUESTS = (1, 64, 512)
PAGE_SIZE = 16
STEPS = 10 * PAGE_SIZE
ROUNDS = 5


class FreeNode(Node):
    """Asks for what ``node`` asks for, and computes nothing.

    Args:
        node: The node it stands for.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def declare(self, batch: Batch) -> NodeStep:
        return self._node.declare(batch)

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        batch.token_ids()
        return NodeOutput(token_ids=[7] * len(batch.yielding))


def decoding_engine(num_requests: int, num_steps: int) -> EngineCore:
    """Return an engine in which ``num_requests`` decode, for ``num_steps`` more at least."""
    max_len = 2 * PAGE_SIZE + num_steps
    model = toy_model(max_position_embeddings=max_len)
    model.nodes = {name: FreeNode(node) for name, node in model.nodes.items()}
    engine = EngineCore(
        model,
        Deployment(
            max_num_seqs=num_requests,
            max_num_batched_tokens=4 * PAGE_SIZE * num_requests,
            page_size=PAGE_SIZE,
            num_pages=(num_requests + 1) * (max_len // PAGE_SIZE + 1),
        ),
    )
    for number in range(num_requests):
        ids = [2 + number % 100, 2 + number // 100] + [3] * (number % PAGE_SIZE)
        engine.add_request(
            PreparedRequest(
                request_id=f"request-{number}",
                token_ids=ids,
                params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_steps),
                root=engine.root,
            )
        )
    for _ in range(PAGE_SIZE):
        engine.step()
    assert engine.stats().num_running == num_requests
    return engine


def run(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return a row a number of requests: the best round's microseconds a step."""
    rows: list[dict[str, Any]] = []
    best: dict[int, float] = {}
    for num_requests in NUM_REQUESTS:
        engine = decoding_engine(num_requests, PAGE_SIZE + rounds * STEPS + 1)
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            for _ in range(STEPS):
                engine.step()
            times.append((time.perf_counter() - begin) / STEPS)
        engine.check()
        best[num_requests] = min(times) * 1e6
        rows.append(
            {
                "running requests": num_requests,
                "a step (µs)": round(best[num_requests], 1),
                "a request (µs)": round(best[num_requests] / num_requests, 2),
            }
        )
    rows.append({"running requests": "512 / 64", "a step (µs)": round(best[512] / best[64], 2)})
    return rows
