"""The mechanisms of `noise` on a grid: the noise is an integer number of steps, added exactly.

The noise of a round is w_t = z_t + r_t: z_t are independent discrete Gaussian numbers; r_t is the
mechanism's row applied to earlier noise w, rounded. A tree adds integer noise to its nodes and
rounds their estimate afterwards. DESIGN.privacy.md, "Noise on a grid", derives the cost.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from dlm.errors import ConfigError, PrivacyError
from dlm.federated.keys import Key
from dlm.federated.noise.banded import BandMF
from dlm.federated.noise.blt import Blt
from dlm.federated.noise.discrete_gaussian import (
    LIMIT,
    Whole,
    draw_discrete,
    whole_deviation,
)
from dlm.federated.noise.kernels import STRIPS, blt_noise
from dlm.federated.noise.mechanism import Floats, GaussianMechanism, Mechanism
from dlm.federated.noise.toeplitz import BandedToeplitz
from dlm.federated.noise.tree import TreeAgg, TreeAggFull

_UNIT = 2.0**-53  # largest relative error of one operation in double precision
_BLOCK = 1 << 14  # numbers summed at a time, so that they stay in the cache


class DiscreteState(NamedTuple):
    """The state of a stream of discrete noise, after `round` rounds.

    `key` gives the draws of all later rounds, so it must stay secret. So must `buffers`, whose
    shapes are those of `DiscreteNoise.shapes`.
    """

    key: Key
    round: int
    buffers: tuple[npt.NDArray[Any], ...]

    def __repr__(self) -> str:
        return f"DiscreteState(round={self.round}, key and buffers not shown)"

    def __reduce__(self) -> NoReturn:
        raise PrivacyError(
            "a noise state with its key must not be saved; a checkpoint keeps the buffers only"
        )


class DiscreteNoise:
    """A mechanism on a grid; each subclass draws the noise of one family.

    Guarantees
        with a clip norm of `bound` steps, noise multiplier z and d numbers, the releases of all
        rounds are rho-zCDP with rho = (sensitivity + `added` / bound)^2 / (2 z^2), even if choices
        depend on earlier releases, unless a draw is refused (a probability below 2^-1000)
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self.mechanism = mechanism
        self.name, self.rounds = mechanism.name, mechanism.rounds
        self.restarts = mechanism.restarts

    def init(self, key: Key, size: int) -> DiscreteState:
        return DiscreteState(key, 0, self._first(size))

    def step(
        self, state: DiscreteState, parts: Sequence[tuple[int, float]]
    ) -> tuple[Whole, DiscreteState]:
        """Returns (int64 noise of this round's sum, in steps; the state after the round). Pure.

        Args    parts         (count of numbers, standard deviation of the numbers' draws in steps)
        Raises  PrivacyError  a round after the last; noise beyond 64 bits or the bound on rounding
        """
        now = state.round
        if now >= self.rounds:
            raise PrivacyError(
                f"round {now} has no noise: {self.name} was made for {self.rounds} rounds. Make "
                "the mechanism for all rounds of the run"
            )
        fresh = [
            draw_discrete(
                state.key.fold(now, part),
                [(count, whole_deviation(deviation * scale)) for count, deviation in parts],
            )
            for part, scale in enumerate(self._scales(now))
        ]
        limit = self.limit(max(deviation for _, deviation in parts))
        noise, buffers = self.advance(now, fresh, state.buffers, limit)
        return noise, DiscreteState(state.key, now + 1, buffers)

    def limit(self, deviation: float) -> float:
        """Returns a bound, in steps, on all numbers in the noise and the buffers: a weighted sum of
        draws exceeds `LIMIT` times its standard deviation with a probability below exp(-2048)."""
        return LIMIT * self._gain * (deviation + self.rounds + 2 * STRIPS)

    @functools.cached_property
    def _gain(self) -> float:
        """A bound on the deviation of numbers in noise or buffers, as a multiple of a draw's. Each
        number is a difference of two running sums, or a decaying average of such differences."""
        return 2 * math.sqrt(float(np.max(self.mechanism.prefix_variances())))

    def added(self, size: int, deviation: float) -> float:
        """Returns the steps that rounding adds to the sensitivity: 2 kappa sqrt(size s), where s is
        the sum of squares of C's diagonal. `deviation` is the largest deviation of the draws."""
        return 2 * self.kappa(deviation) * math.sqrt(size * self._diagonal_squares())

    def kappa(self, deviation: float) -> float:
        """Returns the largest rounding error, in steps, of a round's noise; 0 without rounding."""
        return 0.0

    def shapes(self, done: int, size: int) -> list[tuple[int, ...]]:
        """The buffers' shapes after `done` rounds."""
        raise NotImplementedError

    def advance(
        self,
        now: int,
        fresh: Sequence[Whole],
        buffers: tuple[npt.NDArray[Any], ...],
        limit: float,
    ) -> tuple[Whole, tuple[npt.NDArray[Any], ...]]:
        """Returns (noise of round `now`, the buffers after this round) from the round's draws."""
        raise NotImplementedError

    def _first(self, size: int) -> tuple[npt.NDArray[Any], ...]:
        return tuple(np.zeros(shape, np.int64) for shape in self.shapes(0, size))

    def _scales(self, now: int) -> list[float]:
        """Returns the factor of the deviation for each set of a round's draws."""
        return [1.0]

    def _diagonal_squares(self) -> float:
        return 0.0


