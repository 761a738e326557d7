"""One rank of several: loads its part of a model, and follows rank 0 where it is another.

A rank's settings are the first message on its line, whose descriptor is its argument. Its standard
input stays open as long as rank 0 lives, and the rank ends with it, whatever it waits for then.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from mstar.engine import memory
from mstar.engine.model import Model
from mstar.engine.parallel import Clock, EngineInStep, follow
from mstar.engine.resources.base import Deployment
from mstar.errors import MstarError
from mstar.models import load_model
from mstar.models.parallel.collectives import DistributedShard
from mstar.models.parallel.line import Line

# Run as a program, the module would else log as __main__.
logger = logging.getLogger("mstar.models.parallel.rank")

READY = b"ready"
"""Sent by a rank that has loaded."""


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank loads."""

    model: str
    dtype: str
    load_format: str
    numbers: dict[str, Any]
    """The deployment, but for its clock."""
    rank: int
    size: int
    meeting: str
    """Path of the file that the ranks find each other by."""

    @classmethod
    def of(cls, deployment: Deployment, **settings: Any) -> "RankSettings":
        """Return the settings of a rank of a deployment."""
        names = [item.name for item in fields(Deployment) if item.name != "clock"]
        numbers = {name: getattr(deployment, name) for name in names}
        return cls(numbers=numbers, size=deployment.tensor_parallel_size, **settings)


def device_of(device: str, rank: int) -> str:
    """Return the device of a rank, where rank 0 has ``device``.

    >>> device_of("cuda", 1), device_of("cuda:2", 1), device_of("cpu", 1)
    ('cuda:1', 'cuda:3', 'cpu')
    """
    first = torch.device(device)
    return device if first.type == "cpu" else f"{first.type}:{(first.index or 0) + rank}"


def load_part(
    settings: RankSettings, clock: Clock, progress: Callable[[int, int], None] | None = None
) -> tuple[Model, Deployment, DistributedShard]:
    """Return a rank's part of the model, and a deployment with nothing open that ranks must share.

    All ranks do this at the same time.

    Raises:
        MstarError: As ``load_model`` does, or if there is no room for KV pages.
    """
    device = device_of(settings.numbers["device"], settings.rank)
    shard = DistributedShard(
        settings.rank, settings.size, torch.device(device), Path(settings.meeting)
    )
    try:
        return *_load(settings, device, shard, clock, progress), shard
    except BaseException:
        shard.abandon()
        raise


def _load(
    settings: RankSettings,
    device: str,
    shard: DistributedShard,
    clock: Clock,
    progress: Callable[[int, int], None] | None,
) -> tuple[Model, Deployment]:
    model, dtype = load_model(
        settings.model,
        dtype=settings.dtype,
        device=device,
        load_format=settings.load_format,
        progress=progress,
        shard=shard,
    )
    deployment = Deployment(**settings.numbers)
    deployment = replace(deployment, device=device, dtype=dtype, clock=clock)
    if device.startswith("cuda"):
        sized = memory.fit(deployment, model, partial(EngineInStep, model))
        assert sized.num_pages is not None, "a fitted deployment has its pages"
        deployment = replace(deployment, num_pages=shard.least(sized.num_pages))
    return model, deployment


def main() -> None:
    """Run as a rank that is told what to do."""
    # Only rank 0 answers signals, which reach all processes of a terminal.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def live_with_rank_0() -> None:
        os.read(sys.stdin.fileno(), 1)
        os._exit(0)

    threading.Thread(target=live_with_rank_0, name="live-with-rank-0", daemon=True).start()
    line = Line(socket.socket(fileno=int(sys.argv[1])))
    message = line.receive()
    if message is None:
        return
    settings = msgspec.msgpack.decode(message, type=RankSettings)
    logging.basicConfig(
        level=logging.WARNING, format=f"%(levelname)s rank {settings.rank}: %(message)s"
    )
    # What fails ends not by way of what is left to be destroyed, which may wait for other ranks.
    try:
        _serve(settings, line)
    except MstarError as error:
        logger.error("%s", error)
        os._exit(1)
    except BaseException:
        logger.critical("the rank ends", exc_info=True)
        os._exit(1)


def _serve(settings: RankSettings, line: Line) -> None:
    clock = Clock()
    model, deployment, shard = load_part(settings, clock)
    engine = EngineInStep(model, replace(deployment, kv_events=False))
    line.send(READY)
    follow(engine, line.receive, clock)
    shard.close()


if __name__ == "__main__":
    main()
