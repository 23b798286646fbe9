"""`dlm privacy exposure`: planted secrets, ranked in the network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlm.cli.privacy_options import (
    Json,
    print_json,
    progress_line,
)


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
        references=references, seed=seed, progress=progress_line,
    )  # fmt: skip
    if as_json:
        print_json(dataclasses.asdict(found))
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
