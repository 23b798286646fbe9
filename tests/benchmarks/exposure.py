"""How well a trained network remembers single users, by the exposure of planted secrets.

    python tests/benchmarks/exposure.py users.parquet --config run.toml [--holders 1 4 16]

It measures one attack on a few secrets; it is not a bound. It trains twice, with the settings'
noise and without, as simulations in a temporary folder.

A secret is a few random words after a prefix that the attacker knows. Its rank is its place by
probability among random phrases of the same length; exposure is log2 of their number over that
rank. The exposure of a secret that was not learned is 1.4 on average.

Paper  Carlini et al. 2019, sections 4.2 and 4.4 (rank in a sample); Thakkar et al. 2021 for the
       number of users who hold one
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm.errors import ConfigError
from dlm.federated.keys import Key
from dlm.federated.tokens import FIRST_WORD_ID, Ids, sequence
from dlm.federated.training import rnn
from dlm.federated.training.clip import Array
from dlm.federated.training.settings import TrainingSettings
from dlm.federated.training.train import Training
from dlm.federated.users import UserDataset
from dlm.files import scratch_folder

KNOWN, LENGTH, REFERENCES = 2, 3, 1_000
BATCH = 200


@dataclass(frozen=True)
class Secret:
    """A phrase and the users who say it.

    Fields
        known    ids of its first words, which the attacker knows
        words    ids of the others
        holders  places of users among those who train
        repeats  utterances of it per holder
    """

    known: tuple[int, ...]
    words: tuple[int, ...]
    holders: tuple[int, ...]
    repeats: int

    def utterances(self) -> list[Ids]:
        """What it adds to a holder's text."""
        return [np.array(self.known + self.words, np.int32)] * self.repeats


@dataclass(frozen=True)
class Group:
    """Secrets with the same number of holders each.

    Fields
        holders        users who have one
        plain, noised  exposure of each secret, in bits, in the two networks
    """

    holders: int
    plain: tuple[float, ...]
    noised: tuple[float, ...]


@dataclass(frozen=True)
class Exposure:
    """How much two networks remember.

    Fields
        most      exposure of a secret that ranks first, in bits
        chance    mean exposure of secrets that were not learned
        groups    by rising number of holders
        rounds    that both were trained for
    """

    references: int
    repeats: int
    most: float
    chance: float
    groups: tuple[Group, ...]
    mechanism: str
    rounds: int
    statement: str


class PlantedTraining(Training):
    """A run in which some users say a secret before their own text. Its model is not kept."""

    def __init__(
        self, secrets: Sequence[Secret], settings: TrainingSettings, *args: Any, **named: Any
    ) -> None:
        self._planted: dict[int, list[Ids]] = {}
        for secret in secrets:
            for user in secret.holders:
                self._planted.setdefault(user, []).extend(secret.utterances())
        super().__init__(settings, *args, **named)

    def _tokens(self, users: UserDataset, user: int, cap: int) -> list[Ids]:
        if users is not self.train_users:
            return super()._tokens(users, user, cap)
        planted = self._planted.get(user, [])
        return planted + super()._tokens(users, user, max(cap - sum(map(len, planted)), 0))


def plant(
    users: int,
    vocab_size: int,
    key: Key,
    *,
    holders: Sequence[int],
    secrets: int,
    repeats: int,
    known: int = KNOWN,
    length: int = LENGTH,
) -> list[Secret]:
    """`secrets` phrases of random words for each number in `holders`; no user holds two.

    Raises
        ConfigError  more holders than users
    """
    needed = secrets * sum(holders)
    if min(secrets, repeats, known, length, *holders) < 1:
        raise ConfigError("the numbers of secrets, holders, repeats and words must be 1 or more")
    if needed > users:
        raise ConfigError(
            f"{secrets} secrets for each of {', '.join(map(str, holders))} holders need {needed} "
            f"users; {users} train. Use fewer secrets, or more users"
        )
    order = np.argsort(key.fold("holders").uniforms(users), kind="stable")
    drawn = key.fold("words").uniforms(secrets * len(holders) * (known + length))
    words = FIRST_WORD_ID + (drawn * (vocab_size - FIRST_WORD_ID)).astype(np.int64)
    phrases = iter(words.reshape(-1, known + length).tolist())
    found, at = [], 0
    for count in holders:
        for _ in range(secrets):
            phrase = next(phrases)
            who = tuple(sorted(order[at : at + count].tolist()))
            found.append(Secret(tuple(phrase[:known]), tuple(phrase[known:]), who, repeats))
            at += count
    return found


