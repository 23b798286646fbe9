"""`dlm privacy audit`: a lower bound on what gets through the noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import Json
from dlm.cli.privacy_options import (
    progress_line,
)
from dlm.units import counted


def audit(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="TOML file with the settings of dlm federate."),
    ],
    canaries: Annotated[
        int, typer.Option(help="Canary users, each present with probability 1/2.")
    ] = 1_000,
    parameters: Annotated[
        int, typer.Option(help="Parameters of the model; at least 10 per canary.")
    ] = 16_384,
    confidence: Annotated[float, typer.Option(help="Confidence of the lower bound.")] = 0.95,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of all random draws.  [default: the system's randomness]"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="JSON file to write the results to."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Audit a run's noise with canary users.

    Prints a lower bound on mu beside the upper bound from accounting. Each canary sends its own
    direction through the code that handles users' updates, in the worst participation pattern; the
    audit then looks for that direction in everything a run releases. The settings give the number
    of rounds. No text is read, and nothing is kept. Exits with 1 if the lower bound exceeds the
    upper one, since the noise is then smaller than accounted for.

    Examples:
        dlm privacy audit run.toml
        dlm privacy audit run.toml --canaries 200 --json
    """
    from dlm.cli.paths import check_reads, check_writes
    from dlm.federated.audit import Auditor
    from dlm.federated.keys import Key
    from dlm.federated.settings import TrainingSettings
    from dlm.files import write_whole

    check_reads("CONFIG", config)
    check_writes("--output", output)
    settings = TrainingSettings.read(config)
    made = Auditor(settings, canaries=canaries, parameters=parameters, progress=progress_line)
    key = None if seed is None else Key.from_seed(seed)
    found = made.run(key, confidence=confidence)
    answer = found.to_dict()
    if output is not None:
        write_whole(output, (json.dumps(answer, indent=1) + "\n").encode())
    if as_json:
        print_json(answer)
    else:
        shown = ", ".join(map(str, found.pattern[:8]))
        more = f" and {len(found.pattern) - 8} more" if len(found.pattern) > 8 else ""
        print(f"{found.mechanism}, {counted(found.rounds, 'round')}, gap {found.gap}, "
              f"at most {found.max_participations} participations")  # fmt: skip
        print(f"canaries     {found.present} of {found.canaries} present, in rounds {shown}{more}")
        sure = f"{100 * found.confidence:.10g}"  # with the digits that were given
        print(f"accounting   mu at most {found.upper_mu:.4g} (zCDP rho {found.rho:.4g})")
        print(f"audit        mu at least {found.lower_mu:.4g}, {sure}% confidence: "
              f"{found.missed} missed, {found.false_alarms} false alarms")  # fmt: skip
        print(f"note: this pattern reaches {found.reached:.1%} of the sensitivity accounted for; "
              f"two canaries' directions have a cosine of about {found.cosine:.2g}")  # fmt: skip
        if not found.holds:
            print("THE NOISE IS SMALLER THAN ACCOUNTED FOR")
    if not found.holds:
        raise typer.Exit(1)
