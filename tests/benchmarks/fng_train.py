"""Networks of the evidence, trained in simulations.

**The privacy figures are of a simulation.** 45 users stand for 1,000: the noise of a round is that
of 1,000 users divided by 1,000, and a seed makes it, so that a run gives no privacy.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.fng_data import CAP, LanguageFiles

Tables = dict[str, dict[str, Any]]

USERS, STANDS_FOR = 45, 1_000
ROUNDS, GAP, MOST = 120, 20, 6  # of FNG's networks
KEPT_AT = (15, 30, 60, 120)  # rounds whose network is judged, for FNG Figure 5
# Of the server, whose momentum is 0.9. Portuguese users say much the same, so that their updates
# add up: at the rate of the English ones they diverge.
RATES = {"en": 2.0, "pt": 1.0, "ru": 1.0}
# Networks of words or of wordpieces, without noise or with a BLT's of 1-zCDP.
NETWORKS = ("words", "words, noise", "wordpieces")


@cache
def noise_for(rho: float, mechanism: str, rounds: int, gap: int, most: int, **more: Any) -> float:
    """Noise multiplier that gives rho-zCDP if as many users came as these stand for, scaled. For a
    BLT, `participations` says for how many it is optimised."""
    built = _made(mechanism, rounds=rounds, gap=gap, max_participations=most, **more)
    sensitivity = built.sensitivity(gap=gap, max_participations=most)
    return float(sensitivity / math.sqrt(2 * rho) * USERS / STANDS_FOR)


def _made(
    name: str,
    *,
    rounds: int,
    gap: int,
    max_participations: int,
    participations: int = 0,
    **more: Any,
) -> Any:
    from dlm.federated.noise import make_mechanism

    if participations == 1:
        gap, max_participations = rounds, 1
    return make_mechanism(
        name, rounds=rounds, gap=gap, max_participations=max_participations, **more
    )


def _value(value: Any) -> str:
    return "inf" if value == math.inf else json.dumps(value)


def toml(tables: Tables) -> str:
    """Settings of a run."""
    lines = []
    for name, values in tables.items():
        lines += [f"[{name}]", *(f"{k} = {_value(v)}" for k, v in values.items())]
    return "\n".join(lines) + "\n"


def merged(common: Tables, more: Tables) -> Tables:
    """Settings, and those that differ."""
    return {name: {**common.get(name, {}), **more.get(name, {})} for name in {**common, **more}}


def fng_tables(network: str, files: LanguageFiles, seed: int) -> Tables:
    """Settings of one of `NETWORKS`."""
    pieces = network == "wordpieces"
    tables: Tables = {
        "run": {"rounds": ROUNDS, "seed": seed, "checkpoint_every": 15, "evaluate_every": 0},
        "data": {
            "vocabulary": str(files.pieces if pieces else files.words),
            "max_tokens": 2 * CAP if pieces else CAP,  # as many words' worth
            "held_out": 0.0,
        },
        "model": {"embedding_size": 48, "hidden_size": 96},
        "local": {"learning_rate": 1.0, "packing": "stream", "batch_size": 16, "unroll": 10},
        "server": {
            "optimizer": "momentum",
            "learning_rate": RATES[files.folder.name],
            "momentum": 0.9,
        },
        "privacy": {"gap": GAP, "max_participations": MOST, "clip_norm": 1.0},
        "sampling": {"report_goal": USERS},
    }
    if network == "words, noise":
        tables["privacy"] |= {
            "mechanism": "blt",
            "noise_multiplier": noise_for(1.0, "blt", ROUNDS, GAP, MOST),
        }
    return tables


def train(
    run: Path, tables: Tables, users_file: Path, stops: Iterable[int], *, participations: int = 0
) -> Iterator[int]:
    """Trains a network as `dlm federate` does, or goes on with one that was begun.

    Args
        stops           rounds, ascending, after which the network in the folder `run` is looked at
        participations  for how many a BLT is optimised, whatever is allowed; 0 for these
    Yields
        each of `stops`, also those that the network has passed
    """
    from dlm.federated.training.settings import TrainingSettings
    from dlm.federated.training.train import Training
    from dlm.federated.users import UserDataset

    run.parent.mkdir(parents=True, exist_ok=True)
    file = run.with_name(f"{run.name}.toml")
    file.write_text(toml(tables), encoding="utf-8")
    settings = TrainingSettings.read(file, environ={})
    users = UserDataset.open(users_file, store=users_file.with_suffix(".store"))
    made = partial(_made, participations=participations)
    with (
        mock.patch("dlm.federated.training.train.make_mechanism", made),
        Training(settings, users, run) as training,
    ):
        for stop in stops:
            deque(training.run(until=stop), maxlen=0)
            yield stop
