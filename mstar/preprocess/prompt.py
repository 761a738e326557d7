"""A prompt made ready for the engine: template, ids, checks and page keys."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mstar.engine.request import PreparedRequest
from mstar.engine.resources.kv.keys import fingerprint
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import ContextLengthError, RequestError
from mstar.preprocess.items import prompt_keys
from mstar.preprocess.tokenizer import TextTokenizer

MAX_SALT_LEN = 128
_SALT_FORBIDDEN = "@/\\\0"
# Arguments of the rendering itself; the rest are variables of the template.
_RESERVED_KWARGS = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRequest:
    """One prompt as a user gives it: exactly one of messages, text and token ids."""

    request_id: str
    params: SamplingParams
    messages: Sequence[Mapping[str, Any]] | None = None
    """A chat, for the model's template."""
    text: str | None = None
    token_ids: Sequence[int] | None = None
    cache_salt: str | None = None
    """Only requests with the same salt share pages."""
    retain_seconds: float = 0.0
    """How long its pages are protected from eviction after their last use, as far as the budget
    goes; ``inf``: until a reset."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, ``tools`` and ``documents`` among them."""
    add_generation_prompt: bool = True
    """The chat ends with the beginning of an answer."""
    continue_final_message: bool = False
    """The chat ends inside its last message."""
    add_special_tokens: bool = True
    """A text begins (and ends) as the model wants texts to."""


def request_root(deployment_root: bytes | None, cache_salt: str | None) -> bytes | None:
    """Return the key of a request's empty prefix; ``None`` keeps it out of reuse.

    Args:
        deployment_root: What the deployment's KV depends on; ``None``: reuse is off.
        cache_salt: What the request keeps others apart by.
    """
    if deployment_root is None:
        return None
    # ``None`` has a text, which could be somebody's salt: no salt is no field.
    salt = () if cache_salt is None else (cache_salt,)
    return fingerprint("mstar-request-root-v1", deployment_root, "cache_salt", *salt)


