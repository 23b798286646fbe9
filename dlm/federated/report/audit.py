"""Measures what a run's noise hides: plants canaries among the updates and looks for them.

The error rate of an observer of every released average bounds mu of Gaussian differential privacy,
sqrt(2 rho), from below; accounting bounds it from above. A run with canaries is never released or
saved, and no record of it has a guarantee.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri

from dlm.errors import ConfigError, PrivacyError
from dlm.federated.account.compose import StageRecord
from dlm.federated.devices.encoding import SecureAggregator
from dlm.federated.fixed_point import GRID_BITS
from dlm.federated.keys import Key
from dlm.federated.noise import Mechanism, make_mechanism
from dlm.federated.noise.banded import BandMF
from dlm.federated.noise.blt import Blt
from dlm.federated.noise.discrete import discrete
from dlm.federated.noise.mechanism import GaussianMechanism
from dlm.federated.noise.participation import (
    check_participation,
    forest_sizes,
    most_participations,
)
from dlm.federated.noise.toeplitz import BandedToeplitz
from dlm.federated.noise.tree import TreeAgg, TreeAggFull, node_variances
from dlm.federated.training import clip
from dlm.federated.training.clip import Array
from dlm.federated.training.engine import LocalEngine
from dlm.federated.training.local import LocalConfig, UserUpdate, UserWork
from dlm.federated.training.rnn import RnnConfig
from dlm.federated.training.rounds import (
    OptimizerConfig,
    ReleaseConfig,
    grid_release,
    make_algorithm,
)
from dlm.federated.training.settings import TrainingSettings
from dlm.record.provenance import Provenance

Floats = NDArray[np.float64]
CANARIES, PARAMETERS, CONFIDENCE = 1_000, 16_384, 0.95
LEAST_ROOM = 10  # parameters per canary: directions are then nearly orthogonal
REASON = "canaries were planted in it: it is an audit, which is never released"
# A canary is not trained: the network is never evaluated.
NETWORK = RnnConfig(4, embedding_size=2, hidden_size=2)


@dataclass(frozen=True)
class Audit:
    """The accounted bound and the measured one.

    Fields
        upper_mu      sqrt(2 rho) by accounting, for the worst pattern
        lower_mu      lower bound on mu, with `confidence`
        present       canaries that took part, of `canaries`
        missed        of those, guessed absent
        false_alarms  of the others, guessed present
        pattern       rounds in which those present took part
        reached       share of the accounted sensitivity that this pattern reaches: at most 1
        cosine        between two canaries' directions, root mean square
    """

    mechanism: str
    rounds: int
    gap: int
    max_participations: int
    rho: float
    upper_mu: float
    lower_mu: float
    confidence: float
    canaries: int
    present: int
    missed: int
    false_alarms: int
    pattern: tuple[int, ...]
    reached: float
    parameters: int
    cosine: float

    @property
    def holds(self) -> bool:
        return self.lower_mu <= self.upper_mu

    def to_dict(self) -> dict[str, Any]:
        record = Provenance.none(REASON).to_dict()
        return {**dataclasses.asdict(self), "holds": self.holds, "provenance": record}


class CanaryEngine(LocalEngine):
    """Devices that send a direction, longer than the clip norm, instead of an update; all else is
    as in training."""

    def _update_of(self, params: Any, batches: Array, used: Array, bound: Array) -> UserUpdate:
        sent = jax.tree.map(lambda leaf: 2 * bound * leaf, direction(batches.ravel()[:2], params))
        found = clip.clip(self._config.clip_kind, sent, bound)
        none = jnp.float32(0.0)
        return UserUpdate(found.update, found.norm, found.finite, none, none)


def direction(name: Array, template: Any) -> Any:
    """The unit vector that a canary's two numbers stand for, equally long in every array."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), name[0]), name[1])
    leaves, tree = jax.tree.flatten(template)
    drawn = [
        jax.random.normal(jax.random.fold_in(key, place), leaf.shape, jnp.float32)
        for place, leaf in enumerate(leaves)
    ]
    share = 1 / math.sqrt(len(leaves))
    return jax.tree.unflatten(tree, [share * leaf / jnp.linalg.norm(leaf) for leaf in drawn])


