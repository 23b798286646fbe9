"""The recurrent language model that users train: layers of CIFG or LSTM cells with projection, as
plain functions over a tree of arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from dlm.config import about, check, setting
from dlm.errors import ConfigError

Array: TypeAlias = jax.Array
Params: TypeAlias = dict[str, Any]
LayerState: TypeAlias = tuple[Array, Array]
State: TypeAlias = list[LayerState]

NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class RnnConfig:
    vocab_size: int = field(metadata=about("Rows, among them the marks, ids 0, 1 and 2.", low=4))
    embedding_size: int = field(
        metadata=about("N_e, also the size of a layer's output.", unit="units", low=1)
    )
    hidden_size: int = field(metadata=about("N_h, of the cell.", unit="units", low=1))
    layers: int = setting(
        1,
        "Number of layers.",
        low=1,
        high=100,
        why="Each layer is compiled separately; papers have one or two.",
    )
    cell: Literal["cifg", "lstm"] = setting(
        "cifg",
        "cifg couples the input gate to the forget gate (three gates); lstm has four gates.",
    )
    recurrence: Literal["projected", "hidden"] = setting(
        "projected",
        "projected: the gates see the layer's projected output (Sak 2014); hidden: they see all "
        "N_h units.",
    )
    groups: int = setting(
        1,
        "k, a divisor of N_e and N_h (and of the recurrent size): a group of gates sees only its "
        "share of the input, which takes 1/k of the weights.",
        low=1,
    )
    residual: bool = setting(True, "Each layer adds its input to its output.")
    layer_norm: Literal["gates", "output", "none"] = setting(
        "output",
        "What is normalised: gates (each gate and the cell, Ba 2016), output (the layer's "
        "output) or none.",
    )
    tied: bool = setting(True, "The input embedding and the softmax share one matrix.")
    output_bias: bool = setting(True, "The softmax has one bias per word.")
    projection_bias: bool = setting(False, "The projection has a bias.")
    unit_norm: bool = setting(False, "Embeddings are normalised to length 1 when used.")

    def __post_init__(self) -> None:
        check("model", self)
        for name in ("embedding_size", "hidden_size"):
            if getattr(self, name) % self.groups:
                raise ConfigError(
                    f"groups is {self.groups}; expected a divisor of {name} = {getattr(self, name)}"
                )

    @property
    def gates(self) -> tuple[str, ...]:
        return ("forget", "output", "candidate", "input")[: 3 if self.cell == "cifg" else 4]

    @property
    def recurrent_size(self) -> int:
        """The number of units from the previous step that a layer's gates see."""
        return self.embedding_size if self.recurrence == "projected" else self.hidden_size


