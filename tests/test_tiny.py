"""Ten seconds, public names only: does mstar work at all?"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mstar import Completion, Engine, SamplingParams

WIDTH, HEADS, FFN, LAYERS = 32, 2, 48, 2
EOS = "<|end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights over bytes."""
    path = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: n for n, token in enumerate([*alphabet, EOS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocab),
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": FFN,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "eos_token_id": vocab[EOS],
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS})
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(vocab), WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{p}_proj.weight": (WIDTH, WIDTH) for p in "qkvo"}
        shapes |= {f"{prefix}mlp.{p}_proj.weight": (FFN, WIDTH) for p in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (WIDTH, FFN)
        for norm in ("input", "post_attention"):
            shapes[f"{prefix}{norm}_layernorm.weight"] = (WIDTH,)
    torch.manual_seed(0)
    save_file(
        {name: torch.randn(shape) for name, shape in shapes.items()}, path / "model.safetensors"
    )
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(str(folder))


def test_texts_are_answered_and_the_second_time_partly_reused(engine: Engine) -> None:
    prompts = ["The sky is blue and the grass is green.", "One, two, three"]
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    first = engine.generate(prompts, params)
    again = engine.generate(prompts, params)
    assert [len(answer.token_ids) for answer in first] == [10, 10]
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in first]
    assert [answer.num_cached_tokens for answer in again] == [32, 0]
    assert all(isinstance(answer, Completion) for answer in first)
    assert [answer.num_prompt_tokens for answer in first] == [len(text) for text in prompts]


def test_streamed_text_is_the_whole_text(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, seed=3)
    (whole,) = engine.generate("Hello", params)
    with engine.stream("Hello", params) as stream:
        text = "".join(stream)
        assert stream.completion.token_ids == whole.token_ids
    assert text == whole.text
