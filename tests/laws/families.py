"""Every family of models as the laws see it: a tiny model of its own layout, and what to ask it.

A new family is a function here that returns a ``Family``, under its name in ``FAMILIES``.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mstar.assistant import load as assistant_load
from mstar.catalog import load_model, load_prompting
from mstar.engine.model import Model
from mstar.engine.request import Companion, PreparedRequest, context_root
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spans import Span
from mstar.errors import ModelNotFoundError, UnsupportedError
from mstar.models.janus.config import GUIDANCE, IMAGE, OUTPUT, UNGUIDED
from mstar.models.toy_items import toy_item_model
from mstar.models.whisper.model import WhisperModel
from mstar.models.whisper.windows import WhisperOptions, prompt_ids
from mstar.preprocess.items import PromptItem, lay_out, prompt_keys
from mstar.preprocess.media.types import AudioMedia, ImageMedia, Media, VideoMedia
from mstar.preprocess.processors.base import ChatTask, Processor, TranscriptionTask
from mstar.preprocess.processors.whisper import WhisperProcessor
from tests.laws.harness import Picture, prompt
from tests.laws.watching import LOGITS, PAGE_SIZE, Ask
from tests.models import (
    families as texts,
    janus_folder,
    qwen_folder,
    vision_families,
    whisper_folder,
)

Part = list[int] | PromptItem
_GAIN = 4.0
TEXT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
PARTS_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}"
    "{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}"
    "{% endfor %} {% endfor %}"
)


@dataclass(frozen=True)
class Family:
    """One family, ready to be asked."""

    model: Model
    asks: Sequence[Ask]
    """What it is asked at once: some with items, some without, greedy and seeded."""
    at: Callable[[int, int, int], Ask]
    """A prompt of which ``before`` ids stand before its item, if it has one; ``item`` says which
    one, 1 or another of its size; the last ids follow from ``tail``: two prompts that differ in
    ``tail`` only share what stands before that."""
    shared: Callable[[int], int]
    """Tokens that two prompts of ``at`` share for sure, by ``before``."""
    budgets: Sequence[int] = (5, 16)
    """Tokens of a step, smaller than the prompts."""
    pools: Sequence[int] = (16, 20, 24)
    """Pages of KV: room for each of ``asks``, and not for all at once; where one does not fill up
    in the middle of an answer, another does."""
    longest: int = 48
    """Tokens of each with its answer, at most."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of every other deployment."""
    has_items: bool = True
    """The prompts of ``at`` have something to encode."""
    decoder: str | None = None
    """The node that computes a stream that was forked; ``None``: there are no plain streams."""
    offsets: Sequence[int] = range(PAGE_SIZE + 1)
    """What ``before`` may be."""
    atol: float = LOGITS
    folder: Path | None = None
    """Its checkpoint; ``None``: it is made in memory."""
    talks: bool = False
    """What it says may stand in its next prompt."""


def request_of(
    name: str,
    root: bytes | None,
    parts: Sequence[Part],
    *,
    fields: Mapping[str, Any] | None = None,
    **params: Any,
) -> PreparedRequest:
    """Return a request for runs of ids and items, keyed as whoever prepares prompts keys it."""
    made = lay_out(parts)
    spans = made.spans if made.inputs else []
    fields = fields or {}
    begin = context_root(root, fields.get("context", ()))
    keys = [] if begin is None else prompt_keys(made.token_ids, spans, PAGE_SIZE, begin)
    return PreparedRequest(
        request_id=name,
        token_ids=made.token_ids,
        params=SamplingParams(
            **{"temperature": 0.0, "max_tokens": 10, "ignore_eos": True} | params
        ),
        page_keys=keys,
        root=root,
        spans=spans,
        inputs=made.inputs,
        **fields,
    )


def extended(ask: Ask, ids: Sequence[int], **params: Any) -> Ask:
    """Return a request whose prompt goes on with further ids."""

    def make(name: str, root: bytes | None) -> PreparedRequest:
        made = ask(name, None)
        tokens = [*made.token_ids, *ids]
        spans = [*made.spans, Span(len(ids))] if made.spans else []
        begin = context_root(root, made.context)
        return msgspec.structs.replace(
            made,
            token_ids=tokens,
            spans=spans,
            root=root,
            page_keys=[] if begin is None else prompt_keys(tokens, spans, PAGE_SIZE, begin),
            params=replace(made.params, **params),
        )

    return make


def asking(*parts: Part, **params: Any) -> Ask:
    """Return what makes a request for runs of ids and items."""
    return lambda name, root: request_of(name, root, parts, **params)


def _ids(seed: int, count: int, limit: int = 96) -> list[int]:
    return prompt(seed, count, limit)


