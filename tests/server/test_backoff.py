"""Delays between restarts."""

from mstar.server.backoff import Backoff


def test_the_first_restart_is_immediate_and_later_ones_wait_longer_up_to_a_bound() -> None:
    backoff = Backoff(longest=3.0, healthy=60.0, clock=lambda: 0.0)
    assert [backoff.next_delay() for _ in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_long_life_clears_the_record_and_a_short_one_does_not() -> None:
    now = [0.0]
    backoff = Backoff(longest=30.0, healthy=60.0, clock=lambda: now[0])
    backoff.born()
    now[0] = 1.0
    assert backoff.next_delay() == 0.0
    backoff.born()
    now[0] = 2.0
    assert backoff.next_delay() == 0.5
    backoff.born()
    now[0] = 62.0
    assert backoff.next_delay() == 0.0


def test_an_endless_crash_loop_does_not_overflow() -> None:
    backoff = Backoff(longest=30.0)
    assert max(backoff.next_delay() for _ in range(5000)) == 30.0
