"""Makes a mechanism by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlm.errors import ConfigError
from dlm.federated.noise.mechanism import GaussianMechanism, Mechanism, check_rounds
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
BUFFERS = 4  # buffers of a BLT (BLT Section 5); more buffers do not lower the loss


def make_mechanism(
    name: str,
    *,
    rounds: int,
    gap: int = 1,
    max_participations: int = 1,
    restarts: Sequence[int] = (),
    buffers: int = BUFFERS,
    bands: int | None = None,
    error: str = "max",
    progress: Callable[[str], None] | None = None,
) -> Mechanism:
    """Makes mechanism `name` for `rounds` rounds; optimises BLT for `gap` and `max_participations`.

    Args    restarts  for tree-restart: the rounds at whose start a new tree begins
            bands     for bandmf, bandtoep and bandfhu; by default the gap
            error     for blt: the loss to optimise, "max" or "mean"; other mechanisms use the mean
    Raises  ConfigError  an unknown name, or a setting of another mechanism
    """
    if (name == "tree-restart") != bool(restarts):
        raise ConfigError(
            f"{name} was given the restarts {list(restarts)}; tree-restart needs restarts, and "
            "other mechanisms accept none"
        )
    check_rounds(rounds)
    check_participation(rounds, gap, max_participations)
    width = min(gap if bands is None else bands, rounds)
    if width < 1:
        raise ConfigError(f"bands is {bands}; it must be 1 or more")
    # The mechanisms' modules are imported when needed, so that commands start sooner.
    if name == "gaussian":
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

        return Blt(
            rounds, optimise_blt(rounds, gap, max_participations, buffers=buffers, error=error)
        )
    raise ConfigError(f"there is no mechanism {name!r}; use one of {', '.join(NAMES)}")
