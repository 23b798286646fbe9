"""Canaries planted in whole runs: what accounting promises they do not beat, and noise that is too
small they find out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np
import pytest

pytest.importorskip("jax", reason="pip install -e '.[train]'")

import jax
import jax.numpy as jnp
from scipy import stats

from dlm.federated.account.compose import StageRecord
from dlm.federated.account.zcdp import noise_for
from dlm.federated.devices.encoding import SecureAggregator
from dlm.federated.fixed_point import GRID_BITS
from dlm.federated.keys import Key
from dlm.federated.noise import make_mechanism
from dlm.federated.noise.discrete import discrete
from dlm.federated.training import clip
from dlm.federated.training.clip import Array
from dlm.federated.training.engine import LocalEngine
from dlm.federated.training.local import LocalConfig, UserUpdate, UserWork
from dlm.federated.training.rnn import RnnConfig
from dlm.federated.training.rounds import OptimizerConfig, grid_release, make_algorithm
from dlm.federated.training.settings import PrivacySettings
from federated.linear import linear_map

GOAL = 100


class CanaryEngine(LocalEngine):
    """Devices that send a direction, longer than the clip norm, instead of an update; all else is
    as in training."""

    def _update_of(self, params: Any, batches: Array, used: Array, bound: Array) -> UserUpdate:
        sent = jax.tree.map(lambda leaf: 2 * bound * leaf, direction(batches.ravel()[:2], params))
        found = clip.clip(self._config.clip_kind, sent, bound)
        none = jnp.float32(0.0)
        return UserUpdate(found.update, found.norm, found.finite, none, none)


def direction(name: Array, template: Any) -> Any:
    """The unit vector that a canary's two numbers stand for, equally long in every array."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), name[0]), name[1])
    leaves, tree = jax.tree.flatten(template)
    drawn = [
        jax.random.normal(jax.random.fold_in(key, place), leaf.shape, jnp.float32)
        for place, leaf in enumerate(leaves)
    ]
    share = 1 / math.sqrt(len(leaves))
    return jax.tree.unflatten(tree, [share * leaf / jnp.linalg.norm(leaf) for leaf in drawn])


class Auditor:
    """Runs whose users are canaries, of which each is in the earliest permitted rounds or in none.

    An observer of every release then guesses who took part; its errors bound mu of Gaussian
    differential privacy from below, accounting bounds it from above.

    Args  omitted  share of the noise that is accounted for and not added
    """

    def __init__(
        self,
        mechanism: str = "blt",
        rounds: int = 24,
        gap: int = 8,
        max_participations: int = 3,
        *,
        secure: bool = False,
        kind: Literal["flat", "per_layer"] = "flat",
        omitted: float = 0.0,
    ) -> None:
        made = make_mechanism(
            mechanism, rounds=rounds, gap=gap, max_participations=max_participations
        )
        sensitivity = made.sensitivity(gap=gap, max_participations=max_participations)
        multiplier = noise_for(sensitivity, 1.0)
        release = PrivacySettings(0.5, mechanism, multiplier).release(float(GOAL))
        # A device that encodes for secure aggregation takes its time.
        self.rounds, self.canaries = rounds, 250 if secure else 1_000
        self.parameters = 10 * self.canaries  # so that directions are nearly orthogonal
        third = self.parameters // 3
        shapes = {"a": (third,), "b": (third, 1), "c": (self.parameters - 2 * third,)}
        self._template = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        aggregator = SecureAggregator(0.5, 1e3, self.canaries) if secure else None
        local = LocalConfig(batch_size=1, unroll=1, clip_kind=kind)
        network = RnnConfig(4, embedding_size=2, hidden_size=2)  # which no canary evaluates
        engine = CanaryEngine(network, local, aggregator=aggregator, bits=GRID_BITS)
        drawn = discrete(made)
        self._aggregation = Key.from_seed(0)
        added = dataclasses.replace(
            release, noise_multiplier=release.noise_multiplier * (1 - omitted)
        )
        self._algorithm = make_algorithm(
            added,
            OptimizerConfig("sgd", 1.0),  # releases are then the differences of successive models
            engine,
            drawn,
            simulation=False,
            aggregation_key=lambda index: self._aggregation.fold(index),
        )
        self._scale = release.denominator
        self._pattern = [gap * place for place in range(max_participations)]
        released = linear_map(made)
        self._weights = np.linalg.inv(released @ released.T)[:, self._pattern].sum(1)
        self._along = jax.jit(_along)
        rounding = grid_release(release, engine, drawn).factor(self.parameters, sensitivity)
        rho = StageRecord(
            "audit",
            mechanism,
            release.update_multiplier(),
            rounds,
            gap,
            max_participations,
            sensitivity=sensitivity,
            norm_inflation=engine.sensitivity_factor(self.parameters),
            matrix=made.matrix(),
            rounding=rounding,
        ).rho
        self.upper = math.sqrt(2 * rho)

    def lower(self, seed: int) -> float:
        """The bound on mu that one run shows, with confidence 0.95."""
        root = Key.from_seed(seed)
        self._aggregation = root.fold("aggregation")
        coins = root.fold("coins").uniforms(self.canaries) < 0.5
        names = np.stack([np.arange(self.canaries), np.full(self.canaries, seed)], 1).astype("i4")
        here = [UserWork(name.reshape(1, 1, 2), 1.0) for name in names[coins]]
        state = self._algorithm.init(self._template, root.fold("noise"))
        seen = {name: np.zeros(leaf.shape) for name, leaf in self._template.items()}
        for index in range(self.rounds):
            before = state.params
            state, told = self._algorithm.apply(state, here if index in self._pattern else [])
            scale = self._weights[index] * self._scale / told.clip_norm
            for name, after in state.params.items():
                seen[name] += scale * (np.asarray(after, "f8") - np.asarray(before[name], "f8"))
        plain = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in seen.items()}
        scores = np.asarray(self._along(plain, jnp.asarray(names)), np.float64)
        guessed = scores >= self._weights[self._pattern].sum() / 2
        missed, alarms = int((coins & ~guessed).sum()), int((~coins & guessed).sum())
        return lower_mu(missed, int(coins.sum()), alarms, int((~coins).sum()))


