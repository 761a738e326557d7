"""The engine process: loads a model, then runs steps and answers messages until told to end."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec

from mstar.catalog import open_engine
from mstar.engine.engine import EngineCore
from mstar.engine.output import EngineStats, ErrorInfo
from mstar.engine.request import PreparedRequest
from mstar.engine.resources.kv.explain import ReuseReport
from mstar.errors import EngineDeadError, MstarError, RequestError, StorageError
from mstar.server.child import become_child
from mstar.server.config import EngineOptions
from mstar.server.logs import configure_logging
from mstar.transport.channel import ChildChannel
from mstar.transport.kv_events import EventPublisher
from mstar.transport.messages import (
    STORAGE_CODE,
    AbortRequests,
    AddRequests,
    Answer,
    CacheReset,
    EngineFacts,
    EngineReady,
    EventSource,
    Explained,
    ExplainPrompt,
    ExplainRequest,
    LoadFailed,
    LoadProgress,
    Ping,
    Pong,
    Refused,
    ResetCache,
    Shutdown,
    StepDone,
    ToEngine,
)

# Run as a program, the module would else log as __main__, at a level that nobody set.
logger = logging.getLogger("mstar.server.engine_process")

_STATS_SECONDS = 0.5


def load_engine(options: EngineOptions, progress: Callable[[str, float], None]) -> EngineCore:
    """Return an engine with its model loaded.

    Args:
        options: What to load, and with which numbers.
        progress: Told the stage and how much of it is done, between 0 and 1.

    Raises:
        MstarError: If the model or a number is wrong.
    """
    progress(f"opening {options.model}", 0.0)

    def layers(done: int, total: int) -> None:
        progress("reading weights", done / max(total, 1))
        if done == total:
            progress("building the KV cache", 1.0)

    dtype = options.dtype or "auto"
    return open_engine(
        options.model,
        options.deployment(dtype),
        dtype=dtype,
        load_format=options.load_format,
        progress=layers,
        on_loss=_end_at_once,
    )


def _end_at_once(loss: str) -> NoReturn:
    """End this process: the engine's thread may wait for ever for a rank that is gone."""
    logger.critical("the engine ends: %s", loss)
    os._exit(1)


