"""Models of a tower, a bridge and a decoder: what is read of their checkpoints, and refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from mstar.engine.engine import EngineCore
from mstar.engine.resources.base import Deployment
from mstar.engine.root import root_constants
from mstar.errors import UnsupportedError, WeightsError
from mstar.models import describe_model, load_model
from mstar.models.decoder_config import decoder_config
from mstar.models.fields import Fields
from mstar.models.gemma3_vision import FAMILY as GEMMA3
from mstar.models.idefics3 import FAMILY as IDEFICS3
from mstar.models.picture_model import PictureFamily
from mstar.models.siglip import vision_config
from tests.models import vision_families as vision
from tests.models.vision_families import FAMILIES, Family, computed, picture


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return vision.load(request.param, tmp_path_factory.mktemp(request.param))


def test_model_is_described_as_it_is_loaded(family: Family) -> None:
    model, dtype = load_model(str(family.folder))
    described, _ = describe_model(str(family.folder))
    assert described.root_constants == model.root_constants is not None
    assert list(described.specs) == list(model.specs)
    assert described.graph == model.graph
    assert described.vocab_size == model.vocab_size
    assert described.max_model_len == model.max_model_len
    numbers = Deployment(dtype=dtype, num_pages=32, max_num_seqs=2, page_size=8)
    root = root_constants(described.root_constants, described.specs, numbers).root
    assert EngineCore(model, numbers).root == root is not None


LAYOUTS = {
    "gemma3": [
        {"language_model.model.": "model.language_model."}
        | {p: "model." + p for p in ("vision_tower.", "multi_modal_projector.")},
        {"vision_tower.": "vision_tower.vision_model."},
        {"language_model.model.": "model.language_model."}
        | {"vision_tower.": "model.vision_tower.vision_model."},
    ],
    "idefics3": [{"model.": ""}],
    "smolvlm": [{"model.": ""}],
}
"""How names begin that transformers writes, and how they begin in other versions."""


def test_names_of_other_versions_are_read(family: Family, tmp_path: Path) -> None:
    made = family.layout(f"a{family.mark}b", [picture(1)])
    ((_, expected),) = computed(family.ours, [made])
    tensors = load_file(family.folder / "model.safetensors")
    for renaming in LAYOUTS[family.name]:
        renamed = {}
        for name, value in tensors.items():
            old = next((old for old in renaming if name.startswith(old)), None)
            renamed[name if old is None else renaming[old] + name.removeprefix(old)] = value
        assert renamed.keys() != tensors.keys()
        save_file(renamed, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((family.folder / "config.json").read_bytes())
        model, _ = load_model(str(tmp_path))
        ((_, logits),) = computed(model, [made])
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["model.more.weight", "vision_tower.more", "model.vision_model.x"])
def test_tensors_that_nothing_uses_are_refused(family: Family, tmp_path: Path, name: str) -> None:
    tensors = load_file(family.folder / "model.safetensors")
    save_file(tensors | {name: torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((family.folder / "config.json").read_bytes())
    with pytest.raises(WeightsError, match=r"1 tensors (have no place|belong to no part)"):
        load_model(str(tmp_path))


def test_bfloat16_errs_no_more_than_the_reference_does(family: Family) -> None:
    """Against float32 arithmetic on the same rounded weights."""
    case = (f"What is that? {family.mark} Say it.", [picture(1, 60, 90)])
    model, _ = load_model(str(family.folder), dtype="bfloat16")
    ((_, found),) = computed(model, [family.layout(*case)], dtype="bfloat16")
    rounded: Any = copy.deepcopy(family.theirs)
    rounded.to(torch.bfloat16)
    inputs = {**family.inputs(*case)}
    with torch.inference_mode():
        half = {**inputs, "pixel_values": inputs["pixel_values"].to(torch.bfloat16)}
        theirs = rounded(**half, use_cache=False).logits[0].float()
        exact = rounded.float()(**inputs, use_cache=False).logits[0]
    own_error, their_error = (found.float() - exact).std(), (theirs - exact).std()
    assert own_error < 0.1 * exact.std()
    assert own_error < 1.5 * their_error


def changed_config(family: Family, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((family.folder / "config.json").read_bytes())
    for name, value in changes.items():
        part, _, field = name.partition("__")
        config[part] = {**config[part], field: value} if field else value
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config__hidden_act": "relu"}, "'relu' is not built; known are gelu"),
        ({"vision_config__num_channels": 4}, "4 channels is not built"),
        ({"vision_config__num_attention_heads": 3}, "3 heads over 32 elements"),
    ],
)
def test_towers_that_are_not_built_are_refused(
    family: Family, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed_config(family, **changes)))
    with pytest.raises(UnsupportedError, match=message):
        load_model(str(tmp_path), load_format="dummy")


def test_drawn_weights_serve_for_measurements(family: Family, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed_config(family)))
    model, _ = load_model(str(tmp_path), dtype="float32", load_format="dummy")
    ((tokens, logits),) = computed(model, [family.layout(family.mark, [picture(1)])], 3)
    assert len(tokens) == 3
    assert logits.isfinite().all()


PUBLISHED: dict[str, tuple[PictureFamily, dict[str, Any]]] = {
    "gemma3": (
        GEMMA3,
        {
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10_240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {
                "hidden_size": 1152,
                "image_size": 896,
                "intermediate_size": 4304,
                "model_type": "siglip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
    ),
    "idefics3": (
        IDEFICS3,
        {
            "text_config": {"model_type": "llama", "vocab_size": 128_259, "num_key_value_heads": 8},
            "vision_config": {"image_size": 364, "patch_size": 14},
        },
    ),
    "smolvlm": (
        IDEFICS3,
        {
            "text_config": {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9},
            "vision_config": {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16},
        },
    ),
}
"""Configs that leave much unsaid, as the first published ones do."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_config_leaves_unsaid_is_what_the_reference_takes_for_granted(name: str) -> None:
    own, config = PUBLISHED[name]
    theirs: Any = AutoConfig.for_model(name, **config)
    fields = Fields(config)
    text = own.decoder_config(fields)
    shape = decoder_config(text, text["architectures"][0])
    names = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.norm_eps,
    }
    assert {field: getattr(theirs.text_config, field) for field in names} == names
    assert theirs.tie_word_embeddings == shape.is_tied
    tower = vision_config(fields.mapping("vision_config").over(own.vision_defaults))
    seen = {
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.intermediate_size,
        "num_hidden_layers": tower.num_layers,
        "num_attention_heads": tower.num_heads,
        "image_size": tower.image_size,
        "patch_size": tower.patch_size,
        "layer_norm_eps": tower.norm_eps,
        "hidden_act": tower.activation,
    }
    assert {field: getattr(theirs.vision_config, field) for field in seen} == seen


def test_decoders_that_are_not_built_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="model_type 'qwen2'"):
        IDEFICS3.decoder_config(Fields({"text_config": {"model_type": "qwen2"}}))
    with pytest.raises(UnsupportedError, match="final_logit_softcapping"):
        GEMMA3.decoder_config(Fields({"text_config": {"final_logit_softcapping": 30.0}}))
