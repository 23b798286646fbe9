"""Settings of an estimation, and its summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from dlm.config import check, like, setting
from dlm.errors import ConfigError

if TYPE_CHECKING:
    from dlm.estimate.text import Totals

N = TypeVar("N", int, float)
Fallback: TypeAlias = tuple[float, float, float]

# Default discounts of adjusted counts 1, 2, and 3 or more, for orders where the closed form fails.
DEFAULT_FALLBACK: Fallback = (0.5, 1.0, 1.5)


@dataclass(frozen=True)
class EstimationSettings:
    """The model to estimate, and the resources to use."""

    order: int = setting(5, "Order of the model: words per n-gram.", low=1, high=8, short="-n")
    prune: tuple[int, ...] = setting(
        (),
        "N-grams of each order that occur at most this often are left out; the last number applies "
        "to all higher orders.",
    )
    vocabulary: frozenset[bytes] | None = setting(
        None, "The words to keep; n-grams with other words are left out. None keeps all words."
    )
    fallback: Fallback | None = setting(
        None, "Discounts for orders whose discounts cannot be computed; None makes that an error."
    )
    skip: bool = setting(
        False,
        "Skip and count lines that are empty, too long or not UTF-8, or that contain NUL, <s>, "
        "</s> or <unk>.",
    )
    column: str = setting(
        "text", "Text column of parquet files.", name="text_column", metavar="NAME"
    )
    memory_bytes: int = setting(
        1 << 30, "Memory limit of the process; half of the free memory is a good value."
    )
    workspace_bytes: int | None = setting(
        None, "Limit on the memory that estimation allocates, instead of memory_bytes; for tests."
    )
    block_tokens: int | None = setting(None, "Maximum number of ids counted at once; for tests.")
    threads: int = setting(2, "Number of threads.", low=1)
    pieces: Path | None = setting(
        None, "SentencePiece model that splits the text; None counts words."
    )

    def __post_init__(self) -> None:
        check("estimate", self)
        if len(self.prune) > self.order:
            raise ConfigError(
                f"{len(self.prune)} pruning thresholds were given for a model of order "
                f"{self.order}; give at most one per order"
            )
        if any(t < 0 for t in self.prune):
            raise ConfigError(
                "a pruning threshold is negative; expected 0 (keep every n-gram of that order) or "
                "more"
            )
        if any(a > b for a, b in zip(self.prune, self.prune[1:], strict=False)):
            raise ConfigError(
                f"pruning thresholds must not decrease: {','.join(map(str, self.prune))}; an "
                "n-gram cannot be kept without its prefix"
            )

    @property
    def thresholds(self) -> list[int]:
        last = self.prune[-1] if self.prune else 0
        return [*self.prune, *[last] * (self.order - len(self.prune))]


@dataclass(frozen=True)
class EstimateOptions:
    """The options of `dlm estimate`, on the command line and in a pipeline's file."""

    order: int = like(EstimationSettings, "order")
    prune: str = setting(
        "",
        "Drop n-grams that occur at most this often, per order: 0,0,1. The last number applies to "
        "all higher orders.",
        metavar="COUNTS",
    )
    discount_fallback: bool = setting(
        False,
        "Use fixed discounts for orders whose counts yield no discounts; small or repetitive text "
        "needs this.",
    )
    fallback_discounts: str = setting(
        ",".join(f"{one:g}" for one in DEFAULT_FALLBACK),
        "The fixed discounts for counts of 1, 2, and 3 or more.",
        metavar="D1,D2,D3",
    )
    skip: bool = like(EstimationSettings, "skip")
    column: str = like(EstimationSettings, "column")

    def __post_init__(self) -> None:
        self.settings()

    def settings(
        self,
        memory_bytes: int = EstimationSettings.memory_bytes,
        threads: int = EstimationSettings.threads,
        vocabulary: frozenset[bytes] | None = None,
        pieces: Path | None = None,
    ) -> EstimationSettings:
        fallback = numbers("fallback_discounts", self.fallback_discounts, float)
        return EstimationSettings(
            order=self.order,
            prune=numbers("prune", self.prune, int),
            vocabulary=vocabulary,
            pieces=pieces,
            fallback=checked_fallback(fallback) if self.discount_fallback else None,
            skip=self.skip,
            column=self.column,
            memory_bytes=memory_bytes,
            threads=threads,
        )


def numbers(name: str, text: str, kind: Callable[[str], N]) -> tuple[N, ...]:
    try:
        return tuple(kind(part) for part in text.replace(",", " ").split())
    except ValueError as exc:
        raise ConfigError(
            f"estimate.{name} is {text!r}; expected numbers separated by commas, such as 0,0,1"
        ) from exc


def checked_fallback(values: Sequence[float]) -> Fallback:
    """Extends one to three discounts to three by repeating the last; ConfigError if not valid."""
    if not 1 <= len(values) <= 3:
        raise ConfigError(
            f"{len(values)} fallback discounts were given; expected one to three, for counts 1, 2 "
            "and 3 or more"
        )
    padded = [*values, *[values[-1]] * (3 - len(values))]
    for j, value in enumerate(padded, 1):
        if not 0 <= value <= j:
            raise ConfigError(f"the fallback discount for count {j} is {value}; expected 0 to {j}")
    return padded[0], padded[1], padded[2]


@dataclass
class EstimationSummary:
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
