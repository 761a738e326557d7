"""Time to the first token of a second question about a picture, over that of the first one.

A small Qwen2.5-VL of drawn weights; the picture has 576 slots and a page 16, and the picture ends
at every offset of a page. ``prepared`` includes what the preprocess worker does: resizing, the
content name and page keys. The encoder must not run again, and the target for the ratio is 0.1.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mstar.engine.engine import EngineCore
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.models.dummy import DummyCheckpoint
from mstar.models.qwen2_5_vl import VisionEncoder, load
from mstar.preprocess.items import lay_out, prompt_keys
from mstar.preprocess.media.types import ImageMedia, Pixels
from mstar.preprocess.processors.qwen2_5_vl import QwenProcessor, build
from mstar.preprocess.prompt import request_root
from mstar.preprocess.tokenizer import TextTokenizer

PAGE_SIZE = 16
SIDE = 672
NUM_SLOTS = (SIDE // 28) ** 2
QUESTION = 24
ROUNDS = 3
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "text_config": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    },
    "vision_config": {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_heads": 4,
        "out_hidden_size": 256,
        "fullatt_block_indexes": [3],
        "tokens_per_second": 2,
    },
}


class Asker:
    """An engine that is asked about pictures, one question after the other."""

    def __init__(self) -> None:
        checkpoint = DummyCheckpoint(Path("qwen"), CONFIG)
        model = load(checkpoint, name="qwen", dtype=torch.float32, device=torch.device("cpu"))
        encoder = model.nodes["encoder"]
        assert isinstance(encoder, VisionEncoder)
        encode = encoder.encode
        self.num_encoded = 0

        def count(films: list[torch.Tensor]) -> list[torch.Tensor]:
            self.num_encoded += len(films)
            return encode(films)

        encoder.encode = count  # type: ignore[method-assign, assignment]
        self._processor: QwenProcessor = build(Path("no folder"), CONFIG, TextTokenizer.empty())
        self._engine = EngineCore(model, Deployment(page_size=PAGE_SIZE, num_pages=4096))
        self._root = request_root(self._engine.root, None)
        self._rng = np.random.default_rng(0)
        self._num_asked = 0

    def picture(self) -> Pixels:
        """Return a picture that nobody has seen."""
        return self._rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)

    def ask(self, before: int, picture: Pixels) -> tuple[float, float, int]:
        """Return seconds of preparing and to the first token, and the tokens that were reused.

        Args:
            before: Ids before the picture.
            picture: What a new question is about.
        """
        begin = time.perf_counter()
        (item,) = self._processor.expand(ImageMedia(picture))
        assert item.span.length == NUM_SLOTS
        question = self._rng.integers(1, 4000, QUESTION).tolist()
        made = lay_out([[7] * before, item, question])
        assert self._root is not None
        keys = prompt_keys(made.token_ids, made.spans, PAGE_SIZE, self._root)
        prepared = time.perf_counter()
        self._num_asked += 1
        self._engine.add_request(
            PreparedRequest(
                request_id=str(self._num_asked),
                token_ids=made.token_ids,
                params=SamplingParams(temperature=0.0, max_tokens=1),
                page_keys=keys,
                root=self._root,
                spans=made.spans,
                inputs=made.inputs,
            )
        )
        outputs = []
        while self._engine.has_work:
            outputs += self._engine.step()
        return prepared - begin, time.perf_counter() - prepared, outputs[-1].num_cached_tokens


def run(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return a row for each place on a page where the picture ends: medians over the rounds."""
    asker = Asker()
    asker.ask(0, asker.picture())
    rows: list[dict[str, Any]] = []
    for before in range(PAGE_SIZE):
        times = np.empty((rounds, 2, 2))
        for number in range(rounds):
            picture = asker.picture()
            *times[number, 0], num_cached = asker.ask(before, picture)
            assert num_cached < PAGE_SIZE, num_cached
            num_encoded = asker.num_encoded
            *times[number, 1], num_cached = asker.ask(before, picture)
            assert num_cached == before + NUM_SLOTS, num_cached
            assert asker.num_encoded == num_encoded, "a known picture was encoded again"
        engine = times[:, :, 1] * 1e3
        prepared = times.sum(2)
        rows.append(
            {
                "ends at": f"{(before + NUM_SLOTS) % PAGE_SIZE} of {PAGE_SIZE}",
                "first (ms)": round(statistics.median(engine[:, 0]), 1),
                "second (ms)": round(statistics.median(engine[:, 1]), 1),
                "ratio": round(statistics.median(engine[:, 1] / engine[:, 0]), 3),
                "prepared": round(statistics.median(prepared[:, 1] / prepared[:, 0]), 3),
            }
        )
    return rows
