"""A mechanism by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlm.errors import ConfigError
from dlm.federated.noise.mechanism import Mechanism
from dlm.federated.noise.participation import check_participation

NAMES = (
    "gaussian",
    "tree",
    "tree-restart",
    "tree-full",
    "bandmf",
    "bandtoep",
    "bandfhu",
    "blt",
)
BUFFERS = 4  # of a BLT: what BLT 5 uses; more do not lower the loss


def make_mechanism(
    name: str,
    *,
    rounds: int,
    gap: int = 1,
    max_part: int = 1,
    restarts: Sequence[int] = (),
    buffers: int = BUFFERS,
    bands: int | None = None,
    error: str = "max",
    progress: Callable[[str], None] | None = None,
) -> Mechanism:
    """The mechanism `name`, for `rounds` rounds and, where it is optimised, for that participation.

    Args
        gap, max_part  what an optimised mechanism is optimised for; the others ignore them
        restarts       of tree-restart: the rounds at whose start a new tree begins
        buffers        of blt
        bands          of bandmf, bandtoep and bandfhu; the gap if not given
        error          of blt: "max" or "mean", the loss that is optimised; the others: mean
        progress       told a line now and then by an optimisation that takes long
    Raises
        ConfigError  an unknown name, or settings that the mechanism does not have
    """
    if (name == "tree-restart") != bool(restarts):
        raise ConfigError("restarts are given for tree-restart, and for no other mechanism")
    check_participation(rounds, gap, max_part)
    width = min(gap if bands is None else bands, rounds)
    if width < 1:
        raise ConfigError(f"{bands} bands were asked for, not 1 or more")
    # Families are loaded as they are asked for: a command that needs one starts sooner.
    if name == "gaussian":
        from dlm.federated.noise.gaussian import GaussianMechanism

        return GaussianMechanism(rounds)
    if name in ("tree", "tree-restart"):
        from dlm.federated.noise.tree import TreeAgg

        return TreeAgg(rounds, restarts)
    if name == "tree-full":
        from dlm.federated.noise.tree import TreeAggFull

        return TreeAggFull(rounds)
    if name == "bandmf":
        from dlm.federated.noise.banded import optimise_bandmf

        return optimise_bandmf(rounds, width, progress=progress)
    if name == "bandtoep":
        from dlm.federated.noise.toeplitz import band_toep

        return band_toep(rounds, width, progress=progress)
    if name == "bandfhu":
        from dlm.federated.noise.toeplitz import band_fhu

        return band_fhu(rounds, width)
    if name == "blt":
        from dlm.federated.noise.blt import Blt, optimise_blt

        return Blt(rounds, optimise_blt(rounds, gap, max_part, buffers=buffers, error=error))
    raise ConfigError(f"there is no mechanism {name!r}; there are {', '.join(NAMES)}")
