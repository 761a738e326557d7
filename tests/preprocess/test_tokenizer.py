import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings, strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mstar.errors import RequestError, UnsupportedError, WeightsError
from mstar.models.locate import resolve
from mstar.preprocess.tokenizer import TextTokenizer

TEXTS = [
    "",
    "Hello, world!",
    "  leading and   inner  spaces  ",
    "line\nbreaks\r\n\r\n\tand tabs",
    "naïve café — “quotes” … 1234567890",
    "汉字 漢字 かな カナ 한국어 ภาษาไทย हिन्दी العربية עברית",
    "🙂👩‍🚀🏳️‍🌈 e\u0301 é ﬁ ① \uff21",
    "def f(x):\n    return x**2  # comment",
    "<|im_start|>user\nhi<|im_end|> <bos><start_of_turn>",
    "\x00\x01\x7f\u200b\ufeff\ufffd",
    "a" * 300,
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi 🙂"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Go on <|im_end|>"},
]
FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(scope="module")
def smollm2_oracle(smollm2_path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


def test_smollm2_encodes_and_decodes_as_transformers_does(
    smollm2: TextTokenizer, smollm2_oracle: PreTrainedTokenizerBase
) -> None:
    assert smollm2.vocab_size == len(smollm2_oracle)
    assert (smollm2.bos_id, smollm2.eos_id) == (1, 2)
    for text in TEXTS:
        for special in (True, False):
            ids = smollm2.encode(text, add_special_tokens=special)
            assert ids == smollm2_oracle.encode(text, add_special_tokens=special)
            assert smollm2.decode(ids, special) == smollm2_oracle.decode(
                ids, skip_special_tokens=special
            )


@FIXTURES
@given(text=st.text())
def test_smollm2_encodes_any_text_as_transformers_does(
    smollm2: TextTokenizer, smollm2_oracle: PreTrainedTokenizerBase, text: str
) -> None:
    assert smollm2.encode(text) == smollm2_oracle.encode(text)


@pytest.mark.parametrize(
    ("chat", "arguments"),
    [
        (CHAT, {"add_generation_prompt": True}),
        (CHAT, {"add_generation_prompt": False}),
        (CHAT[1:], {"add_generation_prompt": True}),
        (CHAT[:3], {"add_generation_prompt": False, "continue_final_message": True}),
    ],
)
def test_smollm2_chats_as_transformers_does(
    smollm2: TextTokenizer,
    smollm2_oracle: PreTrainedTokenizerBase,
    chat: list[dict[str, str]],
    arguments: dict[str, Any],
) -> None:
    expected = smollm2_oracle.apply_chat_template(chat, tokenize=False, **arguments)
    assert smollm2.render_chat(chat, **arguments) == expected
    ids = smollm2_oracle.apply_chat_template(chat, return_dict=False, **arguments)
    assert smollm2.apply_chat_template(chat, **arguments) == ids


@pytest.mark.slow
def test_gemma3_encodes_and_decodes_as_transformers_does(gemma3: TextTokenizer) -> None:
    path = resolve("gemma3-270m")
    oracle = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert (gemma3.bos_id, gemma3.eos_id) == (2, 1)
    for text in TEXTS:
        for special in (True, False):
            ids = gemma3.encode(text, add_special_tokens=special)
            assert ids == oracle.encode(text, add_special_tokens=special), text
            assert gemma3.decode(ids, special) == oracle.decode(ids, skip_special_tokens=special)


def test_folder_is_read_as_transformers_reads_it(
    smollm2_oracle: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    smollm2_oracle.save_pretrained(tmp_path)
    tokenizer = TextTokenizer.load(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == smollm2_oracle.encode(text)
    assert tokenizer.render_chat(CHAT) == smollm2_oracle.apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.eos_id == 2


def test_truncation_and_padding_of_the_file_are_switched_off(
    smollm2_oracle: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    smollm2_oracle.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    file.write_text(json.dumps(content))
    assert len(TextTokenizer.load(tmp_path).encode("one two three four five")) == 5


def test_converted_tokenizer_is_kept_and_a_damaged_copy_made_again(
    smollm2_path: Path, smollm2: TextTokenizer, tmp_path: Path
) -> None:
    def load() -> TextTokenizer:
        return TextTokenizer.load(smollm2_path, cache_dir=tmp_path)

    load()
    (record,) = (tmp_path / "tokenizers").iterdir()
    whole = record.read_bytes()
    again = load()
    for damage in (b"{}\n{}", whole.replace(b"<|im_end|>", b"<|im_enD|>")):
        record.write_bytes(damage)
        again = load()
        assert record.read_bytes() == whole
    assert [again.encode(text) for text in TEXTS] == [smollm2.encode(text) for text in TEXTS]
    assert again.render_chat(CHAT) == smollm2.render_chat(CHAT)
    assert (again.bos_id, again.eos_id) == (1, 2)


def test_cache_that_cannot_be_written_is_no_error(smollm2_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    assert TextTokenizer.load(smollm2_path, cache_dir=file / "no").eos_id == 2


def test_lone_surrogates_become_replacement_characters(smollm2: TextTokenizer) -> None:
    assert smollm2.encode("a\ud800b") == smollm2.encode("a\ufffdb")


def test_broken_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="does not exist"):
        TextTokenizer.load(tmp_path / "none")
    with pytest.raises(WeightsError, match=r"has no tokenizer\.json"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WeightsError, match="not a readable tokenizer"):
        TextTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (None, WeightsError, "has no tokenizer"),
        ("bert", UnsupportedError, "tokenizer 'bert' cannot be converted"),
    ],
)
def test_gguf_without_a_known_tokenizer_is_refused(
    tmp_path: Path, kind: str | None, error: type[Exception], message: str
) -> None:
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "llama")
    if kind is not None:
        writer.add_tokenizer_model(kind)
        writer.add_token_list(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(error, match=message):
        TextTokenizer.load(path, cache_dir=tmp_path)


def _error(tokenizer: TextTokenizer, chat: list[dict[str, object]], **kwargs: bool) -> RequestError:
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat(chat, **kwargs)
    return caught.value


def test_refusals_of_a_template_are_the_requests_fault(
    tokenizers: dict[str, TextTokenizer],
) -> None:
    tokenizer = tokenizers["byte_level"]
    error = _error(tokenizer, [{"role": "bad", "content": "x"}])
    assert (error.param, error.code) == ("messages", "chat_template_error")
    assert "no bad roles" in error.message
    assert _error(tokenizer, []).code == "chat_template_error"
    error = _error(
        tokenizer, [{"role": "user"}], continue_final_message=True, add_generation_prompt=False
    )
    assert error.code == "chat_template_error"
    error = _error(tokenizer, [{"role": "a", "content": "x"}], continue_final_message=True)
    assert "exclude each other" in error.message


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[5].content }}",
        "{{ messages.no.such }}",
        "{{ 1 // 0 }}",
        "{{ messages + 1 }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__() }}",
        "{% broken",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_template_that_fails_is_told_in_one_line(
    smollm2_oracle: PreTrainedTokenizerBase, tmp_path: Path, template: str
) -> None:
    smollm2_oracle.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    error = _error(TextTokenizer.load(tmp_path), [{"role": "user", "content": "x"}])
    assert error.code == "chat_template_error"
    assert "\n" not in error.message
    assert len(error.message) < 400


