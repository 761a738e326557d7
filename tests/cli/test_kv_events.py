"""`mstar kv-events tail`, as a user runs it."""

import json
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from mstar.cli.event_lines import lines_of
from mstar.cli.main import main
from mstar.engine.resources.kv.events import AllBlocksCleared, EventBatch, EventLog, Medium
from mstar.engine.resources.kv.keys import PageItem
from mstar.transport.event_order import Batch, Reset, ResetReason
from mstar.transport.kv_events import EventPublisher

ANY = "tcp://127.0.0.1:0"


def key(number: int) -> bytes:
    return bytes([number]) * 32


@contextmanager
def tail(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "mstar", "kv-events", "tail", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def publishing() -> Iterator[tuple[EventPublisher, Sequence[str]]]:
    publisher = EventPublisher(ANY, ANY)
    log = EventLog(2)
    log.stored(key(1), None, [1, 2])
    log.stored(key(2), key(1), [3, 4], [PageItem(1, 0, 5, key(9))])
    publisher.publish(log.take())
    log.removed([key(2)], Medium.HOST)
    publisher.publish(log.take())
    try:
        endpoints = (publisher.endpoint, str(publisher.replay_endpoint))
        yield publisher, ["--endpoint", endpoints[0], "--replay-endpoint", endpoints[1]]
    finally:
        publisher.close()


def test_events_are_printed_a_line_each_until_enough() -> None:
    with publishing() as (_, flags), tail(*flags, "--from-start", "--count", "3") as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    cleared, stored, removed = out.splitlines()
    assert cleared.split()[0] == "0"
    assert cleared.endswith("  cleared")
    assert stored.split()[0] == "1"
    assert stored.endswith(
        "stored   GPU  2 pages  010101010101..020202020202  4 tokens  at the root  1 with items"
    )
    assert removed.endswith("  removed  CPU  1 page  020202020202")


def test_json_has_whole_keys() -> None:
    flags = ["--from-start", "--count", "3", "--json"]
    with publishing() as (_, endpoints), tail(*endpoints, *flags) as process:
        out, _ = process.communicate(timeout=30)
    cleared, stored, removed = map(json.loads, out.splitlines())
    assert cleared["type"] == "AllBlocksCleared"
    assert stored["seq"] == 1
    assert stored["block_hashes"] == [key(1).hex(), key(2).hex()]
    assert stored["page_items"] == [[], [[1, 0, 5, key(9).hex()]]]
    assert removed["medium"] == "CPU"


def test_ctrl_c_ends_well_and_a_missing_publisher_is_waited_for() -> None:
    with publishing() as (publisher, flags):
        publisher.close()
        with tail(*flags) as process:
            assert process.stderr is not None
            assert process.stdout is not None
            assert "nobody answers at tcp://127.0.0.1:" in process.stderr.readline()
            again = EventPublisher(flags[1], flags[3])
            assert "connected to tcp://127.0.0.1:" in process.stderr.readline()
            # A subscription takes a moment to reach the publisher.
            while not select.select([process.stdout], [], [], 0.1)[0]:
                again.publish([AllBlocksCleared()])
            assert process.stdout.readline().endswith("cleared\n")
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
            assert process.stderr.read() == ""
            again.close()


def test_notices_say_what_an_index_must_do() -> None:
    lost, restarted = Reset(ResetReason.LOST, 4, 9), Reset(ResetReason.RESTARTED, 9, 0)
    ((line, is_event),) = lines_of(lost, as_json=False)
    assert not is_event
    assert "what follows 4 up to 9 cannot be had" in line
    ((line, _),) = lines_of(restarted, as_json=False)
    assert "began anew after batch 9" in line
    ((line, _),) = lines_of(restarted, as_json=True)
    assert json.loads(line) == {
        "type": "Reset",
        "reason": "restarted",
        "last_seq": 9,
        "next_seq": 0,
    }


def test_a_page_on_another_names_it() -> None:
    log = EventLog(1)
    log.stored(key(2), key(1), [5])
    ((line, is_event),) = lines_of(Batch(7, EventBatch(0.0, log.take())), as_json=False)
    assert is_event
    assert line.endswith("stored   GPU  1 page  020202020202  1 token  after 010101010101")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--from-start"], "--replay-endpoint"),
        (["--count", "0"], "at least 1"),
        (["--endpoint", "nonsense"], "write tcp://"),
    ],
)
def test_mistakes_are_named(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kv-events", "tail", *flags]) == 2
    assert words in capsys.readouterr().err
