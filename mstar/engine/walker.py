"""Takes requests on: what a step gave them, and where each goes next."""

import logging
from collections import Counter
from dataclasses import replace

from mstar.engine.admission import check_keys, check_layout, max_len
from mstar.engine.array import to_numpy
from mstar.engine.batch import Batch, NodeOutput
from mstar.engine.model import Leg, Model
from mstar.engine.output import Emitted, ErrorInfo, FinishReason, RequestOutput
from mstar.engine.request import Component, PreparedRequest, Request, RequestStatus
from mstar.engine.resources.base import Deployment
from mstar.engine.runner import Runner
from mstar.engine.scheduler import Scheduler
from mstar.errors import CapacityError, RequestError

logger = logging.getLogger(__name__)


class Walker:
    """The requests of an engine on their walks.

    Args:
        model: Says where a request goes.
        deployment: The engine's numbers, with nothing left open.
        runner: Asked whether a leg can be served at all.
        scheduler: Told when a request ends, begins a leg or waits for another node.
        is_reuse_open: Requests may share what they compute.
    """

    def __init__(
        self,
        model: Model,
        deployment: Deployment,
        runner: Runner,
        scheduler: Scheduler,
        is_reuse_open: bool,
    ) -> None:
        self._model = model
        self._deployment = deployment
        self._runner = runner
        self._scheduler = scheduler
        self._is_reuse_open = is_reuse_open
        self._streaming = {edge.name for edge in model.graph.edges if edge.chunks is not None}
        """Names of edges whose pieces are for nodes, and not for the user."""
        self.requests: dict[str, Request] = {}
        """Those that have not ended, by id."""
        self.tokens: Counter[str] = Counter()
        """Token counters of ``EngineStats``, by name."""

    def measure(self, prepared: PreparedRequest, walk: str) -> tuple[Component, int]:
        """Return what a leg is for, and the slots it may fill.

        Args:
            prepared: The leg.
            walk: What it begins with.

        Raises:
            RequestError: If it does not keep the engine's limits.
        """
        component = self._model.component_of(walk)
        length = max_len(prepared, component, self._deployment.max_model_len)
        check_keys(prepared, self._deployment.page_size)
        check_layout(prepared, self._model, self._deployment.max_num_batched_tokens)
        return component, length

    def record(self, batch: Batch, result: NodeOutput) -> list[RequestOutput]:
        """Take note of what a step gave; returns what users are told."""
        if batch.chunks is not None:
            return self._record_visits(batch, result)
        requests, node = batch.requests, batch.node
        for request, (_, _, span) in zip(requests, batch.segments, strict=True):
            request.num_computed_tokens += span
        outputs: list[RequestOutput] = []
        append, failures, all_logprobs = outputs.append, result.failures, result.logprobs
        is_telling, holds = node in self._model.telling, self._model.holds
        is_plain = not (is_telling or result.emitted or self._streaming)
        for place, (index, token) in enumerate(zip(batch.yielding, result.token_ids, strict=True)):
            request = requests[index]
            if failures and place in failures:
                self._runner.disown(request)
                outputs.append(self.fail(request, "invalid_logits", failures[place]))
                continue
            component = request.component
            request.finish_reason = ended = request.append(token)
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
                    has_stop_token=ended == "stop" and not component.is_silent,
                    logprobs=own if own is None else [own],
                    finish_reason=reason,
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_cached_tokens=request.num_cached_tokens,
                    emitted=emitted,
                    error=error,
                )
            )
        self.tokens["generation_tokens"] += len(batch.yielding) - len(failures)
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
                emitted += self._model.emit(request, node, token)
            if emitted and self._streaming:
                self._hand_on(request, emitted)
            is_over = cursor.is_done or cursor.complete(node, self._model.holds, request)
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
        self.end(request)
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
        following = self._model.next_walk(request)
        if isinstance(following, Leg):
            emitted += following.emitted
            return self._begin(request, following)
        if following is not None:
            request.cursor = following
            self._scheduler.wake()
            return None, None
        request.finish_reason = request.finish_reason or "stop"
        self.end(request)
        return request.finish_reason, None

    def _begin(self, request: Request, leg: Leg) -> tuple[FinishReason | None, ErrorInfo | None]:
        """Queue a request for its next leg.

        Raises:
            RequestError: If the leg cannot be served.
        """
        component, length = self.measure(leg.prepared, leg.walk)
        if leg.params is not None:
            component = replace(component, params=leg.params)
        self._scheduler.requeue(request)
        request.begin(leg.prepared, self._model.graph.cursor(leg.walk), component, length)
        refusal = self._runner.ever_fits(request)
        if refusal is not None:
            raise CapacityError(f"{refusal.reason}; {refusal.remedy}", param=refusal.param)
        return None, None

    def _count_prompt(self, request: Request) -> None:
        request.was_counted = True
        tokens, cached = self.tokens, request.num_cached_tokens
        tokens["prompt_tokens"] += request.num_prompt_tokens
        tokens["cached_tokens"] += cached
        if request.prepared.root is not None and self._is_reuse_open:
            tokens["prefix_queries"] += request.num_prompt_tokens
            tokens["prefix_hits"] += cached
            for medium, count in request.sources.items():
                tokens[f"prefix_hits_{medium}"] += count

    def fail(self, request: Request, code: str, message: str) -> RequestOutput:
        """End a request with an error."""
        reason: FinishReason = "error"
        request.finish_reason = reason
        self.end(request)
        return RequestOutput(
            request_id=request.request_id,
            token_ids=[],
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            error=ErrorInfo(message, code),
        )

    def end(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        self.requests.pop(request.request_id, None)
        if request.status is not RequestStatus.FINISHED:
            self._scheduler.remove(request)
        self._model.forget(request.request_id)
