"""Request bodies as a deployment would prepare them, without its weights."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mstar.catalog import describe_model, load_prompting, locate
from mstar.engine.request import PreparedRequest
from mstar.engine.root import RootConstants, root_constants
from mstar.errors import ConfigError, RequestError
from mstar.preprocess.explain import Subject
from mstar.server.config import EngineOptions
from mstar.server.failures import ApiError
from mstar.server.protocol import ParsedRequest, ProtocolRules, parse
from mstar.server.worker import Worker
from mstar.transport.messages import Configure, EngineFacts, Prepare, PrepareFailed, Route


@dataclass(frozen=True, kw_only=True)
class Body:
    """A request body from a file."""

    path: str
    route: Route
    data: bytes
    model: str | None
    """What it names as its model."""

    @classmethod
    def read(cls, path: str) -> "Body":
        """Read a body; ``-`` is the standard input.

        Raises:
            ConfigError: If the file cannot be read.
            RequestError: If it holds no body of a completions route.
        """
        try:
            data = (
                sys.stdin.buffer.read()
                if path == "-"
                else Path(os.path.expanduser(path)).read_bytes()
            )
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        fields = _fields(path, data)
        if ("messages" in fields) == ("prompt" in fields):
            raise RequestError(
                f"{path} has {'both' if 'prompt' in fields else 'neither'} of messages and prompt; "
                "a chat has the one, a completion the other"
            )
        model = fields.get("model")
        return cls(
            path=path,
            route="chat" if "messages" in fields else "completion",
            data=data,
            model=model if isinstance(model, str) and model else None,
        )

    def fields(self) -> dict[str, Any]:
        """Return the body as an object."""
        return _fields(self.path, self.data)


def _fields(path: str, data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise RequestError(f"{path} is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(f"{path} holds {type(fields).__name__}, not an object")
    return fields


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of a body, prepared."""

    subject: Subject
    rendered: str | None = None
    """Chats: what the template wrote."""
    messages: Sequence[dict[str, Any]] = ()
    """Chats: what the template was given."""


class Served:
    """A deployment as its workers know it.

    Args:
        options: What `mstar serve` would be started with.

    Raises:
        ModelNotFoundError: If the model's name leads nowhere.
        WeightsError: If the checkpoint or its tokenizer is broken.
        UnsupportedError: If the architecture is not built.
        ConfigError: If a number is wrong.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.model = options.model
        self.root, max_model_len, vocab_size = _describe(options)
        self.page_size = int(self.root.constants["page_size"])
        self.tokenizer, self._processor = load_prompting(locate(options.model))
        self._facts = EngineFacts(
            deployment_root=self.root.root,
            root_constants=dict(self.root.constants),
            page_size=self.page_size,
            num_pages=-(-max_model_len // self.page_size),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            max_num_seqs=1,
            max_num_batched_tokens=max_model_len,
            dtype=self.root.constants["dtype"],
            device=options.device,
            model_name=options.model,
            load_seconds=0.0,
        )

    def prepare(self, body: Body) -> list[Prompt]:
        """Return a body's prompts as a worker of the deployment prepares them.

        Raises:
            RequestError: If the body is wrong; says what the server would.
        """
        names = (self.model,) if body.model is None else (body.model,)
        rules = ProtocolRules(model_names=names, trust_chat_template_kwargs=True)
        worker = Worker(self.tokenizer, rules, self._processor)
        worker.configure(Configure(facts=self._facts))
        answer = worker.handle(
            Prepare(job_id=0, request_id="request", route=body.route, body=body.data)
        )
        if isinstance(answer, PrepareFailed):
            raise RequestError(f"{body.path}: {answer.error.message}", param=answer.error.param)
        try:
            parsed = parse(body.route, body.data, rules)
        except ApiError as error:
            raise RequestError(f"{body.path}: {error}") from error
        rendered, messages = _rendered(worker, parsed)
        return [
            Prompt(
                subject=Subject(
                    prepared=msgspec.msgpack.decode(blob, type=PreparedRequest),
                    page_size=self.page_size,
                    root_constants=self.root.constants,
                    cache_salt=parsed.cache_salt,
                ),
                rendered=rendered,
                messages=messages,
            )
            for blob in answer.requests[:: answer.options.num_choices]
        ]

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens included."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)


def _rendered(worker: Worker, parsed: ParsedRequest) -> tuple[str | None, list[dict[str, Any]]]:
    return (None, []) if parsed.conversation is None else worker.render(parsed)


def root_of(options: EngineOptions) -> RootConstants:
    """Return what the keys of a deployment commit to; loads no weights.

    Args:
        options: What `mstar serve` would be started with.

    Raises:
        MstarError: If the model or a number is wrong.
    """
    return _describe(options)[0]


def _describe(options: EngineOptions) -> tuple[RootConstants, int, int]:
    described, dtype = describe_model(
        options.model, dtype=options.dtype or "auto", device=options.device
    )
    root = root_constants(described.root_constants, described.specs, options.deployment(dtype))
    return root, described.max_model_len, described.vocab_size
