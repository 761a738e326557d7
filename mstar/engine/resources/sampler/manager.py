"""SamplerManager: what each request asks of sampling, and the token of every step."""

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mstar.engine.resources.base import Deployment, Opening, Refusal, Resource
from mstar.engine.resources.sampler.config import (
    MAX_LOGPROBS,
    SamplerConfig,
    SamplerSpec,
    SamplingParams,
    TokenLogprobs,
)
from mstar.engine.resources.sampler.transforms import (
    HEAD,
    Limits,
    ban_,
    draw,
    draw_limited,
    draw_sorted,
    head,
    logit_bias_,
    most_likely,
    output_penalty_,
    repetition_penalty_,
    uniforms,
)
from mstar.engine.resources.step import ResourceStep, Segment

MIN_TEMPERATURE = 1e-5
"""Below it the most likely token is taken, as at 0."""
MIN_LOGPROB = -9999.0
"""In place of the logarithm of 0, so that log-probabilities are finite."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each of ``B`` segments."""

    token_ids: Tensor
    """int64 ``[B]`` on the CPU; -1 in failed rows."""
    logprobs: list[TokenLogprobs | None] | None = None
    """One a row, ``None`` where the request asked for none; ``None``: nobody asked."""
    failed: dict[int, str] = field(default_factory=dict)
    """Rows whose logits allow no token, with a sentence that names the request."""


class _History:
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