def init(key: Array, config: RnnConfig) -> Params:
    """Draws initial parameters.

    Weights are drawn uniformly within sqrt(6 / (fan-in + fan-out)), embeddings from a normal
    distribution of variance 1/N_e; the forget gate starts open (bias 1), other biases at 0.
    """
    size, hidden, k = config.embedding_size, config.hidden_size, config.groups
    keys = iter(jax.random.split(key, 2 + config.layers * (len(config.gates) + 1)))

    def embedding() -> Array:
        drawn: Array = jax.random.normal(next(keys), (config.vocab_size, size))
        return drawn / math.sqrt(size)

    params: Params = {"embedding": embedding()}
    if not config.tied:
        params["output_embedding"] = embedding()
    if config.output_bias:
        params["output_bias"] = jnp.zeros(config.vocab_size)
    for index in range(config.layers):
        layer: Params = {}
        seen = (size + config.recurrent_size) // k
        bound = (6.0 / (seen + hidden // k)) ** 0.5
        for gate in config.gates:
            start = jnp.full(hidden, 1.0 if gate == "forget" else 0.0, jnp.float32)
            kernel = jax.random.uniform(
                next(keys), (k, seen, hidden // k), minval=-bound, maxval=bound
            )
            layer[gate] = {"kernel": kernel, "bias": start}
            if config.layer_norm == "gates":
                layer[gate]["scale"] = jnp.ones(hidden)
        if config.layer_norm == "gates":
            layer["cell"] = {"scale": jnp.ones(hidden), "bias": jnp.zeros(hidden)}
        bound = (6.0 / (hidden + size)) ** 0.5
        layer["projection"] = {
            "kernel": jax.random.uniform(next(keys), (hidden, size), minval=-bound, maxval=bound)
        }
        if config.projection_bias:
            layer["projection"]["bias"] = jnp.zeros(size)
        if config.layer_norm == "output":
            layer["norm"] = {"scale": jnp.ones(size), "bias": jnp.zeros(size)}
        params[f"layer_{index}"] = layer
    return params


def parameter_count(params: Params) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def network_size(config: RnnConfig) -> int:
    """Counts the parameters of a network with this config, without creating them."""
    shapes = jax.eval_shape(partial(init, config=config), jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def initial_state(config: RnnConfig, batch: int) -> State:
    """The state before any token: for each layer, float32 zeros of (batch, recurrent_size) and
    (batch, N_h)."""
    return [
        (jnp.zeros((batch, config.recurrent_size)), jnp.zeros((batch, config.hidden_size)))
        for _ in range(config.layers)
    ]


def _normalised(values: Array, scale: Array, bias: Array) -> Array:
    mean = values.mean(-1, keepdims=True)
    variance = jnp.square(values - mean).mean(-1, keepdims=True)
    return (values - mean) * lax.rsqrt(variance + NORM_EPSILON) * scale + bias


def _rows(table: Array, config: RnnConfig) -> Array:
    if not config.unit_norm:
        return table
    squares = jnp.square(table).sum(-1, keepdims=True)
    return table * lax.rsqrt(jnp.maximum(squares, 1e-12))


def _layer(
    layer: Params, config: RnnConfig, inputs: Array, state: LayerState
) -> tuple[Array, LayerState]:
    """Returns (outputs, last state) of a layer; inputs, outputs: (time, batch, N_e) float32."""
    k, size, hidden = config.groups, config.embedding_size, config.hidden_size
    steps, batch, _ = inputs.shape
    gates = config.gates
    # Put the weights of all gates side by side, then split input weights from state weights: the
    # inputs of all steps are known beforehand, so one product serves all steps.
    kernel = jnp.concatenate([layer[gate]["kernel"] for gate in gates], axis=-1)
    of_input, of_state = kernel[:, : size // k], kernel[:, size // k :]
    in_gates = config.layer_norm == "gates"
    grouped = inputs.reshape(steps, batch, k, size // k)
    ahead = jnp.einsum("tbki,kio->tbko", grouped, of_input)
    if not in_gates:
        biases = [layer[gate]["bias"].reshape(k, -1) for gate in gates]
        ahead = ahead + jnp.concatenate(biases, axis=-1)
    project = layer["projection"]

    def step(state: LayerState, ahead: Array) -> tuple[LayerState, Array]:
        recurrent, cell = state
        seen = recurrent.reshape(batch, k, -1)
        sums = (ahead + jnp.einsum("bki,kio->bko", seen, of_state)).reshape(
            batch, k, len(gates), hidden // k
        )
        at = {gate: sums[:, :, place].reshape(batch, hidden) for place, gate in enumerate(gates)}
        if in_gates:
            at = {
                gate: _normalised(value, layer[gate]["scale"], layer[gate]["bias"])
                for gate, value in at.items()
            }
        forget = jax.nn.sigmoid(at["forget"])
        accept = 1.0 - forget if config.cell == "cifg" else jax.nn.sigmoid(at["input"])
        cell = forget * cell + accept * jnp.tanh(at["candidate"])
        shown = cell
        if in_gates:
            shown = _normalised(cell, layer["cell"]["scale"], layer["cell"]["bias"])
        out = jax.nn.sigmoid(at["output"]) * jnp.tanh(shown)
        projected = out @ project["kernel"]
        if config.projection_bias:
            projected = projected + project["bias"]
        recurrent = projected if config.recurrence == "projected" else out
        return (recurrent, cell), projected

    state, outputs = lax.scan(step, state, ahead)
    if config.residual:
        outputs = outputs + inputs
    if config.layer_norm == "output":
        outputs = _normalised(outputs, layer["norm"]["scale"], layer["norm"]["bias"])
    return outputs, state


def _outputs(
    params: Params, config: RnnConfig, state: State, tokens: Array
) -> tuple[Array, Array, State]:
    """Returns the last layer's output after each token, the softmax's rows, and all layers' states.

    Shapes
        tokens   (batch, time)        int32  0 <= id < vocab_size
        outputs  (batch * time, N_e)  float32
        rows     (vocab_size, N_e)    float32
    """
    table = _rows(params["embedding"], config)
    values = table[tokens.T]
    states = []
    for index in range(config.layers):
        values, after = _layer(params[f"layer_{index}"], config, values, state[index])
        states.append(after)
    rows = table if config.tied else _rows(params["output_embedding"], config)
    # Put batch before time now, while the array is small: logits are by far the largest array,
    # and a plain matrix product is several times faster than one with its axes in another order.
    return values.transpose(1, 0, 2).reshape(tokens.size, -1), rows, states


def _logits(params: Params, config: RnnConfig, outputs: Array, rows: Array) -> Array:
    logits = outputs @ rows.T
    return logits + params["output_bias"] if config.output_bias else logits


def run(params: Params, config: RnnConfig, state: State, tokens: Array) -> tuple[Array, State]:
    """Returns the logits of the word after each token, and the state after the last token.

    A sequence that is fed in parts, with the state passed on, gives the same logits.

    Shapes
        tokens   (batch, time)              int32  0 <= id < vocab_size
        logits   (batch, time, vocab_size)  float32
    """
    outputs, rows, states = _outputs(params, config, state, tokens)
    logits = _logits(params, config, outputs, rows)
    return logits.reshape(*tokens.shape, config.vocab_size), states


def apply(params: Params, config: RnnConfig, tokens: Array) -> Array:
    """Returns the logits of `run` for sequences that start from a zero state."""
    return run(params, config, initial_state(config, tokens.shape[0]), tokens)[0]


def ln_probabilities(logits: Array) -> Array:
    return jax.nn.log_softmax(logits, axis=-1)


def batch_loss(
    params: Params, config: RnnConfig, state: State, batch: Array
) -> tuple[Array, tuple[State, Array]]:
    """Returns the mean cross-entropy of a batch's targets; 0 without targets.

    Shapes
        batch    (rows, time + 1)  int32  -1 for no token
        returns  loss, (state after the batch, number of targets)
    """
    inputs, targets = batch[:, :-1], batch[:, 1:]
    there = (targets >= 0).astype(jnp.float32)
    outputs, rows, state = _outputs(params, config, state, jnp.maximum(inputs, 0))
    logits = _logits(params, config, outputs, rows)
    # Recompute the targets' logits from their rows: selecting them from all logits would make the
    # gradient an array of the size of all logits.
    target = jnp.maximum(targets, 0).reshape(-1)
    chosen = (outputs * rows[target]).sum(-1)
    if config.output_bias:
        chosen = chosen + params["output_bias"][target]
    losses = (jax.nn.logsumexp(logits, axis=-1) - chosen).reshape(targets.shape)
    count = there.sum()
    return (losses * there).sum() / jnp.maximum(count, 1.0), (state, count)
