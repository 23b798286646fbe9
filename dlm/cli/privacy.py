"""`dlm privacy`: the cost of noise, its guarantee, and the settings for a target."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.checks import READ_ANY, check_reads
from dlm.cli.help import Group
from dlm.cli.options import Json
from dlm.cli.output import print_answer
from dlm.cli.privacy_account import account
from dlm.cli.privacy_options import (
    AS_PUBLISHED,
    AS_REPORTED,
    DEFAULT_BUFFERS,
    SIMULATED,
    Bands,
    Buffers,
    Delta,
    Gap,
    MadeFor,
    MaxPart,
    MinSep,
    Name,
    Plot,
    Rounds,
    Which,
    blt_made_for,
    check_plot,
    gap_of,
    only_of_some,
    plot_errors,
    plot_plan,
    progress_line,
)
from dlm.cli.records import sign, verify
from dlm.errors import ConfigError
from dlm.units import counted


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
    as_json: Json = False,
) -> None:
    """Compose the guarantees of several runs, for every user.

    Each user counts as being in all runs. Inputs that several runs inherit, such as the counts
    behind a vocabulary, count once. If any run has no guarantee, the composition has none, and the
    command exits with 1.

    Examples:
        dlm privacy compose first/privacy.json second/privacy.json
    """
    from dlm.federated.account.runs import compose_runs, read_run
    from dlm.federated.run.run_files import REPORTS, refuse_secrets_left

    for one in reports:
        refuse_secrets_left(one if one.is_dir() else one.parent)
    reports = [one / REPORTS[1] if one.is_dir() else _beside(one) for one in reports]
    for report in reports:
        check_reads("REPORT", report)
    runs = [read_run(report) for report in reports]
    found = compose_runs(runs, delta=delta)
    together = found.provenance
    each = [{"report": run.name, "statement": run.record.statement()} for run in runs]
    lines = [f"{at}  {one['report']}: {one['statement']}" for at, one in enumerate(each, 1)]
    if together.guarantee is not None:
        lines.append(f"together: {together.guarantee.statement()} for each {together.unit}.")
    else:
        lines.append("together: NO GUARANTEE.")
    if together.simulated is not None:
        of_simulation = together.simulated.statement()
        lines.append(f"figures of a simulation, which are not a guarantee: {of_simulation}")
    lines += [f"note: {note}" for note in found.notes]
    facts = {
        "runs": each,
        "guarantee": together.guarantee and dataclasses.asdict(together.guarantee),
        "simulated": together.simulated and dataclasses.asdict(together.simulated),
        "reasons": together.reasons,
        "notes": found.notes,
    }
    print_answer(facts, lines, as_json=as_json)
    if together.guarantee is None:
        raise typer.Exit(1)


def _beside(given: Path) -> Path:
    from dlm.record.counts_file import REPORT_JSON

    report = Path(f"{given}{REPORT_JSON}")
    return report if report.exists() else given


def plan(
    population: Annotated[int, typer.Option(help="Number of users who can take part.")],
    rounds: Rounds,
    delta: Delta = 1e-10,
    target_rho: Annotated[float | None, typer.Option(help="Target zCDP rho.")] = None,
    target_epsilon: Annotated[
        float | None,
        typer.Option(help="Instead of --target-rho: target epsilon, as a run reports it."),
    ] = None,
    simulated_goal: Annotated[
        int, typer.Option(help="Users per round of a simulation that learned well.")
    ] = 500,
    simulated_noise: Annotated[
        float | None,
        typer.Option(help="Noise multiplier of that simulation.  [default: tree 0.54, blt 0.568]"),
    ] = None,
    largest_goal: Annotated[int, typer.Option(help="Maximum users per round.")] = 6_500,
    round_minutes: Annotated[
        float | None, typer.Option(help="Minutes per round, from which the timer is computed.")
    ] = None,
    mechanism: Which = Name.tree,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Find the settings for a target: report goal, noise and timer.

    The method is GDP section 2.5. The plan keeps the simulation's mechanism: a tree, independent
    noise, or the BLT of BLT Table 4 that was made for a gap of 400. Banded mechanisms are
    excluded: their bands, and the noise that models tolerate, change with the gap. If no goal
    meets the target, the command says so first and exits with 1.

    Examples:
        dlm privacy plan --population 4000000 --rounds 2000 --target-rho 0.5 \\
            --round-minutes 4
    """
    from dlm.federated.account.answers import planned_sensitivity
    from dlm.federated.account.plan import make_plan
    from dlm.federated.account.zcdp import rho_for_epsilon

    check_plot(plot)
    if (target_rho is None) == (target_epsilon is None):
        raise ConfigError("give exactly one target: --target-rho or --target-epsilon")
    if target_rho is None:
        assert target_epsilon is not None
        target_rho = rho_for_epsilon(target_epsilon, delta)
    if simulated_noise is None:
        if mechanism not in SIMULATED:
            raise ConfigError(
                f"--simulated-noise is missing; there is no default for {mechanism.value}"
            )
        simulated_noise = SIMULATED[mechanism]
    made = make_plan(
        population=population,
        rounds=rounds,
        target_rho=target_rho,
        delta=delta,
        simulated_goal=simulated_goal,
        simulated_noise=simulated_noise,
        largest_goal=largest_goal,
        sensitivity=planned_sensitivity(mechanism.value),
        round_minutes=round_minutes,
    )
    if plot is not None:
        plot_plan(made, plot)
    chosen = made.chosen
    lines = [
        f"target        zCDP rho {target_rho:.4g}, {mechanism.value}, {counted(rounds, 'round')}",
        f"report goal   {counted(chosen.report_goal, 'user')} per round",
        f"noise         multiplier {chosen.noise_multiplier:.4g}",
        f"separation    gap {chosen.gap} (MinS {chosen.min_separation}), at most "
        f"{chosen.max_participations} participations",
    ]
    if made.timer_hours is not None:
        lines.append(f"timer         {made.timer_hours:g} hours")
    what = "guarantee   "
    if not made.keeps_utility:
        what = "would cost  "
        warning = (
            "NOT MET: the target needs more noise than the simulated run had. No "
            "simulation shows that a run with this plan would learn"
        )
        lines.insert(0, warning)
    lines += [
        f"{what}  rho {chosen.rho:.4g}, epsilon {chosen.epsilon:.4g} at delta {delta:g}, "
        f"{AS_REPORTED}",
        f"              epsilon {chosen.epsilon_gaussian:.4g} {AS_PUBLISHED}",
        *(f"note: {note}" for note in made.notes),
    ]
    facts = {"mechanism": mechanism.value, **dataclasses.asdict(made)}
    print_answer(facts, lines, as_json=as_json)
    if not made.keeps_utility:
        raise typer.Exit(1)


