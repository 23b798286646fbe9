"""Adds 64-bit integers, whose sum neither the order of users nor rounding can change.

A sum of floats is rounded after every user, so one more user can change all later roundings
(Casacuberta et al. 2022). Here every number of an update is truncated to whole steps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm.errors import PrivacyError

BITS = 44  # a clip norm is at most 2^BITS steps: small steps, even if the norm is far too large
GRID_BITS = 32  # like BITS, for the grid of discrete noise
MOST_UPDATES = 1 << (62 - BITS)
_LOW_BITS = 30  # low bits of each number in an update; the high bits are another int32
ARITHMETIC = f"integers, {BITS} bits"  # recorded as part of a run's settings


def steps_per_unit(bound: float, bits: int = BITS) -> float:
    """Returns a power of two, so that scaling is exact; `bound` is at most 2^bits steps. Raises
    PrivacyError unless `bound` is finite and above 0."""
    if not 0 < bound < math.inf:
        raise PrivacyError(f"the clip norm of a round is {bound}; expected a finite number above 0")
    return 2.0 ** (bits - math.frexp(bound)[1])


class FixedPoint(NamedTuple):
    """A 64-bit sum of steps, in two arrays of one shape: JAX lacks 64 bits. `high` has the sign."""

    high: jax.Array
    low: jax.Array


def zeros(template: Any) -> Any:
    """Returns an empty sum, with a `FixedPoint` for each array of a tree."""
    return jax.tree.map(
        lambda leaf: FixedPoint(
            jnp.zeros(jnp.shape(leaf), jnp.int32), jnp.zeros(jnp.shape(leaf), jnp.uint32)
        ),
        template,
    )


def plus(total: Any, update: Any, scale: jax.Array | float) -> Any:
    """Adds an update to a sum, in steps of 1 / `scale` (`steps_per_unit` of the bound). The sum is
    exact for up to `MOST_UPDATES` within the bound; truncation never lengthens an update."""

    def add(leaf: jax.Array, held: FixedPoint) -> FixedPoint:
        # Each operation is exact: scaling by powers of two, and the remainders of 24-bit numbers.
        scaled = leaf * (scale * 2.0**-_LOW_BITS)
        whole = jnp.trunc(scaled)
        coarse = whole.astype(jnp.int32)
        fine = jnp.trunc((scaled - whole) * 2.0**_LOW_BITS).astype(jnp.int32)
        found = _plus(held, coarse >> (32 - _LOW_BITS), coarse << _LOW_BITS)
        return _plus(found, fine >> 31, fine)

    return jax.tree.map(add, update, total)


def _plus(held: FixedPoint, high: jax.Array, low: jax.Array) -> FixedPoint:
    sum_low = held.low + jax.lax.bitcast_convert_type(low, jnp.uint32)
    carry = (sum_low < held.low).astype(jnp.int32)
    return FixedPoint(held.high + high + carry, sum_low)


def values(total: Any, scale: float) -> Any:
    def value(held: FixedPoint) -> np.ndarray[Any, Any]:
        high, low = np.asarray(held.high, np.int64), np.asarray(held.low, np.int64)
        return ((high << 32) + low).astype(np.float64) / scale

    return jax.tree.map(value, total, is_leaf=_is_fixed)


def is_sum(total: Any) -> bool:
    return all(map(_is_fixed, jax.tree.leaves(total, is_leaf=_is_fixed)))


def _is_fixed(node: Any) -> bool:
    return isinstance(node, FixedPoint)
