import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar.errors import RequestError, UnsupportedError, WeightsError
from mstar.models.speech.piper import PiperVoice, read_config
from mstar.models.speech.voice import Delivery
from tests.models.onnx_graphs import scaled
from tests.models.speaking import FOX, piper, piper_path
from tests.oracles.whisper import transcribe, words

CALM = Delivery(noise=0)


@pytest.fixture(scope="module")
def voice() -> PiperVoice:
    return piper()


@pytest.fixture(scope="module")
def theirs() -> Any:
    path = piper_path()
    return pytest.importorskip("piper").PiperVoice.load(path)


def _their_samples(theirs: Any, text: str, **config: float) -> np.ndarray:
    chunks = theirs.synthesize(text, pytest.importorskip("piper").SynthesisConfig(**config))
    return np.concatenate([chunk.audio_float_array for chunk in chunks])


@pytest.mark.parametrize(
    "text", [FOX, "Dr. Smith paid $3.50 at 10:30! Did he?", "naïve café — “quoted”; 😀"]
)
def test_phonemes_and_ids_are_those_of_pipers_own(
    voice: PiperVoice, theirs: Any, text: str
) -> None:
    sentences = theirs.phonemize(text)
    assert voice.sentences(text) == sentences
    for phonemes in sentences:
        assert voice.ids(phonemes) == theirs.phonemes_to_ids(phonemes)


@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_without_noise_samples_are_those_of_pipers_own(
    voice: PiperVoice, theirs: Any, speed: float
) -> None:
    text = "Hello there. How are you?"
    expected = _their_samples(theirs, text, noise_scale=0, noise_w_scale=0, length_scale=1 / speed)
    found = voice.speak(text, Delivery(noise=0, speed=speed))
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5


def test_the_same_seed_sounds_the_same_whatever_was_said_before(voice: PiperVoice) -> None:
    first = voice.speak("Good morning.", Delivery(seed=7))
    voice.speak("Something else.")
    assert np.array_equal(voice.speak("Good morning.", Delivery(seed=7)), first)
    other = voice.speak("Good morning.", Delivery(seed=8))
    assert other.shape != first.shape or not np.array_equal(other, first)
    calm = voice.speak("Good morning.", CALM)
    assert np.array_equal(calm, voice.speak("Good morning.", Delivery(noise=0, seed=3)))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 3])
def test_sentences_side_by_side_sound_as_they_do_alone(threads: int) -> None:
    voice = PiperVoice(piper_path(), threads=threads)
    assert voice.session.num_at_once == 2
    texts = (FOX, "Hm.", "How do bees make honey?", "Where do they keep it?", "Good morning.")
    runs = [feeds for text in texts for feeds in voice.feeds(text, Delivery(seed=3))]
    together = voice.session.run_all(runs, frozenset())
    for feeds, found in zip(runs, together, strict=True):
        assert np.array_equal(voice.samples(found), voice.samples(voice.session.run(feeds)))


def test_noise_is_drawn_as_piper_draws_it(voice: PiperVoice, theirs: Any) -> None:
    """Lengths of a sentence vary with the noise as theirs do: the draws have their scale."""
    text = "Good morning."
    ours = [len(voice.speak(text, Delivery(seed=seed))) for seed in range(16)]
    them = [len(_their_samples(theirs, text)) for _ in range(16)]
    assert np.mean(ours) == pytest.approx(np.mean(them), rel=0.1)
    assert 1 / 3 < np.std(ours) / np.std(them) < 3


def test_half_the_speed_takes_twice_as_long(voice: PiperVoice) -> None:
    slow, plain, fast = (
        len(voice.speak("One two three.", Delivery(noise=0, speed=speed))) for speed in (0.5, 1, 2)
    )
    assert slow / plain == pytest.approx(2, rel=0.15)
    assert plain / fast == pytest.approx(2, rel=0.25)


@pytest.mark.parametrize("text", ["", " \n", "...", "?!", "\ud800", "\0", "«»"])
def test_text_with_nothing_to_say_has_no_samples(voice: PiperVoice, text: str) -> None:
    assert voice.speak(text).shape == (0,)


@pytest.mark.parametrize("text", ["😀", "12345 and 3.14", "a\0b", "你好", "[[hE]] <b>x</b> &amp;"])
def test_text_of_any_kind_is_spoken(voice: PiperVoice, text: str) -> None:
    samples = voice.speak(text)
    assert len(samples) > 0.1 * voice.rate
    assert np.abs(samples).max() == pytest.approx(1.0)


