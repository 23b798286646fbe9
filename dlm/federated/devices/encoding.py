"""The encoding of secure aggregation, and a simulation in which this process sees every update.

An update is clipped, scaled, rotated at random, rounded at random within a norm bound, shifted and
sent modulo M. The sum of up to `report_goal` such vectors cannot wrap, so the true sum follows from
the modular sum, which is all that a real protocol (`protocol`) reveals.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dlm.errors import ConfigError, PrivacyError
from dlm.federated.keys import Key

PyTree = Any
Vector = npt.NDArray[np.float64]
Encoded = npt.NDArray[np.int64]

ALPHA = math.exp(-0.5)  # GDP Algorithm 2
MAX_TRIES = 1000  # attempts to round; one nearly always suffices, and alpha^1000 is negligible
MAX_MODULUS = 1 << 62  # so that sums of int64 never overflow before they are reduced


def padded_dimension(dimension: int) -> int:
    """The power of two to which a vector is padded for Hadamard's matrix."""
    if dimension < 1:
        raise ConfigError(f"the dimension is {dimension}; it must be 1 or more")
    return 1 << (dimension - 1).bit_length()


def hadamard(vector: Vector) -> Vector:
    """Returns H v / sqrt(d), where H is Sylvester's Hadamard matrix and d a power of two. The
    transform is its own inverse, and takes O(d log d)."""
    d = len(vector)
    if d & (d - 1) or not d:
        raise ConfigError(f"a vector has {d} numbers; expected a power of two")
    out = np.array(vector, np.float64)
    spare = np.empty_like(out)
    half = 1
    while half < d:
        # Neighbours at distance `half` are added and subtracted.
        a, b = out.reshape(-1, 2, half), spare.reshape(-1, 2, half)
        np.add(a[:, 0], a[:, 1], out=b[:, 0])
        np.subtract(a[:, 0], a[:, 1], out=b[:, 1])
        out, spare = spare, out
        half *= 2
    out /= math.sqrt(d)
    return out


