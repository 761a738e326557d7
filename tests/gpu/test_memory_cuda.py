"""An engine that is not told how many KV pages to have takes its share of the device's memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mstar.engine.engine import EngineCore
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import ConfigError
from mstar.models import load_model
from mstar.models.decoder import load
from mstar.models.dummy import DummyCheckpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 192,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 320,
    "max_position_embeddings": 4096,
}


def engine(**numbers: Any) -> EngineCore:
    device = torch.device("cuda")
    checkpoint = DummyCheckpoint(Path("tiny"), CONFIG, device=device)
    model = load(checkpoint, name="tiny", dtype=torch.bfloat16, device=device)
    given: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    return EngineCore(model, Deployment(device="cuda", dtype="bfloat16", **(given | numbers)))


def test_pages_take_what_is_left_of_the_share_and_steps_stay_inside() -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = 1 - free / total + 0.1
    core = engine(gpu_memory_utilization=share)
    page_nbytes = 2 * 8 * core.deployment.page_size * 8 * 128 * 2
    assert core.deployment.num_pages is not None
    assert core.deployment.num_pages * page_nbytes > 0.07 * total
    for place in range(8):
        params = SamplingParams(max_tokens=20, top_p=0.9, seed=place, repetition_penalty=1.1)
        ids = [place] * 300
        core.add_request(PreparedRequest(request_id=str(place), token_ids=ids, params=params))
    while core.has_work:
        assert all(output.error is None for output in core.step())
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    # What is recorded comes on top of the trial: it is what the rest of the memory is for.
    assert total - free < (share + 0.01) * total


def test_a_share_without_room_for_a_page_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"GB, of which 0% may be used; .* KV page"):
        engine(gpu_memory_utilization=1e-4)


def test_weights_that_do_not_fit_are_refused_with_the_numbers(tmp_path: Path) -> None:
    huge = CONFIG | {"hidden_size": 8192, "intermediate_size": 65536, "num_hidden_layers": 1000}
    (tmp_path / "config.json").write_text(repr(huge).replace("'", '"'))
    with pytest.raises(ConfigError, match=r"do not fit on cuda: it has .* GB of weights"):
        load_model(str(tmp_path), dtype="bfloat16", device="cuda", load_format="dummy")
    torch.cuda.empty_cache()
