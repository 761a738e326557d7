"""What the sampler keeps of one stream: its parameters, and how often its tokens occurred."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mstar.engine.resources.base import Opening
from mstar.engine.resources.sampler.config import SamplerConfig, SamplingParams

MIN_TEMPERATURE = 1e-5
"""Below it the most likely token is taken, as at 0."""

Ids = npt.NDArray[np.int64]


class History:
    """How often each token is in a stream's output, and which are in its prompt.

    Args:
        tokens: The stream's live ids.
        num_prompt_tokens: Those that are prompt.
        vocab_size: Ids from here on have no logit.
        with_prompt: Whether the prompt's tokens are in it too, with count 0.
    """

    def __init__(
        self, tokens: Sequence[int], num_prompt_tokens: int, vocab_size: int, with_prompt: bool
    ) -> None:
        self._tokens = tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._vocab_size = vocab_size
        self._with_prompt = with_prompt
        self._clear()

    def _clear(self) -> None:
        prompt: Iterable[int] = self._tokens[: self._num_prompt_tokens] if self._with_prompt else ()
        known = dict.fromkeys(token for token in prompt if token < self._vocab_size)
        self._place = {token: place for place, token in enumerate(known)}
        self._ids = np.fromiter(known, np.int64, len(known))
        self._counts = np.zeros(len(known), np.float32)
        self._num_seen = self._num_prompt_tokens

    def update(self) -> tuple[Ids, npt.NDArray[np.float32]]:
        """Take in new tokens; return the ids, each once, and their counts in the output."""
        tokens = self._tokens
        if len(tokens) < self._num_seen:
            self._clear()
        for index in range(self._num_seen, len(tokens)):
            token = tokens[index]
            if token < self._vocab_size:
                place = self._place.setdefault(token, len(self._place))
                if place == len(self._ids):
                    room = max(16, place)
                    self._ids = np.concatenate((self._ids, np.zeros(room, np.int64)))
                    self._counts = np.concatenate((self._counts, np.zeros(room, np.float32)))
                self._ids[place] = token
                self._counts[place] += 1
        self._num_seen = len(tokens)
        size = len(self._place)
        return self._ids[:size], self._counts[:size]

    def check(self) -> None:
        """Verify the counts of the tokens taken in so far."""
        begin = min(self._num_prompt_tokens, self._num_seen)
        output = Counter(t for t in self._tokens[begin : self._num_seen] if t < self._vocab_size)
        for token, place in self._place.items():
            assert self._ids[place] == token, (token, place, int(self._ids[place]))
            if len(self._tokens) >= self._num_seen:
                assert self._counts[place] == output[token], (token, output[token])
        assert set(output) <= set(self._place) or len(self._tokens) < self._num_seen


class Stream:
    """What the sampler keeps of one stream.

    Args:
        opening: The stream, with its live list of ids.
        params: What its request asks for.
        config: The vocabulary and the model's end tokens.
        seed: What its random numbers follow from.
    """

    def __init__(
        self, opening: Opening, params: SamplingParams, config: SamplerConfig, seed: int
    ) -> None:
        self.request_id = opening.request_id
        self.params = params
        self.tokens = opening.tokens
        self.num_prompt_tokens = opening.num_prompt_tokens
        self.seed = seed % 2**64
        self.is_greedy = params.temperature < MIN_TEMPERATURE
        self.counts_prompt = params.repetition_penalty != 1
        """Whether a token of the prompt is penalised."""
        self.has_penalty = bool(
            self.counts_prompt or params.presence_penalty or params.frequency_penalty
        )
        self.bias = params.logit_bias
        own = () if params.ignore_eos else config.stop_token_ids
        stops = {*own, *params.stop_token_ids} if params.min_tokens else ()
        self.banned = sorted(token for token in stops if token < config.vocab_size)
        """Impossible until ``min_tokens`` are generated."""
        self._vocab_size = config.vocab_size

    @cached_property
    def history(self) -> History:
        """The counts of its tokens, made on first use."""
        return History(self.tokens, self.num_prompt_tokens, self._vocab_size, self.counts_prompt)

    @property
    def num_generated(self) -> int:
        """Index of the token to be sampled, among the generated ones."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def has_edits(self) -> bool:
        """Whether its logits change before the temperature."""
        return bool(self.has_penalty or self.bias or self.banned)

    def check(self) -> None:
        """Verify the counts, where there are any."""
        if "history" in self.__dict__:
            self.history.check()
