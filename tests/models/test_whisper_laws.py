"""The laws of serving, over a tiny Whisper with drawn weights: what else runs changes nothing."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from mstar.engine.array import from_numpy
from mstar.engine.engine import EngineCore
from mstar.engine.request import ContextItem, PreparedRequest, context_root
from mstar.engine.resources.base import Deployment
from mstar.engine.resources.kv.keys import fingerprint
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.errors import RequestError
from mstar.models.dummy import DummyCheckpoint
from mstar.models.whisper import KIND, WhisperEncoder, WhisperModel, load
from mstar.models.whisper_windows import WhisperOptions, prompt_ids
from mstar.preprocess.items import prompt_keys

MELS, SLOTS, POSITIONS, PAGE = 8, 20, 48, 4
CONFIG = {
    "architectures": ["WhisperForConditionalGeneration"],
    "vocab_size": 100,
    "d_model": 32,
    "num_mel_bins": MELS,
    "max_source_positions": SLOTS,
    "max_target_positions": POSITIONS,
    **{
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 48))
    },
}
GENERATION = {
    "decoder_start_token_id": 61,
    "eos_token_id": 60,
    "no_timestamps_token_id": 68,
    "prev_sot_token_id": 66,
    "lang_to_id": {"<|en|>": 62, "<|de|>": 63},
    "task_to_id": {"transcribe": 64, "translate": 65},
    "suppress_tokens": [1, 2, 61, 62, 63, 64, 65, 66, 67],
    "begin_suppress_tokens": [3, 60],
    "max_initial_timestamp_index": 5,
}


class _Words:
    """Stands for a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def model() -> WhisperModel:
    checkpoint = DummyCheckpoint(Path("whisper"), CONFIG, seed=5)
    checkpoint.generation_config = GENERATION
    cpu = torch.device("cpu")
    found = load(checkpoint, name="tiny", dtype=torch.float32, device=cpu)
    found.__dict__["_tokenizer"] = _Words()
    return found


def request_of(
    model: WhisperModel,
    request_id: str,
    seed: int,
    *,
    num_frames: int = 130,
    root: bytes | None = b"r" * 32,
    max_tokens: int | None = 12,
    temperature: float = 0.0,
    **options: Any,
) -> PreparedRequest:
    """Return a request for a recording that follows from its seed: windows of 40 frames."""
    features = np.random.default_rng(seed).standard_normal((MELS, num_frames)).astype(np.float32)
    recording = fingerprint("recording", seed, num_frames)
    own = WhisperOptions(
        recording=recording,
        num_frames=num_frames,
        stop_frame=num_frames,
        **{"timestamps": True, "follow": bool(seed % 2), **options},
    )
    inputs = {"features": from_numpy(features), "start": from_numpy(np.zeros(1, np.int64))}
    context = [ContextItem(KIND, recording, SLOTS, inputs)]
    ids = prompt_ids(own, model.tokens, POSITIONS)
    begin = context_root(root, context)
    return PreparedRequest(
        request_id=request_id,
        token_ids=ids,
        params=SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed),
        root=root,
        page_keys=[] if begin is None else prompt_keys(ids, (), PAGE, begin),
        context=context,
        options=msgspec.structs.asdict(own),
    )


def core_of(model: WhisperModel, **changes: Any) -> EngineCore:
    settings = {"page_size": PAGE, "num_pages": 200, "max_num_batched_tokens": 64} | changes
    return EngineCore(model, Deployment(**settings))


def drive(
    core: EngineCore, requests: list[PreparedRequest], max_steps: int = 3000
) -> dict[str, tuple[list[int], list[Any]]]:
    found: dict[str, tuple[list[int], list[Any]]] = {r.request_id: ([], []) for r in requests}
    for request in requests:
        core.add_request(request)
    for _ in range(max_steps):
        if not core.has_work:
            break
        for output in core.step():
            assert output.error is None, output.error
            tokens, emitted = found[output.request_id]
            tokens += output.token_ids
            emitted += output.emitted
        core.check()
    assert not core.has_work, "the requests do not end"
    return found