class EngineLoop:
    """Turns messages into engine calls and steps into messages.

    Args:
        engine: A loaded engine.
        channel: To the API process.
        publisher: Takes KV events; ``None``: nobody does.
        checks_when_idle: Verify the engine's books whenever it becomes idle.
    """

    def __init__(
        self,
        engine: EngineCore,
        channel: "ChildChannel[ToEngine]",
        publisher: EventPublisher | None = None,
        checks_when_idle: bool = False,
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._publisher = publisher
        self._checks_when_idle = checks_when_idle
        self._decoder = msgspec.msgpack.Decoder(PreparedRequest)
        self._accepted: list[str] = []
        self._rejected: list[tuple[str, ErrorInfo]] = []
        self._sent_stats: EngineStats | None = None
        self._stats_time = 0.0
        self._end: Shutdown | None = None

    def run(self) -> Shutdown:
        """Serve until told to end; returns what told it."""
        engine, channel = self._engine, self._channel
        while self._end is None:
            if not engine.has_work:
                message = channel.receive(timeout=None)
                if message is not None:
                    self._handle(message)
            for message in channel.drain():
                self._handle(message)
            outputs = engine.step() if engine.has_work else []
            if self._publisher is not None:
                self._publisher.publish(engine.take_events())
            if self._checks_when_idle and not engine.has_work:
                engine.check()
            stats = self._new_stats()
            if outputs or stats or self._accepted or self._rejected:
                channel.send(
                    StepDone(
                        accepted=self._accepted,
                        rejected=self._rejected,
                        outputs=outputs,
                        stats=stats,
                    )
                )
                self._accepted, self._rejected = [], []
        return self._end

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequests():
                for blob in message.requests:
                    self._add(self._decoder.decode(blob))
            case AbortRequests():
                for request_id in message.request_ids:
                    self._engine.abort(request_id)
            case ExplainPrompt() | ExplainRequest() | ResetCache():
                self._channel.send(self._answer(message))
            case Ping():
                self._channel.send(Pong())
            case Shutdown():
                self._end = message

    def _answer(self, question: ExplainPrompt | ExplainRequest | ResetCache) -> Answer:
        engine, call_id = self._engine, question.call_id
        try:
            match question:
                case ExplainPrompt():
                    found = engine.explain(self._decoder.decode(question.request))
                    return Explained(call_id=call_id, report=_shortest(found))
                case ExplainRequest():
                    known = engine.explain_request(question.request_id)
                    return Explained(call_id=call_id, report=_shortest(known or {}))
                case ResetCache():
                    return CacheReset(call_id=call_id, num_pages=engine.reset_prefix_cache())
        except RequestError as error:
            info = ErrorInfo(error.message, error.code, error.param)
            return Refused(call_id=call_id, error=info)
        except StorageError as error:
            return Refused(call_id=call_id, error=ErrorInfo(str(error), STORAGE_CODE))

    def _add(self, prepared: PreparedRequest) -> None:
        try:
            self._engine.add_request(prepared)
        except RequestError as error:
            info = ErrorInfo(error.message, error.code, error.param)
            self._rejected.append((prepared.request_id, info))
        else:
            self._accepted.append(prepared.request_id)

    def _new_stats(self) -> EngineStats | None:
        """Return the stats when they are due: now and then at work, at once when it ends."""
        now = time.monotonic()
        if self._engine.has_work and now - self._stats_time < _STATS_SECONDS:
            return None
        stats = self._engine.stats()
        if self._publisher is not None:
            lost = self._publisher.num_lost
            stats = msgspec.structs.replace(stats, num_events_lost=lost)
        if stats == self._sent_stats:
            return None
        self._sent_stats, self._stats_time = stats, now
        return stats


def _shortest(reports: Mapping[str, Any]) -> ReuseReport | None:
    """Return the report of the KV cache that reuses least, as all of a model reuse together."""
    told = [report for report in reports.values() if isinstance(report, ReuseReport)]
    return min(told, key=lambda report: report.num_matched_tokens, default=None)


def facts_of(
    engine: EngineCore, load_seconds: float, publisher: EventPublisher | None = None
) -> EngineFacts:
    """Return what the other processes must know of ``engine``.

    Args:
        engine: A loaded engine.
        load_seconds: From the start of the process to now.
        publisher: Of its KV events, where there is one.
    """
    deployment = engine.deployment
    assert deployment.num_pages is not None
    assert deployment.max_model_len is not None
    return EngineFacts(
        deployment_root=engine.root,
        root_constants=dict(engine.named_root.constants),
        root_missing=list(engine.named_root.missing),
        page_size=deployment.page_size,
        num_pages=deployment.num_pages,
        max_model_len=deployment.max_model_len,
        vocab_size=engine.model.vocab_size,
        max_num_seqs=deployment.max_num_seqs,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        dtype=deployment.dtype,
        device=deployment.device,
        model_name=engine.model.name,
        load_seconds=load_seconds,
        event_sources=[] if publisher is None else [_source_of(publisher)],
        rank_pids=list(engine.rank_pids),
    )


def _source_of(publisher: EventPublisher) -> EventSource:
    return EventSource(
        endpoint=publisher.endpoint,
        replay_endpoint=publisher.replay_endpoint,
        topic=publisher.topic,
    )


def main() -> None:
    """Run as the child that the standard input describes."""
    started = time.monotonic()
    endpoint, options = become_child(EngineOptions)
    configure_logging(options.log_level)
    channel: ChildChannel[ToEngine] = ChildChannel(endpoint, ToEngine)  # type: ignore[arg-type]
    shown = 0.0

    def progress(stage: str, fraction: float) -> None:
        nonlocal shown
        # A line a layer would bury the log; a few a second are enough for a person.
        if fraction in (0.0, 1.0) or time.monotonic() - shown > 1.0:
            shown = time.monotonic()
            channel.send(LoadProgress(stage=stage, fraction=fraction))

    try:
        # An address that is taken is told before weights are read, which takes its time.
        publisher = open_publisher(options)
        engine = load_engine(options, progress)
    except MstarError as error:
        _fail(channel, LoadFailed(error=str(error), is_users_error=True))
    except (MemoryError, OSError, RuntimeError) as error:
        logger.exception("loading failed")
        told = f"{type(error).__name__}: {error}"
        _fail(channel, LoadFailed(error=told, is_users_error=False))
    facts = facts_of(engine, time.monotonic() - started, publisher)
    channel.send(EngineReady(facts=facts))
    end = _serve(EngineLoop(engine, channel, publisher, options.debug_checks))
    # A part of the grace is left for the way out.
    engine.close(timeout=0.8 * end.grace)
    if publisher is not None:
        publisher.publish(engine.take_events())
        publisher.close()
    channel.close()


def _fail(channel: "ChildChannel[ToEngine]", failure: LoadFailed) -> NoReturn:
    """Tell the failure and end, as ``_serve`` does."""
    channel.send(failure)
    channel.close()
    os._exit(1)


def _serve(loop: EngineLoop) -> Shutdown:
    """Run the loop; what it fails of ends the process.

    Not by way of what is left to be destroyed: that may wait for a GPU, and this for a rank that is
    gone.
    """
    try:
        return loop.run()
    except EngineDeadError as error:
        _end_at_once(str(error))
    except BaseException:
        logger.critical("the engine ends", exc_info=True)
        os._exit(1)


def open_publisher(options: EngineOptions) -> EventPublisher | None:
    """Return what publishes KV events, where they are asked for.

    Raises:
        ConfigError: If an address cannot be bound.
    """
    if options.kv_events_endpoint is None:
        return None
    return EventPublisher(
        options.kv_events_endpoint, options.kv_events_replay_endpoint, options.kv_events_topic
    )


if __name__ == "__main__":
    main()