class Auditor:
    """Runs with the noise, clipping, aggregation and bounds of settings, on canaries alone.

    Args
        canaries    how many; one coin toss each
        parameters  of the model that is trained; the noise does not depend on how many there are
    Raises
        ConfigError   too few canaries, or too few parameters for them
        PrivacyError  a run without noise, or one whose guarantee is not of Gaussian form
    """

    def __init__(
        self,
        settings: TrainingSettings,
        *,
        canaries: int = CANARIES,
        parameters: int = PARAMETERS,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if canaries < 2:
            raise ConfigError(
                f"{canaries} canaries are too few to measure anything; use {CANARIES}"
            )
        if parameters < LEAST_ROOM * canaries:
            raise ConfigError(
                f"{parameters} parameters are too few for {canaries} canaries: use "
                f"{LEAST_ROOM * canaries} or more, so that their directions are nearly orthogonal"
            )
        privacy, rounds = settings.privacy, settings.run.rounds
        _refuse_others(settings)
        self.settings, self.canaries = settings, canaries
        self._gap, self._most = (
            privacy.gap,
            privacy.max_participations or most_participations(rounds, privacy.gap),
        )
        third = parameters // 3  # as of three arrays
        self._template = {
            "a": jnp.zeros((third,)),
            "b": jnp.zeros((third, 1)),
            "c": jnp.zeros((parameters - 2 * third,)),
        }
        self.parameters = parameters
        restarts = privacy.restarts
        self.mechanism: Mechanism = make_mechanism(
            privacy.mechanism,
            rounds=rounds,
            gap=self._gap,
            max_participations=self._most,
            restarts=restarts,
            buffers=privacy.buffers,
            bands=privacy.bands or None,
            error=privacy.error,
            progress=progress,
        )
        self._release = privacy.release(float(settings.sampling.report_goal))
        aggregator = None
        if settings.aggregation.secure:
            aggregator = SecureAggregator(privacy.clip_norm, settings.aggregation.scale, canaries)
        local = LocalConfig(batch_size=1, unroll=1, clip_kind=settings.local.clip_kind)
        self.engine = CanaryEngine(NETWORK, local, aggregator=aggregator, bits=GRID_BITS)
        drawn = discrete(self.mechanism)
        self._along = jax.jit(_along)
        self._aggregation = Key.from_system()
        self._algorithm = make_algorithm(
            self.added(self._release),
            # The released averages are then the differences of successive models.
            OptimizerConfig("sgd", 1.0),
            self.engine,
            drawn,
            simulation=False,
            aggregation_key=lambda index: self._aggregation.fold(index),
        )
        gram, diagonal = gram_of(self.mechanism)
        self._pattern, value = worst_pattern(
            gram, diagonal, self._gap, check_participation(rounds, self._gap, self._most)
        )
        sensitivity = self.mechanism.sensitivity(gap=self._gap, max_participations=self._most)
        self._reached = math.sqrt(value) / sensitivity
        present = np.zeros(rounds)
        present[list(self._pattern)] = 1
        self._weights = gram(present)
        self.rho = StageRecord(
            "audit",
            privacy.mechanism,
            self._release.update_multiplier(),
            rounds,
            self._gap,
            self._most,
            sensitivity=sensitivity,
            norm_inflation=self.engine.sensitivity_factor(parameters),
            matrix=self.mechanism.matrix(),
            rounding=grid_release(self._release, self.engine, drawn).factor(
                parameters, sensitivity
            ),
        ).rho

    def added(self, release: ReleaseConfig) -> ReleaseConfig:
        """What rounds release while `release` is accounted for: the same, except in tests."""
        return release

    def run(self, key: Key | None = None, *, confidence: float = CONFIDENCE) -> Audit:
        """One run with randomness of `key`. If the noise is as large as accounted for, `lower_mu`
        is above `upper_mu` with a probability of at most 1 - confidence."""
        if not 0 < confidence < 1:
            raise ConfigError(f"confidence is {confidence}; it must be between 0 and 1")
        root = Key.from_system() if key is None else key
        self._aggregation = root.fold("aggregation")
        coins = root.fold("coins").uniforms(self.canaries) < 0.5
        run = int(root.fold("directions").words(1)[0] >> 1)
        names = np.stack([np.arange(self.canaries), np.full(self.canaries, run)], 1).astype("i4")
        here = [UserWork(name.reshape(1, 1, 2), 1.0) for name in names[coins]]
        state = self._algorithm.init(self._template, root.fold("noise"))
        seen = jax.tree.map(lambda leaf: np.zeros(leaf.shape), self._template)
        for index in range(self.settings.run.rounds):
            before = state.params
            cohort = here if index in self._pattern else []
            state, told = self._algorithm.apply(state, cohort)
            # In clip norms: one user adds at most 1 per round.
            scale = self._weights[index] * self._release.denominator / told.clip_norm

            def add(old: Floats, after: Array, then: Array, scale: float = scale) -> Floats:
                return old + scale * (np.asarray(after, np.float64) - np.asarray(then, np.float64))

            seen = jax.tree.map(add, seen, state.params, before)
        total = float(self._weights[list(self._pattern)].sum())
        plain = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), seen)
        scores = np.asarray(self._along(plain, jnp.asarray(names)), np.float64) / total
        guessed = scores >= 0.5  # midway between the expectations without and with a canary
        missed = int((coins & ~guessed).sum())
        alarms = int((~coins & guessed).sum())
        present = int(coins.sum())
        privacy = self.settings.privacy
        return Audit(
            privacy.mechanism, self.settings.run.rounds, self._gap, self._most, self.rho,
            math.sqrt(2 * self.rho),
            lower_mu(missed, present, alarms, self.canaries - present, confidence),
            confidence, self.canaries, present, missed, alarms, self._pattern, self._reached,
            self.parameters, 1 / math.sqrt(self.parameters),
        )  # fmt: skip


