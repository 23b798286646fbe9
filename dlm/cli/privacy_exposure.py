"""`dlm privacy exposure`: planted secrets, ranked by the network."""

from __future__ import annotations

from typing import Annotated

import typer

from dlm.cli.json_output import print_json
from dlm.cli.options import Json, RunSettings, UserColumn, Users, UserTextColumn
from dlm.cli.privacy_options import (
    progress_line,
)


def exposure(
    users: Users,
    config: RunSettings,
    holders: Annotated[
        str, typer.Option(metavar="N,N,...", help="Number of users who hold a secret, per group.")
    ] = "1,4,16",
    secrets: Annotated[int, typer.Option(help="Secrets per group.")] = 5,
    repeats: Annotated[int, typer.Option(help="Times that each holder says the secret.")] = 4,
    references: Annotated[
        int, typer.Option(help="Random phrases to rank each secret among.")
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of both runs and of the secrets.")] = 0,
    user_column: UserColumn = "user_id",
    text_column: UserTextColumn = "utterance",
    as_json: Json = False,
) -> None:
    """Measure how much a network exposes planted secrets.

    Trains twice with the settings of dlm federate, with noise and without; both runs are simulated,
    and neither is kept. A secret is three random words after two known ones. Its exposure is log2
    of the number of phrases it is ranked among, divided by its rank.

    Examples:
        dlm privacy exposure users.parquet --config run.toml --holders 1,16
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
        raise ConfigError(f"--holders is {holders!r}; expected numbers such as 1,4,16") from None
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
    print(f"exposure of secrets among {found.references} phrases, in bits: {found.most:.1f} is "
          f"rank 1, {found.chance:.1f} is chance")  # fmt: skip
    print(f"{'holders':>8} {'no noise: mean':>16} {'first':>6} {found.mechanism + ': mean':>16} "
          f"{'first':>6}")  # fmt: skip
    for group in found.groups:
        cells = [f"{group.holders:>8}"]
        for bits in (group.plain, group.noised):
            first = sum(one >= found.most for one in bits)
            cells += [f"{sum(bits) / len(bits):>16.1f}", f"{f'{first}/{len(bits)}':>6}"]
        print(" ".join(cells))
    print(f"the run with noise: {found.statement}")
