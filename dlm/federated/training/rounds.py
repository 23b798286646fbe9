"""Rounds of federated learning: `init` creates a server's state, `apply` advances it by one round.

Both are pure: the same state and cohort give the same bits. The state contains no unnoised sum,
only released updates and buffers of noise (GDP 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dlm.config import check, setting
from dlm.errors import ConfigError, PrivacyError
from dlm.federated.account.zcdp import split_noise
from dlm.federated.keys import Key
from dlm.federated.noise.discrete import DiscreteNoise
from dlm.federated.training import clip, rnn
from dlm.federated.training.clip import (
    AdaptiveClip,
    Array,
    ClippedDenominator,
    Estimator,
    FixedDenominator,
)
from dlm.federated.training.engine import Engine, RoundSums
from dlm.federated.training.grid import GridRelease, is_on_grid


@dataclass(frozen=True)
class OptimizerConfig:
    optimizer: Literal["sgd", "momentum", "nesterov", "adam"] = setting(
        "momentum", "The server's optimizer."
    )
    learning_rate: float = setting(
        1.0,
        "Learning rate of the server.",
        above=0,
        why="1.0 (FNG, DPF), 0.5 (BLT).",
    )
    momentum: float = setting(
        0.9, "Momentum, or adam's first moment; sgd does not use it.", low=0, below=1
    )
    second_moment: float = setting(0.99, "Second-moment decay of adam.", low=0, below=1)
    epsilon: float = setting(1e-3, "Epsilon of adam.", above=0)

    def __post_init__(self) -> None:
        check("server", self)

    def transformation(self) -> optax.GradientTransformation:
        if self.optimizer == "adam":
            return optax.adam(self.learning_rate, self.momentum, self.second_moment, self.epsilon)
        momentum = None if self.optimizer == "sgd" else self.momentum
        return optax.sgd(self.learning_rate, momentum, nesterov=self.optimizer == "nesterov")


@dataclass(frozen=True)
class ReleaseConfig:
    """How a round's sum is bounded, noised and averaged.

    Fields (unit; bound; suggested; meaning)
        clip_norm         C or S; > 0; largest L2 norm of an update; inf only without noise
        noise_multiplier  z; >= 0; standard deviation of the noise over the sensitivity; 0 for a run
                          without noise, which has no guarantee
        estimator         "fixed": f~_f, over `denominator`; "clipped": f~_c, over the weight of
                          the participants, at least `denominator`
        denominator       users; > 0; q W or the report goal m (fixed), q W_min (clipped)
        adaptive          None, or how the clip norm follows the updates
        schedule          (round, clip norm) pairs in order: from each round on, C and the noise
                          change together, so z and the privacy cost of a round stay the same
    Paper   DPF Algorithm 1 and Figures 4 and 8; GDP Algorithm 1
    """

    clip_norm: float
    noise_multiplier: float
    denominator: float
    estimator: Literal["fixed", "clipped"] = "fixed"
    adaptive: AdaptiveClip | None = None
    schedule: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.noise_multiplier >= 0 or math.isinf(self.noise_multiplier):
            raise PrivacyError(
                f"the noise multiplier is {self.noise_multiplier}; expected a finite number >= 0"
            )
        for bound in (self.clip_norm, *(bound for _, bound in self.schedule)):
            if not bound >= clip.LEAST_NORM:
                raise PrivacyError(
                    f"a clip norm is {bound}; expected {clip.LEAST_NORM:g} or more, since squares "
                    "of smaller numbers are 0 in single precision, and nothing would be clipped"
                )
            if math.isinf(bound) and (self.noise_multiplier > 0 or self.adaptive is not None):
                raise PrivacyError(
                    "a clip norm is infinite, and noise protects nobody without a finite clip norm"
                )
        if self.estimator not in ("fixed", "clipped"):
            raise ConfigError(f"estimator is {self.estimator!r}; expected fixed or clipped")
        at = [round_index for round_index, _ in self.schedule]
        if at != sorted(set(at)) or (at and at[0] < 1):
            raise ConfigError(
                f"the schedule's rounds are {at}; expected increasing numbers of 1 or more"
            )
        if self.schedule and self.adaptive is not None:
            raise ConfigError("both a schedule and an adaptive clip norm were given; give only one")
        if self.adaptive is not None and self.estimator != "fixed":
            raise ConfigError(
                f"estimator is {self.estimator}; expected fixed, which an adaptive clip norm needs"
            )
        self.make_estimator()
        self.update_multiplier()

    def make_estimator(self) -> Estimator:
        kind = FixedDenominator if self.estimator == "fixed" else ClippedDenominator
        return kind(self.denominator)

    def update_multiplier(self) -> float:
        """The noise multiplier of the updates: z, or z_Delta if a count is noised, too."""
        if self.adaptive is None or self.noise_multiplier == 0:
            return self.noise_multiplier
        return split_noise(self.noise_multiplier, self.adaptive.count_stddev)

    def clip_norm_at(self, round_index: int) -> float:
        return [self.clip_norm, *(c for at, c in self.schedule if at <= round_index)][-1]


class TrainingState(NamedTuple):
    """Everything that the next round depends on.

    Fields
        params     the model; made from noised sums, if there is noise
        optimizer  state of the server's optimizer, made from released updates only
        bound      float32  C: the clip norm of the next round
        ln_norm    float32  ln of the norm that tracks the quantile; ln C^0 if C is not adaptive
        noise      the `DiscreteState`, or None in a run without noise. Whoever has the state can
                   subtract the noise, so the state is never released
    """

    round: Array
    params: rnn.Params
    optimizer: Any
    bound: Array
    ln_norm: Array
    noise: Any


class Raw(NamedTuple):
    """Exact figures about a round's users, shown only in simulations. `clipped` and `refused` (inf
    or nan) count users; `mean_ln_prob` is the mean ln P of a target, over all steps."""

    users: int
    clipped: int
    refused: int
    mean_ln_prob: float


class Diagnostics(NamedTuple):
    """A round's figures: its number (counted from 0), clip norm C, the estimate of the quantile
    after the round, and the L2 norm of the released average. Only `raw` has unreleased values."""

    round: int
    clip_norm: float
    tracked_norm: float
    released_norm: float
    raw: Raw | None


class FederatedAlgorithm(NamedTuple):
    """A pair of pure functions; `init` gets the root key of a run's noise, None without noise."""

    init: Callable[[rnn.Params, Key | None], TrainingState]
    apply: Callable[[TrainingState, Any], tuple[TrainingState, Diagnostics]]


