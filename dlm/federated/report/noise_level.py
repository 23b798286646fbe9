"""Finds from released figures whether a run's noise is larger than its users' contributions."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dlm.federated.training.settings import TrainingSettings

# Independent noise grows with the square root of the number of rounds. Correlated noise cancels
# over rounds, at best down to the noise of one round.
INDEPENDENT = ("gaussian",)


def noise_over_signal(
    rounds: Iterable[Mapping[str, Any]], *, mechanism: str, users_over_denominator: float = 1.0
) -> float:
    """Returns a lower bound on a run's noise divided by its users' largest possible contribution,
    from the `clip_norm` and `released_norm` of the run's rounds.

    Below 1, the users' updates may outweigh the noise. Above 1 they cannot, even if every user
    pulls the same way in every round. Without rounds, the bound is 0. `users_over_denominator` is
    the number of users in a round divided by the denominator of their average.
    """
    found: list[tuple[float, float]] = [
        (line["clip_norm"], line["released_norm"])
        for line in rounds
        if line.get("clip_norm") is not None and line.get("released_norm") is not None
    ]
    if not found or mechanism == "none":
        return 0.0
    released = statistics.median(norm for _, norm in found)
    if mechanism in INDEPENDENT:
        released *= math.sqrt(len(found))
    most = users_over_denominator * sum(clip for clip, _ in found)
    return released / most if most > 0 else math.inf


def noise_warning(journal: Path, settings: TrainingSettings) -> str | None:
    """Returns a warning if the journal shows that a run's noise exceeds its signal, or None."""
    privacy, sampling = settings.privacy, settings.sampling
    users_over_denominator = 1.0
    if privacy.denominator:
        if sampling.kind == "poisson":  # the number of users of a round is random
            return None
        users_over_denominator = sampling.report_goal / privacy.denominator
    lines = rounds_of(journal)
    ratio = noise_over_signal(
        lines, mechanism=privacy.mechanism, users_over_denominator=users_over_denominator
    )
    if ratio <= 1:
        return None
    norms = [line["released_norm"] for line in lines if line.get("released_norm") is not None]
    return (
        "WARNING: the noise is larger than the signal, so the network has learned little or "
        f"nothing: a round's update has a norm of {statistics.median(norms):.3g}, of which its "
        f"users contribute at most {users_over_denominator * lines[-1]['clip_norm']:.3g}. Use more "
        "users per round (sampling.report_goal) or a smaller network"
    )


def rounds_of(journal: Path) -> list[dict[str, Any]]:
    found = []
    if journal.exists():
        for text in journal.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # the last line may be cut off
                found.append(json.loads(text))
    return found