class IndependentNoise(DiscreteNoise):
    def shapes(self, done: int, size: int) -> list[tuple[int, ...]]:
        return []

    def advance(
        self,
        now: int,
        fresh: Sequence[Whole],
        buffers: tuple[npt.NDArray[Any], ...],
        limit: float,
    ) -> tuple[Whole, tuple[npt.NDArray[Any], ...]]:
        return fresh[0], buffers


class TreeNoise(DiscreteNoise):
    """Adds integer noise to the nodes of trees, and releases rounded estimates from noisy nodes.

    For a node of height h, `TreeAgg` estimates N / (2^(h+1) - 1), where N adds 2^h times the node's
    noise to the N of both halves. Since a node's sum is an integer, the rounded estimate depends
    only on noisy nodes: rounding comes after the noise and costs no privacy.
    """

    def __init__(self, mechanism: TreeAgg) -> None:
        super().__init__(mechanism)
        self._starts = np.array([0, *mechanism.restarts])

    def shapes(self, done: int, size: int) -> list[tuple[int, ...]]:
        """Returns one shape per set bit of the number of rounds since the last restart."""
        return [(size,)] * self._count(done).bit_count()

    def limit(self, deviation: float) -> float:
        """Like `DiscreteNoise.limit`, but bounds N: the estimate at height h times 2^(h+1) - 1."""
        levels = self.rounds.bit_length()
        limit = LIMIT * (deviation + 2 * STRIPS) * levels * 2.0 ** (levels - 1)
        if limit >= 2.0**61:
            raise PrivacyError(
                f"the nodes of a tree of {self.rounds} rounds with draws of {deviation:.3g} steps "
                "do not fit in 64 bits: lower the noise multiplier"
            )
        return limit

    def advance(
        self,
        now: int,
        fresh: Sequence[Whole],
        buffers: tuple[npt.NDArray[Any], ...],
        limit: float,
    ) -> tuple[Whole, tuple[npt.NDArray[Any], ...]]:
        """The buffers hold the N of each complete tree, smallest tree first."""
        held = list(buffers)
        node, level = fresh[0], 0
        gone = np.zeros_like(node)
        for own in fresh[1:]:
            left = held.pop(0)
            gone += _estimate(left, level)
            level += 1
            node = (own << level) + left + node
        last = now + 1 in self.restarts
        return _estimate(node, level) - gone, () if last else (node, *held)

    def _scales(self, now: int) -> list[float]:
        return [1.0] * (1 + _trailing_ones(self._count(now)))

    def _count(self, now: int) -> int:
        return now - int(self._starts[np.searchsorted(self._starts, now, side="right") - 1])


