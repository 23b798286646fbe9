"""From noise to guarantees: published values, exact formulas, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")

from hypothesis import given, settings, strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from dlm.errors import ConfigError, PrivacyError
from dlm.federated.account.compose import StageRecord, compose
from dlm.federated.account.plan import extrapolate, make_plan
from dlm.federated.account.sampled import log_moment, moments_epsilon, tight_epsilon
from dlm.federated.account.zcdp import (
    gaussian_delta,
    gaussian_epsilon,
    joined_noise,
    noise_for,
    rho_for_epsilon,
    rho_of,
    split_noise,
    zcdp_epsilon,
)
from dlm.federated.devices.encoding import Encoding
from dlm.federated.noise.participation import named_sensitivity

NETWORK = StageRecord("network", "tree", 7.0, 930, gap=213, max_participations=4)


def test_the_delta_of_a_gaussian_is_the_integral_of_what_exceeds() -> None:
    """Of max(0, p - e^epsilon q) over two normal densities, by quadrature."""
    for rho, epsilon in [(0.02, 0.1), (0.5, 1.0), (2.0, 3.0)]:
        mu = math.sqrt(2 * rho)

        def exceeds(x: float, mu: float = mu, epsilon: float = epsilon) -> float:
            return float(max(norm.pdf(x, mu) - math.exp(epsilon) * norm.pdf(x), 0.0))

        start = mu / 2 + epsilon / mu
        found = quad(exceeds, start, start + 30, epsabs=1e-14)[0]
        assert gaussian_delta(rho, epsilon) == pytest.approx(found, rel=1e-7)


@settings(deadline=None, derandomize=True)
@given(st.floats(1e-6, 1e4), st.floats(-16, -2))
def test_epsilon_and_delta_of_a_gaussian_are_inverse(rho: float, log10_delta: float) -> None:
    """And the bound for any zCDP mechanism is never below."""
    delta = 10**log10_delta
    epsilon = gaussian_epsilon(rho, delta)
    assert epsilon <= zcdp_epsilon(rho, delta) * (1 + 1e-9)
    if epsilon > 0:
        assert gaussian_delta(rho, epsilon) == pytest.approx(delta, rel=1e-3)


@pytest.mark.promise("account")
@pytest.mark.parametrize(
    ("rho", "epsilon"),
    [(0.25, 4.49), (0.32, 5.13), (0.61, 7.31), (0.89, 9.01), (0.99, 9.56), (1.86, 13.69)],
)
def test_the_printed_epsilons_of_gboard_come_out(rho: float, epsilon: float) -> None:
    """GDP Table 2 and Appendix A, from the rho as printed, delta 1e-10."""
    assert gaussian_epsilon(rho, 1e-10) == pytest.approx(epsilon, abs=0.0051)


def test_numerical_accounting_agrees() -> None:
    """dp-accounting's PLD of the same Gaussian, which rounds up."""
    from dp_accounting import dp_event

    from dlm.federated.account.sampled import make_accountant

    ledger = make_accountant("pld")
    ledger.compose(dp_event.GaussianDpEvent(1 / math.sqrt(2 * 0.25)))
    found = ledger.get_epsilon(1e-10)
    exact = gaussian_epsilon(0.25, 1e-10)
    assert exact <= found + 1e-6
    assert found == pytest.approx(exact, rel=1e-4)


def test_rho_and_noise_and_epsilon_go_back_and_forth() -> None:
    """Each inverse, and the ends."""
    assert rho_of(3.0, noise_for(3.0, 0.4)) == pytest.approx(0.4)
    for of in (gaussian_epsilon, zcdp_epsilon):
        assert of(rho_for_epsilon(2.0, 1e-8, of=of), 1e-8) == pytest.approx(2.0)
    assert zcdp_epsilon(rho_for_epsilon(2.0, 1e-8), 1e-8) == pytest.approx(2.0)  # as runs report it
    assert rho_of(1.0, 0.0) == math.inf
    assert gaussian_epsilon(math.inf, 1e-8) == math.inf
    assert gaussian_epsilon(0.0, 1e-8) == 0.0
    for delta in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="delta"):
            gaussian_epsilon(0.3, delta)
    with pytest.raises(ConfigError, match="noise multiplier"):
        rho_of(1.0, -1.0)


