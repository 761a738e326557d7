from typing import Any

import pytest

from mstar.models.decoder import DecoderModel
from mstar.models.toy import toy_model

# Layers that see everything, and layers with a window that is shorter than the prompts.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("LlamaForCausalLM", {}),
    "windowed": (
        "Gemma3ForCausalLM",
        {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    ),
}


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest) -> DecoderModel:
    architecture, changes = CASES[request.param]
    return toy_model(7, architecture, **changes)