class _Stream:
    """What the sampler keeps of one stream."""

    __slots__ = (
        "banned",
        "bias",
        "history",
        "is_greedy",
        "num_prompt_tokens",
        "params",
        "request_id",
        "seed",
        "tokens",
    )

    def __init__(
        self, opening: Opening, params: SamplingParams, config: SamplerConfig, seed: int
    ) -> None:
        self.request_id = opening.request_id
        self.params = params
        self.tokens = opening.tokens
        self.num_prompt_tokens = opening.num_prompt_tokens
        self.seed = seed % 2**64
        self.is_greedy = params.temperature < MIN_TEMPERATURE
        self.history: _History | None = None
        repeats = params.repetition_penalty != 1
        if repeats or params.presence_penalty or params.frequency_penalty:
            self.history = _History(
                opening.tokens, opening.num_prompt_tokens, config.vocab_size, repeats
            )
        self.bias = params.logit_bias
        own = () if params.ignore_eos else config.stop_token_ids
        stops = {*own, *params.stop_token_ids} if params.min_tokens else ()
        self.banned = sorted(token for token in stops if token < config.vocab_size)

    @property
    def num_generated(self) -> int:
        """Index of the token to be sampled, among the generated ones."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def has_edits(self) -> bool:
        """Whether its logits change before the temperature."""
        return bool(self.history or self.bias or self.banned)


class _Edits:
    """The changes to logits before the temperature, of all rows of a batch together."""

    def __init__(self, streams: Sequence[_Stream], device: torch.device) -> None:
        self._device = device
        self._penalised = [(row, s, s.history) for row, s in enumerate(streams) if s.history]
        self._min_tokens = [(row, s) for row, s in enumerate(streams) if s.banned]
        places = [(row, token, s.bias[token]) for row, s in enumerate(streams) for token in s.bias]
        self._bias = None
        if places:
            rows, ids, bias = zip(*places, strict=True)
            self._bias = (
                torch.tensor(rows, device=device),
                torch.tensor(ids, device=device),
                torch.tensor(bias, dtype=torch.float32, device=device),
            )

    def apply_(self, logits: Tensor) -> None:
        """Write the changes into float32 ``[B, vocab_size]``."""
        if self._penalised:
            self._penalise_(logits)
        if self._bias is not None:
            logit_bias_(logits, *self._bias)
        banned = [
            (row, token)
            for row, stream in self._min_tokens
            if stream.num_generated < stream.params.min_tokens
            for token in stream.banned
        ]
        if banned:
            rows, ids = torch.tensor(banned, device=self._device).unbind(1)
            ban_(logits, rows, ids)

    def _penalise_(self, logits: Tensor) -> None:
        seen = [history.update() for _, _, history in self._penalised]
        lens = [len(ids) for ids, _ in seen]
        rows = self._spread([row for row, _, _ in self._penalised], lens, np.int64)
        ids = torch.from_numpy(np.concatenate([ids for ids, _ in seen])).to(self._device)
        counts = torch.from_numpy(np.concatenate([own for _, own in seen])).to(self._device)
        params = [stream.params for _, stream, _ in self._penalised]
        repetition = self._spread([p.repetition_penalty for p in params], lens, np.float32)
        presence = self._spread([p.presence_penalty for p in params], lens, np.float32)
        frequency = self._spread([p.frequency_penalty for p in params], lens, np.float32)
        repetition_penalty_(logits, rows, ids, repetition)
        output_penalty_(logits, rows, ids, counts, (presence, frequency))

    def _spread(self, values: Sequence[float], lens: Sequence[int], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype), lens)).to(self._device)


class _Group:
    """Rows of a batch that are drawn in the same way."""

    def __init__(self, members: Sequence[tuple[int, _Stream]], vocab_size: int) -> None:
        streams = [stream for _, stream in members]
        params = [stream.params for stream in streams]
        self.streams = streams
        self.rows = torch.tensor([row for row, _ in members])
        self.seeds = np.array([stream.seed for stream in streams], np.uint64)
        self.temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32)
        self.limits = Limits(
            torch.tensor([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]),
            torch.tensor([p.top_p for p in params], dtype=torch.float64),
            torch.tensor([p.min_p for p in params], dtype=torch.float64),
        )
        self.has_min_p = any(p.min_p for p in params)
        self.has_temperature = any(p.temperature != 1 for p in params)

    def to(self, device: torch.device) -> "_Group":
        """Move the tensors; returns itself."""
        self.rows = self.rows.to(device)
        self.temperature = self.temperature.to(device)
        self.limits = Limits(*(limit.to(device) for limit in self.limits))
        return self

    def uniform(self) -> Tensor:
        """Return float64 ``[R]``: each row's random number, on the rows' device."""
        indices = np.array([stream.num_generated for stream in self.streams], np.uint64)
        return uniforms(self.seeds, indices).to(self.rows.device)


def _kind(params: SamplingParams, vocab_size: int) -> str:
    if 0 < params.top_k < vocab_size:
        return "small_top_k" if params.top_k < HEAD else "top_k"
    return "top_p" if params.top_p < 1 else "all"


class _Batch:
    """Everything about one tuple of segments that does not change from step to step."""

    def __init__(
        self,
        segments: tuple[Segment, ...],
        streams: Sequence[_Stream],
        config: SamplerConfig,
        device: torch.device,
    ) -> None:
        self.segments = segments
        self.streams = streams
        self.vocab_size = config.vocab_size
        self.edits = _Edits(streams, device) if any(s.has_edits for s in streams) else None
        self.logprobs = [
            (row, s.params.logprobs)
            for row, s in enumerate(streams)
            if s.params.logprobs is not None
        ]
        members: dict[str, list[tuple[int, _Stream]]] = {kind: [] for kind in _DRAWS}
        for row, stream in enumerate(streams):
            if not stream.is_greedy:
                members[_kind(stream.params, config.vocab_size)].append((row, stream))
        self.groups = {
            kind: _Group(own, config.vocab_size).to(device) for kind, own in members.items() if own
        }
        self.is_plain = not (self.edits or self.logprobs or self.groups)


class SamplerPlan:
    """Samples one step's logits.

    Args:
        batch: Its rows.
    """

    __slots__ = ("_batch",)

    def __init__(self, batch: _Batch) -> None:
        self._batch = batch

    def sample(self, logits: Tensor) -> Sampled:
        """Return a token for every segment; the logits stay as they are.

        Args:
            logits: ``[num_segments, vocab_size]``, any floating dtype, on the deployment's device.
        """
        batch = self._batch
        expected = (len(batch.streams), batch.vocab_size)
        assert logits.shape == expected, (tuple(logits.shape), expected)
        raw = (logits.float() if logits.dtype == torch.float64 else logits).contiguous()
        if batch.is_plain:
            best, tokens = most_likely(raw)
            ids, failed = self._fetch(best, tokens)
            return Sampled(ids, None, failed)
        work = raw.to(torch.float32, copy=batch.edits is not None)
        if batch.edits is not None:
            batch.edits.apply_(work)
        best, tokens = most_likely(work)
        for kind, group in batch.groups.items():
            is_whole = len(group.streams) == len(batch.streams)
            own = work if is_whole else work[group.rows]
            tokens[group.rows] = _DRAWS[kind](own, best[group.rows], group)
        ids, failed = self._fetch(best, tokens)
        logprobs = self._logprobs(raw, tokens, failed) if batch.logprobs else None
        return Sampled(ids, logprobs, failed)

    def _fetch(self, best: Tensor, tokens: Tensor) -> tuple[Tensor, dict[int, str]]:
        """Return the ids on the CPU, -1 where no token can be chosen, and messages for those rows.

        A device is waited for once, unless a row fails.
        """
        finite = best.isfinite()
        if tokens.device.type == "cpu" and bool(finite.all()):
            return tokens, {}
        ids = torch.where(finite, tokens, -1).cpu()
        failed = {}
        if int(ids.min()) < 0:
            for row in (ids < 0).nonzero()[:, 0].tolist():
                failed[row] = (
                    f"the logits of request {self._batch.streams[row].request_id!r} have "
                    f"{float(best[row])} as their maximum; no token can be chosen"
                )
        return ids, failed

    def _logprobs(
        self, raw: Tensor, tokens: Tensor, failed: Mapping[int, str]
    ) -> list[TokenLogprobs | None]:
        wanted = [(row, count) for row, count in self._batch.logprobs if row not in failed]
        out: list[TokenLogprobs | None] = [None] * len(self._batch.streams)
        if not wanted:
            return out
        rows = torch.tensor([row for row, _ in wanted], device=raw.device)
        logits = (raw if len(wanted) == len(out) else raw[rows]).float()
        all_logprobs = logits.log_softmax(1)
        chosen = tokens[rows]
        logprobs = all_logprobs.gather(1, chosen[:, None])[:, 0].clamp(min=MIN_LOGPROB)
        # Always as many, so that a row's ties do not depend on what its neighbours ask for.
        _, ids = head(logits, min(MAX_LOGPROBS, self._batch.vocab_size))
        top = all_logprobs.gather(1, ids).clamp(min=MIN_LOGPROB)
        for (row, count), token, logprob, top_ids, top_logprobs in zip(
            wanted, chosen.tolist(), logprobs.tolist(), ids.tolist(), top.tolist(), strict=True
        ):
            best = list(zip(top_ids, top_logprobs, strict=True))[:count]
            out[row] = TokenLogprobs(token, logprob, best)
        return out


def _draw_all(logits: Tensor, best: Tensor, group: _Group) -> Tensor:
    if group.has_temperature:
        logits = logits / group.temperature[:, None]
    probs = logits.softmax(1)
    if group.has_min_p:
        floor = group.limits.min_p * probs.amax(1)
        probs = probs * (probs >= floor.to(probs.dtype)[:, None])
    return draw(probs, group.uniform())


def _draw_small_top_k(logits: Tensor, best: Tensor, group: _Group) -> Tensor:
    return draw_limited(logits, best, group.temperature, group.limits, None, group.uniform())


def _draw_top_k(logits: Tensor, best: Tensor, group: _Group) -> Tensor:
    return draw_sorted(logits, best, group.temperature, group.limits, None, group.uniform())


def _draw_top_p(logits: Tensor, best: Tensor, group: _Group) -> Tensor:
    # The largest probability is exp(0) over the sum that is wanted.
    scores = logits / group.temperature[:, None] if group.has_temperature else logits
    mass = 1 / scores.softmax(1).amax(1).double()
    return draw_limited(logits, best, group.temperature, group.limits, mass, group.uniform())


_DRAWS: Mapping[str, Callable[[Tensor, Tensor, _Group], Tensor]] = {
    "all": _draw_all,
    "small_top_k": _draw_small_top_k,
    "top_k": _draw_top_k,
    "top_p": _draw_top_p,
}


class SamplerManager(Resource):
    """Owner of every stream's sampling parameters and seed.

    There is no generator to keep: a random number depends on the seed and on the index of the
    generated token only.

    Args:
        resource_key: Its key among the model's resources, and of ``Opening.settings``.
        config: The vocabulary.
        deployment: The device.
        entropy: Gives a seed of 64 bits where a request names none.
    """

    def __init__(
        self,
        resource_key: str,
        config: SamplerConfig,
        deployment: Deployment,
        entropy: Callable[[], int] = lambda: secrets.randbits(64),
    ) -> None:
        self.resource_key = resource_key
        self.config = config
        self._device = torch.device(deployment.device)
        self._entropy = entropy
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._labels: dict[str, list[str]] = {}
        self._plan: SamplerPlan | None = None
        self._planned: tuple[Segment, ...] | None = None

    @classmethod
    def build(
        cls, spec: SamplerSpec, deployment: Deployment, resources: Mapping[str, Resource]
    ) -> Self:
        """Return a manager without streams."""
        return cls(spec.resource_key, spec.config, deployment)

    def open(self, opening: Opening, num_reused: int) -> Refusal | None:
        """Keep the stream's parameters, seed and live list of ids.

        Raises:
            RequestError: If ``logit_bias`` names an id that the model lacks.
        """
        key = (opening.request_id, opening.label)
        assert key not in self._streams, f"stream {key} is open already"
        params: SamplingParams = opening.settings.get(self.resource_key) or SamplingParams()
        self.config.check_params(params)
        seed = self._entropy() if params.seed is None else params.seed
        self._streams[key] = _Stream(opening, params, self.config, seed)
        self._labels.setdefault(opening.request_id, []).append(opening.label)
        return None

    def close(self, request_id: str) -> None:
        """Forget the request's streams."""
        for label in self._labels.pop(request_id, ()):
            del self._streams[request_id, label]
        self._plan = self._planned = None

    def plan(
        self, segments: tuple[Segment, ...], step: ResourceStep, plans: Mapping[str, Any]
    ) -> SamplerPlan:
        """Return what samples the step's logits, one row a segment in the same order."""
        if self._plan is None or self._planned is not segments:
            streams = [self._streams[s.request_id, s.label] for s in segments]
            self._plan = SamplerPlan(_Batch(segments, streams, self.config, self._device))
            self._planned = segments
        return self._plan

    def plan_fixed(
        self,
        size: int,
        segments: tuple[Segment, ...],
        step: ResourceStep,
        plans: Mapping[str, Any],
        ahead: int = 0,
    ) -> SamplerPlan:
        """Return what ``plan`` does: sampling comes behind what is recorded."""
        return self.plan(segments, step, plans)

    def check(self) -> None:
        """Verify that streams and requests agree and that counts match the tokens."""
        named = {(request, label) for request, labels in self._labels.items() for label in labels}
        assert named == set(self._streams), (named, set(self._streams))
        for stream in self._streams.values():
            if stream.history is not None:
                stream.history.check()
