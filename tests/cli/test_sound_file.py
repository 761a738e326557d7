"""Files that answers are spoken to."""

import io
import os
import threading
import wave
from pathlib import Path

import numpy as np
import pytest

from mstar.cli.sound_file import SoundFile, SoundFiles
from mstar.errors import StorageError
from mstar.preprocess.results import Sound

RATE = 8000


def tone(num_samples: int, value: float = 0.5) -> Sound:
    return Sound(np.full(num_samples, value, np.float32), RATE)


def samples_of(data: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def test_a_file_is_whole_after_every_piece(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    file = SoundFile(path)
    for number in (1, 2, 3):
        file.write(tone(100, number / 8))
        data = path.read_bytes()
        assert len(samples_of(data)) == 100 * number
        assert len(data) == 44 + 200 * number
    file.close()
    expected = np.repeat([4096, 8192, 12288], 100)
    assert np.array_equal(samples_of(path.read_bytes()), expected)
    assert file.seconds == pytest.approx(300 / RATE)


def test_what_stood_there_goes_with_the_first_piece_only(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    path.write_bytes(b"x" * 10_000)
    SoundFile(path).close()
    assert path.read_bytes() == b"x" * 10_000
    file = SoundFile(path)
    file.write(tone(10))
    file.close()
    assert len(samples_of(path.read_bytes())) == 10


def test_a_file_made_for_nothing_goes(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    file = SoundFile(path)
    assert path.exists()
    file.close()
    assert not path.exists()


@pytest.mark.parametrize("name", ["", "no/out.wav"])
def test_what_cannot_be_written_is_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        SoundFile(tmp_path / name)


def test_a_pipe_gets_a_head_of_open_length(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    reader.start()
    file = SoundFile(path)
    file.write(tone(10))
    file.write(tone(10))
    file.close()
    reader.join(10)
    (data,) = got
    assert data[40:44] == b"\xff" * 4
    assert data[44:] == np.full(20, 16384, "<i2").tobytes()
    assert path.exists()


def test_further_answers_get_numbers(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    files = SoundFiles(path)
    for number in (1, 2, 3):
        file = files.take()
        file.write(tone(number))
        files.give_back(file)
    files.close()
    lengths = {
        found.name: len(samples_of(found.read_bytes())) for found in sorted(tmp_path.iterdir())
    }
    assert lengths == {"out-2.wav": 2, "out-3.wav": 3, "out.wav": 1}


def test_an_answer_that_failed_uses_up_no_name(tmp_path: Path) -> None:
    files = SoundFiles(tmp_path / "out.wav")
    for number in (0, 1, 0, 2):
        file = files.take()
        if number:
            file.write(tone(number))
        files.give_back(file)
    files.close()
    lengths = {found.name: len(samples_of(found.read_bytes())) for found in tmp_path.iterdir()}
    assert lengths == {"out.wav": 1, "out-2.wav": 2}


def test_a_talk_without_an_answer_leaves_no_file(tmp_path: Path) -> None:
    files = SoundFiles(tmp_path / "out.wav")
    files.close()
    files.close()
    assert not list(tmp_path.iterdir())
