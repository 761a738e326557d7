"""Media in a rendered prompt: each placeholder becomes the ids and items that stand for it."""

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from mstar.errors import RequestError
from mstar.preprocess.conversation import typed_texts
from mstar.preprocess.items import PromptItem
from mstar.preprocess.media.content import Source
from mstar.preprocess.media.limits import MediaLimits
from mstar.preprocess.media.types import AudioMedia, ImageMedia, Media
from mstar.preprocess.processors.base import Processor

ResultT = TypeVar("ResultT")

DEFAULT_RATE = 16_000
"""Samples a second, for a model that does not say."""
_MEMORY_NBYTES = 2**27

Part = str | list[int] | PromptItem
"""A text, a run of ids, or an item."""


class Expander:
    """Turns media into ids and items; what it has seen lately it does not decode again.

    Nobody is served faster by what another tenant has sent, who would see it by the time.

    Args:
        processor: The model's.
        limits: What media may cost.
        memory_nbytes: Encoder inputs that are remembered, in bytes.
    """

    def __init__(
        self,
        processor: Processor,
        limits: MediaLimits,
        memory_nbytes: int = _MEMORY_NBYTES,
    ) -> None:
        self._processor = processor
        self._limits = limits
        self._capacity = memory_nbytes
        self._nbytes = 0
        self._known: OrderedDict[tuple[str | None, bytes], Sequence[Part]] = OrderedDict()
        """By salt and name."""

    def expand(
        self, sources: Sequence[Source], cache_salt: str | None = None
    ) -> list[Sequence[Part]]:
        """Return what stands for each of one request's media, in their order.

        Args:
            sources: The media.
            cache_salt: The request's.

        Raises:
            RequestError: If there are too many, one cannot be decoded or is too large, or the
                model cannot take it; names the part.
        """
        most = self._processor.max_items
        if most is not None and len(sources) > most:
            raise RequestError(
                f"the messages have {len(sources)} images, recordings and films; this model takes "
                f"at most {most} in one prompt: leave some out",
                param="messages",
                code="too_many_items",
            )
        budget = Budget(self._limits)
        return [self._one(source, cache_salt, budget) for source in sources]

    def _one(self, source: Source, cache_salt: str | None, budget: "Budget") -> Sequence[Part]:
        name = (cache_salt, source.name)
        known = self._known.get(name)
        if known is not None:
            self._known.move_to_end(name)
            return known
        media = decoded(source, getattr(self._processor, "rate", DEFAULT_RATE), budget)
        parts = named(source, lambda: self._processor.expand(media))
        self._remember(name, parts)
        return parts

    def _remember(self, name: tuple[str | None, bytes], parts: Sequence[Part]) -> None:
        nbytes = _nbytes(parts)
        if nbytes > self._capacity:
            return
        self._known[name] = parts
        self._nbytes += nbytes
        while self._nbytes > self._capacity:
            self._nbytes -= _nbytes(self._known.popitem(last=False)[1])