def test_numbers_at_the_ends_of_doubles_are_answers() -> None:
    """What overflows is infinite, and what is asked for is met or refused."""
    assert rho_of(1.0, 1e-200) == math.inf
    assert rho_of(1.0, 1e200) == 0.0
    assert zcdp_epsilon(0.5, 1e-320) == pytest.approx(38.7667, abs=1e-3)
    assert gaussian_epsilon(0.5, 1e-320) < zcdp_epsilon(0.5, 1e-320)
    for epsilon, delta in ((1e-6, 1e-300), (1e-3, 1e-10), (1e8, 1e-6)):
        for of in (gaussian_epsilon, zcdp_epsilon):
            found = of(rho_for_epsilon(epsilon, delta, of=of), delta)
            assert found == pytest.approx(epsilon, rel=1e-9)
    for epsilon in (math.inf, math.nan, 0.0):
        with pytest.raises(ConfigError, match="must be finite"):
            rho_for_epsilon(epsilon, 1e-6)


@pytest.mark.parametrize(
    ("users", "cohort", "noise", "printed"),
    [
        (1e5, 1e2, 1.0, (0.97, 0.98, 1.00, 1.07, 1.18, 2.21, 7.50)),
        (1e6, 1e4, 1.0, (1.73, 1.92, 2.08, 3.06, 8.49, 32.38, 187.01)),
        (1e6, 1e3, 3.0, (0.47, 0.47, 0.48, 0.48, 0.49, 0.67, 1.95)),
    ],
)
def test_the_moments_accountant_prints_the_table(
    users: float, cohort: float, noise: float, printed: tuple[float, ...]
) -> None:
    """DPF Table 1, to its two decimals."""
    found = [moments_epsilon(cohort / users, noise, 10**power, users**-1.1) for power in range(7)]
    assert [round(epsilon, 2) for epsilon in found] == list(printed)


def test_moments_are_those_of_the_loss() -> None:
    """By quadrature, with sampling and without."""
    for q, noise, moment in [(0.01, 1.0, 3), (0.3, 2.0, 8), (1.0, 1.5, 4)]:

        def ratio(x: float, q: float = q, noise: float = noise) -> float:
            return 1 - q + q * math.exp((2 * x - 1) / (2 * noise**2))

        def integrand(x: float, moment: int = moment, noise: float = noise) -> float:
            return float(ratio(x) ** (moment + 1) * norm.pdf(x, 0, noise))

        found = quad(integrand, -30, 40, limit=400, epsabs=1e-13)[0]
        assert log_moment(q, noise, moment) == pytest.approx(math.log(found), rel=1e-6)


def test_stages_add_up_and_a_raw_one_undoes_all() -> None:
    """rho adds; without noise in one stage there is no guarantee, and the notes say which."""
    first = StageRecord("unigrams", "gaussian", 10.0, 500, gap=500, max_participations=1)
    both = compose([first, NETWORK], 1e-10)
    assert both.rho == pytest.approx(1 / 200 + 47 / 98)
    assert both.epsilon == pytest.approx(zcdp_epsilon(both.rho, 1e-10))
    assert both.epsilon > compose([NETWORK], 1e-10).epsilon
    raw = compose(
        [dataclasses.replace(first, mechanism="none", noise_multiplier=None), NETWORK], 1e-10
    )
    assert raw.rho == raw.epsilon == math.inf
    assert any("stage unigrams released sums without noise" in note for note in raw.notes)
    zero = compose([dataclasses.replace(NETWORK, noise_multiplier=0.0)], 1e-10)
    assert zero.epsilon == math.inf
    with pytest.raises(ConfigError, match="no stage"):
        compose([], 1e-10)


def test_a_simulation_is_called_one() -> None:
    """A configured seed protects nobody."""
    numbers = compose([dataclasses.replace(NETWORK, simulated=True)], 1e-10)
    assert any("simulation" in note for note in numbers.notes)


@pytest.mark.parametrize("sampling", ["fixed", "timer"])
def test_amplification_is_refused_unless_cohorts_were_poisson(sampling: str) -> None:
    """The guarantee of a sampler that was not used is none."""
    with pytest.raises(PrivacyError, match="Poisson"):
        StageRecord("network", "gaussian", 1.0, 100, sampling=sampling, sampling_rate=0.01)
    with pytest.raises(PrivacyError, match="tree"):
        StageRecord("network", "tree", 1.0, 100, sampling="poisson", sampling_rate=0.01)


