"""What a round releases: the bounded sum, the claimed noise, and nothing that was not noised."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="pip install -e '.[train]'")
optax = pytest.importorskip("optax", reason="pip install -e '.[train]'")
jnp = jax.numpy

from dlm.errors import ConfigError, PrivacyError  # noqa: E402
from dlm.federated.account.zcdp import split_noise  # noqa: E402
from dlm.federated.keys import Key  # noqa: E402
from dlm.federated.noise import make_mechanism  # noqa: E402
from dlm.federated.noise.blt import Blt, BltParameters  # noqa: E402
from dlm.federated.noise.discrete import discrete  # noqa: E402
from dlm.federated.noise.mechanism import Mechanism  # noqa: E402
from dlm.federated.training import rnn  # noqa: E402
from dlm.federated.training.clip import LEAST_NORM, AdaptiveClip  # noqa: E402
from dlm.federated.training.engine import LocalEngine, RoundSums  # noqa: E402
from dlm.federated.training.local import LocalConfig, UserWork, work_of  # noqa: E402
from dlm.federated.training.rnn import RnnConfig  # noqa: E402
from dlm.federated.training.rounds import (  # noqa: E402
    FederatedAlgorithm,
    OptimizerConfig,
    ReleaseConfig,
    TrainingState,
    make_algorithm,
)
from federated import oracle  # noqa: E402
from federated.linear import distance, linear_map  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compiling")

MODEL = RnnConfig(17, 6, 8)
LOCAL = LocalConfig(learning_rate=0.7, batch_size=3, unroll=4)
SGD = OptimizerConfig("sgd", 1.0)
KEY = Key.from_seed(11)


class Roomy(LocalEngine):
    """Compiled once for all tests: there is room for the longest of all of their users."""

    def _batches(self, cohort: Sequence[UserWork]) -> int:
        assert max(len(user.batches) for user in cohort) <= 512
        return 512


ENGINE = Roomy(MODEL, LOCAL, block=4)


@cache
def params() -> Any:
    """A fresh model."""
    return rnn.init(jax.random.key(0), MODEL)


def cohort(count: int = 4, seed: int = 5, length: int = 9) -> list[UserWork]:
    """Users with some text."""
    rng = np.random.default_rng(seed)
    return [
        work_of([rng.integers(3, 17, length).astype(np.int32)], LOCAL, rng) for _ in range(count)
    ]


def algorithm(
    release: ReleaseConfig,
    mechanism: Any = None,
    *,
    server: OptimizerConfig = SGD,
    engine: Any = None,
    simulation: bool = True,
) -> FederatedAlgorithm:
    """Rounds on the small model."""
    noise = None if mechanism is None else discrete(mechanism)
    return make_algorithm(release, server, engine or ENGINE, noise, simulation=simulation)


def flat(tree: Any) -> np.ndarray[Any, Any]:
    """All numbers of a tree in a row."""
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def bits(tree: Any) -> list[bytes | Key]:
    """All leaves as bytes; a key as itself."""
    return [x if isinstance(x, Key) else np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


# What a round releases: sums of bounded updates.


def plain_update(work: UserWork, local: LocalConfig) -> Any:
    """What a user would hand in if nothing were clipped."""
    return oracle.user_update(params(), work, 1e9, model=MODEL, config=local)


@pytest.mark.parametrize(("clip_after", "clip_kind"), [("user", "flat"), ("batch", "per_layer")])
def test_one_huge_user_moves_the_sum_by_at_most_the_clip_norm(
    clip_after: Any, clip_kind: Any
) -> None:
    """Through `apply`: with and without a user of hundreds of times the text of the others."""
    local = dataclasses.replace(LOCAL, clip_after=clip_after, clip_kind=clip_kind)
    bound, over = 0.3, 4.0
    rounds = algorithm(
        ReleaseConfig(bound, 0.0, over), engine=ENGINE if local == LOCAL else Roomy(MODEL, local)
    )
    state = rounds.init(params(), None)
    rng = np.random.default_rng(1)
    huge = work_of([rng.integers(3, 17, 50).astype(np.int32) for _ in range(60)], local, rng)
    users = cohort()
    without = rounds.apply(state, users)[0]
    with_huge = rounds.apply(state, [*users, huge])[0]
    moved = (flat(with_huge.params) - flat(without.params)) * over
    norm = float(np.linalg.norm(moved))
    # The difference of two models in float32 is known to some 1e-6 of the bound.
    assert norm <= bound * (1 + 1e-4)
    assert norm > (0.9 if clip_kind == "flat" else 0.3) * bound
    assert oracle.norm_of(plain_update(huge, local)) > 10 * bound


@pytest.mark.parametrize(
    ("estimator", "over"), [("fixed", 8.0), ("clipped", 8.0), ("clipped", 2.0)]
)
def test_the_average_is_over_the_estimators_denominator(estimator: Any, over: float) -> None:
    """f~_f: over q W whatever came. f~_c: over the weight that came, at least q W_min."""
    local = dataclasses.replace(LOCAL, example_cap=20.0)
    rng = np.random.default_rng(5)
    users = [work_of([rng.integers(3, 17, n).astype(np.int32)], local, rng) for n in (9, 19, 40)]
    assert sum(u.weight for u in users) == pytest.approx(2.5)
    rounds = algorithm(ReleaseConfig(0.3, 0.0, over, estimator))
    after = rounds.apply(rounds.init(params(), None), users)[0]
    total = oracle.round_sum(params(), users, 0.3, model=MODEL, config=local)
    divisor = over if estimator == "fixed" else max(over, 2.5)
    np.testing.assert_allclose(
        flat(after.params) - flat(params()), flat(total) / divisor, rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adam"])
def test_the_server_steps_as_its_optimiser_says(name: Any) -> None:
    """Over four rounds, against the recursions in float64; of sums in plain loops over m."""
    server = OptimizerConfig(name, 0.5, 0.9, 0.99, 1e-3)
    rounds = algorithm(ReleaseConfig(0.3, 0.0, 4.0), server=server)
    state = rounds.init(params(), None)
    velocity = first = second = np.zeros_like(flat(params()))
    for index in range(4):
        users = cohort(2, seed=index)
        total = oracle.round_sum(state.params, users, 0.3, model=MODEL, config=LOCAL)
        step = flat(total) / 4.0
        velocity = 0.9 * velocity + step
        first = 0.9 * first + 0.1 * step
        second = 0.99 * second + 0.01 * step**2
        moves = {
            "sgd": step,
            "momentum": velocity,
            "nesterov": 0.9 * velocity + step,
            "adam": first
            / (1 - 0.9 ** (index + 1))
            / (np.sqrt(second / (1 - 0.99 ** (index + 1))) + 1e-3),
        }
        expected = flat(state.params) + 0.5 * moves[name]
        state, told = rounds.apply(state, users)
        np.testing.assert_allclose(flat(state.params), expected, rtol=2e-3, atol=2e-5)
        assert told.released_norm == pytest.approx(oracle.norm_of(total) / 4.0, rel=1e-4)
    assert (int(state.round), state.noise) == (4, None)


# What is added: noise of the claimed covariance.

# With an empty cohort no network is run: any tree of arrays will do for a model.
WIDE = {"a": jnp.zeros((130, 100)), "b": jnp.zeros(13_000)}
Z, C, OVER, ROUNDS = 1.5, 2.0, 3.0, 7


def release_of(
    mechanism: Any, release: ReleaseConfig | None = None, fresh: tuple[int, ...] = ()
) -> np.ndarray[Any, Any]:
    """What empty cohorts release over rounds, in units of what one user may move: (rounds, d);
    in rounds `fresh` a run goes on with another key."""
    release = release or ReleaseConfig(C, Z, OVER)
    rounds = algorithm(release, mechanism)
    state = rounds.init(WIDE, KEY)
    rows = []
    for index in range(ROUNDS):
        before = with_key(state, Key.from_seed(100 + index)) if index in fresh else state
        state = rounds.apply(before, [])[0]
        rows.append(flat(state.params) - flat(before.params))
    return np.stack(rows) * OVER / (Z * C)


NAMES = ["gaussian", "tree", "tree-restart", "blt", "bandfhu"]


def mechanism_of(name: str) -> Mechanism:
    """One whose noise is tested by itself in `test_noise.py`."""
    if name == "blt":
        return Blt(ROUNDS, BltParameters((0.95, 0.5), (0.3, 0.2)))
    restarts = (3,) if name == "tree-restart" else ()
    return make_mechanism(name, rounds=ROUNDS, bands=4, restarts=restarts)


def distance_from(rows: np.ndarray[Any, Any], mechanism: Mechanism) -> float:
    """How far released rounds are from a mechanism's covariance: the worst, in sigmas."""
    released = linear_map(mechanism)
    return distance(rows, released @ released.T)