class Budget:
    """What the media of one request may still cost.

    Args:
        limits: What they may cost in all.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self.limits = limits
        self._pixels = 0
        self._seconds = 0.0

    def spend(self, media: Media) -> None:
        """Count one medium.

        Raises:
            RequestError: If it is more than all of a request may be.
        """
        limits = self.limits
        if isinstance(media, AudioMedia):
            self._seconds += media.seconds
        elif isinstance(media, ImageMedia):
            self._pixels += media.pixels.size // 3
        else:
            self._pixels += sum(frame.size // 3 for frame in media.frames)
        if self._pixels > limits.request_pixels:
            raise RequestError(
                f"the images up to here have {self._pixels} pixels; one request may have "
                f"{limits.request_pixels}: scale them down or leave some out",
                code="media_too_large",
            )
        if self._seconds > limits.request_audio_seconds:
            raise RequestError(
                f"the recordings up to here are {self._seconds:.1f} s long; one request may have "
                f"{limits.request_audio_seconds:.0f} s: shorten them or leave some out",
                code="media_too_large",
            )


def decoded(source: Source, rate: int, budget: Budget) -> Media:
    """Return a medium, within what its request may cost.

    Raises:
        RequestError: If it cannot be decoded, or is too large; names the part.
    """

    def work() -> Media:
        media = source.decode(rate, budget.limits)
        budget.spend(media)
        return media

    return named(source, work)


def named(source: Source, work: Callable[[], ResultT]) -> ResultT:
    """Do something with a medium, and name the part in what is wrong with it."""
    try:
        return work()
    except RequestError as error:
        if error.param is not None:
            raise
        message = f"{source.where}: {error.message}"
        raise RequestError(message, param=source.where, code=error.code) from error


def refuse_typed(value: object, reserved: Iterable[str], param: str) -> None:
    """Refuse a request in which somebody typed what only templates and processors may write.

    Args:
        value: What the user wrote; plain data of any depth.
        reserved: Texts that stand for media.
        param: The field, for the error.

    Raises:
        RequestError: Naming the text.
    """
    reserved = sorted(reserved)
    for text in typed_texts(value):
        for token in reserved:
            if token in text:
                raise RequestError(
                    f"{param} has the text {token!r}, which stands for an image, audio or video in "
                    "this model's prompts and cannot be typed: leave it out, and send media as "
                    "content parts",
                    param=param,
                    code="placeholder_typed",
                )


def weave(
    text: str,
    placeholders: Mapping[str, str],
    kinds: Sequence[str],
    expanded: Sequence[Sequence[Part]],
    encode: Callable[[str], list[int]],
) -> list[list[int] | PromptItem]:
    """Return a rendered prompt's ids and items.

    Args:
        text: What the template wrote.
        placeholders: By kind: what stands in it for one item.
        kinds: Of the media, in order; among those of one kind, the template keeps the order.
        expanded: What stands for each.
        encode: Text to ids.

    Raises:
        RequestError: If the template wrote more or fewer placeholders than there are media.
    """
    kind_of = {placeholder: kind for kind, placeholder in placeholders.items()}
    longest_first = sorted(map(re.escape, kind_of), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(longest_first)})", text) if longest_first else [text]
    found = Counter(kind_of[piece] for piece in pieces[1::2])
    wanted = Counter(kinds)
    if found != wanted:
        shown = [_in_words(counter) for counter in (wanted, found)]
        raise RequestError(
            f"the messages have {shown[0]}, and the model's chat template has places for "
            f"{shown[1]}: put media where this model expects them, in messages of the user",
            param="messages",
            code="chat_template_error",
        )
    waiting = {
        kind: iter([parts for own, parts in zip(kinds, expanded, strict=True) if own == kind])
        for kind in wanted
    }
    parts: list[Part] = []
    for place, piece in enumerate(pieces):
        if place % 2:
            _extend(parts, next(waiting[kind_of[piece]]))
        elif piece:
            _extend(parts, [piece])
    # Texts are whole only now: a text around an item's becomes other ids than both by themselves.
    whole: list[Part] = []
    _extend(whole, (encode(part) if isinstance(part, str) else part for part in parts))
    return [part for part in whole if not isinstance(part, str)]


def _extend(parts: list[Part], more: Iterable[Part]) -> None:
    """Append parts; ids that follow ids join them, and so does text that follows text."""
    for part in more:
        last = parts[-1] if parts else None
        if isinstance(part, list) and isinstance(last, list):
            parts[-1] = [*last, *part]
        elif isinstance(part, str) and isinstance(last, str):
            parts[-1] = last + part
        else:
            parts.append(part)


def _nbytes(parts: Iterable[Part]) -> int:
    return sum(
        8 * len(part)
        if isinstance(part, (str, list))
        else sum(len(array.data) for array in part.inputs.values())
        for part in parts
    )


def _in_words(counter: Mapping[str, int]) -> str:
    named = [f"{count} of {kind}" for kind, count in sorted(counter.items()) if count]
    return " and ".join(named) or "none"
