"""Runs a batch on its node: admit, plan, forward, commit, over whatever resources there are."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.capture import RecordableNode, Recorder, decode_sizes
from mstar.engine.request import Request
from mstar.engine.resources.base import Deployment, Opening, Refusal, Resource
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import NodeStep, ResourceStep, Segment
from mstar.errors import ConfigError


class _Part(NamedTuple):
    """What a step asks of one resource."""

    key: str
    resource: Resource
    segments: tuple[Segment, ...]
    step: ResourceStep


class Runner:
    """The nodes of a model and the resources they need.

    Args:
        nodes: The model's components, by name.
        specs: The resources they declare; a spec stands behind those it depends on.
        deployment: The numbers that resources are built with.
        sampler_key: The resource that a request's sampling parameters are for.

    Raises:
        ConfigError: If a spec names a node that is not there, or a resource twice.
    """

    def __init__(
        self,
        nodes: Mapping[str, Node],
        specs: Sequence[NodeResourceSpec],
        deployment: Deployment,
        sampler_key: str,
    ) -> None:
        self._nodes = nodes
        self._sampler_key = sampler_key
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
        self._reuse_unit = math.lcm(*(r.reuse_unit for r in self.resources.values()))
        self._deployment = deployment
        self._recorders: dict[str, Recorder] = {}
        self._last: tuple[Batch, NodeStep, list[_Part]] | None = None

    def record(self) -> None:
        """Record the decode steps of every node that can be recorded, up to the most requests."""
        deployment = self._deployment
        sizes = decode_sizes(deployment.max_num_seqs)
        for name, node in self._nodes.items():
            if isinstance(node, RecordableNode):
                resources = {key: self.resources[key] for key in self._keys_of[name]}
                recorder = Recorder(name, node, resources, torch.device(deployment.device))
                with torch.inference_mode():
                    if recorder.record(sizes):
                        self._recorders[name] = recorder

    def ever_fits(self, request: Request) -> Refusal | None:
        """Refuse a request that could not be served even if it were alone."""
        opening = self._opening(request)
        for resource in self.resources.values():
            refusal = resource.ever_fits(opening)
            if refusal is not None:
                return refusal
        return None

    def open(self, request: Request) -> Refusal | None:
        """Begin a request in every resource, behind what all of them can reuse."""
        opening = self._opening(request)
        offers = [resource.match(opening) for resource in self.resources.values()]
        num_reused = min((offer for offer in offers if offer is not None), default=0)
        num_reused -= num_reused % self._reuse_unit
        for resource in self.resources.values():
            refusal = resource.open(opening, num_reused)
            if refusal is not None:
                self.close(request)
                return refusal
        request.num_computed_tokens = num_reused
        return None

    def close(self, request: Request) -> None:
        """Give back everything the request holds."""
        for resource in self.resources.values():
            resource.close(request.request_id)

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

    def run(self, batch: Batch) -> NodeOutput:
        """Compute an admitted batch; nothing is visible to later steps unless it returns."""
        step, parts = self._step(batch)
        with torch.inference_mode():
            recorder = self._recorders.get(batch.node)
            output = None if recorder is None else recorder.run(batch, step)
            if output is None:
                plans: dict[str, Any] = {}
                for part in parts:
                    plans[part.key] = part.resource.plan(part.segments, part.step, plans)
                output = self._nodes[batch.node].forward(batch, plans)
            for part in parts:
                part.resource.commit(part.segments, part.step)
        return output

    def reset(self) -> int:
        """Forget everything that is kept for reuse only; returns how many entries went."""
        return sum(resource.reset() for resource in self.resources.values())

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

    def _opening(self, request: Request) -> Opening:
        prepared = request.prepared
        return Opening(
            request_id=request.request_id,
            tokens=request.tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            max_len=request.max_len,
            page_keys=prepared.page_keys,
            root=prepared.root,
            spans=prepared.spans,
            settings={self._sampler_key: request.params},
        )
