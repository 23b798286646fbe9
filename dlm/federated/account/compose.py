"""Composes the guarantee of stages that used the same users' data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dlm.errors import ConfigError, PrivacyError
from dlm.federated.account.sampled import make_accountant, refuse_unless_poisson
from dlm.federated.account.zcdp import joined_noise, rho_of, zcdp_epsilon

SAMPLINGS = ("poisson", "fixed", "timer")


@dataclasses.dataclass(frozen=True)
class StageRecord:
    """The effect of a training stage on users' privacy, as plain values for JSON.

    Args
        stage               "unigrams", "pieces", "network", or the run's name for it
        mechanism           name for `make_mechanism`; "none" for a raw stage
        noise_multiplier    standard deviation of the draws / clip norm; None without noise
        rounds              number of rounds that accounting covers
        gap                 smallest difference between rounds of a user's participations, observed
                            or enforced (`gap_from_min_separation` converts the papers' MinS)
        max_participations  maximum number of participations of a user, observed or enforced; the
                            papers' rounds / MinS, rounded down, can be too small
        sensitivity         of the mechanism, for that participation and a clip norm of 1;
                            required for all but "gaussian" and trees
        matrix              facts that determine the mechanism's matrix (`Mechanism.matrix`)
        sampling            how cohorts were drawn: "poisson", "fixed" report goal, or "timer"
        sampling_rate       probability that "poisson" draws a user; if given, amplification counts
        clip_noise          standard deviation of the noise on the counts for an adaptive clip norm;
                            `noise_multiplier` is then only that of the updates
        norm_inflation      norm after rounding for secure aggregation, divided by the clip norm
        rounding            factor by which the grid raises the sensitivity, at least 1
        simulated           whether the noise came from a configured seed, so it protects nobody
        extras              further facts for the report, which accounting ignores
    """

    stage: str
    mechanism: str
    noise_multiplier: float | None
    rounds: int
    gap: int = 1
    max_participations: int = 1
    sensitivity: float | None = None
    sampling: str = "timer"
    sampling_rate: float | None = None
    clip_noise: float | None = None
    norm_inflation: float = 1.0
    matrix: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    simulated: bool = False
    rounding: float = 1.0
    extras: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sampling not in SAMPLINGS:
            raise ConfigError(
                f"stage {self.stage}: sampling is {self.sampling!r}, not one of {SAMPLINGS}"
            )
        if self.sampling_rate is not None:
            refuse_unless_poisson(self.sampling)
            if self.mechanism != "gaussian":
                raise PrivacyError(
                    f"stage {self.stage}: amplification by sampling needs independent noise; "
                    f"{self.mechanism} is correlated over rounds"
                )
            if not 0 < self.sampling_rate <= 1:
                raise ConfigError(
                    f"stage {self.stage}: sampling rate {self.sampling_rate} is not in (0, 1]"
                )
        for name in ("sensitivity", "clip_noise"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"stage {self.stage}: {name} is {value}, not a finite number > 0")
        if not (self.norm_inflation >= 1 and self.rounding >= 1):
            raise ConfigError(
                f"stage {self.stage}: norm_inflation is {self.norm_inflation}, rounding is "
                f"{self.rounding}; both must be 1 or more"
            )
        if min(self.rounds, self.gap, self.max_participations) < 1:
            raise ConfigError(
                f"stage {self.stage}: rounds, gap and max_participations must be 1 or more"
            )

    @property
    def raw(self) -> bool:
        return self.mechanism == "none" or not self.noise_multiplier

    @property
    def effective_noise(self) -> float:
        """The noise multiplier, corrected for clip counts and rounding; 0 without noise."""
        if self.raw:
            return 0.0
        assert self.noise_multiplier is not None
        noise = self.noise_multiplier / self.norm_inflation
        joined = noise if self.clip_noise is None else joined_noise(noise, self.clip_noise)
        return joined / self.rounding

    @property
    def worst_sensitivity(self) -> float:
        """`sensitivity`; if None, the value computed for a mechanism without parameters."""
        if self.sensitivity is not None:
            return self.sensitivity
        if self.mechanism not in ("gaussian", "tree", "tree-full", "tree-restart"):
            raise ConfigError(
                f"stage {self.stage}: the sensitivity of {self.mechanism} depends on the "
                "mechanism's parameters and is not in the record; add `sensitivity` to the stage"
            )
        from dlm.federated.noise.participation import named_sensitivity

        return named_sensitivity(
            self.mechanism,
            self.rounds,
            self.gap,
            self.max_participations,
            tuple(self.matrix.get("restarts", ())),
        )

    @property
    def rho(self) -> float:
        """zCDP of this stage, without amplification."""
        return math.inf if self.raw else rho_of(self.worst_sensitivity, self.effective_noise)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StageRecord:
        """The record that `to_json` wrote; ConfigError for unknown or missing fields."""
        try:
            return cls(**values)
        except TypeError as exc:
            raise ConfigError(f"expected the record of a stage: {exc}") from exc


@dataclasses.dataclass(frozen=True)
class PrivacyNumbers:
    """The guarantee of several stages together; `rho` is without amplification by sampling.
    `epsilon` is the smallest of `epsilons`: "zcdp" (any noise) and, with sampling, "rdp"."""

    rho: float
    epsilon: float
    delta: float
    epsilons: Mapping[str, float]
    stages: tuple[StageRecord, ...]
    notes: tuple[str, ...]


def compose(stages: Sequence[StageRecord], delta: float) -> PrivacyNumbers:
    """The guarantee of `stages` together, counting each user as being in all of them.

    Rho adds up over stages, even if a later stage is chosen after an earlier one was released.
    Epsilon is the bound for every mechanism of that rho; with sampled stages it is also computed by
    Renyi divergences of integer orders, where discrete noise has the divergences of the Gaussian.

    Raises  PrivacyError  a stage asks for amplification that its cohorts do not allow
    """
    if not stages:
        raise ConfigError("there is no stage to account for; give at least one")
    notes = []
    for stage in stages:
        if stage.raw:
            notes.append(
                f"stage {stage.stage} released sums without noise: it has no guarantee, so epsilon "
                "is infinite for everything built from it"
            )
        if stage.simulated:
            notes.append(
                f"the noise of stage {stage.stage} came from a configured seed: the numbers are "
                "those of a simulation, which protects nobody"
            )
        if not stage.raw and stage.norm_inflation > 1:
            notes.append(
                f"stage {stage.stage}: rounding for secure aggregation raises norms by a factor of "
                f"{stage.norm_inflation:.6g}, which is accounted for"
            )
        if not stage.raw:
            notes.append(noise_note(stage))
    rho = math.fsum(stage.rho for stage in stages)
    if math.isinf(rho):
        none = {"zcdp": math.inf}
        return PrivacyNumbers(math.inf, math.inf, delta, none, tuple(stages), tuple(notes))
    sampled = [stage for stage in stages if stage.sampling_rate is not None]
    epsilons = {"zcdp": zcdp_epsilon(rho, delta)}
    if sampled:
        notes.append(
            "amplified by Poisson sampling in stage " + ", ".join(stage.stage for stage in sampled)
        )
        epsilons["rdp"] = _numerical(stages, delta)
    return PrivacyNumbers(rho, min(epsilons.values()), delta, epsilons, tuple(stages), tuple(notes))


def noise_note(stage: StageRecord) -> str:
    grid = stage.extras.get("grid", "an unknown grid")
    generator = stage.extras.get("generator", "an unknown generator")
    cost = "nothing" if stage.rounding == 1 else f"{100 * (stage.rounding**2 - 1):.2g} % of rho"
    return (
        f"stage {stage.stage}: noise is discrete Gaussian, drawn exactly, in steps of {grid}, by "
        f"{generator}; the grid costs {cost} in the accounting"
    )


def _numerical(stages: Sequence[StageRecord], delta: float) -> float:
    """Epsilon by dp-accounting: sampled stages round by round, all others as one Gaussian."""
    from dp_accounting import dp_event

    ledger = make_accountant("rdp", whole_orders=True)
    rest = math.fsum(stage.rho for stage in stages if stage.sampling_rate is None)
    if rest:
        ledger.compose(dp_event.GaussianDpEvent(1 / math.sqrt(2 * rest)))
    for stage in stages:
        if stage.sampling_rate is not None:
            event = dp_event.PoissonSampledDpEvent(
                stage.sampling_rate, dp_event.GaussianDpEvent(stage.effective_noise)
            )
            ledger.compose(event, stage.rounds)
    return float(ledger.get_epsilon(delta))
