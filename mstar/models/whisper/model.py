"""Whisper: speech to text, in the language spoken or in English, windows of 30 seconds at a time.

A request's first leg may only ask which language is spoken; every window is a leg of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from mstar.engine.array import from_numpy, to_numpy
from mstar.engine.batch import Batch, Node, NodeKind, NodeOutput
from mstar.engine.capture import RecordableNode
from mstar.engine.graph import Cursor, Edge, Graph, Loop, Run
from mstar.engine.model import Leg, Model
from mstar.engine.output import Emitted
from mstar.engine.overlap import Pending
from mstar.engine.request import (
    Component,
    ContextItem,
    PreparedRequest,
    Request,
    RequestItem,
    RequestStatus,
)
from mstar.engine.resources.attention.config import (
    AttentionConfig,
    AttentionSpec,
    AttentionStep,
    LayerAttention,
)
from mstar.engine.resources.base import Item
from mstar.engine.resources.cross_attention.config import (
    CrossAttentionConfig,
    CrossAttentionSpec,
    CrossAttentionStep,
)
from mstar.engine.resources.cross_attention.manager import CrossAttentionPlan
from mstar.engine.resources.kv.config import KVConfig, KVSpec, KVStep
from mstar.engine.resources.kv.keys import fingerprint
from mstar.engine.resources.mirror import Fetch, send
from mstar.engine.resources.position.config import PositionConfig, PositionSpec, PositionStep
from mstar.engine.resources.position.manager import PositionPlan
from mstar.engine.resources.sampler.config import (
    SamplerConfig,
    SamplerSpec,
    SampleStep,
    SamplingParams,
)
from mstar.engine.resources.sampler.manager import SamplerPlan, Sampling
from mstar.engine.resources.spec import NodeResourceSpec
from mstar.engine.resources.step import NodeStep
from mstar.errors import RequestError
from mstar.models.base import Description
from mstar.models.checkpoint import Checkpoint
from mstar.models.whisper.config import (
    ENGLISH,
    SECONDS_PER_FRAME,
    WhisperConfig,
    WhisperTokens,
    whisper_config,
    whisper_tokens,
)
from mstar.models.whisper.facts import Facts
from mstar.models.whisper.fallback import SURE, is_silent, is_worth_another, temperature_of
from mstar.models.whisper.layers import IGNORED, Decoder, Encoder, WhisperWeights
from mstar.models.whisper.rules import Asked, Rules
from mstar.models.whisper.windows import Stretch, WhisperOptions, cut, following, prompt_ids

KIND = "audio"
"""Kind of the items that the encoder takes.

Its inputs are ``features``, float32 ``[num_mel_bins, any number of frames]``, and ``start``, int64
``[1]``: the window's first frame among them.
"""
TRANSCRIPT = "transcript"
"""Name of what is emitted: one for each stretch of speech."""

_ENCODER, _DECODER, _CROSS = "encoder", "decoder", "cross_attention"
_NUM_OWN_IDS = 5
"""Ids of a window's prompt beside what was said before, at most."""
_NO_TEXT = "this model writes down one recording and takes no other prompt; ask for a transcription"
_DETECT, _WRITE = "detect", "write"
"""Walks: ask for the language, and write down one window."""


def options_of(prepared: PreparedRequest) -> WhisperOptions:
    """Return what a request tells the model.

    Raises:
        RequestError: If it was not prepared for a Whisper.
    """
    try:
        return msgspec.convert(prepared.options, WhisperOptions)
    except msgspec.ValidationError as error:
        raise RequestError(f"{_NO_TEXT} ({error})", param="model") from error


def _item_of(request: Request, item: RequestItem) -> Item:
    return Item(request.request_id, item.name, item.span.length)


