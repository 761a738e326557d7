"""Processes that have to make the same names by themselves."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.processes import write_tiny_model

REPOSITORY = Path(__file__).parents[2]
# All that names what is kept: root, tenant's root, items, pages, cuts; missing and empty parts too.
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from mstar.engine.resources.base import Deployment, Opening
from mstar.engine.resources.kv.config import KVConfig, KVSpec
from mstar.engine.resources.kv.keys import fingerprint
from mstar.engine.resources.kv.stream import StreamKeys
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spans import Span
from mstar.engine.root import root_constants
from mstar.preprocess.items import item_digest, prompt_keys
from mstar.preprocess.prompt import PromptPreparer, PromptRequest, request_root
from mstar.preprocess.tokenizer import TextTokenizer

specs = [KVSpec("kv", {"b", "a", "c"}, KVConfig(num_layers=2, num_kv_heads=2, head_dim=16))]
named = root_constants({"weights": "ab", "extra": "None"}, specs, Deployment())
roots = [named.root, *(request_root(named.root, salt) for salt in (None, "None", "tenant"))]
parameters = {name: {"b": None, "a": [], "c": {}} for name in ("x", "z", "y")}
digest = item_digest(
    np.arange(12, dtype=">f4").reshape(3, 4), kind="image", processor=fingerprint(None, "", b""),
    parameters=parameters, length=9,
)
spans, ids = [Span(3), Span(9, digest), Span(30)], list(range(2, 44))
names = [digest]
for root in roots:
    names += prompt_keys(ids, spans, 16, root)
    opening = Opening(
        request_id="r", tokens=ids, num_prompt_tokens=len(ids), max_len=99, root=root, spans=spans
    )
    names.append(StreamKeys(opening, 16).end_key(0, 12))
tokenizer = TextTokenizer.load(Path(sys.argv[1]))
preparer = PromptPreparer(tokenizer, 256, 16, named.root, tokenizer.vocab_size)
chat = [{"role": "system", "content": "be brief " * 5}, {"role": "user", "content": "who? é"}]
prepared = preparer.prepare(PromptRequest(request_id="r", params=SamplingParams(), messages=chat))
print(b"".join([*roots, *names, prepared.root, *prepared.page_keys]).hex())
"""


@pytest.mark.slow
def test_processes_that_share_nothing_make_the_same_names(tmp_path: Path) -> None:
    """Chains that began with a number of the process, or with an object's address, never met."""
    write_tiny_model(tmp_path)
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    plain["PYTHONPATH"] = str(REPOSITORY)
    # Three as they come, with hashes and addresses drawn anew; then seeds that a user may set.
    seeds = [None, None, None, "0", "1", "2", "random", "4294967295"]

    def names(seed: str | None) -> str:
        env = plain if seed is None else plain | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(names, seeds))
    assert len(set(found)) == 1
    # Four roots with three pages and a cut each, a digest, and a chat of some pages.
    assert len(found[0]) > 64 * (4 + 1 + 4 * 4 + 4)
