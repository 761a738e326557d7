"""The loop: takes requests, runs steps, yields outputs; the one place that catches everything."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from mstar.engine import memory
from mstar.engine.batch import Batch
from mstar.engine.graph_checks import check_graph
from mstar.engine.model import Model
from mstar.engine.output import (
    RESOURCE_COUNTERS,
    TOKEN_COUNTERS,
    EngineStats,
    RequestOutput,
)
from mstar.engine.request import PreparedRequest, Request
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.mirror import current
from mstar.engine.root import root_constants
from mstar.engine.runner import Runner
from mstar.engine.scheduler import Scheduler
from mstar.engine.walker import Walker
from mstar.errors import CapacityError, ConfigError, RequestError

logger = logging.getLogger(__name__)


class EngineCore:
    """One model on one device, serving many requests at once.

    Single-threaded: one thread calls all methods.

    Args:
        model: What to serve.
        deployment: The engine's numbers; ``self.deployment`` has them with nothing left open.

    Raises:
        ConfigError: If the numbers do not fit together.
        UnsupportedError: If no backend can do what the model needs.
    """

    _is_rank: ClassVar[bool] = False
    """Whether the model is one of several parts of it."""

    def __init__(self, model: Model, deployment: Deployment | None = None) -> None:
        deployment = deployment or Deployment()
        deployment.check()
        if deployment.tensor_parallel_size > 1 and not self._is_rank:
            raise ConfigError(
                f"tensor_parallel_size is {deployment.tensor_parallel_size} and {model.name} is "
                "loaded whole; mstar.catalog.open_engine deals a model out over ranks"
            )
        check_graph(model.graph, model.encoders)
        self.model = model
        wanted = deployment.max_model_len or model.max_model_len
        if wanted > model.max_model_len:
            logger.warning(
                "max_model_len is %d tokens and %s was made for %d: what it says behind them may "
                "make no sense",
                wanted,
                model.name,
                model.max_model_len,
            )
        if memory.is_open(deployment):
            deployment = memory.fit(deployment, model, partial(EngineCore, model))
        else:
            num_pages = memory.count_pages(deployment, model.specs)
            deployment = replace(deployment, num_pages=num_pages)
        self._runner = Runner(
            model.nodes,
            model.specs,
            replace(deployment, max_model_len=wanted),
            model.encoders,
        )
        bounds = [r.capacity for r in self._runner.resources.values() if r.capacity is not None]
        capacity = min(bounds, default=wanted)
        if deployment.max_model_len > capacity:
            raise ConfigError(
                f"max_model_len is {deployment.max_model_len} tokens and the KV pool holds "
                f"{capacity}; give it more memory or lower max_model_len"
            )
        self.deployment = replace(
            deployment,
            max_model_len=min(wanted, capacity),
            num_pages=capacity // deployment.page_size,
        )
        self._device = torch.device(deployment.device)
        if deployment.cuda_graphs and self._device.type == "cuda":
            with current(self._device):
                self._runner.record()
        self.named_root = named = root_constants(model.root_constants, model.specs, self.deployment)
        self.root = named.root
        self.root_constants = {} if named.missing else dict(named.constants)
        if named.missing and model.specs and deployment.enable_prefix_caching:
            logger.warning("nothing will be reused: %s", "; ".join(named.missing))
        self._scheduler = Scheduler(
            self._runner,
            max_num_seqs=deployment.max_num_seqs,
            max_num_batched_tokens=deployment.max_num_batched_tokens,
            kinds=self._runner.kinds(),
            has_one_node=len(model.nodes) == 1,
        )
        self._walker = Walker(
            model, self.deployment, self._runner, self._scheduler, self.root is not None
        )
        self._num_arrived = 0
        self._num_steps = 0
        self._runner.connect(self.root)

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._walker.requests)

    @property
    def rank_pids(self) -> Sequence[int]:
        """Processes of the other ranks that share the model, if there are any."""
        return ()

    def add_request(self, prepared: PreparedRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: If its id is in use, it has no tokens, or an id outside the vocabulary.
            ContextLengthError: If prompt and output exceed ``max_model_len``.
            CapacityError: If it could not be served even if it were alone.
        """
        if prepared.request_id in self._walker.requests:
            raise RequestError(
                f"request id {prepared.request_id!r} is in use; choose another", param="request_id"
            )
        request = self._request(prepared)
        refusal = self._runner.ever_fits(request)
        if refusal is not None:
            raise CapacityError(f"{refusal.reason}; {refusal.remedy}", param=refusal.param)
        self._num_arrived += 1
        self._walker.requests[request.request_id] = request
        self._scheduler.add(request)

    def _request(self, prepared: PreparedRequest) -> Request:
        """Return the record of a request that keeps the engine's limits."""
        cursor = self.model.first_walk(prepared)
        component, length = self._walker.measure(prepared, cursor.name)
        arrival = self._num_arrived
        return Request(prepared, cursor, component, max_len=length, arrival=arrival)

    def abort(self, request_id: str) -> bool:
        """End a request without an output; returns whether there was one."""
        request = self._walker.requests.get(request_id)
        if request is None:
            return False
        with current(self._device):
            self._walker.end(request)
        return True

    def step(self) -> list[RequestOutput]:
        """Run one batch and return what it gave; empty when there was nothing to do."""
        with current(self._device):
            return self._step()

    def _step(self) -> list[RequestOutput]:
        runner, scheduler = self._runner, self._scheduler
        batch, rejected = scheduler.schedule(runner.launched)
        outputs = [
            self._walker.fail(request, "kv_capacity_exceeded", refusal.reason)
            for request, refusal in rejected
        ]
        if batch is None:
            return outputs
        self._num_steps += 1
        outputs += self._run(batch, runner.overlaps and scheduler.goes_on())
        return outputs

    def _run(self, batch: Batch, goes_on: bool = False) -> list[RequestOutput]:
        try:
            result = self._runner.run(batch, goes_on)
        except Exception as error:
            self._on_failure(error)
            if len(batch.requests) == 1:
                request = batch.requests[0]
                logger.exception("request %s failed", request.request_id)
                return [
                    self._walker.fail(request, "internal_error", f"{type(error).__name__}: {error}")
                ]
            # Whose fault it was shows when each runs by itself.
            logger.warning("a batch of %d failed and runs one by one", len(batch.requests))
            return [
                output
                for index in range(len(batch.requests))
                for output in self._run(batch.alone(index))
            ]
        return self._walker.record(batch, result)

    def _on_failure(self, error: Exception) -> None:
        """Be told of a step that failed, before its requests run one by one."""

    def reset_prefix_cache(self) -> int:
        """Forget everything kept for reuse, in every tier; returns how many entries went.

        Raises:
            StorageError: If a tier could not be emptied; all else is forgotten.
        """
        with current(self._device):
            return self._runner.reset()

    def explain(self, prepared: PreparedRequest) -> dict[str, Any]:
        """Return how much of a request could be reused now, and what stops it; runs nothing.

        By the key of each resource that can say so; the KV cache gives a ``ReuseReport``.

        Raises:
            RequestError: As ``add_request`` does, or if the prompt is not known before something
                else has run.
        """
        request = self._request(prepared)
        if request.component.is_silent:
            raise RequestError(
                "the prompt is known once the recordings in it were heard: ask by the id of the "
                "answer, once there is one",
                param="messages",
            )
        return self._runner.explain(request)

    def explain_request(self, request_id: str) -> dict[str, Any] | None:
        """Return the same of a request that started lately, as it was found then.

        ``None``: it has not started, or others have long since.
        """
        return self._runner.explain_started(request_id)

    def take_events(self) -> list[Any]:
        """Return what changed in what can be reused since the last call."""
        return [event for r in self._runner.resources.values() for event in r.take_events()]

    def close(self, timeout: float = 30.0) -> None:
        """Put away what is to outlive the engine, in ``timeout`` seconds at most."""
        for request_id in list(self._walker.requests):
            self.abort(request_id)
        with current(self._device):
            self._runner.disconnect(timeout)

    def stats(self) -> EngineStats:
        """Return gauges and counters."""
        resources = self._runner.resources.values()
        usages = [usage for r in resources if (usage := r.usage()) is not None]
        num_pages, num_used, num_cached = (sum(usage[i] for usage in usages) for i in range(3))
        counted = sum((Counter(r.counters()) for r in resources), Counter())
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_pages=num_pages,
            num_pages_used=num_used,
            num_pages_cached=num_cached,
            num_steps=self._num_steps,
            num_preemptions=self._scheduler.num_preemptions,
            **{name: self._walker.tokens[name] for name in TOKEN_COUNTERS},
            **{name: counted[name] for name in RESOURCE_COUNTERS},
        )

    def check(self) -> None:
        """Verify the invariants of the scheduler and every resource."""
        self._scheduler.check()
        self._runner.check()
        alive = self._scheduler.num_running + self._scheduler.num_waiting
        assert alive == len(self._walker.requests), (alive, len(self._walker.requests))
