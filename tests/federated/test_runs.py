"""Several runs, one guarantee: the sum where users may be in all, the worst where they are not."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy", reason="pip install -e '.[train]'")

from typer.testing import CliRunner

from dlm.cli.main import app
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
    stage = StageRecord("network", "gaussian" if noise else "none", noise, 4, 2, 2)
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
    assert found.guarantee is not None
    assert found.guarantee.rho == pytest.approx(rho(3, 4, 5))
    assert found.guarantee.epsilon == pytest.approx(zcdp_epsilon(rho(3, 4, 5), DELTA))
    assert found.worst == (0, 1, 2)
    assert "counted as being in all" in found.notes[0]


def test_of_runs_without_a_user_in_common_the_worst_counts() -> None:
    """By pairs: who cannot be in two of them can be in one, with all that these allow."""
    runs = [run(3.0), run(4.0), run(5.0)]

    def most(*disjoint: tuple[int, int]) -> tuple[float, tuple[int, ...]]:
        found = compose_runs(runs, disjoint=disjoint)
        assert found.guarantee is not None and found.guarantee.rho is not None
        return found.guarantee.rho, found.worst

    assert most((0, 1)) == (pytest.approx(rho(3, 5)), (0, 2))
    assert most((2, 0), (0, 2)) == (pytest.approx(rho(3, 4)), (0, 1))
    assert most((0, 1), (0, 2)) == (pytest.approx(rho(3)), (0,))
    assert most((0, 1), (0, 2), (1, 2)) == (pytest.approx(rho(3)), (0,))
    # Each of two weak runs may lie beside what a strong one has not.
    weak = [run(3.0), run(3.5), run(3.5)]
    found = compose_runs(weak, disjoint=[(0, 1), (0, 2)])
    assert found.worst == (1, 2)
    assert "runs 1 and 2, 1 and 3 have no user in common" in found.notes[0]


def test_one_run_without_a_guarantee_leaves_all_without() -> None:
    """However strong the others are, and whoever is in them: the worst is what is promised."""
    raw = compose_runs([run(30.0), run(None, "raw.json")])
    assert raw.guarantee is None and raw.simulated is None
    assert raw.reasons == ("raw.json: network: users' data were used without noise",)
    assert compose_runs([run(30.0), run(None)], disjoint=[(0, 1)]).guarantee is None
    nothing = ReportedRun("x", Provenance.none("somebody said so"), DELTA)
    assert compose_runs([run(30.0), nothing]).reasons == ("x: somebody said so",)


def test_figures_of_simulations_stay_figures() -> None:
    """Composed they are, and promise as little as before."""
    found = compose_runs([run(3.0), run(4.0, simulated=True)])
    assert found.guarantee is None
    assert "configured seed" in found.reasons[0]
    assert found.simulated is not None
    assert found.simulated.rho == pytest.approx(rho(3, 4))


def test_sampled_stages_are_composed_as_they_are_accounted_for() -> None:
    """Amplified, with what is not: more than either, less than without sampling."""
    stage = StageRecord(
        "network", "gaussian", 1.0, 50, 1, 50, sampling="poisson", sampling_rate=0.1
    )
    record = Provenance(
        report(3.0).provenance.guarantee, stages=(dataclasses.asdict(stage),), ledgers=("0" * 64,)
    )
    sampled = ReportedRun("sampled", record, DELTA)
    alone = compose_runs([sampled]).guarantee
    both = compose_runs([sampled, run(3.0)]).guarantee
    assert alone is not None and both is not None
    plain = zcdp_epsilon(rho(3), DELTA)
    assert max(alone.epsilon, plain) < both.epsilon < alone.epsilon + plain + 1
    assert both.epsilon < zcdp_epsilon(rho(3) + rho_of(math.sqrt(50), 1.0), DELTA)


def test_a_stage_that_two_runs_inherit_counts_once_where_its_ledger_tells() -> None:
    """Counts of words that both begin with. Without a ledger nobody knows: it counts twice."""

    def begun(noise: float, **extras: str) -> ReportedRun:
        words = StageRecord("unigrams", "gaussian", 6.0, 4, 2, 2, extras=extras)
        record = run(noise).record
        stages = (dataclasses.asdict(words), *record.stages)
        return ReportedRun(f"run {noise}", dataclasses.replace(record, stages=stages), DELTA)

    def composed(**extras: str) -> float | None:
        found = compose_runs([begun(3.0, **extras), begun(4.0, **extras)]).guarantee
        return None if found is None else found.rho

    assert composed(ledger="abc") == pytest.approx(rho(3, 4, 6))
    assert composed() == pytest.approx(rho(3, 4, 6, 6))


def begun_with(words: StageRecord, noise: float, name: str) -> ReportedRun:
    """A run with a vocabulary of counts, which names its own ledger as its report does."""
    own = run(noise, name)
    stages = (words.to_json(), *own.record.stages)
    inherited = (words.extras["ledger"],) if "ledger" in words.extras else ()
    ledgers = (*inherited, *own.record.ledgers)
    record = dataclasses.replace(own.record, stages=stages, ledgers=ledgers)
    return ReportedRun(name, record, DELTA, frozenset(own.record.ledgers))


def counts_of(ledger: str) -> StageRecord:
    """Counts of words, of rho 2 / (2 36)."""
    return StageRecord("unigrams", "gaussian", 6.0, 4, 2, 2, extras={"ledger": ledger})


def test_an_inherited_stage_may_be_of_the_other_groups_users() -> None:
    """A vocabulary counted from the users of run 2 is in run 1, which shares nobody with it."""
    one, other = begun_with(counts_of("a" * 64), 3.0, "one"), run(3.0, "other")
    found = compose_runs([one, other], disjoint=[(0, 1)])
    assert found.guarantee is not None
    assert found.guarantee.rho == pytest.approx(rho(3, 6))
    third = compose_runs([one, run(2.0, "other")], disjoint=[(0, 1)])
    assert third.guarantee is not None
    assert third.guarantee.rho == pytest.approx(rho(2, 6))
    assert third.worst == (1,)
    told = "stage unigrams, which run 1 (one) inherits, counts for every user"
    assert any(told in note for note in third.notes)
    # A record without its report does not tell which stage is the run's own.
    bare = dataclasses.replace(one, own=frozenset())
    found = compose_runs([bare, other], disjoint=[(0, 1)])
    assert found.guarantee is not None
    assert found.guarantee.rho == pytest.approx(rho(3, 3, 6))


def test_a_stage_counts_where_the_run_that_did_it_does() -> None:
    """Given the counts' own report, users that are not in it are not counted there."""
    words = counts_of("a" * 64)
    record = Provenance(
        report(6.0).provenance.guarantee, stages=(words.to_json(),), ledgers=("a" * 64,)
    )
    counts = ReportedRun("counts", record, DELTA, frozenset(["a" * 64]))
    runs = [counts, begun_with(words, 3.0, "one"), run(2.0, "other")]
    apart = compose_runs(runs, disjoint=[(0, 2), (1, 2)])
    assert apart.guarantee is not None
    assert apart.guarantee.rho == pytest.approx(max(rho(3, 6), rho(2)))
    together = compose_runs(runs, disjoint=[(1, 2)])
    assert together.guarantee is not None
    assert together.guarantee.rho == pytest.approx(max(rho(3, 6), rho(2, 6)))