class PromptPreparer:
    """Prepares the prompts of one deployment.

    Args:
        tokenizer: The model's.
        max_model_len: Prompt and output of one request together, in tokens.
        page_size: Slots of one KV page, in tokens.
        deployment_root: What the deployment's KV depends on; ``None``: reuse is off.
        vocab_size: Rows of the model's embedding table; ids lie below it.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        max_model_len: int,
        page_size: int,
        deployment_root: bytes | None,
        vocab_size: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.page_size = page_size
        self.deployment_root = deployment_root
        self.vocab_size = vocab_size

    def prepare(self, request: PromptRequest) -> PreparedRequest:
        """Return the request as the engine takes it.

        Raises:
            RequestError: If the prompt, the salt or an id is wrong; names the field at fault.
            ContextLengthError: If prompt, or prompt and ``max_tokens``, exceed the context.
        """
        check_cache_salt(request.cache_salt)
        check_retention(request.retain_seconds)
        token_ids = self._token_ids(request)
        self._check_ids("logit_bias", request.params.logit_bias)
        self._check_ids("stop_token_ids", request.params.stop_token_ids)
        self._check_length(len(token_ids), request)
        root = request_root(self.deployment_root, request.cache_salt)
        return PreparedRequest(
            request_id=request.request_id,
            token_ids=token_ids,
            params=request.params,
            page_keys=[] if root is None else prompt_keys(token_ids, (), self.page_size, root),
            root=root,
            retain_seconds=float(request.retain_seconds),
        )

    def _token_ids(self, request: PromptRequest) -> list[int]:
        given = [
            name for name in ("messages", "text", "token_ids") if getattr(request, name) is not None
        ]
        if len(given) != 1:
            raise RequestError(
                "a prompt is one of messages, text and token ids; found "
                + (" and ".join(given) if given else "none"),
                param="prompt",
            )
        if request.token_ids is not None:
            token_ids = list(request.token_ids)
            self._check_ids("prompt", token_ids)
            return token_ids
        if request.text is not None:
            if not isinstance(request.text, str):
                raise RequestError(f"prompt is {request.text!r:.40}, not a string", param="prompt")
            return self._encode(request.text, request.add_special_tokens, "prompt")
        assert request.messages is not None
        for name in request.template_kwargs:
            if name in _RESERVED_KWARGS:
                raise RequestError(
                    f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs"
                )
        text = self.tokenizer.render_chat(
            plain_messages(request.messages),
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            **request.template_kwargs,
        )
        return self._encode(text, False, "messages")

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        # Encoding a text many times too long would keep a worker from all other requests.
        if len(text) > self.max_model_len:
            num_tokens = self.tokenizer.min_tokens(text)
            if num_tokens >= self.max_model_len:
                raise self._too_long(f"at least {num_tokens}", param)
        return self.tokenizer.encode(text, add_special_tokens)

    def _check_ids(self, param: str, token_ids: Sequence[int] | Mapping[int, float]) -> None:
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(
                    f"{param} has {token!r:.40}, which is not a token id", param=param
                )
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{param} has the token id {token}; the model's ids are 0 to "
                    f"{self.vocab_size - 1}",
                    param=param,
                )

    def _check_length(self, num_tokens: int, request: PromptRequest) -> None:
        param = "messages" if request.messages is not None else "prompt"
        if num_tokens == 0:
            raise RequestError("the prompt is empty; it needs at least one token", param=param)
        if num_tokens >= self.max_model_len:
            raise self._too_long(str(num_tokens), param)
        max_tokens = request.params.max_tokens
        if max_tokens is not None and num_tokens + max_tokens > self.max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens and max_tokens is {max_tokens}, "
                f"{num_tokens + max_tokens} in all; the context holds {self.max_model_len}: "
                f"lower max_tokens to {self.max_model_len - num_tokens} or shorten the prompt",
                param="max_tokens",
            )

    def _too_long(self, num_tokens: str, param: str) -> ContextLengthError:
        return ContextLengthError(
            f"the prompt has {num_tokens} tokens; the context holds {self.max_model_len}, with at "
            "least one for the output: shorten the prompt",
            param=param,
        )


def check_cache_salt(cache_salt: str | None) -> None:
    r"""Verify a salt.

    Raises:
        RequestError: If it is empty, longer than 128 characters, or has one of ``@ / \`` or NUL.
    """
    if cache_salt is None:
        return
    if not isinstance(cache_salt, str) or not 1 <= len(cache_salt) <= MAX_SALT_LEN:
        raise RequestError(
            f"cache_salt must be a string of 1 to {MAX_SALT_LEN} characters, found "
            f"{cache_salt!r:.40}",
            param="cache_salt",
        )
    # A lone surrogate has no bytes to make a key of.
    bad = [c for c in cache_salt if c in _SALT_FORBIDDEN or "\ud800" <= c <= "\udfff"]
    if bad:
        raise RequestError(
            f"cache_salt has the character {bad[0]!r}; @, /, \\, NUL and lone surrogates are not "
            "allowed",
            param="cache_salt",
        )


def check_retention(retain_seconds: float) -> None:
    """Verify a retention hint.

    Raises:
        RequestError: If it is no number, or below zero.
    """
    is_number = isinstance(retain_seconds, (int, float)) and not isinstance(retain_seconds, bool)
    if not is_number or not retain_seconds >= 0:
        raise RequestError(
            f"retain_seconds is {retain_seconds!r:.40}; it must be a number of seconds, at least "
            "0, or inf for pages that stay until a reset",
            param="retain_seconds",
        )


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat with contents and tool calls in the form that templates are written for.

    Text parts become one string, a line break between them; arguments of tool calls become
    mappings.

    Raises:
        RequestError: If there is no message, or one is not of the expected form.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    found = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where} is not an object with a role", param=where)
        plain = dict(message)
        content = plain.get("content")
        if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
            plain["content"] = "\n".join(
                _part_text(part, f"{where}.content[{at}]") for at, part in enumerate(content)
            )
        elif content is not None and not isinstance(content, str):
            raise RequestError(
                f"{where}.content is {content!r:.40}; it must be a string or a list of parts",
                param=f"{where}.content",
            )
        if isinstance(calls := plain.get("tool_calls"), Sequence):
            plain["tool_calls"] = [_plain_call(call) for call in calls]
        found.append(plain)
    return found


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
        text = part.get("text")
        if isinstance(text, str):
            return text
        raise RequestError(f"{where}.text is {text!r:.40}; it must be a string", param=where)
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise RequestError(f"{where} is {kind!r:.40}; this model takes text parts only", param=where)


def _plain_call(call: object) -> object:
    """Return a tool call whose arguments are a mapping, where they were one in JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    try:
        arguments = json.loads(function.get("arguments", ""))
    except (TypeError, ValueError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
