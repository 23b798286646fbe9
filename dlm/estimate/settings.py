"""Settings of an estimation, and its summary."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlm.errors import ConfigError
from dlm.estimate.discount import Fallback
from dlm.estimate.text import Totals

MAX_ORDER = 8


@dataclass(frozen=True)
class EstimationSettings:
    """What model to estimate, and with what resources.

    order            1 to 8 words; suggested 5 for a full model
    prune            n-grams that occur at most this often are left out, by order; the last number
                     applies to the orders above; none: all are kept
    vocabulary       n-grams with other words are left out; None: all words stay
    fallback         discounts for orders whose own cannot be computed; None: that is an error
    skip             leave faulty and empty lines out, and count them
    column           of parquet files
    memory_bytes     limit of the process; suggested: half of what is free
    workspace_bytes  limit of what is allocated here, in place of memory_bytes; for tests
    block_tokens     the most ids that are counted at once; for tests
    threads          1 or more; suggested: the cores
    """

    order: int = 5
    prune: tuple[int, ...] = ()
    vocabulary: frozenset[bytes] | None = None
    fallback: Fallback | None = None
    skip: bool = False
    column: str = "text"
    memory_bytes: int = 1 << 30
    workspace_bytes: int | None = None
    block_tokens: int | None = None
    threads: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.order <= MAX_ORDER:
            raise ConfigError(f"--order is {self.order}; expected 1 to {MAX_ORDER}")
        if len(self.prune) > self.order:
            raise ConfigError(
                f"{len(self.prune)} pruning thresholds for a model of order {self.order}; give at "
                "most one per order"
            )
        if any(t < 0 for t in self.prune):
            raise ConfigError("a pruning threshold is negative; 0 keeps every n-gram of its order")
        if any(a > b for a, b in zip(self.prune, self.prune[1:], strict=False)):
            raise ConfigError(
                f"pruning thresholds must not decrease: {','.join(map(str, self.prune))}; an "
                "n-gram cannot be kept without its prefix"
            )
        if self.threads < 1:
            raise ConfigError(f"--threads is {self.threads}; expected 1 or more")

    @property
    def thresholds(self) -> list[int]:
        """A threshold for each order."""
        last = self.prune[-1] if self.prune else 0
        return [*self.prune, *[last] * (self.order - len(self.prune))]


@dataclass
class EstimationSummary:
    """What was made, and from what text."""

    totals: Totals
    counts: list[int] = field(default_factory=list)
    counts_before_pruning: list[int] = field(default_factory=list)
    discounts: list[list[float]] = field(default_factory=list)
    fallback_orders: list[int] = field(default_factory=list)
    runs: int = 0
    spilled_bytes: int = 0
    context_ranges: int = 0
    arpa_bytes: int = 0
    output: str = ""
