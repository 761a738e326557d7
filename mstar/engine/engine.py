"""The loop: takes requests, runs steps, yields outputs; the one place that catches everything."""

import logging
from dataclasses import replace

from mstar.engine.batch import Batch, NodeOutput
from mstar.engine.model import Model
from mstar.engine.output import EngineStats, ErrorInfo, FinishReason, RequestOutput
from mstar.engine.request import PreparedRequest, Request, RequestStatus
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.keys import fingerprint
from mstar.engine.runner import Runner
from mstar.engine.scheduler import Scheduler
from mstar.errors import CapacityError, ConfigError, ContextLengthError, RequestError

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
        self._runner = Runner(
            model.nodes, model.specs, replace(deployment, max_model_len=wanted), model.sampler_key
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
        self.root_constants = self._constants()
        self.root = (
            fingerprint(*(part for item in self.root_constants.items() for part in item))
            if self.root_constants
            else None
        )
        self._scheduler = Scheduler(
            self._runner,
            max_num_seqs=deployment.max_num_seqs,
            max_num_batched_tokens=deployment.max_num_batched_tokens,
            has_one_node=len(model.nodes) == 1,
        )
        self._requests: dict[str, Request] = {}
        self._last_batch: Batch | None = None
        self._num_arrived = 0
        self._num_steps = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generation_tokens = 0
        self._prefix_queries = 0
        self._prefix_hits = 0

    def _constants(self) -> dict[str, str]:
        """Return all that the KV depends on, by name; empty where something is unknown."""
        if self.model.root_constants is None or not self.deployment.enable_prefix_caching:
            return {}
        constants = {"recipe": "mstar-root-v1", **self.model.root_constants}
        constants["dtype"] = self.deployment.dtype
        constants["page_size"] = str(self.deployment.page_size)
        for spec in self.model.specs:
            constants[f"resource.{spec.resource_key}"] = repr(spec.config)
        return constants

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
        request = Request(
            prepared,
            self.model.first_walk(prepared.request_id),
            max_len=self._max_len(prepared),
            stop_token_ids=frozenset(prepared.params.stop_token_ids)
            | (frozenset() if prepared.params.ignore_eos else self.model.stop_token_ids),
            arrival=self._num_arrived,
        )
        refusal = self._runner.ever_fits(request)
        if refusal is not None:
            raise CapacityError(
                f"{refusal.reason}; shorten the prompt or lower max_tokens", param="max_tokens"
            )
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._scheduler.add(request)

    def _max_len(self, prepared: PreparedRequest) -> int:
        ids, limit = prepared.token_ids, self.deployment.max_model_len
        if not ids:
            raise RequestError("the prompt has no tokens; give it at least one", param="prompt")
        if min(ids) < 0 or max(ids) >= self.model.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.model.vocab_size)
            raise RequestError(
                f"token id {wrong} is outside the vocabulary of {self.model.vocab_size}",
                param="prompt",
            )
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(prepared.params, name):
                if token >= self.model.vocab_size:
                    raise RequestError(
                        f"{name} names token id {token}, outside the vocabulary of "
                        f"{self.model.vocab_size}",
                        param=name,
                    )
        max_tokens = prepared.params.max_tokens
        if len(ids) >= limit:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens and the context holds {limit}, of which at "
                "least one must stay for the answer; shorten the prompt",
                param="prompt",
            )
        if max_tokens is not None and len(ids) + max_tokens > limit:
            raise ContextLengthError(
                f"{len(ids)} prompt tokens and max_tokens={max_tokens} exceed the context of "
                f"{limit} tokens; lower max_tokens to {limit - len(ids)} or shorten the prompt",
                param="max_tokens",
            )
        return limit if max_tokens is None else len(ids) + max_tokens

    def abort(self, request_id: str) -> bool:
        """End a request without an output; returns whether there was one."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._scheduler.remove(request)
        return True

    def step(self) -> list[RequestOutput]:
        """Run one batch and return what it gave; empty when there was nothing to do."""
        batch, rejected = self._scheduler.schedule()
        outputs = [
            self._fail(request, "kv_capacity_exceeded", refusal.reason)
            for request, refusal in rejected
        ]
        if batch is None:
            return outputs
        self._num_steps += 1
        if batch is not self._last_batch:
            self._last_batch = batch
            for request in batch.requests:
                if not request.was_started:
                    self._count_start(request)
        outputs += self._run(batch)
        return outputs

    def _run(self, batch: Batch) -> list[RequestOutput]:
        try:
            result = self._runner.run(batch)
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
        requests, node, holds = batch.requests, batch.node, self.model.holds
        for request, (_, _, span) in zip(requests, batch.segments, strict=True):
            request.num_computed_tokens += span
        outputs: list[RequestOutput] = []
        append, failures, all_logprobs = outputs.append, result.failures, result.logprobs
        for place, (index, token) in enumerate(zip(batch.yielding, result.token_ids, strict=True)):
            request = requests[index]
            if failures and place in failures:
                outputs.append(self._fail(request, "invalid_logits", failures[place]))
                continue
            reason = request.finish_reason = request.append(token)
            if request.cursor.complete(node, holds, request):
                self._next_walk(request)
                reason = request.finish_reason
            own = None if all_logprobs is None else all_logprobs[place]
            append(
                RequestOutput(
                    request_id=request.request_id,
                    token_ids=[token],
                    logprobs=own if own is None else [own],
                    finish_reason=reason,
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_cached_tokens=request.num_cached_tokens,
                )
            )
        self._generation_tokens += len(outputs) - len(failures)
        return outputs

    def _next_walk(self, request: Request) -> None:
        """Send the request on its next walk; end it when there is none."""
        cursor = self.model.next_walk(request)
        if cursor is not None:
            request.cursor = cursor
            return
        request.finish_reason = request.finish_reason or "stop"
        self._end(request)

    def _count_start(self, request: Request) -> None:
        request.was_started = True
        request.num_cached_tokens = request.num_computed_tokens
        self._prompt_tokens += request.num_prompt_tokens
        self._cached_tokens += request.num_cached_tokens
        if request.prepared.root is not None and self.root is not None:
            self._prefix_queries += request.num_prompt_tokens
            self._prefix_hits += request.num_cached_tokens

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

    def reset_prefix_cache(self) -> int:
        """Forget everything kept for reuse; returns how many pages were."""
        return self._runner.reset()

    def stats(self) -> EngineStats:
        """Return gauges and counters."""
        usages = [r.usage() for r in self._runner.resources.values()]
        num_pages, num_used, num_cached = (
            sum(usage[i] for usage in usages if usage is not None) for i in range(3)
        )
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_pages=num_pages,
            num_pages_used=num_used,
            num_pages_cached=num_cached,
            num_steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generation_tokens=self._generation_tokens,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            num_preemptions=self._scheduler.num_preemptions,
        )

    def check(self) -> None:
        """Verify the invariants of the scheduler and every resource."""
        self._scheduler.check()
        self._runner.check()
        alive = self._scheduler.num_running + self._scheduler.num_waiting
        assert alive == len(self._requests), (alive, len(self._requests))
