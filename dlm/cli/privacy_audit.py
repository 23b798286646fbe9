"""`dlm privacy audit`: a lower bound of what noise lets through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.privacy_options import (
    Json,
    print_json,
    progress_line,
)


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
