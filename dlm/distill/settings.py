"""Settings of sampling a source."""

from __future__ import annotations

from dataclasses import dataclass

from dlm.config import check, setting


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """How a source is sampled; `request.DistillRequest` adds files and the topology."""

    samples: float | None = setting(
        None,
        "Number of sentences to sample, such as 1e5; an ARPA file needs none.",
        low=1,
        high=1e15,
    )
    seed: int = setting(0, "Seed for sampling.", low=0)
    prior: float | None = setting(
        None, "Pseudo-count for each sampled context; 0.01 suits words.", low=0
    )

    def __post_init__(self) -> None:
        check("distill", self)
