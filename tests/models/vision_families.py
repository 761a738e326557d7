"""Tiny checkpoints that take pictures, whole folders, made and computed by transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.engine import EngineCore
from mstar.engine.model import Model
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.step import NodeStep
from mstar.models import load_model
from mstar.models.decoder import DecoderNode
from mstar.preprocess.expansion import weave
from mstar.preprocess.items import Layout, lay_out
from mstar.preprocess.media.types import ImageMedia
from mstar.preprocess.processors import load_processor
from mstar.preprocess.processors.base import Processor
from mstar.preprocess.tokenizer import TextTokenizer

EDGE = 42
"""Height and width of a picture or a tile in pixels: 6 by 6 patches, 9 slots."""
LENGTH = 9
GAIN = 4.0
"""How far the layers' outputs outweigh the embedding: a tied model would repeat its last token."""
_MARKS = {
    "gemma3": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    "idefics3": [
        "<image>",
        "<fake_token_around_image>",
        "<global-img>",
        "<end_of_utterance>",
        *(f"<row_{r + 1}_col_{c + 1}>" for r in range(6) for c in range(6)),
    ],
}
_MARKS["smolvlm"] = _MARKS["idefics3"]
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": EDGE,
    "patch_size": 7,
    "layer_norm_eps": 1e-3,
}
FAMILIES = ("gemma3", "idefics3", "smolvlm")


def tiny_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, in which newlines join as they do in the families' own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = ["<pad>", "<bos>", "<eos>", *alphabet, "ĊĊ", "ĊĊĊ"]
    backend = Tokenizer(
        models.BPE({text: i for i, text in enumerate(vocab)}, [("Ċ", "Ċ"), ("ĊĊ", "Ċ")])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    marks = _MARKS[family]
    named = {}
    if family == "gemma3":
        named = dict(zip(("boi_token", "eoi_token", "image_token"), marks, strict=True))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=named,
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [mark for mark in marks if mark not in named.values()]}
    )
    return tokenizer


