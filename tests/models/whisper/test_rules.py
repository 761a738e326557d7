"""The rules of what may come next, against the processors of logits of transformers."""

from typing import Any

import torch
from hypothesis import given, settings, strategies as st
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from mstar.models.whisper.config import WhisperTokens
from mstar.models.whisper.rules import Asked, Rules

VOCAB = 40
TOKENS = WhisperTokens(
    start=21,
    end=20,
    no_timestamps=26,
    start_of_previous=25,
    languages={"en": 22, "de": 23},
    transcribe=24,
    translate=25,
    suppressed=(1, 2, 7, 21, 22, 23, 24, 25),
    begin_suppressed=(3, 20),
    max_initial_timestamp=4,
)
RULES = Rules(TOKENS, VOCAB, torch.device("cpu"))


def expected(logits: torch.Tensor, asked: Asked) -> torch.Tensor:
    ids = torch.tensor([[21, *asked.generated]])
    config: Any = GenerationConfig(
        eos_token_id=20, no_timestamps_token_id=26, max_initial_timestamp_index=4
    )
    steps = [
        SuppressTokensAtBeginLogitsProcessor(TOKENS.begin_suppressed, 1),
        SuppressTokensLogitsProcessor(TOKENS.suppressed),
    ]
    if asked.timestamps:
        steps.append(WhisperTimeStampLogitsProcessor(config, 1))
    scores = logits[None].clone()
    for step in steps:
        scores = step(ids, scores)
    return scores[0]


TRANSCRIPTS = st.builds(
    Asked,
    st.lists(st.integers(0, 20) | st.integers(27, VOCAB - 1), max_size=6),
    st.booleans(),
    st.sampled_from([False, False, True]),
)


@settings(max_examples=200, deadline=None)
@given(
    asked=st.lists(TRANSCRIPTS, min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    lift=st.floats(-6, 6),
)
def test_rules_are_those_of_transformers(asked: list[Asked], seed: int, lift: float) -> None:
    logits = torch.randn(len(asked), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, 27:] += lift
    wanted = [
        language(row) if own.is_language else expected(row, own)
        for row, own in zip(logits, asked, strict=True)
    ]
    RULES.restrict_(logits, asked)
    assert torch.equal(logits, torch.stack(wanted))


@settings(max_examples=200, deadline=None)
@given(
    asked=st.lists(TRANSCRIPTS, min_size=1, max_size=6),
    unread=st.lists(st.integers(-1, 20) | st.integers(27, VOCAB - 1), min_size=6, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_token_that_nobody_has_read_counts_as_one_that_is_read(
    asked: list[Asked], unread: list[int], seed: int
) -> None:
    logits = torch.randn(len(asked), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before = torch.tensor(unread[: len(asked)])
    read = [
        own._replace(generated=[*own.generated, token])
        for own, token in zip(asked, before.tolist(), strict=True)
    ]
    wanted = logits.clone()
    RULES.restrict_(wanted, read)
    RULES.restrict_(logits, asked, before)
    assert torch.equal(logits, wanted)


def language(logits: torch.Tensor) -> torch.Tensor:
    best = 22 if logits[22] >= logits[23] else 23
    return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([best]), 0.0)


def test_a_language_is_the_likeliest_of_the_languages_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 22], logits[0, 23] = 9.0, 1.0, 2.0
    RULES.restrict_(logits, [Asked([], timestamps=True, is_language=True)])
    assert logits[0].argmax() == 23
    assert int(logits.isfinite().sum()) == 1


def test_no_language_is_the_likeliest_of_what_is_no_number() -> None:
    logits = torch.full((1, VOCAB), torch.nan)
    RULES.restrict_(logits, [Asked([], timestamps=True, is_language=True)])
    assert not logits.isfinite().any()
