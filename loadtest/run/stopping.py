"""When a run ends before its time. Pure functions of its windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SILENT_WINDOWS = 2  # in which no server answered, one after the other: the cluster is gone
STABLE_WINDOWS = 3
INTERRUPTED = "interrupted"  # why a run ended, after Ctrl-C


@dataclass(frozen=True, slots=True)
class Outcome:
    """What decides of one window, of all client processes together.

    answered  requests; some are without any server, by what clients hold
    messages  that servers answered
    """

    seconds: float
    requests: int
    answered: int
    messages: int
    p99_ms: float | None


def is_gone(windows: Sequence[Outcome]) -> bool:
    last = windows[-SILENT_WINDOWS:]
    return len(last) == SILENT_WINDOWS and all(
        one.answered < one.requests and one.messages == 0 for one in last
    )


def spread(values: Sequence[float]) -> float:
    """(largest - least) / mean; 0 of nothing but zeros."""
    mean = sum(values) / len(values)
    return (max(values) - min(values)) / mean if mean else 0.0


def is_stable(windows: Sequence[Outcome], percent: float) -> bool:
    """Whether the last windows agree in answers per second and in p99, within so many percent."""
    last = windows[-STABLE_WINDOWS:]
    if len(last) < STABLE_WINDOWS or any(one.p99_ms is None for one in last):
        return False
    rates = [one.answered / one.seconds for one in last]
    delays = [one.p99_ms or 0.0 for one in last]
    return max(spread(rates), spread(delays)) <= percent / 100
