import json
from pathlib import Path

import numpy as np
import pytest

from mstar.errors import RequestError, WeightsError
from mstar.models.speech.kokoro import KokoroVoice
from mstar.models.speech.voice import Delivery
from mstar.models.speech.voice_files import KOKORO_FILES
from tests.models.onnx_graphs import scaled
from tests.models.speaking import FOX, kokoro
from tests.oracles.whisper import transcribe, words


@pytest.fixture(scope="module")
def voice() -> KokoroVoice:
    return kokoro()


@pytest.mark.slow
def test_what_is_said_is_understood(voice: KokoroVoice) -> None:
    samples = voice.speak(FOX)
    assert samples.dtype == np.float32
    assert np.abs(samples).max() <= 1
    assert words(transcribe(samples, voice.rate)) == words(FOX)
    again = voice.speak(FOX, Delivery(seed=9))
    assert np.array_equal(samples, again)


@pytest.mark.slow
def test_japanese_is_spoken_from_its_phonemes(voice: KokoroVoice) -> None:
    phonemes = "konniʨiwa, sekai no minasaɴ."
    samples = voice.speak(phonemes, Delivery(is_phonemes=True, language="ja", voice="jm_kumo"))
    assert "世界" in transcribe(samples, voice.rate, "ja")


def test_speakers_have_styles_of_their_own(voice: KokoroVoice) -> None:
    assert voice.speakers == ("jf_alpha", "jf_gongitsune", "jf_nezumi", "jf_tebukuro", "jm_kumo")
    one, other = (
        voice.feeds("Hello.", Delivery(voice=name))[0]["style"] for name in voice.speakers[:2]
    )
    assert one.shape == other.shape == (1, 256)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("text", ["", " \n", "...", "?!", "\ud800"])
def test_text_with_nothing_to_say_has_no_samples(voice: KokoroVoice, text: str) -> None:
    assert voice.speak(text).shape == (0,)


def test_text_without_a_stop_is_spoken_in_bounded_runs(voice: KokoroVoice) -> None:
    runs = voice.feeds("word and more of it " * 500, Delivery())
    assert len(runs) > 10
    assert max(feeds["tokens"].shape[1] for feeds in runs) <= 510 + 2


def test_what_the_voice_cannot_do_is_refused_naming_the_field(voice: KokoroVoice) -> None:
    for delivery, param in ((Delivery(voice="x"), "voice"), (Delivery(language="ja"), "language")):
        with pytest.raises(RequestError) as caught:
            voice.speak("Hello.", delivery)
        assert caught.value.param == param


def test_broken_files_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    graph, vocabulary, styles = (tmp_path / name for name in KOKORO_FILES)
    with pytest.raises(WeightsError, match=r"vocab\.json: cannot be read"):
        KokoroVoice(tmp_path)
    vocabulary.write_text("[]")
    with pytest.raises(WeightsError, match="no vocabulary of Kokoro"):
        KokoroVoice(tmp_path)
    vocabulary.write_text(json.dumps({"vocab": {"a": 1}}))
    styles.write_bytes(b"no archive")
    with pytest.raises(WeightsError, match="no styles of Kokoro"):
        KokoroVoice(tmp_path)
    np.savez(styles, ann=np.zeros((4, 2), np.float32))
    with pytest.raises(WeightsError, match=r"style of 'ann' has the shape \(4, 2\)"):
        KokoroVoice(tmp_path)
    np.savez(styles)
    with pytest.raises(WeightsError, match="has no speakers"):
        KokoroVoice(tmp_path)
    np.savez(styles, ann=np.zeros((4, 1, 256), np.float32))
    with pytest.raises(WeightsError, match="there is no such file"):
        KokoroVoice(tmp_path)
    graph.write_bytes(scaled())
    with pytest.raises(WeightsError, match="Kokoro takes"):
        KokoroVoice(tmp_path)
