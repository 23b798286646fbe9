"""`dlm privacy mechanism`: the losses of a mechanism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import Json
from dlm.cli.privacy_options import (
    DEFAULT_BUFFERS,
    Bands,
    Buffers,
    Gap,
    MadeFor,
    MaxPart,
    MinSep,
    Plot,
    Rounds,
    Which,
    blt_made_for,
    gap_of,
    only_of_some,
    progress_line,
)
from dlm.cli.privacy_plots import check_plot, plot_errors
from dlm.units import counted

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

    A loss is the error of prefix sums. Mechanisms that need optimising are optimised for this
    participation, or for that of --made-for, and cached. --json has its parameters, too, such as
    the decays and scales of a BLT.

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
    if as_json:
        print_json(answer)
        return
    bound = "" if answer["sensitivity_exact"] else "  (upper bound)"
    print(
        f"{mechanism.value}, {counted(rounds, 'round')}, gap {gap}, "
        f"{counted(max_participations, 'participation')}"
    )
    print(f"RmsLoss      {answer['rms_loss']:.6g}")
    print(f"MaxLoss      {answer['max_loss']:.6g}")
    print(f"sensitivity  {answer['sensitivity']:.6g}{bound}")
    print(f"buffers      {answer['buffers']} of the model's size")