@pytest.mark.promise("noise")
@pytest.mark.parametrize("name", NAMES)
def test_empty_cohorts_release_exactly_the_claimed_noise(name: str) -> None:
    """Covariance over rounds within five standard errors; 26,000 numbers a round."""
    mechanism = mechanism_of(name)
    rows = release_of(mechanism)
    assert distance_from(rows, mechanism) < 5.0
    assert distance_from(1.05 * rows, mechanism) > 8.0
    if name == "tree":  # buffers stay, draws are others
        assert distance_from(release_of(mechanism, fresh=(2, 5)), mechanism) < 5.0


def test_the_clipped_denominator_has_twice_the_noise_of_its_floor() -> None:
    """Standard deviation z * 2 S / (q W_min) (DPF Algorithm 1)."""
    mechanism = mechanism_of("gaussian")
    rows = release_of(mechanism, ReleaseConfig(C, Z, OVER, "clipped"))
    assert distance_from(rows / 2.0, mechanism) < 5.0


def test_a_scheduled_clip_norm_takes_its_noise_with_it() -> None:
    """DPF Figures 4 and 8: the same noise multiplier, from round 4 on at a fourth of the norm."""
    release = ReleaseConfig(C, Z, OVER, schedule=((4, C / 4),))
    rows = release_of(mechanism_of("gaussian"), release)
    rows[4:] *= 4.0
    assert distance_from(rows, mechanism_of("gaussian")) < 5.0
    rounds = algorithm(dataclasses.replace(release, noise_multiplier=0.0))
    state = rounds.init(params(), None)
    for index in range(6):
        state, told = rounds.apply(state, cohort(1, length=40))
        assert told.clip_norm == (C if index < 4 else C / 4)
    assert told.released_norm <= C / 4 / OVER * (1 + 1e-5)


