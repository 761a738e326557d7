"""A tiny Janus, a whole folder made by transformers, and an engine that keeps what it chose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusVisionConfig,
    JanusVQVAEConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil
from transformers.models.janus.processing_janus import JanusProcessor as TheirProcessor

from mstar.engine.array import to_numpy
from mstar.engine.batch import Batch, Node, NodeOutput
from mstar.engine.engine import EngineCore
from mstar.engine.model import Model
from mstar.engine.output import ErrorInfo, FinishReason
from mstar.engine.request import Companion, PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.step import NodeStep
from mstar.models.janus.config import GUIDANCE, IMAGE, OUTPUT, UNGUIDED
from mstar.preprocess.items import Layout, lay_out, prompt_keys
from mstar.preprocess.prompt import request_root
from tests.laws.watching import KeepingSampler

SIZE, PATCH, SLOTS = 32, 8, 16
"""Pixels along a side of an image that is looked at and of its patches; slots of an image, and
codes of one that is made."""
MADE = 8
"""Pixels along a side of an image that is made."""
CODES = 48
BOS, EOS, PAD, BEGIN, END, HOLE = range(6)
SPECIAL = ["<bos>", "<eos>", "<pad>", "<begin_of_image>", "<end_of_image>", "<image_placeholder>"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}"
    "{% if part.type == 'image' %}<image_placeholder>\n{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}\n\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single=["<bos>", "$A"], special_tokens=[("<bos>", BOS)]
    )
    names = ("boi_token", "eoi_token", "image_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens=dict(zip(names, SPECIAL[3:], strict=True)),
    )


def _config(vocab_size: int, is_tied: bool) -> JanusConfig:
    return JanusConfig(
        text_config=LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=88,
            max_position_embeddings=512,
            rms_norm_eps=1e-3,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
        ),
        vision_config=JanusVisionConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=SIZE,
            patch_size=PATCH,
            mlp_ratio=1.5,
            layer_norm_eps=1e-3,
            projection_dim=64,
            num_image_tokens=SLOTS,
        ),
        vq_config=JanusVQVAEConfig(
            num_embeddings=CODES,
            latent_channels=12,
            base_channels=32,
            channel_multiplier=[1, 2],
            num_res_blocks=1,
            projection_dim=64,
            image_token_embed_dim=64,
        ),
        image_token_id=HOLE,
        tie_word_embeddings=is_tied,
    )


def _draw(model: JanusForConditionalGeneration) -> None:
    """Give a model weights that make every part of it matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.ndim == 1:
                value.copy_(0.1 * noise + ("norm" in name and name.endswith("weight")))
            elif "embed_tokens" in name or "embedding" in name:
                value.copy_(noise)
            else:
                # Codes would soon repeat themselves if what stands before hardly counted.
                gain = 3.0 if "language_model" in name and "self_attn" in name else 1.0
                value.copy_(gain * noise * value[0].numel() ** -0.5)


def their_processor(**options: Any) -> TheirProcessor:
    """Return the processing of the tiny checkpoint, as transformers has it."""
    images = JanusImageProcessorPil(
        size={"height": SIZE, "width": SIZE}, image_mean=[0.5, 0.4, 0.6], image_std=[0.5, 0.3, 0.4]
    )
    return TheirProcessor(
        images, tokenizer(), chat_template=TEMPLATE, num_image_tokens=SLOTS, **options
    )


def save(folder: Path, *, is_tied: bool = False, **options: Any) -> JanusForConditionalGeneration:
    """Write a whole checkpoint into ``folder`` and return its model.

    Args:
        folder: Where to.
        is_tied: The head of text is the embedding.
        options: Of the processor.
    """
    words = tokenizer()
    model = JanusForConditionalGeneration._from_config(
        _config(len(words), is_tied), attn_implementation="eager"
    ).eval()
    _draw(model)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        guidance_scale=3.0,
        generation_kwargs={"boi_token_id": BEGIN},
    )
    assert isinstance(model, JanusForConditionalGeneration)
    model.save_pretrained(folder)
    their_processor(**options).save_pretrained(folder)
    return model