def lower_mu(missed: int, present: int, alarms: int, absent: int, confidence: float) -> float:
    """A lower bound on mu, from the errors of a test that was fixed before anything was seen.

    Under mu of Gaussian DP every test has 1 - misses <= Phi(mu - Phi^-1(1 - alarms)). Each rate has
    an exact upper bound (Clopper and Pearson 1934); both hold together with `confidence`, if the
    errors of canaries are independent. In one run they need not be; where the parameters' noise is
    independent, canaries are correlated only through the cosines of their directions, which have
    either sign.

    Paper  Nasr et al. 2023 (tight auditing); Dong, Roth and Su 2019, definition 2.6
    """
    tail = (1 - confidence) / 2

    def at_most(errors: int, trials: int) -> float:
        return 1.0 if errors == trials else float(betaincinv(errors + 1, trials - errors, 1 - tail))

    rates = at_most(missed, present), at_most(alarms, absent)
    if 1.0 in rates:
        return 0.0
    return max(float(-ndtri(rates[1]) - ndtri(rates[0])), 0.0)


def gram_of(mechanism: Mechanism) -> tuple[Callable[[Floats], Floats], Floats]:
    """(x -> S^-1 x, its diagonal), S being the covariance of released noise over rounds.

    S^-1 is C^T C: a pattern x adds x^T C^T C x to the squared sensitivity, and the round weights
    C^T C x detect it best. An online tree releases less than its nodes, whose sensitivity is
    accounted for.
    """
    rounds = mechanism.rounds
    if isinstance(mechanism, GaussianMechanism):
        return lambda x: x, np.ones(rounds)
    if isinstance(mechanism, Blt | BandedToeplitz):
        given = (
            mechanism.parameters.coefs(rounds) if isinstance(mechanism, Blt) else mechanism.coefs
        )
        coefs = np.zeros(rounds)
        coefs[: len(given)] = given[:rounds]

        def toeplitz(x: Floats) -> Floats:
            there = np.convolve(x, coefs)[:rounds]
            back: Floats = np.convolve(there[::-1], coefs)[:rounds][::-1]
            return back

        return toeplitz, np.cumsum(coefs**2)[::-1]
    if isinstance(mechanism, BandMF):
        gram = np.asarray(mechanism.gram(), np.float64)

        def banded(x: Floats) -> Floats:
            out = np.asarray(gram[0] * x, np.float64)
            for d in range(1, len(gram)):
                out[: rounds - d] += gram[d, : rounds - d] * x[d:]
                out[d:] += gram[d, : rounds - d] * x[: rounds - d]
            return out

        return banded, np.array(gram[0])
    precision: Floats
    if isinstance(mechanism, TreeAggFull):
        nodes = _nodes(rounds)
        precision = nodes.T @ nodes
    elif isinstance(mechanism, TreeAgg):
        noising = online_tree_map(rounds, mechanism.restarts)
        precision = np.asarray(np.linalg.inv(noising @ noising.T), np.float64)
    else:
        raise ConfigError(f"the audit cannot test the mechanism {mechanism.name}")
    return lambda x: precision @ x, np.diag(precision).copy()


