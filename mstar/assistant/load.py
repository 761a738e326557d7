"""Puts the voice assistant together out of the models that it is made of."""

from collections.abc import Callable
from pathlib import Path

from mstar.assistant.model import (
    VoiceAssistant,
    assistant_graph,
    assistant_specs,
    joined_constants,
)
from mstar.assistant.processor import AssistantProcessor
from mstar.errors import ConfigError
from mstar.models import describe_model, load_model
from mstar.models.base import Description
from mstar.models.locate import resolve
from mstar.models.speech.model import SpeechModel
from mstar.models.whisper.model import WhisperModel
from mstar.preprocess.processors import load_processor, load_tokenizer
from mstar.preprocess.processors.base import Speaker, Transcriber
from mstar.preprocess.tokenizer import TextTokenizer

LISTENER, ANSWERER, SPEAKER = "whisper-base", "smollm2-135m", "piper"
"""Names of the three models."""
PARTS = (LISTENER, ANSWERER, SPEAKER)


def load(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[VoiceAssistant, str]:
    """Load the three models and return the assistant with the name of the dtype it is in.

    Args:
        name: What the user calls it.
        dtype: Of the listener and the language model; ``auto`` is the language model's own.
        device: Where these two run; the speaker runs on the CPU.
        progress: Called with hundredths of models loaded, and with all of them.

    Raises:
        ModelNotFoundError: If the packages of a model are not installed.
        UnsupportedError: If what the speaker needs is not installed.
    """
    # What is not installed is missed here, before weights are read in vain.
    speaker, _ = load_model(SPEAKER, progress=_part(progress, 0))
    answerer, dtype = load_model(ANSWERER, dtype=dtype, device=device, progress=_part(progress, 1))
    listener, _ = load_model(LISTENER, dtype=dtype, device=device, progress=_part(progress, 2))
    if not isinstance(listener, WhisperModel) or not isinstance(speaker, SpeechModel):
        raise ConfigError(f"{LISTENER} and {SPEAKER} are no listener and no speaker")
    tokenizer = TextTokenizer.load(resolve(ANSWERER))
    return VoiceAssistant(name, listener, answerer, speaker, tokenizer), dtype


def describe(*, dtype: str = "auto", device: str = "cpu") -> tuple[Description, str]:
    """Return what the assistant says of itself, and the dtype it would be in; loads no weights.

    Arguments and errors are those of ``load``.
    """
    answerer, dtype = describe_model(ANSWERER, dtype=dtype, device=device)
    listener, _ = describe_model(LISTENER, dtype=dtype, device=device)
    speaker, _ = describe_model(SPEAKER)
    described = Description(
        root_constants=joined_constants(
            {LISTENER: listener.root_constants, ANSWERER: answerer.root_constants}
        ),
        graph=assistant_graph(listener, answerer, speaker),
        specs=assistant_specs(listener, answerer),
        vocab_size=answerer.vocab_size,
        max_model_len=answerer.max_model_len,
    )
    return described, dtype


def load_prompting() -> tuple[TextTokenizer, AssistantProcessor]:
    """Return the language model's tokenizer, and what prepares chats, recordings and texts.

    Raises:
        ModelNotFoundError: If the packages of a model are not installed.
    """
    tokenizer = TextTokenizer.load(resolve(ANSWERER))
    listener, speaker = (_processor(resolve(name)) for name in (LISTENER, SPEAKER))
    assert isinstance(listener, Transcriber), f"{LISTENER} does not listen"
    assert isinstance(speaker, Speaker), f"{SPEAKER} does not speak"
    return tokenizer, AssistantProcessor(tokenizer, listener, speaker)


def _part(
    progress: Callable[[int, int], None] | None, place: int
) -> Callable[[int, int], None] | None:
    """Return what one of the three models tells its progress, each having a third of all."""
    if progress is None:
        return None

    def part(done: int, total: int) -> None:
        progress(100 * place + 100 * done // total, 300)

    return part


def _processor(path: Path) -> object:
    return load_processor(path, load_tokenizer(path))
