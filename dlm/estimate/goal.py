"""The settings of how much to prune, and the goal that follows from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from dlm.config import check, like, setting
from dlm.errors import ConfigError
from dlm.resources import parse_size


@dataclass(frozen=True)
class Goal:
    """How much to prune; exactly one field is given."""

    threshold: float | None = setting(
        None,
        "Drop n-grams whose score is below this, such as 1e-8.",
        low=0,
        why="The score is the relative growth of perplexity; 1e-8 drops a quarter of the n-grams "
        "of a 3-gram model made from some million words.",
    )
    ngrams: int | None = setting(
        None, "N-grams to keep in all orders together, including words.", low=1
    )
    by_order: tuple[int | None, ...] | None = setting(
        None, "N-grams to keep in each order, from 1 up; None keeps all. Words always stay."
    )
    text_bytes: int | None = setting(
        None, "Size of the uncompressed ARPA text.", name="bytes", low=1
    )

    def __post_init__(self) -> None:
        given = (self.threshold, self.ngrams, self.by_order, self.text_bytes)
        if sum(value is not None for value in given) != 1:
            raise ConfigError(
                "give one of --threshold, --ngrams and --bytes (in a configuration: threshold, "
                "ngrams, bytes)"
            )
        check("prune", self)
        for number in self.by_order or ():
            if number is not None and number < 0:
                raise ConfigError(f"--ngrams has the entry {number}; expected 0 or more")

    def facts(self) -> dict[str, float | int | tuple[int | None, ...]]:
        return {k: v for k, v in asdict(self).items() if v is not None}


@dataclass(frozen=True)
class PruneSettings:
    """What to prune: the options of `dlm prune`, of which exactly one of the first three is set."""

    threshold: float | None = like(Goal, "threshold")
    ngrams: str | int | None = setting(
        None,
        "N-grams to keep in total, including words; or per order, with - for no limit: "
        "-,500000,300000.",
        metavar="COUNTS",
    )
    size: str | int | None = setting(
        None,
        "Keep as many n-grams as fit in an uncompressed ARPA file of this size, such as 2G.",
        name="bytes",
        metavar="SIZE",
    )
    keep_suffixes: bool = setting(False, "Also keep the suffixes of kept n-grams.")

    def __post_init__(self) -> None:
        _ = self.goal

    @property
    def goal(self) -> Goal:
        numbers = () if self.ngrams is None else _numbers(str(self.ngrams))
        return Goal(
            threshold=self.threshold,
            text_bytes=None if self.size is None else parse_size(str(self.size)),
            ngrams=numbers[0] if len(numbers) == 1 else None,
            by_order=numbers if len(numbers) > 1 else None,
        )


def _numbers(text: str) -> tuple[int | None, ...]:
    try:
        return tuple(None if n.strip() == "-" else int(n) for n in text.split(","))
    except ValueError as exc:
        raise ConfigError(
            f"--ngrams is {text!r}; expected a number, or one entry per order separated by commas, "
            "each a number or -"
        ) from exc
