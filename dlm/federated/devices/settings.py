"""Settings of the devices of a run and of their server."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlm.config import check, setting

MOST_DEVICES = 100  # each device shares secrets with every other one: 100^2 shares per round
LEAST_DEVICES = 3  # with two devices, the sum would reveal each one's input to the other
PERIOD_DAYS = 30  # the period in which `max_participations` counts


@dataclass(frozen=True)
class ServerSettings:
    step_s: float = setting(
        300.0,
        "Time that devices have for each step of a round.",
        unit="seconds",
        above=0,
        why="In its first round, a device also compiles its training steps.",
    )
    wait_s: float = setting(
        600.0, "Time to wait for enough devices to check in.", unit="seconds", low=0
    )

    over_selection: float = setting(
        1.0,
        "Devices asked per round, as a multiple of the report goal; the round counts the first "
        "inputs up to the goal.",
        low=1,
        why="Bonawitz et al. 2019 use 1.3, since some devices vanish, and some are slow.",
    )

    def __post_init__(self) -> None:
        check("server", self)

    def asked(self, goal: int) -> int:
        """Returns how many devices to ask in order to receive `goal` inputs."""
        return math.ceil(round(goal * self.over_selection, 6))


@dataclass(frozen=True)
class OwnerLimits:
    """The limits that a device's owner sets, which hold whatever a server promises."""

    rest_s: float = setting(
        86_400.0,
        "Minimum time from one participation to the next, in any run.",
        unit="seconds",
        low=0,
        why="A server can name runs and rounds as it likes, so only time limits it; Gboard's "
        "timers take days (GDP 2.2).",
    )
    max_participations: int = setting(
        10,
        f"Maximum number of participations in {PERIOD_DAYS} days, in all runs together.",
        low=1,
        why="A lifetime limit would let a server that renames its runs retire a device.",
    )
    least_devices: int = setting(
        LEAST_DEVICES,
        "Minimum number of devices that take part in a round, including this one.",
        low=LEAST_DEVICES,
        high=MOST_DEVICES,
        why="The server chooses which devices are asked: among few devices, those that help it may "
        "be a third.",
    )

    def __post_init__(self) -> None:
        check("device", self)
