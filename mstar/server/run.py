"""One server from start to end: socket, processes, signals, log lines, and the way out."""

import asyncio
import errno
import hashlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any

import uvicorn
import zmq.asyncio

from mstar.catalog import load_tokenizer_of, locate
from mstar.engine.output import EngineStats
from mstar.errors import ConfigError
from mstar.preprocess.tokenizer import TextTokenizer
from mstar.scratch import ScratchFolder
from mstar.server.app import create_app
from mstar.server.bridge import Bridge
from mstar.server.child import Launcher
from mstar.server.config import EngineOptions, ServerConfig
from mstar.server.logs import configure_logging
from mstar.version import __version__

logger = logging.getLogger(__name__)

_LINE_SECONDS = 10.0
_CHILD_GRACE_SECONDS = 5.0
_LAST_BYTES_SECONDS = 2

EXIT_OK, EXIT_FAILED, EXIT_USER = 0, 1, 2


class _HttpServer(uvicorn.Server):
    """A uvicorn that leaves the signals to us, since draining answers requests for a while."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: If the address cannot be taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        server = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        # The error's own text of a taken port repeats the address.
        is_lookup = isinstance(error, socket.gaierror)
        reason = error.strerror if is_lookup else os.strerror(error.errno or 0)
        remedy = "--host" if is_lookup or error.errno == errno.EADDRNOTAVAIL else "--port"
        raise ConfigError(
            f"cannot listen on {host}:{port} ({reason}); choose another {remedy}"
        ) from error
    server.setblocking(False)
    return server


def serve(config: ServerConfig) -> int:
    """Run a server until it is told to end; returns the process's exit status.

    Raises:
        ConfigError: If the address is taken.
        ModelNotFoundError: If there is no such model.
        WeightsError: If the packages of a built-in model are damaged.
    """
    configure_logging(config.log_level)
    return asyncio.run(_Server(config).run())


class _Server:
    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._tokenizer: TextTokenizer | None = None
        self._end = asyncio.Event()
        self._now = asyncio.Event()
        self._deadline = 0.0
        """When the time for ending is over, by the loop's clock."""

    async def run(self) -> int:
        config = self._config
        listener = bind(config.host, config.port)
        host, port = listener.getsockname()[:2]
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        _log_banner(config)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        with ScratchFolder() as folder:
            context = zmq.asyncio.Context()
            try:
                path = await asyncio.to_thread(locate, config.engine.model)
                logger.info("listening at %s, not ready yet", self._url)
                bridge = Bridge(config, path, Launcher(context, folder))
                return await self._serve(bridge, path, listener)
            finally:
                listener.close()
                context.destroy(linger=0)

    async def _serve(self, bridge: Bridge, path: str, listener: socket.socket) -> int:
        app = create_app(bridge, self._get_tokenizer, _system_fingerprint(self._config))
        http = _HttpServer(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=_LAST_BYTES_SECONDS,
                server_header=False,
            )
        )
        bridge.start()
        tasks = [
            asyncio.create_task(http.serve(sockets=[listener])),
            asyncio.create_task(self._load_tokenizer(bridge, path)),
            asyncio.create_task(self._announce(bridge)),
            asyncio.create_task(_log_load(bridge)),
        ]
        try:
            status = await self._until_end(bridge, tasks[0])
            await self._stop_gently(bridge)
        finally:
            await bridge.stop(0)
        http.should_exit = True
        http.force_exit = self._now.is_set()
        await asyncio.wait({tasks[0]}, timeout=_LAST_BYTES_SECONDS + 3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        logger.info("mstar has ended")
        return status

    async def _until_end(self, bridge: Bridge, http: "asyncio.Task[None]") -> int:
        """Return the exit status once everything that should still run has run."""
        end = asyncio.create_task(self._end.wait())
        ends: set[asyncio.Future[Any]] = {end, bridge.fatal, http}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        if bridge.fatal.done():
            reason, is_users_error = bridge.fatal.result()
            logger.error("mstar cannot start: %s", reason)
            return EXIT_USER if is_users_error else EXIT_FAILED
        if http.done():
            http.result()
            return EXIT_FAILED
        self._deadline = asyncio.get_running_loop().time() + self._config.shutdown_timeout
        bridge.is_draining = True
        logger.info("ending: %d requests are in flight", bridge.num_in_flight)
        idle = asyncio.create_task(bridge.wait_idle())
        now = asyncio.create_task(self._now.wait())
        await asyncio.wait(
            {idle, now},
            timeout=self._config.shutdown_timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for task in (idle, now):
            task.cancel()
        return EXIT_OK

    async def _stop_gently(self, bridge: Bridge) -> None:
        """Let the processes end by themselves, unless a second signal comes.

        With pages to be put on disk, the engine has for it what running requests left of the time.
        """
        grace = _CHILD_GRACE_SECONDS
        if self._config.engine.disk_cache_bytes:
            grace = max(grace, self._deadline - asyncio.get_running_loop().time())
        stopping = asyncio.create_task(bridge.stop(grace))
        now = asyncio.create_task(self._now.wait())
        await asyncio.wait({stopping, now}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, now):
            task.cancel()
        await asyncio.gather(stopping, now, return_exceptions=True)
        if not stopping.cancelled():
            stopping.result()

    def _signalled(self) -> None:
        if self._end.is_set():
            self._now.set()
        self._end.set()

    def _get_tokenizer(self) -> TextTokenizer:
        assert self._tokenizer is not None, "a request came before the tokenizer was loaded"
        return self._tokenizer

    async def _load_tokenizer(self, bridge: Bridge, path: str) -> None:
        # A broken tokenizer is reported by the workers, which load the same one.
        self._tokenizer = await asyncio.to_thread(load_tokenizer_of, path)
        bridge.tokenizer_loaded()

    async def _announce(self, bridge: Bridge) -> None:
        while True:
            await bridge.got_ready.wait()
            bridge.got_ready.clear()
            self._say_ready(bridge)

    def _say_ready(self, bridge: Bridge) -> None:
        facts = bridge.link.facts
        assert facts is not None
        logger.info(
            "loaded %s in %.1f s: %s on %s, KV cache %d pages of %d = %d tokens, context %d",
            facts.model_name,
            facts.load_seconds,
            facts.dtype,
            facts.device,
            facts.num_pages,
            facts.page_size,
            facts.num_pages * facts.page_size,
            facts.max_model_len,
        )
        # Scripts wait for this line: it is there at any log level, and its words do not change.
        announcer = logging.getLogger("mstar.ready")
        announcer.setLevel(logging.INFO)
        announcer.info("mstar is ready at %s", self._url)


def _log_banner(config: ServerConfig) -> None:
    changed = {
        item.name: getattr(config, item.name)
        for item in fields(config)
        if item.name not in ("engine", "api_key") and getattr(config, item.name) != item.default
    }
    # "auto" is what no dtype means, too.
    plain = asdict(EngineOptions(model=config.engine.model, dtype="auto"))
    given = asdict(config.engine) | {"dtype": config.engine.dtype or "auto"}
    changed |= {name: value for name, value in given.items() if value != plain[name]}
    if config.api_key is not None:
        changed["api_key"] = "***"
    logger.info("mstar %s is loading %s", __version__, config.engine.model)
    logger.info("non-default settings: %s", changed or "none")


def _system_fingerprint(config: ServerConfig) -> str:
    digest = hashlib.sha256(repr(asdict(config.engine)).encode()).hexdigest()[:8]
    return (
        f"mstar-{__version__}-{config.engine.device}{config.engine.tensor_parallel_size}-{digest}"
    )


async def _log_load(bridge: Bridge) -> None:
    """Log a line about throughput now and then, while there is any."""
    before: EngineStats | None = None
    while True:
        await asyncio.sleep(_LINE_SECONDS)
        stats = bridge.stats
        if stats is None:
            before = None
            continue
        last = stats if before is None else before
        num_in, num_out = (
            (getattr(stats, name) - getattr(last, name)) / _LINE_SECONDS
            for name in ("prompt_tokens", "generation_tokens")
        )
        queries = stats.prefix_queries - last.prefix_queries
        level = logging.INFO if num_in or num_out or stats.num_running else logging.DEBUG
        logger.log(
            level,
            "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, "
            "KV pages held %.1f%%, prefix hit rate %.1f%%",
            num_in,
            num_out,
            stats.num_running,
            stats.num_waiting,
            100 * stats.num_pages_used / max(stats.num_pages, 1),
            100 * (stats.prefix_hits - last.prefix_hits) / max(queries, 1),
        )
        before = stats
