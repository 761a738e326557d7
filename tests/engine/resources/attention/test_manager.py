"""The attention manager picks a backend that can do it, or says why none can."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pytest
import torch

from mstar.engine.resources.attention.config import (
    BACKENDS,
    AttentionConfig,
    AttentionSpec,
    AttentionStep,
    LayerAttention,
)
from mstar.engine.resources.attention.manager import AttentionManager, pick_backend
from mstar.engine.resources.base import Deployment, Resource
from mstar.engine.resources.kv.layout import KVLayout, KVPlan
from mstar.engine.resources.step import ResourceStep, Segment
from mstar.errors import ConfigError, UnsupportedError

CONFIG = AttentionConfig(
    kv_cache="kv",
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=16,
    scale=0.25,
    layers=(LayerAttention(),),
)
LAYOUT = KVLayout(1, 4, 2, 2, 16, torch.float32, torch.device("cpu"))


class Cache(Resource):
    """A KV cache as far as attention knows it."""

    def __init__(self, layout: KVLayout) -> None:
        self.resource_key = "kv"
        self.layout = layout

    @classmethod
    def build(cls, spec: Any, deployment: Deployment, resources: Mapping[str, Resource]) -> Self:
        raise NotImplementedError

    def plan(
        self, segments: tuple[Segment, ...], step: ResourceStep, plans: Mapping[str, Any]
    ) -> KVPlan:
        spans = np.array([segment.span for segment in segments], np.int32)
        size = (4, 2, 2, 16)
        return KVPlan(
            layout=self.layout,
            keys=[torch.ones(size)],
            values=[torch.arange(256.0).view(size)],
            qo_lens=spans,
            qo_indptr=np.concatenate(([0], spans.cumsum())).astype(np.int32),
            kv_lens=spans,
            page_table=np.array([[1, 2]] * len(spans), np.int32),
            slots=torch.zeros(int(spans.sum()), dtype=torch.int64),
        )


def build(config: AttentionConfig = CONFIG, **settings: Any) -> AttentionManager:
    spec = AttentionSpec("attention", {"backbone"}, config)
    return AttentionManager.build(spec, Deployment(**settings), {"kv": Cache(LAYOUT)})


def test_first_backend_that_refuses_nothing_is_taken() -> None:
    manager = build()
    can = [name for name in BACKENDS if pick_reasons(CONFIG, name) == ()]
    assert manager.backend_name == can[0]
    assert manager.resource_key == "attention"
    assert manager.depends_on == ("kv",)


def pick_reasons(config: AttentionConfig, name: str) -> tuple[str, ...]:
    try:
        pick_backend(config, LAYOUT, name)
    except UnsupportedError as error:
        return error.reasons
    return ()


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_deployment_may_name_the_backend(name: str) -> None:
    assert build(attention_backend=name).backend_name == name


def test_unknown_backend_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'flash'.*paged, flashinfer, sdpa, eager"):
        build(attention_backend="flash")


def test_error_lists_every_backends_reasons() -> None:
    layout = replace(LAYOUT, dtype=torch.int8)
    with pytest.raises(UnsupportedError) as caught:
        pick_backend(CONFIG, layout)
    for name in BACKENDS:
        assert any(reason.startswith(f"{name}: ") for reason in caught.value.reasons)


def test_named_backend_that_refuses_is_not_replaced() -> None:
    config = replace(CONFIG, head_dim=24)
    with pytest.raises(UnsupportedError, match=r"paged: .*24"):
        pick_backend(config, replace(LAYOUT, head_dim=24), "paged")


def test_missing_cache_is_named() -> None:
    spec = AttentionSpec("attention", {"backbone"}, CONFIG)
    with pytest.raises(ConfigError, match="'kv'"):
        AttentionManager.build(spec, Deployment(), {})


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (replace(CONFIG, head_dim=32), "head_dim"),
        (replace(CONFIG, num_kv_heads=4), "num_kv_heads"),
        (replace(CONFIG, layers=(LayerAttention(),) * 2), "layers"),
    ],
)
def test_cache_of_another_shape_is_refused(config: AttentionConfig, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        build(config)


@pytest.mark.parametrize("name", list(BACKENDS))
def test_segments_are_causal_unless_the_step_says_otherwise(name: str) -> None:
    if pick_reasons(CONFIG, name):
        pytest.skip("the backend is not here")
    manager = build(attention_backend=name)
    segments = (Segment("a", "main", 3), Segment("b", "main", 3))
    plans = {"kv": Cache(LAYOUT).plan(segments, ResourceStep(), {})}
    query = torch.ones(6, 4, 16)
    values = plans["kv"].values[0].flatten(0, 1)[2:5, 0, 0]

    def rows(step: ResourceStep) -> torch.Tensor:
        return manager.plan(segments, step, plans).run(0, query)[:, 0, 0]

    causal = torch.stack([values[:1].mean(), values[:2].mean(), values.mean()])
    for step in (ResourceStep(), AttentionStep()):
        torch.testing.assert_close(rows(step), causal.repeat(2))
    mixed = rows(AttentionStep(is_causal=(True, False)))
    torch.testing.assert_close(mixed, torch.cat([causal, values.mean().repeat(3)]))


def test_step_that_differs_from_the_caches_is_caught() -> None:
    segments = (Segment("a", "main", 3),)
    plans = {"kv": Cache(LAYOUT).plan(segments, ResourceStep(), {})}
    with pytest.raises(AssertionError, match="spans"):
        build().plan((Segment("a", "main", 2),), ResourceStep(), plans)