def requests_of(model: WhisperModel) -> list[PreparedRequest]:
    tasks: list[dict[str, Any]] = [
        {},
        {"language": 62, "max_tokens": 40},
        {"language": 63, "translate": True, "previous": [5, 6, 7]},
        {"timestamps": False},
        {"temperature": 0.8, "num_frames": 200},
        {"num_frames": 30, "max_tokens": None},
    ]
    return [request_of(model, f"r{n}", n, **task) for n, task in enumerate(tasks)]


@pytest.fixture(scope="module")
def alone(model: WhisperModel) -> dict[str, tuple[list[int], list[Any]]]:
    found: dict[str, tuple[list[int], list[Any]]] = {}
    for request in requests_of(model):
        found |= drive(core_of(model, enable_prefix_caching=False), [request])
    assert len(found["r0"][1]) > 3, "the recording has several windows"
    return found


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="together"),
        pytest.param({"max_num_seqs": 2}, id="two at a time"),
        pytest.param({"num_pages": 24}, id="few pages of KV"),
        pytest.param({"encoder_cache_tokens": SLOTS}, id="room for one window"),
        pytest.param({"max_num_batched_tokens": SLOTS}, id="small steps"),
        pytest.param({"enable_prefix_caching": False}, id="without reuse"),
        pytest.param({"attention_backend": "eager"}, id="another backend"),
    ],
)
def test_what_else_runs_changes_nothing(
    model: WhisperModel,
    alone: dict[str, tuple[list[int], list[Any]]],
    changes: dict[str, Any],
) -> None:
    assert drive(core_of(model, **changes), requests_of(model)) == alone


def test_what_ran_before_changes_nothing_and_is_not_encoded_again(
    model: WhisperModel, alone: dict[str, tuple[list[int], list[Any]]]
) -> None:
    core, encoder = core_of(model), model.nodes["encoder"]
    assert isinstance(encoder, WhisperEncoder)
    drive(core, requests_of(model))
    before = encoder.num_encoded
    assert drive(core, requests_of(model)) == alone
    assert encoder.num_encoded == before
    # The prompt of the third has two pages, one of which is left to compute.
    assert core.stats().cached_tokens > 0
    core.reset_prefix_cache()
    assert drive(core, requests_of(model)) == alone
    assert encoder.num_encoded > before


def test_nothing_is_shared_between_tenants(model: WhisperModel) -> None:
    core, encoder = core_of(model), model.nodes["encoder"]
    assert isinstance(encoder, WhisperEncoder)
    for number, root in enumerate((b"a" * 32, b"b" * 32, None, None)):
        before = encoder.num_encoded
        drive(core, [request_of(model, f"r{number}", 1, num_frames=40, root=root)])
        assert encoder.num_encoded > before
    before = encoder.num_encoded
    drive(core, [request_of(model, "again", 1, num_frames=40, root=b"a" * 32)])
    assert encoder.num_encoded == before


def test_requests_may_end_at_any_step(model: WhisperModel) -> None:
    core = core_of(model, encoder_cache_tokens=2 * SLOTS)
    expected = drive(core, [request_of(model, "whole", 0)])["whole"]
    for stop in range(0, 40, 3):
        requests = [request_of(model, f"{stop}-{n}", n % 2, num_frames=90) for n in range(3)]
        for request in requests:
            core.add_request(request)
        for step in range(stop):
            if step == 7:
                core.reset_prefix_cache()
            core.step()
            core.check()
        for request in requests:
            core.abort(request.request_id)
        core.check()
    assert core.stats().num_running == core.stats().num_waiting == 0
    assert drive(core, [request_of(model, "whole", 0)])["whole"] == expected


def test_the_language_stays_inside_and_is_told_with_the_text(model: WhisperModel) -> None:
    found = drive(core_of(model), [request_of(model, "r", 0, num_frames=40)])["r"]
    assert all(token not in found[0] for token in (62, 63))
    assert {emitted.info["language"] for emitted in found[1]} <= {"en", "de"}
    assert found[1][0].name == "transcript"


def test_what_is_no_recording_is_refused(model: WhisperModel) -> None:
    core, whole = core_of(model), request_of(model, "r", 0)
    wrong: list[dict[str, Any]] = [
        {"options": {}},
        {"context": []},
        {"context": whole.context * 2},
    ]
    for change in wrong:
        with pytest.raises(RequestError, match="one recording"):
            core.add_request(msgspec.structs.replace(whole, **change))
    assert not core.has_work
