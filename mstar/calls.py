"""What callers of ``Engine`` hand over, checked and in one form."""

from collections.abc import Sequence
from dataclasses import fields
from operator import index
from typing import Any, SupportsIndex, TypeGuard, TypeVar

import msgspec

from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import RequestError
from mstar.preprocess.processors.base import ChatTask, ImageTask, SpeechTask, TranscriptionTask

Prompt = str | Sequence[int]
"""A text, or token ids."""
TaskT = TypeVar("TaskT", ChatTask, TranscriptionTask, SpeechTask, ImageTask)


def as_prompts(prompts: object) -> list[Prompt]:
    """Return the prompts of a call, which may have given one alone."""
    if hasattr(prompts, "tolist"):
        # An array of numpy or torch; numbers are one prompt, rows of numbers are several.
        prompts = prompts.tolist()
    if isinstance(prompts, str) or not isinstance(prompts, (list, tuple)):
        return [as_prompt(prompts)]
    if prompts and _is_integer(prompts[0]):
        return [as_prompt(prompts)]
    return [as_prompt(prompt) for prompt in prompts]


def as_prompt(prompt: object) -> Prompt:
    """Return a text, or a list of plain integers.

    Raises:
        RequestError: If it is neither a text nor ids.
    """
    if isinstance(prompt, str):
        return prompt
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray, memoryview)):
        raise RequestError(
            f"a prompt is {prompt!r:.40}; it must be a text or a sequence of token ids",
            param="prompt",
        )
    return [token if type(token) is int else _as_id(token) for token in prompt]


def _as_id(token: Any) -> int:
    # Whatever is no integer at all is left for the preparer to name.
    is_number = _is_integer(token) and not isinstance(token, bool)
    return index(token) if is_number else token


def _is_integer(value: object) -> TypeGuard[SupportsIndex]:
    # Arrays claim to be integers too, whatever their shape.
    return isinstance(value, SupportsIndex) and not getattr(value, "shape", ())


def as_params(params: SamplingParams | None) -> SamplingParams:
    """Return sampling parameters, the default ones where there are none.

    Raises:
        RequestError: If they are something else.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params is {params!r:.60}; it must be SamplingParams", param="params")
    return params


def as_task(task: TaskT | None, kind: type[TaskT]) -> TaskT | None:
    """Return a task with all its fields of the right type; ``None`` stays.

    Raises:
        RequestError: Naming the field.
    """
    if task is None:
        return None
    if not isinstance(task, kind):
        raise RequestError(f"task is {task!r:.60}; it must be {kind.__name__}", param="task")
    try:
        return msgspec.convert({own.name: getattr(task, own.name) for own in fields(task)}, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{kind.__name__} has a wrong field: {error}", param="task") from None
