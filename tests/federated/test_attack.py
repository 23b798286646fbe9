"""What released numbers give away of the grid that they are on (Mironov 2012).

Whoever knows the sums with and without one user asks of each number that a round released whether
any draw makes it of the sum without. One that none makes tells that the user is there, whatever
epsilon says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
jnp = jax.numpy

from dlm.federated.fixed_point import GRID_BITS, steps_per_unit  # noqa: E402
from dlm.federated.keys import Key  # noqa: E402
from dlm.federated.noise.blt import Blt, BltParameters  # noqa: E402
from dlm.federated.noise.discrete import discrete  # noqa: E402
from dlm.federated.noise.mechanism import GaussianMechanism  # noqa: E402
from dlm.federated.training.engine import LocalEngine, RoundSums  # noqa: E402
from dlm.federated.training.local import LocalConfig  # noqa: E402
from dlm.federated.training.rnn import RnnConfig  # noqa: E402
from dlm.federated.training.rounds import OptimizerConfig, ReleaseConfig, make_algorithm  # noqa: E402

SIZE = 1 << 16  # numbers that a round releases
GOAL = 100.0  # users of a round
CLIP = 1.0
UNIT = steps_per_unit(CLIP, GRID_BITS)
# The user sends the same in each coordinate, of norm CLIP in all, cut to the grid as updates are.
OWN = np.floor(CLIP / np.sqrt(SIZE) * UNIT) / UNIT
OTHERS = 0.0
Released = NDArray[np.float32]


class Sent(LocalEngine):
    """Sums that are given, on the grid: what devices computed is not looked at here."""

    def __init__(self, value: float) -> None:
        super().__init__(RnnConfig(5, 2, 2), LocalConfig(), bits=GRID_BITS)
        self.value = value

    def sums(self, params: Any, *_: Any) -> RoundSums:
        zero = jnp.float32(0.0)
        total = jax.tree.map(lambda leaf: np.full(leaf.shape, self.value), params)
        return RoundSums(total, zero, GOAL, *[zero] * 5)


def first_round(mechanism: Any, value: float, size: int, key: Any) -> Released:
    """A model of zeros after one round of these sums: what is published."""
    rounds = make_algorithm(
        ReleaseConfig(CLIP, 1.0, GOAL),
        OptimizerConfig("sgd", 1.0),
        Sent(value),
        mechanism,
        simulation=False,
    )
    state = rounds.init(jnp.zeros(size, jnp.float32), key)
    return np.asarray(rounds.apply(state, ["a cohort"])[0].params)


def impossible_on_grid(released: Released, value: float) -> float:
    """Share of released numbers that no whole step near by makes of this sum."""
    steps = np.rint(released.astype(np.float64) * UNIT * GOAL - value * UNIT)
    found = np.zeros(len(released), bool)
    for near in (-1, 0, 1):
        found |= ((steps + near + value * UNIT) / (UNIT * GOAL)).astype(np.float32) == released
    return float(np.mean(~found))


MECHANISMS = {"gaussian": GaussianMechanism(1), "blt": Blt(1, BltParameters((0.9,), (0.5,)))}


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_attack_finds_nothing_under_discrete_noise(name: str) -> None:
    """Every number could come of both sums."""
    noise = discrete(MECHANISMS[name])
    released = first_round(noise, OTHERS + OWN, SIZE, Key.from_seed(3))
    assert len(np.unique(released)) > 0.9 * SIZE
    assert impossible_on_grid(released, OTHERS + OWN) == 0.0
    assert impossible_on_grid(released, OTHERS) == 0.0
    # What is asked can be answered with yes: numbers off the grid are found out.
    off = released + np.float32(0.5 / (UNIT * GOAL))
    fine = np.abs(released) < 2.0**20 / (UNIT * GOAL)
    if fine.any():
        assert impossible_on_grid(off[fine], OTHERS) > 0.9


def test_what_is_released_of_neighbours_weighs_as_accounted_for() -> None:
    """The likelihoods of a round's whole steps, with and without the user: rho, and no more."""
    noise = discrete(GaussianMechanism(1))
    state = noise.init(Key.from_seed(5), SIZE)
    drawn, _ = noise.step(state, [(SIZE, CLIP * UNIT)])
    own = OWN * UNIT
    loss = float(np.sum((drawn + own) ** 2 - drawn.astype(np.float64) ** 2)) / (2 * UNIT**2)
    rho = 0.5
    assert abs(loss - rho) < 5 * np.sqrt(2 * rho)
