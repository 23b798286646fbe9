"""`dlm privacy plan`: what to run for a target."""

from __future__ import annotations

from typing import Annotated

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import Json
from dlm.cli.privacy_options import (
    AS_PUBLISHED,
    AS_REPORTED,
    SIMULATED,
    Delta,
    Name,
    Plot,
    Rounds,
    Which,
)
from dlm.cli.privacy_plots import check_plot, plot_plan
from dlm.units import counted


def plan(
    population: Annotated[int, typer.Option(help="Number of users who can take part.")],
    rounds: Rounds,
    delta: Delta = 1e-10,
    target_rho: Annotated[float | None, typer.Option(help="Target zCDP rho.")] = None,
    target_epsilon: Annotated[
        float | None, typer.Option(help="Or target epsilon, as a run reports it.")
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
        float | None, typer.Option(help="Minutes per round, to compute the timer.")
    ] = None,
    mechanism: Which = Name.tree,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Find what to run for a target: report goal, noise and timer.

    The method is GDP section 2.5. A mechanism is compared with itself: a tree, independent noise,
    or the BLT of BLT Table 4 that was made for a gap of 400. Banded mechanisms are excluded, since
    their bands, and so the noise they tolerate, change with the gap. If no report goal meets the
    target, the command says so first and exits with 1.

    Examples:
        dlm privacy plan --population 4000000 --rounds 2000 --target-rho 0.5 \\
            --round-minutes 4
    """
    from dlm.errors import ConfigError
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
    if as_json:
        import dataclasses

        print_json({"mechanism": mechanism.value, **dataclasses.asdict(made)})
        if not made.keeps_utility:
            raise typer.Exit(1)
        return
    chosen = made.chosen
    if not made.keeps_utility:
        print("NOT MET: the target needs more noise than a simulation that learned well had. No "
              "simulation shows that a run with this plan learns")  # fmt: skip
    print(f"target        zCDP rho {target_rho:.4g}, {mechanism.value}, {counted(rounds, 'round')}")
    print(f"report goal   {counted(chosen.report_goal, 'user')} per round")
    print(f"noise         multiplier {chosen.noise_multiplier:.4g}")
    print(f"separation    gap {chosen.gap} (MinS {chosen.min_separation}), at most "
          f"{chosen.max_participations} participations")  # fmt: skip
    if made.timer_hours is not None:
        print(f"timer         {made.timer_hours:g} hours")
    what = "guarantee   " if made.keeps_utility else "would cost  "
    print(f"{what}  rho {chosen.rho:.4g}, epsilon {chosen.epsilon:.4g} at delta {delta:g}, "
          f"{AS_REPORTED}")  # fmt: skip
    print(f"              epsilon {chosen.epsilon_gaussian:.4g} {AS_PUBLISHED}")
    for note in made.notes:
        print(f"note: {note}")
    if not made.keeps_utility:
        raise typer.Exit(1)
