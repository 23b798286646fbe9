"""A record's epsilon follows from the noise that it states, or verify says that it does not."""

from __future__ import annotations

import builtins
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")

from typer.testing import CliRunner

from dlm.cli.main import app
from dlm.federated.account.compose import StageRecord
from dlm.federated.account.recheck import DIFFERS, recheck
from dlm.federated.noise.banded import BandMF
from dlm.federated.noise.blt import Blt, BltParameters
from dlm.federated.noise.mechanism import GaussianMechanism
from dlm.federated.noise.toeplitz import BandedToeplitz, band_fhu
from dlm.federated.noise.tree import TreeAgg, TreeAggFull
from dlm.federated.report.report import PrivacyReport, build
from dlm.record.counts_file import WordCounts, write_counts
from dlm.record.ledger import ParticipationLedger
from dlm.record.provenance import Guarantee, Provenance, digest_of
from dlm.record.sidecar import sidecar

DELTA = 1e-8
# Of 6 planned rounds, of which 4 were run.
MECHANISMS = [
    GaussianMechanism(6),
    TreeAgg(6),
    TreeAgg(6, [1, 3]),
    TreeAggFull(6),
    Blt(6, BltParameters((0.97, 0.4), (0.3, 0.25))),
    BandedToeplitz("bandtoep", 6, np.array([0.6, 0.7, 0.2])),
    band_fhu(6, 4),
    BandMF(np.array([[0.8, 0.0]] + [[0.8, 0.6]] * 4 + [[1.0, 0.6]])),
]


def stage_of(mechanism: Any, **more: Any) -> StageRecord:
    """As a run states it."""
    named = mechanism.name in ("gaussian", "tree", "tree-restart")
    return StageRecord(
        "network", mechanism.name, 3.0, 4, 2, 2, matrix=mechanism.matrix(),
        sensitivity=None if named else mechanism.sensitivity(gap=2, max_participations=2), **more,
    )  # fmt: skip


STAGES = [
    *map(stage_of, MECHANISMS),
    stage_of(MECHANISMS[4], rounding=1.0001),
    stage_of(MECHANISMS[0], clip_noise=9.0, norm_inflation=1.01),
]
each_stage = pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.mechanism)


def reported(stage: StageRecord, **more: Any) -> PrivacyReport:
    """The report of a run that was done so."""
    book = ParticipationLedger(10, sampling={"kind": "timer"}, gap=2, max_participations=2)
    for index in range(4):
        book.record(index, [f"user {index % 2} {place}" for place in range(3)])
    return build([stage], delta=DELTA, ledgers={"network": book}, **more)


def record(stage: StageRecord, **more: Any) -> Provenance:
    """That report's record."""
    return reported(stage, **more).provenance


def stated(of: Provenance, **numbers: float) -> Provenance:
    """The record with other numbers, as it is read back."""
    assert of.guarantee is not None
    edited = dataclasses.replace(of, guarantee=dataclasses.replace(of.guarantee, **numbers))
    return Provenance.from_json(edited.to_json())


@each_stage
def test_what_a_run_wrote_follows_and_other_numbers_do_not(stage: StageRecord) -> None:
    """Epsilon or rho, smaller or larger, by a hundred-thousandth; a millionth passes."""
    good = record(stage)
    assert good.guarantee is not None and good.guarantee.rho is not None
    epsilon, rho = good.guarantee.epsilon, good.guarantee.rho
    assert recheck(good).follows is True
    assert recheck(stated(good, epsilon=epsilon * (1 + 1e-7))).follows is True
    for numbers in (
        {"epsilon": epsilon * (1 - 1e-5)},
        {"epsilon": epsilon * (1 + 1e-5)},
        {"rho": rho * (1 - 1e-5)},
        {"delta": 1e-6},
    ):
        found = recheck(stated(good, **numbers))
        assert found.follows is False, numbers
        assert found.text.startswith(DIFFERS)


def test_all_stages_count_and_a_simulation_is_recomputed_too() -> None:
    """What a model inherits is in its epsilon."""
    words = record(STAGES[0])
    both = record(STAGES[8], inputs={"the vocabulary": words})
    assert len(both.stages) == 2
    assert recheck(both).follows is True
    alone = dataclasses.replace(both, stages=both.stages[1:])
    assert recheck(alone).follows is False
    simulated = record(dataclasses.replace(STAGES[0], simulated=True), simulated=True)
    assert simulated.guarantee is None
    assert recheck(simulated).follows is True


def test_what_is_trusted_is_said_of_its_stage() -> None:
    """One stage has a cost of the grid and the other has none: neither is said of both."""
    counted = record(STAGES[0])
    words = dataclasses.replace(counted, stages=({**counted.stages[0], "stage": "unigrams"},))
    both = record(STAGES[8], inputs={"the vocabulary": words})
    _, of_words, of_network = recheck(both).text.split("; trusted of ")
    assert of_words.startswith("unigrams: ") and "the grid cost nothing" in of_words
    assert of_network.startswith("network: ") and "1 + 0.0001 for the grid" in of_network
    assert " nothing" in of_network and "the grid cost nothing" not in of_network


