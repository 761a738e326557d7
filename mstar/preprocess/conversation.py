"""Conversations as users write them, read into what templates take and the media among it."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mstar.errors import RequestError
from mstar.preprocess.media.content import KIND_OF_PART, Source, source_of

_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages for a template, and the media that stand in them."""

    messages: list[dict[str, Any]]
    """Each content is a string, or a list of ``{"type": "text", "text": …}`` and ``{"type": kind}``
    parts where it was a list."""
    media: list[Source]
    """Of all messages, in order."""


def read_messages(
    messages: Sequence[Mapping[str, Any]], kinds: Collection[str] = ()
) -> Conversation:
    """Return a conversation with its parts in one form; arguments of tool calls become mappings.

    Args:
        messages: As the user wrote them.
        kinds: Kinds of media that the model takes.

    Raises:
        RequestError: If there is no message, one is not of the expected form, or the model does not
            take what is in it.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    found: list[dict[str, Any]] = []
    media: list[Source] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where} is not an object with a role", param=where)
        plain = dict(message)
        content = plain.get("content")
        if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
            plain["content"] = [
                _part(part, f"{where}.content[{at}]", kinds, media)
                for at, part in enumerate(content)
            ]
        elif content is not None and not isinstance(content, str):
            raise RequestError(
                f"{where}.content is {content!r:.40}; it must be a string or a list of parts",
                param=f"{where}.content",
            )
        if isinstance(calls := plain.get("tool_calls"), Sequence):
            plain["tool_calls"] = [_plain_call(call) for call in calls]
        found.append(plain)
    return Conversation(messages=found, media=media)


def plain_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Return a conversation of text as templates of text models take it: contents are strings.

    Text parts become one string, a line break between them; media leave nothing.
    """
    return [
        message
        | {"content": "\n".join(part["text"] for part in message["content"] if "text" in part)}
        if isinstance(message.get("content"), list)
        else message
        for message in conversation.messages
    ]


def part_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Return a conversation as templates of models with media take it: contents are lists."""
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in conversation.messages
    ]


def typed_texts(value: object) -> list[str]:
    """Return every text in plain data of any depth; those that stand beside each other as one too.

    What the user typed is in them, wherever a template may put it: names of fields as well.
    """
    texts: list[str] = []
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, Sequence) and not isinstance(part, (bytes, bytearray)):
            left += part
            beside = [one.get("text") if isinstance(one, Mapping) else one for one in part]
            texts.append("".join(one for one in beside if isinstance(one, str)))
    return texts


def _part(part: object, where: str, kinds: Collection[str], media: list[Source]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else part
    if isinstance(part, Mapping) and kind in _TEXT_PARTS:
        text = part.get("text")
        if isinstance(text, str):
            return {"type": "text", "text": text}
        raise RequestError(f"{where}.text is {text!r:.40}; it must be a string", param=where)
    if isinstance(part, Mapping) and isinstance(kind, str) and KIND_OF_PART.get(kind) in kinds:
        source = source_of(part, where)
        media.append(source)
        return {"type": source.kind}
    *others, last = ["text", *sorted(kinds)]
    taken = f"{', '.join(others)} and {last}" if others else last
    raise RequestError(
        f"{where} is {kind!r:.40}; this model takes {taken} parts only",
        param=where,
        code="unsupported_content",
    )


def _plain_call(call: object) -> object:
    """Return a tool call whose arguments are a mapping, where they were one in JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    try:
        arguments = json.loads(function.get("arguments", ""))
    except (TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
