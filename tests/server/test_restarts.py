"""dlm.server.workers: when a worker that ended is started again, and when one is given up."""

from __future__ import annotations

import pytest

from dlm.server.workers import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    QUICK_S,
    READY_LOOKS,
    SILENT_LOOKS,
    START_LOOKS,
    Pulse,
    pause_after,
)


def test_one_crash_costs_no_pause():
    """However short the life was."""
    assert pause_after(0.0, 0) == (1, 0.0)


def test_pauses_double_while_a_worker_dies_again_and_again():
    """Up to a bound, and not beyond what a float holds."""
    deaths, pauses = 0, []
    for _ in range(2000):
        deaths, pause = pause_after(0.1, deaths)
        pauses.append(pause)
    assert pauses[1:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert sorted(pauses) == pauses


@pytest.mark.parametrize("deaths", [0, 1, 7])
def test_a_long_life_makes_the_next_death_the_first(deaths):
    """A worker that crashes once an hour is not one that cannot start."""
    assert pause_after(QUICK_S, deaths) == (0, 0.0)
    assert pause_after(QUICK_S - 1, 0) == (1, 0.0)


@pytest.mark.parametrize("sign", [Pulse.beat, Pulse.ready])
def test_a_worker_is_given_up_after_looks_without_a_beat(sign):
    """One sign of life between them, that it is ready among them, and all of them begin anew."""
    pulse = Pulse()
    sign(pulse)
    assert not any(pulse.stuck_reason() for _ in range(SILENT_LOOKS))
    pulse.beat()
    assert not any(pulse.stuck_reason() for _ in range(SILENT_LOOKS))
    assert "10 s" in (pulse.stuck_reason() or "")


def test_a_worker_that_never_says_anything_is_given_up_later():
    """It has longer to begin than to go on, and not for ever."""
    pulse = Pulse()
    assert not any(pulse.stuck_reason() for _ in range(START_LOOKS))
    assert "60 s" in (pulse.stuck_reason() or "")
    assert START_LOOKS > SILENT_LOOKS


def test_a_worker_that_beats_and_never_is_ready_is_given_up_too():
    """One that is ready may live for ever."""
    hangs, serves = Pulse(), Pulse()
    serves.ready()
    for _ in range(READY_LOOKS):
        for pulse in (hangs, serves):
            assert pulse.stuck_reason() is None
            pulse.beat()
    assert "600 s" in (hangs.stuck_reason() or "")
    assert serves.stuck_reason() is None
