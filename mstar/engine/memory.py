"""How many KV pages there are; on a GPU, what has room beside weights and the largest steps."""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from mstar.engine.output import RequestOutput
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import DEFAULT_KV_CACHE_BYTES, Deployment
from mstar.engine.resources.kv.config import KVSpec
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.errors import ConfigError, MstarError

logger = logging.getLogger(__name__)

_MAX_PAGES = 1 << 20
"""Of a small model a GPU holds more than is worth the bookkeeping."""
_LARGEST = SamplingParams(
    max_tokens=1, top_p=0.9, top_k=1000, presence_penalty=1.0, seed=0, logprobs=20
)
"""Needs all of sampling's memory."""


class Engine(Protocol):
    """What runs the trial."""

    deployment: Deployment

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""

    def add_request(self, prepared: PreparedRequest) -> None:
        """Queue a request."""

    def step(self) -> Sequence[RequestOutput]:
        """Run one batch."""


class Tried(Protocol):
    """What of a model the trial needs."""

    @property
    def specs(self) -> Sequence[NodeResourceSpec]:
        """The resources it declares."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output that it was made for."""

    def trial(self, request_id: str, num_tokens: int, params: SamplingParams) -> PreparedRequest:
        """Return a request of so many tokens; see ``Model.trial``."""


def is_open(deployment: Deployment) -> bool:
    """Tell whether the KV pages of a deployment are to be fitted to its GPU."""
    return deployment.device.startswith("cuda") and not _is_given(deployment)


def _is_given(deployment: Deployment) -> bool:
    return deployment.num_pages is not None or deployment.kv_cache_bytes is not None


def count_pages(deployment: Deployment, specs: Sequence[NodeResourceSpec]) -> int | None:
    """Return how many KV pages each cache gets by the numbers alone; ``None`` without a cache.

    Where memory is given, all caches together take it, and each has as many pages.

    Args:
        deployment: Not open.
        specs: What the model declares.

    Raises:
        ConfigError: If there is not memory for a page.
    """
    page_nbytes = _page_nbytes(deployment, specs)
    if not page_nbytes:
        return None
    num_pages, nbytes = deployment.num_pages, deployment.kv_cache_bytes
    if num_pages is None:
        num_pages = (DEFAULT_KV_CACHE_BYTES if nbytes is None else nbytes) // page_nbytes
    if num_pages < 1:
        raise ConfigError(
            f"the KV cache would hold {num_pages} pages of {deployment.page_size} tokens, each of "
            f"{page_nbytes} bytes; give it more memory or pages, or take a smaller page_size"
        )
    return num_pages


def _page_nbytes(deployment: Deployment, specs: Sequence[NodeResourceSpec]) -> int:
    """Return the bytes of a page in every cache together."""
    itemsize = getattr(torch, deployment.dtype).itemsize
    return sum(
        spec.config.page_nbytes(deployment.page_size, itemsize)
        for spec in specs
        if isinstance(spec, KVSpec)
    )


