"""How a recording is written down window after window: prompts, and what a window's tokens say.

The encoder takes a window of fixed length. Where timestamps are asked for, the next window begins
at the last one that ends a stretch of speech, and what the window says behind it is thrown away.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from mstar.models.whisper.config import (
    FRAMES_PER_SLOT,
    SECONDS_PER_FRAME,
    SECONDS_PER_SLOT,
    WhisperTokens,
)


class WhisperOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a request tells a Whisper beside its prompt; crosses processes as plain data."""

    recording: bytes
    """Content name of the whole recording."""
    num_frames: int
    """Frames of its features."""
    stop_frame: int
    """Frame at which there is nothing more to hear: no window begins there or behind."""
    start_frame: int = 0
    """First frame of the window."""
    language: int | None = None
    """Token of the language; ``None``: to be detected, where the model knows several."""
    translate: bool = False
    """Write English, whatever is spoken."""
    timestamps: bool = False
    follow: bool = False
    """Each window is given what those before it said."""
    previous: list[int] = []
    """What was said before: given by the user, or by the windows before."""
    fallback: bool = False
    """Windows that repeat themselves or are unlikely are written down again."""
    attempt: int = 0
    """Which one at this window, from 0."""


class Stretch(NamedTuple):
    """A stretch of speech."""

    start: float
    """Seconds from the recording's beginning."""
    end: float
    tokens: list[int]
    """Timestamps included."""


def prompt_ids(options: WhisperOptions, tokens: WhisperTokens, max_positions: int) -> list[int]:
    """Return what a window's transcript begins with.

    Args:
        options: Of the window.
        tokens: The model's special ids.
        max_positions: Tokens of prompt and transcript together.
    """
    ids: list[int] = []
    if options.previous:
        ids = [tokens.start_of_previous, *options.previous[-(max_positions // 2 - 1) :]]
    ids.append(tokens.start)
    if tokens.languages and options.language is None:
        # Without more, what comes next is the language.
        return [tokens.start]
    if options.language is not None:
        ids.append(options.language)
        task = tokens.translate if options.translate else tokens.transcribe
        assert task is not None, "a model of several languages knows no tasks"
        ids.append(task)
    if not options.timestamps:
        ids.append(tokens.no_timestamps)
    return ids


def cut(
    generated: Sequence[int], options: WhisperOptions, tokens: WhisperTokens, window_frames: int
) -> tuple[list[Stretch], int]:
    """Return the stretches of speech in a window, and the frame at which the next one begins.

    Args:
        generated: What the window's transcript has behind its prompt.
        options: Of the window.
        tokens: The model's special ids.
        window_frames: Frames of a whole window.
    """
    first = tokens.first_timestamp
    ids = [token for token in generated if token != tokens.end]
    offset = options.start_frame * SECONDS_PER_SLOT / FRAMES_PER_SLOT
    frames = min(options.num_frames - options.start_frame, window_frames)
    is_time = [token >= first for token in ids]
    pairs = [at + 1 for at in range(len(ids) - 1) if is_time[at] and is_time[at + 1]]
    if not pairs:
        last = int(frames * SECONDS_PER_FRAME / SECONDS_PER_SLOT)
        times = [token for token, own in zip(ids, is_time, strict=True) if own]
        if times and times[-1] != first:
            last = times[-1] - first
        whole = Stretch(offset, offset + last * SECONDS_PER_SLOT, ids)
        return [whole], options.start_frame + frames
    ends_once = is_time[-2:] == [False, True]
    if ends_once:
        # Nothing is said behind the last timestamp.
        pairs.append(len(ids))
    else:
        # The second timestamp of the last pair shows that more is said, which is heard again.
        pairs[-1] += 1
    stretches, begin = [], 0
    for place, stop in enumerate(pairs):
        own = ids[begin:stop]
        end = own[-2] if place == len(pairs) - 1 and not ends_once else own[-1]
        start_time, end_time = ((n - first) * SECONDS_PER_SLOT for n in (own[0], end))
        stretches.append(Stretch(offset + start_time, offset + end_time, own))
        begin = stop
    moved = (ids[pairs[-1] - 2] - first) * FRAMES_PER_SLOT
    if ends_once or moved < 1:
        moved = frames
    return stretches, options.start_frame + moved


def said(stretches: Sequence[Stretch], tokens: WhisperTokens) -> list[int]:
    """Return what the next window is told that these stretches said."""
    ids: list[int] = []
    for stretch in stretches:
        own = stretch.tokens
        is_doubled = len(own) > 2 and own[-2] >= tokens.first_timestamp
        ids += own[:-1] if is_doubled else own
    return ids


def following(
    options: WhisperOptions,
    stretches: Sequence[Stretch],
    next_frame: int,
    tokens: WhisperTokens,
) -> WhisperOptions | None:
    """Return the options of the next window; ``None`` where the recording is at its end.

    Args:
        options: Of the window that has ended.
        stretches: What it says.
        next_frame: Where the next one begins.
        tokens: The model's special ids.
    """
    end = min(options.stop_frame, options.num_frames)
    if not options.timestamps or next_frame >= end:
        return None
    assert next_frame > options.start_frame, (options.start_frame, next_frame)
    previous = options.previous
    if options.follow:
        previous = [*previous, *said(stretches, tokens)]
    return msgspec.structs.replace(options, start_frame=next_frame, previous=previous, attempt=0)
