"""Plans a run's report goal, timer and noise for a privacy target, before any user takes part.

The hypothesis (GDP 2.2, BLT 5) is that a model learns equally well if noise multiplier and report
goal are raised together, so a small simulation shows how much noise a large run tolerates. With a
larger goal, users run out sooner: the gap is at most population / report goal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from dlm.errors import ConfigError
from dlm.federated.account.zcdp import gaussian_epsilon, noise_for, rho_of, zcdp_epsilon
from dlm.federated.noise.participation import min_separation_from_gap, most_participations

# (rounds, gap, max_participations) -> sensitivity, which does not rise with the gap
Sensitivity = Callable[[int, int, int], float]
GRID = 200  # report goals shown between the lowest and highest


@dataclasses.dataclass(frozen=True)
class Extrapolated:
    """Settings of a run and their guarantee. A run with this rho reports `epsilon`; papers print
    `epsilon_gaussian`."""

    report_goal: int
    noise_multiplier: float
    rounds: int
    gap: int
    min_separation: int
    max_participations: int
    rho: float
    epsilon: float
    epsilon_gaussian: float


@dataclasses.dataclass(frozen=True)
class NoisePlan:
    """The settings to run, and whether such a run learns as well as the simulation.

    Fields
        keeps_utility  whether the ratio of noise to report goal is the simulation's; otherwise the
                       noise is larger and the model will be worse
        timer_hours    hours that a device waits between participations: whole days, because devices
                       come at night; None if the duration of a round is not given
        considered     some settings with the simulation's ratio, by increasing report goal
    """

    chosen: Extrapolated
    target_rho: float
    delta: float
    keeps_utility: bool
    timer_hours: float | None
    considered: tuple[Extrapolated, ...]
    notes: tuple[str, ...]


def extrapolate(
    population: int,
    rounds: int,
    report_goal: int,
    noise_multiplier: float,
    delta: float,
    sensitivity: Sensitivity,
) -> Extrapolated:
    """The guarantee of `rounds` rounds of `report_goal` users, who take part as often as the gap
    allows."""
    gap = min(population // report_goal, rounds)
    if gap < 1:
        raise ConfigError(
            f"the report goal is {report_goal} users per round; expected at most {population}, the "
            "whole population"
        )
    max_participations = most_participations(rounds, gap)
    rho = rho_of(sensitivity(rounds, gap, max_participations), noise_multiplier)
    return Extrapolated(
        report_goal, noise_multiplier, rounds, gap, min_separation_from_gap(gap),
        max_participations, rho,
        zcdp_epsilon(rho, delta), gaussian_epsilon(rho, delta),
    )  # fmt: skip


def make_plan(
    *,
    population: int,
    rounds: int,
    target_rho: float,
    delta: float,
    simulated_goal: int,
    simulated_noise: float,
    largest_goal: int,
    sensitivity: Sensitivity,
    round_minutes: float | None = None,
) -> NoisePlan:
    """Finds the smallest report goal that meets the target, and the noise and timer for that goal.

    Args
        simulated_goal, simulated_noise  a simulation that learned well enough (GDP: 500 and 0.54)
        round_minutes                    how long a round takes, for the timer; > 0
    Paper   GDP 2.5 (2)-(4); if the largest goal is not enough, the noise is raised
    """
    numbers = {
        "population": population, "rounds": rounds, "target rho": target_rho,
        "simulated goal": simulated_goal, "simulated noise": simulated_noise,
        "largest goal": largest_goal,
    }  # fmt: skip
    if round_minutes is not None:
        numbers["round minutes"] = round_minutes
    for name, value in numbers.items():
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} is {value}; it must be finite and above 0")
    largest_goal = min(largest_goal, population)
    least = min(simulated_goal, largest_goal)
    considered = tuple(
        extrapolate(
            population, rounds, goal, simulated_noise * goal / simulated_goal, delta, sensitivity
        )
        for goal in _goals(least, largest_goal)
    )
    best = _least_goal(
        population, rounds, least, largest_goal, target_rho, simulated_noise / simulated_goal,
        sensitivity,
    )  # fmt: skip
    notes = [
        "this is an extrapolation: the gap assumes that users take turns, each once in (population "
        "/ report goal) rounds; after the run, account with the observed gap and participations"
    ]
    if best is not None:
        noise = simulated_noise * best / simulated_goal
        chosen = extrapolate(population, rounds, best, noise, delta, sensitivity)
    else:
        last = considered[-1]
        reach = sensitivity(rounds, last.gap, last.max_participations)
        noise = noise_for(reach, target_rho)
        chosen = dataclasses.replace(
            last,
            noise_multiplier=noise,
            rho=target_rho,
            epsilon=zcdp_epsilon(target_rho, delta),
            epsilon_gaussian=gaussian_epsilon(target_rho, delta),
        )
        notes.append(
            f"no report goal up to {largest_goal:,} meets the target with the simulation's "
            f"ratio of noise to goal; the largest goal needs {noise / last.noise_multiplier:.2f} "
            "times as much noise, which makes the model worse"
        )
    timer = None
    if round_minutes is not None:
        # A day is the smallest step: devices come at night, so a shorter timer does not separate
        # participations.
        timer = max(24.0, 24.0 * math.floor(chosen.gap * round_minutes / 60 / 24))
        if timer > chosen.gap * round_minutes / 60:
            notes.append(
                f"a timer of a day is longer than {chosen.gap} rounds of {round_minutes:g} minutes:"
                " users run out within a day. Expect rounds to wait"
            )
    return NoisePlan(chosen, target_rho, delta, best is not None, timer, considered, tuple(notes))


def _least_goal(
    population: int,
    rounds: int,
    least: int,
    largest: int,
    target_rho: float,
    noise_a_user: float,
    sensitivity: Sensitivity,
) -> int | None:
    """The least report goal from `least` to `largest` that meets the target; None if none does.

    Noise grows with the goal. So among goals with the same gap, rho falls as the goal rises, and
    the least goal follows from the noise needed; but rho jumps up where a larger goal makes the gap
    smaller. No goal in a range meets the target if the range's widest gap, with the noise of its
    largest goal, does not.
    """

    def gap_of(goal: int) -> int:
        return min(population // goal, rounds)

    def within(first: int, last: int) -> int | None:
        gap = gap_of(first)
        reach = sensitivity(rounds, gap, most_participations(rounds, gap))

        def meets(candidate: int) -> bool:
            return rho_of(reach, noise_a_user * candidate) <= target_rho

        if not meets(last):
            return None
        if gap_of(last) != gap:
            middle = (first + last) // 2
            found = within(first, middle)
            return within(middle + 1, last) if found is None else found
        needed = math.ceil(noise_for(reach, target_rho) / noise_a_user)
        found = min(max(first, needed), last)
        # Rounding errors may put the quotient off by one user.
        while not meets(found):
            found += 1
        while found > first and meets(found - 1):
            found -= 1
        return found

    return within(least, largest)


def _goals(least: int, most: int) -> Sequence[int]:
    step = max((most - least) // GRID, 1)
    goals = list(range(least, most, step))
    return [*goals, most]
