"""The guarantee of several runs together. Each user counts as being in all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlm.errors import ConfigError, FormatError, PrivacyError
from dlm.federated.account.records import Composition, compose_records
from dlm.record.provenance import Provenance, take_digest

PIPELINE_REPORT = "dlm pipeline report"  # `format` of a pipeline's report
EVERYBODY = "each user is counted as being in all of these runs, which is the worst case"


@dataclass(frozen=True)
class ReportedRun:
    """A run as described by its report or by its record; `delta` is the report's, or None."""

    name: str
    record: Provenance
    delta: float | None = None


def read_run(path: Path) -> ReportedRun:
    """Reads a run from a `privacy.json` or a record; FormatError if the file at `path` is neither,
    PrivacyError if the file was changed after it was written."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        found = dict(body)
        if found.get("format") == PIPELINE_REPORT:
            take_digest(found, path)
            found = dict(found["privacy"])
        if "checklist" in found:  # a report, which has its own digest
            take_digest(found, path)
        delta = float(found["delta"]) if "delta" in found else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise FormatError(f"{path} is not a privacy report (privacy.json): {exc}") from exc
    record = Provenance.from_dict(found.get("provenance", found), str(path))
    return ReportedRun(str(path), record, delta)


def compose_runs(runs: Sequence[ReportedRun], *, delta: float | None = None) -> Composition:
    """The guarantee of all runs together for every user, whichever runs they are in. A stage that
    several runs inherit, such as the counts behind a vocabulary, counts once; by default, delta is
    that of the reports.

    Raises
        ConfigError   there is no run, a run is given twice, or there is no common delta
        PrivacyError  the runs differ in their unit or adjacency
    """
    _check(runs)
    delta = _delta(runs) if delta is None else delta
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}; expected a number between 0 and 1")
    inputs = {f"run {place} ({run.name})": run.record for place, run in enumerate(runs, 1)}
    found = compose_records(inputs, delta=delta)
    return found._replace(notes=(*((EVERYBODY,) if len(runs) > 1 else ()), *found.notes))


def _check(runs: Sequence[ReportedRun]) -> None:
    if not runs:
        raise ConfigError("there is no run to account for; give one or more runs")
    names: dict[str, str] = {}
    for run in runs:
        digest = run.record.digest
        if digest in names and not run.record.is_public:
            raise ConfigError(
                f"{names[digest]} and {run.name} belong to the same run; give that run once"
            )
        names[digest] = run.name
    first = runs[0].record
    for run in runs:
        if (run.record.unit, run.record.adjacency) != (first.unit, first.adjacency):
            raise PrivacyError(
                f"{run.name} protects each {run.record.unit} ({run.record.adjacency}), "
                f"but {runs[0].name} protects each {first.unit} ({first.adjacency}), so the runs "
                "cannot be composed. Compose only runs with the same unit and adjacency"
            )


def _delta(runs: Sequence[ReportedRun]) -> float:
    deltas = sorted({run.delta for run in runs if run.delta is not None})
    if len(deltas) != 1:
        found = ", ".join(f"{delta:g}" for delta in deltas) or "none"
        raise ConfigError(f"the reports have no common delta (found: {found}); give --delta")
    return deltas[0]
