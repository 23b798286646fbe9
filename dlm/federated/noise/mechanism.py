"""The interface of all mechanisms, and their shared base class.

A mechanism adds noise to the sum of each round so that *running sums* of rounds carry little of it.
It is given by a matrix C: the noise of round t is row t of C^-1 z, z being independent normal draws
(BLT equation 1). C determines the sensitivity, A C^-1 the error, with A the matrix of running sums.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from dlm.errors import ConfigError, PrivacyError
from dlm.federated.noise.keys import NoiseKey

PyTree = Any
Floats = NDArray[np.float64]


class NoiseState(NamedTuple):
    """The state of a stream of noise; a pytree, to be kept with the model's state.

    Shapes
        key      ()             a typed PRNG key; round t draws from fold_in(key, t) only
        round    ()     int32   rounds whose noise was returned
        buffers  pytree of (buffer_count, *shape of a parameter)  float32; the count may be 0
    """

    key: jax.Array
    round: jax.Array
    buffers: PyTree

    def __repr__(self) -> str:
        # JAX prints the numbers of a key; with them, a reader of the log could subtract the noise.
        return f"NoiseState(round={self.round}, key and buffers not shown)"

    def __reduce__(self) -> NoReturn:
        raise PrivacyError(
            "a noise state with its key is not written anywhere; a checkpoint keeps the buffers"
        )


@runtime_checkable
class Mechanism(Protocol):
    """Correlated Gaussian noise over rounds, its sensitivity and its error.

    The noise of `step` is for a noise multiplier and a clip norm of 1; multiply it by
    ``noise_multiplier * clip_norm``. The multiplier is the standard deviation of the
    *independent* draws z over the clip norm, as the papers print it, so that
    ``rho = sensitivity ** 2 / (2 * noise_multiplier ** 2)``.
    """

    @property
    def name(self) -> str:
        """The name for `make_mechanism`."""
        ...

    @property
    def rounds(self) -> int:
        """Rounds for which there is noise; accounting covers all of them."""
        ...

    @property
    def restarts(self) -> tuple[int, ...]:
        """Rounds at whose start the correlation begins anew, ascending; usually none."""
        ...

    def init(self, key: NoiseKey | jax.Array, template: PyTree) -> NoiseState:
        """The state before round 0, for releases of the shapes of `template`."""
        ...

    def step(self, state: NoiseState) -> tuple[PyTree, NoiseState]:
        """The noise for this round's released sum, and the state after it. Pure; may be jitted."""
        ...

    def restart(self, state: NoiseState, key: NoiseKey | jax.Array) -> NoiseState:
        """The state with a new key, at a round of `restarts`; elsewhere a `PrivacyError`."""
        ...

    def rekey(self, state: NoiseState, key: NoiseKey | jax.Array) -> NoiseState:
        """The state with another key for all further draws, as a resumed run needs it."""
        ...

    def sensitivity(self, *, gap: int, max_part: int) -> float:
        """Of C, for a clip norm of 1 and the worst pattern of participation."""
        ...

    def sensitivity_is_exact(self, *, gap: int, max_part: int) -> bool:
        """Whether a pattern reaches `sensitivity`; otherwise it is an upper bound."""
        ...

    def rms_loss(self, *, gap: int, max_part: int) -> float:
        """Sensitivity times the root mean square error of the running sums (BLT equation 10)."""
        ...

    def max_loss(self, *, gap: int, max_part: int) -> float:
        """Sensitivity times the largest error of a running sum (BLT equation 9)."""
        ...

    def prefix_variances(self) -> Floats:
        """(rounds,) variance of the noise in each running sum, for unit draws."""
        ...

    def state_size(self, model_size: int) -> int:
        """Numbers held between rounds for a model of `model_size` parameters."""
        ...

    def matrix(self) -> dict[str, Any]:
        """What determines C besides its name: options of `dlm privacy account`, as plain values.

        With `rounds`, sensitivity is that of so many rounds, even if a run stops earlier. BandMF
        has too many entries; only its bands are here.
        """
        ...

    def digest(self) -> str:
        """Of the matrix C: a stream that went on with another one would have neither's law."""
        ...


