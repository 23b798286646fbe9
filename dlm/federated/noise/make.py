"""A mechanism by its name."""

from __future__ import annotations

from collections.abc import Sequence

from dlm.errors import ConfigError
from dlm.federated.noise.mechanism import Mechanism

NAMES = ("gaussian", "tree", "tree-restart")


def make_mechanism(
    name: str, *, rounds: int, gap: int = 1, max_part: int = 1, restarts: Sequence[int] = ()
) -> Mechanism:
    """The mechanism `name`, for `rounds` rounds and, where it is optimised, for that participation.

    Args
        gap, max_part  what an optimised mechanism is optimised for; the others ignore them
        restarts       of tree-restart: the rounds at whose start a new tree begins
    Raises
        ConfigError  an unknown name, or settings that the mechanism does not have
    """
    from dlm.federated.noise.gaussian import GaussianMechanism
    from dlm.federated.noise.tree import TreeAgg

    if (name == "tree-restart") != bool(restarts):
        raise ConfigError("restarts are given for tree-restart, and for no other mechanism")
    if name == "gaussian":
        return GaussianMechanism(rounds)
    if name in ("tree", "tree-restart"):
        return TreeAgg(rounds, restarts)
    raise ConfigError(f"there is no mechanism {name!r}; there are {', '.join(NAMES)}")