def _trailing_ones(count: int) -> int:
    return ((count + 1) & -(count + 1)).bit_length() - 1


def _estimate(node: Whole, level: int) -> Whole:
    if level == 0:
        return node
    over = (2 << level) - 1
    return np.floor_divide(node + over // 2, over)


class WeightedNoise(DiscreteNoise):
    """Noise of banded matrices and full trees: fresh draws plus weighted sums of kept rows. The
    draws' deviation is divided by `diagonal` (rounds,), the diagonal of C."""

    def __init__(self, mechanism: Mechanism, diagonal: Floats, *, slack: float) -> None:
        super().__init__(mechanism)
        self._diagonal, self._slack = diagonal, slack

    def kappa(self, deviation: float) -> float:
        """Returns half a step plus the rounding errors of one product and one sum per weight."""
        sizes = [np.abs(self.weights(now)) for now in range(self.rounds)]
        wrong = max((len(size) + 3 + self._slack) * float(size.sum()) for size in sizes)
        return 0.5 + wrong * _UNIT * self.limit(deviation) * 1.01

    def weights(self, now: int) -> Floats:
        """The weights of the rows kept at the start of round `now`."""
        raise NotImplementedError

    def _scales(self, now: int) -> list[float]:
        return [1.0 / float(self._diagonal[now])]

    def _diagonal_squares(self) -> float:
        return float(np.sum(self._diagonal**2))

    def _added_up(self, now: int, fresh: Whole, rows: Sequence[Whole], limit: float) -> Whole:
        noise = np.empty_like(fresh)
        weights = self.weights(now)
        product = np.empty(min(_BLOCK, len(fresh)))
        for begin in range(0, len(fresh), _BLOCK):
            part = slice(begin, begin + _BLOCK)
            sums = np.zeros(len(fresh[part]))
            one = product[: len(sums)]
            for row, weight in zip(rows, weights, strict=True):
                np.multiply(row[part], weight, out=one)
                sums += one
            noise[part] = fresh[part] + np.rint(sums).astype(np.int64)
        _check_size(noise, limit)
        return noise


class BandedNoise(WeightedNoise):
    """Noise of banded matrices, which keeps the noise of earlier rounds, latest first."""

    def __init__(self, mechanism: BandedToeplitz | BandMF) -> None:
        self._rows = (
            mechanism.rows
            if isinstance(mechanism, BandMF)
            else np.broadcast_to(mechanism.coefs, (mechanism.rounds, len(mechanism.coefs)))
        )
        super().__init__(mechanism, self._rows[:, 0], slack=1)

    def weights(self, now: int) -> Floats:
        """-C[t, t - 1] / C[t, t], -C[t, t - 2] / C[t, t], ..."""
        row = self._rows[now]
        return np.asarray(-row[1 : now + 1] / row[0])

    def shapes(self, done: int, size: int) -> list[tuple[int, ...]]:
        return [(size,)] * min(done, self._rows.shape[1] - 1)

    def advance(
        self,
        now: int,
        fresh: Sequence[Whole],
        buffers: tuple[npt.NDArray[Any], ...],
        limit: float,
    ) -> tuple[Whole, tuple[npt.NDArray[Any], ...]]:
        noise = self._added_up(now, fresh[0], buffers, limit)
        return noise, (noise, *buffers)[: self._rows.shape[1] - 1]


class FullTreeNoise(WeightedNoise):
    """Noise of `TreeAggFull`, which keeps noise sums of complete left halves, smallest first."""

    def __init__(self, mechanism: TreeAggFull) -> None:
        spread, self._pull, self._place = mechanism.conditionals()
        super().__init__(mechanism, 1 / spread, slack=64)

    def weights(self, now: int) -> Floats:
        return np.asarray(self._pull[now][_digits(int(self._place[now]))])

    def shapes(self, done: int, size: int) -> list[tuple[int, ...]]:
        """Returns one shape per set bit of the number of rounds done in the current tree."""
        if done >= self.rounds:
            return []
        return [(size,)] * int(self._place[done]).bit_count()

    def advance(
        self,
        now: int,
        fresh: Sequence[Whole],
        buffers: tuple[npt.NDArray[Any], ...],
        limit: float,
    ) -> tuple[Whole, tuple[npt.NDArray[Any], ...]]:
        noise = self._added_up(now, fresh[0], buffers, limit)
        if now + 1 >= self.rounds or self._place[now + 1] == 0:  # the tree is complete
            return noise, ()
        carried = _trailing_ones(int(self._place[now]))
        total = noise + sum(buffers[:carried])
        return noise, (total, *buffers[carried:])


def _digits(count: int) -> list[int]:
    return [bit for bit in range(count.bit_length()) if count >> bit & 1]


class BltNoise(DiscreteNoise):
    """Noise of a BLT: buffers in double precision, updated with the released noise."""

    def __init__(self, mechanism: Blt) -> None:
        super().__init__(mechanism)
        self._decay = np.array(mechanism.parameters.decay)
        self._scale = np.array(mechanism.parameters.scale)

    def kappa(self, deviation: float) -> float:
        """Adds up half a step and the rounding errors of the buffers and of the buffers' sum.

        Each round adds an error of at most 4 * 2^-53 of a buffer's largest size, and earlier errors
        decay. Errors are not fed back, since the buffers add the released noise.
        """
        unit = _UNIT * self.limit(deviation)
        with np.errstate(divide="ignore"):
            rounds = np.minimum(self.rounds, 1 / (1 - self._decay))
        gathered = float(np.sum(self._scale * rounds)) * 4
        return 0.5 + (gathered + (len(self._scale) + 2) * float(self._scale.sum())) * unit * 1.01

    def shapes(self, done: int, size: int) -> list[tuple[int, ...]]:
        return [(len(self._decay), size)]

    def advance(
        self,
        now: int,
        fresh: Sequence[Whole],
        buffers: tuple[npt.NDArray[Any], ...],
        limit: float,
    ) -> tuple[Whole, tuple[npt.NDArray[Any], ...]]:
        (held,) = buffers
        noise, after = np.empty_like(fresh[0]), np.empty_like(held)
        largest = blt_noise(fresh[0], held, self._decay, self._scale, noise, after)
        _check_limit(largest, limit)
        return noise, (after,)

    def _first(self, size: int) -> tuple[npt.NDArray[Any], ...]:
        return (np.zeros((len(self._decay), size)),)

    def _diagonal_squares(self) -> float:
        return float(self.rounds)


def _check_size(noise: Whole, limit: float) -> None:
    if len(noise):
        _check_limit(max(float(noise.max()), -float(noise.min())), limit)


def _check_limit(largest: float, limit: float) -> None:
    if largest > limit:
        raise PrivacyError(
            f"noise of {largest:.3g} steps exceeds {limit:.3g}, above which rounding errors "
            "are unbounded. By chance this has probability 2^-1000: it is a bug in dlm; report it"
        )


def discrete(mechanism: Mechanism) -> DiscreteNoise:
    if isinstance(mechanism, GaussianMechanism):
        return IndependentNoise(mechanism)
    if isinstance(mechanism, TreeAgg):
        return TreeNoise(mechanism)
    if isinstance(mechanism, TreeAggFull):
        return FullTreeNoise(mechanism)
    if isinstance(mechanism, BandedToeplitz | BandMF):
        return BandedNoise(mechanism)
    if isinstance(mechanism, Blt):
        return BltNoise(mechanism)
    raise ConfigError(
        f"the mechanism {mechanism.name} has no discrete noise; use another mechanism"
    )