@dataclass(frozen=True)
class Encoding:
    """Encodes vectors of one size as integers, and computes the cost in sensitivity.

    `clip_norm`, `scale` and `report_goal` are C, s and m of GDP Algorithm 2; `dimension` is the
    size of a vector before padding, and d below is the size after it.

    Paper
        Xu et al. 2023 (GDP), Algorithm 2, with log read as the natural logarithm. In print, the
        server subtracts C_inf once; here, once per report, since every device adds C_inf. The
        infinity-norm clip, which the paper's production runs left out, is done here.
    """

    dimension: int
    clip_norm: float
    scale: float
    report_goal: int
    alpha: float = ALPHA

    def __post_init__(self) -> None:
        for name in ("clip_norm", "scale"):
            value = getattr(self, name)
            if not (0 < value < math.inf):
                raise ConfigError(f"{name} is {value}; it must be above 0 and finite")
        if self.report_goal < 1:
            raise ConfigError(f"report_goal is {self.report_goal}; it must be 1 or more")
        if not 0 < self.alpha < 1:
            raise ConfigError(f"alpha is {self.alpha}; it must be between 0 and 1")
        if self.modulus > MAX_MODULUS:
            raise ConfigError(
                f"the modulus is {self.modulus}, which is above 2^62: lower the scale "
                f"({self.scale:g}) or the report goal ({self.report_goal})"
            )

    @property
    def padded(self) -> int:
        return padded_dimension(self.dimension)

    @property
    def max_coordinate(self) -> int:
        """C_inf = ceil(2 s C ln(d) / sqrt(d)); ceil(s C) for d of 1 or 2."""
        d = self.padded
        bound = 2 * self.scale * self.clip_norm * math.log(d) / math.sqrt(d)
        # For d of 1 or 2 the printed bound is below the largest possible coordinate.
        return math.ceil(bound if d > 2 else self.scale * self.clip_norm)

    @property
    def modulus(self) -> int:
        """M = 2 C_inf m + 1."""
        return 2 * self.max_coordinate * self.report_goal + 1

    @property
    def max_squared_norm(self) -> float:
        """The largest squared norm of a rounded update."""
        reach, d = self.scale * self.clip_norm, self.padded
        slack = math.sqrt(2 * math.log(1 / self.alpha))
        return reach**2 + d / 4 + slack * (reach + math.sqrt(d) / 2)

    @property
    def inflated_norm(self) -> float:
        """C_inflated: the norm that accounting uses instead of C."""
        return math.sqrt(self.max_squared_norm) / self.scale

    @property
    def sensitivity_factor(self) -> float:
        """C_inflated / C, above 1: the factor by which the sensitivity grows."""
        return self.inflated_norm / self.clip_norm

    def signs(self, key: Key) -> npt.NDArray[np.int8]:
        """The signs xi of a round, drawn from its key: the same for all devices."""
        return key.fold("signs").signs(self.padded)

    def encode(self, vector: npt.ArrayLike, signs: npt.NDArray[np.int8], key: Key) -> Encoded:
        """Returns the message of one device: (d,) numbers in 0..2 C_inf, all of them below M.

        The rounding is drawn from the device's `key` in this round. In expectation, the decoded
        message is the clipped vector, except for the infinity-norm clip (almost never reached) and
        rejected roundings; the squared norm before the shift is always at most `max_squared_norm`.

        Raises  ConfigError   the vector does not have `dimension` numbers
                PrivacyError  a number is not finite, so no clip bounds it
        """
        update = np.asarray(vector, np.float64).ravel()
        if len(update) != self.dimension:
            raise ConfigError(f"an update has {len(update)} numbers; expected {self.dimension}")
        norm = float(np.linalg.norm(update))
        if not math.isfinite(norm):
            raise PrivacyError("an update has numbers that are not finite, so it cannot be clipped")
        padded = np.zeros(self.padded)
        padded[: self.dimension] = update * (
            self.scale * min(1.0, self.clip_norm / norm) if norm else 0
        )
        rotated = hadamard(padded * signs)
        largest = float(np.abs(rotated).max())
        if largest > self.max_coordinate:
            rotated *= self.max_coordinate / largest
        return self._rounded(rotated, key) + self.max_coordinate

    def _rounded(self, vector: Vector, key: Key) -> Encoded:
        low = np.floor(vector)
        share = vector - low
        base = low.astype(np.int64)
        for attempt in range(MAX_TRIES):
            up = key.fold("rounding", attempt).uniforms(len(vector)) < share
            found = base + up
            # The clip divides and multiplies, so rounding may push a number just past its bound.
            np.clip(found, -self.max_coordinate, self.max_coordinate, out=found)
            if (
                float(np.dot(found.astype(np.float64), found.astype(np.float64)))
                <= self.max_squared_norm
            ):
                return found
        raise PrivacyError(
            f"no rounding of an update was within the norm bound in {MAX_TRIES} tries; alpha is "
            f"{self.alpha}, which is too close to 1: lower alpha"
        )

    def decode(self, total: Encoded, reports: int, signs: npt.NDArray[np.int8]) -> Vector:
        """The sum of updates, from the modular sum over `reports` devices; raises what
        `check_reports` raises."""
        self.check_reports(reports)
        if total.shape != (self.padded,):
            raise ConfigError(f"the sum has the shape {total.shape}; expected ({self.padded},)")
        integers = np.mod(total, self.modulus) - reports * self.max_coordinate
        vector = hadamard(integers.astype(np.float64)) * signs / self.scale
        return vector[: self.dimension]

    def check_reports(self, reports: int) -> None:
        """Raises PrivacyError if the sum of `reports` reports may wrap."""
        if not 0 <= reports <= self.report_goal:
            raise PrivacyError(
                f"{reports} reports were added, but the modulus was chosen for {self.report_goal}: "
                "their sum may wrap around, and then one user's contribution is no longer bounded"
            )


def modular_sum(reports: Iterable[Encoded], modulus: int) -> Encoded:
    """The sum modulo M: the only thing that secure aggregation lets the server see."""
    total: Encoded | None = None
    for report in reports:
        if len(report) and not (report.min() >= 0 and report.max() < modulus):
            raise PrivacyError(f"a report has numbers outside 0..{modulus - 1}")
        total = report.copy() if total is None else np.mod(total + report, modulus)
    if total is None:
        raise ConfigError("there are no reports to add up; give one or more reports")
    return total


@dataclass
class _Running:
    encoding: Encoding
    shapes: list[tuple[int, ...]]
    treedef: Any
    unit: float  # factor applied to updates before they are encoded
    total: Encoded | None = None
    signs: npt.NDArray[np.int8] | None = None
    reports: int = 0
    place: int = 0  # place of the first device in the round
    path: tuple[str | int, ...] | None = None


