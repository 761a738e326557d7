"""Engines in step: one engine on several ranks, each with a part of the model.

Rank 0 is the engine that its users know. Before each call that changes anything, it tells the
other ranks, which make the same call on engines of their own; all see the same tokens, since every
rank has the same logits, so all books stay alike, and only calls cross between processes. What
else an engine depends on goes with the calls: the time, and seeds of requests that name none.

::

    rank 0   add(a)  step  step ...          the caller's thread
               |      |     |                frames, one a call
    rank 1   add(a)  step  step ...          its only thread, one call behind at most
                      +-----+------          sums inside the steps keep the devices together

Every frame has a digest of all tokens until now, so that a rank that went astray says so.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from mstar.engine.engine import EngineCore
from mstar.engine.model import Model
from mstar.engine.output import RequestOutput
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.base import Deployment
from mstar.errors import EngineDeadError, MstarError


class _Call(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A call that all ranks make."""


class AddRequest(_Call, frozen=True):
    """``EngineCore.add_request``."""

    prepared: PreparedRequest


class Abort(_Call, frozen=True):
    """``EngineCore.abort``."""

    request_id: str


class Step(_Call, frozen=True):
    """``EngineCore.step``."""


class Reset(_Call, frozen=True):
    """``EngineCore.reset_prefix_cache``."""


class Check(_Call, frozen=True):
    """``EngineCore.check``."""


class Close(_Call, frozen=True):
    """``EngineCore.close``; the last call."""

    timeout: float


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """What a rank is told."""

    now: float
    """Rank 0's time."""
    digest: int
    """Of all tokens of the steps before."""
    call: AddRequest | Abort | Step | Reset | Check | Close


class Clock:
    """The time of the last call, which is the same on all ranks."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


class Ranks(Protocol):
    """The other ranks, as rank 0 sees them."""

    @property
    def loss(self) -> str | None:
        """What became of a rank that has ended; ``None``: all run."""

    @property
    def pids(self) -> Sequence[int]:
        """Their processes."""

    def send(self, frame: bytes) -> None:
        """Tell all of them; returns without an answer."""

    def close(self, timeout: float) -> None:
        """Wait for their end."""


class EngineInStep(EngineCore):
    """An engine that ends at the first step that fails.

    Alone it could run the step's requests one by one; here the other ranks wait inside a sum.
    """

    _is_rank = True

    def _on_failure(self, error: Exception) -> None:
        raise EngineDeadError(
            f"a step failed on one of several ranks: {type(error).__name__}: {error}"
        ) from error


class LeadingEngine(EngineInStep):
    """The engine of rank 0.

    Args:
        model: Its part of the model.
        deployment: The engine's numbers; its clock is ``clock``.
        ranks: The others.
        clock: Set with every call.

    Raises:
        ConfigError, UnsupportedError: As ``EngineCore`` does.
    """

    def __init__(self, model: Model, deployment: Deployment, ranks: Ranks, clock: Clock) -> None:
        self._ranks = ranks
        self._clock = clock
        self._seeds = deployment.seeds("ranks")
        self._digest = 0
        self._encode = msgspec.msgpack.Encoder().encode
        super().__init__(model, deployment)

    @property
    def rank_pids(self) -> Sequence[int]:
        """Processes of the other ranks."""
        return self._ranks.pids

    def _tell(self, call: AddRequest | Abort | Step | Reset | Check | Close) -> None:
        self._watch()
        self._clock.now = time.monotonic()
        self._ranks.send(self._encode(Frame(self._clock.now, self._digest, call)))

    def _watch(self) -> None:
        loss = self._ranks.loss
        if loss is not None:
            raise EngineDeadError(f"the engine has ended: {loss}")

    def add_request(self, prepared: PreparedRequest) -> None:
        """Queue a request on all ranks.

        Raises:
            RequestError: As ``EngineCore.add_request`` does; then it is queued on none.
            EngineDeadError: If a rank has ended.
        """
        if prepared.params.seed is None:
            params = replace(prepared.params, seed=self._seeds.getrandbits(63))
            prepared = msgspec.structs.replace(prepared, params=params)
        self._tell(AddRequest(prepared))
        super().add_request(prepared)

    def abort(self, request_id: str) -> bool:
        """End a request on all ranks."""
        self._tell(Abort(request_id))
        return super().abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Run one batch on all ranks.

        Raises:
            EngineDeadError: If a rank has ended, or the step failed on this one.
        """
        self._tell(Step())
        outputs = super().step()
        self._watch()
        self._digest = _digest(outputs, self._digest)
        return outputs

    def reset_prefix_cache(self) -> int:
        """Forget everything kept for reuse, on all ranks."""
        self._tell(Reset())
        return super().reset_prefix_cache()

    def check(self) -> None:
        """Verify the invariants on all ranks."""
        self._tell(Check())
        super().check()

    def close(self, timeout: float = 30.0) -> None:
        """End all ranks, in ``timeout`` seconds at most."""
        if self._ranks.loss is None:
            super().close(timeout)
            self._tell(Close(timeout))
        self._ranks.close(timeout)


def follow(engine: EngineInStep, receive: Callable[[], bytes | None], clock: Clock) -> None:
    """Make the calls that rank 0 makes, until the last one, or until there is no rank 0.

    Args:
        engine: This rank's.
        receive: Waits for the next frame; ``None``: there will be none.
        clock: The engine's.

    Raises:
        EngineDeadError: If this rank computed other tokens than rank 0, or a step failed.
    """
    decode = msgspec.msgpack.Decoder(Frame).decode
    digest = 0
    while (data := receive()) is not None:
        frame = decode(data)
        clock.now = frame.now
        if frame.digest != digest:
            raise EngineDeadError(
                f"the tokens of this rank have the digest {digest:#x}, those of rank 0 "
                f"{frame.digest:#x}"
            )
        match frame.call:
            case Step():
                digest = _digest(engine.step(), digest)
            case Close(timeout):
                engine.close(timeout)
                return
            case call:
                _make(engine, call)


def _make(engine: EngineCore, call: AddRequest | Abort | Reset | Check) -> None:
    try:
        match call:
            case AddRequest(prepared):
                engine.add_request(prepared)
            case Abort(request_id):
                engine.abort(request_id)
            case Reset():
                engine.reset_prefix_cache()
            case Check():
                engine.check()
    except MstarError:
        # Rank 0 has refused it too, and told its user.
        pass


def _digest(outputs: Sequence[RequestOutput], before: int) -> int:
    tokens = [output.token_ids for output in outputs]
    return zlib.crc32(msgspec.msgpack.encode(tokens), before)