ADAPTIVE = AdaptiveClip(0.5, 0.2, 4.0, first_restart=2, restart_every=3)


def test_an_adaptive_clip_norm_splits_the_noise_and_follows_at_restarts_only() -> None:
    """Updates get z_Delta, and C changes after rounds 2 and 5, where the tree begins anew."""
    mechanism = make_mechanism("tree-restart", rounds=ROUNDS, restarts=(3, 6))
    release = ReleaseConfig(C, Z, OVER, adaptive=ADAPTIVE)
    rounds = algorithm(release, mechanism)
    state = rounds.init(WIDE, KEY)
    rows, norms, tracked = [], [], [math.log(C)]
    for _ in range(ROUNDS):
        before = state
        state, told = rounds.apply(state, [])
        norms.append(told.clip_norm)
        tracked.append(float(state.ln_norm))
        rows.append((flat(state.params) - flat(before.params)) * OVER / told.clip_norm)
    z_delta = split_noise(Z, 4.0)
    assert z_delta > Z * 1.01
    assert distance_from(np.stack(rows) / z_delta, mechanism) < 5.0
    assert norms[:3] == [C] * 3
    assert norms[3:6] == [pytest.approx(math.exp(tracked[3]), rel=1e-6)] * 3
    assert norms[6] == pytest.approx(math.exp(tracked[6]), rel=1e-6)
    # An empty cohort's centred count is noise alone, so every step is.
    assert len({round(b - a, 9) for a, b in itertools.pairwise(tracked)}) == ROUNDS


def test_an_adaptive_clip_norm_ends_where_clipping_does() -> None:
    """Updates of nothing but zeros let it fall in every round, to where squares would vanish."""
    release = ReleaseConfig(C, 0.0, OVER, adaptive=ADAPTIVE)
    rounds = algorithm(release, None)
    state = rounds.init(WIDE, KEY)._replace(round=jnp.int32(2), ln_norm=jnp.float32(-100.0))
    assert rounds.apply(state, [])[0].bound == np.float32(LEAST_NORM)


def test_an_adaptive_clip_norm_without_noise_finds_the_quantile() -> None:
    """Half of the users' updates end up below it; it changes after restarts alone."""
    quick = dataclasses.replace(ADAPTIVE, learning_rate=0.3, first_restart=0, restart_every=1)
    release = ReleaseConfig(0.7, 0.0, 6.0, adaptive=quick)
    rounds = algorithm(release, server=OptimizerConfig("sgd", 1e-6))
    state = rounds.init(params(), None)
    users = [u for n in (2, 4, 8, 16, 32, 64) for u in cohort(1, seed=n, length=n)]
    for _ in range(40):
        state, told = rounds.apply(state, users)
    assert told.raw is not None
    assert told.raw.clipped == 3


# What is kept, and what is not.