def fit(
    deployment: Deployment,
    model: Tried,
    start: Callable[[Deployment], Engine],
    measure: Callable[[], tuple[int, int]] | None = None,
) -> Deployment:
    """Return the deployment with as many KV pages as its GPU has room for.

    An engine with just enough pages is started for a trial, runs the largest steps, and is taken
    down again. What the device has in use then, the trial's pages left out, is kept free for them.
    Where pages or their memory are given, the trial tells whether such steps have room beside them.
    What steps need to have compiled is there behind it.

    Args:
        deployment: Its CUDA device has the model's weights already.
        model: Says what a trial is.
        start: Starts an engine that serves the model.
        measure: Returns free and all memory of the device, in bytes.

    Raises:
        ConfigError: If the share of memory is no share, or leaves no room for pages, or the other
            numbers for a trial; if what is given has no room beside the largest steps.
    """
    share = deployment.gpu_memory_utilization
    deployment.check()
    page_nbytes = _page_nbytes(deployment, model.specs)
    if not page_nbytes:
        return deployment
    device = torch.device(deployment.device)
    if measure is None:
        measure = _cuda_memory(device)
    given = count_pages(deployment, model.specs) if _is_given(deployment) else None
    in_use, total = _try_out(deployment, page_nbytes, given, model, start, measure)
    if given is not None:
        taken = (given + 1) * page_nbytes
        if in_use + taken > total:
            raise ConfigError(
                f"{device} has {_gb(total)}; {given} KV pages take {_gb(taken)} of them, and "
                f"weights, libraries and the largest step {_gb(in_use)}; give the KV cache less "
                "(--kv-cache-memory, --num-pages), or lower max_num_batched_tokens or max_num_seqs"
            )
        return replace(deployment, num_pages=given)
    num_pages = (int(total * share) - in_use) // page_nbytes - 1
    if num_pages < 1:
        raise ConfigError(
            f"{device} has {_gb(total)}, of which {share:.0%} may be used; weights, libraries and "
            f"the largest step take {_gb(in_use)}, and a KV page {_gb(page_nbytes)}: there is no "
            "room for pages; raise gpu_memory_utilization, lower max_num_batched_tokens or "
            "max_num_seqs, or take a smaller model"
        )
    num_pages = min(num_pages, _MAX_PAGES)
    logger.info(
        "%s of %s are in use beside the KV cache, which gets %s: %d pages of %d tokens",
        _gb(in_use),
        _gb(total),
        _gb(num_pages * page_nbytes),
        num_pages,
        deployment.page_size,
    )
    return replace(deployment, num_pages=num_pages)


def _try_out(
    deployment: Deployment,
    page_nbytes: int,
    most: int | None,
    model: Tried,
    start: Callable[[Deployment], Engine],
    measure: Callable[[], tuple[int, int]],
) -> tuple[int, int]:
    """Return what is in use beside KV pages after the largest steps, and the total, in bytes.

    The trial has ``most`` pages at most.
    """
    budget = deployment.max_num_batched_tokens
    # Each prompt ends on a page of its own, and its answer may need one more.
    num_pages = budget // deployment.page_size + 2 * deployment.max_num_seqs
    num_pages = num_pages if most is None else min(num_pages, most)
    wanted = deployment.max_model_len or model.max_model_len
    longest = min(wanted, num_pages * deployment.page_size)
    engine = start(
        replace(
            deployment,
            num_pages=num_pages,
            max_model_len=longest,
            cuda_graphs=False,
            # A trial leaves nothing in places that outlive it.
            host_cache_bytes=0,
            disk_cache_bytes=0,
        )
    )
    num_seqs = min(deployment.max_num_seqs, budget)
    for length in (longest - 1, max(min(budget // num_seqs, longest - 1), 1)):
        count = max(min(budget // length, num_seqs), 1)
        for place in range(count):
            try:
                engine.add_request(model.trial(f"{length}.{place}", length, _LARGEST))
            except MstarError as error:
                raise ConfigError(
                    f"the model cannot be tried out with max_model_len {wanted} "
                    f"and max_num_batched_tokens {budget}: {error}; raise them"
                ) from error
        while engine.has_work:
            failures = [output.error for output in engine.step() if output.error is not None]
            if failures:
                raise ConfigError(
                    f"the largest step does not run on {deployment.device} "
                    f"({failures[0].message:.300}); if memory is short, lower "
                    "max_num_batched_tokens or max_num_seqs"
                )
    free, total = measure()
    del engine
    if deployment.device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()
    return total - free - (num_pages + 1) * page_nbytes, total


def _cuda_memory(device: torch.device) -> Callable[[], tuple[int, int]]:
    """Return what measures, with nothing cached that loading the weights left behind."""
    torch.cuda.empty_cache()

    def measure() -> tuple[int, int]:
        torch.cuda.synchronize(device)
        return torch.cuda.mem_get_info(device)

    return measure


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
