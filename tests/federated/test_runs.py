"""Several runs, one guarantee: the sum, since a user may be in all."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy", reason="pip install -e '.[train]'")


from cli.trained import told
from dlm.errors import ConfigError, FormatError, PrivacyError
from dlm.federated.account.compose import StageRecord
from dlm.federated.account.runs import ReportedRun, compose_runs, read_run
from dlm.federated.account.zcdp import rho_of, zcdp_epsilon
from dlm.federated.report.report import PrivacyReport, build
from dlm.record.counts_file import REPORT_JSON
from dlm.record.ledger import ParticipationLedger
from dlm.record.provenance import Provenance

DELTA = 1e-8


def report(noise: float | None, *, delta: float = DELTA, **more: Any) -> PrivacyReport:
    """Of a run of 4 rounds in which a user takes part in two at most."""
    book = ParticipationLedger(10, sampling={"kind": "timer"}, gap=2)
    for index in range(4):
        book.record(index, [f"user {index % 2} {place}" for place in range(3)])
    simulated = bool(more.get("simulated"))
    mechanism = "gaussian" if noise else "none"
    stage = StageRecord("network", mechanism, noise, 4, 2, 2, simulated=simulated)
    return build([stage], delta=delta, ledgers={"network": book}, **more)


def run(noise: float | None, name: str = "a run", **more: Any) -> ReportedRun:
    """The same, as it is composed."""
    return ReportedRun(name, report(noise, **more).provenance, DELTA)


def rho(*noises: float) -> float:
    """Of runs with these multipliers together."""
    return math.fsum(rho_of(math.sqrt(2), noise) for noise in noises)


def test_users_that_may_be_in_all_runs_have_the_sum() -> None:
    """And epsilon is that of one Gaussian with the rho of all."""
    found = compose_runs([run(3.0), run(4.0), run(5.0)])
    assert found.provenance.guarantee is not None
    assert found.provenance.guarantee.rho == pytest.approx(rho(3, 4, 5))
    assert found.provenance.guarantee.epsilon == pytest.approx(zcdp_epsilon(rho(3, 4, 5), DELTA))
    assert "counted as being in all" in found.notes[0]


def test_one_run_without_a_guarantee_leaves_all_without() -> None:
    """However strong the others are, and whoever is in them: the worst is what is promised."""
    raw = compose_runs([run(30.0), run(None, "raw.json")])
    assert raw.provenance.guarantee is None and raw.provenance.simulated is None
    assert raw.provenance.reasons == ("network: users' data were used without noise",)
    nothing = ReportedRun("x", Provenance.none("somebody said so"), DELTA)
    assert compose_runs([run(30.0), nothing]).provenance.reasons == ("somebody said so",)


def test_figures_of_simulations_stay_figures() -> None:
    """Composed they are, and promise as little as before."""
    found = compose_runs([run(3.0), run(4.0, simulated=True)])
    assert found.provenance.guarantee is None
    assert "configured seed" in found.provenance.reasons[0]
    assert found.provenance.simulated is not None
    assert found.provenance.simulated.rho == pytest.approx(rho(3, 4))


def test_what_does_not_add_up_is_refused() -> None:
    """No run, one twice, other units, deltas that do not agree."""
    one = run(3.0)
    other = dataclasses.replace(one.record, unit="utterance", ledgers=())
    for runs, more, message in [
        ([], {}, "no run"),
        ([one, dataclasses.replace(one, name="again")], {}, "to the same run; give that run"),
        ([one, dataclasses.replace(run(3.0), delta=1e-9)], {}, "no common delta"),
        ([one], {"delta": 1.5}, "between 0 and 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            compose_runs(runs, **more)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match="cannot be composed"):
        compose_runs([one, ReportedRun("other", other, DELTA)])


def written(folder: Path, name: str, found: PrivacyReport) -> Path:
    """A report in its file."""
    path = folder / name
    found.write(folder / f"{name}.md", path)
    return path


def test_the_command_reads_reports_and_says_what_holds(tmp_path: Path) -> None:
    """By its exit status too; a report that was changed is refused."""
    first, second = (
        written(tmp_path, "1.json", report(3.0)),
        written(tmp_path, "2.json", report(4.0)),
    )

    def answer(*arguments: object, code: int) -> str:
        done = told("privacy", "compose", *arguments)
        assert done.exit_code == code
        return done.stdout

    text = answer(first, second, code=0)
    assert f"{rho(3, 4):.3f}"[:4] in text.split("together:")[1]
    # The output of a run finds its report.
    counts = tmp_path / "counts.tsv"
    counts.write_text("word\tcount\n")
    written(tmp_path, f"{counts.name}{REPORT_JSON}", report(3.0))
    assert answer(counts, second, code=0).split("together:")[1] == text.split("together:")[1]
    simulated = written(tmp_path, "3.json", report(4.0, simulated=True))
    text = answer(first, simulated, code=1)
    assert "together: NO GUARANTEE" in text and "figures of a simulation" in text
    # What both inherit counts once.
    inherits = {"inputs": {"the vocabulary": report(6.0).provenance}}
    begun = [written(tmp_path, f"{noise}.json", report(noise, **inherits)) for noise in (3.0, 4.0)]
    found = json.loads(answer(*begun, "--json", code=0))
    assert found["guarantee"]["rho"] == pytest.approx(rho(3, 4, 6))

    body = json.loads(first.read_text())
    body["delta"] = 1e-3
    first.write_text(json.dumps(body))
    with pytest.raises(PrivacyError, match="changed after"):
        read_run(first)
    first.write_text("[]")
    with pytest.raises(FormatError, match="not a privacy record"):
        read_run(first)