def _config(family: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    text = _TEXT | {"vocab_size": len(tokenizer)}
    ids: Any = tokenizer.convert_tokens_to_ids(_MARKS[family])
    if family == "gemma3":
        rope = {"rope_type": "default"}
        return Gemma3Config(
            text_config=text
            | {
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "head_dim": 32,
                # Shorter than a picture.
                "sliding_window": 7,
                "query_pre_attn_scalar": 20,
                "rope_parameters": {
                    "full_attention": rope | {"rope_theta": 500.0},
                    "sliding_attention": rope | {"rope_theta": 40.0},
                },
            },
            vision_config=_VISION | {"vision_use_head": False},
            mm_tokens_per_image=LENGTH,
            boi_token_index=ids[0],
            eoi_token_index=ids[1],
            image_token_index=ids[2],
        )
    kind = Idefics3Config if family == "idefics3" else SmolVLMConfig
    return kind(
        text_config=text | {"model_type": "llama"},
        vision_config=_VISION,
        image_token_id=ids[0],
        scale_factor=2,
        tie_word_embeddings=family == "smolvlm",
    )


_MODELS = {
    "gemma3": Gemma3ForConditionalGeneration,
    "idefics3": Idefics3ForConditionalGeneration,
    "smolvlm": SmolVLMForConditionalGeneration,
}


def _processor(family: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    if family == "gemma3":
        size = {"height": EDGE, "width": EDGE}
        return Gemma3Processor(Gemma3ImageProcessorPil(size=size), tokenizer, image_seq_length=9)
    kind = Idefics3ImageProcessorPil if family == "idefics3" else SmolVLMImageProcessorPil
    pictures = kind(size={"longest_edge": 3 * EDGE}, max_image_size={"longest_edge": EDGE})
    # SmolVLM's own needs a package for the words of its films; of pictures it writes the same.
    return Idefics3Processor(pictures, tokenizer, image_seq_len=LENGTH)


def _draw(model: PreTrainedModel) -> None:
    """Give a model weights that make every part of it matter."""
    generator = torch.Generator().manual_seed(0)
    is_gemma = isinstance(model, Gemma3ForConditionalGeneration)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            is_text = "vision" not in name
            if "norm" in name and name.endswith("weight"):
                factor = GAIN if "post_" in name and is_gemma and is_text else 1.0
                value.copy_(0.2 * noise + factor - int(is_gemma and is_text))
            elif value.ndim == 1:
                value.copy_(0.3 * noise)
            elif "position_embedding" in name:
                value.copy_(noise)
            else:
                gain = 2.0 if "q_proj" in name else 1.0
                if is_text and ("down_proj" in name or "o_proj" in name):
                    gain = GAIN
                value.copy_(gain * noise * value[0].numel() ** -0.5)
    model.eval()


@dataclass(frozen=True)
class Family:
    """The same weights and the same processing here and there."""

    name: str
    folder: Path
    theirs: PreTrainedModel
    their_processor: Any
    ours: Model
    processor: Processor
    tokenizer: TextTokenizer

    @property
    def mark(self) -> str:
        """What stands for a picture in a text."""
        return self.processor.placeholder["image"]

    def layout(self, text: str, pictures: Sequence[Image.Image], detail: Any = None) -> Layout:
        """Return the prompt as we lay it out."""
        media = [ImageMedia(np.asarray(picture), detail) for picture in pictures]
        parts = weave(
            text,
            self.processor.placeholder,
            ["image"] * len(media),
            [self.processor.expand(one) for one in media],
            lambda piece: self.tokenizer.encode(piece, add_special_tokens=False),
        )
        made = lay_out(cast("Any", parts))
        return made if pictures else Layout(made.token_ids, [], [])

    def inputs(
        self, text: str, pictures: Sequence[Image.Image], **options: Any
    ) -> Mapping[str, Any]:
        """Return the prompt as transformers prepares it."""
        found: Mapping[str, Any] = self.their_processor(
            text=text, images=list(pictures) or None, return_tensors="pt", **options
        )
        return found

    def their_logits(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return transformers' logits of every position."""
        with torch.inference_mode():
            logits: Tensor = self.theirs(**inputs, use_cache=False).logits[0]
        return logits

    def their_tokens(self, inputs: Mapping[str, Any], count: int) -> list[int]:
        """Return transformers' greedy continuation."""
        with torch.inference_mode():
            out: Any = self.theirs.generate(  # type: ignore[operator]
                **inputs, max_new_tokens=count, do_sample=False
            )
        tokens: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens


def save(family: str, folder: Path) -> PreTrainedModel:
    """Write a whole checkpoint into ``folder`` and return its model."""
    tokenizer = tiny_tokenizer(family)
    kind: Any = _MODELS[family]
    model = kind._from_config(_config(family, tokenizer), attn_implementation="eager")
    _draw(model)
    model.save_pretrained(folder)
    # Both are to go on behind the end token.
    model.generation_config.eos_token_id = None
    _processor(family, tokenizer).save_pretrained(folder)
    return cast("PreTrainedModel", model)


def load(family: str, folder: Path) -> Family:
    """Write a checkpoint and load it here and there."""
    theirs = save(family, folder)
    ours, dtype = load_model(str(folder))
    assert dtype == "float32"
    tokenizer = TextTokenizer.load(folder)
    processor = load_processor(folder, tokenizer)
    assert processor is not None
    their_processor = _processor(family, tiny_tokenizer(family))
    return Family(family, folder, theirs, their_processor, ours, processor, tokenizer)


def picture(seed: int, height: int = EDGE, width: int = EDGE) -> Image.Image:
    """Return a picture of soft colours with some noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = smooth + rng.integers(-20, 21, smooth.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


class AllLogits(Node):
    """A decoder that keeps the logits behind every token."""

    def __init__(self, inner: DecoderNode) -> None:
        self._inner = inner
        self.logits: dict[str, dict[int, Tensor]] = {}
        """By request and position."""

    def declare(self, batch: Batch) -> NodeStep:
        return self._inner.declare(batch)

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        x = self._inner.embed(torch.from_numpy(batch.token_ids()), batch, plans)
        found = (plans[key] for key in ("kv", "position", "attention"))
        rows = self._inner.logits(self._inner.hidden(x, *found))
        spans = [segment.span for segment in batch.segments]
        for request, own in zip(batch.requests, rows.split(spans), strict=True):
            kept = self.logits.setdefault(request.request_id, {})
            kept.update(enumerate(own, request.num_computed_tokens))
        if not batch.yielding:
            return NodeOutput(token_ids=())
        sampled = plans["sampler"].sample(rows[torch.from_numpy(batch.last_rows())])
        return NodeOutput(token_ids=sampled.token_ids.tolist())


def computed(
    model: Model, layouts: Sequence[Layout], max_tokens: int = 1, **numbers: Any
) -> list[tuple[list[int], Tensor]]:
    """Return each prompt's greedy continuation, and the logits of its every position.

    Args:
        model: Loaded here; left as it was.
        layouts: The prompts.
        max_tokens: Of each continuation.
        numbers: Of the deployment.
    """
    name, node = next(iter(model.nodes.items()))
    # The laws' benches leave their own recorder around it.
    inner = getattr(node, "_inner", node)
    assert isinstance(inner, DecoderNode)
    recorder = AllLogits(inner)
    nodes, model.nodes = model.nodes, {**model.nodes, name: recorder}
    defaults = {"max_num_seqs": 8, "page_size": 4, "num_pages": 400, "max_model_len": 512}
    engine = EngineCore(
        model, Deployment(**(defaults | {"enable_prefix_caching": False} | numbers))
    )
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for index, made in enumerate(layouts):
        request = PreparedRequest(
            request_id=str(index),
            token_ids=made.token_ids,
            params=params,
            spans=made.spans,
            inputs=made.inputs,
        )
        engine.add_request(request)
        tokens[str(index)] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
        engine.check()
    model.nodes = nodes
    found = {key: [rows[at] for at in sorted(rows)] for key, rows in recorder.logits.items()}
    return [(own, torch.stack(found[key])) for key, own in tokens.items()]


Case = tuple[str, list[Image.Image]]
"""A text and the pictures that its placeholders stand for."""


def assert_logits(family: Family, cases: Sequence[Case], **numbers: Any) -> None:
    """Assert that the logits of every position are the reference's, all prompts side by side."""
    found = computed(family.ours, [family.layout(*case) for case in cases], **numbers)
    for case, (_, logits) in zip(cases, found, strict=True):
        expected = family.their_logits(family.inputs(*case))
        assert expected.std() > 0.5, "logits so close together show nothing"
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)


def assert_greedy(family: Family, cases: Sequence[Case]) -> None:
    """Assert that 64 tokens are those which the reference generates."""
    found = computed(family.ours, [family.layout(*case) for case in cases], max_tokens=64)
    for case, (tokens, _) in zip(cases, found, strict=True):
        assert tokens == family.their_tokens(family.inputs(*case), 64)
    seen = {token for tokens, _ in found for token in tokens}
    assert len(seen) > 5 * len(cases), "models that repeat themselves show nothing"


def assert_layout(
    family: Family,
    text: str,
    pictures: Sequence[Image.Image],
    slot: str,
    *,
    detail: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Assert that ids and pixel values are those of the reference's processor.

    Args:
        family: Here and there.
        text: With placeholders.
        pictures: For those.
        slot: Text of the reference's id at the slots of pictures.
        detail: How closely ours is asked to look.
        options: What the reference's processor is told.
    """
    made = family.layout(text, pictures, detail)
    theirs = family.inputs(text, pictures, **(options or {}))
    slot_id: Any = tiny_tokenizer(family.name).convert_tokens_to_ids(slot)
    ids, at = list(made.token_ids), 0
    for span in made.spans:
        if span.digest is not None:
            ids[at : at + span.length] = [slot_id] * span.length
        at += span.length
    assert ids == theirs["input_ids"][0].tolist()
    if not pictures:
        return
    expected = theirs["pixel_values"].flatten(0, -4).numpy()
    assert len(made.inputs) == len(expected)
    for inputs, values in zip(made.inputs, expected, strict=True):
        pixels = np.frombuffer(inputs["pixels"].data, np.uint8).reshape(inputs["pixels"].shape)
        table = np.frombuffer(inputs["values"].data, np.float32).reshape(3, 256)
        np.testing.assert_array_equal(np.stack([table[c][pixels[c]] for c in range(3)]), values)