def test_a_sampled_stage_is_recomputed() -> None:
    """With its amplification."""
    pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")
    stage = StageRecord(
        "network", "gaussian", 1.0, 20, 1, 20, sampling="poisson", sampling_rate=0.1
    )
    book = ParticipationLedger(10, sampling={"kind": "poisson", "q": 0.1})
    for index in range(20):
        book.record(index, [f"user {place}" for place in range((0, 1, 2, 1)[index % 4])])
    made = build([stage], delta=DELTA, ledgers={"network": book}).provenance
    assert recheck(made).follows is True
    assert recheck(stated(made, epsilon=0.1)).follows is False


@pytest.mark.promise("records")
@each_stage
def test_an_edited_sensitivity_is_refused_even_if_epsilon_follows_from_it(
    stage: StageRecord,
) -> None:
    """It is recomputed from the matrix; for fewer rounds than were run, it is not believed."""
    small = dataclasses.replace(stage, sensitivity=stage.worst_sensitivity / 2)
    found = recheck(record(small))
    assert found.follows is False
    assert f"sensitivity of {small.sensitivity:.6g}, but {stage.mechanism} has" in found.text
    if "decay" in stage.matrix:
        short = dataclasses.replace(stage, matrix={**stage.matrix, "rounds": 1}, sensitivity=1.0)
        assert recheck(record(short)).follows is False


@each_stage
def test_the_printed_command_and_event_give_the_reports_numbers(stage: StageRecord) -> None:
    """Of one stage; and, of one whose grid costs something, with another."""
    dp_accounting = pytest.importorskip("dp_accounting", reason="pip install -e '.[train]'")
    both = [{"the vocabulary": record(STAGES[0])}] if stage.rounding > 1 else []
    for inputs in ({}, *both):
        report = reported(stage, inputs=inputs)
        guarantee = report.provenance.guarantee
        assert guarantee is not None
        text = report.markdown()
        commands = re.findall(r"^dlm (privacy account .*)\n# rho (.*)\n(.*)$", text, re.M)
        assert len(commands) == (3 if inputs else 1)
        for command, rho, event in commands:
            answer = CliRunner().invoke(app, [*command.split(), "--json"])
            told = json.loads(answer.stdout)
            assert told["rho"] == pytest.approx(float(rho), rel=1e-12)
            noise = eval(event, {"dp_accounting": dp_accounting}).noise_multiplier
            assert 1 / (2 * noise**2) == pytest.approx(told["rho"], rel=1e-12)
        assert told["rho"] == pytest.approx(guarantee.rho, rel=1e-12)
        assert "as a run reports it" in text
        assert told["epsilon"] == pytest.approx(guarantee.epsilon, rel=1e-9)


def test_a_record_that_does_not_hold_enough_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stated, nothing to account for, stages of another kind, no accountant."""
    public = Provenance.public("ACME", "the list")
    blt = {"stage": "network", "mechanism": "blt", "noise_multiplier": 1.0, "rounds": 4}
    strange = {**blt, "sensitivity": 1.5, "temperature": 3}
    wide = BandMF(np.array([[1.0, 0.0, 0.0], [1.0, 0.5, 0.0], *[[1.0, 0.5, 0.2]] * 4]))
    for given, why in [
        (record(dataclasses.replace(STAGES[4], matrix={})), "does not have the matrix of blt"),
        (record(stage_of(wide)), "does not have the matrix of bandmf"),
        (Provenance.none("somebody said so"), "states no epsilon"),
        (public, "has no stage"),
        (Provenance(Guarantee(1.0, DELTA, 0.1), stages=(blt,)), "sensitivity of blt"),
        (Provenance(Guarantee(1.0, DELTA, 0.1), stages=(strange,)), "temperature"),
        (Provenance(Guarantee(1.0, DELTA, 0.1), stages=({"stage": 3},)), "does not hold enough"),
    ]:
        found = recheck(given)
        assert found.follows is None
        assert why in found.text

    real = builtins.__import__

    def without_scipy(name: str, *rest: Any, **more: Any) -> Any:
        if name == "dlm.federated.account.compose":
            raise ImportError("No module named 'scipy'", name="scipy")
        return real(name, *rest, **more)

    good = record(STAGES[0])
    monkeypatch.setattr(builtins, "__import__", without_scipy)
    assert recheck(good).text == "not recomputed: scipy is missing (the extra train)"


def test_verify_says_whether_the_stated_epsilon_follows(tmp_path: Path) -> None:
    """An edit whose digest was computed anew, which no digest tells, ends with 1."""
    path = tmp_path / "counts.tsv"
    write_counts(path, WordCounts(("the",), np.array([9.0]), record(STAGES[0])))
    good = CliRunner().invoke(app, ["privacy", "verify", str(path)])
    assert good.exit_code == 3  # nobody signed it
    assert "follows from the stated noise of network" in good.stdout
    side = json.loads(sidecar(path).read_text())
    body = {k: v for k, v in side["provenance"].items() if k != "digest"}
    body["guarantee"] = {**body["guarantee"], "epsilon": 0.01}
    side["provenance"] = {**body, "digest": digest_of(body)}
    sidecar(path).write_text(json.dumps(side))
    edited = CliRunner().invoke(app, ["privacy", "verify", str(path)])
    assert edited.exit_code == 1
    assert f"wrong: {DIFFERS}: epsilon is stated as 0.01, but the stages give" in edited.stdout
