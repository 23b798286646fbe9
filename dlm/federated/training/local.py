"""Computes a device's part of a round: a few steps of SGD from the model that it received."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dlm.config import check, setting
from dlm.errors import ConfigError
from dlm.federated import tokens
from dlm.federated.tokens import Ids
from dlm.federated.training import clip, rnn
from dlm.federated.training.clip import Array, ClipKind


@dataclass(frozen=True)
class LocalConfig:
    learning_rate: float = setting(
        0.5,
        "Learning rate of steps on the device.",
        above=0,
        why="0.5 (FNG), 6.0 (DPF).",
    )
    algorithm: Literal["fedavg", "fedsgd"] = setting(
        "fedavg", "fedavg: one step of SGD per batch; fedsgd: one batch, one gradient."
    )
    batch_size: int = setting(16, "Rows of a batch.", low=1, why="16 (BLT), 8 (DPF).")
    unroll: int = setting(
        20,
        "Length of backpropagation through time.",
        unit="tokens",
        low=1,
        why="20 (BLT), 10 (DPF).",
    )
    epochs: int = setting(1, "Passes over a device's text; fedsgd makes one.", low=1)
    packing: Literal["utterances", "stream"] = setting(
        "utterances",
        "utterances: one row per utterance; stream: utterances are joined, and the state is "
        "carried over.",
    )
    shuffle: bool = setting(True, "Shuffle the text in each round.")
    max_batches: int = setting(0, "Batches per device, round and epoch; 0 for no limit.", low=0)
    clip_after: Literal["user", "batch"] = setting(
        "user", "user: clip once, after all steps (GDP); batch: after each step (DPF)."
    )
    clip_kind: ClipKind = setting("flat", "Clip the whole update, or each of its layers.")
    example_cap: float = setting(
        0.0,
        "Tokens that give a user full weight; 0 for equal weights.",
        low=0,
        why="w^ in w_k = min(n_k / w^, 1).",
    )
    users_at_once: int = setting(
        1,
        "Users computed in parallel.",
        low=1,
        why="1 on a CPU; more is faster on a GPU.",
    )

    def __post_init__(self) -> None:
        check("local", self)
        if self.algorithm == "fedsgd" and self.epochs != 1:
            raise ConfigError(
                f"local.epochs is {self.epochs}; expected 1, since fedsgd computes a single "
                "gradient"
            )


class UserWork(NamedTuple):
    """One user's part of a round: `batches` (n, batch_size, unroll + 1) int32, and the weight w_k
    from 0 to 1."""

    batches: Ids
    weight: float


def work_of(utterances: Sequence[Ids], config: LocalConfig, order: np.random.Generator) -> UserWork:
    """Packs a user's utterances for one round, with random choices from `order`.

    Text without any token (such as digits, if words consist of letters) becomes one empty batch,
    for which a device sends zeros: a round's success must not reveal what a user wrote.
    """
    if any(len(ids) for ids in utterances):
        packed = tokens.pack(
            utterances,
            batch_size=config.batch_size,
            unroll=config.unroll,
            packing=config.packing,
            max_batches=config.max_batches or None,
            shuffle=order if config.shuffle else None,
        )
    else:
        packed = np.full((1, config.batch_size, config.unroll + 1), tokens.PAD, np.int32)
    if config.algorithm == "fedsgd":
        packed = packed[[int(order.integers(len(packed)))]]
    weight = clip.user_weight(tokens.target_count(packed), config.example_cap or None)
    return UserWork(packed, weight)


class UserUpdate(NamedTuple):
    """A device's update and figures, without noise: only the clipped `update`, and whether `norm`
    is within the tracked norm, may leave the device. `norm` is the norm before clipping (in the
    last step, if each batch is clipped). If the device's numbers overflowed, `finite` is False and
    the update is zeros. `ln_prob` sums ln P(target) over the steps."""

    update: rnn.Params
    norm: Array
    finite: Array
    ln_prob: Array
    targets: Array


def user_update(
    params: rnn.Params,
    batches: Array,
    used: Array,
    bound: Array | float,
    *,
    model: rnn.RnnConfig,
    config: LocalConfig,
) -> UserUpdate:
    """Trains on one device's text.

    Shapes
        batches  (n, batch_size, unroll + 1)  int32; padding from row `used` on
        used     int32  0 <= used <= n; a device without text sends zeros
    Guarantees   the norm of `update` is at most `bound`; rows from `used` on cost no time unless
                 users are computed side by side
    Paper        DPF Algorithm 1, UserUpdate; GDP Algorithm 1, ClientUpdate
    """
    each_batch = config.clip_after == "batch"
    fresh = rnn.initial_state(model, config.batch_size)
    gradient = jax.value_and_grad(rnn.batch_loss, has_aux=True)

    def one(index: Array, carry: tuple) -> tuple:  # type: ignore[type-arg]
        # `moved` is the model itself or, if every step is clipped, the model's difference from the
        # start, since rounding in start + (moved - start) could exceed the bound.
        moved, state, seen, ln_prob, targets = carry
        place = index % used
        if config.packing == "stream":
            state = jax.tree.map(lambda s: jnp.where(place == 0, 0.0, s), state)
        else:
            state = fresh
        here = jax.tree.map(jnp.add, params, moved) if each_batch else moved
        (loss, (state, there)), slope = gradient(here, model, state, batches[place])
        moved = jax.tree.map(lambda m, g: m - config.learning_rate * g, moved, slope)
        if each_batch:
            clipped = clip.clip(config.clip_kind, moved, bound)
            moved, seen = clipped.update, (clipped.norm, seen[1] & clipped.finite)
        return moved, state, seen, ln_prob - loss * there, targets + there

    start = jax.tree.map(jnp.zeros_like, params) if each_batch else params
    zero = jnp.float32(0.0)
    begun = (start, fresh, (zero, jnp.asarray(True)), zero, zero)
    moved, _, seen, ln_prob, targets = lax.fori_loop(0, used * config.epochs, one, begun)
    if each_batch:
        # A step that overflowed set the difference to zero, and later steps continued from there;
        # refuse the device's whole update, as happens if an update is clipped only at the end.
        kept = jax.tree.map(lambda leaf: jnp.where(seen[1], leaf, 0.0), moved)
        norm = jnp.where(seen[1], seen[0], jnp.inf)
        return UserUpdate(kept, norm, seen[1], ln_prob, targets)
    clipped = clip.clip(config.clip_kind, jax.tree.map(jnp.subtract, moved, params), bound)
    return UserUpdate(clipped.update, clipped.norm, clipped.finite, ln_prob, targets)
