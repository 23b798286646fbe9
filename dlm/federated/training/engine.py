"""Computes and adds up the updates of a cohort: the interface to real devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dlm.errors import ConfigError
from dlm.federated import fixed_point
from dlm.federated.tokens import PAD
from dlm.federated.training import rnn
from dlm.federated.training.clip import Array
from dlm.federated.training.local import LocalConfig, UserUpdate, UserWork, user_update


class RoundSums(NamedTuple):
    """Sums over a cohort. All of them come from users' data and have no noise yet.
    Fields
        update    tree of float64  sum of w_k times the clipped update, in integers (`fixed_point`)
        below     float32  sum of b - 1/2; b is 1 if a norm is at most the tracked norm, else 0
        weight    float    sum of w_k, exact
        clipped   float32  number of updates longer than the clip norm
        refused   float32  number of updates with inf or nan
        ln_prob   float32  sum of ln P(target), over all devices and steps
        targets   float32  number of targets
    """

    update: Any
    below: Array
    weight: Array | float
    users: Array
    clipped: Array
    refused: Array
    ln_prob: Array
    targets: Array


class Aggregator(Protocol):
    """Adds up updates, a few at a time, in the clear or as secure aggregation does."""

    def zero(self, template: Any, bound: float | None = None) -> Any:
        """Returns an empty total for updates shaped like `template`, of norms up to `bound`."""
        ...

    def add(self, total: Any, updates: Any, key: Any) -> Any:
        """Adds the `updates` of more devices, stacked on axis 0; `key` is the round's key."""
        ...

    def result(self, total: Any, reports: int) -> Any:
        """Returns the sum as a tree of float64."""
        ...

    def sensitivity_factor(self, dimension: int) -> float:
        """The factor by which an update can exceed the clip norm after encoding; at least 1."""
        ...


class Engine(Protocol):
    """Computes the sums that a round needs from its cohort."""

    def sums(
        self, params: rnn.Params, cohort: Any, bound: Array, tracked: Array, key: Any
    ) -> RoundSums:
        """Returns the cohort's sums, with each update clipped to `bound`. `below` compares the
        norms with `tracked` (adaptive clipping); secure aggregation uses `key` to round."""
        ...

    def sensitivity_factor(self, dimension: int) -> float:
        """The aggregator's factor; 1 if updates are added up in the clear."""
        ...


def _stacked(cohort: Sequence[UserWork], rows: int, batches: int) -> tuple[Any, Any, Any, Any]:
    first = cohort[0].batches
    work = np.full((rows, batches, *first.shape[1:]), PAD, np.int32)
    used, weight = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
    there = np.zeros(rows, np.float32)
    for place, user in enumerate(cohort):
        work[place, : len(user.batches)] = user.batches
        used[place], weight[place], there[place] = len(user.batches), user.weight, 1.0
    return work, used, weight, there


