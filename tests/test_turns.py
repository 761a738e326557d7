"""Threads get their turns in the order in which they asked."""

import threading
import time
from collections import Counter

import pytest

from mstar.turns import Turns


def test_a_thread_that_asks_again_waits_behind_the_others() -> None:
    turns, order, together = Turns(), [], threading.Barrier(3)
    inside = Counter[str]()

    def work(name: str) -> None:
        together.wait()
        for _ in range(50):
            with turns:
                inside["now"] += 1
                assert inside["now"] == 1
                order.append(name)
                time.sleep(0.001)
                inside["now"] -= 1

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(order) == 150
    # All wait while one is inside, so that each comes once in three turns; the ends are ragged.
    assert all(len(set(order[i : i + 3])) == 3 for i in range(10, 130))


def test_a_thread_that_waits_for_its_turn_knows_that_it_does() -> None:
    """What interrupts it would else wait behind it, for ever."""
    turns, found = Turns(), threading.Event()
    threads: list[threading.Thread] = []

    def wait() -> None:
        with turns:
            pass

    with turns:
        threads.append(threading.Thread(target=wait))
        threads[0].start()
        end = time.monotonic() + 10
        while time.monotonic() < end and not found.is_set():
            if threads[0].ident in turns._queue:
                found.set()
        assert turns.is_mine
    threads[0].join(10)
    assert found.is_set()
    assert not turns.is_mine


def test_an_error_and_an_interrupt_leave_the_others_their_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = Turns()
    with turns:
        assert turns.is_mine
    with pytest.raises(ValueError, match="x"), turns:
        raise ValueError("x")
    assert not turns.is_mine

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(turns._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), turns:
            pass
    with turns:
        pass
