"""The attention manager: picks a backend when it is built, and plans each step with it."""

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, Self, cast

from mstar.engine.resources.attention.base import AttentionBackend, AttentionPlan
from mstar.engine.resources.attention.config import (
    BACKENDS,
    AttentionConfig,
    AttentionSpec,
    AttentionStep,
    check_backend,
)
from mstar.engine.resources.base import Deployment, Resource
from mstar.engine.resources.kv.layout import KVLayout, KVPlan
from mstar.engine.resources.step import ResourceStep, Segment
from mstar.errors import ConfigError, UnsupportedError


class _HasLayout(Protocol):
    """What attention knows of the cache's manager."""

    layout: KVLayout


class AttentionManager(Resource):
    """Attention of one component over one KV cache; holds no state of requests.

    Args:
        resource_key: Its key in the component's steps.
        backend_name: The backend's name in ``BACKENDS``.
        backend: What plans the steps.
    """

    in_pieces = "plan"

    def __init__(self, resource_key: str, backend_name: str, backend: AttentionBackend) -> None:
        self.resource_key = resource_key
        self.backend_name = backend_name
        self.backend = backend
        self.depends_on = (backend.config.kv_cache,)
        self._checked: tuple[Segment, ...] | None = None
        self._all_causal: tuple[bool, ...] = ()
        """Segments whose spans are known to be the cache's."""

    @classmethod
    def build(cls, spec: Any, deployment: Deployment, resources: Mapping[str, Resource]) -> Self:
        """Return a manager with the first backend that refuses nothing.

        Raises:
            ConfigError: If the cache is not there or of another shape, or the deployment names a
                backend that does not exist.
            UnsupportedError: If every backend that may be taken refuses; with every reason.
        """
        assert isinstance(spec, AttentionSpec), f"{type(spec).__name__} declares no attention"
        config = spec.config
        if config.kv_cache not in resources:
            known = ", ".join(sorted(resources)) or "none"
            raise ConfigError(
                f"{spec.resource_key} attends to {config.kv_cache!r}, which is not among the "
                f"resources built before it ({known})"
            )
        layout = cast("_HasLayout", resources[config.kv_cache]).layout
        _check_shapes(spec.resource_key, config, layout)
        name, backend = pick_backend(config, layout, deployment.attention_backend)
        return cls(spec.resource_key, name, backend)

    def plan(
        self, segments: tuple[Segment, ...], step: ResourceStep, plans: Mapping[str, Any]
    ) -> AttentionPlan:
        """Return the step's attention; the KV cache has planned the same segments."""
        kv_plan = self._kv_plan(plans)
        if segments is not self._checked:
            spans = kv_plan.qo_lens.tolist()
            assert [s.span for s in segments] == spans, f"cache planned spans {spans}: {segments}"
            self._checked = segments
            self._all_causal = (True,) * len(segments)
        is_causal = step.is_causal if isinstance(step, AttentionStep) else None
        if is_causal is None:
            is_causal = self._all_causal
        assert len(is_causal) == len(segments), f"{len(is_causal)} flags, {len(segments)} segments"
        return self.backend.plan(kv_plan, is_causal)

    def plan_fixed(
        self,
        size: int,
        segments: tuple[Segment, ...],
        step: ResourceStep,
        plans: Mapping[str, Any],
        ahead: int = 0,
    ) -> AttentionPlan | None:
        """Return the step's attention for a recording; only causal steps have it."""
        if isinstance(step, AttentionStep) and not all(step.is_causal or ()):
            return None
        return self.backend.plan_fixed(self._kv_plan(plans), (True,) * size)

    def _kv_plan(self, plans: Mapping[str, Any]) -> KVPlan:
        kv_plan = plans[self.backend.config.kv_cache]
        assert isinstance(kv_plan, KVPlan), f"{self.depends_on} planned {type(kv_plan).__name__}"
        return kv_plan


def pick_backend(
    config: AttentionConfig, layout: KVLayout, name: str | None = None
) -> tuple[str, AttentionBackend]:
    """Return the first backend that refuses nothing, by name and built.

    Args:
        config: What the component asks for.
        layout: The cache.
        name: The only backend to ask; ``None`` asks all in the order of ``BACKENDS``.

    Raises:
        ConfigError: If ``name`` is not in ``BACKENDS``.
        UnsupportedError: If all refuse; with every reason.
    """
    check_backend(name)
    reasons = []
    for candidate in [name] if name else BACKENDS:
        backend: type[AttentionBackend] = importlib.import_module(BACKENDS[candidate]).Backend
        refusals = backend.unsupported(config, layout)
        if not refusals:
            return candidate, backend(config, layout)
        reasons += [f"{candidate}: {reason}" for reason in refusals]
    raise UnsupportedError("no attention backend can do this", reasons)


def _check_shapes(resource_key: str, config: AttentionConfig, layout: KVLayout) -> None:
    for what, own, cache in (
        ("layers", len(config.layers), layout.num_layers),
        ("num_kv_heads", config.num_kv_heads, layout.num_kv_heads),
        ("head_dim", config.head_dim, layout.head_dim),
    ):
        if own != cache:
            raise ConfigError(
                f"{resource_key} declares {own} {what}, its cache {config.kv_cache!r} has {cache}"
            )
