"""How long messages waited, told without equal clocks."""

from __future__ import annotations

import pytest

from dlm.server.exchange import WINDOW_S, Lateness


def test_what_is_above_the_quickest_message_was_waiting() -> None:
    """Clocks 1,000 s apart, 3 ms of way; the third message waited half a second."""
    lateness = Lateness()
    seen = [
        lateness.of(sent_us, 1000.003 + sent_us * 1e-6 + waited)
        for sent_us, waited in ((0, 0.0), (10_000, 0.001), (20_000, 0.5), (30_000, 0.0))
    ]
    assert seen == pytest.approx([0.0, 0.001, 0.5, 0.0], abs=1e-6)


def test_a_quicker_message_moves_the_measure() -> None:
    """The first waited, which nobody could know; from the second on it shows."""
    lateness = Lateness()
    assert lateness.of(0, 5.2) == 0.0
    assert lateness.of(1_000_000, 6.0) == 0.0
    assert lateness.of(2_000_000, 7.2) == pytest.approx(0.2)


@pytest.mark.parametrize("drift", [-50e-6, 50e-6])
def test_clocks_that_drift_for_a_day_are_not_taken_for_waiting(drift: float) -> None:
    """50 parts in a million, a message a second: never more than two windows of drift."""
    lateness = Lateness()
    worst = max(
        lateness.of(int(second * (1 + drift) * 1e6), 100.0 + second) for second in range(86_400)
    )
    assert worst <= 2 * WINDOW_S * 50e-6 + 2e-6


def test_no_stamp_makes_a_message_older_than_its_stream() -> None:
    """Whatever a client writes, what it is told and what is counted stays within bounds."""
    lateness = Lateness()
    stamps = [2**64 - 1, 0, 3, 2**63, 1, 2**64 - 1]
    waited = [lateness.of(stamp, 50.0 + i) for i, stamp in enumerate(stamps)]
    assert all(0.0 <= w <= i for i, w in enumerate(waited))
