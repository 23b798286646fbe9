"""Cohorts are drawn as they are accounted for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dlm.errors import ConfigError, PrivacyError, UnavailableError
from dlm.federated.keys import Key
from dlm.federated.run.sampling import (
    DAY_S,
    AvailabilitySampler,
    Diurnal,
    FixedGoalSampler,
    PoissonSampler,
    check_population,
)
from dlm.record.ledger import ParticipationLedger

KEY = Key.from_seed(11)


def far(value: float, mean: float, variance: float) -> bool:
    """Whether a number is farther from its mean than chance explains (one in 10 million)."""
    return abs(value - mean) > 5.3 * math.sqrt(variance)


def test_poisson_sampling_draws_each_user_with_probability_q_independently() -> None:
    """The right q is accepted and one 5 % off rejected; sizes vary, pairs meet by chance."""
    users, rounds, q = 400, 2000, 0.05
    sampler = PoissonSampler(users, q, KEY)
    taken = np.zeros((rounds, users), bool)
    for r in range(rounds):
        taken[r, sampler.cohort(r)] = True
    total = users * rounds
    assert not far(taken.sum(), total * q, total * q * (1 - q))
    assert far(taken.sum(), total * q * 1.05, total * q * (1 - q))
    sizes = taken.sum(axis=1)
    # The variance of sizes is that of independent users; a fixed goal's would be 0.
    assert 0.85 < sizes.var() / (users * q * (1 - q)) < 1.15
    pairs = (taken[:, :-1] & taken[:, 1:]).sum()
    assert not far(float(pairs), rounds * (users - 1) * q * q, rounds * (users - 1) * q * q)
    again = (taken[:-1] & taken[1:]).sum()
    assert not far(float(again), (rounds - 1) * users * q * q, (rounds - 1) * users * q * q)


def test_a_fixed_goal_gives_exactly_so_many_users_evenly() -> None:
    """Each user as often as the next."""
    sampler = FixedGoalSampler(100, 20, KEY)
    count = np.zeros(100)
    for r in range(1000):
        cohort = sampler.cohort(r)
        assert len(cohort) == 20 == len(set(cohort.tolist()))
        assert (np.diff(cohort) > 0).all()
        count[cohort] += 1
    chi2 = ((count - 200) ** 2 / (200 * 0.8)).sum()
    assert 40 < chi2 < 175  # 100 users: between chances of 1e-6 below and above
    assert FixedGoalSampler(7, 7, KEY).cohort(0).tolist() == list(range(7))


def plain_rounds(sampler: AvailabilitySampler, rounds: int, round_s: float) -> ParticipationLedger:
    """Cohorts of some rounds, into a ledger that enforces the same bounds and asks again."""
    ledger = ParticipationLedger(
        sampler.users,
        gap=sampler.gap,
        max_participations=sampler.max_participations,
        sampling=sampler.describe(),
    )
    last: dict[int, float] = {}
    now = 0.0
    for r in range(rounds):
        cohort, now = sampler.cohort_when_ready(r, now)
        assert len(cohort) == sampler.report_goal
        for user in cohort.tolist():
            assert now - last.get(user, -math.inf) >= sampler.timer_s
            last[user] = now
        ledger.record(r, map(str, cohort.tolist()))
        now += round_s
    return ledger


def test_the_gap_and_the_participations_are_never_broken() -> None:
    """Over every round; and the bounds are reached, so that they bind."""
    ledger = plain_rounds(AvailabilitySampler(200, 20, KEY, gap=8, max_participations=3), 28, 60)
    assert ledger.observed_gap() == 8
    assert ledger.observed_max_part() == 3


def test_a_timer_separates_rounds_as_wall_time_does() -> None:
    """Twice the timer, about twice the separation (GDP 2.2), until the population is used up."""
    seen = []
    for hours in (12, 24):
        sampler = AvailabilitySampler(
            4000, 40, KEY, timer_s=3600.0 * hours, diurnal=Diurnal(0.05, 0.5)
        )
        gap = plain_rounds(sampler, 150, 1800.0).observed_gap()
        assert gap is not None
        seen.append(gap)
    assert seen[0] <= 24  # rounds of half an hour in 12 hours
    assert 1.6 < seen[1] / seen[0] < 2.4


def test_availability_follows_the_day_where_the_user_is() -> None:
    """Midnight against noon, and a zone twelve hours on the other way round."""
    diurnal = Diurnal(0.1, 0.7, zones=((0.0, 0.25), (12.0, 0.75)))
    sampler = AvailabilitySampler(20_000, 10, KEY, diurnal=diurnal)
    offsets = diurnal.offsets(20_000, KEY.fold("zones"))
    near = offsets == 0
    assert not far(near.sum(), 5000, 20_000 * 0.25 * 0.75)
    for now, here, there in ((0.0, 0.7, 0.1), (DAY_S / 2, 0.1, 0.7), (DAY_S / 4, 0.4, 0.4)):
        free = sampler.available(0, now)
        for zone, chance in ((near, here), (~near, there)):
            assert not far(
                free[zone].sum(), zone.sum() * chance, zone.sum() * chance * (1 - chance)
            )


def test_too_few_rested_users_is_told_and_not_filled_up() -> None:
    """A round is put off, never made of users who have to rest."""
    sampler = AvailabilitySampler(100, 60, KEY, gap=2)
    sampler.cohort(0)
    with pytest.raises(UnavailableError, match="40 users can take part in round 1"):
        sampler.cohort(1)
    with pytest.raises(ConfigError, match="no cohort was found for round 1: "):
        sampler.cohort_when_ready(1, 0.0)
    assert len(sampler.cohort(2)) == 60
    timed = AvailabilitySampler(100, 60, KEY, timer_s=2 * DAY_S)
    timed.cohort(0, 0.0)
    with pytest.raises(ConfigError, match="no cohort was found for round 1 within 1 days"):
        timed.cohort_when_ready(1, 0.0, step_s=3600.0, patience_s=DAY_S)
    assert timed.cohort_when_ready(1, 0.0, step_s=3600.0)[1] == 2 * DAY_S


def test_a_restored_sampler_goes_on_as_the_first_would_have() -> None:
    """Cohort for cohort; one of another population is refused."""
    one = AvailabilitySampler(300, 30, KEY, gap=5, max_participations=2, timer_s=100.0)
    for r in range(6):
        one.cohort(r, 60.0 * r)
    two = AvailabilitySampler(300, 30, KEY, gap=5, max_participations=2, timer_s=100.0)
    two.restore(one.state())
    assert [two.cohort(r, 60.0 * r).tolist() for r in range(6, 12)] == [
        one.cohort(r, 60.0 * r).tolist() for r in range(6, 12)
    ]
    with pytest.raises(ConfigError, match="after round 11"):
        two.cohort(11)
    with pytest.raises(ConfigError, match="checkpoint is not from"):
        AvailabilitySampler(301, 30, KEY).restore(one.state())
    with pytest.raises(ConfigError, match="no state"):
        PoissonSampler(300, 0.1, KEY).restore(one.state())


def test_settings_that_cannot_be_are_refused() -> None:
    """At construction."""
    for make in (
        lambda: PoissonSampler(10, 0.0, KEY),
        lambda: PoissonSampler(10, 1.1, KEY),
        lambda: PoissonSampler(0, 0.5, KEY),
        lambda: FixedGoalSampler(10, 11, KEY),
        lambda: FixedGoalSampler(10, 0, KEY),
        lambda: AvailabilitySampler(10, 5, KEY, gap=0),
        lambda: AvailabilitySampler(10, 5, KEY, max_participations=0),
        lambda: AvailabilitySampler(10, 5, KEY, timer_s=-1.0),
        lambda: Diurnal(0.6, 0.5),
        lambda: Diurnal(zones=((0.0, 0.5),)),
    ):
        with pytest.raises(ConfigError):
            make()


@pytest.mark.parametrize("goal", [1, 3])
@pytest.mark.parametrize("gap", [1, 2, 3])
@pytest.mark.parametrize("max_participations", [None, 1, 3])
def test_rounds_are_refused_exactly_where_no_cohorts_could_fill_them(
    goal: int, gap: int, max_participations: int | None
) -> None:
    """What passes users in turn fill; what is refused has fewer participations than it needs; and
    what is called sure chance never leaves unfilled."""
    outcomes = set()
    for users in range(goal, 13):
        for rounds in range(1, 9):
            bounds: dict[str, Any] = {"gap": gap, "max_participations": max_participations}
            ledger = ParticipationLedger(users, **bounds)
            in_turn = [[str((r * goal + i) % users) for i in range(goal)] for r in range(rounds)]
            try:
                for r, cohort in enumerate(in_turn):
                    ledger.record(r, cohort)
                filled = True
            except PrivacyError:
                filled = False
            try:
                sure = check_population(users, goal, rounds, **bounds)
            except ConfigError:
                assert not filled
                fits = min(users * (max_participations or rounds), users * -(-rounds // gap))
                # Too few participations in all, or too few users within one gap.
                assert fits < goal * rounds or users < goal * min(gap, rounds)
                outcomes.add("refused")
                continue
            assert filled
            outcomes.add("sure" if sure else "perhaps")
            for seed in range(8 if sure else 0):
                sampler = AvailabilitySampler(users, goal, Key.from_seed(seed), **bounds)
                assert all(len(sampler.cohort(r)) == goal for r in range(rounds))
    assert {"refused", "sure"} <= outcomes or (gap, max_participations) == (1, None)


def test_chance_may_miss_what_is_not_sure() -> None:
    """Three users, twice each, fill three rounds of two in turn; drawn, they may not."""
    assert check_population(3, 2, 3, max_participations=2) is False
    stuck = 0
    for seed in range(30):
        sampler = AvailabilitySampler(3, 2, Key.from_seed(seed), max_participations=2)
        try:
            for r in range(3):
                sampler.cohort(r)
        except UnavailableError:
            stuck += 1
    assert 0 < stuck < 30
