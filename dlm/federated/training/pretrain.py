"""Pretrains a network on public text (GDP 2.3), which costs no privacy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dlm.errors import ConfigError
from dlm.federated.tokens import Ids, sequence, windows
from dlm.federated.training import rnn


def pretrain(
    params: rnn.Params,
    model: rnn.RnnConfig,
    utterances: Sequence[Ids],
    *,
    steps: int,
    batch_size: int,
    unroll: int,
    learning_rate: float,
    order: np.random.Generator,
    progress: Callable[[int, float], None] | None = None,
) -> rnn.Params:
    """Trains for `steps` steps of Adam on public text, whose rows `order` shuffles in each pass.
    Raises ConfigError without text. `progress` gets the step and mean loss every 100 steps."""
    rows = [windows(sequence(ids), unroll) for ids in utterances if len(ids)]
    if not rows:
        raise ConfigError(
            "the public text to pretrain on (pretrain.text) is empty; give a text with words, or "
            "leave pretrain.text out"
        )
    text = np.concatenate(rows)
    optimizer = optax.adam(learning_rate)
    state = rnn.initial_state(model, batch_size)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: rnn.Params, moments: optax.OptState, batch: jax.Array
    ) -> tuple[rnn.Params, optax.OptState, jax.Array]:
        gradient = jax.value_and_grad(rnn.batch_loss, has_aux=True)
        (loss, _), slope = gradient(params, model, state, batch)
        change, moments = optimizer.update(slope, moments, params)
        return optax.apply_updates(params, change), moments, loss

    # The first step donates its input, so give it a copy; the caller keeps the original.
    params = jax.tree.map(jnp.copy, params)
    moments = optimizer.init(params)
    waiting = np.empty(0, np.int64)
    losses: list[float] = []
    for index in range(steps):
        while len(waiting) < batch_size:
            waiting = np.concatenate([waiting, order.permutation(len(text))])
        chosen, waiting = waiting[:batch_size], waiting[batch_size:]
        params, moments, loss = step(params, moments, jnp.asarray(text[chosen]))
        losses.append(loss)
        if progress is not None and ((index + 1) % 100 == 0 or index + 1 == steps):
            progress(index + 1, float(np.mean([float(one) for one in losses])))
            losses.clear()
    return params
