"""Figures of `dlm privacy mechanism` and `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlm.federated.account.plan import NoisePlan
    from dlm.federated.noise.mechanism import Mechanism

DRAWN = (".png", ".svg", ".pdf")


def check_plot(path: Path | None) -> None:
    """Refuses a figure that could not be written, before what it shows is computed."""
    from dlm.errors import ConfigError

    if path is None:
        return
    if path.suffix.lower() not in DRAWN:
        raise ConfigError(f"--plot is {path}; its name must end in {', '.join(DRAWN)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot is {path}, and there is no folder {path.parent}")
    _figure()


def _figure() -> Any:
    """pyplot, drawing to files alone."""
    from dlm.errors import ConfigError
    from dlm.extras import pip_install

    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as exc:
        command = pip_install(["matplotlib"])
        raise ConfigError(f"a plot needs matplotlib; run\n  {command}") from exc
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
