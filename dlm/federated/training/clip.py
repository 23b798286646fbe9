"""Limits how much one user can change a sum: clipping, weights, estimators, adaptive clip norms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from dlm.config import check, setting
from dlm.errors import PrivacyError

Array: TypeAlias = jax.Array
Tree = TypeVar("Tree")
ClipKind = Literal["flat", "per_layer"]

# A sum of squares is computed in float32, as a tree of sums of 128. Its relative error is below 3 *
# 128 * 2**-24, and the norm's error is below half of that; so updates are scaled to a little less
# than C, and their true norm is never above C.
_FANOUT = 128
MARGIN = 2.0**-16
# Squares of numbers below 1e-19 are 0 in float32, so an update that is too long may seem to have
# norm 0. With a clip norm from LEAST_NORM up, such losses do not matter for up to 10^13 numbers.
LEAST_NORM = 1e-12


class Clipped(NamedTuple):
    """A clipped update, and its L2 norm before clipping. If not `finite`, the update held inf or
    nan (or its norm is beyond float32): it was replaced by zeros, and `norm` is inf."""

    update: Any
    norm: Array
    finite: Array


def _sum_of_squares(leaf: Array) -> Array:
    values = jnp.square(leaf.astype(jnp.float32)).ravel()
    while values.size > 1:
        short = -values.size % _FANOUT
        values = jnp.pad(values, (0, short)).reshape(-1, _FANOUT).sum(-1)
    return values.reshape(())


def global_norm(tree: Any) -> Array:
    """Returns the L2 norm of all numbers in a tree; inf if the norm is not a finite float32."""
    squares = jnp.asarray(sum(_sum_of_squares(leaf) for leaf in jax.tree.leaves(tree)))
    return jnp.where(jnp.isfinite(squares), jnp.sqrt(squares), jnp.inf)


def _scale(norm: Array, bound: Array | float) -> Array:
    within = jnp.asarray(bound, jnp.float32) * (1.0 - MARGIN)
    return jnp.where(norm <= within, 1.0, within / jnp.maximum(norm, jnp.float32(1e-30)))


def clip_flat(update: Tree, bound: Array | float) -> Clipped:
    """Shortens the update to `bound` if it is longer: pi(update, S) of DPF equation 1.

    Guarantees   the norm of the result, in exact arithmetic, is at most `bound`
    Edge cases
        | update                            | result                            |
        | norm <= (1 - 2**-16) * bound      | unchanged, to the bit             |
        | norm 0                            | unchanged                         |
        | inf or nan anywhere               | zeros, `finite` False, norm inf   |
        | norm beyond float32 (> 1.8e19)    | zeros, `finite` False, norm inf   |
        | bound 0                           | zeros, except numbers below 1e-19|
        | bound below `LEAST_NORM`          | refused by `ReleaseConfig`        |
        | bound inf                         | unchanged, if finite              |
        | bound negative or nan             | refused by `ReleaseConfig`        |
    Paper        DPF 2, FlatClip
    """
    norm = global_norm(update)
    finite = jnp.isfinite(norm)
    factor = _scale(norm, bound)
    clipped = jax.tree.map(lambda leaf: jnp.where(finite, leaf * factor, 0.0), update)
    return Clipped(clipped, norm, finite)


def clip_per_layer(
    update: Tree, bound: Array | float, shares: Sequence[float] | None = None
) -> Clipped:
    """Shortens each array to its own bound; the bounds' squares add up to at most bound^2.

    `shares` has S_j / S for each array, in the order of `jax.tree.leaves`; None: 1 / sqrt(m) each.

    Guarantees   the norm of the result, in exact arithmetic, is at most `bound`
    Edge cases   as for `clip_flat`; one array that is not finite makes all of them zeros
    Raises       PrivacyError  not one share per array, or their squares add up to more than 1
    Paper        DPF 2, PerLayerClip
    """
    leaves, shape = jax.tree.flatten(update)
    given = [1.0 / math.sqrt(len(leaves))] * len(leaves) if shares is None else list(shares)
    if len(given) != len(leaves) or min(given) < 0 or sum(s * s for s in given) > 1.0 + 1e-9:
        raise PrivacyError(
            f"{len(given)} shares of the clip norm were given for {len(leaves)} arrays, with "
            f"squares that sum to {sum(s * s for s in given):.6g}; expected one share of 0 or "
            "more per array, with squares that sum to at most 1"
        )
    norms = [global_norm(leaf) for leaf in leaves]
    norm = global_norm(update)
    finite = jnp.isfinite(norm)
    limit = jnp.asarray(bound, jnp.float32)
    clipped = [
        jnp.where(finite, leaf * _scale(own, limit * share), 0.0)
        for leaf, own, share in zip(leaves, norms, given, strict=True)
    ]
    return Clipped(jax.tree.unflatten(shape, clipped), norm, finite)


def clip(kind: ClipKind, update: Tree, bound: Array | float) -> Clipped:
    return clip_flat(update, bound) if kind == "flat" else clip_per_layer(update, bound)


def user_weight(examples: int, cap: float | None) -> float:
    """Returns the weight of a user's update, w_k = min(n_k / w^, 1) of DPF Algorithm 1; 1 without a
    cap. Raises PrivacyError unless the cap is a finite number above 0."""
    if cap is None:
        return 1.0
    if not cap > 0 or math.isinf(cap):
        raise PrivacyError(f"the example cap is {cap}; expected a finite number above 0")
    return min(examples / cap, 1.0)


@dataclass(frozen=True)
class FixedDenominator:
    """f~_f: the sum divided by a number that does not depend on who took part.

    Fields
        denominator  users (or their weight) per round, > 0; q * W if users are sampled with
                     probability q (f~_f is then unbiased), or a fixed report goal m
    Paper            DPF Lemma 1, first bound; GDP Algorithm 1
    """

    denominator: float

    def __post_init__(self) -> None:
        _check_denominator(self.denominator)

    def average(self, total: Tree, weight: Array | float) -> Tree:
        result: Tree = jax.tree.map(lambda leaf: leaf / self.denominator, total)
        return result

    def sensitivity(self, bound: Array | float) -> Array | float:
        """The most by which one user can change the estimate: S / (q W)."""
        return bound / self.denominator


@dataclass(frozen=True)
class ClippedDenominator:
    """f~_c: the sum divided by the weight of the participants, or by q * W_min if larger (DPF
    Lemma 1, second bound)."""

    denominator: float

    def __post_init__(self) -> None:
        _check_denominator(self.denominator)

    def average(self, total: Tree, weight: Array | float) -> Tree:
        over = max(float(weight), self.denominator)
        result: Tree = jax.tree.map(lambda leaf: leaf / over, total)
        return result

    def sensitivity(self, bound: Array | float) -> Array | float:
        """The most by which one user can change the estimate: 2 S / (q W_min)."""
        return 2.0 * bound / self.denominator


Estimator: TypeAlias = FixedDenominator | ClippedDenominator


def _check_denominator(value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise PrivacyError(
            f"the denominator of the average is {value}; expected a finite number above 0"
        )


@dataclass(frozen=True)
class AdaptiveClip:
    """A clip norm that follows a quantile of the updates' norms (GDP Algorithm 1, Theorem 1; Andrew
    2021)."""

    quantile: float = setting(
        0.5, "Share of users whose updates should not be clipped.", above=0, below=1
    )
    learning_rate: float = setting(
        0.2, "Learning rate of ln C per round.", name="clip_learning_rate", above=0
    )
    count_stddev: float = setting(
        0.0,
        "Noise on the number of updates below the estimate; 0 for a twentieth of the denominator.",
        unit="users",
        low=0,
    )
    first_restart: int = setting(
        128,
        "Round in which the estimate first becomes active, counted from 0.",
        unit="rounds",
        low=0,
    )
    restart_every: int = setting(1024, "Rounds between later renewals.", unit="rounds", low=1)

    def __post_init__(self) -> None:
        check("privacy", self)
        if self.count_stddev == 0:
            raise PrivacyError(
                "count_stddev is 0, but the number of updates below the estimated norm needs noise "
                "too; give a number above 0 (a twentieth of the denominator is usual)"
            )

    def restarts_after(self, round_index: Array | int) -> Array:
        """Whether noise restarts, with a renewed clip norm, after this round (counted from 0)."""
        past = jnp.asarray(round_index) - self.first_restart
        return (past >= 0) & (past % self.restart_every == 0)

    def restarts_within(self, rounds: int) -> tuple[int, ...]:
        return tuple(range(self.first_restart, rounds - 1, self.restart_every))


def tracked_norm(
    ln_norm: Array, centred_count: Array, report_goal: float, adaptive: AdaptiveClip
) -> Array:
    """Returns ln C of the next round, given the noised sum of (b - 1/2) over this round's users.
    GDP Algorithm 1 sums all rounds from C^0 instead, with the same result; its t is t + 1 here."""
    share = centred_count / report_goal + 0.5
    return ln_norm - adaptive.learning_rate * (share - adaptive.quantile)