@pytest.mark.parametrize("name", NAMES)
def test_the_state_depends_on_users_only_through_what_is_released(name: str) -> None:
    """GDP 3: no sum without noise is held. From the old state and the released average alone, an
    observer computes every number of the new state, to the bit."""
    mechanism = mechanism_of(name)
    release = ReleaseConfig(0.3, 0.5, 4.0)
    server = OptimizerConfig("momentum", 0.7)
    rounds = algorithm(release, mechanism, server=server)
    state = rounds.init(params(), KEY)
    optimizer = server.transformation()
    for index in range(5):
        after, _ = rounds.apply(state, cohort(seed=index))
        # With momentum the new velocity minus 0.9 of the old one is the released average.
        old, new = (s.optimizer[0].trace for s in (state, after))
        minus_average = jax.tree.map(lambda n, o: n - 0.9 * o, new, old)
        step, _ = optimizer.update(minus_average, state.optimizer, state.params)
        again = optax.apply_updates(state.params, step)
        np.testing.assert_allclose(flat(again), flat(after.params), rtol=1e-5, atol=1e-6)
        # The rest: the same whoever came.
        other, _ = rounds.apply(state, [])
        for name in ("round", "bound", "ln_norm", "noise"):
            assert bits(getattr(after, name)) == bits(getattr(other, name))
        assert bits(after.params) != bits(other.params)
        state = after


def test_rounds_are_pure() -> None:
    """The same state and cohort give the same bits, also after other rounds; states stay as are."""
    rounds = algorithm(
        ReleaseConfig(0.3, 0.5, 4.0),
        make_mechanism("tree", rounds=ROUNDS),
        server=OptimizerConfig("adam", 0.1),
    )
    first = rounds.init(params(), KEY)
    before = bits(first)
    second = rounds.apply(first, cohort())[0]
    rounds.apply(second, cohort(seed=9))
    assert bits(first) == before
    assert bits(rounds.apply(first, cohort())[0]) == bits(second)


def test_a_state_has_the_types_of_the_state_after_it() -> None:
    """Otherwise all would be compiled again in the second round."""
    rounds = algorithm(
        ReleaseConfig(0.3, 0.5, 4.0),
        make_mechanism("tree", rounds=ROUNDS),
        server=OptimizerConfig("adam", 0.1),
    )
    state = rounds.init({"a": jnp.full(3, 1.0), "b": jnp.zeros(2)}, KEY)
    after = rounds.apply(state, [])[0]
    state, after = (one._replace(noise=None) for one in (state, after))
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, after)


def test_what_was_seen_without_noise_is_told_in_simulations_only() -> None:
    """A run that is none gets no loss, no count, no share of clipped updates."""
    release = ReleaseConfig(0.3, 0.5, 4.0)
    told = {}
    for simulation in (True, False):
        rounds = algorithm(release, make_mechanism("gaussian", rounds=2), simulation=simulation)
        told[simulation] = rounds.apply(rounds.init(params(), KEY), cohort())[1]
    assert told[False].raw is None
    raw = told[True].raw
    assert raw is not None
    assert raw.users == 4
    assert raw.mean_ln_prob < 0
    assert told[True]._replace(raw=None) == told[False]


