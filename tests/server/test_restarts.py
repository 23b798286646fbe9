"""dlm.server.restarts: when a worker that ended is started again, and when one is given up."""

from __future__ import annotations

import pytest

from dlm.server.restarts import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    QUICK_S,
    SILENT_LOOKS,
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


def test_a_worker_is_given_up_after_looks_without_a_beat():
    """One beat between them, and all of them begin anew."""
    pulse = Pulse()
    pulse.beat()
    assert not any(pulse.look() for _ in range(SILENT_LOOKS))
    pulse.beat()
    assert not any(pulse.look() for _ in range(SILENT_LOOKS))
    assert pulse.look()


def test_a_worker_that_has_not_beaten_yet_is_not_given_up():
    """It may start for as long as it takes."""
    pulse = Pulse()
    assert not any(pulse.look() for _ in range(10 * SILENT_LOOKS))