def make_algorithm(
    release: ReleaseConfig,
    server: OptimizerConfig,
    engine: Engine,
    mechanism: DiscreteNoise | None,
    *,
    simulation: bool,
    aggregation_key: Callable[[int], Any] | None = None,
) -> FederatedAlgorithm:
    """Builds federated learning with this release, optimiser, engine and noise: FedAvg (McMahan
    2017; DPF Algorithm 1; GDP Algorithm 1, PrivateSum as in GDP 3). `simulation` allows figures
    without noise in `Diagnostics`.

    Raises
        PrivacyError  noise without a mechanism, or a mechanism without noise; a clip norm that
                      changes although the noise is correlated over rounds and cannot restart
    """
    noised = release.noise_multiplier > 0
    if noised != (mechanism is not None):
        found = "no mechanism" if mechanism is None else f"the mechanism {mechanism.name}"
        raise PrivacyError(
            f"the noise multiplier is {release.noise_multiplier}, with {found}; give both "
            "a multiplier and a mechanism, or neither for a run without noise"
        )
    adaptive = release.adaptive
    optimizer = server.transformation()
    estimator = release.make_estimator()
    grid = None
    if mechanism is not None:
        _check_changes(release, mechanism)
        grid = grid_release(release, engine, mechanism)

    def init(params: rnn.Params, key: Key | None) -> TrainingState:
        # Python's own ("weak") types would cause every function to be compiled again in round 1.
        params = jax.tree.map(lambda leaf: jnp.array(leaf, leaf.dtype), params)
        noise = None
        if grid is not None:
            if key is None:
                raise PrivacyError("noise needs a key: give Key.from_system() or Key.from_seed(n)")
            noise = grid.init(key, params)
        return TrainingState(
            jnp.int32(0),
            params,
            optimizer.init(params),
            jnp.float32(release.clip_norm),
            jnp.float32(math.log(release.clip_norm)),
            noise,
        )

    def finish(
        state: TrainingState, average: rnn.Params, below: Array
    ) -> tuple[TrainingState, Array]:
        ln_norm = state.ln_norm
        if adaptive is not None:
            ln_norm = clip.tracked_norm(ln_norm, below, release.denominator, adaptive)
        slope = jax.tree.map(jnp.negative, average)
        steps, moments = optimizer.update(slope, state.optimizer, state.params)
        params = optax.apply_updates(state.params, steps)
        following = TrainingState(state.round + 1, params, moments, state.bound, ln_norm, None)
        return following, clip.global_norm(average)

    compiled: Callable[..., tuple[TrainingState, Array]] = jax.jit(finish)

    def apply(state: TrainingState, cohort: Any) -> tuple[TrainingState, Diagnostics]:
        now = int(state.round)
        if mechanism is not None and now >= mechanism.rounds:
            raise PrivacyError(
                f"round {now} (counted from 0) is beyond the mechanism's {mechanism.rounds} "
                "rounds; set rounds higher before the run starts"
            )
        if adaptive is None:
            state = state._replace(bound=jnp.float32(release.clip_norm_at(now)))
        bound, tracked = state.bound, jnp.exp(state.ln_norm)
        key = None if aggregation_key is None else aggregation_key(now)
        sums = engine.sums(state.params, cohort, bound, tracked, key)
        noise, below = None, sums.below
        if grid is not None:
            average, below, noise = grid.noised(state.noise, sums, float(bound))
        else:
            total = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), sums.update)
            exact = estimator.average(total, sums.weight)
            average = jax.tree.map(lambda leaf: leaf.astype(np.float32), exact)
        following, released = compiled(state._replace(noise=None), average, jnp.float32(below))
        following = following._replace(noise=noise)
        if adaptive is not None and bool(adaptive.restarts_after(now)):
            renewed = jnp.maximum(jnp.exp(following.ln_norm), jnp.float32(clip.LEAST_NORM))
            following = following._replace(bound=renewed)
        raw = _raw(sums) if simulation else None
        tracked_after = float(np.exp(np.float32(following.ln_norm)))
        return following, Diagnostics(now, float(bound), tracked_after, float(released), raw)

    return FederatedAlgorithm(init, apply)


