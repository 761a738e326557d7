import logging
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, strategies as st

from mstar.engine.engine import EngineCore
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.config import KVConfig, KVSpec
from mstar.engine.root import root_constants, root_key
from mstar.models.decoder import DecoderModel
from mstar.models.toy import toy_model
from tests.oracles import keys as oracle

STATED = {"weights": "ab", "model": "shape", "code": "v1"}
NUMBERS = Deployment(dtype="float32", page_size=16)


def _specs(**changes: int) -> list[KVSpec]:
    shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16} | changes
    return [KVSpec("kv", {"decoder"}, KVConfig(**shape))]  # type: ignore[arg-type]


def test_root_is_the_fingerprint_of_names_and_values_in_their_order() -> None:
    named = root_constants(STATED, _specs(), NUMBERS)
    assert list(named.constants) == [
        "recipe", "weights", "model", "code", "adapter", "dtype", "page_size", "resource.kv",
    ]  # fmt: skip
    flat = [part for item in named.constants.items() for part in item]
    assert named.root == oracle.fingerprint(*flat)
    assert named.report()["root"] == oracle.fingerprint(*flat).hex()


def test_every_part_by_itself_makes_another_root() -> None:
    """Two deployments that differed in KV dtype alone once read each other's pages."""
    variants = [
        root_constants(STATED, _specs(), NUMBERS),
        root_constants(STATED | {"weights": "ac"}, _specs(), NUMBERS),
        root_constants(STATED | {"model": "other"}, _specs(), NUMBERS),
        root_constants(STATED | {"code": "v2"}, _specs(), NUMBERS),
        root_constants(STATED, _specs(), replace(NUMBERS, dtype="bfloat16")),
        root_constants(STATED, _specs(), replace(NUMBERS, page_size=32)),
        root_constants(STATED, _specs(num_layers=3), NUMBERS),
        root_constants(STATED, _specs(num_kv_heads=1), NUMBERS),
        root_constants(STATED, _specs(head_dim=8), NUMBERS),
    ]
    roots = {named.root for named in variants}
    assert None not in roots
    assert len(roots) == len(variants)


def test_numbers_that_the_kv_does_not_depend_on_leave_the_root_alone() -> None:
    other = replace(NUMBERS, num_pages=7, max_num_seqs=3, max_num_batched_tokens=64)
    assert (
        root_constants(STATED, _specs(), other).root
        == root_constants(STATED, _specs(), NUMBERS).root
    )


@given(st.dictionaries(st.text("ab", max_size=3), st.text("ab", max_size=3), max_size=4))
def test_names_and_values_do_not_run_into_each_other(constants: dict[str, str]) -> None:
    moved = {f"{name}a": value for name, value in constants.items()}
    assert (root_key(constants) == root_key(moved)) is (constants == moved)


@dataclass(frozen=True)
class _Opaque:
    num: object

    def __repr__(self) -> str:
        return object.__repr__(self)


@pytest.mark.parametrize(
    ("stated", "numbers", "words"),
    [
        (None, NUMBERS, "weights"),
        ({}, NUMBERS, "weights"),
        ({"model": "shape"}, NUMBERS, "weights"),
        (STATED | {"weights": ""}, NUMBERS, "'weights' is empty"),
        (STATED | {"model": repr(_Opaque(1))}, NUMBERS, "same in every process"),
        (STATED, replace(NUMBERS, enable_prefix_caching=False), "switched off"),
    ],
)
def test_a_missing_part_keeps_the_cache_shut_and_says_which(
    stated: dict[str, str] | None, numbers: Deployment, words: str
) -> None:
    named = root_constants(stated, _specs(), numbers)
    assert named.root is None
    assert named.report()["root"] is None
    assert any(words in reason for reason in named.missing)


def test_an_engine_of_unnamed_weights_warns_once_and_reuses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model: DecoderModel = toy_model()
    model.root_constants = None
    numbers = Deployment(page_size=4, num_pages=16, max_num_seqs=2, max_num_batched_tokens=16)
    with caplog.at_level(logging.WARNING):
        engine = EngineCore(model, numbers)
    (record,) = [r for r in caplog.records if "reused" in r.getMessage()]
    assert "weights" in record.getMessage()
    assert engine.root is None


def test_an_engine_whose_reuse_is_switched_off_does_not_warn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    numbers = Deployment(page_size=4, num_pages=16, max_num_seqs=2, enable_prefix_caching=False)
    with caplog.at_level(logging.WARNING):
        EngineCore(toy_model(), numbers)
    assert not caplog.records
