"""The worker that writes down clips on CTranslate2; see ``bench_whisper``."""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import ctranslate2
import numpy as np
from tokenizers import Tokenizer

from mstar.models.locate import resolve
from mstar.preprocess.mel import log_mel

_PROMPT = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")


def main() -> None:
    """Answer cases until the input ends."""
    start = time.perf_counter()
    folder = resolve(sys.argv[1])
    model = ctranslate2.models.Whisper(
        str(folder), compute_type=sys.argv[2], intra_threads=int(sys.argv[3])
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = [tokenizer.token_to_id(token) for token in _PROMPT]
    print(json.dumps({"load_seconds": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        clips = np.load(json.loads(line)["clips"])
        start = time.perf_counter()
        features = np.stack([log_mel(clip, model.n_mels) for clip in clips])
        view = ctranslate2.StorageView.from_array(features)
        found = model.generate(view, [prompt] * len(clips), beam_size=1)
        ids = [own.sequences_ids[0] for own in found]
        texts = [tokenizer.decode(own).strip() for own in ids]
        seconds = time.perf_counter() - start
        # The token that ends a transcript is generated, too.
        answer = {"seconds": seconds, "tokens": sum(map(len, ids)) + len(ids), "texts": texts}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
