"""Figures of `dlm privacy mechanism` and `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlm.errors import ConfigError

if TYPE_CHECKING:
    from dlm.federated.account.plan import NoisePlan
    from dlm.federated.noise.mechanism import Mechanism

DRAWN = (".png", ".svg", ".pdf")


def check_plot(path: Path | None) -> None:
    """Rejects a figure that cannot be written, before its content is computed."""
    from dlm.cli.paths import check_writes

    if path is None:
        return
    if path.suffix.lower() not in DRAWN:
        raise ConfigError(f"--plot is {path}; expected a name that ends in {', '.join(DRAWN)}")
    check_writes("--plot", path)
    _figure()


def _figure() -> Any:
    """pyplot, for files only."""
    from dlm.extras import pip_install

    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as exc:
        command = pip_install(["matplotlib"])
        raise ConfigError(
            f"--plot needs matplotlib, which is not installed; run\n  {command}"
        ) from exc
    return pyplot


def plot_errors(made: Mechanism, sensitivity: float, path: Path) -> None:
    import numpy as np

    pyplot = _figure()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(sensitivity * np.sqrt(made.prefix_variances()))
    axes.set(xlabel="round", ylabel="sensitivity x standard deviation", title=made.name)
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)


def plot_plan(made: NoisePlan, path: Path) -> None:
    pyplot = _figure()
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([s.report_goal for s in made.considered], [s.rho for s in made.considered])
    axes.axhline(made.target_rho, linestyle=":", color="grey")
    axes.plot([made.chosen.report_goal], [made.chosen.rho], "o")
    axes.set(xlabel="report goal, noise in proportion", ylabel="zCDP rho", yscale="log")
    figure.savefig(path, bbox_inches="tight")
    pyplot.close(figure)
