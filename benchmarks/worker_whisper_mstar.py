"""The worker that writes down clips on mstar; see ``bench_whisper``."""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from mstar.engine.engine import EngineCore
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.models import load_model
from mstar.models.locate import resolve
from mstar.preprocess.media.types import AudioMedia
from mstar.preprocess.processors.base import TranscriptionTask
from mstar.preprocess.processors.whisper import build
from mstar.preprocess.tokenizer import TextTokenizer

_TASK = TranscriptionTask(language="en")


def main() -> None:
    """Answer cases until the input ends."""
    start = time.perf_counter()
    name = sys.argv[1]
    torch.set_num_threads(int(sys.argv[3]))
    model, dtype = load_model(name, dtype=sys.argv[2])
    core = EngineCore(model, Deployment(dtype=dtype))
    processor = build(resolve(name), {}, TextTokenizer.load(resolve(name)))
    print(json.dumps({"load_seconds": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        clips = np.load(json.loads(line)["clips"])
        core.reset_prefix_cache()
        start = time.perf_counter()
        for number, clip in enumerate(clips):
            draft = processor.transcription(AudioMedia(clip, processor.rate), _TASK)
            (ids,) = draft.parts
            assert isinstance(ids, list)
            core.add_request(
                PreparedRequest(
                    request_id=str(number),
                    token_ids=ids,
                    params=SamplingParams(temperature=0.0),
                    context=list(draft.context),
                    options=dict(draft.options),
                )
            )
        texts = [""] * len(clips)
        num_tokens = 0
        while core.has_work:
            for output in core.step():
                assert output.error is None, output.error
                num_tokens += len(output.token_ids)
                for emitted in output.emitted:
                    texts[int(output.request_id)] = (emitted.text or "").strip()
        seconds = time.perf_counter() - start
        answer = {"seconds": seconds, "tokens": num_tokens, "texts": texts}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
