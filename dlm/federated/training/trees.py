"""JAX's trees as plain arrays, for files that need no JAX to be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dlm.checkpoint import Arrays, check_shapes


def leaves(tree: Any) -> list[npt.NDArray[Any]]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def rebuilt(arrays: Arrays, template: Any, place: Path) -> Any:
    """The tree whose `leaves` these are, in the shape of `template`; FormatError for other
    shapes."""
    check_shapes(arrays, leaves(template), place)
    old, shape = jax.tree.flatten(template)
    found = [
        # A NumPy array stays one: JAX has no 64 bits.
        array if isinstance(leaf, np.ndarray | np.generic) else jnp.asarray(array)
        for leaf, array in zip(old, arrays, strict=True)
    ]
    return jax.tree.unflatten(shape, found)