def _nodes(rounds: int) -> Floats:
    """(nodes, rounds) of the complete trees that cover the rounds: ones where a node has a leaf."""
    rows, at = [], 0
    for size in forest_sizes(rounds):
        for level in range(size.bit_length()):
            for first in range(at, at + size, 1 << level):
                row = np.zeros(rounds)
                row[first : first + (1 << level)] = 1
                rows.append(row)
        at += size
    return np.array(rows)


def online_tree_map(rounds: int, restarts: Sequence[int]) -> Floats:
    """(rounds, draws) matrix from independent draws to the noise that `TreeAgg` releases."""
    shares = node_variances(rounds.bit_length() + 1)
    draws = 2 * rounds
    out = np.zeros((rounds, draws))
    held: dict[int, Floats] = {}
    begun, used = 0, 0
    for index in range(rounds):
        if index in restarts:
            begun, held = index, {}
        estimate, gone, level = np.zeros(draws), np.zeros(draws), 0
        estimate[used] = 1
        used += 1
        while (index - begun) >> level & 1:
            left, share = held.pop(level), shares[level + 1]
            estimate, gone = (1 - share) * (left + estimate), gone + left
            estimate[used] += share
            used, level = used + 1, level + 1
        held[level] = estimate
        out[index] = estimate - gone
    return out


def worst_pattern(
    gram: Callable[[Floats], Floats], diagonal: Floats, gap: int, times: int
) -> tuple[tuple[int, ...], float]:
    """(rounds, squared sensitivity) of the worst pattern that a local search finds.

    Starting from evenly spaced patterns, it moves each participation in turn to where it adds most,
    until none moves. The earliest pattern, which is the worst for Toeplitz matrices (BLT Theorem
    3.1), is among them; for trees a worse one may be missed, which makes the audit weaker.
    """
    rounds = len(diagonal)
    room = rounds - (times - 1) * gap  # first rounds that leave room for all
    starts = sorted({0, room - 1, *(1 << bit for bit in range(room.bit_length() - 1))})
    spread = max((rounds - 1) // max(times - 1, 1), gap) if times > 1 else gap
    begun = [
        [start + step * place for place in range(times)]
        for step in {gap, spread}
        for start in starts
        if start + (times - 1) * step < rounds
    ]
    value, pattern = max(_improved(gram, diagonal, gap, even) for even in begun)
    return pattern, value


def _improved(
    gram: Callable[[Floats], Floats], diagonal: Floats, gap: int, pattern: list[int]
) -> tuple[float, tuple[int, ...]]:
    rounds = len(diagonal)
    moved = True
    while moved:
        moved = False
        for place in range(len(pattern)):
            others = np.zeros(rounds)
            others[pattern[:place] + pattern[place + 1 :]] = 1
            adds = diagonal + 2 * gram(others)
            first = pattern[place - 1] + gap if place else 0
            last = pattern[place + 1] - gap if place + 1 < len(pattern) else rounds - 1
            best = first + int(np.argmax(adds[first : last + 1]))
            if adds[best] > adds[pattern[place]] * (1 + 1e-12):
                pattern[place], moved = best, True
    there = np.zeros(rounds)
    there[pattern] = 1
    return float(there @ gram(there)), tuple(pattern)


def _along(seen: Any, names: Array) -> Array:
    """(canaries,) of what was seen along each canary's direction."""

    def one(name: Array) -> Array:
        parts = jax.tree.map(jnp.vdot, seen, direction(name, seen))
        return jnp.asarray(sum(jax.tree.leaves(parts)))

    return jax.lax.map(one, names)


def _refuse_others(settings: TrainingSettings) -> None:
    privacy = settings.privacy
    if privacy.mechanism == "none":
        raise PrivacyError("a run without noise hides nobody: there is nothing to audit")
    if settings.sampling.kind == "poisson":
        raise PrivacyError(
            "the guarantee of Poisson-sampled cohorts is not Gaussian, and this audit measures a "
            "Gaussian one: set sampling.kind to timer or fixed to audit only the noise"
        )
    if privacy.adaptive or privacy.estimator != "fixed":
        raise PrivacyError(
            "an audit needs a clip norm that does not adapt and estimator = fixed: otherwise "
            "canaries would drive both"
        )