def grid_release(release: ReleaseConfig, engine: Engine, noise: DiscreteNoise) -> GridRelease:
    estimator = release.make_estimator()
    return GridRelease(
        noise,
        estimator,
        release.update_multiplier(),
        None if release.adaptive is None else release.adaptive.count_stddev,
        is_on_grid(engine, estimator),
    )


def _check_changes(release: ReleaseConfig, mechanism: DiscreteNoise) -> None:
    if mechanism.name == "gaussian":
        return
    changes = {at for at, _ in release.schedule}
    why = "the schedule changes the clip norm"
    if release.adaptive is not None:
        # The norm changes after each of these rounds; the noise restarts with the round after it.
        changes = {at + 1 for at in release.adaptive.restarts_within(mechanism.rounds)}
        why = "the adaptive clip norm is renewed"
    missing = sorted(at for at in changes - set(mechanism.restarts) if at < mechanism.rounds)
    if missing:
        raise PrivacyError(
            f"{why} at the start of rounds {missing[:5]}, where {mechanism.name} continues with "
            "noise made for another clip norm; use gaussian, or tree-restart with restarts at "
            "those rounds"
        )


def _raw(sums: RoundSums) -> Raw:
    targets = float(sums.targets)
    mean = float(sums.ln_prob) / targets if targets else math.nan
    return Raw(int(sums.users), int(sums.clipped), int(sums.refused), mean)
