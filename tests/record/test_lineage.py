"""One ledger rule, whoever composes: a release counts once, copies that parted in full."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy", reason="pip install -e '.[train]'")

from dlm.federated.account.recheck import recheck
from dlm.federated.account.records import stages_of
from dlm.federated.account.runs import ReportedRun, compose_runs, read_run
from dlm.federated.counting.collect import Collection
from dlm.federated.counting.settings import UnigramConfig
from dlm.federated.keys import Key
from dlm.federated.run.run_folder import RunFolder
from dlm.federated.run.sampling import FixedGoalSampler
from dlm.record.provenance import Guarantee, Provenance
from federated.corpus import WORDS, population

DELTA = 1e-6
RHO = 0.125  # of one stage


def stage(
    ledger: str = "", run: str = "", released: str = "", name: str = "network"
) -> dict[str, Any]:
    """A release of rho 1/8."""
    given = {"ledger": ledger, "run": run, "released": released}
    extras = {what: value for what, value in given.items() if value}
    return {
        "stage": name, "mechanism": "gaussian", "noise_multiplier": 2.0, "rounds": 1, "gap": 1,
        "max_participations": 1, "extras": extras,
    }  # fmt: skip


def record(*stages: dict[str, Any]) -> Provenance:
    """Of what these stages released."""
    ledgers = tuple(found for s in stages if (found := s["extras"].get("ledger")))
    return Provenance(Guarantee(2.12, DELTA, RHO), stages=stages, ledgers=ledgers)


def together(one: Provenance, other: Provenance) -> float:
    """rho of both, as `dlm privacy compose` finds it and as a model has it that is made of both."""
    runs = [ReportedRun("one", one, DELTA), ReportedRun("other", other.derive("a copy"), DELTA)]
    guarantee = compose_runs(runs).provenance.guarantee
    assert guarantee is not None and guarantee.rho is not None
    return guarantee.rho


@pytest.mark.parametrize(
    ("one", "other", "times"),
    [
        (stage("a"), stage("a"), 1),
        (stage("a"), stage("b"), 2),
        (stage(), stage(), 2),
        (stage("a", "x", "1"), stage("a", "x", "1"), 1),
        (stage("a", "x", "1"), stage("b", "y", "2"), 2),
        # Copies of one folder, with everybody in each round: one ledger, two noises.
        (stage("a", "x", "1"), stage("a", "x", "2"), 2),
        # One run, read twice on its way.
        (stage("a", "x", "1"), stage("b", "x", "2"), 2),
    ],
)
def test_a_release_counts_once_and_one_of_another_noise_again(
    one: dict[str, Any], other: dict[str, Any], times: int
) -> None:
    """Only stages that are equal in all they say are one; whoever composes finds the same."""
    assert together(record(one), record(other)) == pytest.approx(times * RHO)


def test_a_record_within_a_record_counts_once() -> None:
    """A record read twice is one run."""
    words, network = stage("a", name="unigrams"), stage("b")
    found = stages_of([record(words), record(words, network), record(words, network)])
    assert found == (words, network)


def test_two_copies_of_a_folder_that_go_on_with_everybody_count_twice(tmp_path: Path) -> None:
    """Their ledgers are equal to the byte, and the noise of their last rounds is not."""
    people = population(tmp_path, users=12)

    def collected(folder: Path, until: int) -> Path:
        """A run that goes on up to a round; its report."""
        key = Key.from_system()
        sampler = FixedGoalSampler(len(people), len(people), key)
        config = UnigramConfig(30.0, 4, noise_multiplier=40.0)
        with Collection(
            people, WORDS, config, sampler, key, max_participations=4, folder=RunFolder(folder),
            list_record=Provenance.public("the test", "the list"),
        ) as run:  # fmt: skip
            list(run.run(until))
            path = folder.parent / f"{folder.name}-{until}.json"
            run.report(delta=DELTA).write(path.with_suffix(".md"), path)
        return path

    first = tmp_path / "first"
    collected(first, 2)
    copy = Path(shutil.copytree(first, tmp_path / "copy"))
    one, other = collected(first, 4), collected(copy, 4)
    reports = [read_run(path) for path in (one, other)]
    assert all(recheck(found.record).follows for found in reports)
    assert reports[0].record.ledgers == reports[1].record.ledgers
    alone = compose_runs(reports[:1]).provenance.guarantee
    both = compose_runs(reports).provenance
    assert alone is not None and alone.rho is not None
    assert both.guarantee is not None
    assert both.guarantee.rho == pytest.approx(2 * alone.rho)
    # The same run read again is the same.
    again = read_run(collected(first, 4))
    assert again.record.digest == reports[0].record.digest