class Base:
    """Shared state, draws and losses. Subclasses define `buffer_count`, `_advance` and figures."""

    name: str
    rounds: int
    buffer_count: int  # buffers of the model's size kept between rounds

    @property
    def restarts(self) -> tuple[int, ...]:
        """None, unless a family says otherwise."""
        return ()

    def init(self, key: NoiseKey | jax.Array, template: PyTree) -> NoiseState:
        """The state before round 0, for releases of the shapes of `template`."""
        buffers = jax.tree.map(
            lambda leaf: jnp.zeros((self.buffer_count, *np.shape(leaf)), jnp.float32), template
        )
        return NoiseState(_bare(key), jnp.int32(0), buffers)

    def step(self, state: NoiseState) -> tuple[PyTree, NoiseState]:
        """The noise for this round's released sum, and the state after it.

        Guarantees
            noise past the last round was not accounted for: outside jit such a round is refused,
            inside jit its noise is NaN, which ruins the model
        """
        past = state.round >= self.rounds
        if not isinstance(past, jax.core.Tracer) and bool(past):
            raise PrivacyError(
                f"round {int(state.round)} has no noise: {self.name} was made for {self.rounds} "
                "rounds. Build it for every round of the run"
            )
        noise, buffers = self._compiled(state)
        noise = jax.tree.map(lambda leaf: jnp.where(past, jnp.nan, leaf), noise)
        return noise, NoiseState(state.key, state.round + 1, buffers)

    def restart(self, state: NoiseState, key: NoiseKey | jax.Array) -> NoiseState:
        """Refused: only trees made with restarts can be restarted."""
        raise PrivacyError(
            f"{self.name} cannot be restarted: its sensitivity is for one run of {self.rounds} "
            "rounds. Make tree-restart with the rounds of its restarts"
        )

    def rekey(self, state: NoiseState, key: NoiseKey | jax.Array) -> NoiseState:
        """The state with another key for all further draws.

        Guarantees
            the law of the noise stays the same: earlier draws are in the buffers. So a run can
            resume although its key is in no file. Never release a round again with other noise:
            two noisy answers to one question reveal more than one
        """
        return state._replace(key=_bare(key))

    @functools.cached_property
    def _compiled(self) -> Callable[[NoiseState], tuple[PyTree, PyTree]]:
        """`_advance`, compiled once: outside jit, its loop would be compiled in every round."""
        compiled: Callable[[NoiseState], tuple[PyTree, PyTree]] = jax.jit(self._advance)
        return compiled

    def _advance(self, state: NoiseState) -> tuple[PyTree, PyTree]:
        """(noise of this round, buffers after it)."""
        raise NotImplementedError

    def sensitivity(self, *, gap: int, max_part: int) -> float:
        """Of C, for a clip norm of 1 and the worst pattern of participation."""
        raise NotImplementedError

    def sensitivity_is_exact(self, *, gap: int, max_part: int) -> bool:
        """True, unless a family says otherwise."""
        return True

    def prefix_variances(self) -> Floats:
        """(rounds,) variance of the noise in each running sum, for unit draws."""
        raise NotImplementedError

    def rms_loss(self, *, gap: int, max_part: int) -> float:
        """Sensitivity times the root mean square error of the running sums (BLT equation 10)."""
        error = math.sqrt(float(np.mean(self.prefix_variances())))
        return self.sensitivity(gap=gap, max_part=max_part) * error

    def max_loss(self, *, gap: int, max_part: int) -> float:
        """Sensitivity times the largest error of a running sum (BLT equation 9)."""
        error = math.sqrt(float(np.max(self.prefix_variances())))
        return self.sensitivity(gap=gap, max_part=max_part) * error

    def state_size(self, model_size: int) -> int:
        """Numbers held between rounds for a model of `model_size` parameters."""
        return self.buffer_count * model_size

    def matrix(self) -> dict[str, Any]:
        """The rounds that it was made for; families add to this."""
        return {"rounds": self.rounds}

    def parameters_of(self) -> tuple[Floats, ...]:
        """The numbers that define C, besides name, rounds and restarts."""
        return ()

    def digest(self) -> str:
        """Of the matrix C: a stream that went on with another one would have neither's law."""
        found = hashlib.sha256(repr((self.name, self.rounds, self.restarts)).encode())
        for numbers in self.parameters_of():
            plain = np.ascontiguousarray(numbers, "<f8")
            found.update(repr(plain.shape).encode() + plain.tobytes())
        return found.hexdigest()


def check_rounds(rounds: int) -> int:
    """`rounds`, if it can be a number of rounds."""
    if rounds < 1:
        raise ConfigError(f"rounds is {rounds}; a mechanism needs 1 or more")
    return rounds


def draw(state: NoiseState, part: int | jax.Array = 0) -> PyTree:
    """Independent normal draws of the shapes released, one set per (key, round, part).

    A set is drawn as one row from one key and split: one generator per array would be compiled
    once per array, which takes seconds instead of half a second.
    """
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.round), part)
    leaves, tree = jax.tree.flatten(state.buffers)
    shapes = [leaf.shape[1:] for leaf in leaves]
    sizes = [math.prod(shape) for shape in shapes]
    row = jax.random.normal(key, (sum(sizes),), jnp.float32)
    drawn = jnp.split(row, np.cumsum(sizes)[:-1])
    return jax.tree.unflatten(
        tree, [flat.reshape(shape) for flat, shape in zip(drawn, shapes, strict=True)]
    )


def _bare(key: NoiseKey | jax.Array) -> jax.Array:
    bare = key.key if isinstance(key, NoiseKey) else key
    if not jnp.issubdtype(bare.dtype, jax.dtypes.prng_key):
        raise ConfigError("noise needs a typed key, from jax.random.key or dlm.federated.noise")
    return bare
