"""SamplerManager: what each request asks of sampling, and the token of every step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from mstar.engine.resources.base import Deployment, Opening, Refusal, Resource
from mstar.engine.resources.mirror import Fetch, send
from mstar.engine.resources.sampler.choose import TorchChooser
from mstar.engine.resources.sampler.config import (
    MAX_LOGPROBS,
    SamplerConfig,
    SamplerSpec,
    SamplingParams,
    TokenLogprobs,
)
from mstar.engine.resources.sampler.fused import FusedChooser, SeenTokens, kernels
from mstar.engine.resources.sampler.stream import Stream
from mstar.engine.resources.sampler.transforms import head
from mstar.engine.resources.step import ResourceStep, Segment

MIN_LOGPROB = -9999.0
"""In place of the logarithm of 0, so that log-probabilities are finite."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token for each of ``B`` segments."""

    token_ids: Tensor
    """int64 ``[B]`` on the CPU; -1 in failed rows."""
    logprobs: list[TokenLogprobs | None] | None = None
    """One a row, ``None`` where the request asked for none; ``None``: nobody asked."""
    failed: dict[int, str] = field(default_factory=dict)
    """Rows whose logits allow no token, with a sentence that names the request."""


class _Batch(NamedTuple):
    """Everything about one tuple of segments that does not change from step to step."""

    streams: Sequence[Stream]
    vocab_size: int
    chooser: TorchChooser | FusedChooser
    logprobs: list[tuple[int, int]]
    """Rows that want log-probabilities, and of how many most likely tokens."""
    copies: torch.cuda.Stream | None
    """Takes what is copied to the CPU; ``None``: the logits are there."""


class Sampling:
    """The tokens of one step, which the device may not have chosen yet.

    Args:
        batch: Its rows.
        best: Each row's largest logit.
        tokens: int64 ``[num_segments]``, on the device; -1 in failed rows.
        logprobs: What ``SamplerPlan`` launched where a row wants log-probabilities.
    """

    __slots__ = ("_batch", "_best", "_fetch", "tokens")

    def __init__(
        self, batch: _Batch, best: Tensor, tokens: Tensor, logprobs: tuple[Tensor, ...]
    ) -> None:
        self._batch = batch
        self._best = best
        self.tokens = tokens
        self._fetch = Fetch((tokens, *logprobs), batch.copies)

    def fetch(self) -> Sampled:
        """Return the tokens on the CPU.

        The device is waited for once, unless a row fails.
        """
        ids, *logprobs = self._fetch.wait()
        failed = self._failures(ids, self._best)
        if not logprobs:
            return Sampled(ids, None, failed)
        return Sampled(ids, self._logprobs(failed, *(own.tolist() for own in logprobs)), failed)

    def _failures(self, ids: Tensor, best: Tensor) -> dict[int, str]:
        if int(ids.min()) >= 0:
            return {}
        return {
            row: f"the logits of request {self._batch.streams[row].request_id!r} have "
            f"{float(best[row])} as their maximum; no token can be chosen"
            for row in (ids < 0).nonzero()[:, 0].tolist()
        }

    def _logprobs(
        self,
        failed: Mapping[int, str],
        tokens: list[int],
        logprobs: list[float],
        ids: list[list[int]],
        top: list[list[float]],
    ) -> list[TokenLogprobs | None]:
        out: list[TokenLogprobs | None] = [None] * len(self._batch.streams)
        for place, (row, count) in enumerate(self._batch.logprobs):
            if row not in failed:
                best = list(zip(ids[place], top[place], strict=True))[:count]
                out[row] = TokenLogprobs(tokens[place], logprobs[place], best)
        return out


