"""Commands about KV events: `mstar kv-events …`."""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mstar.errors import ConfigError

if TYPE_CHECKING:
    from mstar.transport.event_order import Arrival
    from mstar.transport.kv_events import EventSubscriber

_ENDPOINT = "tcp://127.0.0.1:5557"
# Seconds without a connection after which a user wants to know.
_PATIENCE = 1.0
# Seconds between looks at the connection.
_POLL = 0.25


def add_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `kv-events` and what stands below it."""
    text = "Look at the events by which an engine tells what its prefix cache holds."
    group = commands.add_parser("kv-events", help=text, description=text, allow_abbrev=False)
    below = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "Print KV events as they come, until Ctrl-C."
    tail = below.add_parser("tail", help=text, description=text, allow_abbrev=False)
    tail.set_defaults(run=_tail)
    add = tail.add_argument
    add("--endpoint", default=_ENDPOINT, help="where events are published (default: %(default)s)")
    add("--replay-endpoint", metavar="ENDPOINT", help="where missed events can be asked for")
    add("--topic", default="", help="beginning of the topics to follow (default: all)")
    add(
        "--from-start",
        action="store_true",
        help="begin with all that can be replayed, not with the next event",
    )
    add("--json", action="store_true", help="print an object a line, with whole keys")
    add("--count", type=int, metavar="N", help="stop after N events")


def _tail(arguments: argparse.Namespace) -> int:
    from mstar.cli.event_lines import lines_of  # noqa: PLC0415
    from mstar.transport.kv_events import EventSubscriber  # noqa: PLC0415

    if arguments.from_start and arguments.replay_endpoint is None:
        raise ConfigError("--from-start needs --replay-endpoint: past events come from there")
    if arguments.count is not None and arguments.count < 1:
        raise ConfigError(f"--count is {arguments.count}; it is at least 1")
    subscriber = EventSubscriber(
        arguments.endpoint,
        arguments.replay_endpoint,
        arguments.topic,
        from_start=arguments.from_start,
    )
    num_left = arguments.count
    try:
        for arrival in _follow(subscriber, arguments.endpoint):
            for line, is_event in lines_of(arrival, as_json=arguments.json):
                print(line, flush=True)
                num_left = num_left if num_left is None else num_left - is_event
                if num_left == 0:
                    return 0
    except KeyboardInterrupt:
        pass
    finally:
        subscriber.close()
    return 0


def _follow(subscriber: "EventSubscriber", endpoint: str) -> "Iterator[Arrival]":
    """Yield what arrives, and tell on stderr when the other end comes and goes."""
    was_connected = True
    patient_until = time.monotonic() + _PATIENCE
    while True:
        yield from subscriber.receive(_POLL)
        if subscriber.is_connected:
            if not was_connected:
                print(f"mstar: connected to {endpoint}", file=sys.stderr, flush=True)
            was_connected, patient_until = True, time.monotonic() + _PATIENCE
        elif was_connected and time.monotonic() > patient_until:
            print(f"mstar: nobody answers at {endpoint}; waiting", file=sys.stderr, flush=True)
            was_connected = False
