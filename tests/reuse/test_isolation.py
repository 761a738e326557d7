"""Keys that can be made to collide, and tenants who meet in the cache."""

import ast
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.config import KVConfig, KVSpec
from mstar.engine.resources.kv.keys import fingerprint
from mstar.engine.root import root_constants
from mstar.models.decoder import DecoderModel
from mstar.models.toy_items import ToyEncoder
from mstar.preprocess.prompt import PromptPreparer, PromptRequest, request_root
from mstar.preprocess.tokenizer import TextTokenizer
from mstar.server.protocol import ProtocolRules, parse
from tests.laws.harness import Bench, Picture, Prompt, ask, assert_same, prompt
from tests.reuse.bench import OpenBench, push_down, turn
from tests.server.processes import write_tiny_model

MSTAR = Path(__file__).parents[2] / "mstar"
MAKERS_OF_NAMES = (
    "engine/request.py",
    "engine/root.py",
    "engine/resources/spans.py",
    "engine/resources/kv/keys.py",
    "engine/resources/kv/prefix.py",
    "engine/resources/kv/stream.py",
    "models/checkpoint.py",
    "models/files.py",
    "preprocess/items.py",
    "preprocess/prompt.py",
)


@pytest.mark.parametrize("path", MAKERS_OF_NAMES)
def test_names_are_made_by_sha256_alone_and_never_shortened(path: str) -> None:
    """Builtin and fast hashes, and ids cut to some bits, have all let prompts collide."""
    for node in ast.walk(ast.parse((MSTAR / path).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("hash", "id", "crc32", "md5"), node.lineno
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("__hash__", "crc32", "adler32", "md5", "sha1", "blake2b")
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            assert not names & {"zlib", "random", "uuid", "secrets", "xxhash"}, node.lineno
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            name = ast.unparse(node.value)
            assert not re.search(r"(digest|fingerprint|key|root)(\(.*\))?$", name), node.lineno


@pytest.mark.parametrize("salt", ["None", "none", "null", "False", "0", "cache_salt", " "])
def test_no_salt_is_not_any_salt(salt: str) -> None:
    """The text of a missing value is a text that somebody may send."""
    root = fingerprint("deployment")
    assert request_root(root, None) != request_root(root, salt)


def test_tenant_whose_salt_is_the_word_none_shares_with_nobody(model: DecoderModel) -> None:
    bench = Bench(model)
    ids = prompt(1, 20)
    hits = [turn(bench, ids, salt=salt).num_cached_tokens for salt in (None, "None", None, "None")]
    assert hits == [0, 0, 16, 16]


def test_same_word_in_different_fields_makes_different_roots() -> None:
    """An adapter and a salt of one name once were one first key."""
    specs = [KVSpec("kv", {"n"}, KVConfig(num_layers=2, num_kv_heads=2, head_dim=16))]
    stated = {"weights": "w", "model": "m", "code": "c", "processor": "p"}

    def root(**changes: str) -> bytes:
        found = root_constants(stated | changes, specs, Deployment()).root
        assert found is not None
        return found

    for word in ("x", "w", "none", "16", "float32", "kv", "cache_salt"):
        plain = [root(), *(root(**{name: word}) for name in stated if stated[name] != word)]
        roots = [*plain, *(request_root(one, word) for one in plain)]
        assert all(one != other for one, other in combinations(roots, 2)), word


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "bc"), ("ab", "c")),
        (("", "a"), ("a", "")),
        (("a",), ("a", "")),
        ((), ("",)),
        ((b"a", b""), (b"", b"a")),
        (("a\x00", "b"), ("a", "\x00b")),
    ],
)
def test_parts_of_a_name_do_not_run_into_each_other(
    one: tuple[str, ...], other: tuple[str, ...]
) -> None:
    assert fingerprint(*one) != fingerprint(*other)


@pytest.mark.parametrize("first", ["a", None])
def test_tenants_side_by_side_neither_share_nor_wait_for_each_other(
    model: DecoderModel, first: str | None
) -> None:
    """What is about to be computed for one tenant is told to no other one."""
    ids = prompt(3, 21)
    alone = Bench(model, max_num_batched_tokens=16)
    alone.add("0", ids)
    alone.drain()
    num_steps = alone.engine.stats().num_steps
    bench = Bench(model, max_num_batched_tokens=16)
    for number, salt in enumerate((first, "b", first, "b")):
        bench.add(str(number), ids, salt=salt)
    answers = bench.drain()
    assert [answers[str(n)].num_cached_tokens for n in range(4)] == [0, 0, 20, 20]
    cold = ask(model, ids)
    for answer in answers.values():
        assert_same(answer, cold)
    # Two prompts were computed, in steps of their own at most; nobody stood still.
    assert bench.engine.stats().num_steps <= num_steps + 2


def test_generated_pages_and_pictures_belong_to_their_tenant(
    reader: DecoderModel, encoder: ToyEncoder
) -> None:
    bench = Bench(reader)
    first: Prompt = [*prompt(1, 3), Picture(9, 6, True), *prompt(2, 3)]
    answer = turn(bench, first, salt="a", max_tokens=9)
    following: Prompt = [*first, *answer.token_ids, 7]
    encoded = encoder.num_encoded
    assert turn(bench, following, salt="b").num_cached_tokens == 0
    assert encoder.num_encoded == encoded + 1
    assert turn(bench, following, salt="a").num_cached_tokens == 20
    assert encoder.num_encoded == encoded + 1


def test_names_that_a_client_sends_change_no_key(tmp_path: Path) -> None:
    """A client's id of a picture, taken for its content, once fetched another's picture."""
    write_tiny_model(tmp_path)
    tokenizer = TextTokenizer.load(tmp_path)
    preparer = PromptPreparer(tokenizer, 64, 4, bytes(32), tokenizer.vocab_size)

    def keys(**fields: Any) -> list[bytes]:
        body = {"messages": [{"role": "user", "content": "hello there"}]} | fields
        asked = parse("chat", json.dumps(body).encode(), ProtocolRules(model_names=("tiny",)))
        request = PromptRequest(
            request_id="r", params=asked.params, messages=asked.conversation,
            cache_salt=asked.cache_salt,
        )  # fmt: skip
        return preparer.prepare(request).page_keys

    plain = keys()
    assert len(plain) == 5
    zeros = "00" * 32
    for name in ("multi_modal_uuids", "mm_hash", "page_keys", "root", "spans", "extra_key"):
        assert keys(**{name: [zeros]}) == plain, name
    assert not set(keys(cache_salt="a")) & set(plain)


def test_tenants_share_no_page_that_is_in_a_slower_tier_only(
    model: DecoderModel, open_bench: OpenBench, tiers: dict[str, int]
) -> None:
    """A salt that the pool honours has been forgotten by the tier beneath it."""
    ids = prompt(6, 21)
    cold = ask(model, ids)
    bench = open_bench(model, **tiers)
    assert turn(bench, ids, salt="a").num_cached_tokens == 0
    push_down(bench)
    for salt, expected in (("b", 0), (None, 0), ("a", 20)):
        answer = turn(bench, ids, salt=salt)
        assert answer.num_cached_tokens == expected, salt
        assert_same(answer, cold)
    stats = bench.engine.stats()
    assert (stats.prefix_hits_device, stats.prefix_hits) == (0, 20)
    assert stats.prefix_hits_host + stats.prefix_hits_disk == 20