def test_text_without_a_stop_is_spoken_in_bounded_runs(voice: PiperVoice) -> None:
    for text in ("word and more of it " * 500, "x" * 10_000):
        runs = voice.feeds(text, Delivery())
        assert len(runs) > 5
        assert max(feeds["input"].shape[1] for feeds in runs) <= 2 * 400 + 3
    # Cut between words: every run but the last ends where a word does.
    blank = voice.config.ids[" "][0]
    words_cut = [feeds["input"][0] for feeds in voice.feeds("word and more " * 100, Delivery())]
    whole = voice.ids(voice.sentences("word and more " * 100)[0])
    kept = sum(int((ids == blank).sum()) for ids in words_cut) + len(words_cut) - 1
    assert kept == whole.count(blank)


def test_phonemes_may_be_given_in_place_of_text(voice: PiperVoice) -> None:
    phonemes = "".join(voice.sentences("Good morning.")[0])
    given = voice.speak(phonemes, Delivery(noise=0, is_phonemes=True))
    assert np.array_equal(given, voice.speak("Good morning.", CALM))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"voice": "nobody"}, "voice"),
        ({"language": "de"}, "language"),
        ({"speed": 0.1}, "speed"),
        ({"speed": float("nan")}, "speed"),
        ({"speed": "fast"}, "speed"),
        ({"noise": -1}, "noise"),
        ({"seed": -1}, "seed"),
        ({"seed": True}, "seed"),
    ],
)
def test_what_the_voice_cannot_do_is_refused_naming_the_field(
    voice: PiperVoice, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        voice.speak("Hello.", Delivery.of(options))
    assert caught.value.param == param
    assert str(options[param]) in caught.value.message


@pytest.mark.slow
def test_what_is_said_is_understood(voice: PiperVoice) -> None:
    for delivery in (Delivery(), Delivery(seed=5, speed=0.8)):
        assert words(transcribe(voice.speak(FOX, delivery), voice.rate)) == words(FOX)


# Files of other voices

CONFIG: dict[str, Any] = {
    "audio": {"sample_rate": 16_000},
    "espeak": {"voice": "en-us"},
    "num_speakers": 3,
    "speaker_id_map": {"ann": 0, "bob": 1, "cid": 2},
    "default_speaker_id": 1,
    "phoneme_type": "text",
    "phoneme_id_map": {"_": [0], "^": [1], "$": [2], "a": [3], "ab": [4, 5]},
    "vowel_clusters": [["a", "b"]],
}


def _written(folder: Path, config: object, graph: bytes = scaled()) -> Path:
    path = folder / "voice.onnx"
    path.write_bytes(graph)
    content = config if isinstance(config, str) else json.dumps(config)
    path.with_name("voice.onnx.json").write_text(content)
    return path


def test_a_voice_of_several_speakers_begins_with_its_own_default(tmp_path: Path) -> None:
    config = read_config(_written(tmp_path, CONFIG).with_name("voice.onnx.json"))
    assert list(config.speakers.items()) == [("bob", 1), ("ann", 0), ("cid", 2)]
    assert config.rate == 16_000
    assert config.language is None
    assert (config.noise_scale, config.length_scale, config.noise_width) == (0.667, 1.0, 0.8)
    numbered = CONFIG | {"speaker_id_map": {}, "default_speaker_id": 2}
    config = read_config(_written(tmp_path, numbered).with_name("voice.onnx.json"))
    assert list(config.speakers.items()) == [("2", 2), ("0", 0), ("1", 1)]


@pytest.mark.parametrize(
    ("config", "words_in_it"),
    [
        ("{", "no configuration of a Piper voice"),
        ("[]", "no configuration of a Piper voice"),
        ({}, "phoneme_id_map"),
        (CONFIG | {"phoneme_id_map": {"a": [1]}}, "no ids of"),
        (CONFIG | {"audio": {}}, "sample_rate"),
        (CONFIG | {"num_speakers": "many"}, "many"),
    ],
)
def test_a_broken_configuration_is_refused(
    tmp_path: Path, config: object, words_in_it: str
) -> None:
    with pytest.raises(WeightsError, match=words_in_it):
        PiperVoice(_written(tmp_path, config))


def test_missing_files_and_other_graphs_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    lonely = tmp_path / "lonely.onnx"
    lonely.write_bytes(scaled())
    with pytest.raises(WeightsError, match=r"lonely\.onnx\.json: cannot be read"):
        PiperVoice(lonely)
    with pytest.raises(WeightsError, match="this has none"):
        PiperVoice(tmp_path)
    with pytest.raises(WeightsError, match=r"lacks \['input', 'input_lengths', 'scales'\]"):
        PiperVoice(_written(tmp_path, CONFIG))
    with pytest.raises(WeightsError, match=r"voice\.onnx: no ONNX model"):
        PiperVoice(_written(tmp_path, CONFIG, b"\x0b"))


def test_phonemes_that_cannot_be_made_here_are_refused(tmp_path: Path) -> None:
    path = _written(tmp_path, CONFIG | {"phoneme_type": "pinyin"})
    with pytest.raises(UnsupportedError, match="'pinyin' cannot be made here"):
        PiperVoice(path)