def test_a_sampled_stage_composes_with_one_that_is_not() -> None:
    """Amplified it costs less than without, and more than nothing."""
    sampled = StageRecord(
        "network",
        "gaussian",
        1.0,
        200,
        max_participations=200,
        sampling="poisson",
        sampling_rate=0.005,
    )
    other = StageRecord("unigrams", "gaussian", 5.0, 10, gap=10)
    both = compose([other, sampled], 1e-8)
    alone = compose([other], 1e-8).epsilon
    whole = compose([other, dataclasses.replace(sampled, sampling_rate=None)], 1e-8).epsilon
    assert alone < both.epsilon < whole
    assert both.epsilon == both.epsilons["rdp"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"sampling": "any"},
        {"rounds": 0},
        {"gap": 0},
        {"max_participations": 0},
        {"sensitivity": 0.0},
        {"sensitivity": math.nan},
        {"clip_noise": 0.0},
        {"clip_noise": math.inf},
        {"norm_inflation": math.nan},
        {"norm_inflation": 0.9},
    ],
)
def test_a_record_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    """Before anything is computed from it: a sensitivity of 0 would be a guarantee for free."""
    with pytest.raises(ConfigError):
        dataclasses.replace(NETWORK, **wrong)


def test_an_optimised_mechanism_must_say_its_sensitivity() -> None:
    """Its name does not tell it."""
    stage = StageRecord("network", "blt", 7.0, 930, gap=213, max_participations=4)
    with pytest.raises(ConfigError, match="sensitivity of blt"):
        compose([stage], 1e-10)
    assert compose([dataclasses.replace(stage, sensitivity=2.0)], 1e-10).rho == pytest.approx(
        4 / 98
    )


def test_noise_is_split_between_updates_and_clip_counts_and_joined_again() -> None:
    """GDP Theorem 1, where it has a solution and where not."""
    inner = split_noise(7.0, 6500 / 20)
    assert inner > 7.0
    assert joined_noise(inner, 6500 / 20) == pytest.approx(7.0)
    stage = dataclasses.replace(NETWORK, noise_multiplier=inner, clip_noise=6500 / 20)
    assert stage.rho == pytest.approx(NETWORK.rho)
    for goal in (50, 70):  # 2 * 3.5 = 7: nothing is left for the updates
        with pytest.raises(PrivacyError, match="clip counts"):
            split_noise(7.0, goal / 20)


def test_rounding_for_secure_aggregation_costs_what_it_inflates() -> None:
    """GDP 2.4, with its alpha; rho grows with the square."""
    ratio = Encoding(1 << 22, 5.0, 1e3, 10).sensitivity_factor
    assert ratio**2 == pytest.approx(1.042, abs=1e-3)
    inflated = dataclasses.replace(NETWORK, norm_inflation=ratio)
    assert inflated.rho == pytest.approx(NETWORK.rho * ratio**2)
    assert any("secure aggregation" in note for note in compose([inflated], 1e-10).notes)


def tree(rounds: int, gap: int, max_participations: int) -> float:
    """Of tree aggregation."""
    return named_sensitivity("tree", rounds, gap, max_participations)


once = functools.cache(tree)  # shared: it is most of what the next test costs


