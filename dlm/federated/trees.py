"""JAX's trees as plain arrays, for files that need no JAX to be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dlm.federated.checkpoint import Arrays, check_shapes


def leaves(tree: Any) -> list[npt.NDArray[Any]]:
    """The arrays of a tree, in the order of `jax.tree.leaves`; a key as the numbers it is of."""
    return [_plain(leaf) for leaf in jax.tree.leaves(tree)]


def rebuilt(arrays: Arrays, template: Any, place: Path) -> Any:
    """The tree whose `leaves` these are, in the shape of `template`.

    Raises
        FormatError  other shapes or types than the template's; `place` is named
    """
    check_shapes(arrays, leaves(template), place)
    found: list[Any] = []
    old, shape = jax.tree.flatten(template)
    for leaf, array in zip(old, arrays, strict=True):
        if isinstance(leaf, np.ndarray | np.generic):
            found.append(array)  # as it was given: a NumPy array
        elif _is_key(leaf):
            found.append(
                jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
            )
        else:
            found.append(jnp.asarray(array))
    return jax.tree.unflatten(shape, found)


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _plain(leaf: Any) -> npt.NDArray[Any]:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
