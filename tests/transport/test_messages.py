"""Messages survive the wire, and what crosses it needs no torch."""

import subprocess
import sys

import msgspec
import pytest

from mstar.engine.output import ErrorInfo, RequestOutput
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.sampler.config import SamplingParams, TokenLogprobs
from mstar.engine.resources.spans import Span
from mstar.transport.messages import FromEngine, StepDone, ToEngine


def test_a_prepared_request_survives_the_wire() -> None:
    request = PreparedRequest(
        request_id="r",
        token_ids=[1, 2, 2**32 - 1],
        params=SamplingParams(
            temperature=0.5, logit_bias={7: -1.5}, stop=("a", "é"), stop_token_ids=(3,), seed=2**63
        ),
        page_keys=[b"\0" * 32],
        root=b"\xff" * 32,
        spans=[Span(2), Span(1, b"d")],
    )
    blob = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(blob, type=PreparedRequest) == request


def test_a_step_survives_the_wire() -> None:
    step = StepDone(
        accepted=["a"],
        rejected=[("b", ErrorInfo("no", "code", "param"))],
        outputs=[
            RequestOutput(
                request_id="a",
                token_ids=[5],
                logprobs=[TokenLogprobs(5, float("-inf"), [(5, -0.5)])],
                finish_reason="stop",
                num_prompt_tokens=3,
                num_cached_tokens=2,
            )
        ],
    )
    blob = msgspec.msgpack.encode(step)
    decoder = msgspec.msgpack.Decoder(FromEngine)
    assert decoder.decode(blob) == step


def test_a_message_for_somebody_else_is_refused() -> None:
    blob = msgspec.msgpack.encode(StepDone())
    decoder = msgspec.msgpack.Decoder(ToEngine)
    with pytest.raises(msgspec.ValidationError, match="step_done"):
        decoder.decode(blob)


def test_messages_load_no_torch() -> None:
    program = "import sys, mstar.transport.messages; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
