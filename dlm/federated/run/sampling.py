"""Samples a round's users: Poisson, a fixed report goal, or available users with an expired timer.

| sampler | what accounting may assume |
| --- | --- |
| `PoissonSampler` | amplification by sampling; nothing about separation |
| `FixedGoalSampler` | nothing but the number of rounds |
| `AvailabilitySampler` | the gap and the participations that it enforces |

A resumed run with the same key draws the same cohorts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dlm.errors import ConfigError, UnavailableError
from dlm.federated.keys import Key
from dlm.units import counted

Users = npt.NDArray[np.int64]
DAY_S = 86_400.0


class Sampler(Protocol):
    users: int

    def cohort(self, round: int, now: float = 0.0) -> Users:  # noqa: A002
        """Returns the sorted indexes of this round's users, without duplicates."""

    def describe(self) -> dict[str, Any]:
        """Describes how cohorts are drawn, for the ledger and the report."""

    def state(self) -> dict[str, Any]:
        """The state to store in a checkpoint."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from the result of `state`."""


class _Stateless:
    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ConfigError(
                f"this sampler has no state, but the checkpoint has {sorted(state)}; resume with "
                "the sampling that the run began with"
            )


class PoissonSampler(_Stateless):
    """Draws each user with probability q, independently of all others and of other rounds, as
    amplification by sampling needs (DPF Algorithm 1 and modification A)."""

    def __init__(self, users: int, q: float, key: Key):
        if not 0 < q <= 1:
            raise ConfigError(f"q is {q}; expected a probability above 0 and at most 1")
        self.users, self.q = _population(users), q
        self._key = key

    def cohort(self, round: int, now: float = 0.0) -> Users:  # noqa: A002
        return np.flatnonzero(self._key.fold(round).uniforms(self.users) < self.q).astype(np.int64)

    def describe(self) -> dict[str, Any]:
        return {"kind": "poisson", "q": self.q, "users": self.users}


class FixedGoalSampler(_Stateless):
    """Draws exactly `report_goal` users a round; every set of that size is equally likely."""

    def __init__(self, users: int, report_goal: int, key: Key):
        self.users, self.report_goal = _population(users), report_goal
        _check_goal(users, report_goal)
        self._key = key

    def cohort(self, round: int, now: float = 0.0) -> Users:  # noqa: A002
        return _choose(np.arange(self.users), self.report_goal, self._key.fold(round))

    def describe(self) -> dict[str, Any]:
        return {"kind": "fixed", "report_goal": self.report_goal, "users": self.users}


