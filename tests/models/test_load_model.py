"""Checkpoints of every form give the same model, and broken ones say what is broken."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from mstar.engine.engine import EngineCore
from mstar.engine.output import RequestOutput
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import (
    ConfigError,
    ContextLengthError,
    ModelNotFoundError,
    UnsupportedError,
    WeightsError,
)
from mstar.models import load_model
from tests.models.families import (
    FAMILIES,
    random_prompts,
    reference_logits,
    saved,
    tiny_model,
)
from tests.models.harness import all_logits, greedy, small_deployment

PROMPTS = random_prompts(1, 19, 40)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def edit_config(folder: Path, *drop: str, **fields: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: config[key] for key in config if key not in drop}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def logits_of(path: Path, **options: Any) -> Tensor:
    return torch.cat(all_logits(load_model(str(path), **options)[0], PROMPTS))


# The same weights in other files.


@pytest.mark.parametrize("case", FAMILIES)
def test_sharded_checkpoint_is_the_whole_one(tmp_path: Path, case: str) -> None:
    folder = saved(case, tmp_path)
    model = tiny_model(case)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(folder), logits_of(tmp_path / "sharded"))


_LEAVES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_LEAVES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """Write a model as llama.cpp's converter does: other names, and some values changed."""
    config = model.config
    architecture = {"gemma3_text": "gemma3", "mistral": "llama"}.get(
        config.model_type, config.model_type
    )
    rope = config.rope_parameters
    is_gemma = architecture == "gemma3"
    main_rope = rope["full_attention"] if is_gemma else rope
    writer = GGUFWriter(path, architecture)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(main_rope["rope_theta"])
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if architecture == "llama":
        writer.add_rope_dimension_count(head_dim)
    if is_gemma or config.model_type == "mistral":
        writer.add_sliding_window(config.sliding_window)
    if main_rope["rope_type"] == "linear":
        writer.add_string(f"{architecture}.rope.scaling.type", "linear")
        writer.add_float32(f"{architecture}.rope.scaling.factor", main_rope["factor"])
    if main_rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama31_factors(main_rope, head_dim))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{n}" for n in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, kind = name.rsplit(".", 1)
        data = value.float().numpy()
        if is_gemma and module.endswith("norm"):
            data = data + 1
        if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            # The halves of a head become neighbours.
            turned = data.reshape(-1, 2, head_dim // 2, *data.shape[1:]).swapaxes(1, 2)
            data = turned.reshape(data.shape)
        if module in _TOP:
            target = _TOP[module]
        else:
            _, _, layer, leaf = module.split(".", 3)
            leaves = _LEAVES | _GEMMA_LEAVES if is_gemma else _LEAVES
            target = f"blk.{layer}.{leaves[leaf]}"
        writer.add_tensor(f"{target}.{kind}", np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama31_factors(rope: dict[str, float], dim: int) -> np.ndarray[Any, Any]:
    """Return the divisor of each frequency, by the three bands of wavelengths."""
    factors = []
    for pair in range(dim // 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (2 * pair / dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "llama-tied",
        "llama-mqa",
        "llama-wide-heads",
        "llama-biases-gguf",
        "llama-3.1-rope",
        "llama-linear-rope",
        "mistral-window",
        "qwen2",
        "qwen3",
        "gemma3-gguf",
    ],
)
def test_gguf_gives_the_references_logits(tmp_path: Path, case: str) -> None:
    model = tiny_model(case)
    write_gguf(model, tmp_path / "tiny.gguf")
    ours, dtype = load_model(str(tmp_path / "tiny.gguf"))
    assert dtype == "float32"
    found = torch.cat(all_logits(ours, PROMPTS))
    expected = torch.cat(reference_logits(model, PROMPTS))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_stored_head_counts_even_where_the_config_ties_it(tmp_path: Path) -> None:
    folder = saved("llama-tied", tmp_path)
    tied = logits_of(folder)
    head = torch.randn(101, 64, generator=torch.Generator().manual_seed(5))

    def repeat(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(folder, repeat)
    assert torch.equal(logits_of(folder), tied)

    edit_tensors(folder, lambda t: t.update({"lm_head.weight": head}))
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(theirs.lm_head.weight, head)
    expected = torch.cat(reference_logits(theirs, PROMPTS))
    torch.testing.assert_close(logits_of(folder), expected, atol=1e-4, rtol=0)
    assert (expected - tied).abs().max() > 1


def test_old_checkpoints_buffers_are_passed_over(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    expected = logits_of(folder)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert torch.equal(logits_of(folder), expected)


# Dtypes.


@pytest.mark.parametrize(
    ("stored", "fields", "drop", "expected"),
    [
        (torch.float32, {}, (), "float32"),
        (torch.bfloat16, {}, (), "bfloat16"),
        (torch.float16, {}, (), "float16"),
        (torch.bfloat16, {"torch_dtype": "float32"}, ("dtype",), "float32"),
        # Nothing is named, or nothing that models are computed in: what is stored decides.
        (torch.float32, {}, ("dtype", "torch_dtype"), "float32"),
        (torch.bfloat16, {}, ("dtype", "torch_dtype"), "bfloat16"),
        (torch.float32, {"dtype": "auto"}, (), "float32"),
        (torch.float32, {"dtype": "float64"}, (), "float32"),
    ],
)
def test_automatic_dtype_is_the_checkpoints_own(
    tmp_path: Path,
    stored: torch.dtype,
    fields: dict[str, Any],
    drop: tuple[str, ...],
    expected: str,
) -> None:
    folder = saved("llama", tmp_path, stored)
    edit_config(folder, *drop, **fields)
    assert load_model(str(folder))[1] == expected


@pytest.mark.parametrize("device", ["abacus", "cuda:4096", "meta", ""])
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device is '{device}'"):
        load_model(str(tmp_path), device=device)


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'int4'.*bfloat16"):
        load_model(str(tmp_path), dtype="int4")


@pytest.mark.parametrize("case", FAMILIES)
def test_float16_generates_what_float32_does_of_the_same_weights(tmp_path: Path, case: str) -> None:
    folder = saved(case, tmp_path, torch.float16)
    model, dtype = load_model(str(folder), dtype="float16")
    assert dtype == "float16"
    half = small_deployment(dtype="float16")
    found = torch.cat(all_logits(model, PROMPTS, deployment=half))
    assert found.dtype == torch.float16
    exact = torch.cat(reference_logits(tiny_model(case, torch.float16).float(), PROMPTS))
    assert (found.float() - exact).square().mean().sqrt() < 0.005 * exact.std()
    assert [len(answer) for answer in greedy(model, PROMPTS, 4, deployment=half)] == [4] * 3


# Limits.


def test_prompt_beyond_the_models_context_is_refused(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    edit_config(folder, max_position_embeddings=16)
    model, _ = load_model(str(folder))
    assert model.max_model_len == 16
    engine = EngineCore(model, Deployment(kv_cache_bytes=1 << 20, page_size=4))

    def request(length: int, max_tokens: int | None) -> PreparedRequest:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        return PreparedRequest(request_id="0", token_ids=[5] * length, params=params)

    for length, max_tokens in ((40, None), (16, None), (15, 2)):
        with pytest.raises(ContextLengthError, match="16"):
            engine.add_request(request(length, max_tokens))
    assert not engine.has_work
    engine.add_request(request(12, None))
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert sum(len(output.token_ids) for output in outputs) == 4
    assert outputs[-1].finish_reason == "length"


# Broken checkpoints.


@pytest.mark.parametrize(
    ("architecture", "nearest"),
    [
        ("Gemma3nForConditionalGeneration", "Gemma3ForConditionalGeneration"),
        ("Gemma2ForCausalLM", "Gemma3ForCausalLM"),
        ("Qwen3MoeForCausalLM", "Qwen3ForCausalLM"),
        ("MixtralForCausalLM", "MistralForCausalLM"),
        ("Mixtral", "MistralForCausalLM"),
    ],
)
def test_unknown_architecture_names_the_nearest(
    tmp_path: Path, architecture: str, nearest: str
) -> None:
    folder = saved("llama", tmp_path)
    edit_config(folder, architectures=[architecture])
    with pytest.raises(UnsupportedError, match=rf"{architecture}.*nearest that is: {nearest}"):
        load_model(str(folder))


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", [3]])
def test_config_without_an_architecture_is_refused(tmp_path: Path, architectures: object) -> None:
    folder = saved("llama", tmp_path)
    edit_config(folder, architectures=architectures)
    with pytest.raises(WeightsError, match="architectures"):
        load_model(str(folder))


def test_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no/such/model"):
        load_model("no/such/model")


def _drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def _put(name: str, *shape: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


@pytest.mark.parametrize(
    ("case", "edit", "message"),
    [
        ("llama", _put("model.layers.0.self_attn.q_norm.weight", 16), "no place.*q_norm"),
        ("llama", _put("model.layers.0.self_attn.q_proj.bias", 64), "no place.*q_proj.bias"),
        ("llama", _put("model.layers.2.mlp.up_proj.weight", 88, 64), "no place.*layers.2"),
        ("llama", _put("model.layers.0.mlp.up_proj.weight_scale", 1), "no place.*weight_scale"),
        ("qwen3", _put("model.vision.weight", 3), "no place in Qwen3.*vision"),
        ("llama", _drop("lm_head.weight"), "no tensor 'lm_head.weight'"),
        ("llama", _drop("model.norm.weight"), "no tensor 'model.norm.weight'"),
        ("qwen2", _drop("model.layers.1.self_attn.k_proj.bias"), "no tensor.*1.*k_proj.bias"),
        ("gemma3", _drop("model.layers.2.pre_feedforward_layernorm.weight"), "no tensor.*pre_feed"),
        (
            "llama",
            _put("model.layers.1.mlp.down_proj.weight", 64, 87),
            r"'model.layers.1.mlp.down_proj.weight' should have shape \[64, 88\].*\[64, 87\]",
        ),
        ("llama", _put("model.norm.weight", 64, 1), r"shape \[64\].*found \[64, 1\]"),
        ("llama", _put("model.embed_tokens.weight", 100, 64), r"shape \[101, 64\].*\[100, 64\]"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    tmp_path: Path, case: str, edit: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    folder = saved(case, tmp_path)
    edit_tensors(folder, edit)
    with pytest.raises(WeightsError, match=message):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "num_hidden_layers"])
def test_config_that_does_not_fit_the_tensors_is_refused(tmp_path: Path, name: str) -> None:
    folder = saved("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, **{name: config[name] * 2})
    with pytest.raises(WeightsError):
        load_model(str(folder))
    edit_config(folder, **{name: 1})
    with pytest.raises(WeightsError):
        load_model(str(folder))


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
def test_truncated_folder_is_named(tmp_path: Path, keep: int) -> None:
    folder = saved("llama", tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors.*truncated"):
        load_model(str(folder))


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightsError, match=f"{path.name}.*truncated"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("keep", [0, 3, 20, 2_000, -64])
def test_truncated_gguf_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny_model("llama"), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"tiny\.gguf"):
        load_model(str(path))