class WhisperEncoder(Node):
    """Hears one window, and leaves what every layer of the decoder attends to."""

    kind = NodeKind.ITEMS

    def __init__(self, encoder: Encoder, config: WhisperConfig) -> None:
        self.encoder = encoder
        # On a CPU several windows take as much longer, and whoever generates meanwhile waits.
        self.max_batch = 1 if encoder.device.type == "cpu" else None
        self._config = config
        self.num_encoded = 0
        """Windows that it was run on."""

    def declare(self, batch: Batch) -> NodeStep:
        """Ask for room for keys and values."""
        made = tuple(map(_item_of, batch.requests, batch.items))
        return NodeStep(batch.segments, {_CROSS: CrossAttentionStep(made=made)})

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        """Encode the batch's windows."""
        cross: CrossAttentionPlan = plans[_CROSS]
        windows = np.stack([self._window(item) for item in batch.items])
        encoded = self.encoder.encode(send(windows, self.encoder.device))
        for layer in range(self._config.decoder.num_layers):
            cross.store(layer, *self.encoder.keys_values(encoded, layer))
        self.num_encoded += len(batch.items)
        return NodeOutput(token_ids=())

    def _window(self, item: RequestItem) -> npt.NDArray[np.float32]:
        """Return the features of a window, zeros behind the recording's end."""
        features, start = (to_numpy(item.inputs[name]) for name in ("features", "start"))
        first, num_frames = int(start[0]), self._config.num_frames
        part = features[:, first : first + num_frames]
        window = np.zeros((len(features), num_frames), np.float32)
        window[:, : part.shape[1]] = part
        return window


class _PendingText(Pending):
    """Tokens that are being sampled.

    Args:
        sampling: Of them.
        logprobs: float32 ``[num_requests]``, on its way: what the rules leave says of each.
        requests: One a token.
        facts: Where it is noted how sure the decoder was.
    """

    def __init__(
        self, sampling: Sampling, logprobs: Fetch, requests: Sequence[Request], facts: Facts
    ) -> None:
        self.tokens = sampling.tokens
        self._sampling = sampling
        self._logprobs = logprobs
        self._requests = requests
        self._facts = facts

    def fetch(self) -> NodeOutput:
        sampled = self._sampling.fetch()
        (logprobs,) = self._logprobs.wait()
        for request, logprob in zip(self._requests, logprobs.tolist(), strict=True):
            # Who has ended or gone on to another leg since was sampled for in vain.
            if request.status is RequestStatus.RUNNING:
                self._facts.note_sampled(request, logprob)
        return NodeOutput(
            token_ids=sampled.token_ids.tolist(),
            logprobs=sampled.logprobs,
            failures=sampled.failed,
        )


class WhisperDecoder(RecordableNode):
    """Writes down what the encoder heard, or names the language.

    Args:
        decoder: Computes.
        rules: What may be sampled.
        facts: Where it leaves how sure it was.
    """

    splits_prompts = True

    def __init__(self, decoder: Decoder, rules: Rules, facts: Facts) -> None:
        self.decoder = decoder
        self._rules = rules
        self.facts = facts
        device = decoder.device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def declare(self, batch: Batch) -> NodeStep:
        """Ask for attention to the stream and to its window, and a token where one is due."""
        read = tuple(request.context[0].name for request in batch.requests)
        sampled = (
            batch.segments
            if len(batch.yielding) == len(batch.segments)
            else tuple(batch.segments[index] for index in batch.yielding)
        )
        return NodeStep(
            batch.segments,
            {
                "kv": KVStep(),
                "position": PositionStep(),
                "attention": AttentionStep(),
                _CROSS: CrossAttentionStep(read=read),
                "sampler": SampleStep(sampled),
            },
        )

    def forward(self, batch: Batch, plans: Mapping[str, Any]) -> NodeOutput:
        """Compute the step and sample."""
        decoder = self.decoder
        ids = send(batch.token_ids(), decoder.device)
        hidden = self._hidden(ids, plans)
        self._note_starts(batch, lambda place: decoder.logits(hidden[place : place + 1])[0])
        if not batch.yielding:
            return NodeOutput(token_ids=())
        if len(batch.yielding) != len(ids):
            hidden = hidden[send(batch.last_rows(), decoder.device)]
        return self.launch(batch, decoder.logits(hidden), plans).fetch()

    def compute(self, ids: Tensor, plans: Mapping[str, Any]) -> Tensor:
        """Return the logits behind every token."""
        return self.decoder.logits(self._hidden(ids, plans))

    def _hidden(self, ids: Tensor, plans: Mapping[str, Any]) -> Tensor:
        position: PositionPlan = plans["position"]
        x = self.decoder.embed(ids, position.ids)
        return self.decoder.hidden(x, position, plans["kv"], plans["attention"], plans[_CROSS])

    def note(self, batch: Batch, rows: Tensor) -> None:
        """Take note of the logits with which windows begin."""
        self._note_starts(batch, rows.__getitem__)

    def launch(
        self, batch: Batch, rows: Tensor, plans: Mapping[str, Any], before: Tensor | None = None
    ) -> Pending:
        """Sample from what the rules leave of logits."""
        requests = [batch.requests[index] for index in batch.yielding]
        logits = rows.to(torch.float32, copy=True)
        self._rules.restrict_(logits, [_asked(request) for request in requests], before)
        sampler: SamplerPlan = plans["sampler"]
        sampling = sampler.launch(logits, before)
        chosen = sampling.tokens.clamp(min=0)[:, None]
        logprobs = logits.log_softmax(1).gather(1, chosen)[:, 0]
        return _PendingText(sampling, Fetch((logprobs,), self._copies), requests, self.facts)

    def _note_starts(self, batch: Batch, logits_of: Callable[[int], Tensor]) -> None:
        """Take note of the logits with which windows begin, where the step computes them.

        Args:
            batch: The step.
            logits_of: Returns those behind one of its tokens, ``[vocab_size]``.
        """
        first = 0
        for request, (_, _, span) in zip(batch.requests, batch.segments, strict=True):
            place = self.facts.due(request, span)
            if place is not None:
                self.facts.note_start(request, logits_of(first + place).float())
            first += span