class Recorder(Node):
    """A node that keeps what it chose, and from which logits."""

    def __init__(self, inner: Node, sampler_key: str) -> None:
        self.inner = inner
        self._key = sampler_key
        self.tokens: dict[str, list[int]] = {}
        self.logits: dict[str, list[Tensor]] = {}
        self.sizes: list[int] = []
        """Requests of each batch."""

    def declare(self, batch: Batch) -> NodeStep:
        return self.inner.declare(batch)

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        kept: list[Tensor] = []
        own = {
            **plans,
            self._key: KeepingSampler(plans[self._key], lambda logits: kept.append(logits.clone())),
        }
        output = self.inner.forward(batch, own)
        self.sizes.append(len(batch.requests))
        for place, index in enumerate(batch.yielding):
            name = batch.requests[index].request_id
            self.tokens.setdefault(name, []).append(output.token_ids[place])
            self.logits.setdefault(name, []).append(kept[0][place])
        return output


@dataclass
class Answer:
    """All that one request got."""

    tokens: list[int] = field(default_factory=list)
    """As chosen, those that are not told included."""
    told: list[int] = field(default_factory=list)
    images: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    error: ErrorInfo | None = None
    logits: Tensor = field(default_factory=lambda: torch.zeros(0))


class Studio:
    """An engine on a Janus, its books checked after every step.

    Args:
        model: Left as it was.
        numbers: Of the deployment.
    """

    def __init__(self, model: Model, **numbers: Any) -> None:
        self._recorders = {
            name: Recorder(getattr(model.nodes[name], "inner", model.nodes[name]), key)
            for name, key in (("decoder", "sampler"), ("painter", "image_sampler"))
        }
        model.nodes = {**model.nodes, **self._recorders}
        defaults = {"max_num_seqs": 8, "page_size": 4, "num_pages": 400, "max_model_len": 256}
        self.engine = EngineCore(model, Deployment(**(defaults | numbers)))
        self.answers: dict[str, Answer] = {}

    @property
    def painter(self) -> Recorder:
        return self._recorders["painter"]

    def _keys(self, ids: Sequence[int], made: Layout | None = None) -> dict[str, Any]:
        root = request_root(self.engine.root, None)
        if root is None:
            return {}
        spans = made.spans if made is not None else []
        return {"page_keys": prompt_keys(ids, spans, self.engine.deployment.page_size, root)}

    def write(self, name: str, parts: Sequence[Any], **params: Any) -> None:
        """Add a request for text; its prompt is runs of ids and items."""
        made = lay_out(parts)
        wanted = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | params
        request = PreparedRequest(
            request_id=name,
            token_ids=made.token_ids,
            params=SamplingParams(**wanted),
            root=request_root(self.engine.root, None),
            spans=made.spans,
            inputs=made.inputs,
            **self._keys(made.token_ids, made),
        )
        self.engine.add_request(request)
        self.answers[name] = Answer()

    def paint(self, name: str, ids: Sequence[int], guidance: float = 3.0, **params: Any) -> None:
        """Add a request for an image."""
        self.engine.add_request(self.painting(name, ids, guidance, **params))
        self.answers[name] = Answer()

    def painting(
        self, name: str, ids: Sequence[int], guidance: float = 3.0, **params: Any
    ) -> PreparedRequest:
        """Return a request for an image."""
        free = [token if token in (BOS, BEGIN) else PAD for token in ids]
        wanted = {"temperature": 0.0, "max_tokens": SLOTS} | params
        return PreparedRequest(
            request_id=name,
            token_ids=list(ids),
            params=SamplingParams(**wanted),
            root=request_root(self.engine.root, None),
            companions=[Companion(UNGUIDED, free, **self._keys(free))],
            options={OUTPUT: IMAGE, GUIDANCE: guidance},
            **self._keys(ids),
        )

    def step(self) -> None:
        outputs = self.engine.step()
        self.engine.check()
        for output in outputs:
            answer = self.answers[output.request_id]
            assert answer.finish_reason is None, f"{output} after the end"
            answer.told += output.token_ids
            for piece in output.emitted:
                assert piece.name == "image"
                assert piece.array is not None
                answer.images.append(to_numpy(piece.array))
            answer.finish_reason = output.finish_reason
            answer.num_cached_tokens = output.num_cached_tokens
            answer.error = output.error

    def drain(self, max_steps: int = 3000) -> dict[str, Answer]:
        """Run to the end; returns all answers so far, and forgets them."""
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < max_steps, f"no end after {steps} steps: {self.engine.stats()}"
        assert self.engine.stats().num_pages_used == 0, self.engine.stats()
        for name, answer in self.answers.items():
            for recorder in self._recorders.values():
                answer.tokens += recorder.tokens.pop(name, [])
                if rows := recorder.logits.pop(name, []):
                    answer.logits = torch.stack(rows)
        answers, self.answers = self.answers, {}
        return answers
