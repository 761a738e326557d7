"""Several processes answer as one does: the law of the process border."""

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from openai import OpenAI
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from mstar import Engine, SamplingParams
from mstar.engine.resources.base import Deployment
from tests.server.processes import ServerProcess, TinyModel

MAX_TOKENS = 24


def _random_model(tiny: TinyModel, folder: Path) -> Path:
    """Write a model of random weights with the tiny model's tokenizer."""
    shutil.copytree(tiny.folder, folder)
    vocab_size = AutoConfig.from_pretrained(tiny.folder).vocab_size
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=tiny.eos_id,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return folder


def test_a_server_generates_the_tokens_that_the_engine_does_in_process(
    tiny: TinyModel, tmp_path: Path
) -> None:
    """Greedy and seeded, all at once over sockets against one by one in this process."""
    folder = _random_model(tiny, tmp_path / "random")
    rng = random.Random(5)
    ids = list(tiny.ids.values())
    shared = rng.choices(ids, k=70)
    prompts = [shared + rng.choices(ids, k=length) for length in (1, 9, 33, 60)] * 2
    engine = Engine(str(folder), dtype="float32", deployment=Deployment(num_pages=64))
    expected = [
        engine.generate(prompt, _params(number))[0].token_ids
        for number, prompt in enumerate(prompts)
    ]
    running = ServerProcess(folder, "--dtype", "float32", "--num-pages", "64")
    try:
        running.wait_ready()

        def ask(number: int) -> tuple[int, ...]:
            with running.client() as client:
                return _ask(client, prompts[number], number)

        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(ask, range(len(prompts))))
    finally:
        running.close()
    assert answers == expected


def _params(number: int) -> SamplingParams:
    temperature = 0.0 if number % 2 else 0.8
    return SamplingParams(temperature=temperature, seed=number, max_tokens=MAX_TOKENS)


def _ask(client: OpenAI, prompt: list[int], number: int) -> tuple[int, ...]:
    answer = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=MAX_TOKENS,
        temperature=_params(number).temperature,
        seed=number,
        extra_body={"return_token_ids": True},
    )
    extra = answer.choices[0].model_extra
    assert extra is not None
    return tuple(extra["token_ids"])
