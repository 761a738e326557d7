"""Whisper: a recording becomes features beside the stream, and the task becomes the prompt."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mstar.engine.request import ContextItem
from mstar.engine.resources.kv.keys import fingerprint
from mstar.errors import RequestError
from mstar.models.whisper.config import ENGLISH, WhisperConfig, WhisperTokens, read_whisper
from mstar.models.whisper.windows import WhisperOptions, prompt_ids
from mstar.preprocess.items import array_of, item_digest
from mstar.preprocess.languages import language_code
from mstar.preprocess.media.types import AudioMedia, Samples
from mstar.preprocess.mel import HOP, RATE, log_mel
from mstar.preprocess.processors.base import Draft, Task, TranscriptionTask
from mstar.preprocess.tokenizer import TextTokenizer

_KIND = "audio"


class WhisperProcessor:
    """Prepares transcriptions.

    Args:
        config: The model's shape.
        tokens: Its special ids.
        tokenizer: Encodes what was said before.
    """

    tasks: frozenset[Task] = frozenset({"transcription"})
    rate = RATE

    def __init__(
        self, config: WhisperConfig, tokens: WhisperTokens, tokenizer: TextTokenizer
    ) -> None:
        self._config = config
        self._tokens = tokens
        self._tokenizer = tokenizer
        self.fingerprint = fingerprint(
            "mstar-whisper-processor-v1", config.num_mel_bins, config.num_frames
        )

    def transcription(self, audio: AudioMedia, task: TranscriptionTask) -> Draft:
        """Return the prompt of a recording's first window, with the features of all of it.

        Raises:
            RequestError: If the model does not know the language, cannot translate, or words are
                to be timed.
        """
        assert audio.rate == RATE, f"{audio.rate} samples a second; {RATE} are wanted"
        self._check(task)
        options = self._options(audio.samples, task)
        features = log_mel(self._padded(audio.samples), self._config.num_mel_bins)
        num_frames = features.shape[1]
        options = msgspec.structs.replace(
            options, num_frames=num_frames, stop_frame=min(options.stop_frame, num_frames)
        )
        inputs = {"features": array_of(features), "start": array_of(np.zeros(1, np.int64))}
        num_slots = self._config.encoder.max_positions
        num_windows = -(-options.stop_frame // self._config.num_frames)
        item = ContextItem(_KIND, options.recording, num_slots, inputs)
        return Draft(
            parts=[prompt_ids(options, self._tokens, self._config.decoder.max_positions)],
            context=[item],
            num_context_slots=num_windows * num_slots,
            options=msgspec.structs.asdict(options),
        )

    def previous_ids(self, text: str) -> list[int]:
        """Return the ids of what was said before; none of nothing."""
        text = text.strip()
        return self._tokenizer.encode(" " + text, add_special_tokens=False) if text else []

    def _padded(self, samples: Samples) -> Samples:
        """Return a recording that fills a window at least; what is added is silence."""
        missing = self._config.num_frames * HOP - len(samples)
        return np.pad(samples, (0, missing)) if missing > 0 else samples

    def _options(self, samples: Samples, task: TranscriptionTask) -> WhisperOptions:
        num_frames = -(-len(samples) // HOP)
        code = language_code(task.language) if task.language is not None else None
        return WhisperOptions(
            recording=item_digest(
                samples,
                kind=_KIND,
                processor=self.fingerprint,
                parameters={},
                length=self._config.encoder.max_positions,
            ),
            num_frames=num_frames,
            stop_frame=num_frames,
            language=self._tokens.languages.get(code) if code is not None else None,
            translate=task.translate,
            # A recording of several windows is cut at timestamps.
            timestamps="segment" in task.timestamps or num_frames > self._config.num_frames,
            previous=self.previous_ids(task.prompt),
            fallback=task.fallback,
        )

    def _check(self, task: TranscriptionTask) -> None:
        if "word" in task.timestamps:
            raise RequestError(
                "this model does not time words; ask for the timestamps of segments",
                param="timestamp_granularities",
            )
        languages = self._tokens.languages
        known = sorted(languages) or [ENGLISH]
        if task.language is not None and language_code(task.language) not in known:
            raise RequestError(
                f"language is {task.language!r:.40}, which this model does not know; it knows "
                f"{', '.join(known)}",
                param="language",
            )
        if task.translate and self._tokens.translate is None:
            raise RequestError(
                "this model knows English only and does not translate; use one of several "
                "languages, or ask for a transcription",
                param="model",
            )


def build(folder: Path, config: dict[str, Any], tokenizer: TextTokenizer) -> WhisperProcessor:
    """Return the processor of a checkpoint.

    Args:
        folder: The checkpoint's.
        config: Not read: what it lacks is read from the folder, too.
        tokenizer: Of the same checkpoint.

    Raises:
        WeightsError: If a config is broken.
        UnsupportedError: If the checkpoint asks for something that is not built.
    """
    return WhisperProcessor(*read_whisper(folder), tokenizer)
