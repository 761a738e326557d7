"""Text to speech as a model: the text goes over a streaming edge, and every sentence is spoken.

The first sentence can be heard while the next is made.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mstar.engine.array import from_numpy
from mstar.engine.batch import Batch, Node, NodeKind, NodeOutput
from mstar.engine.chunks import Sentences
from mstar.engine.graph import Cursor, Edge, ForEach, Graph, Run, Sequential
from mstar.engine.model import Model
from mstar.engine.output import Emitted
from mstar.engine.request import PreparedRequest, Request
from mstar.errors import RequestError, UnsupportedError
from mstar.models.base import Description
from mstar.models.checkpoint import Checkpoint
from mstar.models.onnx import Feeds, Fetched, OnnxNode
from mstar.models.speech.kokoro import KokoroVoice
from mstar.models.speech.piper import PiperVoice
from mstar.models.speech.voice import Delivery, Voice, joined
from mstar.models.speech.voice_files import KOKORO, PIPER

AUDIO = "audio"
"""Name of what a sentence yields: float32 ``[n]``, with ``rate`` and ``text`` in its info."""
MAX_CHARS = 100_000
"""Of one text: more than an hour of speech."""

READER, SPEAKER = "reader", "speaker"
SENTENCES = "sentences"
_VOICES: dict[str, Callable[[Path], Voice]] = {PIPER: PiperVoice, KOKORO: KokoroVoice}
_GRAPH = Graph(
    nodes=(READER, SPEAKER),
    walks=(("speak", Sequential(Run(READER), ForEach(Run(SPEAKER), SENTENCES))),),
    edges=(Edge(READER, SPEAKER, SENTENCES, Sentences()),),
)


class SpeakerNode(OnnxNode):
    """Speaks each chunk of text; a request's option ``speech`` says how (see :class:`Delivery`).

    Texts differ in length, so that each takes a run of its own: a batch is what can run side by
    side, since who listens waits for the first of it.

    Args:
        voice: Who speaks.
    """

    def __init__(self, voice: Voice) -> None:
        super().__init__(voice.session)
        self.max_batch = voice.session.num_at_once
        self.voice = voice

    def delivery(self, options: Mapping[str, Any]) -> Delivery:
        """Return how a request's text is to be spoken.

        Raises:
            RequestError: If the voice cannot do what the options ask.
        """
        delivery = Delivery.of(options.get("speech") or {})
        self.voice.check(delivery)
        return delivery

    def feeds(self, request: Request, chunk: object) -> Sequence[Feeds]:
        """Return a run for each sentence of the chunk."""
        assert isinstance(chunk, str), f"a {type(chunk).__name__} cannot be spoken"
        return self.voice.feeds(chunk, self.delivery(request.prepared.options))

    def emit(self, request: Request, chunk: object, fetched: Sequence[Fetched]) -> list[Emitted]:
        """Return the chunk's sound, if it has any."""
        if not fetched:
            return []
        samples = joined([self.voice.samples(one) for one in fetched])
        info = {"rate": self.voice.rate, "text": chunk}
        return [Emitted(name=AUDIO, array=from_numpy(samples), info=info)]


class ReaderNode(Node):
    """Puts the text of a request on the edge to the speaker."""

    kind = NodeKind.VISIT

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        """Hand on each request's text."""
        emitted = {
            place: [Emitted(name=SENTENCES, text=request.prepared.options["input"])]
            for place, request in enumerate(batch.requests)
        }
        return NodeOutput(token_ids=(), emitted=emitted)


class SpeechModel(Model):
    """A voice that speaks the text in a request's option ``input``.

    It takes no tokens, and has no state between sentences.

    Args:
        name: What the user calls it.
        voice: Who speaks.
    """

    def __init__(self, name: str, voice: Voice) -> None:
        self.name = name
        self.voice = voice
        self._speaker = SpeakerNode(voice)
        self.nodes = {READER: ReaderNode(), SPEAKER: self._speaker}
        self.graph = _GRAPH
        self.specs = ()
        self.vocab_size = 0
        self.max_model_len = 1
        self.stop_token_ids = frozenset()
        self.root_constants = None

    def first_walk(self, prepared: PreparedRequest) -> Cursor:
        """Return the one walk.

        Raises:
            RequestError: If there is no text, or the voice cannot speak as the options ask.
        """
        check_text(prepared.options.get("input"))
        self.check(prepared)
        return self.graph.cursor("speak")

    def check(self, prepared: PreparedRequest) -> None:
        """Verify that the voice can speak as a request's options ask.

        Raises:
            RequestError: If it cannot.
        """
        self._speaker.delivery(prepared.options)

    def next_walk(self, request: Request) -> None:
        """Return ``None``: what is spoken is the answer."""

    def holds(self, predicate: str, request: Request) -> bool:
        """Tell whether a predicate holds; the graph has none."""
        raise AssertionError(f"the graph has no predicate {predicate!r}")


def check_text(text: object) -> None:
    """Verify that a text can be spoken.

    Raises:
        RequestError: If it is none, blank or too long.
    """
    if not isinstance(text, str) or not text.strip():
        raise RequestError(
            f"input is {text!r:.40}; it must be a text with something to say", param="input"
        )
    if len(text) > MAX_CHARS:
        raise RequestError(
            f"input has {len(text)} characters, at most {MAX_CHARS} are spoken at once; send it in "
            "parts",
            param="input",
        )


def load(
    checkpoint: Checkpoint,
    *,
    name: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SpeechModel:
    """Load a voice.

    Args:
        checkpoint: Of a Piper voice or of Kokoro.
        name: What the user calls it.
        dtype: Without effect: a graph computes in what it was written for.
        device: Must be the CPU.
        progress: Called once, when the graph is loaded.

    Raises:
        WeightsError: If a file is missing or broken.
        UnsupportedError: If ONNX Runtime or espeak-ng is missing, or the device is no CPU.
    """
    if device is not None and device.type != "cpu":
        raise UnsupportedError(f"{name} speaks on the CPU only, not on {device}")
    voice = _VOICES[checkpoint.architecture](checkpoint.path)
    if progress is not None:
        progress(1, 1)
    return SpeechModel(name, voice)


def describe(checkpoint: Checkpoint) -> Description:
    """Return what can be said of a voice without loading it: it has no KV."""
    return Description(root_constants=None, graph=_GRAPH, specs=(), vocab_size=0, max_model_len=1)