def _along(seen: Any, names: Array) -> Array:
    """(canaries,) of what was seen along each canary's direction."""

    def one(name: Array) -> Array:
        parts = jax.tree.map(jnp.vdot, seen, direction(name, seen))
        return jnp.asarray(sum(jax.tree.leaves(parts)))

    return jax.lax.map(one, names)


def lower_mu(
    missed: int, present: int, alarms: int, absent: int, confidence: float = 0.95
) -> float:
    """A lower bound on mu, from the errors of a test that was fixed before anything was seen.

    Under mu of Gaussian DP every test has 1 - misses <= Phi(mu - Phi^-1(1 - alarms)) (Dong, Roth
    and Su 2019, definition 2.6); each rate has an exact upper bound (Clopper and Pearson 1934).
    """
    top = 1 - (1 - confidence) / 2
    rates = [
        stats.beta.ppf(top, errors + 1, trials - errors) if errors < trials else 1.0
        for errors, trials in ((missed, present), (alarms, absent))
    ]
    return max(float(stats.norm.isf(rates[1]) - stats.norm.ppf(rates[0])), 0.0)


@pytest.mark.slow
def test_eight_audits_bear_accounting_out_and_eight_find_half_of_the_noise() -> None:
    """At rho 1 with 1,000 canaries: valid, near the truth, and never fooled."""
    honest, lying = Auditor(), Auditor(omitted=0.5)
    lower = np.array([honest.lower(seed) for seed in range(8)])
    assert (lower > honest.upper).sum() <= 1
    assert np.median(lower) >= 0.75 * honest.upper
    assert all(lying.lower(seed) > lying.upper for seed in range(8))
    assert lying.upper == honest.upper == pytest.approx(math.sqrt(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mechanism", "more"),
    [
        ("gaussian", {"rounds": 6, "gap": 1, "max_participations": 6}),
        ("bandmf", {}),
        ("tree-full", {}),
        ("tree", {}),
        ("blt", {}),
        ("blt", {"secure": True}),
        ("blt", {"kind": "per_layer"}),
    ],
)
def test_every_way_that_noise_is_made_is_audited(mechanism: str, more: dict[str, Any]) -> None:
    """Mechanisms, secure aggregation, clipping by layers."""
    least = 0.35 if "secure" in more else 0.55 if mechanism == "tree" else 0.65
    auditor = Auditor(mechanism, **more)
    assert least * auditor.upper < auditor.lower(0) <= auditor.upper
    assert Auditor(mechanism, **more, omitted=0.5).lower(0) > auditor.upper