class SecureAggregator:
    """Adds encoded updates modulo M in numpy, so that the server sees only the sum.

    The result does not depend on the order of devices or on how they are split over calls of `add`.
    If the clip norm changes over rounds, `clip_norm` is its first value. A larger `scale` costs
    bits, but inflates updates less. More reports than `report_goal` are refused.
    """

    def __init__(self, clip_norm: float, scale: float, report_goal: int, *, alpha: float = ALPHA):
        self.clip_norm, self.scale = clip_norm, scale
        self.report_goal, self.alpha = report_goal, alpha
        self.encoding(1)  # refuses bad settings at once

    def encoding(self, dimension: int) -> Encoding:
        return Encoding(dimension, self.clip_norm, self.scale, self.report_goal, self.alpha)

    def sensitivity_factor(self, dimension: int) -> float:
        return self.encoding(dimension).sensitivity_factor

    def zero(self, template: PyTree, bound: float | None = None) -> _Running:
        """Returns an empty sum for updates of these shapes. The updates will be scaled to the
        round's clip norm, `bound`, so that rounding inflates small updates by no larger factor."""
        import jax

        if bound is not None and not 0 < bound < math.inf:
            raise PrivacyError(
                f"the clip norm of a round is {bound}; it must be above 0 and finite"
            )
        leaves, treedef = jax.tree.flatten(template)
        shapes = [tuple(np.shape(leaf)) for leaf in leaves]
        unit = 1.0 if bound is None else self.clip_norm / bound
        return _Running(self.encoding(sum(math.prod(s) for s in shapes)), shapes, treedef, unit)

    def add(self, total: _Running, updates: PyTree, key: Key) -> _Running:
        """Adds the updates of further devices; PrivacyError above the report goal, or for the key
        of another round."""
        import jax

        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(updates)]
        count = len(leaves[0])
        encoding = total.encoding
        encoding.check_reports(total.reports + count)
        if total.path is not None and total.path != key.path:
            raise PrivacyError(
                "found two keys in one round; expected one, since the devices of a round share a "
                "rotation"
            )
        signs = encoding.signs(key) if total.signs is None else total.signs
        reports = (
            encoding.encode(
                np.concatenate([leaf[i].ravel().astype(np.float64) for leaf in leaves])
                * total.unit,
                signs,
                self._rounding(key, total.place + total.reports + i),
            )
            for i in range(count)
        )
        found = total.total
        if count:
            added = modular_sum(reports, encoding.modulus)
            found = added if found is None else np.mod(found + added, encoding.modulus)
        return dataclasses.replace(
            total, total=found, signs=signs, reports=total.reports + count, path=key.path
        )

    def _rounding(self, key: Key, place: int) -> Key:
        return key.fold("device", place)

    def summed(self, total: _Running, vector: Encoded, reports: int, key: Key) -> _Running:
        """Like `add`, for reports that a protocol summed; raises what `check_reports` raises."""
        total.encoding.check_reports(reports)
        signs = total.encoding.signs(key)
        return dataclasses.replace(total, total=vector, signs=signs, reports=reports)

    def result(self, total: _Running, reports: int) -> PyTree:
        """The sum as a pytree of float64; PrivacyError unless `reports` reports were added."""
        import jax

        if reports != total.reports:
            raise PrivacyError(
                f"reports of {total.reports} devices were added, but result() was asked for "
                f"{reports}"
            )
        if total.total is None or total.signs is None:
            vector = np.zeros(total.encoding.dimension)
        else:
            vector = total.encoding.decode(total.total, reports, total.signs) / total.unit
        parts, at = [], 0
        for shape in total.shapes:
            size = math.prod(shape)
            parts.append(vector[at : at + size].reshape(shape))
            at += size
        return jax.tree.unflatten(total.treedef, parts)

    def sum(self, updates: PyTree | Sequence[PyTree], key: Key) -> PyTree:
        import jax

        if isinstance(updates, list | tuple) and not hasattr(updates, "_fields"):
            if not updates:
                raise ConfigError(
                    "there are no updates, so their shape is unknown; call zero(), then result()"
                )
            updates = jax.tree.map(
                lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *updates
            )
        reports = len(jax.tree.leaves(updates)[0])
        total = self.zero(jax.tree.map(lambda leaf: leaf[0], updates))
        return self.result(self.add(total, updates, key), reports)
