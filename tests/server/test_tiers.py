"""The disk tier over ends, kills and neighbours of servers, with a model that reads all its KV."""

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mstar import Engine, SamplingParams
from mstar.engine.resources.base import Deployment
from tests.server.processes import ServerProcess, TinyModel

pytestmark = pytest.mark.slow
PAGE = 16
NUM_TOKENS = 12


class Reply(NamedTuple):
    """What a request came to."""

    token_ids: tuple[int, ...]
    num_cached: int


StartOn = Callable[..., ServerProcess]


def random_model(tiny: TinyModel, folder: Path, seed: int) -> Path:
    """Write a model of random weights, whose every token depends on all before it."""
    shutil.copytree(tiny.folder, folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=tiny.eos_id,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tiny, tmp_path_factory.mktemp("models") / "random", 3)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [rng.choices(range(256), k=129 + number) for number in range(16)]


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """What the prompts are answered with, each computed alone from nothing."""
    deployment = Deployment(enable_prefix_caching=False, num_pages=64)
    with Engine(str(model), dtype="float32", deployment=deployment) as engine:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        return [engine.generate(prompt, params)[0].token_ids for prompt in prompts]


@pytest.fixture
def start_on(model: Path, tmp_path: Path) -> Iterator[StartOn]:
    """Start servers with one folder of pages; they end with the test."""
    started: list[ServerProcess] = []

    def start(*flags: str, other: Path = model, dtype: str = "float32") -> ServerProcess:
        given = ("--disk-cache-space", "64MiB", "--disk-cache-dir", str(tmp_path / "pages"))
        numbers = ("--num-pages", "64", "--max-model-len", "512", "--dtype", dtype)
        started.append(ServerProcess(other, *given, *numbers, *flags))
        return started[-1]

    yield start
    for server in started:
        server.close()


def ask(server: ServerProcess, prompt: list[int]) -> Reply:
    with server.client() as client:
        answer = client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    extra = answer.choices[0].model_extra
    assert extra is not None
    return Reply(tuple(extra["token_ids"]), answer.usage.prompt_tokens_details.cached_tokens or 0)


def whole_pages(prompt: list[int]) -> int:
    """Return the tokens of a prompt that can be reused, in whole pages."""
    return (len(prompt) - 1) // PAGE * PAGE


def test_pages_outlive_a_server_that_is_asked_to_end(
    start_on: StartOn, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    first = start_on().wait_ready()
    for prompt, tokens in zip(prompts[:4], expected, strict=False):
        assert ask(first, prompt) == Reply(tokens, 0)
    children = psutil.Process(first.process.pid).children(recursive=True)
    started = time.monotonic()
    assert first.end() == 0, first.log
    # All was written, and what was set aside for it was not waited for.
    assert time.monotonic() - started < 20
    assert not [child for child in children if child.is_running()]

    second = start_on().wait_ready()
    for prompt, tokens in zip(prompts[:4], expected, strict=False):
        assert ask(second, prompt) == Reply(tokens, whole_pages(prompt))
    assert ask(second, prompts[4]) == Reply(expected[4], 0)
    assert second.end() == 0, second.log


def test_a_server_that_is_asked_to_end_under_load_answers_and_then_writes(
    start_on: StartOn, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    first = start_on("--num-pages", "24", "--max-model-len", "256").wait_ready()
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(ask, first, prompt) for prompt in prompts]
        while not any(future.done() for future in running):
            time.sleep(0.01)
        first.process.send_signal(signal.SIGTERM)
        # Whoever had not come in yet is refused, which is another test's matter.
        replies = [f.result() for f in running if f.exception(timeout=60) is None]
    assert replies
    assert {reply.token_ids for reply in replies} <= set(expected)
    # A second signal would end it at once, whatever is still to be written.
    assert first.process.wait(timeout=60) == 0, first.log
    second = start_on().wait_ready()
    found = [ask(second, prompt) for prompt in prompts]
    assert [reply.token_ids for reply in found] == expected
    assert sum(reply.num_cached > 0 for reply in found) >= len(replies)


def test_pages_that_a_kill_cut_short_never_change_an_answer(
    start_on: StartOn, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    # A pool this small writes to the disk all the time.
    first = start_on("--num-pages", "24", "--max-model-len", "256").wait_ready()
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(ask, first, prompt) for prompt in prompts * 4]
        while sum(future.done() for future in running) < 8:
            time.sleep(0.005)
        engine = first.child("engine_process")
        first.process.kill()
        engine.kill()
        for future in running:
            future.exception(timeout=60)
    first.close()
    second = start_on().wait_ready()
    found = [ask(second, prompt) for prompt in prompts]
    assert [reply.token_ids for reply in found] == expected
    assert sum(reply.num_cached for reply in found) > 0
    assert second.end() == 0, second.log
    assert "Traceback" not in second.log


def test_another_model_or_dtype_finds_nothing_in_the_same_folder(
    start_on: StartOn,
    tiny: TinyModel,
    tmp_path: Path,
    prompts: list[list[int]],
    expected: list[tuple[int, ...]],
) -> None:
    first = start_on().wait_ready()
    assert ask(first, prompts[0]) == Reply(expected[0], 0)
    assert first.end() == 0, first.log
    others: list[dict[str, object]] = [
        {"other": random_model(tiny, tmp_path / "other", 4)},
        {"dtype": "bfloat16"},
    ]
    for given in others:
        server = start_on(**given).wait_ready()
        assert ask(server, prompts[0]).num_cached == 0
        assert server.end() == 0, server.log
    again = start_on().wait_ready()
    assert ask(again, prompts[0]) == Reply(expected[0], whole_pages(prompts[0]))


def test_two_servers_share_a_folder_without_harm(
    start_on: StartOn, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    # Both write, evict and look for pages in a folder that holds a part of what they have.
    flags = ("--num-pages", "24", "--max-model-len", "256", "--disk-cache-space", "300KiB")
    pair = [start_on(*flags, "--debug-checks") for _ in range(2)]
    for server in pair:
        server.wait_ready()
    jobs = [(server, number) for number in range(len(prompts)) for server in pair] * 2
    # In a random order, so that some of the pages are still there when they are asked for.
    random.Random(9).shuffle(jobs)
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda job: ask(job[0], prompts[job[1]]), jobs))
    assert [reply.token_ids for reply in replies] == [expected[number] for _, number in jobs]
    assert sum(reply.num_cached for reply in replies) > 0
    for server in pair:
        assert server.end() == 0, server.log
        assert "Traceback" not in server.log


def test_what_one_server_wrote_the_other_reads(
    start_on: StartOn, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    first, second = start_on(), start_on()
    assert ask(first.wait_ready(), prompts[0]) == Reply(expected[0], 0)
    second.wait_ready()
    assert first.end() == 0, first.log
    assert ask(second, prompts[0]) == Reply(expected[0], whole_pages(prompts[0]))
