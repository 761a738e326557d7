"""An engine whose model is dealt out over ranks, which are processes.

Rank 0 is the process that asks. It starts the others, and all load their parts at the same time.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from mstar.engine.parallel import Clock, LeadingEngine
from mstar.engine.resources.base import Deployment
from mstar.errors import ConfigError, EngineDeadError
from mstar.models import check_ranks, usable_device
from mstar.models.parallel.collectives import DistributedShard
from mstar.models.parallel.line import Line
from mstar.models.parallel.rank import READY, RankSettings, load_part
from mstar.scratch import ScratchFolder

logger = logging.getLogger(__name__)

OnLoss = Callable[[str], object]
"""Told, by a thread of its own, what became of a rank that has ended unasked."""
_PROGRAM = (sys.executable, "-P", "-m", "mstar.models.parallel.rank")
_GRACE_SECONDS = 10.0
"""How long rank 0 is left to find the mistake by itself that another rank has ended of while all
load: it says what it is. What rank 0 waits for may never come, though."""


def open_ranks(
    name: str,
    deployment: Deployment,
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    progress: Callable[[int, int], None] | None = None,
    on_loss: OnLoss | None = None,
) -> LeadingEngine:
    """Load a model on several ranks and return the engine that serves it.

    Args:
        name: A folder, a GGUF file, a built-in name or a Hugging Face id.
        deployment: The engine's numbers, checked; its dtype is set from ``dtype``.
        dtype: As for ``load_model``.
        load_format: As for ``load_model``.
        progress: Called with layers loaded and layers in all.
        on_loss: Told when a rank ends unasked. A call that waits for that rank's part of a sum on
            a GPU waits for ever, which only the end of the process ends.

    Raises:
        MstarError: As ``load_model`` and ``EngineCore`` do.
        ConfigError: If the model or the machine does not allow so many ranks.
        EngineDeadError: If a rank ends while it loads.
    """
    _check(deployment)
    check_ranks(
        name,
        deployment.tensor_parallel_size,
        device=deployment.device,
        load_format=load_format,
    )
    folder = ScratchFolder()
    settings = RankSettings.of(
        deployment,
        model=name,
        dtype=dtype,
        load_format=load_format,
        rank=0,
        meeting=str(folder.path / "meeting"),
    )
    ranks = RankProcesses(settings, folder, on_loss)
    try:
        clock = Clock()
        model, deployment, ranks.shard = load_part(settings, clock, progress)
        engine = LeadingEngine(model, deployment, ranks, clock)
        ranks.wait_ready()
    except BaseException:
        ranks.kill()
        raise
    return engine


def _check(deployment: Deployment) -> None:
    """Refuse what cannot be dealt out over ranks.

    Raises:
        ConfigError: With the numbers.
    """
    size = deployment.tensor_parallel_size
    if deployment.disk_cache_bytes:
        raise ConfigError(
            f"tensor_parallel_size is {size} and disk_cache_bytes (--disk-cache-space) "
            f"{deployment.disk_cache_bytes}; ranks do not find the same pages on disk at the same "
            "time: leave the disk cache out, or take one rank"
        )
    if torch.distributed.is_initialized():
        raise ConfigError(
            f"tensor_parallel_size is {size} and this process is one of several ranks already; "
            "close that engine first, or take another process"
        )
    device = usable_device(deployment.device)
    if device.type == "cuda":
        have = torch.cuda.device_count() - (device.index or 0)
        if have < size:
            raise ConfigError(
                f"tensor_parallel_size is {size} and there are {max(have, 0)} GPUs from "
                f"{deployment.device} on; each rank takes one"
            )


class RankProcesses:
    """The ranks beside rank 0, each a process that ends with this one.

    Args:
        settings: Those of rank 0.
        folder: Closed at the end.
        on_loss: Told when one ends unasked.
    """

    def __init__(
        self, settings: RankSettings, folder: ScratchFolder, on_loss: OnLoss | None = None
    ) -> None:
        self.shard: DistributedShard | None = None
        """Rank 0's own part, once it is there."""
        self.loss: str | None = None
        self._folder = folder
        self._on_loss = on_loss
        self._is_loading = True
        self._ending = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[Line] = []
        for rank in range(1, settings.size):
            self._start(msgspec.structs.replace(settings, rank=rank))

    def _start(self, settings: RankSettings) -> None:
        own, other = socket.socketpair()
        with other:
            process = subprocess.Popen(
                [*_PROGRAM, str(other.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[other.fileno()],
                env=_environment(),
            )
        line = Line(own)
        self._processes.append(process)
        self._lines.append(line)
        with suppress(OSError):
            line.send(msgspec.msgpack.encode(settings))
        watch = threading.Thread(
            target=self._watch, args=(settings.rank, process), name="watch-rank", daemon=True
        )
        watch.start()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        status = process.wait()
        if self._is_loading:
            self._ending.wait(_GRACE_SECONDS)
        if self._ending.is_set():
            return
        self.loss = f"rank {rank} has ended with status {status}"
        if self._on_loss is not None:
            self._on_loss(self.loss)

    @property
    def pids(self) -> Sequence[int]:
        """The processes."""
        return [process.pid for process in self._processes]

    def send(self, frame: bytes) -> None:
        """Tell all ranks.

        Raises:
            EngineDeadError: If one is gone.
        """
        try:
            for line in self._lines:
                line.send(frame)
        except OSError as error:
            raise EngineDeadError(f"a rank has ended: {self.loss or error}") from error

    def wait_ready(self) -> None:
        """Wait until all have loaded.

        Raises:
            EngineDeadError: If one has ended instead.
        """
        for rank, line in enumerate(self._lines, 1):
            if line.receive() != READY:
                raise EngineDeadError(f"rank {rank} has ended while it loaded; its log says why")
        self._is_loading = False

    def close(self, timeout: float) -> None:
        """Let the ranks end by themselves in ``timeout`` seconds, then end them."""
        if self._ending.is_set():
            return
        self._ending.set()
        deadline = time.monotonic() + timeout
        if self.loss is None:
            # All leave together: the last to leave would wait for the others.
            if self.shard is not None:
                self.shard.close()
                self.shard = None
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0.1))
        self.kill()

    def kill(self) -> None:
        """End all at once."""
        self._ending.set()
        for process, line in zip(self._processes, self._lines, strict=True):
            process.kill()
            process.wait()
            line.close()
            assert process.stdin is not None
            process.stdin.close()
        self._processes, self._lines = [], []
        self._folder.close()
        if self.shard is not None:
            self.shard.abandon()
            self.shard = None


def _environment() -> dict[str, str]:
    """Return this process's environment, with this very package importable."""
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment
