"""SamplerManager: what each request asks of sampling, and the token of every step."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from mstar.engine.resources.base import Deployment, Opening, Refusal, Resource
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

        A device is waited for once, unless a row fails.

        Args:
            logits: ``[num_segments, vocab_size]``, any floating dtype, on the deployment's device.
        """
        batch = self._batch
        expected = (len(batch.streams), batch.vocab_size)
        assert logits.shape == expected, (tuple(logits.shape), expected)
        raw = (logits.float() if logits.dtype == torch.float64 else logits).contiguous()
        best, tokens = batch.chooser.choose(raw)
        if not batch.logprobs:
            (ids,) = _fetch(tokens)
            return Sampled(ids, None, self._failures(ids, best))
        ids, *logprobs = _fetch(tokens, *self._launch_logprobs(raw, tokens))
        failed = self._failures(ids, best)
        return Sampled(ids, self._logprobs(failed, *(own.tolist() for own in logprobs)), failed)

    def _failures(self, ids: Tensor, best: Tensor) -> dict[int, str]:
        if int(ids.min()) >= 0:
            return {}
        return {
            row: f"the logits of request {self._batch.streams[row].request_id!r} have "
            f"{float(best[row])} as their maximum; no token can be chosen"
            for row in (ids < 0).nonzero()[:, 0].tolist()
        }

    def _launch_logprobs(self, raw: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return the rows' tokens, their log-probabilities, the best ids, and theirs."""
        logits, chosen = raw, tokens
        if len(self._batch.logprobs) < len(tokens):
            wanted = torch.tensor([row for row, _ in self._batch.logprobs])
            if raw.is_cuda:
                wanted = wanted.pin_memory().to(raw.device, non_blocking=True)
            logits, chosen = raw[wanted], tokens[wanted]
        logits = logits.float()
        all_logprobs = logits.log_softmax(1)
        own = all_logprobs.gather(1, chosen.clamp(min=0)[:, None])[:, 0]
        # Always as many, so that a row's ties do not depend on what its neighbours ask for.
        _, ids = head(logits, min(MAX_LOGPROBS, self._batch.vocab_size))
        top = all_logprobs.gather(1, ids)
        return chosen, own.clamp(min=MIN_LOGPROB), ids, top.clamp(min=MIN_LOGPROB)

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


def _fetch(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors on the CPU; a device is waited for once."""
    if not tensors[0].is_cuda:
        return list(tensors)
    if len(tensors) == 1:
        return [tensors[0].cpu()]
    fetched = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return fetched


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
        self._seen: SeenTokens | None = None
        if kernels(self._device) is not None:
            self._seen = SeenTokens(config.vocab_size, self._device)
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
        seed = self._entropy() if params.seed is None else params.seed
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
            self._plan = SamplerPlan(self._batch(streams))
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
        )

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
            stream.check()
        if self._seen is not None:
            self._seen.check()
