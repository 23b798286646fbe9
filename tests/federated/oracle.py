"""A round in plain loops: the oracle of `local` and `engine`.

Nothing is stacked or filled up here, and nothing compiled but the gradient of one batch; a user is
a list of batches and a round a loop over users. It follows the pseudo-code of DPF Algorithm 1 and
GDP Algorithm 1 line by line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np

from dlm.federated.training import rnn
from dlm.federated.training.local import LocalConfig, UserWork


def norm_of(tree: Any) -> float:
    """L2 norm in float64."""
    squares = (np.square(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(tree))
    return math.sqrt(sum(squares))


def clip(kind: str, update: Any, bound: float) -> Any:
    """pi(update, S) of the whole, or of each of m arrays with S / sqrt(m)."""
    leaves, shape = jax.tree.flatten(update)
    if not math.isfinite(norm_of(update)):
        return jax.tree.unflatten(shape, [np.zeros_like(leaf) for leaf in leaves])
    if kind == "flat":
        factors = [min(1.0, bound / max(norm_of(update), 1e-30))] * len(leaves)
    else:
        share = bound / math.sqrt(len(leaves))
        factors = [min(1.0, share / max(norm_of(leaf), 1e-30)) for leaf in leaves]
    scaled = [np.asarray(leaf) * factor for leaf, factor in zip(leaves, factors, strict=True)]
    return jax.tree.unflatten(shape, scaled)


@cache
def _gradient(model: rnn.RnnConfig) -> Any:
    """(parameters, state, batch) -> gradient, state."""

    def slope(params: rnn.Params, state: rnn.State, batch: Any) -> Any:
        found, (state, _) = jax.grad(rnn.batch_loss, has_aux=True)(params, model, state, batch)
        return found, state

    return jax.jit(slope)


def user_update(
    params: rnn.Params, work: UserWork, bound: float, *, model: rnn.RnnConfig, config: LocalConfig
) -> Any:
    """UserUpdate of DPF Algorithm 1 (clipped after each batch), ClientUpdate of GDP (once)."""
    start = jax.tree.map(np.asarray, params)
    here = start
    for _ in range(config.epochs):
        state = rnn.initial_state(model, config.batch_size)
        for batch in work.batches:
            if config.packing == "utterances":
                state = rnn.initial_state(model, config.batch_size)
            slope, state = _gradient(model)(here, state, batch)
            here = jax.tree.map(lambda m, g: m - config.learning_rate * np.asarray(g), here, slope)
            if config.clip_after == "batch":
                moved = clip(config.clip_kind, jax.tree.map(np.subtract, here, start), bound)
                here = jax.tree.map(np.add, start, moved)
    update = jax.tree.map(np.subtract, here, start)
    return update if config.clip_after == "batch" else clip(config.clip_kind, update, bound)


def round_sum(
    params: rnn.Params,
    cohort: Sequence[UserWork],
    bound: float,
    *,
    model: rnn.RnnConfig,
    config: LocalConfig,
) -> Any:
    """Sum over the users of w_k times the clipped update, in float64."""
    total = jax.tree.map(lambda leaf: np.zeros(leaf.shape), params)
    for work in cohort:
        update = user_update(params, work, bound, model=model, config=config)
        total = jax.tree.map(lambda t, u: t + work.weight * np.asarray(u, float), total, update)  # noqa: B023
    return total
