"""Runs a batch on its node: admit, plan, forward, commit, over whatever resources there are."""

import time
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from mstar.engine.batch import Batch, Node, NodeKind, NodeOutput
from mstar.engine.capture import RecordableNode, Recorder, decode_sizes
from mstar.engine.overlap import Flight
from mstar.engine.pieces import piece_sizes
from mstar.engine.request import Request, context_root
from mstar.engine.resources.base import Deployment, Item, Opening, OutputStore, Refusal, Resource
from mstar.engine.resources.mirror import Fence
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import NodeStep, ResourceStep, Segment
from mstar.errors import ConfigError, StorageError

_MAX_ENDED = 32
"""Requests that have ended and are still explained."""


class _Part(NamedTuple):
    """What a step asks of one resource."""

    key: str
    resource: Resource
    segments: tuple[Segment, ...]
    step: ResourceStep


class _Start(NamedTuple):
    """A request as it was when it started, or could now."""

    opening: Opening
    resources: Sequence[Resource]
    """Those that know its streams."""
    found: Mapping[str, int] | None = None
    """Tokens that others had computed, by where they were."""
    when: float | None = None


class Runner:
    """The nodes of a model and the resources they need.

    Args:
        nodes: The model's components, by name.
        specs: The resources they declare; a spec stands behind those it depends on.
        deployment: The numbers that resources are built with.
        encoders: The node that encodes items of each kind.

    Raises:
        ConfigError: If a spec names a node that is not there, or a resource twice.
    """

    def __init__(
        self,
        nodes: Mapping[str, Node],
        specs: Sequence[NodeResourceSpec],
        deployment: Deployment,
        encoders: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._nodes = nodes
        self.resources: dict[str, Resource] = {}
        self._keys_of: dict[str, list[str]] = {name: [] for name in nodes}
        for spec in specs:
            if spec.resource_key in self.resources:
                raise ConfigError(f"resource {spec.resource_key!r} is declared twice")
            unknown = sorted(spec.nodes - nodes.keys())
            if unknown:
                raise ConfigError(
                    f"resource {spec.resource_key!r} is for node {unknown[0]!r}; "
                    f"nodes are {', '.join(nodes)}"
                )
            resource = spec.resource_class.build(spec, deployment, self.resources)
            self.resources[spec.resource_key] = resource
            for name in spec.nodes:
                self._keys_of[name].append(spec.resource_key)
        self._encoders = encoders
        self._stores: dict[str, list[OutputStore]] = {
            kind: [
                resource
                for key in self._keys_of[node]
                if isinstance(resource := self.resources[key], OutputStore)
            ]
            for kind, node in encoders.items()
        }
        self._known_by: dict[frozenset[str] | None, Sequence[Resource]] = {}
        """Resources by what a component says of them."""
        self._deployment = deployment
        self._recorders: dict[str, Recorder] = {}
        self._flight: Flight | None = None
        self._starts: dict[str, _Start] = {}
        """Of the requests that run, and of those that ended last."""
        self._ended: dict[str, None] = {}
        """The latter, the first to end first."""
        self._last: tuple[Batch, NodeStep, list[_Part]] | None = None

    def connect(self, root: bytes | None) -> None:
        """Tell every resource the key of the deployment."""
        for resource in self.resources.values():
            resource.connect(root)

    def disconnect(self, timeout: float) -> None:
        """Let every resource put away what is to outlive the engine, and drop what is recorded."""
        self._flight = None
        self._recorders.clear()
        deadline = time.monotonic() + timeout
        for resource in self.resources.values():
            resource.disconnect(max(0.0, deadline - time.monotonic()))

    def record(self) -> None:
        """Record the decode steps of every node that can be recorded, up to the most requests."""
        deployment = self._deployment
        sizes = decode_sizes(deployment.max_num_seqs)
        device = torch.device(deployment.device)
        sent = Fence(device)
        for name, node in self._nodes.items():
            if isinstance(node, RecordableNode):
                resources = {key: self.resources[key] for key in self._keys_of[name]}
                recorder = Recorder(name, node, resources, device, sent)
                with torch.inference_mode():
                    node.prepare(sizes, deployment.max_num_batched_tokens)
                    if recorder.record(sizes):
                        self._recorders[name] = recorder
                        short = piece_sizes(
                            deployment.max_num_batched_tokens, deployment.tensor_parallel_size
                        )
                        recorder.record_pieces(short, deployment.max_num_seqs)

    def ever_fits(self, request: Request) -> Refusal | None:
        """Refuse a request that could not be served even if it were alone."""
        for opening in self._openings(request):
            for resource in self._resources_of(request):
                refusal = resource.ever_fits(opening)
                if refusal is not None:
                    return refusal
        return None

    def explain(self, request: Request) -> dict[str, Any]:
        """Return what each resource says of a request's reuse now, by resource key."""
        return self._told(_Start(self._openings(request)[0], self._resources_of(request)))

    def explain_started(self, request_id: str) -> dict[str, Any] | None:
        """Return the same of a request that started lately, as it was found then."""
        start = self._starts.get(request_id)
        return None if start is None else self._told(start)

    def _told(self, start: _Start) -> dict[str, Any]:
        told = {
            key: resource.explain(start.opening, start.found, start.when)
            for key, resource in self.resources.items()
            if resource in start.resources
        }
        return {key: report for key, report in told.items() if report is not None}

    def _note_start(self, request: Request) -> None:
        """Remember what a request found when it started, and what others computed for it."""
        self._ended.pop(request.request_id, None)
        if not request.was_preempted and request.openings:
            self._starts[request.request_id] = _Start(
                request.openings[0],
                self._resources_of(request),
                request.sources,
                time.monotonic(),
            )

    def _note_end(self, request_id: str) -> None:
        """Remember for a while yet what a request had found."""
        if request_id in self._starts:
            self._ended[request_id] = None
            if len(self._ended) > _MAX_ENDED:
                oldest = next(iter(self._ended))
                del self._ended[oldest], self._starts[oldest]

    def open(self, request: Request) -> Refusal | None:
        """Begin a request in its resources, behind what all of them can reuse."""
        # What is under way may be a step of its last leg, which is not the one that comes now.
        self._flight = None
        resources, openings = self._resources_of(request), self._openings(request)
        for opening in openings:
            opening.sources.clear()
            for resource in resources:
                resource.restore(opening)
        num_reused = self._match(request)
        for opening in openings:
            for resource in resources:
                refusal = resource.open(opening, num_reused)
                if refusal is not None:
                    self.close(request)
                    return refusal
        if openings:
            request.reuse(num_reused, openings[0].sources)
            self._note_start(request)
        return None

    def _match(self, request: Request) -> int:
        """Return the slots that every resource can begin behind; one is left to compute."""
        resources = self._resources_of(request)
        offer, limit = -1, len(request.tokens) - 1
        while offer != limit:
            offer = limit
            for opening in self._openings(request):
                for resource in resources:
                    limit = resource.match(opening, limit)
        return offer

    def catch_up(self, request: Request) -> bool:
        """Move a request over what others computed since it began.

        Returns whether another is computing what comes next for it.
        """
        resources, openings = self._resources_of(request), self._openings(request)
        num_reused = self._match(request)
        if num_reused > request.num_computed_tokens:
            for opening in openings:
                opening.sources.clear()
                for resource in resources:
                    resource.skip(opening, num_reused)
            request.reuse(num_reused, openings[0].sources)
            self._note_start(request)
        start = request.num_computed_tokens
        return any(r.is_pending(opening, start) for opening in openings for r in resources)

    def next_encoder(self, request: Request, budget: int) -> str | None:
        """Return the node that must encode an item before the request's next tokens run.

        Takes what is encoded already. Where there is no room for an output yet, what stands before
        the item is computed first.
        """
        while (item := request.next_item(budget)) is not None:
            kind, length = item.span.kind, item.span.length
            wanted = Item(request.request_id, item.name, length)
            stores = self._stores[kind]
            if all(store.pin(wanted) for store in stores):
                item.is_encoded = True
            elif all(store.has_room(wanted) for store in stores) or not request.chunk(budget):
                return self._encoders[kind]
            else:
                return None
        return None

    def disown(self, request: Request) -> None:
        """Forget what the request's tokens were computed from: some of it must be wrong."""
        for resource in self._resources_of(request):
            resource.disown(request.request_id)

    def close(self, request: Request) -> None:
        """Give back everything the request holds."""
        for resource in self._resources_of(request):
            resource.close(request.request_id)
        self._note_end(request.request_id)

    def kinds(self) -> dict[str, NodeKind]:
        """Return what each node is run on."""
        return {name: node.kind for name, node in self._nodes.items()} | dict.fromkeys(
            self._encoders.values(), NodeKind.ITEMS
        )

    def shape(self, node: str, request: Request, part: object) -> Hashable:
        """Return what must be equal for an item or a visit to share a batch of the node."""
        return self._nodes[node].shape(request, part)

    def max_batch(self, node: str) -> int | None:
        """Return how many items or visits one batch of the node holds; ``None``: no bound."""
        return self._nodes[node].max_batch

    def admit(self, batch: Batch) -> Refusal | None:
        """Reserve what the batch needs in every resource, or in none."""
        _, parts = self._step(batch)
        for index, part in enumerate(parts):
            refusal = part.resource.admit(part.segments, part.step)
            if refusal is not None:
                for admitted in reversed(parts[:index]):
                    admitted.resource.rollback(admitted.segments, admitted.step)
                return refusal
        return None

    @property
    def overlaps(self) -> bool:
        """Whether steps may be launched ahead."""
        return self._deployment.overlap and bool(self._recorders)

    @property
    def launched(self) -> Batch | None:
        """The batch whose next step is under way; another batch makes it go unread."""
        return None if self._flight is None else self._flight.batch

    def run(self, batch: Batch, goes_on: bool = False) -> NodeOutput:
        """Compute an admitted batch; nothing is visible to later steps unless it returns.

        Args:
            batch: All of it, or what is left of ``launched``, once that is set.
            goes_on: The same requests will have a step behind this one, some of them at least.
        """
        step, parts = self._step(batch)
        flight, self._flight = self._flight, None
        with torch.inference_mode():
            recorder = self._recorders.get(batch.node)
            ran = None if recorder is None else recorder.run(batch, step, flight, goes_on)
            if ran is not None:
                output, self._flight = ran
            else:
                plans: dict[str, Any] = {}
                for part in parts:
                    plans[part.key] = part.resource.plan(part.segments, part.step, plans)
                output = self._nodes[batch.node].forward(batch, plans)
            for part in parts:
                part.resource.commit(part.segments, part.step)
        return output

    def reset(self) -> int:
        """Forget everything that is kept for reuse only; returns how many entries went.

        Raises:
            StorageError: If something is left in a store; all else is forgotten.
        """
        count, failure = 0, None
        for resource in self.resources.values():
            try:
                count += resource.reset()
            except StorageError as error:
                failure = error
        if failure is not None:
            raise failure
        return count

    def check(self) -> None:
        """Verify the invariants of every resource."""
        for resource in self.resources.values():
            resource.check()

    def _step(self, batch: Batch) -> tuple[NodeStep, list[_Part]]:
        """Return what the batch's node declares, as a whole and by resource."""
        if self._last is None or self._last[0] is not batch:
            step = self._nodes[batch.node].declare(batch)
            parts = [
                _Part(key, self.resources[key], step.segments_of(key), step.resources[key])
                for key in self._keys_of[batch.node]
            ]
            self._last = (batch, step, parts)
        return self._last[1:]

    def _resources_of(self, request: Request) -> Sequence[Resource]:
        """Return the resources that know the streams of a request's leg."""
        keys = request.component.resources
        found = self._known_by.get(keys)
        if found is None:
            chosen = self.resources if keys is None else keys
            found = [r for key, r in self.resources.items() if key in chosen]
            self._known_by[keys] = found
        return found

    def _openings(self, request: Request) -> tuple[Opening, ...]:
        """Return what resources know a request's streams by, the main one first."""
        if not request.openings and request.tokens:
            prepared = request.prepared
            streams = [("main", request.tokens, prepared.page_keys)]
            for companion in prepared.companions:
                tokens = request.companions[companion.label]
                streams.append((companion.label, tokens, companion.page_keys))
            request.openings = tuple(
                Opening(
                    request_id=request.request_id,
                    label=label,
                    tokens=tokens,
                    num_prompt_tokens=request.num_prompt_tokens,
                    max_len=request.max_len,
                    page_keys=page_keys,
                    root=context_root(prepared.root, prepared.context),
                    spans=prepared.spans,
                    context=[item.span for item in request.context],
                    num_streams=len(streams),
                    settings={request.component.sampler_key: request.params},
                    retain_seconds=prepared.retain_seconds,
                )
                for label, tokens, page_keys in streams
            )
        return request.openings
