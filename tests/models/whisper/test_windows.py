"""How windows are cut, against the method of transformers that does it there."""

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from mstar.models.whisper.config import WhisperTokens
from mstar.models.whisper.windows import (
    Stretch,
    WhisperOptions,
    cut,
    following,
    prompt_ids,
    said,
)

TOKENS = WhisperTokens(
    start=101,
    end=100,
    no_timestamps=106,
    start_of_previous=105,
    languages={"en": 102},
    transcribe=103,
    translate=104,
    suppressed=(),
    begin_suppressed=(),
    max_initial_timestamp=50,
)
FIRST = TOKENS.first_timestamp
WINDOW = 3000
OPTIONS = WhisperOptions(
    recording=b"d" * 32, num_frames=5000, stop_frame=5000, language=102, timestamps=True
)


def expected(generated: list[int], options: WhisperOptions) -> tuple[list[Stretch], int]:
    frames = min(options.num_frames - options.start_frame, WINDOW)
    cutter: Any = WhisperGenerationMixin._retrieve_segment
    segments, moved = cutter(
        seek_sequence=torch.tensor(generated),
        seek_outputs=[None],
        time_offset=torch.tensor([options.start_frame], dtype=torch.float64) * 0.02 / 2,
        timestamp_begin=FIRST,
        seek_num_frames=torch.tensor([frames]),
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 3),
    )
    stretches = [
        Stretch(float(own["start"]), float(own["end"]), own["tokens"].tolist()) for own in segments
    ]
    return stretches, options.start_frame + int(moved)


@st.composite
def transcripts(draw: st.DrawFn) -> list[int]:
    """Transcripts as the rules allow them, cut anywhere."""
    ids, at = [FIRST + draw(st.integers(0, 50))], 60
    for _ in range(draw(st.integers(0, 4))):
        ids += draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))
        at += draw(st.integers(1, 100))
        ids += [FIRST + at] * draw(st.integers(1, 2))
        if ids[-1] == FIRST + at and ids[-2] != ids[-1]:
            break
    ids += draw(st.lists(st.integers(0, 99), max_size=2))
    return ids[: draw(st.integers(1, len(ids)))]


@settings(max_examples=150, deadline=None)
@given(transcripts(), st.integers(0, 4990))
def test_windows_are_cut_as_transformers_cuts_them(generated: list[int], start: int) -> None:
    options = msgspec.structs.replace(OPTIONS, start_frame=start)
    own = cut([*generated, TOKENS.end], options, TOKENS, WINDOW)
    assert own == expected(generated, options)


def test_a_window_without_a_word_is_passed_over() -> None:
    stretches, next_frame = cut([TOKENS.end], OPTIONS, TOKENS, WINDOW)
    assert stretches == [Stretch(0.0, 30.0, [])]
    assert next_frame == WINDOW


@pytest.mark.parametrize("at", [4999, 5000])
def test_no_window_begins_behind_the_end(at: int) -> None:
    options = msgspec.structs.replace(OPTIONS, start_frame=4000)
    after = following(options, [], at, TOKENS)
    assert (after is None) == (at == 5000)
    without = msgspec.structs.replace(options, timestamps=False)
    assert following(without, [], at, TOKENS) is None


def test_what_was_said_is_handed_on_where_it_is_asked_for() -> None:
    stretches = [Stretch(0, 1, [FIRST, 5, FIRST + 50]), Stretch(1, 2, [FIRST + 50, 6, FIRST + 99])]
    doubled = [Stretch(0, 1, [FIRST, 5, FIRST + 50, FIRST + 50])]
    assert said(stretches, TOKENS) == [FIRST, 5, FIRST + 50, FIRST + 50, 6, FIRST + 99]
    assert said(doubled, TOKENS) == [FIRST, 5, FIRST + 50]
    options = msgspec.structs.replace(OPTIONS, previous=[1, 2])
    plain = following(options, stretches, 200, TOKENS)
    assert plain is not None
    assert plain.previous == [1, 2]
    options = msgspec.structs.replace(options, follow=True)
    followed = following(options, stretches, 200, TOKENS)
    assert followed is not None
    assert followed.previous == [1, 2, *said(stretches, TOKENS)]


def test_a_prompt_names_language_task_and_what_was_said() -> None:
    def ids(**changes: Any) -> list[int]:
        return prompt_ids(msgspec.structs.replace(OPTIONS, **changes), TOKENS, 20)

    assert ids() == [101, 102, 103]
    assert ids(translate=True, timestamps=False) == [101, 102, 104, 106]
    assert ids(previous=list(range(30))) == [105, *range(21, 30), 101, 102, 103]
    # The language is asked for first, whatever else is known.
    assert ids(language=None, previous=[1]) == [101]


def test_options_survive_the_way_between_processes() -> None:
    packed = msgspec.msgpack.encode(msgspec.structs.asdict(OPTIONS))
    assert msgspec.convert(msgspec.msgpack.decode(packed), WhisperOptions) == OPTIONS