if TYPE_CHECKING:
    from dlm.federated.noise.mechanism import Mechanism


def mechanism(
    mechanism: Which,
    rounds: Rounds,
    max_participations: MaxPart,
    gap: Gap = None,
    min_separation: MinSep = None,
    buffers: Buffers = None,
    bands: Bands = None,
    error: Annotated[
        str | None, typer.Option(help="Loss to optimise a BLT for: max or mean.  [default: max]")
    ] = None,
    made_for: MadeFor = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Compute the losses of a mechanism at equal privacy.

    A loss is the error of prefix sums. Mechanisms that need optimising are optimised for the given
    participation, or for that of --made-for, and cached. --json also prints their parameters, such
    as a BLT's decays and scales.

    Examples:
        dlm privacy mechanism --mechanism blt --rounds 2052 --gap 342 \\
            --max-participations 6 --buffers 2
    """
    from dlm.federated.account.answers import losses_of
    from dlm.federated.noise.make import make_mechanism

    check_plot(plot)
    gap = gap_of(gap, min_separation)
    only_of_some(
        mechanism.value, rounds, made_for=made_for, buffers=buffers, bands=bands, error=error
    )
    error = "max" if error is None else error
    made: Mechanism
    if made_for is None:
        made = make_mechanism(
            mechanism.value, rounds=rounds, gap=gap, max_participations=max_participations,
            buffers=DEFAULT_BUFFERS if buffers is None else buffers,
            bands=bands, error=error, progress=progress_line,
        )  # fmt: skip
    else:
        from dlm.federated.noise.blt import Blt

        made = Blt(rounds, blt_made_for(made_for, buffers, error))
    answer = losses_of(made, mechanism.value, gap=gap, max_participations=max_participations)
    if plot is not None:
        plot_errors(made, answer["sensitivity"], plot)
    bound = "" if answer["sensitivity_exact"] else "  (upper bound)"
    lines = [
        f"{mechanism.value}, {counted(rounds, 'round')}, gap {gap}, "
        f"{counted(max_participations, 'participation')}",
        f"RmsLoss      {answer['rms_loss']:.6g}",
        f"MaxLoss      {answer['max_loss']:.6g}",
        f"sensitivity  {answer['sensitivity']:.6g}{bound}",
        f"buffers      {answer['buffers']}, each the size of the model",
    ]
    print_answer(answer, lines, as_json=as_json)


def erase(
    run: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a run of `dlm federate`."), READ_ANY
    ],
    as_json: Json = False,
) -> None:
    """End a run: erase its noise, and the copy of users' text.

    Whoever has the noise can subtract it from the releases. A run that finishes erases its noise
    itself; use this command for a run that you stopped. The model, its report and the ledger of
    participations stay, but the run cannot resume. The noise is overwritten, then removed; the text
    is removed. Snapshots, backups, a journalling or copy-on-write file system and an SSD may keep
    the old content.

    Examples:
        dlm privacy erase runs/first
    """
    from dlm.federated.run.run_folder import RunFolder

    with RunFolder(run) as folder:
        done = folder.end()
    facts = {"run": str(run), "rounds": done.rounds, "erased": done.erased}
    rounds = counted(done.rounds, "round")
    lines = [
        f"erased: {', '.join(done.erased) or 'nothing, since neither noise nor text was left'}",
        f"{run} ended after {rounds}: its folder has no noise and no users' text",
    ]
    print_answer(facts, lines, as_json=as_json)


EXAMPLES = """\
dlm privacy plan --population 4000000 --rounds 2000 --target-rho 0.5
dlm privacy verify runs/first --public-key key.pub"""

GROUP = Group(
    "Plan, account for and check privacy guarantees.",
    EXAMPLES,
    {
        "plan": ("Before a run", plan),
        "mechanism": ("Before a run", mechanism),
        "account": ("Guarantees", account),
        "compose": ("Guarantees", compose),
        "erase": ("End a run", erase),
        "sign": ("Records", sign),
        "verify": ("Records", verify),
    },
)