class LocalEngine:
    """Computes the users' updates on this machine.

    Args
        aggregator  gets every weighted update in turn, as a device would send it; if None, updates
                    are added up as integers inside the compiled loop
        block       users in memory at a time, rounded up to a multiple of `users_at_once`
        bits        the clip norm is at most 2^bits steps of the integers that are added up
    Cost            memory: parameters, one 64-bit sum and `users_at_once` updates, however large
                    the cohort
    """

    def __init__(
        self,
        model: rnn.RnnConfig,
        config: LocalConfig,
        *,
        aggregator: Aggregator | None = None,
        block: int = 32,
        bits: int = fixed_point.BITS,
    ) -> None:
        if block < 1:
            raise ConfigError(f"a block has {block} users; expected 1 or more")
        self._model, self._config, self._aggregator = model, config, aggregator
        self.bits = bits
        self._block = -(-block // config.users_at_once) * config.users_at_once
        self._add = jax.jit(self._add_block, donate_argnums=0)
        self._each = jax.jit(self._updates_of)

    def sensitivity_factor(self, dimension: int) -> float:
        if self._aggregator is None:
            return 1.0
        return float(self._aggregator.sensitivity_factor(dimension))

    @property
    def aggregator(self) -> Aggregator | None:
        return self._aggregator

    def sums(
        self,
        params: rnn.Params,
        cohort: Sequence[UserWork],
        bound: Array,
        tracked: Array,
        key: Any,
    ) -> RoundSums:
        """See `Engine.sums`; ConfigError if a user has no batch, batches of the wrong shape, or a
        weight above 1."""
        self._check(cohort)
        if not cohort:
            nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape), params)
            return RoundSums(nothing, *(jnp.float32(0.0) for _ in range(7)))
        if self._aggregator is None:
            sums = self._added_up(params, cohort, bound, tracked)
        else:
            sums = self._handed_over(self._aggregator, params, cohort, bound, tracked, key)
        return sums._replace(weight=math.fsum(user.weight for user in cohort))

    def _added_up(
        self, params: rnn.Params, cohort: Sequence[UserWork], bound: Array, tracked: Array
    ) -> RoundSums:
        """Sums updates exactly, as integers; without a clip norm, as floats, which are rounded."""
        clipped = math.isfinite(float(bound))
        if len(cohort) > fixed_point.MOST_UPDATES:
            raise ConfigError(
                f"a cohort has {len(cohort):,} users; expected at most "
                f"{fixed_point.MOST_UPDATES:,}, so that sums are exact. Lower the report goal or q"
            )
        scale = fixed_point.steps_per_unit(float(bound), self.bits) if clipped else 1.0
        total = fixed_point.zeros(params) if clipped else jax.tree.map(jnp.zeros_like, params)
        sums = RoundSums(total, *(jnp.float32(0.0) for _ in range(7)))
        for block in self._blocks(cohort):
            sums = self._add(sums, params, *block, bound, tracked, jnp.float32(scale))
        if clipped:
            return sums._replace(update=fixed_point.values(sums.update, scale))
        return sums

    def _handed_over(
        self,
        aggregator: Aggregator,
        params: rnn.Params,
        cohort: Sequence[UserWork],
        bound: Array,
        tracked: Array,
        key: Any,
    ) -> RoundSums:
        at_once, room = self._config.users_at_once, self._batches(cohort)
        total = aggregator.zero(params, float(bound))
        rest: list[Any] = [0.0] * (len(RoundSums._fields) - 1)
        for start in range(0, len(cohort), at_once):
            part = cohort[start : start + at_once]
            updates, counted = self._each(params, *_stacked(part, at_once, room), bound, tracked)
            # Padding rows are not devices, so leave them out.
            sent = jax.tree.map(itemgetter(slice(len(part))), updates)
            total = aggregator.add(total, sent, key)
            rest = [a + b for a, b in zip(rest, counted[1:], strict=True)]
        result = aggregator.result(total, len(cohort))
        return RoundSums(result, *rest)

    def _check(self, cohort: Sequence[UserWork]) -> None:
        shape = (self._config.batch_size, self._config.unroll + 1)
        for user in cohort:
            if user.batches.ndim != 3 or user.batches.shape[1:] != shape or not len(user.batches):
                raise ConfigError(
                    f"a user's batches have shape {user.batches.shape}; expected (1 or more, "
                    f"{shape[0]}, {shape[1]}): pack the text with this run's settings"
                )
            if not 0.0 <= user.weight <= 1.0:
                raise ConfigError(f"a user's weight is {user.weight}; expected 0 to 1")

    def _batches(self, cohort: Sequence[UserWork]) -> int:
        return 1 << (max(len(user.batches) for user in cohort) - 1).bit_length()

    def _blocks(self, cohort: Sequence[UserWork]) -> Iterator[tuple[Any, Any, Any, Any]]:
        room = self._batches(cohort)
        for start in range(0, len(cohort), self._block):
            yield _stacked(cohort[start : start + self._block], self._block, room)

    def _update_of(self, params: rnn.Params, batches: Array, used: Array, bound: Array) -> Any:
        return user_update(params, batches, used, bound, model=self._model, config=self._config)

    def _side_by_side(
        self, params: rnn.Params, batches: Array, used: Array, bound: Array
    ) -> UserUpdate:
        if self._config.users_at_once == 1:
            alone = self._update_of(params, batches[0], used[0], bound)
            stacked: UserUpdate = jax.tree.map(lambda leaf: leaf[None], alone)
            return stacked
        of_user = partial(self._update_of, params, bound=bound)
        result: UserUpdate = jax.vmap(of_user)(batches, used)
        return result

    def _updates_of(
        self,
        params: rnn.Params,
        batches: Array,
        used: Array,
        weight: Array,
        there: Array,
        bound: Array,
        tracked: Array,
    ) -> tuple[Any, RoundSums]:
        users = self._side_by_side(params, batches, used, bound)

        def weighted(leaf: Array) -> Array:
            return leaf * weight.reshape(-1, *([1] * (leaf.ndim - 1)))

        counted = RoundSums(
            None,
            below=(((users.norm <= tracked) - 0.5) * there).sum(),
            weight=weight.sum(),
            users=there.sum(),
            clipped=((users.norm > bound) & users.finite).sum().astype(jnp.float32),
            refused=(there * ~users.finite).sum(),
            ln_prob=(jnp.where(jnp.isfinite(users.ln_prob), users.ln_prob, 0.0)).sum(),
            targets=users.targets.sum(),
        )
        return jax.tree.map(weighted, users.update), counted

    def _add_block(
        self,
        sums: RoundSums,
        params: rnn.Params,
        batches: Array,
        used: Array,
        weight: Array,
        there: Array,
        bound: Array,
        tracked: Array,
        scale: Array,
    ) -> RoundSums:
        at_once = self._config.users_at_once
        parts = [
            leaf.reshape(-1, at_once, *leaf.shape[1:]) for leaf in (batches, used, weight, there)
        ]

        def add(sums: RoundSums, part: list[Array]) -> tuple[RoundSums, None]:
            work, used, weight, there = part
            updates, counted = self._updates_of(params, work, used, weight, there, bound, tracked)
            # Skip padding, since adding its zeros would only take time.
            total = jax.lax.cond(
                there.sum() > 0,
                lambda old: self._sum_of(old, updates, scale),
                lambda old: old,
                sums.update,
            )
            rest = [a + b for a, b in zip(sums[1:], counted[1:], strict=True)]
            return RoundSums(total, *rest), None

        total: RoundSums = jax.lax.scan(add, sums, parts)[0]
        return total

    def _sum_of(self, total: Any, updates: Any, scale: Array) -> Any:
        if not fixed_point.is_sum(total):
            return jax.tree.map(lambda t, u: t + u.sum(0), total, updates)

        def add(held: Any, update: Any) -> tuple[Any, None]:
            return fixed_point.plus(held, update, scale), None

        return jax.lax.scan(add, total, updates)[0]
