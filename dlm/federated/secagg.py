"""What a device sends so that only the sum of all devices can be read: integers modulo M.

    sums = SecureAggregator(clip_norm=1.0, scale=1e4, report_goal=500)
    total = sums.sum(updates, key)              # a pytree of floats

An update is clipped, scaled, rotated at random, rounded at random without becoming long, shifted
and sent modulo M. Sums of up to `report_goal` such vectors cannot wrap, so that the modular sum,
which is all that a protocol of secure aggregation reveals, gives the sum back. The protocol itself
is not here: `modular_sum` stands where it will.

Rounding makes an update longer by a known factor (`sensitivity_factor`), which accounting takes.
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
from dlm.federated.genuine import note_made, sealed
from dlm.federated.keys import Key

PyTree = Any
Vector = npt.NDArray[np.float64]
Encoded = npt.NDArray[np.int64]

ALPHA = math.exp(-0.5)  # GDP Algorithm 2
MAX_TRIES = 1000  # of rounding; one is enough nearly always, alpha^1000 is nothing
MAX_MODULUS = 1 << 62  # so that sums of int64 never overflow before they are reduced


def padded_dimension(dimension: int) -> int:
    """The power of two that a vector is padded to, for Hadamard's matrix."""
    if dimension < 1:
        raise ConfigError(f"a vector has at least one number; found {dimension}")
    return 1 << (dimension - 1).bit_length()


def hadamard(vector: Vector) -> Vector:
    """H v / sqrt(d), H being Sylvester's Hadamard matrix; it is its own inverse.

    Shapes
        vector  (d,)  float64  d a power of two
    Cost         O(d log d)
    """
    d = len(vector)
    if d & (d - 1) or not d:
        raise ConfigError(f"Hadamard's matrix is for a power of two; found {d}")
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
    """How vectors of one size become integers, and what that costs.

    `clip_norm` is C, `scale` s and `report_goal` m of GDP Algorithm 2, `dimension` the size of a
    vector before padding; d below is the padded size, since rounding happens there.

    Paper
        Xu et al. 2023 (GDP), Algorithm 2. Its logarithm is taken as the natural one. It prints that
        the server subtracts C_inf once; every device shifts by it, so the server subtracts it
        once for each report. Its production runs left the infinity-norm clip out; here it is done.
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
                raise ConfigError(f"{name} is {value}; it is over 0 and finite")
        if self.report_goal < 1:
            raise ConfigError(f"report_goal is {self.report_goal}; it is at least 1")
        if not 0 < self.alpha < 1:
            raise ConfigError(f"alpha is {self.alpha}; it is between 0 and 1")
        if self.modulus > MAX_MODULUS:
            raise ConfigError(
                f"the modulus is {self.modulus}, over 2^62: lower the scale ({self.scale:g}) or "
                f"the report goal ({self.report_goal})"
            )

    @property
    def padded(self) -> int:
        """d, a power of two."""
        return padded_dimension(self.dimension)

    @property
    def max_coordinate(self) -> int:
        """C_inf = ceil(2 s C ln(d) / sqrt(d)); s C where d is so small that this is 0."""
        d = self.padded
        bound = 2 * self.scale * self.clip_norm * math.log(d) / math.sqrt(d)
        # Of one or two numbers the printed bound is below what a single number may be.
        return math.ceil(bound if d > 2 else self.scale * self.clip_norm)

    @property
    def modulus(self) -> int:
        """M = 2 C_inf m + 1."""
        return 2 * self.max_coordinate * self.report_goal + 1

    @property
    def bits(self) -> float:
        """Bits a number of an update takes to send."""
        return math.log2(self.modulus)

    @property
    def max_squared_norm(self) -> float:
        """What the squared norm of an update is at most, once it is rounded."""
        reach, d = self.scale * self.clip_norm, self.padded
        slack = math.sqrt(2 * math.log(1 / self.alpha))
        return reach**2 + d / 4 + slack * (reach + math.sqrt(d) / 2)

    @property
    def inflated_norm(self) -> float:
        """C_inflated: the norm that accounting takes in place of C."""
        return math.sqrt(self.max_squared_norm) / self.scale

    @property
    def sensitivity_factor(self) -> float:
        """C_inflated / C, over 1: multiply the sensitivity with it."""
        return self.inflated_norm / self.clip_norm

    def signs(self, key: Key) -> npt.NDArray[np.int8]:
        """xi of a round: one for all its devices, from the round's key."""
        return key.fold("signs").signs(self.padded)

    def encode(self, vector: npt.ArrayLike, signs: npt.NDArray[np.int8], key: Key) -> Encoded:
        """What one device sends.

        Args
            key   of this device in this round: its rounding is drawn from it
        Returns      (d,) numbers in 0..2 C_inf, which is below M
        Guarantees   over the rounding, the decoded expectation is the clipped vector, but for the
                     infinity-norm clip (which is next to never reached) and for rejected roundings;
                     the squared norm before the shift is at most `max_squared_norm`, always
        Raises
            ConfigError    another size
            PrivacyError   a number that is not finite: no clip bounds it
        """
        update = np.asarray(vector, np.float64).ravel()
        if len(update) != self.dimension:
            raise ConfigError(f"an update has {len(update)} numbers, not {self.dimension}")
        norm = float(np.linalg.norm(update))
        if not math.isfinite(norm):
            raise PrivacyError("an update holds numbers that are not finite; it cannot be bounded")
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
        """Conditional stochastic rounding: again until the norm is within the bound."""
        low = np.floor(vector)
        share = vector - low
        base = low.astype(np.int64)
        for attempt in range(MAX_TRIES):
            up = key.fold("rounding", attempt).uniforms(len(vector)) < share
            found = base + up
            # The clip divides and multiplies: the last bit may stand over an integer bound.
            np.clip(found, -self.max_coordinate, self.max_coordinate, out=found)
            if (
                float(np.dot(found.astype(np.float64), found.astype(np.float64)))
                <= self.max_squared_norm
            ):
                return found
        raise PrivacyError(
            f"no rounding of an update was short enough in {MAX_TRIES} tries; alpha {self.alpha} "
            "is too near 1"
        )

    def decode(self, total: Encoded, reports: int, signs: npt.NDArray[np.int8]) -> Vector:
        """The sum of updates, from the modular sum of `reports` devices.

        Raises
            PrivacyError   more reports than `report_goal`: the sum may have wrapped
        """
        self.check_reports(reports)
        if total.shape != (self.padded,):
            raise ConfigError(f"the sum has {total.shape} numbers, not {self.padded}")
        integers = np.mod(total, self.modulus) - reports * self.max_coordinate
        vector = hadamard(integers.astype(np.float64)) * signs / self.scale
        return vector[: self.dimension]

    def check_reports(self, reports: int) -> None:
        """Passes if so many reports cannot wrap."""
        if not 0 <= reports <= self.report_goal:
            raise PrivacyError(
                f"{reports} reports came where the modulus was chosen for {self.report_goal}: "
                "their sum may wrap around, and what one user adds would no longer be bounded"
            )


