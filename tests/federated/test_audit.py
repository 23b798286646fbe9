"""Canaries: what accounting promises they do not beat, and noise that lies they find out."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")

from scipy import stats
from typer.testing import CliRunner

from dlm.cli.main import app
from dlm.errors import ConfigError, PrivacyError
from dlm.federated.account.zcdp import gaussian_epsilon, noise_for
from dlm.federated.keys import Key
from dlm.federated.noise import make_mechanism
from dlm.federated.report.audit import REASON, Audit, Auditor, gram_of, lower_mu, worst_pattern
from dlm.federated.training.local import LocalConfig
from dlm.federated.training.parts import unknown_parts
from dlm.federated.training.rounds import OptimizerConfig, ReleaseConfig
from dlm.federated.training.settings import (
    AggregationSettings,
    DataSettings,
    ModelSettings,
    PretrainSettings,
    PrivacySettings,
    RunSettings,
    SamplingSettings,
    TrainingSettings,
)
from dlm.record.provenance import Provenance
from federated.linear import linear_map

MECHANISMS = ["gaussian", "blt", "bandmf", "bandtoep", "bandfhu", "tree", "tree-full"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of this test alone."""
    monkeypatch.setenv("DLM_CACHE_DIR", str(tmp_path))


def settings(
    mechanism: str = "blt",
    rounds: int = 24,
    gap: int = 8,
    max_participations: int = 3,
    *,
    secure: bool = False,
    kind: Literal["flat", "per_layer"] = "flat",
    rho: float = 1.0,
) -> TrainingSettings:
    """Of a run with this zCDP."""
    made = make_mechanism(mechanism, rounds=rounds, gap=gap, max_participations=max_participations)
    multiplier = noise_for(made.sensitivity(gap=gap, max_participations=max_participations), rho)
    return TrainingSettings(
        RunSettings(rounds, seed=1),
        DataSettings(Path("words.txt")),
        ModelSettings(),
        LocalConfig(clip_kind=kind),
        OptimizerConfig(),
        PrivacySettings(0.5, mechanism, multiplier, gap=gap, max_participations=max_participations),
        SamplingSettings(report_goal=100),
        AggregationSettings(secure=secure),
        PretrainSettings(),
    )


class Lying(Auditor):
    """Adds half of the noise that it accounts for."""

    def added(self, release: ReleaseConfig) -> ReleaseConfig:
        return dataclasses.replace(release, noise_multiplier=release.noise_multiplier / 2)


@pytest.mark.slow
def test_eight_audits_bear_accounting_out_and_eight_find_half_of_the_noise() -> None:
    """At rho 1 with 1,000 canaries: valid, near the truth, and never fooled."""
    upper = math.sqrt(2)
    honest, lying = Auditor(settings()), Lying(settings())
    lower = np.array([honest.run(Key.from_seed(seed)).lower_mu for seed in range(8)])
    assert (lower > upper).sum() <= 1
    assert np.median(lower) >= 0.75 * upper
    found = [lying.run(Key.from_seed(seed)) for seed in range(8)]
    assert all(one.lower_mu > upper and not one.holds for one in found)
    assert all(one.upper_mu == pytest.approx(upper) for one in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "more"),
    [
        ("gaussian", {"rounds": 6, "gap": 1, "max_participations": 6}),
        ("bandmf", {}),
        ("tree-full", {}),
        ("tree", {}),
        ("blt", {}),
        ("blt", {"secure": True}),
        ("blt", {"kind": "per_layer"}),
    ],
)
def test_every_way_that_noise_is_made_is_audited(mechanism: str, more: dict[str, Any]) -> None:
    """Mechanisms, secure aggregation, clipping by layers."""
    given = settings(mechanism, **more)
    # A device that encodes for secure aggregation takes its time.
    few = {"canaries": 250, "parameters": 2_500} if given.aggregation.secure else {}
    least = 0.35 if few else 0.55 if mechanism == "tree" else 0.65
    found = Auditor(given, **few).run(Key.from_seed(0))
    assert found.holds
    assert found.lower_mu > least * found.upper_mu
    assert not Lying(given, **few).run(Key.from_seed(0)).holds


