"""What is asked for beside chats: transcripts, speech, pictures, and answers by voice."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mstar.engine.request import ContextItem, context_root
from mstar.engine.resources.kv.keys import fingerprint
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import RequestError
from mstar.preprocess.items import prompt_keys
from mstar.preprocess.media.content import sound_source
from mstar.preprocess.media.types import AudioMedia, Media
from mstar.preprocess.processors.base import (
    ChatTask,
    Draft,
    ImageTask,
    SpeechTask,
    Task,
    TranscriptionTask,
)
from mstar.preprocess.prompt import item_tokens, request_root
from mstar.preprocess.tokenizer import TextTokenizer
from tests.preprocess.media.test_audio import encode, tone
from tests.preprocess.test_expansion import ROOT, TEMPLATE, asked, preparer, with_template


@pytest.fixture
def tokenizer(tokenizers: dict[str, TextTokenizer]) -> TextTokenizer:
    return with_template(tokenizers["byte_level"], TEMPLATE)


class Able:
    """Does everything that needs no chat, by writing down what it was asked for."""

    tasks: frozenset[Task] = frozenset({"transcription", "speech", "image", "chat"})
    kinds = frozenset({"audio"})
    modalities = frozenset({"text", "audio"})
    rate = 100
    fingerprint = b"able"

    def _draft(self, **fields: Any) -> Draft:
        values: dict[str, Any] = {"parts": [[5, 6, 7]], "max_tokens": 9}
        return Draft(**values | fields)

    def transcription(self, audio: AudioMedia, task: TranscriptionTask) -> Draft:
        item = ContextItem("audio", fingerprint(audio.samples.tobytes()), 30, {})
        return self._draft(context=[item], options={"language": task.language})

    def speech(self, text: str, task: SpeechTask) -> Draft:
        return self._draft(parts=[], options={"input": text, "voice": task.voice})

    def picture(self, prompt: str, task: ImageTask) -> Draft:
        return self._draft(companions={"unguided": [5, 0, 0]}, options={"size": task.size})

    def chat(
        self, messages: Sequence[Mapping[str, Any]], media: Sequence[Media], task: ChatTask
    ) -> Draft:
        return self._draft(options={"kinds": [m.kind for m in media], "voice": task.voice})


def recording(pitch: float = 440) -> Any:
    return sound_source(encode(tone(8_000, 0.1, pitch), 8_000, "WAV"), None, "file")


def test_keys_of_a_prompt_commit_to_what_it_attends_to(tokenizer: TextTokenizer) -> None:
    maker = preparer(tokenizer, Able())
    one, two, other = (
        maker.prepare(
            asked(messages=None, audio=recording(pitch), task=TranscriptionTask(language="de"))
        )
        for pitch in (440, 440, 880)
    )
    assert one.page_keys == two.page_keys
    assert one.page_keys != other.page_keys
    assert one.root == request_root(ROOT, None)
    begin = context_root(one.root, one.context)
    assert begin is not None
    assert one.page_keys == prompt_keys([5, 6, 7], (), 4, begin)
    assert one.options == {"language": "de"}
    assert item_tokens(one) == {"audio": 30}


def test_companions_have_keys_and_the_length_is_the_familys(tokenizer: TextTokenizer) -> None:
    fields: dict[str, Any] = {"messages": None, "text": "a cat", "params": SamplingParams()}
    prepared = preparer(tokenizer, Able()).prepare(asked(task=ImageTask(size=(8, 8)), **fields))
    (companion,) = prepared.companions
    root = request_root(ROOT, None)
    assert root is not None
    assert (companion.label, companion.token_ids) == ("unguided", [5, 0, 0])
    assert companion.page_keys == prompt_keys([5, 0, 0], (), 4, root)
    assert prepared.params.max_tokens == 9
    assert prepared.options == {"size": (8, 8)}


def test_speech_needs_no_tokens(tokenizer: TextTokenizer) -> None:
    prepared = preparer(tokenizer, Able()).prepare(
        asked(messages=None, text="hello", task=SpeechTask(voice="joe"))
    )
    assert prepared.token_ids == []
    assert prepared.options == {"input": "hello", "voice": "joe"}


def test_an_assistant_writes_the_prompts_of_chats_itself(tokenizer: TextTokenizer) -> None:
    sound = {"type": "audio", "audio": encode(tone(8_000), 8_000, "WAV")}
    task = ChatTask(modalities=frozenset({"text", "audio"}), voice="joe")
    prepared = preparer(tokenizer, Able()).prepare(asked("hi", sound, task=task))
    assert prepared.options == {"kinds": ["audio"], "voice": "joe"}


@pytest.mark.parametrize(
    ("processor", "fields", "message"),
    [
        (None, {"messages": None, "text": "x", "task": SpeechTask()}, "does not speak"),
        (None, {"messages": None, "text": "x", "task": ImageTask()}, "makes no pictures"),
        (None, {"messages": None, "audio": recording()}, "writes down no speech"),
        (None, {"task": ChatTask(modalities=frozenset({"text", "audio"}))}, "answers with text"),
        (Able(), {"messages": None, "text": "x"}, "continues no texts; .*, such as smollm2-135m"),
    ],
)
def test_what_a_model_cannot_do_is_said_with_what_it_can(
    tokenizer: TextTokenizer, processor: object, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        preparer(tokenizer, processor).prepare(asked("x", **fields))
    assert caught.value.code == "capability_missing"