def _asked(request: Request) -> Asked:
    return Asked(
        request.generated(),
        timestamps=request.prepared.options["timestamps"],
        is_language=request.cursor.local_name == _DETECT,
    )


class WhisperModel(Model):
    """A loaded Whisper.

    Args:
        name: What it is called.
        nodes: Encoder and decoder.
        config: Its shape.
        tokens: Its special ids.
        folder: Where its tokenizer is.
        weights_key: Content name of the weights; ``None``: unknown, and so never reused.
    """

    def __init__(
        self,
        name: str,
        nodes: tuple[WhisperEncoder, WhisperDecoder],
        config: WhisperConfig,
        tokens: WhisperTokens,
        *,
        folder: Path,
        weights_key: bytes | None,
    ) -> None:
        described = _describe(config, tokens, weights_key)
        self.name = name
        self.config = config
        self.tokens = tokens
        self.nodes = dict(zip((_ENCODER, _DECODER), nodes, strict=True))
        self.graph = described.graph
        self.encoders = {KIND: _ENCODER}
        self.telling = frozenset((_DECODER,))
        self.vocab_size = described.vocab_size
        self.max_model_len = described.max_model_len
        self.stop_token_ids = frozenset((tokens.end,))
        self.root_constants = described.root_constants
        self.specs = described.specs
        self.facts = nodes[1].facts
        self._folder = folder

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._folder / "tokenizer.json"))

    def first_walk(self, prepared: PreparedRequest) -> Cursor:
        """Return the walk that finds the language, or writes down the first window.

        Raises:
            RequestError: If there is no recording to write down, or more than one.
        """
        options = options_of(prepared)
        if [item.kind for item in prepared.context] != [KIND]:
            raise RequestError(_NO_TEXT, param="model")
        is_unknown = bool(self.tokens.languages) and options.language is None
        return self.graph.cursor(_DETECT if is_unknown else _WRITE)

    def trial(self, request_id: str, num_tokens: int, params: SamplingParams) -> PreparedRequest:
        """Return a request for a silent window of its own."""
        num_frames = self.config.num_frames
        recording = fingerprint("mstar-whisper-trial-v1", request_id)
        options = WhisperOptions(
            recording=recording,
            num_frames=num_frames,
            stop_frame=num_frames,
            language=min(self.tokens.languages.values(), default=None),
            previous=[0] * max(0, num_tokens - _NUM_OWN_IDS),
        )
        silence = np.zeros((self.config.num_mel_bins, num_frames), np.float32)
        inputs = {"features": from_numpy(silence), "start": from_numpy(np.zeros(1, np.int64))}
        return PreparedRequest(
            request_id=request_id,
            token_ids=prompt_ids(options, self.tokens, self.max_model_len),
            params=params,
            context=[ContextItem(KIND, recording, self.config.encoder.max_positions, inputs)],
            options=msgspec.structs.asdict(options),
        )

    def next_walk(self, request: Request) -> Leg | None:
        """Return the window behind the one that is written down, or the first in its language."""
        options = options_of(request.prepared)
        if request.cursor.local_name == _DETECT:
            self.facts.drop(request.request_id)
            language = request.tokens[-1]
            return self._leg(request, msgspec.structs.replace(options, language=language))
        told = self._told(request)
        self.facts.drop(request.request_id)
        if self._is_tried_again(request, options, told):
            return self._leg(request, msgspec.structs.replace(options, attempt=options.attempt + 1))
        stretches, next_frame = self._cut(request, options)
        if options.fallback and is_silent(told):
            stretches, next_frame = [], options.start_frame + self.config.num_frames
        examples = stretches if request.params.temperature < SURE else []
        after = following(options, examples, next_frame, self.tokens)
        return None if after is None else self._leg(request, after)

    def _told(self, request: Request) -> dict[str, float]:
        return self.facts.told(request, self._text(request.generated()))

    @staticmethod
    def _is_tried_again(
        request: Request, options: WhisperOptions, told: Mapping[str, float]
    ) -> bool:
        """Tell whether a window is written down again; its temperature must be ours to choose."""
        is_ours = request.params.temperature == temperature_of(options.attempt)
        is_due = options.fallback and is_ours and not is_silent(told)
        return is_due and is_worth_another(options.attempt, told)

    def component_of(self, walk: str) -> Component:
        """Return what the tokens of a leg are: a language's are no answer."""
        return Component(
            vocab_size=self.vocab_size,
            stop_token_ids=self.stop_token_ids,
            max_model_len=self.max_model_len,
            is_silent=walk == _DETECT,
        )

    def holds(self, predicate: str, request: Request) -> bool:
        """Tell whether the leg has its last token, which is what ``finished`` asks."""
        return request.finish_reason is not None

    def emit(self, request: Request, node: str, token: int) -> Sequence[Emitted]:
        """Return the stretches of speech of a window that has its last token."""
        if request.finish_reason is None or request.cursor.local_name == _DETECT:
            return ()
        options, told = options_of(request.prepared), self._told(request)
        is_left_out = options.fallback and is_silent(told)
        if is_left_out or self._is_tried_again(request, options, told):
            return ()
        language = None if self.tokens.languages else ENGLISH
        if options.language is not None:
            language = self.tokens.language_of(options.language)
        stretches, _ = self._cut(request, options)
        facts = {
            "seek": options.start_frame,
            "temperature": request.params.temperature,
            **told,
        }
        # The model may hear something end behind the recording, in what fills its window up.
        end = options.stop_frame * SECONDS_PER_FRAME
        return [
            Emitted(
                name=TRANSCRIPT,
                text=self._text(own.tokens),
                info={
                    # Frames are hundredths of a second, which sums of floats miss by a hair.
                    "start": round(min(own.start, end), 2),
                    "end": round(min(own.end, end), 2),
                    "tokens": own.tokens,
                    "language": language,
                    **facts,
                },
            )
            for own in stretches
        ]

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request's window."""
        self.facts.drop(request_id)

    def _text(self, ids: Sequence[int]) -> str:
        """Return what ids say, timestamps left out."""
        own = [token for token in ids if token < self.tokens.end]
        return self._tokenizer.decode(own, skip_special_tokens=True)

    def _cut(self, request: Request, options: WhisperOptions) -> tuple[list[Stretch], int]:
        return cut(request.generated(), options, self.tokens, self.config.num_frames)

    def _leg(self, request: Request, options: WhisperOptions) -> Leg:
        """Return the leg that writes down the window of ``options``."""
        before = request.prepared
        (item,) = before.context
        if options.start_frame != options_of(before).start_frame:
            start = options.start_frame
            digest = fingerprint("mstar-whisper-window-v1", options.recording, start)
            inputs = {**item.inputs, "start": from_numpy(np.array([start]))}
            item = ContextItem(item.kind, digest, item.length, inputs)
        ids = prompt_ids(options, self.tokens, self.max_model_len)
        params = before.params
        if params.max_tokens is not None:
            # What was said before may be longer now, and leave less room.
            most = min(params.max_tokens, self.max_model_len - len(ids))
            params = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
        prepared = msgspec.structs.replace(
            before,
            token_ids=ids,
            params=params,
            page_keys=[],
            context=[item],
            options=before.options | msgspec.structs.asdict(options),
        )
        own = None
        if options.attempt:
            # By what is heard, so that the same recording is written down the same way again.
            named = fingerprint("mstar-whisper-seed-v1", options.recording, options.start_frame)
            seed = int.from_bytes(named[:7], "big") if params.seed is None else params.seed
            own = replace(request.params, temperature=temperature_of(options.attempt), seed=seed)
        return Leg(prepared, _WRITE, params=own)