def test_a_small_audit_says_what_it_found() -> None:
    """Pattern, counts and the bound of these counts; a key gives the same audit again."""
    auditor = Auditor(settings(rho=8.0), canaries=60, parameters=600)
    found = auditor.run(Key.from_seed(3))
    assert found.pattern == (0, 8, 16)
    assert (found.reached, found.upper_mu) == (pytest.approx(1.0), pytest.approx(4.0))
    assert 15 < found.present < 45
    assert 0 < found.lower_mu < found.upper_mu
    counts = (found.missed, found.present, found.false_alarms, 60 - found.present)
    assert found.lower_mu == lower_mu(*counts, 0.95)
    assert auditor.run(Key.from_seed(3)) == found
    assert auditor.run(Key.from_seed(3), confidence=0.5).lower_mu > found.lower_mu


def test_what_an_audit_leaves_promises_nothing() -> None:
    """Its record is void, and so is that of whatever its engine adds up."""
    auditor = Auditor(settings(), canaries=20, parameters=200)
    assert unknown_parts(auditor.engine) == ["unknown engine CanaryEngine"]
    record = Provenance.from_dict(auditor.run(Key.from_seed(0)).to_dict()["provenance"])
    assert record.guarantee is None
    assert record.reasons == (REASON,)


def test_the_bound_is_of_clopper_and_pearson_and_holds_as_often_as_it_says() -> None:
    """Against SciPy's distributions, and over tests of a Gaussian with a known mu."""
    for missed, present, alarms, absent in [(119, 503, 120, 497), (0, 40, 3, 60), (7, 9, 1, 4)]:
        fnr = stats.beta.ppf(0.975, missed + 1, present - missed)
        fpr = stats.beta.ppf(0.975, alarms + 1, absent - alarms)
        expected = max(stats.norm.isf(fpr) - stats.norm.ppf(fnr), 0)
        assert lower_mu(missed, present, alarms, absent, 0.95) == pytest.approx(expected)
    assert lower_mu(5, 5, 0, 5, 0.95) == lower_mu(0, 5, 5, 5, 0.95) == 0.0
    rng = np.random.default_rng(0)
    mu = 1.3
    error = stats.norm.cdf(-mu / 2)
    missed, alarms = rng.binomial(60, error, 2000), rng.binomial(60, error, 2000)
    wrong = [
        lower_mu(int(a), 60, int(b), 60, 0.95) > mu for a, b in zip(missed, alarms, strict=True)
    ]
    assert np.mean(wrong) < 0.05


def test_the_bound_is_that_of_jax_privacy_for_as_many_thresholds() -> None:
    """They try every threshold, and pay for each; ours is fixed before anything is seen."""
    auditing = pytest.importorskip("jax_privacy.auditing", reason="pip install -e '.[peers]'")
    # Two scores alone, so that they have two thresholds, of which one says everything.
    there = np.repeat([0.0, 1.0], [30, 170])
    absent = np.repeat([0.0, 1.0], [165, 35])
    theirs = auditing.CanaryScoreAuditor(there, absent)
    thresholds = len(theirs._fn_counts)
    delta = 1e-3
    epsilon = theirs.epsilon_from_gdp(0.05, delta)
    mu = lower_mu(30, 200, 35, 200, 1 - 0.05 / thresholds)
    assert gaussian_epsilon(mu * mu / 2, delta) == pytest.approx(epsilon, rel=1e-4)


@pytest.mark.parametrize("name", MECHANISMS)
def test_rounds_weigh_as_the_noise_says(name: str) -> None:
    """By the inverse of the covariance that the stream has, entry by entry."""
    rounds = 13
    made = make_mechanism(name, rounds=rounds, gap=4, max_participations=3)
    gram, diagonal = gram_of(made)
    dense = np.stack([gram(row) for row in np.eye(rounds)])
    released = linear_map(made)
    np.testing.assert_allclose(dense @ (released @ released.T), np.eye(rounds), atol=1e-6)
    np.testing.assert_allclose(diagonal, np.diag(dense), rtol=1e-9)


def test_a_tree_that_begins_anew_weighs_as_its_noise_says() -> None:
    """Its parts do not meet."""
    made = make_mechanism("tree-restart", rounds=11, restarts=(3, 7))
    gram, _ = gram_of(made)
    released = linear_map(made)
    dense = np.stack([gram(row) for row in np.eye(11)])
    np.testing.assert_allclose(dense @ (released @ released.T), np.eye(11), atol=1e-6)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize(("gap", "times"), [(1, 3), (4, 3), (5, 2), (12, 1)])
