"""The interface of all mechanisms, their shared base class, and independent noise.

A mechanism adds noise to the sum of each round so that *running sums* of rounds have little noise.
A matrix C defines a mechanism: the noise of round t is row t of C^-1 z, where z are independent
draws (BLT equation 1). C determines the sensitivity; A C^-1, where A is the matrix of running sums,
determines the error. `discrete` draws the noise.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError
from dlm.federated.noise.participation import check_participation

MOST_ROUNDS = 1_000_000  # mechanisms have arrays with at least one number per round
Floats = NDArray[np.float64]


@runtime_checkable
class Mechanism(Protocol):
    """Correlated Gaussian noise over rounds: its matrix, its sensitivity and its error.

    As in the papers, the noise multiplier is the standard deviation of the *independent* draws z
    divided by the clip norm, so that ``rho = sensitivity ** 2 / (2 * noise_multiplier ** 2)``.
    """

    @property
    def name(self) -> str:
        """The name for `make_mechanism`."""
        ...

    @property
    def rounds(self) -> int:
        """The number of rounds for which there is noise; accounting covers all these rounds."""
        ...

    @property
    def restarts(self) -> tuple[int, ...]:
        """Rounds at whose start the correlation begins anew, ascending; usually none."""
        ...

    def sensitivity(self, *, gap: int, max_participations: int) -> float:
        """The sensitivity of C, for a clip norm of 1 and the worst pattern of participation."""
        ...

    def sensitivity_is_exact(self, *, gap: int, max_participations: int) -> bool:
        """Whether some pattern reaches `sensitivity`; if not, `sensitivity` is an upper bound."""
        ...

    def rms_loss(self, *, gap: int, max_participations: int) -> float:
        """Sensitivity times the root mean square error of the running sums (BLT equation 10)."""
        ...

    def max_loss(self, *, gap: int, max_participations: int) -> float:
        """Sensitivity times the largest error of a running sum (BLT equation 9)."""
        ...

    def prefix_variances(self) -> Floats:
        """Returns (rounds,): the noise variance of each running sum, for draws of variance 1."""
        ...

    def state_size(self, model_size: int) -> int:
        """How many numbers are held between rounds for a model of `model_size` parameters."""
        ...

    def matrix(self) -> dict[str, Any]:
        """The facts that, with the name, determine C; they are options of `dlm privacy account`.

        If `rounds` is among them, the sensitivity is for all these rounds, even if a run stops
        earlier. BandMF's C has too many entries to list, so its number of bands stands for C.
        """
        ...

    def digest(self) -> str:
        """A digest of C, which shows whether a resumed stream still has the same matrix."""
        ...


class Base:
    """Computes a mechanism's losses from the sensitivity and variances that a subclass defines."""

    name: str
    rounds: int
    buffer_count: int  # buffers of the model's size kept between rounds

    @property
    def restarts(self) -> tuple[int, ...]:
        return ()

    def sensitivity(self, *, gap: int, max_participations: int) -> float:
        raise NotImplementedError

    def sensitivity_is_exact(self, *, gap: int, max_participations: int) -> bool:
        return True

    def prefix_variances(self) -> Floats:
        raise NotImplementedError

    def rms_loss(self, *, gap: int, max_participations: int) -> float:
        error = math.sqrt(float(np.mean(self.prefix_variances())))
        return self.sensitivity(gap=gap, max_participations=max_participations) * error

    def max_loss(self, *, gap: int, max_participations: int) -> float:
        error = math.sqrt(float(np.max(self.prefix_variances())))
        return self.sensitivity(gap=gap, max_participations=max_participations) * error

    def state_size(self, model_size: int) -> int:
        return self.buffer_count * model_size

    def matrix(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def parameters_of(self) -> tuple[Floats, ...]:
        """The numbers that define C, besides name, rounds and restarts."""
        return ()

    def digest(self) -> str:
        found = hashlib.sha256(repr((self.name, self.rounds, self.restarts)).encode())
        for numbers in self.parameters_of():
            plain = np.ascontiguousarray(numbers, "<f8")
            found.update(repr(plain.shape).encode() + plain.tobytes())
        return found.hexdigest()


def check_rounds(rounds: int) -> int:
    """Returns `rounds`; ConfigError if a mechanism cannot have that many rounds."""
    if not 1 <= rounds <= MOST_ROUNDS:
        raise ConfigError(
            f"rounds is {rounds:,}; expected 1 to {MOST_ROUNDS:,}, since noise is planned for all "
            "rounds together"
        )
    return rounds


class GaussianMechanism(Base):
    """C is the identity: each round's noise is independent, and running sums add it all up
    (DP-FedAvg)."""

    name = "gaussian"
    buffer_count = 0

    def __init__(self, rounds: int) -> None:
        self.rounds = check_rounds(rounds)

    def matrix(self) -> dict[str, Any]:
        return {}

    def sensitivity(self, *, gap: int, max_participations: int) -> float:
        return math.sqrt(check_participation(self.rounds, gap, max_participations))

    def prefix_variances(self) -> Floats:
        return np.arange(1.0, self.rounds + 1)
