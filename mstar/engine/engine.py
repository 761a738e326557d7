"""The loop: takes requests, runs steps, yields outputs; the one place that catches everything."""

import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from mstar.engine import memory
from mstar.engine.admission import check_layout, max_len
from mstar.engine.array import to_numpy
from mstar.engine.batch import Batch, NodeOutput
from mstar.engine.graph_checks import check_graph
from mstar.engine.model import Leg, Model
from mstar.engine.output import (
    RESOURCE_COUNTERS,
    TOKEN_COUNTERS,
    Emitted,
    EngineStats,
    ErrorInfo,
    FinishReason,
    RequestOutput,
)
from mstar.engine.request import Component, PreparedRequest, Request, RequestStatus
from mstar.engine.resources.base import Deployment
from mstar.engine.root import root_constants
from mstar.engine.runner import Runner
from mstar.engine.scheduler import Scheduler
from mstar.errors import CapacityError, ConfigError, RequestError

logger = logging.getLogger(__name__)

# Tables have a row for each of ``max_num_seqs``, and token counts are 32-bit integers.
_MOST = {"max_num_seqs": 2**16, "max_num_batched_tokens": 2**31 - 1, "page_size": 2**31 - 1}


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

    def __init__(self, model: Model, deployment: Deployment | None = None) -> None:
        deployment = deployment or Deployment()
        for name, most in _MOST.items():
            if not 1 <= getattr(deployment, name) <= most:
                raise ConfigError(
                    f"{name} is {getattr(deployment, name)}; it must lie between 1 and {most}"
                )
        self.model = model
        wanted = deployment.max_model_len or model.max_model_len
        if memory.is_open(deployment):
            sized = replace(deployment, max_model_len=wanted)
            sized = memory.fit(sized, model.specs, partial(EngineCore, model))
            deployment = replace(deployment, num_pages=sized.num_pages)
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
        if deployment.cuda_graphs and deployment.device.startswith("cuda"):
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
        check_graph(model.graph, model.encoders)
        self._streaming = {edge.name for edge in model.graph.edges if edge.chunks is not None}
        """Names of edges whose pieces are for nodes, and not for the user."""
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._num_steps = 0
        self._tokens: Counter[str] = Counter()
        """Token counters of ``EngineStats``, by name."""
        self._runner.connect(self.root)

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._requests)

    def add_request(self, prepared: PreparedRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: If its id is in use, it has no tokens, or an id outside the vocabulary.
            ContextLengthError: If prompt and output exceed ``max_model_len``.
            CapacityError: If it could not be served even if it were alone.
        """
        if prepared.request_id in self._requests:
            raise RequestError(
                f"request id {prepared.request_id!r} is in use; choose another", param="request_id"
            )
        request = self._request(prepared)
        refusal = self._runner.ever_fits(request)
        if refusal is not None:
            raise CapacityError(
                f"{refusal.reason}; shorten the prompt or lower max_tokens", param="max_tokens"
            )
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._scheduler.add(request)

    def _request(self, prepared: PreparedRequest) -> Request:
        """Return the record of a request that keeps the engine's limits."""
        cursor = self.model.first_walk(prepared)
        component, length = self._measure(prepared, cursor.name)
        arrival = self._num_arrived
        return Request(prepared, cursor, component, max_len=length, arrival=arrival)

    def _measure(self, prepared: PreparedRequest, walk: str) -> tuple[Component, int]:
        """Return what a leg is for, and the slots it may fill, if it keeps the engine's limits."""
        component = self.model.component_of(walk)
        length = max_len(prepared, component, self.deployment.max_model_len)
        check_layout(prepared, self.model, self.deployment.max_num_batched_tokens)
        return component, length

    def abort(self, request_id: str) -> bool:
        """End a request without an output; returns whether there was one."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._scheduler.remove(request)
        self.model.forget(request_id)
        return True

    def step(self) -> list[RequestOutput]:
        """Run one batch and return what it gave; empty when there was nothing to do."""
        runner, scheduler = self._runner, self._scheduler
        batch, rejected = scheduler.schedule(runner.launched)
        outputs = [
            self._fail(request, "kv_capacity_exceeded", refusal.reason)
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
            if len(batch.requests) == 1:
                request = batch.requests[0]
                logger.exception("request %s failed", request.request_id)
                return [self._fail(request, "internal_error", f"{type(error).__name__}: {error}")]
            # Whose fault it was shows when each runs by itself.
            logger.warning("a batch of %d failed and runs one by one", len(batch.requests))
            return [
                output
                for index in range(len(batch.requests))
                for output in self._run(batch.alone(index))
            ]
        return self._record(batch, result)

    def _record(self, batch: Batch, result: NodeOutput) -> list[RequestOutput]:
        if batch.chunks is not None:
            return self._record_visits(batch, result)
        requests, node = batch.requests, batch.node
        for request, (_, _, span) in zip(requests, batch.segments, strict=True):
            request.num_computed_tokens += span
        outputs: list[RequestOutput] = []
        append, failures, all_logprobs = outputs.append, result.failures, result.logprobs
        is_telling, holds = node in self.model.telling, self.model.holds
        is_plain = not (is_telling or result.emitted or self._streaming)
        for place, (index, token) in enumerate(zip(batch.yielding, result.token_ids, strict=True)):
            request = requests[index]
            if failures and place in failures:
                outputs.append(self._fail(request, "invalid_logits", failures[place]))
                continue
            component = request.component
            request.finish_reason = request.append(token)
            emitted: list[Emitted] = []
            reason, error = None, None
            if not is_plain or request.cursor.complete(node, holds, request):
                emitted += result.emitted.get(index, ())
                own_token = token if is_telling else None
                reason, error = self._walk_on(request, node, emitted, own_token)
            if component.is_silent and not emitted and reason is None:
                continue
            own = None if all_logprobs is None else all_logprobs[place]
            append(
                RequestOutput(
                    request_id=request.request_id,
                    token_ids=[] if component.is_silent else [token],
                    logprobs=own if own is None else [own],
                    finish_reason=reason,
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_cached_tokens=request.num_cached_tokens,
                    emitted=emitted,
                    error=error,
                )
            )
        self._tokens["generation_tokens"] += len(batch.yielding) - len(failures)
        return outputs

    def _record_visits(self, batch: Batch, result: NodeOutput) -> list[RequestOutput]:
        outputs = []
        for index, request in enumerate(batch.requests):
            emitted = list(result.emitted.get(index, ()))
            reason, error = self._walk_on(request, batch.node, emitted)
            if emitted or reason is not None:
                outputs.append(
                    RequestOutput(
                        request_id=request.request_id,
                        token_ids=[],
                        finish_reason=reason,
                        num_prompt_tokens=request.num_prompt_tokens,
                        num_cached_tokens=request.num_cached_tokens,
                        emitted=emitted,
                        error=error,
                    )
                )
        return outputs

    def _walk_on(
        self, request: Request, node: str, emitted: list[Emitted], token: int | None = None
    ) -> tuple[FinishReason | None, ErrorInfo | None]:
        """Take note of a visit; returns why the request has ended, if it has.

        Args:
            request: Whose it was.
            node: Where.
            emitted: What it gave; what is for other nodes is taken out, what the model makes of
                the token and of a leg's end is added.
            token: For the model to make something of.
        """
        cursor = request.cursor
        try:
            if token is not None:
                emitted += self.model.emit(request, node, token)
            if emitted and self._streaming:
                self._hand_on(request, emitted)
            is_over = cursor.is_done or cursor.complete(node, self.model.holds, request)
            if cursor.inboxes and not is_over:
                # Chunks are due where an edge has closed, or a piece has made one whole.
                self._scheduler.wake()
            return self._next_walk(request, emitted) if is_over else (None, None)
        except RequestError as error:
            info = ErrorInfo(error.message, error.code, error.param)
        except Exception as error:
            logger.exception("request %s failed", request.request_id)
            info = ErrorInfo(f"{type(error).__name__}: {error}", "internal_error")
        request.finish_reason = "error"
        self._end(request)
        return "error", info

    def _hand_on(self, request: Request, emitted: list[Emitted]) -> None:
        """Take out what is for other nodes, and put it on their edges."""
        own = [piece for piece in emitted if piece.name in self._streaming]
        if not own:
            return
        emitted[:] = [piece for piece in emitted if piece.name not in self._streaming]
        for piece in own:
            inbox = request.cursor.inboxes.get(piece.name)
            if inbox is not None and piece.text is not None:
                inbox.put(piece.text)
            elif inbox is not None and piece.array is not None:
                inbox.put(to_numpy(piece.array))

    def _next_walk(
        self, request: Request, emitted: list[Emitted]
    ) -> tuple[FinishReason | None, ErrorInfo | None]:
        """Send the request on its next walk or leg; end it when there is none."""
        if not request.was_counted:
            self._count_prompt(request)
        following = self.model.next_walk(request)
        if isinstance(following, Leg):
            emitted += following.emitted
            return self._begin(request, following)
        if following is not None:
            request.cursor = following
            self._scheduler.wake()
            return None, None
        request.finish_reason = request.finish_reason or "stop"
        self._end(request)
        return request.finish_reason, None

    def _begin(self, request: Request, leg: Leg) -> tuple[FinishReason | None, ErrorInfo | None]:
        """Queue a request for its next leg.

        Raises:
            RequestError: If the leg cannot be served.
        """
        component, length = self._measure(leg.prepared, leg.walk)
        self._scheduler.requeue(request)
        request.begin(leg.prepared, self.model.graph.cursor(leg.walk), component, length)
        refusal = self._runner.ever_fits(request)
        if refusal is not None:
            raise CapacityError(refusal.reason)
        return None, None

    def _count_prompt(self, request: Request) -> None:
        request.was_counted = True
        tokens, cached = self._tokens, request.num_cached_tokens
        tokens["prompt_tokens"] += request.num_prompt_tokens
        tokens["cached_tokens"] += cached
        if request.prepared.root is not None and self.root is not None:
            tokens["prefix_queries"] += request.num_prompt_tokens
            tokens["prefix_hits"] += cached
            for medium, count in request.sources.items():
                tokens[f"prefix_hits_{medium}"] += count

    def _fail(self, request: Request, code: str, message: str) -> RequestOutput:
        reason: FinishReason = "error"
        request.finish_reason = reason
        self._end(request)
        return RequestOutput(
            request_id=request.request_id,
            token_ids=[],
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            error=ErrorInfo(message, code),
        )

    def _end(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        if request.status is not RequestStatus.FINISHED:
            self._scheduler.remove(request)
        self.model.forget(request.request_id)

    def reset_prefix_cache(self) -> int:
        """Forget everything kept for reuse, in every tier; returns how many entries went.

        Raises:
            StorageError: If a tier could not be emptied; all else is forgotten.
        """
        return self._runner.reset()

    def explain(self, prepared: PreparedRequest) -> dict[str, Any]:
        """Return how much of a request could be reused now, and what stops it; runs nothing.

        By the key of each resource that can say so; the KV cache gives a ``ReuseReport``.

        Raises:
            RequestError: As ``add_request`` does.
        """
        return self._runner.explain(self._request(prepared))

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
        for request_id in list(self._requests):
            self.abort(request_id)
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
            **{name: self._tokens[name] for name in TOKEN_COUNTERS},
            **{name: counted[name] for name in RESOURCE_COUNTERS},
        )

    def check(self) -> None:
        """Verify the invariants of the scheduler and every resource."""
        self._scheduler.check()
        self._runner.check()
        alive = self._scheduler.num_running + self._scheduler.num_waiting
        assert alive == len(self._requests), (alive, len(self._requests))