def rank(
    params: rnn.Params, config: rnn.RnnConfig, secret: Secret, references: int, key: Key
) -> int:
    """Rank of a secret, from 1, among random phrases and itself; a tie counts as a worse rank."""
    length = len(secret.words)
    drawn = key.uniforms(references * length).reshape(-1, length)
    words = FIRST_WORD_ID + (drawn * (config.vocab_size - FIRST_WORD_ID)).astype(np.int64)
    phrases = np.concatenate([np.array([secret.words]), words])
    rows = np.stack([sequence(np.array([*secret.known, *phrase], np.int32)) for phrase in phrases])
    rows = np.concatenate([rows, np.repeat(rows[:1], -len(rows) % BATCH, axis=0)])
    scores = np.concatenate(
        [
            np.asarray(_ln_probability(params, config, rows[at : at + BATCH], len(secret.known)))
            for at in range(0, len(rows), BATCH)
        ]
    )[: references + 1]
    return 1 + int(np.sum(scores[1:] >= scores[0]))


@partial(jax.jit, static_argnums=(1, 3))
def _ln_probability(params: rnn.Params, config: rnn.RnnConfig, rows: Array, known: int) -> Array:
    """(rows,) ln P of the words after the known ones, without the end."""
    ln = rnn.ln_probabilities(rnn.apply(params, config, rows[:, :-1]))
    chosen = jnp.take_along_axis(ln, rows[:, 1:, None], axis=-1)[..., 0]
    return chosen[:, known:-1].sum(1)


def exposure(place: int, references: int) -> float:
    """Exposure, in bits, of a rank among `references` phrases and the secret itself."""
    return math.log2(references + 1) - math.log2(place)


def by_chance(references: int) -> float:
    """Mean exposure when every rank is equally likely."""
    return float(np.mean([exposure(place, references) for place in range(1, references + 2)]))


def measure(
    settings: TrainingSettings,
    users: UserDataset,
    *,
    holders: Sequence[int] = (1, 4, 16),
    secrets: int = 5,
    repeats: int = 4,
    references: int = REFERENCES,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> Exposure:
    """Exposure of secrets after training with the settings' noise, and without noise.

    Both networks are simulations in a temporary folder, which is deleted afterwards.

    Raises
        ConfigError  settings without noise; too few users, references or words
    """
    if settings.privacy.mechanism == "none":
        raise ConfigError("privacy.mechanism is none: without noise there is nothing to compare")
    if references < 1:
        raise ConfigError(f"{references} references are too few to rank a secret; use {REFERENCES}")
    run = dataclasses.replace(
        settings.run, seed=seed, evaluate_every=0, checkpoint_every=settings.run.rounds
    )
    privacy = dataclasses.replace(settings.privacy, mechanism="none", noise_multiplier=0.0)
    noised = dataclasses.replace(settings, run=run)
    plain = dataclasses.replace(noised, privacy=dataclasses.replace(privacy, adaptive=False))
    key = Key.from_seed(seed).fold("secrets")
    there = len(users.split(settings.data.held_out)[0])
    counts = sorted(set(holders))
    planted: list[Secret] = []
    found: dict[str, list[float]] = {}
    statement = ""
    for name, given in (("noised", noised), ("plain", plain)):
        with scratch_folder(None, "dlm-exposure") as folder:
            place = folder / "run"
            progress(f"{name}: {given.run.rounds} rounds with {given.privacy.mechanism}")
            if not planted:
                planted = _plant(given, users, place, there, counts, secrets, repeats, key)
            with PlantedTraining(planted, given, users, place, progress=progress) as training:
                for done in training.run():
                    if (done.diagnostics.round + 1) % max(given.run.rounds // 5, 1) == 0:
                        progress(f"{name}: round {done.diagnostics.round + 1}")
                params, config = training.state.params, training.model
                if name == "noised":
                    statement = training.report().statement()
            found[name] = [
                exposure(
                    rank(params, config, secret, references, key.fold("references", number)),
                    references,
                )
                for number, secret in enumerate(planted)
            ]
    groups = tuple(
        Group(
            count,
            tuple(found["plain"][at * secrets : (at + 1) * secrets]),
            tuple(found["noised"][at * secrets : (at + 1) * secrets]),
        )
        for at, count in enumerate(counts)
    )
    return Exposure(
        references, repeats, exposure(1, references), by_chance(references), groups,
        settings.privacy.mechanism, settings.run.rounds, statement,
    )  # fmt: skip


def _plant(
    settings: TrainingSettings,
    users: UserDataset,
    place: Path,
    there: int,
    holders: Sequence[int],
    secrets: int,
    repeats: int,
    key: Key,
) -> list[Secret]:
    """Secrets of words of the run's vocabulary; its size is read from a run without secrets."""
    with PlantedTraining([], settings, users, place.with_name("vocabulary")) as training:
        size = training.model.vocab_size
    return plant(there, size, key, holders=holders, secrets=secrets, repeats=repeats)


def main() -> None:
    """Prints the exposures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("users", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--holders", type=int, nargs="+", default=[1, 4, 16])
    for name, default in (("secrets", 5), ("repeats", 4), ("references", REFERENCES), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args())
    settings, users = TrainingSettings.read(given.pop("config")), given.pop("users")
    found = measure(
        settings,
        UserDataset.open(users),
        progress=lambda line: print(line, file=sys.stderr),
        **given,
    )
    print(json.dumps(dataclasses.asdict(found), indent=1))


if __name__ == "__main__":
    main()
