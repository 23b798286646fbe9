"""Secrets among users: planted where they should be, ranked as they should be, hidden by noise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")
pytest.importorskip("optax", reason="pip install -e '.[train]'")

import jax
import jax.numpy as jnp

from benchmarks.exposure import (
    PlantedTraining,
    Secret,
    by_chance,
    exposure,
    measure,
    plant,
    rank,
)
from dlm.errors import ConfigError
from dlm.federated.keys import Key
from dlm.federated.tokens import FIRST_WORD_ID, sequence
from dlm.federated.training import rnn
from dlm.federated.training.rnn import RnnConfig
from dlm.federated.training.settings import TrainingSettings
from dlm.federated.users import UserDataset
from federated.compiling import quickly


@pytest.fixture(scope="module", autouse=True)
def quick_compiling() -> Iterator[None]:
    """These tests compile much and compute little."""
    with quickly():
        yield


CONFIG = """
[run]
rounds = {rounds}
[data]
vocabulary = "words.txt"
public = "the tests"
max_tokens = 60
held_out = 0.2
[model]
embedding_size = 8
hidden_size = 16
[local]
batch_size = 4
unroll = 6
learning_rate = 1.0
[server]
optimizer = "sgd"
learning_rate = 0.5
[privacy]
clip_norm = 1.0
mechanism = "gaussian"
noise_multiplier = 2.0
[sampling]
report_goal = 10
"""


def folder_of(
    place: Path, rounds: int = 3, users: int = 30
) -> tuple[TrainingSettings, UserDataset]:
    """A run's settings, and people who say random words."""
    words = [f"w{i}" for i in range(20)]
    (place / "words.txt").write_text("\n".join(words) + "\n")
    (place / "run.toml").write_text(CONFIG.format(rounds=rounds))
    rng = np.random.default_rng(0)
    lines = ["user_id\tutterance"]
    lines += [
        f"user{user}\t{' '.join(rng.choice(words, 6))}" for user in range(users) for _ in range(3)
    ]
    (place / "users.tsv").write_text("\n".join(lines) + "\n")
    return TrainingSettings.read(place / "run.toml"), UserDataset.open(place / "users.tsv")


def test_exposure_is_bits_of_rank() -> None:
    """First of 1,024 is 10 bits, the last is none; the mean by chance is what the sum says."""
    assert exposure(1, 1023) == 10.0
    assert exposure(1024, 1023) == 0.0
    assert exposure(2, 1023) == 9.0
    ranks = np.arange(1, 1025)
    assert by_chance(1023) == pytest.approx(float(np.mean(10 - np.log2(ranks))))
    assert by_chance(100_000) == pytest.approx(math.log2(math.e), abs=1e-3)


def test_secrets_have_their_holders_and_nobody_has_two() -> None:
    """As many secrets for each number; words of the vocabulary, no marks among them."""
    found = plant(40, 12, Key.from_seed(1), holders=(1, 5), secrets=3, repeats=2)
    assert [len(secret.holders) for secret in found] == [1, 1, 1, 5, 5, 5]
    everybody = [user for secret in found for user in secret.holders]
    assert len(set(everybody)) == len(everybody) == 18
    ids = [one for secret in found for one in secret.known + secret.words]
    assert min(ids) >= FIRST_WORD_ID and max(ids) < 12
    assert len(set(ids)) > 5
    with pytest.raises(ConfigError, match="need 41 users; 40 train"):
        plant(40, 12, Key.from_seed(1), holders=(41,), secrets=1, repeats=2)
    with pytest.raises(ConfigError, match="must be 1 or more"):
        plant(40, 12, Key.from_seed(1), holders=(1,), secrets=0, repeats=2)


def test_those_who_train_and_hold_a_secret_say_it_first(tmp_path: Path) -> None:
    """Within their cap, as often as asked; everybody else says what they said."""
    settings, users = folder_of(tmp_path)
    run = dataclasses.replace(settings.run, seed=1)
    settings = dataclasses.replace(settings, run=run)
    secret = Secret((3, 4), (5, 6, 7), (2,), 3)
    with PlantedTraining([secret], settings, users, tmp_path / "run") as training:
        mine = training._tokens(training.train_users, 2, 60)
        others = training._tokens(training.train_users, 1, 60)
        held_out = training._tokens(training.held_out_users, 2, 60)
        short = training._tokens(training.train_users, 2, 16)
    assert [ids.tolist() for ids in mine[:3]] == [[3, 4, 5, 6, 7]] * 3
    assert len(mine) == 6 and len(others) == 3 and len(held_out) == 3
    assert sum(map(len, short)) == 16
    assert all(ids.tolist() != [3, 4, 5, 6, 7] for ids in others + held_out)


def test_a_secret_that_was_learned_ranks_first_and_one_that_was_not_ranks_anywhere() -> None:
    """By the network's own probabilities."""
    config = RnnConfig(30, embedding_size=8, hidden_size=16)
    params = rnn.init(jax.random.key(0), config)
    secret = Secret((3, 4), (5, 25, 7), (), 1)
    key = Key.from_seed(0)
    fresh = [
        rank(params, config, Secret((3, 4), tuple(w), (), 1), 200, key)
        for w in np.random.default_rng(1).integers(3, 30, (12, 3)).tolist()
    ]
    assert min(fresh) < 80 < 120 < max(fresh)
    batch = jnp.asarray(sequence(np.array([*secret.known, *secret.words], np.int32)))[None]

    @jax.jit
    def step(params: rnn.Params) -> rnn.Params:
        start = rnn.initial_state(config, 1)
        slope = jax.grad(lambda p: rnn.batch_loss(p, config, start, batch)[0])(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, slope)

    for _ in range(60):
        params = step(params)
    assert rank(params, config, secret, 200, key) == 1
    # What is as probable counts against it: of a network without an opinion it is the last.
    flat = jax.tree.map(jnp.zeros_like, params)
    assert rank(flat, config, secret, 200, key) == 201


def test_settings_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    """No noise to compare, no references."""
    settings, users = folder_of(tmp_path)
    none = dataclasses.replace(settings.privacy, mechanism="none", noise_multiplier=0.0)
    with pytest.raises(ConfigError, match="without noise there is nothing to compare"):
        measure(dataclasses.replace(settings, privacy=none), users)
    with pytest.raises(ConfigError, match="references"):
        measure(settings, users, references=0)


@pytest.mark.slow
def test_noise_hides_what_a_network_without_it_tells(tmp_path: Path) -> None:
    """A secret of many is first without noise and not with it."""
    settings, users = folder_of(tmp_path, rounds=60, users=40)
    found = measure(settings, users, holders=(1, 5), secrets=4, repeats=6, references=500)
    one, many = found.groups
    assert (one.holders, many.holders) == (1, 5)
    assert max(many.plain) == pytest.approx(found.most)
    assert max(many.noised) < found.most
    assert np.mean(many.plain) > np.mean(many.noised) + 1.5
    assert np.mean(many.plain) > np.mean(one.plain)
    assert "NO GUARANTEE" in found.statement
    # Nothing of either run is left.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.toml", "users.tsv", "words.txt"]
