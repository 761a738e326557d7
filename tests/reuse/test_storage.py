"""Pages that are read back by whom they do not belong to: other settings, other weights, resets."""

import random
from pathlib import Path
from typing import Any

import pytest

from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.tiers.stack import Stored
from mstar.engine.resources.position.config import PosScheme
from mstar.engine.root import root_constants
from mstar.models.decoder import DecoderModel
from mstar.models.toy import toy_model
from mstar.models.toy_items import ToyEncoder, toy_item_model
from mstar.preprocess.items import prompt_keys
from mstar.preprocess.prompt import request_root
from tests.laws.harness import PAGE_SIZE, Bench, Picture, Prompt, ask, assert_same, prompt
from tests.reuse.bench import OpenBench, push_down, tiers_of, turn

CHANGES: dict[str, dict[str, Any]] = {
    "rope theta": {"rope_theta": 5000.0},
    "rope scaling": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "norm": {"rms_norm_eps": 1e-5},
    "layers": {"num_hidden_layers": 3},
    "query heads": {"num_attention_heads": 2},
    "KV heads": {"num_key_value_heads": 1},
    "head size": {"head_dim": 8},
    "mlp": {"intermediate_size": 64},
    "activation": {"hidden_act": "gelu_pytorch_tanh"},
}


def root_of(model: DecoderModel, **numbers: Any) -> bytes:
    """Return a model's root as if its weights were those of all others."""
    assert model.root_constants is not None
    stated = {**model.root_constants, "weights": "the same"}
    root = root_constants(stated, model.specs, Deployment(**numbers)).root
    assert root is not None
    return root


