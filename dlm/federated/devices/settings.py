"""Settings of the devices of a run and of their server."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlm.config import check, setting

MOST_DEVICES = 100  # each shares secrets with each: 100 squared sealed shares per round
LEAST_DEVICES = 3  # the sum of two tells each of them the other's
PERIOD_DAYS = 30  # of `max_participations`


@dataclass(frozen=True)
class ServerSettings:
    step_s: float = setting(
        300.0,
        "Time that devices have for each step of a round.",
        unit="seconds",
        above=0,
        why="In its first round, a device compiles its steps.",
    )
    wait_s: float = setting(
        600.0, "Time to wait for enough devices to check in.", unit="seconds", low=0
    )

    over_selection: float = setting(
        1.0,
        "Devices asked per round, as a multiple of the report goal; the round counts the first "
        "inputs up to the goal.",
        low=1,
        why="1.3 (Bonawitz et al. 2019): some devices vanish, some are slow.",
    )

    def __post_init__(self) -> None:
        check("server", self)

    def asked(self, goal: int) -> int:
        """Devices asked for so many inputs."""
        return math.ceil(round(goal * self.over_selection, 6))


@dataclass(frozen=True)
class OwnerLimits:
    """What a device's owner allows, whatever a server promises."""

    rest_s: float = setting(
        86_400.0,
        "Least time from one participation to the next, in any run.",
        unit="seconds",
        low=0,
        why="A server names runs and rounds as it likes; Gboard's timers take days (GDP 2.2).",
    )
    max_participations: int = setting(
        10,
        f"Most participations in {PERIOD_DAYS} days, in all runs together.",
        low=1,
        why="A limit for good would let a server that renames its runs retire a device.",
    )
    least_devices: int = setting(
        LEAST_DEVICES,
        "Fewest devices asked in a round, this one included.",
        low=LEAST_DEVICES,
        high=MOST_DEVICES,
        why="A server chooses who is asked: among few, those that help it may be a third.",
    )

    def __post_init__(self) -> None:
        check("device", self)
