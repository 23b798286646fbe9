"""`dlm privacy account`: the guarantee that noise gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm.cli.checks import check_bounds, integers_of, numbers_of, parsed, within
from dlm.cli.options import Json
from dlm.cli.output import print_answer
from dlm.cli.privacy_options import (
    AS_PUBLISHED,
    AS_REPORTED,
    Bands,
    Buffers,
    Delta,
    Gap,
    MadeFor,
    MinSep,
    Rounds,
    Which,
    blt_made_for,
    gap_of,
    only_of_some,
    progress_line,
)
from dlm.config import Setting
from dlm.errors import ConfigError
from dlm.units import counted

if TYPE_CHECKING:
    from dlm.federated.noise.blt import BltParameters


NUMBERS = "numbers such as 0.9,0.4"


def account(
    mechanism: Which,
    noise_multiplier: Annotated[
        float,
        typer.Option(help="Standard deviation of the independent noise, divided by the clip norm."),
        within(low=0),
    ],
    rounds: Rounds,
    delta: Delta,
    gap: Gap = None,
    min_separation: MinSep = None,
    max_participations: Annotated[
        int | None, typer.Option(help="Maximum participations per user.")
    ] = None,
    sampling_probability: Annotated[
        str | None,
        typer.Option(
            metavar="P",
            help="Instead of limits on participation: the probability that a user is sampled in a "
            "round (Poisson sampling), such as 0.01 or 5000/763430; gaussian only.",
        ),
    ] = None,
    made_for: MadeFor = None,
    buffers: Buffers = None,
    bands: Bands = None,
    decay: Annotated[
        str | None,
        typer.Option(
            metavar="X,...",
            help="Decays of the buffers of a BLT that was made elsewhere, with --scale.",
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(metavar="X,...", help="Output scales of the buffers given by --decay."),
    ] = None,
    coefficients: Annotated[
        str | None,
        typer.Option(
            metavar="X,...", help="First column of a bandtoep matrix that was made elsewhere."
        ),
    ] = None,
    restarts: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Rounds before which a new tree begins; tree only."),
    ] = None,
    column_norm: Annotated[
        float | None,
        typer.Option(
            help="Column norm of the bandmf, bandtoep or bandfhu matrix that a published noise "
            "multiplier refers to; dlm's matrices have 1."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute the guarantee of a mechanism's noise: zCDP and epsilon.

    The first epsilon is the one a run reports, since its noise is discrete Gaussian; it holds
    for every mechanism with that rho. The epsilon of exact Gaussian noise, which the papers print,
    is smaller.

    The default BLT is the one of BLT Table 4 made for the nearest gap (100, 400 or 1,000 rounds);
    use --made-for to account for the BLT you ran, or --decay and --scale if you know its buffers. A
    run's report prints the command for each of its stages. With --sampling-probability, cohorts are
    Poisson-sampled, and epsilon is printed as a run reports it, by two current accountants, and by
    the moments accountant of DP-FedAvg's tables. Use --column-norm for a noise multiplier published
    with a matrix whose column norm is not 1.

    Examples:
        dlm privacy account --mechanism tree --noise-multiplier 7 --rounds 930 \\
            --min-separation 212 --max-participations 4 --delta 1e-10
        dlm privacy account --mechanism gaussian --noise-multiplier 1 --rounds 5000 \\
            --sampling-probability 5000/763430 --delta 1e-9
    """
    from dlm.federated.account.answers import guarantee_of, sampled_guarantee_of, sensitivity_of

    if sampling_probability is not None:
        others = (gap, min_separation, max_participations, made_for, buffers, bands, decay, scale,
            coefficients,
                  restarts, column_norm)  # fmt: skip
        if any(given is not None for given in others):
            raise ConfigError(
                "--sampling-probability replaces --gap, --min-separation, --max-participations, "
                "--column-norm and all options that describe a matrix; leave these out"
            )
        probability = parsed(
            "--sampling-probability",
            sampling_probability,
            _probability,
            "a number such as 0.01 or 5000/763430",
        )
        check_bounds("--sampling-probability", probability, bounds=Setting(above=0, high=1))
        answer = sampled_guarantee_of(
            mechanism.value,
            probability,
            noise_multiplier=noise_multiplier,
            rounds=rounds,
            delta=delta,
        )
        print_answer(answer, _of_sampled(answer), as_json=as_json)
        return
    if (gap is None and min_separation is None) or max_participations is None:
        raise ConfigError(
            "no limit on participation was given; give --gap (or --min-separation) and "
            "--max-participations, or --sampling-probability for Poisson-sampled cohorts"
        )
    if mechanism.value == "blt" and buffers is not None and made_for is None:
        raise ConfigError(
            f"--buffers is {buffers} without --made-for, but the default BLT (from Table 4 of the "
            "BLT paper) has the published number of buffers. Give both options, or neither"
        )
    gap = gap_of(gap, min_separation)
    only_of_some(
        mechanism.value, rounds, made_for=made_for, buffers=buffers, bands=bands, decay=decay,
        scale=scale, coefficients=coefficients, restarts=restarts,
    )  # fmt: skip
    if coefficients is not None and bands is not None:
        raise ConfigError(
            "--bands and --coefficients were both given, but the number of coefficients is the "
            "number of bands; give one of the two"
        )
    found = sensitivity_of(
        mechanism.value,
        rounds,
        gap,
        max_participations,
        blt=_blt(made_for, buffers, decay, scale),
        bands=bands,
        coefficients=None
        if coefficients is None
        else parsed("--coefficients", coefficients, numbers_of, NUMBERS),
        restarts=() if restarts is None else parsed("--restarts", restarts, integers_of, NUMBERS),
        column_norm=1.0 if column_norm is None else column_norm,
        progress=progress_line,
    )
    answer = guarantee_of(
        mechanism.value,
        found,
        noise_multiplier=noise_multiplier,
        rounds=rounds,
        gap=gap,
        max_participations=max_participations,
        delta=delta,
    )
    fit = f"n={rounds} gap={gap} k={max_participations}"
    if mechanism.value == "blt" and made_for is decay is None and found.made_for != fit:
        answer["notes"].append(
            f"this BLT was made for {found.made_for}; if the run's was made for its own "
            f"participation, give --made-for {rounds},{gap},{max_participations}"
        )
    made = f" ({found.made_for})" if found.made_for else ""
    lines = [
        f"{mechanism.value}{made}, {counted(rounds, 'round')}, gap {gap}, "
        f"{max_participations} participations, "
        f"noise multiplier {noise_multiplier:g}",
        f"sensitivity  {found.value:.6g}{'' if found.is_exact else '  (upper bound)'}",
        f"zCDP rho     {answer['rho']:.6g}",
        f"epsilon      {answer['epsilon']:.6g}  at delta {delta:g}, {AS_REPORTED}",
        f"             {answer['epsilon_gaussian']:.6g}  {AS_PUBLISHED}",
        *(f"note: {note}" for note in answer["notes"]),
    ]
    print_answer(answer, lines, as_json=as_json)


