"""The voice assistant with two models on a CUDA device, and a speaker on the CPU."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mstar.assistant.model import AssistantOptions, VoiceAssistant, assistant_options, chat_ids
from mstar.assistant.processor import AssistantProcessor
from mstar.catalog import load_model, load_prompting
from mstar.engine.array import to_numpy
from mstar.engine.engine import EngineCore
from mstar.engine.output import Emitted
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.models.onnx import Feeds, Fetched, OnnxSession
from mstar.models.speech.model import SpeechModel
from mstar.models.speech.voice import Delivery, Samples, Voice
from mstar.models.whisper.model import WhisperModel
from mstar.preprocess.media.types import AudioMedia, Media
from mstar.preprocess.processors.base import ChatTask, Transcriber
from tests.gpu import likely
from tests.gpu.likely import HEAD_DIM, Told
from tests.gpu.replay import SHARE, ask_all, assert_told, replayed
from tests.gpu.wide import wide_family
from tests.laws.families import asking
from tests.laws.watching import PAGE_SIZE, Ask
from tests.models import onnx_graphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOLUME = 0.5


class Beeper(Voice):
    """Makes one sample of each character."""

    rate = 8000
    speakers = ("beeper",)
    language = None

    def __init__(self) -> None:
        self.session = OnnxSession(onnx_graphs.scaled(), threads=1, name="beeper")

    def feeds(self, text: str, delivery: Delivery) -> list[Feeds]:
        return [{"x": beeps(text)[None], "factor": np.array([VOLUME], np.float32)}]

    def samples(self, fetched: Fetched) -> Samples:
        samples: Samples = fetched["y"][0]
        return samples


def beeps(text: str) -> npt.NDArray[np.float32]:
    return np.array([ord(character) / 65536 for character in text], np.float32)


class Room:
    """An assistant of tiny models, and what prepares its requests."""

    def __init__(self, dtype: str) -> None:
        pytest.importorskip("onnxruntime")
        (_, hears), (self.text, writes) = (
            wide_family(name, HEAD_DIM[dtype]) for name in ("whisper", "llama")
        )
        listener, answerer = (
            load_model(str(folder), dtype=dtype, device=likely.DEVICE)[0]
            for folder in (hears, writes)
        )
        assert isinstance(listener, WhisperModel)
        self.tokenizer, _ = load_prompting(str(writes))
        _, processor = load_prompting(str(hears))
        assert isinstance(processor, Transcriber)
        speaker: Any = None
        self.desk = AssistantProcessor(self.tokenizer, processor, speaker)
        self.model = VoiceAssistant(
            "tiny", listener, answerer, SpeechModel("beeper", Beeper()), self.tokenizer
        )

    def options(self, ask: Ask) -> AssistantOptions:
        options = assistant_options(ask("r", None))
        assert options is not None
        return options

    def asking(self, seed: int | None, text: str, *, is_spoken: bool) -> Ask:
        """Return a chat of a recording, if there is a seed for one, and a text."""
        media: list[Media] = []
        if seed is not None:
            noise = np.random.default_rng(seed).standard_normal(6400 + 800 * seed)
            media = [AudioMedia((0.1 * noise).astype(np.float32), self.desk.rate)]
        content = [{"type": "audio"}] * len(media) + [{"type": "text", "text": text}]
        modalities = frozenset({"text", "audio"} if is_spoken else {"text"})
        messages = [{"role": "user", "content": content}]
        draft = self.desk.chat(messages, media, ChatTask(modalities=modalities))
        (ids,) = draft.parts
        assert isinstance(ids, list)

        def make(name: str, root: bytes | None) -> PreparedRequest:
            return PreparedRequest(
                request_id=name,
                token_ids=ids,
                params=SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
                root=root,
                context=list(draft.context),
                options=dict(draft.options),
            )

        return make


def texts(pieces: Sequence[Emitted], name: str) -> list[str]:
    return [p.text or p.info.get("text", "") for p in pieces if p.name == name]


def assert_spoken(told: Told, text: str) -> None:
    """Assert that a text was spoken sentence by sentence, by the graph."""
    spoken = texts(told.emitted, "audio")
    assert "".join("".join(spoken).split()) == "".join(text.split())
    sounds = [to_numpy(p.array) for p in told.emitted if p.name == "audio" and p.array is not None]
    for sound, sentence in zip(sounds, spoken, strict=True):
        np.testing.assert_array_equal(sound, VOLUME * beeps(sentence))


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_answers_what_it_heard_and_says_what_it_wrote(dtype: str, cuda_graphs: bool) -> None:
    room = Room(dtype)
    core = EngineCore(
        room.model,
        Deployment(
            device=likely.DEVICE,
            dtype=dtype,
            page_size=PAGE_SIZE,
            num_pages=400,
            max_num_seqs=8,
            cuda_graphs=cuda_graphs,
        ),
    )
    asks = [
        room.asking(1, "What is that?", is_spoken=True),
        room.asking(None, "Tell me more.", is_spoken=True),
        room.asking(2, "Why?", is_spoken=False),
        room.asking(3, "Go on.", is_spoken=True),
    ]
    for _ in range(2):
        answers = ask_all(core, asks, logprobs=20)
        written = []
        for ask, told in zip(asks, answers, strict=True):
            assert len(told.tokens) == 30
            heard = ["".join(texts(told.emitted, "transcript")).strip()]
            assert bool(ask("r", None).context) == bool(heard[0])
            ids = chat_ids(room.tokenizer, room.options(ask), heard)
            written.append(asking(ids, max_tokens=30))
            if room.options(ask).is_spoken:
                assert_spoken(told, room.tokenizer.decode(told.tokens))
        # What was heard is held against the CPU elsewhere.
        known = replayed(
            room.text.model,
            written,
            [told.tokens for told in answers],
        )
        for told, theirs in zip(answers, known, strict=True):
            assert_told(told, theirs.logits, SHARE[dtype], is_best=True)
    assert core.stats().cached_tokens > 0
    recorders = core._runner._recorders
    is_recorded = cuda_graphs and likely.DEVICE == "cuda" and dtype != "float32"
    assert set(recorders) == ({"listen.decoder", "answer.decoder"} if is_recorded else set())
    assert all(recorder.num_replays > 0 for recorder in recorders.values())