def keys_drawn(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every key that numbers are drawn from, from now on."""
    used: list[bytes] = []
    material = Key.material

    def expanded(key: Key) -> bytes:
        used.append(material(key))
        return used[-1]

    monkeypatch.setattr(Key, "material", expanded)
    return used


def with_key(state: TrainingState, key: Key) -> TrainingState:
    """As a run that resumes goes on: buffers as they are, another key."""
    return state._replace(noise=state.noise._replace(key=key))


@pytest.mark.parametrize("name", ["gaussian", "tree", "tree-restart"])
def test_no_key_is_drawn_from_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all rounds, nodes and restarts, and a fresh key; one draws for all arrays at once."""
    used = keys_drawn(monkeypatch)
    mechanism = {
        "gaussian": make_mechanism("gaussian", rounds=12),
        "tree": make_mechanism("tree", rounds=12),
        "tree-restart": make_mechanism("tree-restart", rounds=12, restarts=(3, 6, 9)),
    }[name]
    adaptive = None if name == "tree" else ADAPTIVE
    rounds = algorithm(ReleaseConfig(C, Z, OVER, adaptive=adaptive), mechanism)
    state = rounds.init({"a": jnp.zeros(3), "b": jnp.zeros(2)}, KEY)
    for index in range(12):
        state = rounds.apply(state, [])[0]
        if index == 5:
            state = with_key(state, Key.from_seed(99))
    assert len(used) >= 2 * 12  # each draw has a stream for doubts, too
    assert len(set(used)) == len(used)


# What is refused.


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"clip_norm": 0.0}, PrivacyError, "expected 1e-12 or more"),
        ({"clip_norm": -1.0}, PrivacyError, "expected 1e-12 or more"),
        ({"clip_norm": math.nan}, PrivacyError, "expected 1e-12 or more"),
        ({"clip_norm": math.inf}, PrivacyError, "without a finite clip norm"),
        ({"noise_multiplier": -1.0}, PrivacyError, "noise multiplier"),
        ({"noise_multiplier": math.nan}, PrivacyError, "noise multiplier"),
        ({"denominator": 0.0}, PrivacyError, "denominator"),
        ({"estimator": "mean"}, ConfigError, "estimator"),
        ({"schedule": ((5, 1.0), (3, 1.0))}, ConfigError, "expected increasing"),
        ({"schedule": ((5, 0.0),)}, PrivacyError, "expected 1e-12 or more"),
        ({"adaptive": ADAPTIVE, "schedule": ((5, 1.0),)}, ConfigError, "schedule and an adaptive"),
        ({"adaptive": ADAPTIVE, "estimator": "clipped"}, ConfigError, "expected fixed"),
        (
            {"adaptive": AdaptiveClip(count_stddev=2.5), "noise_multiplier": 7.0},
            PrivacyError,
            "above 70;",
        ),
    ],
)
def test_a_release_without_a_guarantee_is_refused(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Never a silent weaker one."""
    good = ReleaseConfig(1.0, 1.0, 10.0)
    with pytest.raises(error, match=message):
        dataclasses.replace(good, **changed)


def test_noise_and_mechanism_come_together() -> None:
    """One without the other is refused, and so is noise without a key."""
    gaussian = make_mechanism("gaussian", rounds=2)
    with pytest.raises(PrivacyError, match="with no mechanism"):
        algorithm(ReleaseConfig(1.0, 1.0, 1.0))
    with pytest.raises(PrivacyError, match="the mechanism gaussian"):
        algorithm(ReleaseConfig(1.0, 0.0, 1.0), gaussian)
    with pytest.raises(PrivacyError, match="needs a key"):
        algorithm(ReleaseConfig(1.0, 1.0, 1.0), gaussian).init(params(), None)


def test_a_clip_norm_that_changes_under_correlated_noise_is_refused() -> None:
    """By schedule or by itself, except where the noise begins anew at that very round."""
    tree = make_mechanism("tree", rounds=9)
    right = make_mechanism("tree-restart", rounds=9, restarts=(3, 6))
    late = make_mechanism("tree-restart", rounds=9, restarts=(2, 5, 8))
    scheduled = ReleaseConfig(1.0, 1.0, 10.0, schedule=((3, 0.5),))
    adaptive = ReleaseConfig(1.0, 1.0, 10.0, adaptive=ADAPTIVE)
    for release in (scheduled, adaptive):
        for wrong in (tree, late):
            with pytest.raises(PrivacyError, match="made for another"):
                algorithm(release, wrong)
        algorithm(release, right)
        algorithm(release, make_mechanism("gaussian", rounds=9))


def test_a_round_past_the_last_is_refused() -> None:
    """The mechanism and its accounting are for so many rounds."""
    rounds = algorithm(ReleaseConfig(1.0, 1.0, 1.0), make_mechanism("gaussian", rounds=1))
    state = rounds.apply(rounds.init(params(), KEY), [])[0]
    with pytest.raises(PrivacyError, match=r"round 1 .*1 rounds"):
        rounds.apply(state, [])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"optimizer": "lamb"}, "optimizer is 'lamb'"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"momentum": 1.0}, "momentum"),
    ],
)
def test_an_impossible_server_is_refused(changed: dict[str, Any], message: str) -> None:
    """With what was found."""
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SGD, **changed)


def test_an_engine_of_another_kind_can_take_its_place() -> None:
    """The seam: whatever gives the sums of a cohort can be an engine."""

    class Devices:
        def sums(self, params: Any, cohort: Any, bound: Any, tracked: Any, key: Any) -> RoundSums:
            ones = jax.tree.map(jnp.ones_like, params)
            zero = jnp.float32(0.0)
            return RoundSums(ones, zero, jnp.float32(2.0), jnp.float32(2.0), *[zero] * 4)

        def sensitivity_factor(self, dimension: int) -> float:
            return 1.0

    rounds = algorithm(ReleaseConfig(1.0, 0.0, 2.0), engine=Devices())
    after: TrainingState = rounds.apply(rounds.init(params(), None), "devices of a service")[0]
    np.testing.assert_allclose(flat(after.params) - flat(params()), 0.5, rtol=1e-5)
