"""The linear map from independent draws to released noise, of any mechanism.

The stream is fed large unit vectors in place of draws: what it releases in round t is then row t of
that map, through the very recursion that training uses; what it rounds away is 2^-32 of a unit.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dlm.federated.keys import Key
from dlm.federated.noise.discrete import discrete
from dlm.federated.noise.mechanism import Mechanism

PARTS = 16  # draws that a round may take
UNIT = 2.0**32


def linear_map(mechanism: Mechanism) -> NDArray[np.float64]:
    """(rounds, rounds * PARTS): released noise of each round, by draw."""
    noise = discrete(mechanism)
    width = mechanism.rounds * PARTS
    buffers = noise.init(Key.from_seed(0), width).buffers
    rows = []
    for now in range(mechanism.rounds):
        fresh = []
        for part, scale in enumerate(noise._scales(now)):
            draw = np.zeros(width, np.int64)
            draw[now * PARTS + part] = round(UNIT * scale)
            fresh.append(draw)
        row, buffers = noise.advance(now, fresh, buffers, math.inf)
        rows.append(row / UNIT)
    return np.stack(rows)


def distance(rows: NDArray[np.float64], covariance: NDArray[np.float64]) -> float:
    """How far samples are from a covariance that is claimed for them: the worst, in sigmas.

    They are whitened by what is claimed; then squares of rounds are chi-squared and products of
    rounds uncorrelated, and each mean is compared with its spread.
    """
    rounds, size = rows.shape
    white = np.linalg.solve(np.linalg.cholesky(covariance), rows)
    found = white @ white.T / size - np.eye(rounds)
    return float(np.abs(found / np.sqrt((1 + np.eye(rounds)) / size)).max())


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
