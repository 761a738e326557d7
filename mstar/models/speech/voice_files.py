"""Which files make a voice; reads none of them."""

from pathlib import Path

from mstar.errors import WeightsError

PIPER, KOKORO = "PiperVoice", "KokoroVoice"
"""What a voice's architecture is called."""
KOKORO_FILES = ("kokoro-v1.0.int8.onnx", "vocab.json", "voices_ja.npz")
"""Phonemes to sound, phonemes to ids, and a table of styles for each speaker."""


def voice_architecture(path: Path) -> str | None:
    """Return the architecture of the voice at a file or in a folder; ``None``: there is none."""
    if path.suffix == ".onnx" and path.is_file():
        return PIPER
    if not path.is_dir() or (path / "config.json").exists():
        return None
    if all((path / name).is_file() for name in KOKORO_FILES):
        return KOKORO
    return PIPER if _piper_files(path) else None


def piper_file(path: Path) -> Path:
    """Return the graph of a Piper voice: the file itself, or the only one of its folder.

    Raises:
        WeightsError: If a folder has several.
    """
    if path.is_file():
        return path
    found = _piper_files(path)
    if len(found) != 1:
        listed = ", ".join(file.name for file in found) or "none"
        raise WeightsError(
            f"{path}: a folder must have one Piper voice (NAME.onnx and NAME.onnx.json), this has "
            f"{listed}; name the file"
        )
    return found[0]


def _piper_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.onnx") if Path(f"{file}.json").is_file())
