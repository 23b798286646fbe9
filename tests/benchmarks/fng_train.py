"""The networks of the experiment: words or wordpieces, with and without noise, of several sizes.

**The privacy figures are of a simulation**, as in `learning.py`: 45 users stand for 1,000, so that
the noise of a round is that of 1,000 users divided by 1,000, and a seed makes it.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fng_data import CAP, LanguageFiles

ROUNDS, USERS, GAP, MOST = 200, 45, 40, 5
STANDS_FOR = 1_000
RHO = 1.0
KEPT_AT = (25, 50, 100, 200)  # rounds whose network is kept, for Figure 5
# Of devices and of the server, whose momentum is 0.9. Portuguese users say much the same, so that
# their updates add up; at the rates of the English ones they diverge after three rounds.
RATES = {"en": (2.0, 2.0), "pt": (1.0, 1.0)}


@dataclass(frozen=True)
class Network:
    """A network and how it is trained.

    Fields
        pieces        of wordpieces; of words if not
        noise         a BLT's, rho-zCDP
        central       trained on the text of all users in one place, for so many steps, and then in
                      no round that counts; 0 for federated
        most_tokens   of a user: as many words' worth in either
    """

    name: str
    title: str
    embedding: int = 48
    hidden: int = 96
    pieces: bool = False
    noise: bool = False
    central: int = 0
    most_tokens: int = CAP
    local: dict[str, Any] = field(default_factory=dict)


NETWORKS = {
    network.name: network
    for network in (
        Network("words", "words"),
        Network("words-dp", "words, noise", noise=True),
        Network("pieces", "wordpieces", pieces=True, most_tokens=2 * CAP),
        Network("pieces-dp", "wordpieces, noise", pieces=True, noise=True, most_tokens=2 * CAP),
        Network("words-small", "words, small", embedding=24, hidden=48),
        Network("words-large", "words, large", embedding=96, hidden=192),
        Network("central", "words, trained in one place", embedding=64, hidden=160, central=8_000),
    )
}


def noise_multiplier() -> float:
    """Of rho-zCDP, if as many users came as these stand for, scaled."""
    from dlm.federated.noise import make_mechanism

    built = make_mechanism("blt", rounds=ROUNDS, gap=GAP, max_participations=MOST)
    return (
        built.sensitivity(gap=GAP, max_participations=MOST)
        / math.sqrt(2 * RHO)
        * USERS
        / STANDS_FOR
    )


def settings_text(network: Network, files: LanguageFiles) -> str:
    """The run as TOML."""
    device, server = RATES[files.folder.name]
    tables: dict[str, dict[str, Any]] = {
        "run": {"rounds": ROUNDS, "seed": 0, "checkpoint_every": 25, "evaluate_every": 0},
        "data": {
            "vocabulary": str(files.pieces if network.pieces else files.words),
            "max_tokens": network.most_tokens,
            "held_out": 0.0,
        },
        "model": {"embedding_size": network.embedding, "hidden_size": network.hidden},
        "local": {"learning_rate": device, "packing": "stream", "batch_size": 8, "unroll": 20},
        "server": {"optimizer": "momentum", "learning_rate": server, "momentum": 0.9},
        "privacy": {"gap": GAP, "max_participations": MOST, "clip_norm": 1.0},
        "sampling": {"report_goal": USERS},
    }
    if network.noise:
        tables["privacy"] |= {"mechanism": "blt", "noise_multiplier": noise_multiplier()}
    if network.central:
        # One round that moves nothing: a run is of rounds, and this network learnt before it.
        tables["run"] |= {"rounds": 1, "checkpoint_every": 1}
        tables["local"]["learning_rate"] = tables["server"]["learning_rate"] = 1e-6
        tables["privacy"] = {"clip_norm": 1.0}
        tables["sampling"] = {"report_goal": 1}
        tables["pretrain"] = {
            "text": str(files.text), "steps": network.central, "batch_size": 32, "unroll": 20,
        }  # fmt: skip
    lines = []
    for name, values in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def kept(run: Path, rounds: int) -> Path:
    """The network of a run after so many rounds."""
    return run / f"round-{rounds}.dlmfed"


def train(network: Network, files: LanguageFiles) -> dict[str, Any]:
    """Trains a network as `dlm federate` does; goes on with one that was begun."""
    from dlm.checkpoint import CHECKPOINT
    from dlm.federated.training.settings import TrainingSettings
    from dlm.federated.training.train import RoundReport
    from dlm.federated.training.train_network import train_network
    from dlm.federated.training.trained import load_model
    from dlm.federated.users import UserDataset

    run = files.run(network.name)
    run.parent.mkdir(parents=True, exist_ok=True)
    file = run.parent / f"{network.name}.toml"
    file.write_text(settings_text(network, files), encoding="utf-8")
    losses = []

    def on_round(done: RoundReport) -> None:
        line = done.line()
        rounds = line["round"] + 1
        losses.append(line["not_private"]["mean_ln_prob"])
        if rounds in KEPT_AT and not network.central:
            shutil.copyfile(run / CHECKPOINT, kept(run, rounds))
            print(f"{run.name}, round {rounds}: {-losses[-1]:.3f} nats", flush=True)

    train_network(
        lambda store: UserDataset.open(files.train, store=store),
        TrainingSettings.read(file, environ={}),
        run,
        on_round=on_round,
    )
    import jax

    model = load_model(run)
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params)),
        "ids": model.network.vocab_size,
    }
