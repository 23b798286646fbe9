"""The source of the noise's randomness: a named key, never a global generator."""

from __future__ import annotations

import os
from typing import NoReturn

import jax

from dlm.errors import PrivacyError

# JAX's default generator, by name, so that a process-wide setting cannot replace it.
GENERATOR = "threefry2x32"


class NoiseKey:
    """A key for a mechanism's `init`, and whether its noise is private or simulated.

    Guarantees
        it is not printed, pickled or copied by accident: with the key, anybody could subtract the
        noise
    """

    __slots__ = ("key", "private")

    def __init__(self, key: jax.Array, *, private: bool) -> None:
        self.key = key
        self.private = private

    def __repr__(self) -> str:
        return f"NoiseKey({'from the system' if self.private else 'from a seed: not private'})"

    def __reduce__(self) -> NoReturn:
        raise PrivacyError("a noise key is not written anywhere; draw a new one when resuming")


def key_from_system() -> NoiseKey:
    """A key from the operating system's randomness, for private runs."""
    words = [int.from_bytes(os.urandom(4), "little") for _ in range(2)]
    data = jax.numpy.asarray(words, dtype="uint32")
    return NoiseKey(jax.random.wrap_key_data(data, impl=GENERATOR), private=True)


def key_from_seed(seed: int) -> NoiseKey:
    """A key that anybody can derive from `seed`: for simulations, which are not private."""
    return NoiseKey(jax.random.key(seed, impl=GENERATOR), private=False)