class SamplerPlan:
    """Samples one step's logits.

    Args:
        make: Returns its rows; called when logits come, while the device still computes them.
    """

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], _Batch]) -> None:
        self._make = make
        self._made: _Batch | None = None

    @property
    def _batch(self) -> _Batch:
        if self._made is None:
            self._made = self._make()
        return self._made

    def sample(self, logits: Tensor) -> Sampled:
        """Return a token for every segment; arguments as for ``launch``."""
        return self.launch(logits).fetch()

    def launch(self, logits: Tensor, before: Tensor | None = None) -> Sampling:
        """Have a token chosen for every segment; the logits stay as they are.

        Args:
            logits: ``[num_segments, vocab_size]``, any floating dtype, on the deployment's device.
            before: int64 ``[num_segments]``, there too: the token of every stream behind those it
                has, in a plan ahead; ``None``: the streams have all.
        """
        batch = self._batch
        expected = (len(batch.streams), batch.vocab_size)
        assert logits.shape == expected, (tuple(logits.shape), expected)
        raw = (logits.float() if logits.dtype == torch.float64 else logits).contiguous()
        if before is None:
            best, tokens = batch.chooser.choose(raw)
        else:
            assert isinstance(batch.chooser, FusedChooser), "there was no plan ahead"
            best, tokens = batch.chooser.choose(raw, before)
        logprobs = self._launch_logprobs(raw, tokens) if batch.logprobs else ()
        return Sampling(batch, best, tokens, logprobs)

    def _launch_logprobs(self, raw: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return the rows' tokens, their log-probabilities, the best ids, and theirs."""
        logits, chosen = raw, tokens
        if len(self._batch.logprobs) < len(tokens):
            wanted = send(np.array([row for row, _ in self._batch.logprobs]), raw.device)
            logits, chosen = raw[wanted], tokens[wanted]
        logits = logits.float()
        all_logprobs = logits.log_softmax(1)
        own = all_logprobs.gather(1, chosen.clamp(min=0)[:, None])[:, 0]
        # Always as many, so that a row's ties do not depend on what its neighbours ask for.
        _, ids = head(logits, min(MAX_LOGPROBS, self._batch.vocab_size))
        top = all_logprobs.gather(1, ids)
        return chosen, own.clamp(min=MIN_LOGPROB), ids, top.clamp(min=MIN_LOGPROB)


class SamplerManager(Resource):
    """Owner of every stream's sampling parameters and seed.

    There is no generator to keep: a random number depends on the seed and on the index of the
    generated token only.

    Args:
        resource_key: Its key among the model's resources, and of ``Opening.settings``.
        config: The vocabulary.
        deployment: The device, and what decides the seed of a request that names none.
    """

    in_pieces = "plan"

    def __init__(
        self,
        resource_key: str,
        config: SamplerConfig,
        deployment: Deployment,
    ) -> None:
        self.resource_key = resource_key
        self.config = config
        self._device = torch.device(deployment.device)
        self._seeds = deployment.seeds(resource_key)
        self._seen: SeenTokens | None = None
        if kernels(self._device) is not None:
            self._seen = SeenTokens(config.vocab_size, self._device)
        self._copies = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._streams: dict[tuple[str, str], Stream] = {}
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
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        self._streams[key] = Stream(opening, params, self.config, seed)
        self._labels.setdefault(opening.request_id, []).append(opening.label)
        return None

    def close(self, request_id: str) -> None:
        """Forget the request's streams."""
        for label in self._labels.pop(request_id, ()):
            stream = self._streams.pop((request_id, label))
            if self._seen is not None:
                self._seen.drop(stream)
        self._plan = self._planned = None

    def plan(
        self, segments: tuple[Segment, ...], step: ResourceStep, plans: Mapping[str, Any]
    ) -> SamplerPlan:
        """Return what samples the step's logits, one row a segment in the same order."""
        if self._plan is None or self._planned is not segments:
            streams = [self._streams[s.request_id, s.label] for s in segments]
            self._plan = SamplerPlan(partial(self._batch, streams))
            self._planned = segments
        return self._plan

    def _batch(self, streams: Sequence[Stream]) -> _Batch:
        vocab_size, device = self.config.vocab_size, self._device
        return _Batch(
            streams,
            vocab_size,
            TorchChooser(streams, vocab_size, device)
            if self._seen is None
            else FusedChooser(streams, vocab_size, device, self._seen),
            [
                (row, s.params.logprobs)
                for row, s in enumerate(streams)
                if s.params.logprobs is not None
            ],
            self._copies,
        )

    def plan_fixed(
        self,
        size: int,
        segments: tuple[Segment, ...],
        step: ResourceStep,
        plans: Mapping[str, Any],
        ahead: int = 0,
    ) -> SamplerPlan | None:
        """Return what ``plan`` does: sampling comes behind what is recorded.

        There is a plan ahead where counts of tokens are kept on the device.
        """
        if ahead and self._seen is None:
            return None
        return self.plan(segments, step, plans)

    def check(self) -> None:
        """Verify that streams and requests agree and that counts match the tokens."""
        named = {(request, label) for request, labels in self._labels.items() for label in labels}
        assert named == set(self._streams), (named, set(self._streams))
        for stream in self._streams.values():
            stream.check()
        if self._seen is not None:
            self._seen.check()