@pytest.mark.parametrize("target", [0.05, 0.2, 0.35, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("largest", [60, 117, 400, 1500])
def test_the_least_report_goal_is_the_one_that_trying_all_finds(
    target: float, largest: int
) -> None:
    """Rho is a saw over goals; a larger limit never finds a larger goal."""
    population, rounds, simulated, noise = 3000, 60, 20, 0.3

    def rho(goal: int) -> float:
        gap = min(population // goal, rounds)
        return rho_of(once(rounds, gap, -(-rounds // gap)), noise * goal / simulated)

    best = next((goal for goal in range(simulated, largest + 1) if rho(goal) <= target), None)
    plan = make_plan(
        population=population, rounds=rounds, target_rho=target, delta=1e-6,
        simulated_goal=simulated, simulated_noise=noise, largest_goal=largest, sensitivity=once,
    )  # fmt: skip
    assert plan.keeps_utility == (best is not None)
    if best is not None:
        assert plan.chosen.report_goal == best
        assert plan.chosen.rho == pytest.approx(rho(best))


@pytest.mark.parametrize("target", [0.01, 0.5, 50.0])
def test_a_plan_asks_for_few_sensitivities(target: float) -> None:
    """Those of the goals shown and of a search, not of every gap: 4,000 of 8,000 rounds' here."""
    asked = []

    def sensitivity(rounds: int, gap: int, max_participations: int) -> float:
        asked.append(gap)
        return tree(rounds, gap, max_participations)

    make_plan(
        population=4_000_000, rounds=8000, target_rho=target, delta=1e-10, simulated_goal=500,
        simulated_noise=0.54, largest_goal=40_000, sensitivity=sensitivity,
    )  # fmt: skip
    assert len(asked) < 300


def test_a_plan_takes_the_smallest_report_goal_that_is_enough() -> None:
    """And one user a round less is not."""
    asked = {
        "population": 4_000_000, "rounds": 2000, "delta": 1e-10, "simulated_goal": 500,
        "simulated_noise": 0.54, "largest_goal": 6500, "sensitivity": tree,
    }  # fmt: skip
    plan = make_plan(target_rho=1.0, round_minutes=5.0, **asked)  # type: ignore[arg-type]
    assert plan.keeps_utility
    assert plan.chosen.rho <= 1.0
    assert plan.chosen.noise_multiplier == pytest.approx(0.54 * plan.chosen.report_goal / 500)
    assert plan.chosen.gap == 4_000_000 // plan.chosen.report_goal
    assert plan.chosen.max_participations == -(-2000 // plan.chosen.gap)
    assert plan.timer_hours is not None
    assert plan.timer_hours % 24 == 0
    before = [s for s in plan.considered if s.report_goal < plan.chosen.report_goal]
    assert all(setting.rho > 1.0 for setting in before)

    strict = make_plan(target_rho=0.01, **asked)  # type: ignore[arg-type]
    assert not strict.keeps_utility
    assert strict.chosen.report_goal == 6500
    assert strict.chosen.noise_multiplier > 7.02
    again = extrapolate(4_000_000, 2000, 6500, strict.chosen.noise_multiplier, 1e-10, tree)
    assert again.rho == pytest.approx(0.01)
    assert any("worse" in note for note in strict.notes)
    with pytest.raises(ConfigError, match="population"):
        make_plan(target_rho=1.0, **{**asked, "population": 0})  # type: ignore[arg-type]


def test_discrete_noise_has_as_much_more_epsilon_as_the_page_says() -> None:
    """In percent, for small and large rho and delta, rounded away from what is between."""
    page = (Path(__file__).parents[2] / "dlm/federated/DESIGN.privacy.md").read_text()
    (said,) = re.findall(r"A run's is (.*) % above", page)
    more = [
        100 * (zcdp_epsilon(rho, delta) / gaussian_epsilon(rho, delta) - 1)
        for delta in (1e-12, 1e-5)
        for rho in np.geomspace(0.001, 5, 20)
    ]
    least, most = math.floor(10 * min(more)) / 10, math.ceil(10 * max(more)) / 10
    assert said == f"{least} to {most}"


def test_noise_costs_its_rounding_and_has_the_epsilon_of_any_of_its_rho() -> None:
    """Not the smaller one of the exact Gaussian; sampled, by Renyi divergences of whole orders."""
    plain = StageRecord("network", "blt", 4.0, 100, sensitivity=2.0)
    grid = dataclasses.replace(plain, rounding=1.01)
    assert grid.rho == pytest.approx(plain.rho * 1.01**2)
    assert StageRecord.from_json(grid.to_json()) == grid
    for stages in ([grid], [grid, plain]):
        found = compose(stages, 1e-6)
        assert found.epsilon == zcdp_epsilon(found.rho, 1e-6) > gaussian_epsilon(found.rho, 1e-6)
        assert "the grid costs 2 % of rho" in found.notes[0]
    drawn = StageRecord("network", "gaussian", 2.0, 50, sampling="poisson", sampling_rate=0.05)
    found = compose([drawn], 1e-6)
    assert set(found.epsilons) == {"zcdp", "rdp"}
    exact = tight_epsilon(0.05, 2.0, 50, 1e-6)
    renyi = tight_epsilon(0.05, 2.0, 50, 1e-6, accountant="rdp")
    # Of fewer orders than the Gaussian's, and so no less.
    assert found.epsilon == found.epsilons["rdp"] >= renyi > exact
    assert found.epsilon < 1.1 * renyi
    with pytest.raises(ConfigError, match="must be 1 or more"):
        dataclasses.replace(grid, rounding=0.99)
