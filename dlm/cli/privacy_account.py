"""`dlm privacy account`: what noise guarantees."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from dlm.cli.privacy_options import (
    AS_REPORTED,
    AS_SIMULATED,
    Bands,
    Buffers,
    Delta,
    Gap,
    Json,
    MadeFor,
    MinSep,
    Rounds,
    Which,
    blt_made_for,
    gap_of,
    only_of_some,
    print_json,
    progress_line,
)


def account(
    mechanism: Which,
    noise_multiplier: Annotated[
        float, typer.Option(help="Standard deviation of the independent draws over the clip norm.")
    ],
    rounds: Rounds,
    delta: Delta,
    gap: Gap = None,
    min_sep: MinSep = None,
    max_part: Annotated[int | None, typer.Option(help="Most participations of one user.")] = None,
    sampling_probability: Annotated[
        str | None,
        typer.Option(
            help="Instead of these: each user was drawn by itself in each round with this "
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

    if not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
        raise ConfigError(
            f"--noise-multiplier is {noise_multiplier}; it must be a finite number, 0 or more"
        )
    if sampling_probability is not None:
        others = (gap, min_sep, max_part, made_for, buffers, bands, column_norm)
        if any(given is not None for given in others):
            raise ConfigError(
                "--sampling-probability is instead of --gap, --min-sep, --max-part, --made-for, "
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
    if (gap is None and min_sep is None) or max_part is None:
        raise ConfigError(
            "give --gap (or --min-sep) and --max-part, what separates a user's participations and "
            "how many they are; or --sampling-probability for Poisson-sampled cohorts"
        )
    if mechanism.value == "blt" and buffers is not None and made_for is None:
        raise ConfigError(
            f"--buffers is {buffers} without --made-for: the BLT accounted for is then one of BLT "
            "Table 4, whose buffers are published; give both, or neither"
        )
    gap = gap_of(gap, min_sep)
    only_of_some(mechanism.value, rounds, made_for=made_for, buffers=buffers, bands=bands)
    found = sensitivity_of(
        mechanism.value,
        rounds,
        gap,
        max_part,
        blt=None if made_for is None else blt_made_for(made_for, buffers, "max"),
        bands=bands,
        column_norm=1.0 if column_norm is None else column_norm,
        progress=progress_line,
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
        print_json(answer)
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
        print_json(answer)
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
