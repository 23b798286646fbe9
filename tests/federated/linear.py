"""The linear map from independent draws to released noise, of any mechanism, exactly.

The stream is fed unit vectors in place of normal draws: what it releases in round t is then row t
of that map, through the very recursion that training uses.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from dlm.federated.noise import blt, gaussian, key_from_seed, toeplitz, tree
from dlm.federated.noise.mechanism import Base, NoiseState

MODULES = [blt, gaussian, toeplitz, tree]
PARTS = 16  # draws that a round may take


def linear_map(mechanism: Base, monkeypatch: pytest.MonkeyPatch) -> NDArray[np.float64]:
    """(rounds, rounds * PARTS): released noise of each round, by draw."""
    width = mechanism.rounds * PARTS

    def unit(state: NoiseState, part: int | jax.Array = 0) -> jax.Array:
        return jax.nn.one_hot(state.round * PARTS + part, width, dtype=jnp.float32)

    for module in MODULES:
        monkeypatch.setattr(module, "draw", unit)
    state = mechanism.init(key_from_seed(0), jnp.zeros(width))
    step = jax.jit(mechanism.step)
    rows = []
    for _ in range(mechanism.rounds):
        noise, state = step(state)
        rows.append(np.asarray(noise, np.float64))
    return np.stack(rows)


def dense_toeplitz(coefs: NDArray[np.float64], rounds: int) -> NDArray[np.float64]:
    """C from its first column."""
    full = np.zeros(rounds)
    full[: min(len(coefs), rounds)] = coefs[:rounds]
    return np.array(
        [[full[t - s] if t >= s else 0.0 for s in range(rounds)] for t in range(rounds)]
    )


def node_matrix(rounds: int) -> NDArray[np.float64]:
    """C of tree aggregation: a row for each complete node, ones at its rounds."""
    rows = []
    for size in (1 << level for level in range(rounds.bit_length())):
        start = 0
        for block in (1 << bit for bit in range(rounds.bit_length() - 1, -1, -1)):
            if rounds & block:
                for first in range(start, start + block, size):
                    if size <= block:
                        row = np.zeros(rounds)
                        row[first : first + size] = 1
                        rows.append(row)
                start += block
    return np.array(rows)