def test_the_pattern_is_the_worst_of_all(name: str, gap: int, times: int) -> None:
    """By enumeration; it reaches the sensitivity, but for trees made online, which tell less."""
    rounds = 13
    made = make_mechanism(name, rounds=rounds, gap=4, max_participations=3)
    gram, diagonal = gram_of(made)
    pattern, value = worst_pattern(gram, diagonal, gap, times)
    assert len(pattern) == times
    assert all(b - a >= gap for a, b in itertools.pairwise(pattern))

    def of(chosen: tuple[int, ...]) -> float:
        there = np.zeros(rounds)
        there[list(chosen)] = 1
        return float(there @ gram(there))

    permitted = (
        chosen
        for chosen in itertools.combinations(range(rounds), times)
        if all(b - a >= gap for a, b in itertools.pairwise(chosen))
    )
    assert value == pytest.approx(max(map(of, permitted)))
    sensitivity = made.sensitivity(gap=gap, max_participations=times)
    if name == "tree":
        assert value < sensitivity**2
    else:
        assert value <= sensitivity**2 * (1 + 1e-9)
        if made.sensitivity_is_exact(gap=gap, max_participations=times):
            assert value == pytest.approx(sensitivity**2)


def test_runs_that_an_audit_is_not_of_are_refused() -> None:
    """No noise, Poisson samples, clip norms that adapt, too little room for the canaries."""
    given = settings()
    without = dataclasses.replace(
        given, privacy=dataclasses.replace(given.privacy, mechanism="none", noise_multiplier=0.0)
    )
    plain = settings("gaussian", 4, 1, 4)
    poisson = dataclasses.replace(
        plain,
        privacy=dataclasses.replace(plain.privacy, max_participations=0),
        sampling=SamplingSettings("poisson", q=0.1),
    )
    averaged = dataclasses.replace(
        given, privacy=dataclasses.replace(given.privacy, estimator="clipped")
    )
    with pytest.raises(PrivacyError, match="nothing to audit"):
        Auditor(without)
    with pytest.raises(PrivacyError, match="Poisson-sampled"):
        Auditor(poisson)
    with pytest.raises(PrivacyError, match="does not adapt"):
        Auditor(averaged)
    with pytest.raises(ConfigError, match="use 10000 or more"):
        Auditor(given, parameters=9_999)
    with pytest.raises(ConfigError, match="too few to measure anything"):
        Auditor(given, canaries=1)
    with pytest.raises(ConfigError, match="confidence"):
        Auditor(given, canaries=20, parameters=200).run(confidence=1.0)


CONFIG = """
[run]
rounds = 12
[data]
vocabulary = "words.txt"
[privacy]
clip_norm = 2.0
mechanism = "blt"
noise_multiplier = 0.5
gap = 4
max_participations = 3
[sampling]
report_goal = 10
"""


def test_the_command_tells_both_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the settings of a run; noise that is too small is told by the exit status too."""
    (tmp_path / "run.toml").write_text(CONFIG)
    command = ["privacy", "audit", str(tmp_path / "run.toml"), "--canaries", "50"]
    command += ["--parameters", "500", "--seed", "4"]
    sure = ["--confidence", "0.999"]
    done = CliRunner().invoke(app, [*command, *sure, "--output", str(tmp_path / "audit.json")])
    assert done.exit_code == 0, done.output
    assert ", 99.9% confidence: " in done.stdout
    assert "blt, 12 rounds" in done.stdout
    assert "mu at most" in done.stdout and "mu at least" in done.stdout
    written = json.loads((tmp_path / "audit.json").read_text())
    assert written["holds"] is True
    assert {field.name for field in dataclasses.fields(Audit)} < set(written)
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix) == ["audit.json", "run.toml"]

    loud = tmp_path / "loud.toml"
    loud.write_text(CONFIG.replace("noise_multiplier = 0.5", "noise_multiplier = 40.0"))
    monkeypatch.setattr(
        Auditor, "added", lambda self, release: dataclasses.replace(release, noise_multiplier=0.01)
    )
    done = CliRunner().invoke(app, [*command[:2], str(loud), *command[3:]])
    assert done.exit_code == 1
    assert "SMALLER THAN ACCOUNTED FOR" in done.stdout