def modular_sum(reports: Iterable[Encoded], modulus: int) -> Encoded:
    """The sum modulo M: the only thing that secure aggregation lets the server see."""
    total: Encoded | None = None
    for report in reports:
        if len(report) and not (report.min() >= 0 and report.max() < modulus):
            raise PrivacyError(f"a report holds numbers outside 0..{modulus - 1}")
        total = report.copy() if total is None else np.mod(total + report, modulus)
    if total is None:
        raise ConfigError("no report came")
    return total


@dataclass
class _Running:
    """A modular sum under way."""

    encoding: Encoding
    shapes: list[tuple[int, ...]]
    treedef: Any
    unit: float  # what updates are multiplied with before they are encoded
    total: Encoded | None = None
    signs: npt.NDArray[np.int8] | None = None
    reports: int = 0
    path: tuple[str | int, ...] | None = None


@sealed
class SecureAggregator:
    """Adds what devices encode, modulo M; the server sees the sum alone. Host code, in numpy.

    Args
        clip_norm     C: updates are clipped to it, if they are not already; where the clip norm
                      changes over rounds, the first one
        scale         s, of an update of that norm: larger costs bits and inflates the norm less
        report_goal   m: more reports than that are refused
    Guarantees
        the result is the same whatever the order of devices and however they are split over `add`,
        given the same place of a device in the round
    """

    def __init__(self, clip_norm: float, scale: float, report_goal: int, *, alpha: float = ALPHA):
        self.clip_norm, self.scale = clip_norm, scale
        self.report_goal, self.alpha = report_goal, alpha
        self.encoding(1)  # refuses bad settings at once
        note_made(self)

    def encoding(self, dimension: int) -> Encoding:
        """Of vectors of one size."""
        return Encoding(dimension, self.clip_norm, self.scale, self.report_goal, self.alpha)

    def sensitivity_factor(self, dimension: int) -> float:
        """C_inflated / C for updates of so many numbers."""
        return self.encoding(dimension).sensitivity_factor

    def zero(self, template: PyTree, bound: float | None = None) -> _Running:
        """The sum of no updates of these shapes.

        Args
            bound   the clip norm of this round where it changes; updates are scaled by it, so that
                    rounding makes those of a small norm longer by no larger a factor
        """
        import jax

        if bound is not None and not 0 < bound < math.inf:
            raise PrivacyError(f"the clip norm of a round is {bound}; it is over 0 and finite")
        leaves, treedef = jax.tree.flatten(template)
        shapes = [tuple(np.shape(leaf)) for leaf in leaves]
        unit = 1.0 if bound is None else self.clip_norm / bound
        return _Running(self.encoding(sum(math.prod(s) for s in shapes)), shapes, treedef, unit)

    def add(self, total: _Running, updates: PyTree, key: Key) -> _Running:
        """The sum with some devices more.

        Raises
            PrivacyError   more devices than the report goal, or another key than the round's first
        """
        import jax

        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(updates)]
        count = len(leaves[0])
        encoding = total.encoding
        encoding.check_reports(total.reports + count)
        if total.path is not None and total.path != key.path:
            raise PrivacyError("the devices of a round share one rotation: one key for all of them")
        signs = encoding.signs(key) if total.signs is None else total.signs
        reports = (
            encoding.encode(
                np.concatenate([leaf[i].ravel().astype(np.float64) for leaf in leaves])
                * total.unit,
                signs,
                key.fold("device", total.reports + i),
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

    def result(self, total: _Running, reports: int) -> PyTree:
        """The sum as a pytree of float64.

        Raises
            PrivacyError   `reports` is not how many were added: the shift would be wrong
        """
        import jax

        if reports != total.reports:
            raise PrivacyError(
                f"{total.reports} devices reported, and {reports} are to be unshifted"
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
        """Of updates stacked on axis 0, or of a list of them."""
        import jax

        if isinstance(updates, list | tuple) and not hasattr(updates, "_fields"):
            if not updates:
                raise ConfigError("no update came, not even its shape; use zero and result")
            updates = jax.tree.map(
                lambda *leaves: np.stack([np.asarray(x) for x in leaves]), *updates
            )
        reports = len(jax.tree.leaves(updates)[0])
        total = self.zero(jax.tree.map(lambda leaf: leaf[0], updates))
        return self.result(self.add(total, updates, key), reports)