def test_every_setting_that_the_kv_depends_on_makes_another_root_of_the_same_weights() -> None:
    window: dict[str, Any] = {"sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
    gemma = ("Gemma3ForCausalLM",)
    models = {name: toy_model(0, **change) for name, change in CHANGES.items()} | {
        "plain": toy_model(0),
        "family": toy_model(0, "Qwen3ForCausalLM"),
        "window": toy_model(0, *gemma, sliding_window=8, **window),
        "other window": toy_model(0, *gemma, sliding_window=16, **window),
        "no scheme": toy_item_model(),
        "blocks": toy_item_model(scheme=PosScheme.BLOCK),
        "wide blocks": toy_item_model(scheme=PosScheme.BLOCK, block_step=2),
    }
    roots = {name: root_of(model) for name, model in models.items()}
    for number in ({"page_size": 32}, {"dtype": "bfloat16"}):
        roots[str(number)] = root_of(models["plain"], **number)
    same: dict[bytes, list[str]] = {}
    for name, root in roots.items():
        same.setdefault(root, []).append(name)
    assert [names for names in same.values() if len(names) > 1] == []


def test_reset_under_running_requests_leaves_nothing_to_those_that_come_after(
    model: DecoderModel,
) -> None:
    """Pages that running requests held once came back after a reset that had said it was done."""
    ids = prompt(1, 22)
    cold = ask(model, ids)
    bench = Bench(model, max_num_batched_tokens=8)
    turn(bench, ids)
    bench.add("before", ids)
    bench.add("cold before", prompt(2, 22))
    for _ in range(2):
        bench.step()
    assert bench.engine.stats().num_running == 2
    assert bench.engine.reset_prefix_cache() > 0
    bench.add("after", ids)
    bench.add("cold after", prompt(2, 22))
    answers = bench.drain()
    cached = {name: answer.num_cached_tokens for name, answer in answers.items()}
    assert cached == {"before": 20, "cold before": 0, "after": 0, "cold after": 0}
    for name in ("before", "after"):
        assert_same(answers[name], cold)
    assert turn(bench, ids).num_cached_tokens == 20


@pytest.mark.parametrize("is_pinned", [True, False], ids=["at once", "later"])
def test_reset_under_a_running_request_leaves_its_encoder_outputs_to_nobody_else(
    reader: DecoderModel, encoder: ToyEncoder, is_pinned: bool
) -> None:
    parts: Prompt = [*prompt(1, 3), Picture(31, 6, True), *prompt(2, 3)]
    cold = ask(reader, parts)
    bench = Bench(reader, max_num_batched_tokens=6)
    first = encoder.num_encoded
    bench.add("before", parts)
    while encoder.num_encoded == first:
        bench.step()
    bench.engine.reset_prefix_cache()
    answers = {} if is_pinned else bench.drain()
    bench.add("after", parts)
    answers |= bench.drain()
    assert encoder.num_encoded == first + 2
    assert answers["after"].num_cached_tokens == 0
    for answer in answers.values():
        assert_same(answer, cold)
    assert turn(bench, parts).num_cached_tokens == 9
    assert encoder.num_encoded == first + 2


@pytest.mark.parametrize("seed", [1, 2])
def test_other_weights_under_the_same_name_have_other_keys(seed: int) -> None:
    models = [toy_model(0), toy_model(seed)]
    assert len({model.name for model in models}) == 1
    assert len({Bench(model).engine.root for model in models}) == 2


def test_one_reset_leaves_no_tier_with_anything_to_serve(
    model: DecoderModel, open_bench: OpenBench, tiers: dict[str, int]
) -> None:
    ids = prompt(9, 21)
    bench = open_bench(model, **tiers)
    turn(bench, ids)
    push_down(bench)
    turn(bench, prompt(10, 21))
    assert bench.engine.reset_prefix_cache() > 0
    stats = bench.engine.stats()
    assert (stats.num_pages_cached, stats.num_pages_host, stats.num_pages_disk) == (0, 0, 0)
    for seed in (9, 10):
        assert turn(bench, prompt(seed, 21)).num_cached_tokens == 0
    bench.engine.reset_prefix_cache()
    bench.engine.close()
    # Whoever starts on the same folder finds nothing either.
    assert turn(open_bench(model, **tiers), ids).num_cached_tokens == 0


def test_pages_on_disk_are_read_by_the_same_weights_and_settings_only(
    open_bench: OpenBench,
) -> None:
    """Runs that shared a folder have read each other's bytes as their own."""
    disk = {"disk_cache_bytes": 1 << 22}
    ids = prompt(11, 21)
    first = open_bench(toy_model(0), **disk)
    turn(first, ids)
    first.engine.close()
    others: list[tuple[DecoderModel, dict[str, int]]] = [
        (toy_model(1), {}),
        (toy_model(0, rope_theta=5000.0), {}),
        (toy_model(0), {"page_size": 2}),
    ]
    for model, numbers in others:
        bench = open_bench(model, **disk, **numbers)
        answer = turn(bench, ids)
        assert answer.num_cached_tokens == 0
        assert_same(answer, ask(model, ids))
    again = open_bench(toy_model(0), **disk)
    answer = turn(again, ids)
    assert (answer.num_cached_tokens, again.engine.stats().prefix_hits_disk) == (20, 20)
    assert_same(answer, ask(toy_model(0), ids))


@pytest.mark.parametrize("missing", range(5))
def test_page_that_was_promised_and_is_not_there_is_computed_again(
    model: DecoderModel,
    open_bench: OpenBench,
    tiers: dict[str, int],
    missing: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tier that says yes and then gives nothing has left holes, or old content in their place."""
    ids = prompt(12, 21)
    cold = ask(model, ids)
    bench = open_bench(model, **tiers)
    turn(bench, ids)
    push_down(bench)
    stack, get, asked = tiers_of(bench), tiers_of(bench).get, []

    def get_all_but_one(key: bytes) -> Stored | None:
        assert stack.find(key) is not None
        asked.append(key)
        return None if len(asked) == missing + 1 else get(key)

    monkeypatch.setattr(stack, "get", get_all_but_one)
    answer = turn(bench, ids)
    assert answer.num_cached_tokens == missing * PAGE_SIZE
    assert_same(answer, cold)
    monkeypatch.undo()
    # All pages are whole again, without a hole among them.
    again = turn(bench, ids)
    assert again.num_cached_tokens == 20
    assert_same(again, cold)


@pytest.mark.parametrize("broken", range(5))
def test_page_that_rotted_on_the_disk_is_computed_again(
    open_bench: OpenBench, tmp_path: Path, broken: int
) -> None:
    model = toy_model(0)
    ids = prompt(13, 21)
    first = open_bench(model, disk_cache_bytes=1 << 20)
    turn(first, ids, max_tokens=1)
    root = request_root(first.engine.root, None)
    assert root is not None
    first.engine.close()
    files = {file.stem: file for file in (tmp_path / "pages").rglob("*.kv")}
    assert len(files) == 5
    file = files[prompt_keys(ids, (), PAGE_SIZE, root)[broken].hex()]
    data = bytearray(file.read_bytes())
    data[-1 - broken * 300] ^= 0x10
    file.write_bytes(data)
    bench = open_bench(model, disk_cache_bytes=1 << 20)
    answer = turn(bench, ids, max_tokens=1)
    assert answer.num_cached_tokens == broken * PAGE_SIZE
    assert bench.engine.stats().num_pages_broken == 1
    assert_same(answer, ask(model, ids, max_tokens=1))


@pytest.mark.parametrize("seed", range(3))
def test_traffic_that_moves_pages_up_and_down_all_the_time_is_answered_rightly(
    model: DecoderModel, open_bench: OpenBench, tiers: dict[str, int], seed: int
) -> None:
    """Pages that were copied out while they were taken anew gave answers with others' words."""
    rng = random.Random(seed)
    stems = [prompt(stem, 22) for stem in range(4)]
    bench = open_bench(model, num_pages=16, max_num_seqs=3, **tiers)
    expected = {}
    for number in range(16):
        ids = rng.choice(stems)[: rng.randrange(4, 23)] + prompt(number, rng.randrange(4))
        count = rng.randrange(1, 9)
        bench.add(str(number), ids, max_tokens=count)
        expected[str(number)] = ask(model, ids, max_tokens=count)
        for _ in range(rng.randrange(5)):
            bench.step()
    for name, answer in bench.drain().items():
        assert_same(answer, expected[name])
    stats = bench.engine.stats()
    assert stats.num_evictions > 10
    assert stats.prefix_hits_host + stats.prefix_hits_disk > 0