def _stream_asks(item: Callable[[int], Sequence[Part]], limit: int = 96) -> list[Ask]:
    """Return prompts of text, items, and both, some of them sampled."""
    return [
        asking(_ids(1, 3, limit), *item(1), _ids(2, 4, limit)),
        asking(*item(2), _ids(3, 2, limit), *item(1), _ids(4, 1, limit), temperature=1.0, seed=4),
        asking(_ids(5, 19, limit), max_tokens=14),
        asking(_ids(1, 3, limit), *item(1), _ids(6, 7, limit), temperature=0.8, top_k=20, seed=1),
        asking(*item(2), _ids(3, 2, limit), *item(1), _ids(4, 1, limit), temperature=1.0, seed=5),
        asking(_ids(7, 1, limit), max_tokens=5),
        asking(_ids(8, 6, limit), *item(3), _ids(9, 3, limit), repetition_penalty=1.2),
    ]


def _of_items(
    model: Model, item: Callable[[int], Sequence[Part]], length: int, **fields: Any
) -> Family:
    """Return a family whose items stand in the stream.

    Args:
        model: Its model.
        item: A seed to an item and the ids around it; what follows it is tail.
        length: Slots of the first item with what stands before it.
        fields: Of the family.
    """
    own: dict[str, Any] = {
        "budgets": (length + 2, 31),
        "decoder": next(iter(model.nodes)),
        "talks": True,
    }
    return Family(
        model=model,
        asks=_stream_asks(item),
        at=lambda before, tail, n: asking(_ids(10, before), *item(n), _ids(20 + tail, 6)),
        shared=lambda before: before + length,
        **own | fields,
    )


def _folder() -> Path:
    """Return a fresh folder, which goes when the tests end."""
    folder = tempfile.TemporaryDirectory(prefix="laws")
    _FOLDERS.append(folder)
    return Path(folder.name)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def _add_words(folder: Path, size: int, marks: Mapping[int, str], template: str) -> None:
    """Write a tokenizer of printable characters, one id each."""
    characters = ["<pad>", "<bos>", "<eos>", *map(chr, range(33, 127)), "Ġ", "Ċ"]
    vocab = [marks.get(at, f"<unused{at}>") for at in range(size)]
    vocab[: len(characters)] = characters
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate(vocab)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    words = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    words.add_special_tokens({"additional_special_tokens": list(marks.values())})
    words.chat_template = template
    words.save_pretrained(folder)


