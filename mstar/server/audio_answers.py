"""Answers that are sound, and answers that say what was heard."""

import base64
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from mstar.engine.output import Emitted, RequestOutput
from mstar.errors import RequestError
from mstar.preprocess.languages import language_name
from mstar.preprocess.results import (
    Sound,
    Stretch,
    sounds_of,
    stretches_of,
    transcript_of,
)
from mstar.server.failures import ApiError
from mstar.server.rendering import DONE, EVENT_STREAM, PlainRendering, event
from mstar.server.spoken import piece_of
from mstar.transport.messages import AnswerOptions

Json = dict[str, Any]

_SOUND_TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
}
_TRANSCRIPT_TYPES = {
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain; charset=utf-8",
    "srt": "text/plain; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}

_FIGURES = ("seek", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob")
"""What a model may say of a stretch of speech beside its text and times."""


class SpeechAnswer(PlainRendering):
    """Sound, as its bytes or as OpenAI's events; streamed, it is one file whose length is open.

    Args:
        options: How the answer is to be shaped.
    """

    is_heavy = True

    def __init__(self, options: AnswerOptions) -> None:
        super().__init__(options)
        assert options.media is not None
        self._kind = options.media.format
        self._as_events = options.stream and options.media.is_event_stream
        self.content_type = EVENT_STREAM if self._as_events else _SOUND_TYPES[self._kind]
        if not self._as_events:
            # Between samples nothing else may stand.
            self.keep_alive = b""
        self._pieces: list[Sound] = []
        self._has_begun = False

    def added(self, index: int, output: RequestOutput) -> bytes:
        """Return the sound of an output, the file's head before the first."""
        found = sounds_of(output.emitted)
        if not self._options.stream:
            self._pieces += found
            return b""
        return b"".join(self._wrapped(data) for data in self._data(found))

    def closing(self) -> bytes:
        """Return the event that says so, where there are events.

        It has a usage where tokens were read or written; most voices have none.

        Raises:
            ApiError: If nothing was to be heard, and a file would have not even a head.
        """
        if not self._as_events:
            if not self._has_begun:
                raise _nothing_to_hear()
            return b""
        counts = self.counts()
        done: Json = {"type": "speech.audio.done"}
        if total := counts.num_prompt + counts.num_completion:
            done["usage"] = {
                "input_tokens": counts.num_prompt,
                "output_tokens": counts.num_completion,
                "total_tokens": total,
            }
        return _event(done) + DONE

    def failing(self, error: bytes) -> bytes | None:
        """Return the error as an event; a file breaks off."""
        return super().failing(error) if self._as_events else None

    def whole(self) -> bytes:
        """Return the file.

        Raises:
            ApiError: If nothing is to be heard.
        """
        from mstar.preprocess.media.encode import encode_sound  # noqa: PLC0415 - text needs none

        if not self._pieces:
            raise _nothing_to_hear()
        samples = [piece.samples for piece in self._pieces]
        try:
            return encode_sound(samples, self._pieces[0].rate, self._kind)
        except RequestError as error:
            raise ApiError(400, error.message, code=error.code, param=error.param) from error

    def _data(self, sounds: list[Sound]) -> Iterator[bytes]:
        for sound in sounds:
            yield piece_of(sound, self._kind, is_first=not self._has_begun)
            self._has_begun = True

    def _wrapped(self, data: bytes) -> bytes:
        if not self._as_events:
            return data
        return _event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})


def _nothing_to_hear() -> ApiError:
    return ApiError(400, "there is nothing to be heard of this text", param="input")


class TranscriptAnswer(PlainRendering):
    """What was heard, in one of OpenAI's formats or as events.

    Args:
        options: How the answer is to be shaped.
    """

    def __init__(self, options: AnswerOptions) -> None:
        super().__init__(options)
        assert options.media is not None
        self._media = options.media
        kind = _TRANSCRIPT_TYPES[self._media.format]
        self.content_type = EVENT_STREAM if options.stream else kind
        self._emitted: list[Emitted] = []
        self._raw = self._text = ""

    def added(self, index: int, output: RequestOutput) -> bytes:
        """Return the event that carries what an output adds."""
        self._emitted += output.emitted
        self._raw += "".join(stretch.text for stretch in stretches_of(output.emitted))
        text = self._raw.strip()
        delta, self._text = text[len(self._text) :], text
        if not self._options.stream or not delta:
            return b""
        return _event({"type": "transcript.text.delta", "delta": delta})

    def closing(self) -> bytes:
        """Return the event with all of the text."""
        done = {"type": "transcript.text.done", "text": self._text, "usage": self._usage()}
        return _event(done) + DONE

    def whole(self) -> bytes:
        """Return the transcript in the format that was asked for."""
        transcript = transcript_of(self._emitted)
        match self._media.format:
            case "text":
                return transcript.text.encode() + b"\n"
            case "srt":
                return subrip(transcript.stretches).encode()
            case "vtt":
                return web_vtt(transcript.stretches).encode()
            case "verbose_json":
                return msgspec.json.encode(self._verbose())
        return msgspec.json.encode({"text": transcript.text, "usage": self._usage()})

    def _verbose(self) -> Json:
        transcript = transcript_of(self._emitted)
        is_translated = self._options.route == "translation"
        language = "en" if is_translated else transcript.language
        body: Json = {
            "task": "translate" if is_translated else "transcribe",
            "language": None if language is None else language_name(language),
            "duration": round(self._media.seconds, 3),
            "text": transcript.text,
        }
        stretches = transcript.stretches
        if "segment" in self._media.granularities:
            body["segments"] = [_segment(index, own) for index, own in enumerate(stretches)]
        if "word" in self._media.granularities:
            body["words"] = [word for own in stretches for word in own.facts.get("words", ())]
        return body | {"usage": self._usage()}

    def _usage(self) -> Json:
        return {"type": "duration", "seconds": math.ceil(self._media.seconds)}


def _segment(index: int, stretch: Stretch) -> Json:
    """Return a stretch as OpenAI's segments are; what is not known of it is left out."""
    known = {name: stretch.facts[name] for name in _FIGURES if name in stretch.facts}
    return {
        "id": index,
        "start": round(stretch.start, 3),
        "end": round(stretch.end, 3),
        "text": stretch.text,
        "tokens": stretch.tokens,
        **known,
    }


def subrip(stretches: tuple[Stretch, ...]) -> str:
    """Return subtitles in SubRip's format."""
    return "".join(
        f"{number}\n{_clock(own.start, ',')} --> {_clock(own.end, ',')}\n{_line(own)}\n\n"
        for number, own in enumerate(stretches, 1)
    )


def web_vtt(stretches: tuple[Stretch, ...]) -> str:
    """Return subtitles in WebVTT's format."""
    return "WEBVTT\n\n" + "".join(
        f"{_clock(own.start, '.')} --> {_clock(own.end, '.')}\n{_line(own)}\n\n"
        for own in stretches
    )


def _line(stretch: Stretch) -> str:
    """Return a text that ends no cue and looks like no time."""
    return " ".join(stretch.text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    """Return a time as subtitles write it.

    >>> _clock(3723.5, ",")
    '01:02:03,500'
    """
    millis = round(seconds * 1000)
    hours, millis = divmod(millis, 3_600_000)
    minutes, millis = divmod(millis, 60_000)
    return f"{hours:02}:{minutes:02}:{millis // 1000:02}{point}{millis % 1000:03}"


def _event(content: Json) -> bytes:
    return event(msgspec.json.encode(content))