def describe(checkpoint: Checkpoint) -> Description:
    """Return what the model of a checkpoint says of itself; reads no weights but to name them.

    Raises:
        WeightsError: If a config misses a field.
        UnsupportedError: If the config asks for something that is not built.
    """
    config = whisper_config(checkpoint.config)
    tokens = whisper_tokens(checkpoint.config, checkpoint.generation_config)
    return _describe(config, tokens, checkpoint.fingerprint())


def load(
    checkpoint: Checkpoint,
    *,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> WhisperModel:
    """Return the model of a checkpoint, its weights on ``device`` in ``dtype``.

    Raises:
        WeightsError: If a tensor is missing, of a wrong shape, or one that nothing uses.
        UnsupportedError: If the config asks for something that is not built.
    """
    config = whisper_config(checkpoint.config)
    tokens = whisper_tokens(checkpoint.config, checkpoint.generation_config)
    weights = WhisperWeights(checkpoint, dtype, device)
    encoder = Encoder(weights, config)
    decoder = Decoder(weights, config, progress)
    weights.finish(IGNORED)
    rules = Rules(tokens, config.vocab_size, device)
    return WhisperModel(
        name,
        (WhisperEncoder(encoder, config), WhisperDecoder(decoder, rules, Facts(tokens))),
        config,
        tokens,
        folder=checkpoint.path,
        weights_key=checkpoint.fingerprint(),
    )


def _graph() -> Graph:
    return Graph(
        nodes=(_ENCODER, _DECODER),
        walks=(
            (_DETECT, Run(_DECODER)),
            (_WRITE, Loop(Run(_DECODER), until="finished")),
        ),
        edges=(Edge(_ENCODER, _DECODER, KIND),),
        predicates=("finished",),
    )


def _describe(
    config: WhisperConfig, tokens: WhisperTokens, weights_key: bytes | None
) -> Description:
    constants = None
    if weights_key is not None:
        constants = {"weights": weights_key.hex(), "model": repr(config), "code": "whisper-v1"}
    return Description(
        graph=_graph(),
        root_constants=constants,
        specs=_specs(config, tokens),
        vocab_size=config.vocab_size,
        max_model_len=config.decoder.max_positions,
    )


def _specs(config: WhisperConfig, tokens: WhisperTokens) -> tuple[NodeResourceSpec, ...]:
    nodes, stack = {_DECODER}, config.decoder
    head_dim = config.width // stack.num_heads
    return (
        KVSpec(
            "kv",
            nodes,
            KVConfig(num_layers=stack.num_layers, num_kv_heads=stack.num_heads, head_dim=head_dim),
        ),
        PositionSpec(
            "position",
            nodes,
            PositionConfig(
                kv_cache="kv",
                layer_rope=(None,) * stack.num_layers,
                max_position=stack.max_positions,
            ),
        ),
        AttentionSpec(
            "attention",
            nodes,
            AttentionConfig(
                kv_cache="kv",
                num_qo_heads=stack.num_heads,
                num_kv_heads=stack.num_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                layers=(LayerAttention(),) * stack.num_layers,
            ),
        ),
        CrossAttentionSpec(
            _CROSS,
            {_ENCODER, _DECODER},
            CrossAttentionConfig(
                num_layers=stack.num_layers,
                num_qo_heads=stack.num_heads,
                num_kv_heads=stack.num_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                max_length=config.encoder.max_positions,
                page_size=config.encoder.max_positions,
            ),
        ),
        SamplerSpec(
            "sampler",
            nodes,
            SamplerConfig(vocab_size=config.vocab_size, stop_token_ids=(tokens.end,)),
        ),
    )
