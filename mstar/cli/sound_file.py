"""The sound of answers as files that are whole whenever their writing is broken off."""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from mstar.errors import StorageError

if TYPE_CHECKING:
    from mstar.preprocess.results import Sound


class SoundFile:
    """A WAV that grows piece by piece; its head always says how long it is.

    What stood in the file before goes with the first piece, so that a question that fails leaves
    it. A pipe gets a head that leaves the length open.

    Args:
        path: Where it is.

    Raises:
        StorageError: If it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds = 0.0
        """Length of what was written."""
        self._num_samples = 0
        self._is_new = not path.exists()
        try:
            # Not truncated yet.
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            self._is_plain = stat.S_ISREG(os.fstat(self._file).st_mode)
        except OSError as error:
            raise self._failed(error) from error

    def write(self, sound: "Sound") -> None:
        """Append a piece.

        Raises:
            StorageError: If it cannot be written.
        """
        from mstar.preprocess.media.wav import pcm16, wav_header  # noqa: PLC0415 - loads numpy

        try:
            if not self._num_samples:
                if self._is_plain:
                    os.truncate(self._file, 0)
                self._put(wav_header(sound.rate, 0 if self._is_plain else None))
            self._put(pcm16(sound.samples))
            self._num_samples += len(sound.samples)
            self.seconds += sound.seconds
            if self._is_plain:
                os.pwrite(self._file, wav_header(sound.rate, self._num_samples), 0)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close the file; one that was made for nothing goes."""
        os.close(self._file)
        if self._is_new and not self._num_samples:
            self.path.unlink(missing_ok=True)

    def _put(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(f"{self.path} cannot be written: {error.strerror}")


class SoundFiles:
    """A file for each answer of a talk: ``OUT.wav``, ``OUT-2.wav``, ``OUT-3.wav`` and so on.

    Args:
        path: Of the first, which is opened at once.

    Raises:
        StorageError: If it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_written = 0
        self._first: SoundFile | None = SoundFile(path)

    def take(self) -> SoundFile:
        """Return the file of the next answer; it comes back by ``give_back``.

        Raises:
            StorageError: If it cannot be written.
        """
        first, self._first = self._first, None
        if first is not None:
            return first
        number = self._num_written + 1
        name = f"{self._path.stem}-{number}{self._path.suffix}" if number > 1 else self._path.name
        return SoundFile(self._path.with_name(name))

    def give_back(self, file: SoundFile) -> None:
        """Close a file; where nothing was written, the next answer gets its name."""
        self._num_written += file.seconds > 0
        file.close()

    def close(self) -> None:
        """Close what nobody took."""
        if self._first is not None:
            self._first.close()
            self._first = None
