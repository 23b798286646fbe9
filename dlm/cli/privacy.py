"""`dlm privacy`: what noise costs, what it guarantees, and what to run for a target."""

from __future__ import annotations

import json
import math
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.records import sign, verify

if TYPE_CHECKING:
    from dlm.federated.account.plan import NoisePlan
    from dlm.federated.noise.blt import BltParameters
    from dlm.federated.noise.mechanism import Mechanism

app = typer.Typer(
    help="What noise costs, and what it guarantees.\n\n"
    "Example: dlm privacy plan --population 4000000 --rounds 2000 --target-rho 0.5",
    no_args_is_help=True,
    rich_markup_mode=None,
)


app.command("sign")(sign)
app.command("verify")(verify)


class Name(StrEnum):
    """Mechanisms by the names of the command line."""

    gaussian = "gaussian"
    tree = "tree"
    tree_full = "tree-full"
    bandmf = "bandmf"
    bandtoep = "bandtoep"
    bandfhu = "bandfhu"
    blt = "blt"


# Noise multipliers that learned well with 500 users a round: GDP 2.2, and in proportion 7.379 with
# 6,500 (BLT Table 4).
SIMULATED = {Name.tree: 0.54, Name.blt: 7.379 * 500 / 6500}

Delta = Annotated[float, typer.Option("--delta", help="Probability that epsilon does not hold.")]
Rounds = Annotated[int, typer.Option("--rounds", help="Rounds that are run.")]
MaxPart = Annotated[int, typer.Option("--max-part", help="Most participations of one user.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Which = Annotated[Name, typer.Option("--mechanism", help="How noise is correlated over rounds.")]
Buffers = Annotated[
    int | None, typer.Option("--buffers", help="Of a BLT that is optimised; 4 if not given.")
]
Bands = Annotated[
    int | None, typer.Option("--bands", help="Of bandmf, bandtoep, bandfhu; the gap if not given.")
]
MadeFor = Annotated[
    str | None,
    typer.Option(help="Of a BLT: optimise it for ROUNDS,GAP,MAXPART, as 2000,100,10."),
]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw to this file, as .png or .svg.")]

# Whose epsilon a number is.
AS_REPORTED = "as a run reports it (discrete noise)"
AS_SIMULATED = "for exact Gaussian noise, as simulations report it (noise in floats)"

BANDED = ("bandmf", "bandtoep", "bandfhu")
DEFAULT_BUFFERS, MOST_BUFFERS = 4, 10
DRAWN = (".png", ".svg", ".pdf")


@app.command("account")
def account(
    mechanism: Which,
    noise_multiplier: Annotated[
        float, typer.Option(help="Standard deviation of the independent draws over the clip norm.")
    ],
    rounds: Rounds,
    delta: Delta,
    min_sep: Annotated[
        int | None,
        typer.Option(help="Fewest rounds between two participations (MinS): the gap less 1."),
    ] = None,
    max_part: Annotated[int | None, typer.Option(help="Most participations of one user.")] = None,
    sampling_probability: Annotated[
        str | None,
        typer.Option(
            help="Instead of these two: each user was drawn by itself in each round with this "
            "probability, as 0.01 or 5000/763430; gaussian only."
        ),
    ] = None,
    made_for: MadeFor = None,
    buffers: Buffers = None,
    bands: Bands = None,
    column_norm: Annotated[
        float | None,
        typer.Option(
            help="Norm of the columns of the bandmf, bandtoep or bandfhu matrix that the noise "
            "multiplier was published with; ours have 1."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """What the noise of a mechanism guarantees: zCDP and epsilon.

    The first epsilon is what a run reports, whose noise is discrete Gaussian: what every mechanism
    of that rho has. The exact Gaussian's, which simulations report and the papers print, is some
    4 to 8 % smaller.

    A BLT is the one of BLT Table 4 that was made for the nearest gap (100, 400 or 1,000 rounds),
    unless --made-for says otherwise: account for the one that is run. With --sampling-probability,
    epsilon of Poisson-sampled cohorts: as a run reports it, by today's two accountants and by the
    moments accountant of DP-FedAvg's tables. A noise multiplier that was published with a matrix whose columns have another norm
    than 1 is accounted for with --column-norm.

    Example: dlm privacy account --mechanism tree --noise-multiplier 7 --rounds 930 --min-sep 212 --max-part 4 --delta 1e-10

    Example: dlm privacy account --mechanism gaussian --noise-multiplier 1 --rounds 5000 --sampling-probability 5000/763430 --delta 1e-9
    """  # noqa: E501
    from dlm.errors import ConfigError
    from dlm.federated.account.answers import guarantee_of, sampled_guarantee_of, sensitivity_of
    from dlm.federated.noise.participation import gap_from_min_sep

    if not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
        raise ConfigError(
            f"--noise-multiplier is {noise_multiplier}; it must be a finite number, 0 or more"
        )
    if sampling_probability is not None:
        others = (min_sep, max_part, made_for, buffers, bands, column_norm)
        if any(given is not None for given in others):
            raise ConfigError(
                "--sampling-probability is instead of --min-sep, --max-part, --made-for, "
                "--buffers, --bands and --column-norm"
            )
        probability = _probability(sampling_probability)
        answer = sampled_guarantee_of(
            mechanism.value,
            probability,
            noise_multiplier=noise_multiplier,
            rounds=rounds,
            delta=delta,
        )
        _print_sampled(answer, as_json=as_json)
        return
    if min_sep is None or max_part is None:
        raise ConfigError(
            "give --min-sep and --max-part, what separates a user's participations and how many "
            "they are; or --sampling-probability for Poisson-sampled cohorts"
        )
    if mechanism.value == "blt" and buffers is not None and made_for is None:
        raise ConfigError(
            f"--buffers is {buffers} without --made-for: the BLT accounted for is then one of BLT "
            "Table 4, whose buffers are published; give both, or neither"
        )
    gap = gap_from_min_sep(min_sep)
    _only_of_some(mechanism.value, rounds, made_for=made_for, buffers=buffers, bands=bands)
    found = sensitivity_of(
        mechanism.value,
        rounds,
        gap,
        max_part,
        blt=None if made_for is None else _blt_made_for(made_for, buffers, "max"),
        bands=bands,
        column_norm=1.0 if column_norm is None else column_norm,
        progress=_progress,
    )
    answer = guarantee_of(
        mechanism.value,
        found,
        noise_multiplier=noise_multiplier,
        rounds=rounds,
        gap=gap,
        max_part=max_part,
        delta=delta,
    )
    if as_json:
        _print_json(answer)
        return
    made = f" ({found.made_for})" if found.made_for else ""
    print(f"{mechanism.value}{made}, {rounds} rounds, gap {gap}, "
          f"{max_part} participations, noise multiplier {noise_multiplier:g}")  # fmt: skip
    print(f"sensitivity  {found.value:.6g}{'' if found.is_exact else '  (upper bound)'}")
    print(f"zCDP rho     {answer['rho']:.6g}")
    print(f"epsilon      {answer['epsilon']:.6g}  at delta {delta:g}, {AS_REPORTED}")
    print(f"             {answer['epsilon_gaussian']:.6g}  {AS_SIMULATED}")
    for note in answer["notes"]:
        print(f"note: {note}")


def _print_sampled(answer: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        _print_json(answer)
        return
    print(
        f"{answer['mechanism']}, {answer['rounds']} rounds, Poisson-sampled with probability "
        f"{answer['sampling_probability']:.6g}, noise multiplier {answer['noise_multiplier']:g}"
    )
    print(f"epsilon      {answer['epsilon']:.6g}  at delta {answer['delta']:g}, {AS_REPORTED}")
    print(f"             {answer['epsilon_pld']:.6g}  {AS_SIMULATED} (PLD)")
    print(f"             {answer['epsilon_rdp']:.6g}  the same by Renyi orders (RDP)")
    print(f"             {answer['epsilon_moments']:.6g}  by the moments accountant of DP-FedAvg")
    for note in answer["notes"]:
        print(f"note: {note}")


def _probability(given: str) -> float:
    """Of "0.01" or "5000/763430"."""
    from dlm.errors import ConfigError

    users, _, population = given.partition("/")
    try:
        probability = float(users) / float(population or 1)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f"--sampling-probability is {given!r}, not a number as 0.01 or 5000/763430"
        ) from None
    if not 0 < probability <= 1:
        raise ConfigError(f"the sampling probability is {probability}, not in (0, 1]")
    return probability


@app.command("mechanism")
def mechanism(
    mechanism: Which,
    rounds: Rounds,
    gap: Annotated[
        int, typer.Option(help="Least difference of rounds of two participations of a user.")
    ],
    max_part: MaxPart,
    buffers: Buffers = None,
    bands: Bands = None,
    error: Annotated[
        str | None, typer.Option(help="A BLT is optimised for: max (if not given) or mean.")
    ] = None,
    made_for: MadeFor = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """The losses of a mechanism: noise in running sums at equal privacy.

    An optimised mechanism is optimised for this participation, or for that of --made-for, and kept
    in the cache folder.

    Example: dlm privacy mechanism --mechanism blt --rounds 2052 --gap 342 --max-part 6 --buffers 2
    """
    from dlm.federated.account.answers import losses_of
    from dlm.federated.noise.make import make_mechanism

    _check_plot(plot)
    _only_of_some(
        mechanism.value, rounds, made_for=made_for, buffers=buffers, bands=bands, error=error
    )
    error = "max" if error is None else error
    made: Mechanism
    if made_for is None:
        made = make_mechanism(
            mechanism.value, rounds=rounds, gap=gap, max_part=max_part,
            buffers=DEFAULT_BUFFERS if buffers is None else buffers,
            bands=bands, error=error, progress=_progress,
        )  # fmt: skip
    else:
        from dlm.federated.noise.blt import Blt

        made = Blt(rounds, _blt_made_for(made_for, buffers, error))
    answer = losses_of(made, mechanism.value, gap=gap, max_part=max_part)
    if plot is not None:
        _plot_errors(made, answer["sensitivity"], plot)
    if as_json:
        _print_json(answer)
        return
    bound = "" if answer["sensitivity_exact"] else "  (upper bound)"
    print(f"{mechanism.value}, {rounds} rounds, gap {gap}, {max_part} participations")
    print(f"RmsLoss      {answer['rms_loss']:.6g}")
    print(f"MaxLoss      {answer['max_loss']:.6g}")
    print(f"sensitivity  {answer['sensitivity']:.6g}{bound}")
    print(f"buffers      {answer['buffers']} of the model's size")


@app.command("plan")
def plan(
    population: Annotated[int, typer.Option(help="Users that can take part.")],
    rounds: Rounds,
    delta: Delta = 1e-10,
    target_rho: Annotated[float | None, typer.Option(help="zCDP to reach.")] = None,
    target_epsilon: Annotated[
        float | None, typer.Option(help="Or epsilon to reach, as a run reports it.")
    ] = None,
    simulated_goal: Annotated[
        int, typer.Option(help="Users a round in a simulation that learned well.")
    ] = 500,
    simulated_noise: Annotated[
        float | None,
        typer.Option(help="And its noise multiplier; tree 0.54 and blt 0.568 if not given."),
    ] = None,
    largest_goal: Annotated[int, typer.Option(help="Most users a round can have.")] = 6_500,
    round_minutes: Annotated[
        float | None, typer.Option(help="How long a round takes, for the timer.")
    ] = None,
    mechanism: Which = Name.tree,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """What to run for a target: report goal, noise and timer (GDP 2.5).

    One mechanism is compared with itself: a tree, independent noise, or the BLT of BLT Table 4 that
    was made for a gap of 400. Bands change with the gap, and what noise they bear with them. If no
    report goal meets the target, that is said first and the exit status is 1.

    Example: dlm privacy plan --population 4000000 --rounds 2000 --target-rho 0.5 --round-minutes 4
    """
    from dlm.errors import ConfigError
    from dlm.federated.account.answers import planned_sensitivity
    from dlm.federated.account.plan import make_plan
    from dlm.federated.account.zcdp import rho_for_epsilon

    _check_plot(plot)
    if (target_rho is None) == (target_epsilon is None):
        raise ConfigError("give one target: --target-rho or --target-epsilon")
    if target_rho is None:
        assert target_epsilon is not None
        target_rho = rho_for_epsilon(target_epsilon, delta)
    if simulated_noise is None:
        if mechanism not in SIMULATED:
            raise ConfigError(f"give --simulated-noise: none is known for {mechanism.value}")
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
        _plot_plan(made, plot)
    if as_json:
        import dataclasses

        _print_json({"mechanism": mechanism.value, **dataclasses.asdict(made)})
        if not made.keeps_utility:
            raise typer.Exit(1)
        return
    chosen = made.chosen
    if not made.keeps_utility:
        print("NOT MET: no report goal up to the largest meets the target with the simulation's "
              "noise; what follows has more, and no simulation shows that it learns")  # fmt: skip
    print(f"target        zCDP rho {target_rho:.4g}, {mechanism.value}, {rounds} rounds")
    print(f"report goal   {chosen.report_goal} users a round")
    print(f"noise         multiplier {chosen.noise_multiplier:.4g}")
    print(f"separation    gap {chosen.gap} (MinS {chosen.min_sep}), at most "
          f"{chosen.max_part} participations")  # fmt: skip
    if made.timer_hours is not None:
        print(f"timer         {made.timer_hours:g} hours")
    what = "guarantee   " if made.keeps_utility else "would cost  "
    print(f"{what}  rho {chosen.rho:.4g}, epsilon {chosen.epsilon:.4g} at delta {delta:g}, "
          f"{AS_REPORTED}")  # fmt: skip
    print(f"              epsilon {chosen.epsilon_gaussian:.4g} {AS_SIMULATED}")
    for note in made.notes:
        print(f"note: {note}")
    if not made.keeps_utility:
        raise typer.Exit(1)


@app.command("compose")
def compose(
    reports: Annotated[
        list[Path], typer.Argument(metavar="REPORT...", help="privacy.json of each run.")
    ],
    delta: Annotated[
        float | None, typer.Option(help="Of the guarantee; that of the reports if they agree.")
    ] = None,
    disjoint: Annotated[
        list[str] | None,
        typer.Option(
            help="Two runs with no user in common, by their places, as 1,2; may be repeated."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """The guarantee of several runs together, for every user.

    Each user counts as being in all of them. Of runs that share nobody (--disjoint) the worst
    counts, not the sum. --disjoint speaks of the users whose text the runs themselves had: what a
    run inherits (the counts of its vocabulary) counts for every user, unless the report of those
    counts is given too. Runs that share a ledger are not disjoint. If one run has no guarantee,
    the whole has none; exit status 1.

    Example: dlm privacy compose first/privacy.json second/privacy.json
    """
    import dataclasses

    from dlm.cli.paths import check_reads
    from dlm.federated.account.runs import compose_runs, read_run

    for report in reports:
        check_reads("REPORT", report)
    runs = [read_run(report) for report in reports]
    found = compose_runs(runs, delta=delta, disjoint=[_pair(given) for given in disjoint or ()])
    guarantee = found.guarantee
    if as_json:
        each = [{"report": run.name, "statement": run.record.statement()} for run in runs]
        _print_json({"runs": each, **dataclasses.asdict(found)})
    else:
        for place, run in enumerate(runs, 1):
            print(f"{place}  {run.name}: {run.record.statement()}")
        if guarantee is not None:
            print(f"together: {guarantee.statement()} for each {runs[0].record.unit}.")
        else:
            print("together: NO GUARANTEE.")
            if found.simulated is not None:
                print(f"figures of a simulation, which promise nothing to anybody: "
                      f"{found.simulated.statement()}")  # fmt: skip
        if found.worst and len(found.worst) < len(runs):
            print(f"the worst off are in runs {', '.join(str(p + 1) for p in found.worst)}")
        for note in found.notes:
            print(f"note: {note}")
    if guarantee is None:
        raise typer.Exit(1)


def _pair(given: str) -> tuple[int, int]:
    """Places from 0, of "1,2"."""
    from dlm.errors import ConfigError

    try:
        first, second = (int(part) - 1 for part in given.split(","))
    except ValueError:
        raise ConfigError(f"--disjoint is {given!r}, not two places as 1,2") from None
    return first, second


@app.command("audit")
def audit(
    config: Annotated[Path, typer.Argument(help="Settings of a run, TOML, as of dlm federate.")],
    canaries: Annotated[int, typer.Option(help="Users planted, each by a coin.")] = 1_000,
    parameters: Annotated[
        int, typer.Option(help="Numbers of the model; at least 10 for each canary.")
    ] = 16_384,
    confidence: Annotated[float, typer.Option(help="Of the lower bound.")] = 0.95,
    seed: Annotated[
        int | None, typer.Option(help="Of coins, canaries and noise; the system's if not given.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write what was found to this file, JSON.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure what a run's noise hides: a lower bound of mu beside accounting's upper one.

    Canaries that send a direction of their own go the way of users' updates, in the worst pattern
    of participation, and are looked for in all that a run releases. The rounds are those of the
    settings; no text is read, and nothing of the run is kept. Exit status 1 if the lower bound is
    above the upper one: the noise is then smaller than what is accounted for.

    Example: dlm privacy audit run.toml
    """
    from dlm.cli.paths import check_reads, check_writes
    from dlm.federated.audit import Auditor
    from dlm.federated.keys import Key
    from dlm.federated.settings import TrainingSettings
    from dlm.files import write_whole

    check_reads("CONFIG", config)
    check_writes("--output", output)
    settings = TrainingSettings.read(config)
    made = Auditor(settings, canaries=canaries, parameters=parameters, progress=_progress)
    key = None if seed is None else Key.from_seed(seed)
    found = made.run(key, confidence=confidence)
    answer = found.to_dict()
    if output is not None:
        write_whole(output, (json.dumps(answer, indent=1) + "\n").encode())
    if as_json:
        _print_json(answer)
    else:
        shown = ", ".join(map(str, found.pattern[:8]))
        more = f" and {len(found.pattern) - 8} more" if len(found.pattern) > 8 else ""
        print(f"{found.mechanism}, {settings.noise} noise, {found.rounds} rounds, gap {found.gap}, "
              f"at most {found.max_part} participations")  # fmt: skip
        print(f"canaries     {found.present} of {found.canaries} present, in rounds {shown}{more}")
        sure = f"{100 * found.confidence:.10g}"  # with as many digits as were given
        print(f"accounting   mu at most {found.upper_mu:.4g} (zCDP rho {found.rho:.4g})")
        print(f"audit        mu at least {found.lower_mu:.4g}, {sure}% confidence: "
              f"{found.missed} missed, {found.false_alarms} seen that were not there")  # fmt: skip
        print(f"note: this pattern reaches {found.reached:.1%} of the sensitivity accounted for; "
              f"two canaries' directions have a cosine of about {found.cosine:.2g}")  # fmt: skip
        if not found.holds:
            print("THE NOISE IS SMALLER THAN WHAT IS ACCOUNTED FOR")
    if not found.holds:
        raise typer.Exit(1)


@app.command("exposure")
def exposure(
    users: Annotated[
        Path, typer.Argument(help="Users' text: Parquet or TSV (.zst) with user_id, utterance.")
    ],
    config: Annotated[Path, typer.Option("--config", "-c", help="Settings of the run, TOML.")],
    holders: Annotated[str, typer.Option(help="Users who have a secret, by group.")] = "1,4,16",
    secrets: Annotated[int, typer.Option(help="Secrets of each group.")] = 5,
    repeats: Annotated[int, typer.Option(help="Times that a holder says it.")] = 4,
    references: Annotated[int, typer.Option(help="Random phrases that it is ranked among.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of both runs, and of the secrets.")] = 0,
    user_column: Annotated[str, typer.Option(help="Name of the column of ids.")] = "user_id",
    text_column: Annotated[str, typer.Option(help="Name of the column of text.")] = "utterance",
    as_json: Json = False,
) -> None:
    """Plant secrets among users, and rank them in the network by exposure.

    Trains twice with the settings of dlm federate, with noise and without, each a simulation that
    is kept nowhere. A secret is three random words after two known ones; its exposure is log2 of
    the phrases it is ranked among, over its rank.

    Example: dlm privacy exposure users.parquet --config run.toml --holders 1,16
    """
    import dataclasses

    from dlm.cli.paths import check_reads
    from dlm.errors import ConfigError
    from dlm.federated.exposure import measure
    from dlm.federated.settings import TrainingSettings
    from dlm.federated.users import UserDataset

    check_reads("USERS", users)
    check_reads("--config", config)
    try:
        counts = [int(part) for part in holders.split(",")]
    except ValueError:
        raise ConfigError(f"--holders is {holders!r}, not numbers as 1,4,16") from None
    settings = TrainingSettings.read(config)
    check_reads("data.vocabulary", settings.data.vocabulary)
    dataset = UserDataset.open(users, user_column=user_column, text_column=text_column)
    found = measure(
        settings, dataset, holders=counts, secrets=secrets, repeats=repeats,
        references=references, seed=seed, progress=_progress,
    )  # fmt: skip
    if as_json:
        _print_json(dataclasses.asdict(found))
        return
    print(f"exposure of secrets among {found.references} phrases, in bits: {found.most:.1f} ranks "
          f"first, {found.chance:.1f} is chance")  # fmt: skip
    print(f"{'holders':>8} {'no noise: mean':>16} {'first':>6} {found.mechanism + ': mean':>16} "
          f"{'first':>6}")  # fmt: skip
    for group in found.groups:
        cells = [f"{group.holders:>8}"]
        for bits in (group.plain, group.noised):
            first = sum(one >= found.most for one in bits)
            cells += [f"{sum(bits) / len(bits):>16.1f}", f"{f'{first}/{len(bits)}':>6}"]
        print(" ".join(cells))
    print(f"the run with noise: {found.statement}")


def _only_of_some(
    name: str,
    rounds: int,
    *,
    made_for: str | None = None,
    buffers: int | None = None,
    bands: int | None = None,
    error: str | None = None,
) -> None:
    """Refuses options that mean nothing for a mechanism, and values that are none."""
    from dlm.errors import ConfigError

    if name != "blt":
        for option, found in (("--made-for", made_for), ("--buffers", buffers), ("--error", error)):
            if found is not None:
                raise ConfigError(
                    f"{option} is {found} with {name}; it is for a BLT (--mechanism blt). The "
                    "bands of banded mechanisms are --bands"
                )
    elif buffers is not None and not 1 <= buffers <= MOST_BUFFERS:
        raise ConfigError(
            f"--buffers is {buffers}; a BLT of 1 to {MOST_BUFFERS} can be optimised, and 2 to 4 do"
        )
    if bands is not None:
        if name not in BANDED:
            raise ConfigError(f"--bands is {bands} with {name}; it is for {', '.join(BANDED)}")
        if not 1 <= bands <= rounds:
            raise ConfigError(f"--bands is {bands}; it must be 1 to the number of rounds, {rounds}")


def _blt_made_for(made_for: str, buffers: int | None, error: str) -> BltParameters:
    """The BLT that is optimised for ROUNDS,GAP,MAXPART."""
    from dlm.errors import ConfigError
    from dlm.federated.noise.blt import optimise_blt

    try:
        rounds, gap, max_part = (int(part) for part in made_for.split(","))
    except ValueError:
        raise ConfigError(
            f"--made-for is {made_for!r}, not ROUNDS,GAP,MAXPART as 2000,100,10"
        ) from None
    buffers = DEFAULT_BUFFERS if buffers is None else buffers
    return optimise_blt(rounds, gap, max_part, buffers=buffers, error=error)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_json(answer: dict[str, Any]) -> None:
    """JSON has no infinity: an infinite number is null there."""
    from dlm.federated.run_folder import finite

    print(json.dumps(finite(answer), indent=2))


def _check_plot(path: Path | None) -> None:
    """Refuses a figure that could not be written, before what it shows is computed."""
    from dlm.errors import ConfigError

    if path is None:
        return
    if path.suffix.lower() not in DRAWN:
        raise ConfigError(f"--plot is {path}; its name must end in {', '.join(DRAWN)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot is {path}, and there is no folder {path.parent}")
    _figure()


def _figure() -> Any:
    """pyplot, drawing to files alone."""
    from dlm.errors import ConfigError
    from dlm.extras import pip_install

    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as exc:
        command = pip_install(["matplotlib"])
        raise ConfigError(f"a plot needs matplotlib; run\n  {command}") from exc
    return pyplot


def _plot_errors(made: Mechanism, sensitivity: float, path: Path) -> None:
    import numpy as np

    pyplot = _figure()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(sensitivity * np.sqrt(made.prefix_variances()))
    axes.set(xlabel="round", ylabel="sensitivity x standard deviation", title=made.name)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)


def _plot_plan(made: NoisePlan, path: Path) -> None:
    pyplot = _figure()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([s.report_goal for s in made.considered], [s.rho for s in made.considered])
    axes.axhline(made.target_rho, linestyle=":", color="grey")
    axes.plot([made.chosen.report_goal], [made.chosen.rho], "o")
    axes.set(xlabel="report goal, noise in proportion", ylabel="zCDP rho", yscale="log")
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
