"""What the fused sampler keeps and sends, on the CPU; the kernel's own tests need a GPU."""

from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mstar.engine.resources.base import Opening
from mstar.engine.resources.sampler.config import SamplerConfig, SamplingParams
from mstar.engine.resources.sampler.fused import SeenTokens, _places, _reals, kernels
from mstar.engine.resources.sampler.stream import Stream

CPU = torch.device("cpu")
VOCAB = 6
CONFIG = SamplerConfig(vocab_size=VOCAB, stop_token_ids=(4,))


def stream(tokens: list[int], **params: Any) -> Stream:
    opening = Opening(request_id="a", tokens=tokens, num_prompt_tokens=len(tokens), max_len=100)
    return Stream(opening, SamplingParams(**params), CONFIG, 0)


def test_no_kernel_is_looked_for_on_a_cpu() -> None:
    assert kernels(CPU) is None


def test_rules_are_sent_a_row_a_stream() -> None:
    rows = _reals(
        [
            stream([1], temperature=0.5, top_p=0.9, min_p=0.1),
            stream([1], temperature=0.0),
            stream([1], repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-1.0),
        ]
    )
    assert rows.flags.c_contiguous
    assert rows.tolist() == [
        [2.0, 0.9, 0.1, 1.0, 0.0, 0.0],
        [0.0, 1.0, 0.0, 1.0, 0.0, 0.0],
        [1.0, 1.0, 0.0, 1.5, 0.5, -1.0],
    ]


def test_a_place_is_named_once_with_its_bias_and_its_ban() -> None:
    ends, (ids, bias, until) = _places(
        [
            stream([1], logit_bias={4: 2.0, 1: -1.0}, min_tokens=3, stop_token_ids=(0, 9)),
            stream([1]),
            stream([1], logit_bias={5: 1.0}),
        ]
    )
    assert ends.tolist() == [0, 3, 3, 4]
    assert ids.tolist() == [0, 1, 4, 5]
    assert bias.tolist() == [0.0, -1.0, 2.0, 1.0]
    assert until.tolist() == [3, 0, 3, 0]


def test_token_counted_before_it_was_known_is_not_counted_again() -> None:
    seen, tokens = SeenTokens(VOCAB, CPU), [1, 2]
    own = stream(tokens, frequency_penalty=1.0)
    slot = seen.slot(own)
    seen.catch_up(own)
    seen.note(own, 1)
    seen.codes[slot, 3] += 2
    tokens.append(3)
    # Neither by the next step ahead, nor by one that is not.
    seen.codes[slot, 5] = 8
    seen.catch_up(own)
    assert seen.next_token(own) == -1
    assert seen.codes[slot].tolist() == [0, 0, 0, 2, 0, 8]


class Seen(RuleBasedStateMachine):
    """Counts of streams that come, grow, are cut back and go, against counts made anew."""

    @initialize()
    def begin(self) -> None:
        self.seen = SeenTokens(VOCAB, CPU)
        self.live: list[tuple[Stream, list[int]]] = []

    @rule(prompt=st.lists(st.integers(0, 8), min_size=1, max_size=4), repeats=st.booleans())
    def open(self, prompt: list[int], repeats: bool) -> None:
        rules = {"repetition_penalty": 1.2} if repeats else {"frequency_penalty": 0.1}
        tokens = list(prompt)
        self.live.append((stream(tokens, **rules), tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.live) - 1))
        self.seen.drop(self.live.pop(place)[0])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        own, tokens = data.draw(st.sampled_from(self.live))
        del tokens[data.draw(st.integers(own.num_prompt_tokens, len(tokens))) :]
        # Cut back and grown to the same length, the list is no longer the one that was counted.
        self.seen.drop(own)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.lists(st.integers(0, 8), max_size=3), runs=st.booleans())
    def step(self, data: st.DataObject, more: list[int], runs: bool) -> None:
        own, tokens = data.draw(st.sampled_from(self.live))
        tokens += more
        slot = self.seen.slot(own)
        token = self.seen.next_token(own)
        if not runs:
            return
        if token >= 0:
            self.seen.codes[slot, token] += 2
        self.seen.note(own)
        wanted = [0] * VOCAB
        for token in tokens[own.num_prompt_tokens :]:
            if token < VOCAB:
                wanted[token] += 2
        if own.counts_prompt:
            for token in set(tokens[: own.num_prompt_tokens]):
                if token < VOCAB:
                    wanted[token] += 1
        assert self.seen.codes[slot].tolist() == wanted

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "seen"):
            self.seen.check()


TestSeen = Seen.TestCase
TestSeen.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
