"""Text to token ids and back, chat templates included; loads no torch.

What a user types into a message may spell a control token and then becomes one, as everywhere with
these tokenizers: templates mark turns in the same text.
"""

import ctypes
import gc
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import jinja2
import numpy as np
from tokenizers import Tokenizer, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from mstar.errors import RequestError, UnsupportedError, WeightsError
from mstar.models.files import atomic_write, default_cache_dir, file_sha256
from mstar.models.gguf import GGUFFile
from mstar.preprocess.pieces import Joining, Pieces

_LOG = logging.getLogger(__name__)
_GGUF_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
_CACHE_FORMAT = "1"
# A template is a foreign program; these are what running one can raise.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class TextTokenizer:
    """A tokenizer and its chat template.

    Args:
        backend: What encodes and decodes.
        template: Renders chats; only its template and its names of special tokens are used.
    """

    def __init__(self, backend: Tokenizer, template: PreTrainedTokenizerFast) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template = template
        self.pieces = Pieces(backend)
        """The bytes behind each id."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Tokens it knows; a model may have more rows than that."""
        self.bos_id = self._special_id("bos_token")
        self.eos_id = self._special_id("eos_token")

    @classmethod
    def load(cls, path: Path | str, *, cache_dir: Path | None = None) -> Self:
        """Load the tokenizer of a Hugging Face folder or a GGUF file.

        Args:
            path: The folder or file.
            cache_dir: Where converted tokenizers are kept, since conversion takes seconds for a
                large vocabulary; ``None``: the default one.

        Raises:
            WeightsError: If there is no tokenizer, or it is broken.
            UnsupportedError: If a GGUF file has a kind of tokenizer that is not known here.
        """
        path = Path(path)
        if not path.exists():
            raise WeightsError(f"{path} does not exist")
        try:
            backend, template = _load_folder(path) if path.is_dir() else _load_gguf(path, cache_dir)
        except OSError as error:
            raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
        _give_back_memory()
        return cls(backend, template)

    @classmethod
    def empty(cls) -> Self:
        """Return a tokenizer without a vocabulary, for models that have no tokens."""
        return cls(Tokenizer(BPE()), _template({}))

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        """The template, or several by name; ``None`` where the model has none."""
        template: str | Mapping[str, str] | None = self._template.chat_template
        return template

    @cached_property
    def control_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that a text is cut at first, by their text."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items()}

    def min_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least, without encoding it; 0 if unknown."""
        if self._shrinkage is None:
            return 0
        return len(text.encode("utf-8", "replace")) // (self._max_token_nbytes * self._shrinkage)

    @cached_property
    def _max_token_nbytes(self) -> int:
        return max(len(text.encode()) for text in self._backend.get_vocab(with_added_tokens=True))

    @cached_property
    def _shrinkage(self) -> int | None:
        """How many times fewer bytes than a text its tokens may have; unlimited: ``None``."""
        if self.pieces.joining is Joining.OTHER:
            return None
        normalizer = self._backend.normalizer
        if normalizer is None:
            return 1
        step: dict[str, Any] = json.loads(normalizer.__getstate__())
        steps = step["normalizers"] if step["type"] == "Sequence" else [step]
        kinds = {step["type"] for step in steps}
        if kinds <= {"Replace", "Prepend"}:
            return 1
        # Composition makes at most one character of four bytes' worth for each byte it leaves.
        return 4 if kinds <= {"Replace", "Prepend", "NFC", "NFKC"} else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Args:
            text: Anything; a lone surrogate is taken as U+FFFD.
            add_special_tokens: Begin (and end) as the model wants a text to.
        """
        try:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; unknown ids are passed over."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token: int) -> str:
        """Return one token's text by itself; parts of characters are U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Return one token's bytes: those of an output's tokens together are its text in UTF-8."""
        return self.pieces[token][0]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return a chat as the model's template writes it.

        Args:
            messages: Mappings with a role and usually a content.
            add_generation_prompt: End with the beginning of an answer.
            continue_final_message: End inside the last message, for the model to go on.
            kwargs: Further variables of the template, as ``tools`` and ``documents``.

        Raises:
            RequestError: If the model has no template, or the template refuses the messages.
        """
        if self._template.chat_template is None:
            raise RequestError(
                "this model has no chat template; send a prompt to the completions route instead",
                param="messages",
                code="chat_template_missing",
            )
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other; set one of "
                "them to false",
                param="continue_final_message",
            )
        try:
            text = self._template.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(
                f"the model's chat template refuses these messages: {reason:.300}",
                param="messages",
                code="chat_template_error",
            ) from error
        assert isinstance(text, str), type(text)
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> list[int]:
        """Return the ids of a chat; arguments and errors are those of :meth:`render_chat`."""
        # The template has written the special tokens already.
        return self.encode(self.render_chat(messages, **kwargs), add_special_tokens=False)

    def _special_id(self, name: str) -> int | None:
        token = self._template.special_tokens_map.get(name)
        found: int | None = self._backend.token_to_id(str(token)) if token is not None else None
        return found


def _load_folder(folder: Path) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise WeightsError(f"{folder} has no tokenizer.json")
    try:
        template = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a broken file makes the package raise Exception itself
        raise WeightsError(f"{file}: not a readable tokenizer: {error}") from error
    template.chat_template = template.chat_template or _template_beside(folder)
    return template.backend_tokenizer, template


def _template_beside(folder: Path) -> str | None:
    """Return the template that a model with media has in a file of its own, where it has one."""
    file = folder / "chat_template.json"
    if not file.is_file():
        return None
    try:
        template = json.loads(file.read_bytes())["chat_template"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise WeightsError(f"{file}: not a readable chat template: {error}") from error
    return str(template)


def _load_gguf(path: Path, cache_dir: Path | None) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    cache_dir = cache_dir or default_cache_dir()
    versions = [_CACHE_FORMAT, version("transformers"), version("tokenizers")]
    content = file_sha256(path, cache_dir)
    key = hashlib.sha256("\n".join([*versions, content]).encode()).hexdigest()
    record = cache_dir / "tokenizers" / f"{key}.json"
    try:
        stored = record.read_bytes()
        head, _, body = stored.partition(b"\n")
        settings = json.loads(head)
        # A record that was cut or altered is made again.
        if hashlib.sha256(body).hexdigest() == settings.pop("sha256"):
            return Tokenizer.from_buffer(body), _template(settings)
    except (OSError, ValueError, KeyError):
        _LOG.debug("no converted tokenizer of %s in the cache", path)
    backend, settings = _convert_gguf(GGUFFile(path))
    body = backend.to_str().encode()
    try:
        with atomic_write(record) as out:
            head = json.dumps(settings | {"sha256": hashlib.sha256(body).hexdigest()}).encode()
            out.write(head + b"\n" + body)
    except OSError as error:
        _LOG.debug("converted tokenizer of %s is not kept: %s", path, error)
    return backend, _template(settings)


def _template(settings: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Return a renderer of chats around an empty vocabulary, which costs no memory."""
    backend = Tokenizer(BPE())
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def _convert_gguf(file: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer that a GGUF file describes, its special tokens and its template."""
    prefix = "tokenizer.ggml."
    kind = file.text(prefix + "model")
    tokens = file.strings(prefix + "tokens")
    if kind is None or not tokens:
        raise WeightsError(f"{file.path}: the file has no tokenizer")
    described: dict[str, Any] = {
        "tokenizer_type": kind,
        "pre_tokenizer_type": file.text(prefix + "pre"),
        "tokens": tokens,
    }
    if merges := file.strings(prefix + "merges"):
        described["merges"] = merges
    for key in ("scores", "token_type"):
        values = file.metadata.get(prefix + key)
        if isinstance(values, np.ndarray):
            described[key] = values.tolist()
    try:
        backend, _ = convert_gguf_tokenizer(file.text("general.architecture") or "", described)
    except (KeyError, ValueError) as error:
        raise UnsupportedError(
            f"{file.path}: tokenizer {kind!r} cannot be converted", [str(error)]
        ) from error
    settings: dict[str, Any] = {}
    for name, key in _GGUF_SPECIAL.items():
        token = file.number(f"{prefix}{key}_token_id")
        if token is not None and 0 <= token < len(tokens):
            settings[name] = tokens[int(token)]
        else:
            # Otherwise a class's own default would stand here.
            settings[name] = None
    # Sentencepiece vocabularies begin a text with BOS unless the file says otherwise.
    add_bos = file.metadata.get(prefix + "add_bos_token", kind == "llama")
    add_eos = file.metadata.get(prefix + "add_eos_token", False)
    bos, eos = settings["bos_token"], settings["eos_token"]
    _set_edges(backend, bos if add_bos else None, eos if add_eos else None)
    settings["chat_template"] = file.text("tokenizer.chat_template")
    return backend, settings


def _set_edges(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Let the tokenizer put these tokens around every text."""
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, backend.token_to_id(token)) for token in (bos, eos) if token],
    )


def _give_back_memory() -> None:
    """Return what parsing left behind to the system: more than the tokenizer itself takes."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