@dataclass(frozen=True)
class Diurnal:
    """The probability that a device is idle, charging and on an unmetered network, by local time:
    a raised cosine, `low` at noon and `high` at midnight."""

    low: float = 0.05
    high: float = 0.6
    # Time zones of the users, as (offset from the clock in hours, share of the users).
    zones: tuple[tuple[float, float], ...] = ((0.0, 1.0),)

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1 or self.high == 0:
            raise ConfigError(
                f"the availability has low = {self.low} and high = {self.high}; expected 0 <= "
                "low <= high <= 1, and a high above 0"
            )
        shares = [share for _, share in self.zones]
        if not all(map(math.isfinite, (h for h, _ in self.zones))):
            raise ConfigError(f"the time zones are {self.zones}; expected finite offsets in hours")
        if not shares or min(shares) < 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-9):
            raise ConfigError(
                f"the time zones have shares {shares}; expected shares >= 0 that sum to 1"
            )

    def probability(self, now: float, offset_h: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """By time zone offset, the probability that a device is available `now` s from midnight."""
        angle = 2 * np.pi * (now + 3600.0 * offset_h) / DAY_S
        return self.low + (self.high - self.low) * (1 + np.cos(angle)) / 2

    def offsets(self, users: int, key: Key) -> npt.NDArray[np.float64]:
        edges = np.cumsum([share for _, share in self.zones])[:-1]
        return np.array([h for h, _ in self.zones])[
            np.searchsorted(edges, key.uniforms(users), "right")
        ]


class AvailabilitySampler:
    """Draws `report_goal` users who are available and may take part again: their timer has run out,
    `gap` rounds have passed since their last round, and they have taken part fewer than
    `max_participations` times (Xu et al. 2023 (GDP), section 2.2). All three survive a resume.

    Args
        max_participations  None: only the gap limits participations
        timer_s             seconds from a participation until a user may take part again
        diurnal             when users are available; None: always
    """

    def __init__(
        self,
        users: int,
        report_goal: int,
        key: Key,
        *,
        gap: int = 1,
        max_participations: int | None = None,
        timer_s: float = 0.0,
        diurnal: Diurnal | None = None,
    ):
        _check_goal(users, report_goal)
        if gap < 1 or (max_participations is not None and max_participations < 1) or timer_s < 0:
            raise ConfigError(
                f"gap is {gap}, max_participations {max_participations} and the timer {timer_s} s; "
                "expected a gap and max_participations of at least 1, and a timer of 0 s or more"
            )
        self.users, self.report_goal = _population(users), report_goal
        self.gap, self.max_participations, self.timer_s, self.diurnal = (
            gap,
            max_participations,
            timer_s,
            diurnal,
        )
        self._key = key
        self._offset_h = diurnal.offsets(users, key.fold("zones")) if diurnal else None
        self._next_round = np.zeros(users, np.int64)  # first round in which each user may take part
        self._next_s = np.full(users, -np.inf)  # time from which each user may take part
        self._taken = np.zeros(users, np.int64)
        self._round = -1

    def eligible(self, round: int, now: float) -> npt.NDArray[np.bool_]:  # noqa: A002
        """Marks the users who may take part, whether available or not."""
        rested = (self._next_round <= round) & (self._next_s <= now)
        return (
            rested
            if self.max_participations is None
            else rested & (self._taken < self.max_participations)
        )

    def available(self, round: int, now: float) -> npt.NDArray[np.bool_]:  # noqa: A002
        """Marks the users whose devices are idle, charging and connected at this moment."""
        if self.diurnal is None or self._offset_h is None:
            return np.ones(self.users, bool)
        # The time is part of the key: a user who was busy when a round could not begin may be free
        # a minute later.
        draw = self._key.fold("available", round, int(now * 1000)).uniforms(self.users)
        return draw < self.diurnal.probability(now, self._offset_h)

    def cohort(self, round: int, now: float = 0.0, least: int = 0) -> Users:  # noqa: A002
        """Draws the users of a round, who then count as having taken part. Raises UnavailableError
        if fewer than `least`, by default the report goal, can take part now; ask again later."""
        if round <= self._round:
            raise ConfigError(
                f"round {round} was requested after round {self._round}; request rounds in "
                "increasing order"
            )
        may = self.eligible(round, now)
        ready = np.flatnonzero(may & self.available(round, now))
        if len(ready) < (least := least or self.report_goal):
            raise UnavailableError(
                f"{len(ready)} users can take part in round {round} ({int(may.sum())} of "
                f"{self.users} have an expired timer and participations left), but {least} are "
                "needed"
            )
        count = min(len(ready), self.report_goal)
        chosen = _choose(ready, count, self._key.fold("cohort", round))
        self._next_round[chosen] = round + self.gap
        self._next_s[chosen] = now + self.timer_s
        self._taken[chosen] += 1
        self._round = round
        return chosen

    def cohort_when_ready(
        self,
        round: int,  # noqa: A002
        now: float,
        *,
        step_s: float = 60.0,
        patience_s: float = 30 * DAY_S,
    ) -> tuple[Users, float]:
        """Returns (users, the time at which enough were available), trying every `step_s` of
        simulated time. Raises ConfigError after `patience_s` without a cohort."""
        moment = now
        while True:
            try:
                return self.cohort(round, moment), moment
            except UnavailableError as exc:
                moment += step_s
                waiting_helps = self.timer_s > 0 or self.diurnal is not None
                if moment > now + patience_s or not waiting_helps:
                    raise ConfigError(
                        f"no cohort was found for round {round}"
                        f"{f' within {patience_s / DAY_S:g} days' if waiting_helps else ''}: {exc}"
                    ) from exc

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "timer",
            "report_goal": self.report_goal,
            "users": self.users,
            "gap": self.gap,
            "max_participations": self.max_participations,
            "timer_s": self.timer_s,
            "diurnal": self.diurnal is not None,
        }

    def state(self) -> dict[str, Any]:
        return {
            "next_round": self._next_round.copy(),
            "next_s": self._next_s.copy(),
            "taken": self._taken.copy(),
            "round": np.int64(self._round),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if set(state) != set(self.state()) or len(state["next_round"]) != self.users:
            raise ConfigError(
                f"the checkpoint is not from a sampler of this kind for {self.users} users. "
                "Resume with the settings and users that the run began with"
            )
        self._next_round = np.array(state["next_round"], np.int64)
        self._next_s = np.array(state["next_s"], np.float64)
        self._taken = np.array(state["taken"], np.int64)
        self._round = int(state["round"])


def check_population(
    users: int,
    report_goal: int,
    rounds: int,
    *,
    gap: int = 1,
    max_participations: int | None = None,
) -> bool:
    """Tells whether the rounds can be filled whichever users are drawn; False if they can only be
    filled when users take turns. Raises ConfigError if there are too few users for the gap or the
    participations."""
    span = min(gap, rounds)
    if users < report_goal * span:
        raise ConfigError(
            f"{users:,} users cannot fill {rounds} rounds of {report_goal} users with a gap of "
            f"{gap}: any {span} rounds in a row need {report_goal * span:,} different users. Lower "
            "the report goal or the gap, or find more users"
        )
    if max_participations is None or max_participations >= -(-rounds // gap):
        return True
    if users * max_participations < report_goal * rounds:
        raise ConfigError(
            f"{users:,} users, each in at most {counted(max_participations, 'round')}, cannot "
            f"fill {rounds} rounds of {report_goal} users; they can fill at most "
            f"{users * max_participations // report_goal}. Use fewer rounds or a lower "
            "report goal, raise max_participations, or find more users"
        )
    # In the last round, users drawn within the gap must wait, and earlier rounds may have drawn the
    # same users again and again, until they had no participations left.
    return users >= report_goal * span + (rounds - span) * report_goal // max_participations


def _population(users: int) -> int:
    if users < 1:
        raise ConfigError(f"there are {users} users; sampling needs at least 1")
    return users


def _check_goal(users: int, report_goal: int) -> None:
    if not 1 <= report_goal <= users:
        raise ConfigError(
            f"the report goal is {report_goal:,}; expected at least 1, and at most the number of "
            f"users, which is {users:,}"
        )


def _choose(ready: npt.NDArray[np.integer[Any]], count: int, key: Key) -> Users:
    draw = key.uniforms(len(ready))
    if count == len(ready):
        return np.sort(ready).astype(np.int64)
    return np.sort(ready[np.argpartition(draw, count - 1)[:count]]).astype(np.int64)