def _outspoken(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model whose layers outweigh its embedding: a tied one would repeat one token."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "post_" in name and model.config.model_type.startswith("gemma"):
                value.add_(_GAIN)
            elif "o_proj.weight" in name or "down_proj.weight" in name:
                value.mul_(_GAIN)
    return model


def _text(case: str) -> Family:
    folder = _folder()
    _outspoken(texts.tiny_model(case)).save_pretrained(folder)
    _add_words(folder, texts.VOCAB, {}, TEXT_TEMPLATE)
    model, _ = load_model(str(folder))
    return Family(
        model=model,
        asks=_stream_asks(lambda seed: [_ids(30 + seed, 9)]),
        at=lambda before, tail, _: asking(_ids(10, before + 8), _ids(20 + tail, 6)),
        shared=lambda before: (before + 8) // PAGE_SIZE * PAGE_SIZE,
        has_items=False,
        decoder=next(iter(model.nodes)),
        folder=folder,
        talks=True,
    )


def _toy_items() -> Family:
    lengths = {1: 6, 2: 3, 3: 9, 4: 6}
    return _of_items(
        toy_item_model(),
        lambda seed: [Picture(seed, lengths[seed], is_whole=seed != 2).item()],
        lengths[1],
        budgets=(9, 16),
    )


def _pixels(seed: int, height: int, width: int) -> Any:
    return np.asarray(vision_families.picture(seed, height, width))


def _qwen() -> Family:
    folder = _folder()
    qwen_folder.save(folder)
    names = {
        qwen_folder.IMAGE: "<|image_pad|>",
        qwen_folder.VIDEO: "<|video_pad|>",
        qwen_folder.START: "<|vision_start|>",
        qwen_folder.END: "<|vision_end|>",
    }
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    _add_words(folder, qwen_folder.VOCAB, names, PARTS_TEMPLATE.replace("MARK", mark))
    media: dict[int, Media] = {
        1: ImageMedia(_pixels(1, 16, 24)),
        2: VideoMedia(tuple(_pixels(n, 16, 16) for n in range(3)), 4.0),
        3: ImageMedia(_pixels(3, 24, 24)),
        4: ImageMedia(_pixels(4, 16, 24)),
    }
    items = _expanded(folder, media)

    def around(seed: int) -> list[Part]:
        return [[qwen_folder.START], *items[seed], [qwen_folder.END]]

    model, _ = load_model(str(folder))
    # The first has six slots; the mark before it is shared, that behind it only where it fills.
    return _of_items(model, around, 7, budgets=(11, 31), folder=folder)


def _expanded(folder: Path, media: Mapping[int, Media]) -> dict[int, list[Part]]:
    """Return what a checkpoint's processor makes of media, its texts as ids."""
    tokenizer, processor = load_prompting(str(folder))
    assert isinstance(processor, Processor)
    found: dict[int, list[Part]] = {}
    for seed, one in media.items():
        parts = processor.expand(one)
        found[seed] = [
            tokenizer.encode(part, add_special_tokens=False) if isinstance(part, str) else part
            for part in parts
        ]
    return found


def _vision(name: str) -> Family:
    folder = _folder()
    vision_families.save(name, folder)
    mark = "<start_of_image>" if name == "gemma3" else "<image>"
    (folder / "chat_template.jinja").write_text(PARTS_TEMPLATE.replace("MARK", mark))
    media = {seed: ImageMedia(_pixels(seed, 42, 42), "low") for seed in (1, 2, 3, 4)}
    items = _expanded(folder, media)
    before, _ = _edges(items[1])
    model, _ = load_model(str(folder))
    return _of_items(
        model,
        lambda seed: items[seed],
        before + vision_families.LENGTH,
        folder=folder,
    )


def _edges(parts: Sequence[Part]) -> tuple[int, int]:
    """Return the ids before and behind the first item."""
    at = next(n for n, part in enumerate(parts) if isinstance(part, PromptItem))
    before, behind = parts[:at], parts[at + 1 :]
    counts = [sum(len(p) for p in side if isinstance(p, list)) for side in (before, behind)]
    return counts[0], counts[1]


@cache
def _janus() -> tuple[Path, Model]:
    folder = _folder()
    janus_folder.save(folder)
    return folder, load_model(str(folder))[0]


def _janus_looks() -> Family:
    folder, model = _janus()
    media = {seed: ImageMedia(_pixels(seed, 32, 32)) for seed in (1, 2, 3, 4)}
    items = _expanded(folder, media)
    before, _ = _edges(items[1])
    return _of_items(
        model,
        lambda seed: items[seed],
        before + janus_folder.SLOTS,
        longest=64,
        decoder="decoder",
        folder=folder,
    )


def _janus_paints() -> Family:
    _, model = _janus()

    def painting(ids: Sequence[int], guidance: float = 3.0, **params: Any) -> Ask:
        whole = [janus_folder.BOS, *(token + 6 for token in ids), janus_folder.BEGIN]
        free = [janus_folder.BOS, *[janus_folder.PAD] * len(ids), janus_folder.BEGIN]

        def make(name: str, root: bytes | None) -> PreparedRequest:
            keys = [] if root is None else prompt_keys(free, (), PAGE_SIZE, root)
            fields = {
                "companions": [Companion(UNGUIDED, free, keys)],
                "options": {OUTPUT: IMAGE, GUIDANCE: guidance},
            }
            own = {"max_tokens": janus_folder.SLOTS, "ignore_eos": False} | params
            return request_of(name, root, [whole], fields=fields, **own)

        return make

    return Family(
        model=model,
        asks=[
            painting(_ids(1, 7)),
            painting(_ids(1, 7), 5.0),
            painting(_ids(2, 16), temperature=1.0, seed=2),
            asking(_ids(3, 12)),
            painting(_ids(2, 13), 2.0, temperature=1.0, top_k=9, seed=3),
        ],
        at=lambda before, tail, _: painting([*_ids(10, before + 8), *_ids(20 + tail, 4)]),
        shared=lambda before: (before + 9) // PAGE_SIZE * PAGE_SIZE,
        pools=(24, 30),
        longest=64,
        has_items=False,
    )


def _whisper() -> Family:
    folder = _folder()
    whisper_folder.save(folder)
    model, _ = load_model(str(folder))
    _, processor = load_prompting(str(folder))
    assert isinstance(model, WhisperModel)
    assert isinstance(processor, WhisperProcessor)

    def hearing(
        seed: int,
        num_frames: int = whisper_folder.FRAMES,
        *,
        max_tokens: int | None = 10,
        temperature: float = 0.0,
        **options: Any,
    ) -> Ask:
        noise = np.random.default_rng(seed).standard_normal(160 * num_frames)
        samples = (0.1 * noise).astype(np.float32)
        audio = AudioMedia(samples, processor.rate)
        draft = processor.transcription(audio, TranscriptionTask(fallback=False))
        own = msgspec.convert({**draft.options, **options}, WhisperOptions)
        ids = prompt_ids(own, model.tokens, whisper_folder.POSITIONS)
        fields = {"context": list(draft.context), "options": msgspec.structs.asdict(own)}
        return lambda name, root: request_of(
            name,
            root,
            [ids],
            fields=fields,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=False,
        )

    timed = {"timestamps": True, "follow": True}
    known = {"language": whisper_folder.ENGLISH}
    return Family(
        model=model,
        asks=[
            hearing(1, 130, **timed),
            hearing(2, 90, max_tokens=30, **timed, **known),
            hearing(3, language=whisper_folder.GERMAN, translate=True, previous=[5, 6, 7]),
            hearing(4),
            hearing(5, 120, temperature=0.8, timestamps=True),
            hearing(6, 30, max_tokens=None),
            hearing(4, previous=_ids(4, 12, 60)),
            # Drawn weights are unsure of all that they write.
            hearing(7, 100, fallback=True, **timed, **known),
        ],
        at=lambda before, tail, item: hearing(
            8 + item, previous=[*_ids(10, before + 8, 60), *_ids(20 + tail, 3, 60)], **known
        ),
        shared=lambda before: (before + 9) // PAGE_SIZE * PAGE_SIZE,
        budgets=(whisper_folder.SLOTS, 33),
        pools=(14, 18),
        decoder="decoder",
        folder=folder,
    )


def _assistant() -> Family:
    soxr = pytest.importorskip("soxr")
    try:
        # The laws are about how the parts go together, for which the smallest listener does.
        with patch.object(assistant_load, "LISTENER", "whisper-tiny.en"):
            model, _ = load_model("voice", dtype="float32")
            _, processor = load_prompting("voice")
    except (ModelNotFoundError, UnsupportedError) as error:
        pytest.skip(str(error))
    desk: Any = processor
    voice: Any = model.speaker.voice  # type: ignore[attr-defined]

    def said(text: str) -> AudioMedia:
        samples = soxr.resample(voice.speak(text), voice.rate, desk.rate)
        return AudioMedia(samples.astype(np.float32), desk.rate)

    def chat(content: Any, media: Sequence[Media] = (), *, is_spoken: bool = False) -> Ask:
        modalities = frozenset({"text", "audio"} if is_spoken else {"text"})
        messages = [{"role": "user", "content": content}]
        draft = desk.chat(messages, media, ChatTask(modalities=modalities))
        fields = {"context": list(draft.context), "options": dict(draft.options)}
        return asking(*draft.parts, fields=fields, max_tokens=14, ignore_eos=False)

    def hearing(text: str, before: str = "", **options: Any) -> Ask:
        parts = [{"type": "text", "text": before}] * bool(before) + [{"type": "audio"}]
        return chat(parts, [said(text)], **options)

    return Family(
        model=model,
        asks=[
            hearing("What is the capital of France?", is_spoken=True),
            chat("Tell me about spiders.", is_spoken=True),
            hearing("How many legs does a spider have?"),
        ],
        at=lambda before, tail, item: hearing(
            "Name a colour." if item == 1 else "Name a number.",
            "So. " * before + f"Number {tail}.",
        ),
        # What stands before the question: the words of the template.
        shared=lambda before: PAGE_SIZE,
        budgets=(1500,),
        pools=(15, 22),
        longest=56,
        # Two windows of a recording fit into a step.
        numbers={"max_model_len": 256, "max_num_batched_tokens": 3000},
        offsets=(1,),
        atol=2e-3,
    )


PICTURES = ("qwen2.5-vl", "gemma3-vision", "idefics3", "smolvlm", "janus-looks")
"""Families of chats with pictures."""
TEXTS = ("llama", "mistral-window", "qwen2", "qwen3-biases", "smollm3", "gemma3")
FAMILIES: dict[str, Callable[[], Family]] = {
    **{case: partial(_text, case) for case in TEXTS},
    "toy_items": _toy_items,
    "qwen2.5-vl": _qwen,
    "gemma3-vision": partial(_vision, "gemma3"),
    "idefics3": partial(_vision, "idefics3"),
    "smolvlm": partial(_vision, "smolvlm"),
    "janus-looks": _janus_looks,
    "janus-paints": _janus_paints,
    "whisper": _whisper,
    "assistant": _assistant,
}
SLOW = frozenset({"assistant"})
"""Those of real weights."""


@cache
def family_of(name: str) -> Family:
    """Return a family, made once."""
    return FAMILIES[name]()
