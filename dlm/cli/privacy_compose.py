"""`dlm privacy compose`: the guarantee of several runs together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import Json


def compose(
    reports: Annotated[
        list[Path],
        typer.Argument(
            metavar="REPORT...", help="privacy.json or folder of each run, or its counts file."
        ),
    ],
    delta: Annotated[
        float | None,
        typer.Option(help="Delta of the guarantee.  [default: that of the reports, if they agree]"),
    ] = None,
    disjoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="I,J",
            help="Two runs without common users, by position, such as 1,2. May be repeated.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compose the guarantees of several runs, for every user.

    Each user counts as being in all runs. Among runs that share no user (--disjoint), the worst one
    counts, not the sum. --disjoint covers only the users whose text the runs themselves read.
    Whatever a run inherits, such as the counts behind its vocabulary, counts for every user, unless
    the report of those counts is given too. Runs that share a ledger are not disjoint. If any run
    has no guarantee, the composition has none, and the command exits with 1.

    Examples:
        dlm privacy compose first/privacy.json second/privacy.json
        dlm privacy compose a.json b.json --disjoint 1,2 --delta 1e-10
    """
    import dataclasses

    from dlm.cli.paths import check_reads
    from dlm.federated.account.runs import compose_runs, read_run
    from dlm.federated.run_files import REPORTS, refuse_secrets_left

    for one in reports:
        refuse_secrets_left(one if one.is_dir() else one.parent)
    reports = [one / REPORTS[1] if one.is_dir() else _beside(one) for one in reports]
    for report in reports:
        check_reads("REPORT", report)
    runs = [read_run(report) for report in reports]
    found = compose_runs(runs, delta=delta, disjoint=[_pair(given) for given in disjoint or ()])
    guarantee = found.guarantee
    if as_json:
        each = [{"report": run.name, "statement": run.record.statement()} for run in runs]
        print_json({"runs": each, **dataclasses.asdict(found)})
    else:
        for place, run in enumerate(runs, 1):
            print(f"{place}  {run.name}: {run.record.statement()}")
        if guarantee is not None:
            print(f"together: {guarantee.statement()} for each {runs[0].record.unit}.")
        else:
            print("together: NO GUARANTEE.")
            if found.simulated is not None:
                print(f"figures of a simulation, which are not a guarantee: "
                      f"{found.simulated.statement()}")  # fmt: skip
        if found.worst and len(found.worst) < len(runs):
            print(
                f"the least protected users are in runs "
                f"{', '.join(str(p + 1) for p in found.worst)}"
            )
        for note in found.notes:
            print(f"note: {note}")
    if guarantee is None:
        raise typer.Exit(1)


def _beside(given: Path) -> Path:
    """The report of a file of `dlm unigrams`; else what was given."""
    from dlm.record.counts_file import REPORT_JSON

    report = Path(f"{given}{REPORT_JSON}")
    return report if report.exists() else given


def _pair(given: str) -> tuple[int, int]:
    """Positions from 0, of "1,2"."""
    from dlm.errors import ConfigError

    try:
        first, second = (int(part) - 1 for part in given.split(","))
    except ValueError:
        raise ConfigError(
            f"--disjoint is {given!r}; expected the positions of two runs, such as 1,2"
        ) from None
    return first, second