def test_runs_that_share_a_ledger_share_its_users() -> None:
    """Whatever is said of them; the message names the ledger."""
    runs = [begun_with(counts_of("a" * 64), noise, f"run of {noise}") for noise in (3.0, 4.0)]
    with pytest.raises(PrivacyError, match=rf"both have the ledger {'a' * 64} \(stage unigrams\)"):
        compose_runs([*runs, run(2.0)], disjoint=[(0, 2), (1, 0)])
    assert compose_runs([*runs, run(2.0)], disjoint=[(0, 2), (1, 2)]).guarantee is not None


def test_what_does_not_add_up_is_refused() -> None:
    """No run, one twice, other units, deltas that do not agree, pairs that are none."""
    one = run(3.0)
    other = dataclasses.replace(one.record, unit="utterance", ledgers=())
    for runs, more, message in [
        ([], {}, "no run"),
        ([one, dataclasses.replace(one, name="again")], {}, "belong to one run; give it once"),
        ([one, dataclasses.replace(run(3.0), delta=1e-9)], {}, "no common delta"),
        ([one], {"delta": 1.5}, "between 0 and 1"),
        ([one, run(3.0)], {"disjoint": [(0, 2)]}, "two different runs of 1 to 2"),
        ([one, run(3.0)], {"disjoint": [(1, 1)]}, "two different runs of 1 to 2"),
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
        result = CliRunner().invoke(app, ["privacy", "compose", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code
        return result.stdout

    text = answer(first, second, code=0)
    assert f"{rho(3, 4):.3f}"[:4] in text.split("together:")[1]
    # The output of a run finds its report.
    counts = tmp_path / "counts.tsv"
    counts.write_text("word\tcount\n")
    written(tmp_path, f"{counts.name}{REPORT_JSON}", report(3.0))
    assert answer(counts, second, code=0).split("together:")[1] == text.split("together:")[1]
    found = json.loads(answer(first, second, "--disjoint", "1,2", "--json", code=0))
    assert found["guarantee"]["rho"] == pytest.approx(rho(3))
    assert found["worst"] == [0]
    simulated = written(tmp_path, "3.json", report(4.0, simulated=True))
    text = answer(first, simulated, code=1)
    assert "together: NO GUARANTEE" in text and "figures of a simulation" in text
    # A report tells which stage is the run's own, and which one it inherits.
    counted = report(6.0).provenance
    begun = written(tmp_path, "4.json", report(3.0, inputs={"the vocabulary": counted}))
    found = json.loads(answer(begun, second, "--disjoint", "1,2", "--json", code=0))
    assert found["guarantee"]["rho"] == pytest.approx(rho(3, 6))
    assert any("network, which run 1" in note for note in found["notes"])
    again = written(tmp_path, "5.json", report(4.0, inputs={"the vocabulary": counted}))
    with pytest.raises(PrivacyError, match=f"both have the ledger {counted.ledgers[0]}"):
        answer(begun, again, "--disjoint", "1,2", code=1)
    with pytest.raises(ConfigError, match="--disjoint is 'x'"):
        answer(first, second, "--disjoint", "x", code=1)

    body = json.loads(first.read_text())
    body["delta"] = 1e-3
    first.write_text(json.dumps(body))
    with pytest.raises(PrivacyError, match="changed after"):
        read_run(first)
    first.write_text("[]")
    with pytest.raises(FormatError, match="not a privacy record"):
        read_run(first)
