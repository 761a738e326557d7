"""Seconds to write down clips of 30 seconds, greedy, beside CTranslate2 on the same weights.

Features are counted in. Each engine in the dtype that is best for it, and in float32.
"""

import difflib
import statistics
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from benchmarks.peers import Peer

MODEL = Path("whisper-base")
RATE = 16_000
CLIP = 30 * RATE
ROUNDS = 3
ENGINES = (
    ("mstar bfloat16", "worker_whisper_mstar.py", "bfloat16"),
    ("mstar float32", "worker_whisper_mstar.py", "float32"),
    ("ctranslate2 float32", "worker_whisper_ctranslate2.py", "float32"),
    ("ctranslate2 int8", "worker_whisper_ctranslate2.py", "int8"),
)
_NAMES = ("mstar bfloat16", "mstar float32", "ctranslate2 float32", "ctranslate2 int8")
_RECORDINGS = ("two_cities", "endgame_nagg_nell", "beckett")


def _recordings() -> npt.NDArray[np.float32]:
    spec = find_spec("moonshine_voice")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("moonshine-voice, which has the recordings, is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "assets"
    parts = []
    for name in _RECORDINGS:
        samples, rate = soundfile.read(folder / f"{name}.wav", dtype="float32")
        parts.append(soxr.resample(samples, rate, RATE))
    return np.concatenate(parts).astype(np.float32)


def clips(count: int) -> npt.NDArray[np.float32]:
    """Return clips of speech, no two alike, ``[count, CLIP]``."""
    whole = _recordings()
    step = (len(whole) - CLIP) // 8
    return np.stack([whole[n * step : n * step + CLIP] for n in range(count)])


def run(engines: tuple[str, ...] = _NAMES) -> list[dict[str, Any]]:
    """Return a row an engine: medians of alternating rounds."""
    peers = [
        Peer(name, sys.executable, script, MODEL, dtype)
        for name, script, dtype in ENGINES
        if name in engines and ("ctranslate2" not in name or find_spec("ctranslate2"))
    ]
    rows: list[dict[str, Any]] = [{"engine": peer.name} for peer in peers]
    texts: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for count in (1, 8):
                path = str(Path(folder) / f"{count}.npy")
                np.save(path, clips(count))
                seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
                if count == 1:
                    # The first clip of a process finds memory that was never touched.
                    for peer in peers:
                        peer.ask({"clips": path})
                for _ in range(ROUNDS):
                    for peer, row in zip(peers, rows, strict=True):
                        answer = peer.ask({"clips": path})
                        seconds[peer.name].append(answer["seconds"])
                        texts[peer.name] = " ".join(answer["texts"])
                        row[f"tokens of {count}"] = answer["tokens"]
                for peer, row in zip(peers, rows, strict=True):
                    row[f"{count} at once (s)"] = round(statistics.median(seconds[peer.name]), 2)
        finally:
            for peer in peers:
                peer.close()
    last = texts[peers[-1].name].split()
    for peer, row in zip(peers, rows, strict=True):
        same = difflib.SequenceMatcher(None, texts[peer.name].split(), last, autojunk=False)
        row["words as in the last row"] = f"{100 * same.ratio():.1f} %"
    return rows