def _blt(
    made_for: str | None, buffers: int | None, decay: str | None, scale: str | None
) -> BltParameters | None:
    """The BLT made for a participation, or the one with given buffers; None if neither is given."""
    if (decay is None) != (scale is None):
        raise ConfigError("--decay and --scale describe the same buffers; give both or neither")
    if made_for is not None:
        if decay is not None:
            raise ConfigError("--made-for and --decay each describe a BLT; give one of them")
        return blt_made_for(made_for, buffers, "max")
    if decay is None or scale is None:
        return None
    from dlm.federated.noise.blt import BltParameters

    return BltParameters(
        parsed("--decay", decay, numbers_of, NUMBERS), parsed("--scale", scale, numbers_of, NUMBERS)
    )


def _of_sampled(answer: dict[str, Any]) -> list[str]:
    return [
        f"{answer['mechanism']}, {counted(answer['rounds'], 'round')}, Poisson-sampled with "
        f"probability {answer['sampling_probability']:.6g}, "
        f"noise multiplier {answer['noise_multiplier']:g}",
        f"zCDP rho     {answer['rho']:.6g}  without amplification",
        f"epsilon      {answer['epsilon']:.6g}  at delta {answer['delta']:g}, {AS_REPORTED}",
        f"             {answer['epsilon_pld']:.6g}  {AS_PUBLISHED} (PLD)",
        f"             {answer['epsilon_rdp']:.6g}  the same, by Renyi DP (RDP)",
        f"             {answer['epsilon_moments']:.6g}  by the moments accountant of DP-FedAvg",
        *(f"note: {note}" for note in answer["notes"]),
    ]


def _probability(text: str) -> float:
    users, _, population = text.partition("/")
    return float(users) / float(population or 1)