def test_model_without_a_template_says_so(
    tokenizers: dict[str, TextTokenizer], tmp_path: Path
) -> None:
    backend = tokenizers["byte_level"]._backend
    whole = PreTrainedTokenizerFast(tokenizer_object=backend)
    whole.save_pretrained(tmp_path)
    tokenizer = TextTokenizer.load(tmp_path)
    assert tokenizer.chat_template is None
    error = _error(tokenizer, [{"role": "user", "content": "x"}])
    assert error.code == "chat_template_missing"
    assert "no chat template" in error.message


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "byte_fallback_strip"])
@FIXTURES
@given(text=st.text())
def test_bound_on_tokens_never_exceeds_their_number(
    tokenizers: dict[str, TextTokenizer], name: str, text: str
) -> None:
    tokenizer = tokenizers[name]
    assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


def test_bound_on_tokens_is_of_use(
    tokenizers: dict[str, TextTokenizer], smollm2: TextTokenizer
) -> None:
    assert smollm2.min_tokens("x" * 1_000_000) > 5_000
    assert tokenizers["byte_level"].min_tokens("x" * 8_000) >= 1_000
    # A word that the vocabulary lacks is one token, however long.
    assert tokenizers["word_piece"].min_tokens("x" * 8_000) == 0


def test_loading_and_using_a_tokenizer_loads_no_torch(smollm2_path: Path, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from mstar.models.locate import resolve
from mstar.preprocess.detokenizer import Detokenizer
from mstar.preprocess.prompt import PromptPreparer
from mstar.preprocess.tokenizer import TextTokenizer
resolve("smollm2-135m")
tokenizer = TextTokenizer.load({str(smollm2_path)!r}, cache_dir=Path({str(tmp_path)!r}))
ids = tokenizer.apply_chat_template([{{"role": "user", "content": "hi"}}])
assert Detokenizer(tokenizer).push(ids)
for heavy in ("torch", "fastapi", "pydantic"):
    assert heavy not in sys.modules, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
