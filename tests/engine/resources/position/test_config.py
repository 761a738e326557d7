import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch

from mstar.engine.resources.position.config import (
    PosBackend,
    PositionConfig,
    PositionSpec,
    PositionStep,
    PosScheme,
    RopeParams,
)
from mstar.engine.resources.position.manager import PositionManager
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import ResourceStep, Segment
from mstar.errors import ConfigError

FIXED = {
    "kv_cache": dataclasses.MISSING,
    "backend": PosBackend.ROPE,
    "scheme": PosScheme.SEQUENTIAL,
    "block_step": 1,
    "rotary_dim": None,
    "interleave": False,
    "rope_scale": 1.0,
    "rope_theta": 10000.0,
    "rope_dtype": None,
    "low_freq_factor": None,
    "high_freq_factor": None,
    "old_context_len": None,
}
LLAMA31: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}


def test_fixed_fields_stand_first_in_the_promised_order_with_the_promised_defaults() -> None:
    fields = dataclasses.fields(PositionConfig)
    assert {field.name: field.default for field in fields[: len(FIXED)]} == FIXED
    assert list(FIXED) == [field.name for field in fields[: len(FIXED)]]
    assert all(field.default is not dataclasses.MISSING for field in fields[len(FIXED) :])


def test_all_fixed_fields_may_be_given_by_place() -> None:
    config = PositionConfig(
        "kv",
        PosBackend.ROPE,
        PosScheme.BLOCK,
        3,
        64,
        True,
        8.0,
        5e5,
        torch.bfloat16,
        1.0,
        4.0,
        8192,
    )
    assert config.block_step == 3
    assert config.llama31_params == LLAMA31


def test_enum_values_are_the_promised_strings() -> None:
    assert {member.name: member.value for member in PosBackend} == {"ROPE": "rope"}
    assert {m.name: m.value for m in PosScheme} == {"SEQUENTIAL": "sequential", "BLOCK": "block"}


@pytest.mark.parametrize("missing", list(LLAMA31))
def test_two_of_three_llama31_factors_are_refused(missing: str) -> None:
    given = {name: value for name, value in LLAMA31.items() if name != missing}
    with pytest.raises(ValueError, match=missing):
        PositionConfig("kv", rope_scale=8.0, **given)
    with pytest.raises(ConfigError, match=missing):
        RopeParams(rope_scale=8.0, **given)
    with pytest.raises(ConfigError, match="together"):
        PositionConfig("kv", rope_scale=8.0, **dict[str, Any]({missing: LLAMA31[missing]}))


def test_no_llama31_factor_gives_an_empty_dict() -> None:
    assert PositionConfig("kv", rope_scale=8.0).llama31_params == {}


def test_equal_llama31_factors_are_legal() -> None:
    config = PositionConfig("kv", low_freq_factor=1.0, high_freq_factor=1.0, old_context_len=8192)
    assert config.llama31_params == {
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "old_context_len": 8192,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rotary_dim", 7),
        ("rotary_dim", 0),
        ("rotary_dim", -2),
        ("rope_scale", 0.0),
        ("rope_scale", -1.0),
        ("rope_scale", float("nan")),
        ("rope_theta", 0.0),
        ("rope_theta", -1e4),
        ("block_step", -1),
        ("head_dim", 5),
        ("max_position", 0),
        ("attention_scaling", 0.0),
        ("freq_factors", (1.0, 0.0)),
        ("rope_dtype", torch.int64),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_name_of_its_field(
    name: str, value: object
) -> None:
    with pytest.raises(ValueError, match=name):
        PositionConfig("kv", **dict[str, Any]({name: value}))


def test_low_factor_above_high_factor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"low_freq_factor.*high_freq_factor"):
        PositionConfig("kv", low_freq_factor=4.0, high_freq_factor=1.0, old_context_len=8192)


def test_rotary_dim_above_head_dim_is_refused() -> None:
    with pytest.raises(ConfigError, match="must not exceed head_dim 64"):
        PositionConfig("kv", rotary_dim=128, head_dim=64)


def test_freq_factors_need_one_entry_a_pair() -> None:
    with pytest.raises(ConfigError, match="3 entries"):
        PositionConfig("kv", head_dim=8, freq_factors=(1.0, 1.0, 1.0))
    with pytest.raises(ConfigError, match="1 entries"):
        PositionConfig("kv", head_dim=8, layer_rope=(RopeParams(freq_factors=(1.0,)),))


def test_equal_layer_parameters_are_one_set_and_none_is_no_set() -> None:
    local, whole = RopeParams(), RopeParams(rope_theta=1e6, rope_scale=8.0)
    config = PositionConfig(
        "kv", head_dim=8, layer_rope=(RopeParams(), None, whole, local, RopeParams())
    )
    assert config.distinct() == (local, whole)
    assert PositionConfig("kv", rope_theta=5e5).distinct() == (RopeParams(rope_theta=5e5),)


def test_spec_is_a_node_spec_and_names_the_manager() -> None:
    spec = PositionSpec("position", {"decoder"}, PositionConfig("kv"))
    assert isinstance(spec, NodeResourceSpec)
    assert spec.resource_class is PositionManager


def test_step_is_a_frozen_resource_step_with_segments_first() -> None:
    segments = (Segment("a", "main", 2),)
    step = PositionStep(segments, {"main": torch.tensor([1, 2])}, (5,))
    assert isinstance(step, ResourceStep)
    assert (step.segments, step.advance) == (segments, (5,))
    assert PositionStep() == PositionStep(segments=None, pos_ids=None, advance=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.advance = None  # type: ignore[misc]


def test_declaring_loads_neither_the_manager_nor_a_kernel_library() -> None:
    code = (
        "import sys, mstar.engine.resources.position.config\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('flashinfer', 'triton')"
        " or m.startswith('mstar') and m.endswith(('.manager', '.rope', '.indices'))]\n"
        "assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
